"""The host on which this program runs.

A blocking source that hangs loses only its own observations, and its next call is refused.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.flags import Settings
from mps_exporter.mps.cgroups import unified_path
from mps_exporter.observations import (
    DaemonFacts,
    KernelObservation,
    LogsObservation,
    NvmlObservation,
    ProcfsObservation,
)
from mps_exporter.sources import SourceTimeoutError
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.control_tool import ControlTool
from mps_exporter.sources.daemon_discovery import DaemonDiscovery
from mps_exporter.sources.kernel_log import KernelEvidence
from mps_exporter.sources.log_follower import LogFollower, skipped_log_states
from mps_exporter.sources.nvml import NvmlSession
from mps_exporter.sources.processes import Processes
from mps_exporter.sources.resolve_in_root import process_root

FOREGROUND = (
    "the daemon runs in the foreground (-f) and writes no log files: what lies there is not its own"
)


class LiveHost:
    """Host over NVML, /proc, the control tool and the log files."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._procfs_path = settings.path_procfs
        self._procfs = DaemonDiscovery(
            settings.path_procfs,
            passwd=settings.path_passwd,
            container_logs=settings.path_container_logs,
            cgroups=settings.path_cgroupfs,
        )
        self.control = ControlTool(
            settings.mps_control_binary,
            settings.mps_query_timeout,
            settings.mps_min_query_interval,
            procfs=settings.path_procfs,
            budget=self._procfs.budget,
        )
        self._kernel = KernelEvidence(settings.path_kmsg, settings.path_procfs)
        self._logs = LogFollower(procfs=settings.path_procfs)
        self._daemon_pids = set[int]()  # PIDs of the daemons that were found last.
        self._watched: dict[int, int | None] = {}  # PID -> its start; None if exited.
        self._scanned_at = float("-inf")
        self._nvml = NvmlSession(serials=settings.collector_nvml_serials)
        self._calls = BlockingCalls[Any]()
        self._tick_at = 0.0
        self._has_lines = False  # The last poll had lines: they wait for the other log.

    def now(self) -> float:
        return time.time()

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        search = self._settings.mps_discovery and self._settings.collector_process
        discover = partial(self._procfs.discover, search=search)
        found: tuple[DaemonFacts, ...] = await self._calls.call(
            "procfs", discover, self._settings.configured_directories(), seconds=deadline_seconds
        )
        self._daemon_pids = {one.process.pid for one in found if one.process is not None}
        return found

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        """Return facts about these processes, and the GPU memory of their control groups."""
        found: ProcfsObservation = await self._calls.call(
            "procfs", self._procfs.observe, pids, seconds=deadline_seconds
        )
        if found.cgroup_memory or not self._nvml.has_memory_limits:
            return found
        cgroups = (unified_path(one.cgroup) for one in found.processes.values())
        groups = sorted({path for path in cgroups if path is not None})
        try:
            seconds = min(deadline_seconds, policy.MEMORY_LIMITS_TIMEOUT_SECONDS)
            root = self._settings.path_cgroupfs
            memory = await self._calls.call(
                "nvml", self._nvml.memory_limits, root, groups, seconds=seconds
            )
        except SourceTimeoutError:  # reading the GPUs reports it, too
            return found
        return replace(found, cgroup_memory=memory)

    async def exit_observations(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        """Return an observation if a watched process started or exited."""
        if not watched or time.monotonic() - self._scanned_at < policy.EXIT_POLL_INTERVAL_SECONDS:
            return ()
        self._scanned_at, before = time.monotonic(), self._watched.items()
        start_ticks = Processes(self._procfs_path).start_ticks
        found = await self._calls.call("exits", start_ticks, watched, seconds=deadline_seconds)
        changed = {pid for pid, start in found.items() if (pid, start) not in before}
        if not changed:
            return ()
        if not self._daemon_pids.isdisjoint(changed):
            await self.discover(deadline_seconds)
        observation = await self.identify({*watched, *others}, deadline_seconds)
        self._watched = found
        return (observation,)

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        followed = [_with_own_logs(one, self._procfs_path) for one in daemons if not one.foreground]
        others = [one for one in daemons if one.foreground]
        # A daemon that is started with -d again appends to its logs: keep the positions.
        kept = [one.pipe_directory for one in others]
        found = await self._logs.poll(followed, deadline_seconds, kept=kept)
        self._has_lines = any(chunk.data for chunk in found.chunks)
        states = [state for other in others for state in skipped_log_states(other, FOREGROUND)]
        return replace(found, states=(*found.states, *states))

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        return self._kernel.read(clients)

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        return await self._calls.call("nvml", self._nvml.observe, seconds=deadline_seconds)

    async def wait_for_next_poll(self) -> None:
        if time.monotonic() >= self._tick_at:
            self._tick_at = time.monotonic() + policy.TICK_INTERVAL_SECONDS
            seconds = policy.GPU_SAMPLE_TIMEOUT_SECONDS
            with suppress(SourceTimeoutError):  # a collection reports it
                await self._calls.call("nvml", self._nvml.tick, seconds=seconds)
        wait = partial(
            self._logs.wait_for_change,
            lambda: self._has_lines or self._kernel.requested,
            self._tick_at,
        )
        try:
            await self._calls.call("logs", wait, seconds=policy.LOG_POLL_TIMEOUT_SECONDS)
        except (OSError, SourceTimeoutError):  # a file was closed, or its file system hangs
            await asyncio.sleep(policy.LOG_POLL_INTERVAL_SECONDS)

    async def close(self) -> None:
        """Close NVML and the logs; a hanging thread ends with the process."""
        with suppress(SourceTimeoutError):
            seconds = policy.CLOSE_TIMEOUT_SECONDS
            await self._calls.call("nvml", self._nvml.close, seconds=seconds)
        self._kernel.close()
        await self._logs.close()


def _with_own_logs(daemon: DaemonFacts, procfs: str) -> DaemonFacts:
    if daemon.process is None and process_root(daemon.log_path, procfs)[0]:
        # The PID in /proc/PID/root may belong to another process by now: open no new files there.
        return replace(daemon, log_directory="")
    return daemon
