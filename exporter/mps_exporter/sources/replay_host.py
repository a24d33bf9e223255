"""A recorded host, answering as the real one did at the same moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    KernelObservation,
    LogsObservation,
    NvmlObservation,
    ProcfsObservation,
)
from mps_exporter.sources.host import SourceError
from mps_exporter.sources.recording import Recording, RecordingCursor, control_stream


class ReplayHost:
    """Host over a recording. Its time is the recording's, at the chosen speed."""

    def __init__(
        self, recording: Recording, *, speed: float = 1.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._cursor = RecordingCursor(recording)
        self._speed = speed
        self._clock = clock
        self._started_at = clock()
        self._held: float | None = None
        self._looked_at = recording.header.started_at
        self._kernel_read_until = float("-inf")
        self._kernel: KernelObservation | None = None

    def now(self) -> float:
        """The recording's time; it stands still at the end, and while it is held."""
        recording = self._cursor.recording
        elapsed = self._held
        if elapsed is None:
            elapsed = (self._clock() - self._started_at) * self._speed
        return min(recording.header.started_at + elapsed, recording.ended_at)

    def hold(self, elapsed: float) -> None:
        """Stand still so many seconds after the recording's start."""
        self._held = elapsed

    def play(self) -> None:
        """Go on from where it is held."""
        if self._held is not None:
            self._started_at = self._clock() - self._held / self._speed
            self._held = None

    @property
    def played_from(self) -> float:
        """The viewer's time of the recording's start; of one that is held, were it played now."""
        if self._held is not None:
            return self._clock() - self._held / self._speed
        return self._started_at

    def wall(self, moment: float) -> float:
        """The viewer's time of a moment of the recording."""
        return self.played_from + (moment - self._cursor.recording.header.started_at) / self._speed

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        return self._processes().daemons

    def forget(self, present: Collection[str]) -> None:
        """A recording remembers everything."""

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        """Processes that were there, of those that were asked for then."""
        return self._processes()

    async def ended(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        if not watched:
            return ()
        found = self._cursor.between("procfs", self._looked_at, self.now())
        self._looked_at = max(self._looked_at, self.now())
        return [one for one in found if isinstance(one, ProcfsObservation)]

    def _processes(self) -> ProcfsObservation:
        found = self._cursor.latest("procfs", self.now())
        if isinstance(found, ProcfsObservation):
            self._looked_at = max(self._looked_at, found.at)  # what is older is no news
            return found
        # A recorder's first look at /proc comes a moment after its start.
        return ProcfsObservation(at=self.now())

    async def probe(
        self, daemon: DaemonFacts, deadline_seconds: float, since: float = 0.0
    ) -> ControlObservation:
        return self._control(daemon, "probe")

    async def reconcile(
        self, daemon: DaemonFacts, servers: Sequence[int], deadline_seconds: float
    ) -> ControlObservation:
        return self._control(daemon, "reconciliation")

    def _control(
        self, daemon: DaemonFacts, question: Literal["probe", "reconciliation"]
    ) -> ControlObservation:
        name = daemon.pipe_directory
        found = self._cursor.latest(control_stream(name, question), self.now())
        if isinstance(found, ControlObservation):
            return found
        raise SourceError(f"the recording holds no answer of {name} yet")

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        return self._cursor.logs(self.now(), {daemon.pipe_directory for daemon in daemons})

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        now = self.now()
        found = self._cursor.between("kernel", self._kernel_read_until, now)
        self._kernel_read_until = max(self._kernel_read_until, now)
        known = [one for one in found if isinstance(one, KernelObservation)]
        self._kernel = known[-1] if known else self._kernel
        return KernelObservation(
            at=now,
            readable=self._kernel is not None and self._kernel.readable,
            error="" if self._kernel is None else self._kernel.error,
            lines=tuple(line for one in known for line in one.lines),
            ranges=tuple(ranges for one in known for ranges in one.ranges),
        )

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        found = self._cursor.latest("nvml", self.now())
        if not isinstance(found, NvmlObservation):
            raise SourceError("the recording holds nothing of NVML yet")
        return found

    async def tick_gpus(self) -> None:
        """A recording loses nothing."""

    def query_counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        """Nobody is asked in a replay."""
        return 0, {}

    async def close(self) -> None:
        """Nothing to let go of."""
