"""One thread for one blocking source.

A thread that hangs in a driver or in the kernel cannot be cancelled. So every source that may hang
has a thread of its own, a caller waits only until its deadline, and while an earlier call is still
inside nobody queues behind it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerTimeoutError(TimeoutError):
    """The call did not return before its deadline. It is still inside; its result is dropped."""

    def __init__(self, worker: str, deadline_seconds: float) -> None:
        super().__init__(f"{worker} did not answer within {max(deadline_seconds, 0.0):.3g} s")


class WorkerBusyError(Exception):
    """An earlier call has not returned yet, so this one was not started.

    Attributes:
        since: When that earlier call began (Unix time in seconds).
    """

    def __init__(self, worker: str, since: float, now: float) -> None:
        super().__init__(f"{worker} has been busy with one call for {max(now - since, 0.0):.1f} s")
        self.since = since


@dataclass(slots=True)
class _State:
    """What the thread shares with its worker; it must not keep the worker itself alive."""

    lock: threading.Lock
    busy_since: float | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class WorkerThread:
    """Runs blocking functions one at a time on a thread of its own.

    The thread starts with the first call and ends with close(), with the worker's last reference,
    or with the process, which never waits for it.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.time) -> None:
        self.name = name
        self._clock = clock
        self._state = _State(threading.Lock())
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._started = False
        self._end = weakref.finalize(self, self._jobs.put, None)

    @property
    def busy_since(self) -> float | None:
        """When the call that is inside began (Unix time in seconds); None: nobody is inside."""
        return self._state.busy_since

    async def call(self, function: Callable[..., T], *args: Any, deadline_seconds: float) -> T:
        """Give the function's result, or raise what it raised.

        Raises:
            WorkerTimeoutError: It did not return within deadline_seconds.
            BusyError: An earlier call is still inside.
            RuntimeError: The worker is closed.
        """
        if deadline_seconds <= 0:
            raise WorkerTimeoutError(self.name, deadline_seconds)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._start_job(_Job(lambda: function(*args), loop, future))
        if math.isinf(deadline_seconds):
            return await future
        done, _ = await asyncio.wait((future,), timeout=deadline_seconds)
        if not done:
            future.cancel()
            raise WorkerTimeoutError(self.name, deadline_seconds)
        return future.result()

    def close(self) -> None:
        """Let the thread end once the call inside, if any, has returned; does not wait for it."""
        self._end()

    def _start_job(self, job: _Job) -> None:
        with self._state.lock:
            if not self._end.alive:
                raise RuntimeError(f"worker {self.name} is closed")
            if self._state.busy_since is not None:
                raise WorkerBusyError(self.name, self._state.busy_since, self._clock())
            self._state.busy_since = self._clock()
        if not self._started:
            self._started = True
            threading.Thread(
                target=_run_jobs, args=(self._jobs, self._state), name=self.name, daemon=True
            ).start()
        self._jobs.put(job)


def _run_jobs(jobs: SimpleQueue[_Job | None], state: _State) -> None:
    while (job := jobs.get()) is not None:
        result, error = None, None
        try:
            result = job.run()
        except BaseException as raised:  # noqa: BLE001 - the caller's to judge; the thread lives on
            error = raised
        # Free before the caller hears of it: it may call again at once.
        with state.lock:
            state.busy_since = None
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            job.loop.call_soon_threadsafe(_deliver, job.future, result, error)
        del job, result, error


def _deliver(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):
        future.set_exception(RuntimeError(f"the call raised {error!r}"))
    else:
        future.set_exception(error)
