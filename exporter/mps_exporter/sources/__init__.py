"""The sources of observations. Only this package reads the host.

The collector uses them as a `Host`: `live_host` is this host, `replay_host` a recorded one.
"""

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
    """The source did not reply before the deadline, or is still busy with an earlier call."""


class SourceError(Exception):
    """The source could not be read; the message says why."""


class Control(Protocol):
    """The control tool, for any number of daemons.

    A run of the tool that begins before a deadline may end after it.
    """

    async def probe(
        self,
        daemon: DaemonFacts,
        deadline_seconds: float,
        since: float = 0.0,
        active_at: float = 0.0,
    ) -> ControlObservation:
        """Query what the daemon reports without its servers. Replies before `since` are stale.

        A daemon that served a client or continued (`active_at`) after a hang is queried again.
        """

    async def reconcile(
        self, daemon: DaemonFacts, servers: Sequence[int], deadline_seconds: float
    ) -> ControlObservation:
        """Query the daemon's servers."""

    def counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        """Return the number of tool runs for this daemon, and of failures by reason."""

    def forget(self, present: Collection[str]) -> None:
        """Drop the state of all daemons except these (pipe directories)."""


class Host(Protocol):
    """The sources of observations.

    A method with a deadline (seconds) raises SourceTimeoutError if it has no result by then.
    """

    @property
    def control(self) -> Control:
        """The source of the daemons' replies."""

    def now(self) -> float:
        """Return the host's time (Unix time); a recording has the time of its host."""

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        """Return the control daemons that run or are configured."""

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        """Return the daemons found last, and those of these processes that exist."""

    async def exit_observations(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        """Return observations of the watched processes' exits since the last call, oldest first.

        A newly watched process causes an observation, too. Each observation contains `others`.
        """

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        """Return the new data of the logs since the last call."""

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        """Return new lines of the kernel log and address ranges of clients, without waiting.

        A later call returns the ranges of `clients`: PID -> user who must own it (None: any).
        """

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        """Read all GPUs."""

    async def wait_for_next_poll(self) -> None:
        """Update the GPUs' running integrals; return when the logs are to be polled."""
