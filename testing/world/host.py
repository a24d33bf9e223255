"""A simulated world as the collector's host: its logs in pieces, its processes, its replies."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mps_exporter.mps.protocol_v3 import SERVERS
from mps_exporter.observations import (
    AddressRanges,
    DaemonFacts,
    GpuProcess,
    KernelLine,
    KernelObservation,
    LogName,
    LogsObservation,
    NvmlObservation,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.sources import SourceError
from mps_exporter.sources.child_process import ChildRights, ProcessResult
from mps_exporter.sources.control_tool import ControlTool
from testing.fake_mps_control import V3_USAGE
from testing.mps_logs import EIGHT
from testing.world.daemon import Daemon
from testing.world.daemon_v3 import DaemonV3
from testing.world.files import NAMES, LogFiles, ProcFiles
from testing.world.gpus import Gpus
from testing.world.model import World
from testing.world.obstacles import Obstacles
from testing.world.processes import CLIENT_BYTES, DEBUGGER_PID, Client, Direct, Process

ABSENT = b"Cannot find MPS control daemon process\n"
COLLISION = b"Cannot send command to MPS control daemon process\n"
"""Driver 580: another caller was there at the same time."""
MAX_REPLY_MS = 20
SHARE_OF_HANGS = 0.03
SERVER_BYTES = 66 << 20


class WorldHost:
    """The interface sources.Host over a world."""

    def __init__(
        self, world: World, *, history: bool = False, hidden: Collection[LogName] = ()
    ) -> None:
        """With `history`, what is written now is from before the exporter's start.

        The exporter may not read `hidden` logs.
        """
        self._world = world
        self._history = history
        self._obstacles = Obstacles(world.seed, f"{history}", there=world.obstructed)
        self.procfs: ProcFiles | None = None
        if os.geteuid() == 0:
            self.procfs = ProcFiles(world, self._clock, self._environment, self._obstacles)
        self.logs = LogFiles(world, hidden, self._obstacles, history=history)
        self.gpus = Gpus(world, self._clock, self._obstacles)
        self._exits_seen = len(world.exits) if history else 0
        self._kernel_lines_seen = len(world.kernel_lines) if history else 0
        self._watched: set[int] = set()
        self._requested: dict[int, int | None] = {}
        self._runs = 0
        self.lists: dict[str, dict[str, str | None]] = {}
        """Pipe directory of an MPS v3 daemon -> its replies since the last query of its servers,
        and None for each query to which none came."""
        self.meant: dict[str, dict[str, list[list[Any]]]] = {}
        """The same -> query -> metric, labels, and value of each sample that its reply means."""
        self.control = ControlTool("tool", 2.0, 5.0, run=self._run, now=self.now, clock=self._clock)

    def now(self) -> float:
        return self._world.now_ms / 1000

    def _clock(self) -> float:
        """Return seconds that do not depend on the setting of the wall clock."""
        return (self._world.now_ms - self._world.stepped_ms) / 1000 - EIGHT

    # -- the control tool

    async def _run(
        self,
        argv: Sequence[str],
        stdin: bytes,
        environment: Mapping[str, str],
        timeout_seconds: float,
        rights: ChildRights,
    ) -> ProcessResult:
        del rights
        world = self._world
        if (failed := self._obstacles.run()) is not None:
            return failed
        daemon = world.daemons[environment["CUDA_MPS_PIPE_DIRECTORY"]]
        if isinstance(daemon, DaemonV3):
            return self._list(daemon, " ".join(argv[1:]), timeout_seconds)
        while daemon.busy and (due := world.next_event_ms()) is not None:
            world.advance(due)
        if not daemon.exists:
            return ProcessResult(1, stderr=ABSENT)
        self._runs += 1
        if (due := world.next_event_ms()) is not None and due > world.now_ms + MAX_REPLY_MS:
            world.advance(world.now_ms + self._runs % MAX_REPLY_MS)
        if world.sight.collisions and self._runs % 20 == 0:
            return ProcessResult(1, stderr=COLLISION)
        replies = daemon.query(stdin.decode().splitlines())
        if replies is None:
            return ProcessResult(None, timed_out=True, duration_seconds=timeout_seconds)
        lines = [line for reply in replies for line in reply]
        return ProcessResult(0, "".join(f"{line}\n" for line in lines).encode())

    def _list(self, daemon: DaemonV3, query: str, timeout_seconds: float) -> ProcessResult:
        """Return a list of an MPS v3 daemon; now and then no reply comes."""
        self._runs += 1
        random = self._world.random(daemon.key, f"hang {self._history} {self._runs}")
        known = self.lists.get(daemon.pipe, {}).items()
        kept = {one: text for one, text in known if query != SERVERS or text is None}
        lists = self.lists[daemon.pipe] = kept
        text = daemon.reply(query)
        if daemon.stopped or random.random() < SHARE_OF_HANGS:
            lists[query] = None
            return ProcessResult(None, timed_out=True, duration_seconds=timeout_seconds)
        if text is None:
            return ProcessResult(1, stderr=V3_USAGE.encode())
        lists[query] = text
        meant = self.meant.setdefault(daemon.pipe, {})
        meant[query] = [sample for of, *sample in daemon.samples() if of == query]
        return ProcessResult(0, text.encode())

    # -- processes

    @staticmethod
    def _environment(process: Process) -> dict[str, str]:
        if isinstance(process, Daemon):
            logs = process.log_directory
            return {"CUDA_MPS_PIPE_DIRECTORY": process.pipe, "CUDA_MPS_LOG_DIRECTORY": logs}
        environment = {}
        if isinstance(process, Client):
            environment["CUDA_MPS_PIPE_DIRECTORY"] = process.daemon.pipe
            if len(process.gpus) < len(process.daemon.gpus):
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, process.gpus))
        if isinstance(process, Direct) and process.directory is not None:
            environment["CUDA_MPS_PIPE_DIRECTORY"] = process.directory
        return environment | process.settings.environment

    def _facts(self, process: Process) -> ProcessFacts:
        return ProcessFacts(
            process.pid,
            process.started_ms / 1000,
            uid=process.uid,
            user=NAMES.get(process.uid),
            name=process.name,
            state=process.letter,
            parent_pid=process.parent_pid,
            namespace_pids=(process.pid, *process.inner_pids),
            mps_environment=self._environment(process),
            cgroup=process.settings.place.cgroup,
            limiter="HAMi-core" if process.settings.limiter else "",
        )

    def _daemons(self) -> tuple[DaemonFacts, ...]:
        return tuple(self._daemon_facts(one) for one in self._world.daemons.values() if one.exists)

    def _with_tracer(self, process: Process) -> ProcessFacts:
        tracer = f"{DEBUGGER_PID} (gdb)" if process.halted == "t" else ""
        return replace(self._facts(process), tracer=tracer)

    def _daemon_facts(self, daemon: Daemon) -> DaemonFacts:
        return DaemonFacts(
            daemon.pipe,
            daemon.log_directory,
            process=self._with_tracer(daemon),
            protocol=daemon.protocol,
            servers=tuple(map(self._with_tracer, daemon.servers)),
            owner_uid=daemon.uid,
            log_owners=(daemon.uid,),
            limited=daemon.uid != 0,
            multiuser=daemon.multiuser,
            lock_tested=True,
            lock_holder_pid=daemon.pid,
        )

    def truth(self, pids: Collection[int]) -> ProcfsObservation:
        """Return what /proc contains now."""
        processes = self._world.processes
        there = {pid: self._facts(processes[pid]) for pid in pids if pid in processes}
        gone = tuple(sorted(set(pids) - there.keys()))
        return ProcfsObservation(self.now(), daemons=self._daemons(), processes=there, gone=gone)

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        del deadline_seconds
        self._obstacles.fail("/proc")
        for daemon in self._world.daemons.values():
            daemon.found |= daemon.exists and not self._history
        return self._daemons() if self.procfs is None else self.procfs.discover()

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        del deadline_seconds
        self._obstacles.fail("/proc")
        return self.truth(pids) if self.procfs is None else self.procfs.observe(pids)

    async def exit_observations(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        new, self._watched = set(watched) - self._watched, set(watched)
        exits = self._world.exits[self._exits_seen :]
        self._exits_seen = len(self._world.exits)
        ended = {pid: at_ms / 1000 for pid, at_ms in exits if pid in self._watched}
        if not ended and not new:
            return ()
        if self.procfs is not None and not self.procfs.daemon_pids.isdisjoint(ended):
            await self.discover(deadline_seconds)
        observation = await self.identify({*watched, *others}, deadline_seconds)
        return _by_exit(observation, ended)

    # -- logs

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        del deadline_seconds
        self._obstacles.fail("the logs")
        return await self.logs.poll(daemons)

    # -- the kernel log and the GPUs

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        world = self._world
        if not world.sight.kernel_log:
            return KernelObservation(self.now(), readable=False, error="/dev/kmsg: no permission")
        seen, self._kernel_lines_seen = self._kernel_lines_seen, len(world.kernel_lines)
        lines = [KernelLine(at_ms / 1000, text) for at_ms, text in world.kernel_lines[seen:]]
        requested, self._requested = self._requested, dict(clients)
        ranges = []
        for pid, uid in requested.items():
            client = world.processes.get(pid)
            if isinstance(client, Client) and uid in (None, client.uid):
                ranges.append(AddressRanges(self.now(), pid, client.uid, client.reservations))
                if not self._history and client.mapped_ms is None:
                    client.mapped_ms = world.now_ms
        return KernelObservation(
            self.now(), readable=True, lines=tuple(lines), ranges=tuple(ranges)
        )

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        del deadline_seconds
        self._obstacles.fail("NVML")
        if not self._world.sight.nvml:
            raise SourceError("no GPU here")
        found = self.gpus.read(lambda index: tuple(self._gpu_processes(index)))
        v3 = any(isinstance(one, DaemonV3) for one in self._world.daemons.values())
        driver = "615.71.09" if v3 else "580.159.04"
        return replace(found, driver_version=driver)

    def _gpu_processes(self, index: int) -> Iterator[GpuProcess]:
        """Yield the servers, and the clients that have a context here or lost it with a server."""
        for daemon in self._world.daemons.values():
            here = [gpu.index for gpu in daemon.gpus]
            for server in daemon.servers:
                if index in here and server.ready:
                    yield GpuProcess(server.pid, "compute", SERVER_BYTES)
        for process in self._world.processes.values():
            if isinstance(process, Direct) and process.gpu.index == index:
                yield GpuProcess(process.pid, "compute", CLIENT_BYTES)
            if isinstance(process, Client) and process.active_ms is not None:
                for ordinal in process.gpus if process.alive else ():
                    if process.daemon.gpus[ordinal].index == index:
                        yield GpuProcess(process.pid, "compute", process.used_on(ordinal))
                        yield GpuProcess(process.pid, "mps", process.used_on(ordinal))

    async def wait_for_next_poll(self) -> None:
        """Return at once."""


def _by_exit(observation: ProcfsObservation, ended: Mapping[int, float]) -> list[ProcfsObservation]:
    """Return an observation for the exact time of each exit, and the given one.

    A live host scans once a second: its times, and what is computed from them, are up to that late.
    """
    earlier = [
        replace(
            observation,
            at=at,
            processes={
                pid: facts
                for pid, facts in observation.processes.items()
                if ended.get(pid, at) <= at
            },
            gone=tuple(pid for pid in observation.gone if ended.get(pid, at + 1) <= at),
        )
        for at in sorted({at for at in ended.values() if at < observation.at})
    ]
    return [*earlier, observation]
