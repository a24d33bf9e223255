"""The host this program runs on.

A blocking source that hangs costs its own observations, and the next call of it is refused.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mps_exporter.config import Settings
from mps_exporter.mps.cgroups import unified_path
from mps_exporter.mps.server_queries import has_resumed
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    KernelObservation,
    LogsObservation,
    NvmlObservation,
    ProcfsObservation,
)
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.control_tool import ControlTool
from mps_exporter.sources.daemon_discovery import DaemonDiscovery
from mps_exporter.sources.host import SourceTimeoutError
from mps_exporter.sources.kernel_log import KernelEvidence
from mps_exporter.sources.log_follower import LogFollower, LogReader, LogTarget, skipped_log_states
from mps_exporter.sources.log_tail import last_activity
from mps_exporter.sources.nvml import NvmlOptions, NvmlSession
from mps_exporter.sources.nvml.accumulators import MIN_SAMPLE_INTERVAL_SECONDS
from mps_exporter.sources.pidfd_watch import ProcessWatch, at_each_end, opener
from mps_exporter.sources.resolve_in_root import process_root

T = TypeVar("T")

BRIEF_SAMPLE_SECONDS = 0.1
"""The shortest interval of which GPM tells, by NVIDIA's documentation of DCGM."""

LIMITS_SECONDS = 0.5
"""So long a collection waits for the memory limits that only NVML tells."""

LOOK_SECONDS = 1.0
"""How often processes are looked at that cannot be watched."""

FOREGROUND = (
    "the daemon runs in the foreground (-f) and writes no log files: what lies there is not its own"
)


class LiveHost:
    """Host over NVML, /proc, the control tool and the log files."""

    def __init__(self, settings: Settings, *, brief: bool = False) -> None:
        """Open the sources.

        Args:
            settings: What to read, and how.
            brief: For one or two collections. The driver is asked for no events: its thread comes
                out of NVML only every 0.5 s, and the end of the program would wait for it. The
                GPUs' activity may be that of an interval as short as NVML can tell of.
        """
        self._settings = settings
        self._procfs_path = settings.path_procfs
        self._procfs = DaemonDiscovery(
            settings.path_procfs,
            passwd=settings.path_passwd,
            container_logs=settings.path_container_logs,
            cgroups=settings.path_cgroupfs,
        )
        self._control = ControlTool(
            settings.mps_control_binary,
            settings.mps_query_timeout,
            settings.mps_min_query_interval,
            procfs=settings.path_procfs,
        )
        self._kernel = KernelEvidence(settings.path_kmsg, settings.path_procfs)
        self._logs = LogFollower(LogReader(procfs=settings.path_procfs))
        self._watch = ProcessWatch(opener(settings.path_procfs))
        self._new: set[int] = set()
        self._ended: dict[int, float] = {}
        """What has not been told yet."""
        self._daemons: frozenset[int] = frozenset()
        """Control daemons that were found last."""
        self._found: dict[str, DaemonFacts] = {}
        """Daemons as they were found last, by pipe directory."""
        self._looked_at = float("-inf")
        self._seen: dict[int, float | None] = {}
        """Processes that cannot be watched: start time; None: gone."""
        shortest = BRIEF_SAMPLE_SECONDS if brief else MIN_SAMPLE_INTERVAL_SECONDS
        self._nvml = NvmlSession(
            options=NvmlOptions(
                serials=settings.collector_nvml_serials,
                xid_events=not brief,
                shortest_seconds=shortest,
            )
        )
        self._calls = BlockingCalls[Any]()
        # Calls to one source are serialized; no caller waits behind a call that hangs.
        self._locks = {name: asyncio.Lock() for name in ("procfs", "nvml", "logs")}

    def now(self) -> float:
        return time.time()

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        found = await self._call(
            "procfs",
            deadline_seconds,
            partial(
                self._procfs.discover,
                self._settings.configured_directories(),
                search=self._settings.mps_discovery and self._settings.collector_process,
            ),
        )
        self._daemons = frozenset(one.process.pid for one in found if one.process is not None)
        for daemon in found:
            before = self._found.get(daemon.pipe_directory)
            if before is not None and has_resumed(before, daemon):
                self._control.record_activity(daemon.pipe_directory, time.time())
        self._found = {one.pipe_directory: one for one in found}
        return found

    def forget(self, present: Collection[str]) -> None:
        self._control.forget(present)

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        """Facts of these processes, and the GPU memory of their control groups."""
        found = await self._call("procfs", deadline_seconds, self._procfs.observe, pids)
        if found.cgroup_memory or not self._nvml.has_memory_limits:
            return found
        cgroups = (unified_path(one.cgroup) for one in found.processes.values())
        groups = sorted({path for path in cgroups if path is not None})
        try:
            seconds = min(deadline_seconds, LIMITS_SECONDS)
            root = self._settings.path_cgroupfs
            memory = await self._call("nvml", seconds, self._nvml.memory_limits, root, groups)
        except SourceTimeoutError:  # reading the GPUs is late, too, and says so
            return found
        return replace(found, cgroup_memory=memory)

    async def ended(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        new, without = self._watch.watch_only(watched)
        self._new |= new
        self._ended |= self._watch.ended()
        if without and time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            observation = await self._call(
                "procfs", deadline_seconds, self._procfs.observe, without
            )
            before, self._seen = self._seen, _start_times(observation, without)
            self._new |= self._seen.keys() - before.keys()
            self._ended |= {
                pid: observation.at
                for pid, start in self._seen.items()
                if before.get(pid) is not None and start != before[pid]
            }
        if not self._new and not self._ended:
            return ()
        if not self._daemons.isdisjoint(self._ended):
            await self.discover(deadline_seconds)
        found = at_each_end(await self.identify({*watched, *others}, deadline_seconds), self._ended)
        self._new, self._ended = set(), {}
        return found

    async def probe(
        self, daemon: DaemonFacts, deadline_seconds: float, since: float = 0.0
    ) -> ControlObservation:
        return await self._control.probe(daemon, deadline_seconds, since)

    async def reconcile(
        self, daemon: DaemonFacts, servers: Sequence[int], deadline_seconds: float
    ) -> ControlObservation:
        return await self._control.reconcile(daemon, servers, deadline_seconds)

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        targets = [_target(one, self._procfs_path) for one in daemons if not one.foreground]
        others = [_target(one, self._procfs_path) for one in daemons if one.foreground]
        async with self._exclusive("logs", deadline_seconds) as left:
            # One that is started with -d again goes on in its logs, and they are not counted anew.
            found = await self._logs.poll(
                targets, left, kept=[one.pipe_directory for one in others]
            )
        for chunk in found.chunks:
            if (at := last_activity(chunk)) is not None:
                self._control.record_activity(chunk.pipe_directory, at)
        states = [state for other in others for state in skipped_log_states(other, FOREGROUND)]
        return replace(found, states=(*found.states, *states))

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        return self._kernel.read(clients)

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        return await self._call("nvml", deadline_seconds, self._nvml.observe)

    async def tick_gpus(self) -> None:
        await self._call("nvml", 5.0, self._nvml.tick)

    def query_counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        return self._control.counts(pipe_directory)

    async def close(self) -> None:
        """Let go of NVML and the logs; where a worker hangs, the process's end does it."""
        with suppress(SourceTimeoutError):
            await self._call("nvml", 1.0, self._nvml.close)
        self._watch.close()
        self._kernel.close()
        await self._logs.close()

    async def _call(
        self, source: str, deadline_seconds: float, function: Callable[..., T], *arguments: object
    ) -> T:
        async with self._exclusive(source, deadline_seconds) as left:
            found: T = await self._calls.call(source, function, *arguments, seconds=left)
            return found

    @asynccontextmanager
    async def _exclusive(self, source: str, deadline_seconds: float) -> AsyncIterator[float]:
        """Wait for one's turn with a source; gives how many seconds are left."""
        end = time.monotonic() + deadline_seconds
        try:
            async with asyncio.timeout(None if math.isinf(deadline_seconds) else deadline_seconds):
                await self._locks[source].acquire()
        except TimeoutError:
            raise SourceTimeoutError(f"{source} is busy with another question") from None
        try:
            yield end - time.monotonic()
        finally:
            self._locks[source].release()


def _start_times(observation: ProcfsObservation, pids: Collection[int]) -> dict[int, float | None]:
    """Give the start times of these processes; None: gone. Left out: it cannot be told."""
    found: dict[int, float | None] = dict.fromkeys(set(observation.gone).intersection(pids))
    for pid, facts in observation.processes.items():
        found[pid] = None if facts.ended else facts.start_time_seconds
    return found


def _target(daemon: DaemonFacts, procfs: str) -> LogTarget:
    owners = frozenset(daemon.log_owners)
    limited = daemon.user if daemon.limited else None
    named_servers = daemon.protocol == "3"
    log_directory = daemon.log_directory
    if daemon.process is None and process_root(daemon.log_path, procfs)[0]:
        # The PID in /proc/PID/root may be another process's by now. What is open is read on.
        log_directory = ""
    return LogTarget(
        daemon.pipe_directory, log_directory, daemon.root, owners, limited, named_servers
    )
