"""Follows the logs of all daemons although the file system of one may hang.

Reading from a dead NFS server does not return, for hours. So the logs of each daemon are read on a
thread of their own, and what hangs costs that thread and that daemon only. What comes late is given
with the next poll: those bytes are read, and would not be read again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import LogChunk, LogName, LogsObservation, LogState
from mps_exporter.sources.host import SourceTimeoutError
from mps_exporter.sources.log_reader import LogReader, LogTarget, unread_states
from mps_exporter.sources.worker_thread import WorkerThread

MAX_THREADS = 64
"""More than a host has daemons: eight GPUs of seven MIG instances make 56."""

MAX_LIMITED_THREADS = 16
"""Those for daemons of ordinary users, whose logs may hang for as long as these like."""

LIMITED_SECONDS = 1.0
"""How often the logs of an ordinary user's daemon are looked at while they gain nothing: each look
is a change of threads, and a user may have eight daemons."""

USER_POLL_BYTES = 64 * 1024
LIMITED_POLL_BYTES = 128 * 1024
"""How much one poll reads of all logs of one user, and of all users, but root's and those that were
configured. Five polls a second make 0.33 and 0.66 MB/s, 6 and 13 % of what a core can take in;
daemons write some kB/s."""

MIN_POLL_BYTES = 4096
"""Of each log."""

HUNG_SECONDS = 1.0
"""A poll does not wait for the logs of a daemon whose reading takes so long already."""

PASS_SECONDS = 2.0
"""So long a poll waits at most: logs that hang must not use up the deadline of a scrape."""

UNREADABLE_AFTER_SECONDS = 5.0
"""After so long those logs are no longer called readable."""

_HANGS = "reading it does not return: the file system does not answer"
_NO_THREAD = "the logs of other daemons hang, and no thread is left to read it"


@dataclass(frozen=True, slots=True)
class _Reading:
    """A look at the logs of one daemon, under way or done."""

    since: float
    task: asyncio.Task[LogsObservation | None]
    user: int | None
    """Who has a limit; None: nobody has."""


class LogReaderPool:
    """The logs of many daemons, read by a thread each.

    Args:
        tails: What reads them.
        clock: Monotonic time.
    """

    def __init__(
        self, tails: LogReader | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tails = LogReader() if tails is None else tails
        self._clock = clock
        self._readings: dict[str, _Reading] = {}
        """By pipe directory."""
        self._on_threads: set[str] = set()
        """Those that have a thread."""
        self._free_threads = {
            False: asyncio.Semaphore(MAX_THREADS),
            True: asyncio.Semaphore(MAX_LIMITED_THREADS),
        }
        self._looked_at: dict[str, float] = {}
        """When it was begun last to read the logs of an ordinary user's daemon; not those of which
        more is waiting."""
        self._idle: list[WorkerThread] = []
        self._parts: list[tuple[str, LogsObservation]] = []
        """What was read, by pipe directory, and not given yet."""
        self._transitions = TransitionLogger(logging.getLogger(__name__))

    async def poll(
        self, targets: Sequence[LogTarget], deadline_seconds: float, *, kept: Collection[str] = ()
    ) -> LogsObservation:
        """Give what the logs of these daemons gained; the files of all others are closed.

        (But of those that are kept, given by their pipe directories, the place is remembered.)

        Nothing is said of daemons whose logs are not read at the deadline, and what they gained
        comes with a later call.

        Raises:
            SourceTimeoutError: Nothing at all can be said.
        """
        at, began = self._tails.clock(), self._clock()
        self._take_finished()
        names = {target.pipe_directory for target in targets}
        for gone in self._tails.daemons() - names - set(kept):
            self._start(gone, self._tails.forget, [gone])
        shares = _shares(targets)
        for target in self._due(targets):
            limit = shares.get(target.limited)
            user = target.limited
            self._start(target[0], self._tails.read_daemon, target, at, limit, user=user)
        await self._wait(min(deadline_seconds, PASS_SECONDS))
        self._take_finished()
        parts = [part for pipe, part in self._parts if pipe in names]
        self._parts.clear()
        if any(part.at != at for part in parts) or self._clock() - began >= HUNG_SECONDS:
            at, parts = self._tails.clock(), [_with_idle_chunks(part) for part in parts]
        states = {
            (state.pipe_directory, state.log): state for part in parts for state in part.states
        }
        for target in targets:
            states |= self._check(target, read=(target[0], "control") in states)
        if names & self._readings.keys() and not states:
            waited = min(deadline_seconds, PASS_SECONDS)
            raise SourceTimeoutError(f"the logs were not read within {waited:.3g} s")
        chunks = tuple(chunk for part in parts for chunk in part.chunks)
        return LogsObservation(at=at, chunks=chunks, states=tuple(states.values()))

    async def close(self) -> None:
        """Close all files that are not being read, and end the threads."""
        with suppress(SourceTimeoutError):
            await self.poll((), 1.0)
        tasks = [one.task for one in self._readings.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for worker in self._idle:
            worker.close()

    def _due(self, targets: Sequence[LogTarget]) -> list[LogTarget]:
        """Give those whose logs are read now: of ordinary users some, and all others."""
        now, before = self._clock(), self._looked_at
        limited = {target.pipe_directory for target in targets if target.limited is not None}
        recent = {
            pipe: at
            for pipe, at in before.items()
            if pipe in limited and now - at < LIMITED_SECONDS
        }
        self._looked_at = recent | dict.fromkeys(limited - recent.keys(), now)
        return [target for target in targets if target.pipe_directory not in recent]

    def _start(
        self,
        pipe_directory: str,
        function: Callable[..., LogsObservation | None],
        *arguments: Any,
        user: int | None = None,
    ) -> None:
        """Call it on a thread, unless an earlier call for this daemon has not returned."""
        if pipe_directory not in self._readings:
            work = self._on_thread(pipe_directory, user, partial(function, *arguments))
            task = asyncio.create_task(work)
            self._readings[pipe_directory] = _Reading(self._clock(), task, user)

    async def _on_thread(
        self,
        pipe_directory: str,
        user: int | None,
        function: Callable[[], LogsObservation | None],
    ) -> LogsObservation | None:
        async with self._free_threads[user is not None]:
            worker = self._idle.pop() if self._idle else WorkerThread("logs")
            self._on_threads.add(pipe_directory)
            try:
                return await worker.call(function, deadline_seconds=math.inf)
            finally:
                self._on_threads.remove(pipe_directory)
                if worker.busy_since is None:  # else this was cancelled
                    self._idle.append(worker)

    async def _wait(self, timeout_seconds: float) -> None:
        now = self._clock()
        readings = self._readings.values()
        # Of a user one of whose logs hangs, another may.
        slow = {one.user for one in readings if one.user and now - one.since >= HUNG_SECONDS}
        tasks = [
            one.task for one in readings if now - one.since < HUNG_SECONDS and one.user not in slow
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=max(timeout_seconds, 0.0))

    def _take_finished(self) -> None:
        """Raises what one of them raised."""
        for pipe_directory, reading in list(self._readings.items()):
            if reading.task.done():
                del self._readings[pipe_directory]
                if (part := reading.task.result()) is not None:
                    self._parts.append((pipe_directory, part))
                    if any(chunk.complete_until is None for chunk in part.chunks):
                        self._looked_at.pop(pipe_directory, None)

    def _check(self, target: LogTarget, *, read: bool) -> dict[tuple[str, LogName], LogState]:
        """Give the states of logs whose reading has taken too long; say so once."""
        pipe = target[0]
        reading = self._readings.get(pipe)
        if read:
            self._transitions.recovered(pipe, message="a daemon's logs are read again", daemon=pipe)
        elif reading and self._clock() - reading.since >= UNREADABLE_AFTER_SECONDS:
            message = "reading a daemon's logs does not return"
            self._transitions.failed(pipe, message=message, daemon=pipe, path=target[1])
            why = _HANGS if pipe in self._on_threads else _NO_THREAD
            return {(pipe, state.log): state for state in unread_states(target, why)}
        return {}


def _shares(targets: Sequence[LogTarget]) -> dict[int | None, int]:
    """Give how many bytes of each log of a limited user are read."""
    daemons = Counter(target.limited for target in targets if target.limited is not None)
    share = min(USER_POLL_BYTES, LIMITED_POLL_BYTES // max(1, len(daemons)))
    return {user: max(MIN_POLL_BYTES, share // (2 * count)) for user, count in daemons.items()}


def _with_idle_chunks(part: LogsObservation) -> LogsObservation:
    """Say of each log that gained nothing when that was so.

    (In an observation of a later moment its silence would be taken for that moment's.)
    """
    busy = {(chunk.pipe_directory, chunk.log) for chunk in part.chunks}
    quiet = [
        LogChunk(part.at, state.pipe_directory, state.log, complete_until=part.at)
        for state in part.states
        if state.readable and (state.pipe_directory, state.log) not in busy
    ]
    return LogsObservation(at=part.at, chunks=(*part.chunks, *quiet), states=part.states)
