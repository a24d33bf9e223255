"""Asks several things that may hang at once, each on a thread of its own.

Looking at a directory on a dead file server does not return, for hours. What hangs costs its own
answer: the others are waited for together, and nobody waits again for one that hangs.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

WAIT_SECONDS = 0.5
"""So long all questions of one call are waited for, together."""

MAX_IDLE = 4
"""So many threads are kept for the next questions: starting one costs more than most questions."""

MAX_HUNG = 64
MAX_HUNG_PER_USER = 4
"""A user who has so many questions under way that hang is asked no more of them."""


_Jobs = SimpleQueue[tuple[Callable[[], None], threading.Event] | None]
"""What a thread has to run, and what to set then; None: it ends."""


@dataclass(slots=True)
class _Question(Generic[T]):
    user: int | None
    done: threading.Event = field(default_factory=threading.Event)
    answers: list[T] = field(default_factory=list)
    error: BaseException | None = None


class ThreadedCalls(Generic[T]):
    """Questions by name. A name that hangs is not asked again until it has returned."""

    def __init__(self, wait_seconds: float = WAIT_SECONDS) -> None:
        self._wait_seconds = wait_seconds
        self._asked: dict[Hashable, _Question[T]] = {}
        self._before, self._late = set[Hashable](), set[Hashable]()
        """Of the questions that were started last: those under way already, and those that are not
        waited for."""
        self._idle: list[_Jobs] = []
        """Threads that are free, by what they wait for."""
        weakref.finalize(self, _end, self._idle)
        self.old: frozenset[Hashable] = frozenset()
        """Of the last answers those whose question was put in an earlier call: what they say was so
        then."""
        self.errors: dict[Hashable, OSError] = {}
        """What the last questions without an answer raised."""

    def start(self, questions: Mapping[Hashable, tuple[int | None, Callable[[], T]]]) -> None:
        """Ask these questions; answers() is to be called next.

        Args:
            questions: (whose files it looks at; None: nobody's in particular, and what to call).
        """
        self._before = self._asked.keys() & questions.keys()
        self._late = self._start_all(questions)

    def answers(self, questions: Iterable[Hashable]) -> dict[Hashable, T]:
        """Give the answers that come in time, by the question's name.

        One that raised OSError has no answer: neither what it looked at nor that it is not there.

        Args:
            questions: The names of those that were started.

        Raises:
            Whatever else one of them raised.
        """
        end = time.monotonic() + self._wait_seconds
        for name, one in self._asked.items():
            if name not in self._late:
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
        self.old = frozenset(self._before & answers.keys())
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
        for name, (user, function) in questions.items():
            if name in self._asked:
                continue  # under way, or done after the last call
            limit = MAX_HUNG if user in (None, 0) else MAX_HUNG_PER_USER
            others = sum(count for other, count in hung.items() if other not in (None, 0))
            if hung[user] >= limit or (user not in (None, 0) and others >= MAX_HUNG):
                continue
            if hung[user] and user not in (None, 0):
                late.add(name)  # it may hang as well: its answer is for the next call
                hung[user] += 1
            try:
                self._asked[name] = _start(user, function, self._idle)
            except RuntimeError:  # no thread is left (systemd: TasksMax=); those before come first
                break
        return late


def _start(user: int | None, function: Callable[[], T], idle: list[_Jobs]) -> _Question[T]:
    question = _Question[T](user)

    def run() -> None:
        try:
            question.answers.append(function())
        except BaseException as error:  # noqa: BLE001 - the caller's to judge
            question.error = error

    if idle:
        jobs = idle.pop()
    else:
        jobs = SimpleQueue()
        arguments = (jobs, idle)
        threading.Thread(target=_work, args=arguments, name="threaded-call", daemon=True).start()
    jobs.put((run, question.done))
    return question


def _work(jobs: _Jobs, idle: list[_Jobs]) -> None:
    while (job := jobs.get()) is not None:
        run, done = job
        run()
        # Free before the caller hears of it: it may ask again at once.
        kept = len(idle) < MAX_IDLE
        if kept:
            idle.append(jobs)
        done.set()
        if not kept:
            return
        del job, run, done


def _end(idle: list[_Jobs]) -> None:
    for jobs in idle:
        jobs.put(None)
