"""Blocking calls on threads, with deadlines.

A call that hangs in a driver, in the kernel or on a dead file server cannot be cancelled. So each
call has a key, a caller waits for it until a deadline only, and while it hangs no other call with
its key is started and nobody waits for it again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from mps_exporter.sources.host import SourceTimeoutError

T = TypeVar("T")

MAX_IDLE = 16
"""Maximum number of threads that are kept for the next calls."""

MAX_HUNG = 64
MAX_HUNG_PER_USER = 4
"""Maximum number of calls from earlier rounds under way, after which no more are started."""

_Jobs = SimpleQueue[Callable[[], None] | None]
"""What a thread runs next; None: it ends."""

Calls = Mapping[Hashable, tuple[int | None, Callable[[], T]]]
"""Key -> the user whose files the call reads (None: nobody's in particular), and the function."""


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    user: int | None
    began: float
    future: Future[T]

    @property
    def is_users(self) -> bool:
        return self.user not in (None, 0)


class BlockingCalls(Generic[T]):
    """Calls by key, in rounds: start(), wait(), results(). Their threads end with this object."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call[T]] = {}
        self._waited: dict[Hashable, _Call[T]] = {}
        """The calls of this round that are waited for."""
        self._before = set[Hashable]()
        self._idle: list[_Jobs] = []
        weakref.finalize(self, _end_threads, self._idle)
        self.old: frozenset[Hashable] = frozenset()
        """The keys of the last results that belong to calls of an earlier round."""
        self.errors: dict[Hashable, OSError] = {}
        """The errors of the last results, by key."""

    def start(self, calls: Calls[T]) -> None:
        """Begin a round. A key whose call is under way, or has a result, is not called again.

        A user with a hung call is not waited for: other calls of that user may hang, too.
        """
        self._calls = {
            key: call for key, call in self._calls.items() if key in calls or not call.future.done()
        }
        self._before, self._waited = self._calls.keys() & calls.keys(), {}
        hung = Counter(call.user for call in self._calls.values() if not call.future.done())
        users_hung = sum(count for user, count in hung.items() if user not in (None, 0))
        for key, (user, function) in calls.items():
            if key in self._calls:
                continue
            is_users = user not in (None, 0)
            limit = MAX_HUNG_PER_USER if is_users else MAX_HUNG
            if hung[user] >= limit or (is_users and users_hung >= MAX_HUNG):
                continue
            try:
                call = _Call(user, time.monotonic(), _start(function, self._idle))
            except RuntimeError:  # no thread is left (systemd: TasksMax=)
                break
            self._calls[key] = call
            if is_users and hung[user]:
                hung[user] += 1
                users_hung += 1
            else:
                self._waited[key] = call

    def wait(self, seconds: float) -> None:
        """Wait for the calls of this round; those that return later have results in a later one."""
        wait([call.future for call in self._waited.values()], seconds)

    async def wait_async(self, seconds: float, users_seconds: float) -> None:
        """Wait, for calls that concern ordinary users no longer than `users_seconds`."""
        end, calls = time.monotonic() + seconds, self._waited.values()
        for some, limit in (
            (calls, users_seconds),
            ([c for c in calls if not c.is_users], seconds),
        ):
            left = min(limit, end - time.monotonic())
            with _awaitable(call.future for call in some) as futures:
                if futures and left > 0:
                    await asyncio.wait(futures, timeout=left)

    def results(self, keys: Iterable[Hashable]) -> dict[Hashable, T]:
        """Return the results that are there. A call that raised OSError has none.

        Raises:
            Any other error of a call.
        """
        found, self.errors = dict[Hashable, T](), {}
        for key in keys:
            call = self._calls.get(key)
            if call is not None and call.future.done():
                del self._calls[key]
                try:
                    found[key] = call.future.result()
                except OSError as error:
                    self.errors[key] = error
        self.old = frozenset(self._before & found.keys())
        return found

    def is_under_way(self, key: Hashable) -> bool:
        call = self._calls.get(key)
        return call is not None and not call.future.done()

    async def call(
        self, key: str, function: Callable[..., T], *arguments: Any, seconds: float
    ) -> T:
        """Return the result of one call without a round.

        Raises:
            SourceTimeoutError: It did not return in this time, or an earlier one has not returned.
            Any error of the call.
        """
        now, before = time.monotonic(), self._calls.get(key)
        if before is not None and not before.future.done():
            raise SourceTimeoutError(
                f"{key} has been busy with one call for {now - before.began:.1f} s"
            )
        if seconds > 0:
            future = _start(partial(function, *arguments), self._idle)
            self._calls[key] = _Call(None, now, future)
            with _awaitable([future]) as futures:
                await asyncio.wait(futures, timeout=None if math.isinf(seconds) else seconds)
            if future.done():
                return future.result()
        raise SourceTimeoutError(f"{key} did not answer within {max(seconds, 0.0):.3g} s")


@contextmanager
def _awaitable(futures: Iterable[Future[T]]) -> Iterator[list[asyncio.Future[T]]]:
    wrapped = [asyncio.wrap_future(one) for one in futures]
    try:
        yield wrapped
    finally:
        for one in wrapped:
            if one.done() and not one.cancelled():
                one.exception()  # the caller gets it from the call itself
            one.cancel()


def _start(function: Callable[[], T], idle: list[_Jobs]) -> Future[T]:
    """Run a function on a free thread, or on a new one.

    Raises:
        RuntimeError: No thread can be started.
    """
    future = Future[T]()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - the caller's to judge
            outcome = partial(future.set_exception, error)
        else:
            outcome = partial(future.set_result, result)
        if len(idle) < MAX_IDLE:  # before the caller hears of the result: it may call again at once
            idle.append(jobs)
        else:
            jobs.put(None)
        outcome()

    if idle:
        jobs = idle.pop()
    else:
        jobs = SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name="blocking-call", daemon=True).start()
    jobs.put(run)
    return future


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _end_threads(idle: list[_Jobs]) -> None:
    for jobs in idle:
        jobs.put(None)
