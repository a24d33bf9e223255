"""Blocking calls on threads, with deadlines.

A call that hangs in a driver, in the kernel or on a dead file server cannot be cancelled. So each
call has a key, and a caller waits for it until a deadline only. While it hangs, no other call with
its key is started, and no later round waits for it.
"""

import asyncio
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.sources import SourceTimeoutError

T = TypeVar("T")
R = TypeVar("R")

Calls = Mapping[Hashable, tuple[Hashable | None, Callable[[], T]]]
"""Key -> the ordinary user whose files the call reads (None: root, or no user), and the function.
"""


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    user: Hashable | None
    began: float
    future: Future[T]


class BlockingCalls(Generic[T]):
    """Calls by key, in rounds: start(), wait(), results()."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call[Any]] = {}
        self._waited: dict[Hashable, _Call[Any]] = {}  # Calls that this round waits for.
        self._before = set[Hashable]()
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.old: frozenset[Hashable] = frozenset()
        """The keys of the last results that belong to calls of an earlier round."""
        self.errors: dict[Hashable, OSError] = {}  # The errors of the last results, by key.

    def start(self, calls: Calls[T]) -> None:
        """Begin a round. A key with a running call or an unread result is not called again.

        Calls over a limit do not start. Ordinary users with a hung call are not waited for.
        """
        self._calls = {
            key: call for key, call in self._calls.items() if key in calls or not call.future.done()
        }
        self._before, self._waited = self._calls.keys() & calls.keys(), {}
        hung = Counter(call.user for call in self._calls.values() if not call.future.done())
        users_hung = hung.total() - hung[None]
        running: list[_Call[T]] = []
        for key, (user, function) in calls.items():
            limited = user is not None
            limit = policy.MAX_HUNG_CALLS_PER_USER if limited else policy.MAX_HUNG_CALLS
            users_full = limited and users_hung >= policy.MAX_HUNG_CALLS
            if key in self._calls or hung[user] >= limit or users_full:
                continue
            if limited and len(running) >= policy.MAX_USERS_CALLS:
                running = [one for one in running if not one.future.done()]
                if len(running) >= policy.MAX_USERS_CALLS:
                    continue
            try:
                call = _Call(user, time.monotonic(), _on_thread(function))
            except RuntimeError:  # no thread is left (systemd: TasksMax=)
                break
            self._calls[key] = call
            if limited:
                running.append(call)
            if limited and hung[user]:
                hung[user] += 1
                users_hung += 1
            else:
                self._waited[key] = call

    def wait(self, seconds: float, users_seconds: float = math.inf) -> None:
        """Wait for the calls of this round; for ordinary users' calls only `users_seconds`."""
        end, calls = time.monotonic() + seconds, self._waited.values()
        wait([call.future for call in calls], min(seconds, users_seconds))
        left = max(0.0, end - time.monotonic())
        wait([call.future for call in calls if call.user is None], left)

    async def wait_async(self, seconds: float, users_seconds: float) -> None:
        """Like wait(), in the event loop."""
        end, calls = time.monotonic() + seconds, self._waited.values()
        await _wait_for((call.future for call in calls), min(seconds, users_seconds))
        await _wait_for(
            (call.future for call in calls if call.user is None), end - time.monotonic()
        )

    def results(self, keys: Iterable[Hashable]) -> dict[Hashable, T]:
        """Return the available results. A call that raised OSError has none.

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

    async def call(
        self, key: str, function: Callable[..., R], *arguments: Any, seconds: float
    ) -> R:
        """Return the result of one call without a round. Calls with one key are serialized.

        Raises:
            SourceTimeoutError: If the call does not return in time, or an earlier call has not.
            Any error of the call.
        """
        end, lock = time.monotonic() + seconds, self._locks[key]
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                await lock.acquire()
        except TimeoutError:
            raise SourceTimeoutError(f"{key} is busy with another question") from None
        try:
            now, before = time.monotonic(), self._calls.get(key)
            if before is not None and not before.future.done():
                raise SourceTimeoutError(
                    f"{key} has been busy with one call for {now - before.began:.1f} s"
                )
            if end > now:
                future = _on_thread(partial(function, *arguments))
                self._calls[key] = _Call(None, now, future)
                await _wait_for([future], end - now)
                if future.done():
                    return future.result()
            raise SourceTimeoutError(f"{key} did not answer within {max(seconds, 0.0):.3g} s")
        finally:
            lock.release()


_Work = Callable[[], Callable[[], None]]  # Calls the function; returns what settles its future.

_idle: list[SimpleQueue[_Work]] = []  # The queue of each thread that waits for work.


def _on_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function on a thread for which the end of the program does not wait.

    Raises:
        RuntimeError: No thread can be started.
    """
    future = Future[T]()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def work() -> Callable[[], None]:
        try:
            return partial(future.set_result, function())
        except BaseException as error:  # noqa: BLE001 - for the caller
            return partial(future.set_exception, error)

    try:
        work_queue = _idle.pop()
    except IndexError:
        work_queue = SimpleQueue()
        name = "blocking-call"
        threading.Thread(target=_work, args=(work_queue,), name=name, daemon=True).start()
    work_queue.put(work)
    return future


def _work(work_queue: SimpleQueue[_Work]) -> None:
    """Run the work of a queue, until enough other threads are idle."""
    idle = True
    while idle:
        settle = work_queue.get()()
        if idle := len(_idle) < policy.MAX_IDLE_THREADS:
            _idle.append(work_queue)  # before the caller continues: it may have more work
        settle()


async def _wait_for(futures: Iterable[Future[T]], seconds: float) -> None:
    pending = [asyncio.wrap_future(one) for one in futures if not one.done()]
    if not pending or seconds <= 0:
        return
    try:
        await asyncio.wait(pending, timeout=None if math.isinf(seconds) else seconds)
    finally:
        for one in pending:
            if one.done() and not one.cancelled():
                one.exception()  # or asyncio logs it as unread
            one.cancel()
