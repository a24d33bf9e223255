"""Follows the logs of all daemons although the file system of one may hang.

Reading from a dead NFS server does not return, for hours. So one thread looks at the logs of all
daemons in turn; when it does not come back in time, it is left to the daemon whose logs it is
inside, and the others' are looked at by the next thread. There are four; a daemon whose logs lie on
a file system that hangs is not tried again with a second one.

What such a thread brings when it comes back late is handed out with the next poll: those bytes are
read, and nobody would read them again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import LogChunk, LogsObservation, LogState
from mps_exporter.sources.host import SourceTimeoutError
from mps_exporter.sources.log_reader import LogReader, LogTarget, unread_states
from mps_exporter.sources.worker_thread import WorkerThread, WorkerTimeoutError

MAX_READERS = 4
HUNG_SECONDS = 1.0
"""Who is inside the logs of one daemon for so long may never come back."""

PASS_SECONDS = 2.0
"""So long a poll waits at most: logs that hang must not use up the deadline of a scrape."""

UNREADABLE_AFTER_SECONDS = 5.0
"""After so long those logs are no longer called readable."""

_RECHECK_SECONDS = 0.005
_HANGS = "reading it does not return: the file system does not answer"


@dataclass(eq=False, slots=True)
class _Pass:
    """One look at the logs of some daemons."""

    at: float
    started: float
    targets: list[LogTarget]
    gone: list[str]
    abandoned: bool = False
    """Nobody waits for it any more: who runs it goes on to no further daemon."""


class LogReaderPool:
    """The logs of many daemons, read by a few threads.

    Args:
        tails: What reads them.
        clock: Monotonic time.
    """

    def __init__(
        self, tails: LogReader | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tails = LogReader() if tails is None else tails
        self._clock = clock
        self._threads = [WorkerThread(f"logs-{number}") for number in range(MAX_READERS)]
        self._lock = threading.Lock()
        self._reading_since: dict[str, float] = {}
        """Daemons whose logs somebody is inside, and since when."""
        self._results: list[tuple[_Pass, str, LogsObservation]] = []
        self._last_read_at: dict[str, float] = {}
        """Daemons, and when their logs were last read (Unix time)."""
        self._transitions = TransitionLogger(logging.getLogger(__name__))

    async def poll(
        self, targets: Sequence[LogTarget], deadline_seconds: float, *, kept: Collection[str] = ()
    ) -> LogsObservation:
        """Give what the logs of these daemons gained; those of all others are let go of.

        (But of those that are kept, given by their pipe directories, the place is remembered.)

        Of daemons whose logs are not through at the deadline nothing is said, and what they gained
        comes with a later call.

        Raises:
            SourceTimeoutError: Nothing at all can be said.
        """
        end = self._clock() + deadline_seconds
        await self._wait_for_slow(min(deadline_seconds / 2, HUNG_SECONDS))
        skipped = self._skipped(targets)
        names = {pipe_directory for pipe_directory, _, _ in targets}
        chosen = [target for target in targets if target[0] not in skipped]
        chosen.sort(key=self._priority)
        gone = self._tails.daemons() - names - set(kept)
        pass_ = _Pass(self._tails.clock(), self._clock(), chosen, sorted(gone))
        thread = next((thread for thread in self._threads if thread.busy_since is None), None)
        if thread is not None:
            try:
                with suppress(WorkerTimeoutError):
                    left = min(end - self._clock(), PASS_SECONDS)
                    await thread.call(self._run, pass_, deadline_seconds=left)
            finally:
                with self._lock:
                    pass_.abandoned = True
        found = self._collect_results(pass_, targets, skipped)
        if targets and not found.states:
            waited = min(deadline_seconds, PASS_SECONDS)
            raise SourceTimeoutError(f"the logs were not read within {waited:.3g} s")
        return found

    async def close(self) -> None:
        """Let go of all files that nobody is inside, and of the threads."""
        with suppress(SourceTimeoutError):
            await self.poll((), 1.0)
        for thread in self._threads:
            thread.close()

    # ------------------------------------------------------------------ who is where

    async def _wait_for_slow(self, timeout_seconds: float) -> None:
        """Wait a moment for those who are only late."""
        end = self._clock() + timeout_seconds
        while (now := self._clock()) < end:
            with self._lock:
                late = [
                    since for since in self._reading_since.values() if now - since < HUNG_SECONDS
                ]
            if not late:
                return
            await asyncio.sleep(_RECHECK_SECONDS)

    def _skipped(self, targets: Sequence[LogTarget]) -> dict[str, float]:
        """Give the daemons whose logs must not be looked at now, and since when."""
        with self._lock:
            inside = dict(self._reading_since)
        hung = {pipe: since for pipe, since in inside.items() if self._is_hung(since)}
        devices = {device: since for pipe, since in hung.items() for device in self._devices(pipe)}
        free = sum(thread.busy_since is None for thread in self._threads)
        skipped = {}
        for pipe, _, _ in targets:
            own = self._devices(pipe)
            shared = own & devices.keys()
            if pipe in inside:
                skipped[pipe] = inside[pipe]
            elif shared:
                skipped[pipe] = min(devices[device] for device in shared)
            elif hung and (not free or (free == 1 and not own)):
                # The last thread is for logs that could be read before.
                skipped[pipe] = min(hung.values())
        return skipped

    def _priority(self, target: LogTarget) -> tuple[bool, float]:
        """Logs that could be read before come first, and of these who has waited longest."""
        pipe = target[0]
        return not self._devices(pipe), self._last_read_at.get(pipe, 0.0)

    def _devices(self, pipe_directory: str) -> set[int]:
        return self._tails.devices(pipe_directory)

    def _is_hung(self, since: float) -> bool:
        return self._clock() - since >= HUNG_SECONDS

    # ------------------------------------------------------------------ on a thread

    def _run(self, pass_: _Pass) -> None:
        for pipe_directory in pass_.gone:
            with self._lock_daemon(pass_, pipe_directory) as locked:
                if locked:
                    self._tails.forget([pipe_directory])
        for target in pass_.targets:
            with self._lock_daemon(pass_, target[0]) as locked:
                if locked:
                    part = self._tails.read_daemon(target, pass_.at)
                    with self._lock:
                        self._results.append((pass_, target[0], part))

    @contextmanager
    def _lock_daemon(self, pass_: _Pass, pipe_directory: str) -> Iterator[bool]:
        """Be the only one who is inside the logs of a daemon; gives whether one is."""
        with self._lock:
            locked = not pass_.abandoned and pipe_directory not in self._reading_since
            if locked:
                self._reading_since[pipe_directory] = self._clock()
        try:
            yield locked
        finally:
            if locked:
                with self._lock:
                    del self._reading_since[pipe_directory]

    # ------------------------------------------------------------------ what they brought

    def _collect_results(
        self, pass_: _Pass, targets: Sequence[LogTarget], skipped: dict[str, float]
    ) -> LogsObservation:
        names = {target[0] for target in targets}
        with self._lock:
            parts, self._results = self._results, []
        parts = [one for one in parts if one[1] in names]
        prompt = self._clock() - pass_.started < HUNG_SECONDS
        at = pass_.at
        if not prompt or any(one[0] is not pass_ for one in parts):
            at = self._tails.clock()
            parts = [(made_by, pipe, _with_idle_chunks(part)) for made_by, pipe, part in parts]
        states = {
            (state.pipe_directory, state.log): state
            for _, _, part in parts
            for state in part.states
        }
        last_read_at = {pipe: part.at for _, pipe, part in parts}
        self._last_read_at = {
            pipe: at for pipe, at in self._last_read_at.items() if pipe in names
        } | last_read_at
        for target in targets:
            pipe = target[0]
            if pipe in last_read_at:
                self._transitions.recovered(
                    pipe, message="a daemon's logs are read again", daemon=pipe
                )
            elif self._clock() - skipped.get(pipe, float("inf")) >= UNREADABLE_AFTER_SECONDS:
                message = "reading a daemon's logs does not return"
                self._transitions.failed(pipe, message=message, daemon=pipe, path=target[1])
                states |= {(pipe, state.log): state for state in unread_states(target, _HANGS)}
        chunks = tuple(chunk for _, _, part in parts for chunk in part.chunks)
        return LogsObservation(at=at, chunks=chunks, states=tuple(states.values()))


def _with_idle_chunks(part: LogsObservation) -> LogsObservation:
    """Say of each log that gained nothing when that was so.

    (In an observation of a later moment its silence would be taken for that moment's.)
    """
    busy = {(chunk.pipe_directory, chunk.log) for chunk in part.chunks}
    quiet = [
        _idle_chunk(state, part.at)
        for state in part.states
        if state.readable and (state.pipe_directory, state.log) not in busy
    ]
    return LogsObservation(at=part.at, chunks=(*part.chunks, *quiet), states=part.states)


def _idle_chunk(state: LogState, at: float) -> LogChunk:
    return LogChunk(at, state.pipe_directory, state.log, complete_until=at)
