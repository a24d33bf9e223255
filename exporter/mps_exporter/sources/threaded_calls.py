"""Asks several things that may hang, and waits for none that does.

Looking at a directory on a dead file server does not return, for hours. What hangs costs its own
answer: the others are waited for together, and nobody waits again for one that hangs. One thread
asks all of them in turn, because to start a thread takes longer than to look at a directory (0.5 ms
or more on a busy host); once one of them takes long, each of the rest gets a thread of its own.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

WAIT_SECONDS = 0.5
"""So long all questions of one call are waited for, together."""

TURN_SECONDS = 0.02
"""So long one thread asks all of them; then each that is left gets its own."""

MAX_HUNG = 64
MAX_HUNG_PER_USER = 4
"""A user who has so many questions under way that hang is asked no more of them."""


@dataclass(slots=True)
class _Question(Generic[T]):
    user: int | None
    function: Callable[[], T]
    done: threading.Event = field(default_factory=threading.Event)
    answers: list[T] = field(default_factory=list)
    error: BaseException | None = None

    def ask(self) -> None:
        try:
            self.answers.append(self.function())
        except BaseException as error:  # noqa: BLE001 - the caller's to judge
            self.error = error
        self.done.set()


_Batch = deque[_Question[T]]


class ThreadedCalls(Generic[T]):
    """Questions by name. A name that hangs is not asked again until it has returned."""

    def __init__(self, wait_seconds: float = WAIT_SECONDS) -> None:
        self._wait_seconds = wait_seconds
        self._asked: dict[Hashable, _Question[T]] = {}
        self._batches: SimpleQueue[_Batch[T] | None] | None = None
        """What the thread is to ask that asks all of them; None: there is none."""
        self._given: list[_Question[T]] = []
        """What it was to ask last."""
        self._end: Callable[[], object] = lambda: None
        """Ends it."""
        self.old: frozenset[Hashable] = frozenset()
        """Of the last answers those whose question was put in an earlier call: what they say was so
        then."""
        self.errors: dict[Hashable, OSError] = {}
        """What the last questions without an answer raised."""

    def ask(
        self, questions: Mapping[Hashable, tuple[int | None, Callable[[], T]]]
    ) -> dict[Hashable, T]:
        """Give the answers that came in time, by the question's name.

        One that raised OSError has no answer: neither what it looked at nor that it is not there.

        Args:
            questions: (whose files it looks at; None: nobody's in particular, and what to call).

        Raises:
            Whatever else one of them raised.
        """
        before = self._asked.keys() & questions.keys()
        late = self._start_all(questions)
        end = time.monotonic() + self._wait_seconds
        for name, one in self._asked.items():
            if name not in late:
                one.done.wait(max(0.0, end - time.monotonic()))
        answers, self.errors = dict[Hashable, T](), {}
        for name in questions:
            found = self._asked.get(name)
            if found is not None and found.done.is_set():
                del self._asked[name]
                if found.error is None:
                    answers[name] = found.answers[0]
                elif isinstance(found.error, OSError):
                    self.errors[name] = found.error
                else:
                    raise found.error
        self.old = frozenset(before & answers.keys())
        return answers

    def _start_all(
        self, questions: Mapping[Hashable, tuple[int | None, Callable[[], T]]]
    ) -> set[Hashable]:
        """Start those that are not under way; gives those that are not waited for."""
        self._asked = {
            name: one
            for name, one in self._asked.items()
            if name in questions or not one.done.is_set()
        }
        hung = Counter(one.user for one in self._asked.values() if not one.done.is_set())
        late = {name for name, one in self._asked.items() if not one.done.is_set()}
        first, rest = _Batch[T](), _Batch[T]()
        for name, (user, function) in questions.items():
            if name in self._asked:
                continue  # under way, or done after the last call
            limit = MAX_HUNG if user in (None, 0) else MAX_HUNG_PER_USER
            others = sum(count for other, count in hung.items() if other not in (None, 0))
            if hung[user] >= limit or (user not in (None, 0) and others >= MAX_HUNG):
                continue
            question = self._asked[name] = _Question(user, function)
            if hung[user] and user not in (None, 0):
                late.add(name)  # it may hang as well: its answer is for the next call
                hung[user] += 1
                rest.append(question)
            else:
                first.append(question)
        try:
            self._ask_in_turn(first)
            first += rest
            while first:
                _ask_on_a_thread(first)
        except RuntimeError:  # no thread is left (systemd: TasksMax=); those before come first
            unasked = {id(one) for one in (*first, *rest)}
            self._asked = {name: one for name, one in self._asked.items() if id(one) not in unasked}
        return late

    def _ask_in_turn(self, batch: _Batch[T]) -> None:
        """Have one thread ask these; takes out of the batch what is asked within TURN_SECONDS.

        Raises:
            RuntimeError: No thread is left.
        """
        if not batch:
            return
        given = list(batch)
        if self._batches is None or not all(one.done.is_set() for one in self._given):
            self._end()  # that thread hangs: it ends when it returns
            self._batches = SimpleQueue[_Batch[T] | None]()
            thread = threading.Thread(
                target=_ask_batches, args=(self._batches,), name="calls", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                self._batches = None
                raise
            self._end = weakref.finalize(self, self._batches.put, None)
        self._given = given
        self._batches.put(batch)
        end = time.monotonic() + min(TURN_SECONDS, self._wait_seconds)
        for one in given:
            one.done.wait(max(0.0, end - time.monotonic()))


def _ask_batches(batches: SimpleQueue[_Batch[T] | None]) -> None:
    while (batch := batches.get()) is not None:
        while batch:
            with suppress(IndexError):  # another thread was quicker
                batch.popleft().ask()
        del batch


def _ask_on_a_thread(batch: _Batch[T]) -> None:
    """Start a thread for the first one in the batch; RuntimeError: none is left."""
    with suppress(IndexError):
        one = batch.popleft()
        try:
            threading.Thread(target=one.ask, name="call", daemon=True).start()
        except RuntimeError:
            batch.appendleft(one)
            raise
