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

from exporter.logfmt import Complaints
from exporter.observations import LogChunk, LogsObservation, LogState
from exporter.sources.host import SourceTimeoutError
from exporter.sources.mps_logs import LogTails, Target, unread
from exporter.sources.worker import Worker, WorkerTimeoutError

LANES = 4
HUNG_SECONDS = 1.0
"""Who is inside the logs of one daemon for so long may never come back."""

ROUND_SECONDS = 2.0
"""So long a poll waits at most: logs that hang must not use up the deadline of a scrape."""

SAID_SECONDS = 5.0
"""After so long those logs are no longer called readable."""

_GLANCE_SECONDS = 0.005
_HANGS = "reading it does not return: the file system does not answer"


@dataclass(eq=False, slots=True)
class _Round:
    """One look at the logs of some daemons."""

    at: float
    started: float
    targets: list[Target]
    gone: list[str]
    over: bool = False
    """Nobody waits for it any more: who runs it goes on to no further daemon."""


class LogLanes:
    """The logs of many daemons, read by a few threads.

    Args:
        tails: What reads them.
        clock: Monotonic time.
    """

    def __init__(
        self, tails: LogTails | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tails = LogTails() if tails is None else tails
        self._clock = clock
        self._lanes = [Worker(f"logs-{number}") for number in range(LANES)]
        self._lock = threading.Lock()
        self._inside: dict[str, float] = {}
        """Daemons whose logs somebody is inside, and since when."""
        self._parts: list[tuple[_Round, str, LogsObservation]] = []
        self._heard: dict[str, float] = {}
        """Daemons, and when their logs were last read (Unix time)."""
        self._complaints = Complaints(logging.getLogger(__name__))

    async def poll(
        self, targets: Sequence[Target], deadline_seconds: float, *, kept: Collection[str] = ()
    ) -> LogsObservation:
        """Give what the logs of these daemons gained; those of all others are let go of.

        (But of those that are kept, given by their pipe directories, the place is remembered.)

        Of daemons whose logs are not through at the deadline nothing is said, and what they gained
        comes with a later call.

        Raises:
            SourceTimeoutError: Nothing at all can be said.
        """
        end = self._clock() + deadline_seconds
        await self._stragglers(min(deadline_seconds / 2, HUNG_SECONDS))
        left_out = self._left_out(targets)
        names = {pipe_directory for pipe_directory, _, _ in targets}
        chosen = [target for target in targets if target[0] not in left_out]
        chosen.sort(key=self._urgency)
        gone = self._tails.followed() - names - set(kept)
        round_ = _Round(self._tails.clock(), self._clock(), chosen, sorted(gone))
        lane = next((lane for lane in self._lanes if lane.busy_since is None), None)
        if lane is not None:
            try:
                with suppress(WorkerTimeoutError):
                    left = min(end - self._clock(), ROUND_SECONDS)
                    await lane.call(self._run, round_, deadline_seconds=left)
            finally:
                with self._lock:
                    round_.over = True
        found = self._collected(round_, targets, left_out)
        if targets and not found.states:
            waited = min(deadline_seconds, ROUND_SECONDS)
            raise SourceTimeoutError(f"the logs were not read within {waited:.3g} s")
        return found

    async def close(self) -> None:
        """Let go of all files that nobody is inside, and of the threads."""
        with suppress(SourceTimeoutError):
            await self.poll((), 1.0)
        for lane in self._lanes:
            lane.close()

    # ------------------------------------------------------------------ who is where

    async def _stragglers(self, patience_seconds: float) -> None:
        """Wait a moment for those who are only late."""
        end = self._clock() + patience_seconds
        while (now := self._clock()) < end:
            with self._lock:
                late = [since for since in self._inside.values() if now - since < HUNG_SECONDS]
            if not late:
                return
            await asyncio.sleep(_GLANCE_SECONDS)

    def _left_out(self, targets: Sequence[Target]) -> dict[str, float]:
        """Give the daemons whose logs must not be looked at now, and since when."""
        with self._lock:
            inside = dict(self._inside)
        hung = {pipe: since for pipe, since in inside.items() if self._is_hung(since)}
        devices = {device: since for pipe, since in hung.items() for device in self._devices(pipe)}
        free = sum(lane.busy_since is None for lane in self._lanes)
        left_out = {}
        for pipe, _, _ in targets:
            own = self._devices(pipe)
            shared = own & devices.keys()
            if pipe in inside:
                left_out[pipe] = inside[pipe]
            elif shared:
                left_out[pipe] = min(devices[device] for device in shared)
            elif hung and (not free or (free == 1 and not own)):
                # The last thread is for logs that could be read before.
                left_out[pipe] = min(hung.values())
        return left_out

    def _urgency(self, target: Target) -> tuple[bool, float]:
        """Logs that could be read before come first, and of these who has waited longest."""
        pipe = target[0]
        return not self._devices(pipe), self._heard.get(pipe, 0.0)

    def _devices(self, pipe_directory: str) -> set[int]:
        return self._tails.devices(pipe_directory)

    def _is_hung(self, since: float) -> bool:
        return self._clock() - since >= HUNG_SECONDS

    # ------------------------------------------------------------------ on a thread

    def _run(self, round_: _Round) -> None:
        for pipe_directory in round_.gone:
            with self._claimed(round_, pipe_directory) as mine:
                if mine:
                    self._tails.forget([pipe_directory])
        for target in round_.targets:
            with self._claimed(round_, target[0]) as mine:
                if mine:
                    part = self._tails.follow(target, round_.at)
                    with self._lock:
                        self._parts.append((round_, target[0], part))

    @contextmanager
    def _claimed(self, round_: _Round, pipe_directory: str) -> Iterator[bool]:
        """Be the only one who is inside the logs of a daemon; gives whether one is."""
        with self._lock:
            mine = not round_.over and pipe_directory not in self._inside
            if mine:
                self._inside[pipe_directory] = self._clock()
        try:
            yield mine
        finally:
            if mine:
                with self._lock:
                    del self._inside[pipe_directory]

    # ------------------------------------------------------------------ what they brought

    def _collected(
        self, round_: _Round, targets: Sequence[Target], left_out: dict[str, float]
    ) -> LogsObservation:
        names = {target[0] for target in targets}
        with self._lock:
            parts, self._parts = self._parts, []
        parts = [one for one in parts if one[1] in names]
        prompt = self._clock() - round_.started < HUNG_SECONDS
        at = round_.at
        if not prompt or any(one[0] is not round_ for one in parts):
            at = self._tails.clock()
            parts = [(made_by, pipe, _dated(part)) for made_by, pipe, part in parts]
        states = {
            (state.pipe_directory, state.log): state
            for _, _, part in parts
            for state in part.states
        }
        heard = {pipe: part.at for _, pipe, part in parts}
        self._heard = {pipe: at for pipe, at in self._heard.items() if pipe in names} | heard
        for target in targets:
            pipe = target[0]
            if pipe in heard:
                self._complaints.fine(pipe, message="a daemon's logs are read again", daemon=pipe)
            elif self._clock() - left_out.get(pipe, float("inf")) >= SAID_SECONDS:
                message = "reading a daemon's logs does not return"
                self._complaints.failing(pipe, message=message, daemon=pipe, path=target[1])
                states |= {(pipe, state.log): state for state in unread(target, _HANGS)}
        chunks = tuple(chunk for _, _, part in parts for chunk in part.chunks)
        return LogsObservation(at=at, chunks=chunks, states=tuple(states.values()))


def _dated(part: LogsObservation) -> LogsObservation:
    """Say of each log that gained nothing when that was so.

    (In an observation of a later moment its silence would be taken for that moment's.)
    """
    busy = {(chunk.pipe_directory, chunk.log) for chunk in part.chunks}
    quiet = [
        _nothing_new(state, part.at)
        for state in part.states
        if state.readable and (state.pipe_directory, state.log) not in busy
    ]
    return LogsObservation(at=part.at, chunks=(*part.chunks, *quiet), states=part.states)


def _nothing_new(state: LogState, at: float) -> LogChunk:
    return LogChunk(at, state.pipe_directory, state.log, complete_until=at)
