"""The host as the collector sees it: what returns observations.

`live_host` is this host, `replay_host` a recorded one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    KernelObservation,
    LogsObservation,
    NvmlObservation,
    ProcfsObservation,
)


class SourceTimeoutError(Exception):
    """The source did not answer before the deadline, or is still busy with an earlier question."""


class SourceError(Exception):
    """The source could not be read; the message says what was attempted and what to do."""


class Host(Protocol):
    """Where observations come from.

    Every method keeps to its deadline (seconds) and raises SourceTimeoutError when it cannot.
    """

    def now(self) -> float:
        """The host's time: of a recording, the recording's."""

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        """Control daemons, running or configured."""

    def forget(self, present: Collection[str]) -> None:
        """Drop what is remembered of all daemons but these (pipe directories)."""

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        """The daemons found last, and those of these processes that are there."""

    async def ended(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        """Of the watched processes, what became known since the last call, oldest first.

        One observation for each moment at which one of them ended; and one when a process is
        watched for the first time. Each is also of the other processes.
        """

    async def probe(
        self, daemon: DaemonFacts, deadline_seconds: float, since: float = 0.0
    ) -> ControlObservation:
        """What the daemon answers by itself; what it said before a moment counts no longer."""

    async def reconcile(
        self, daemon: DaemonFacts, servers: Sequence[int], deadline_seconds: float
    ) -> ControlObservation:
        """What the daemon's servers answer."""

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        """What the logs gained since the last call."""

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        """What the kernel log and the memory of clients brought since the last call.

        Does not wait.

        Args:
            clients: Processes whose address ranges are to be read, for a later call, and the user
                whose process it must be; None: any.
        """

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        """All GPUs."""

    async def tick_gpus(self) -> None:
        """Keep the GPUs' running integrals from losing what happens between two collections."""

    def query_counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        """Runs of the control tool for this daemon, and failures by reason."""

    async def close(self) -> None:
        """Let go of files, threads and children."""
