"""A simulated world as the collector's host: its logs in pieces, its processes, its replies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    KernelObservation,
    LogChunk,
    LogName,
    LogsObservation,
    LogState,
    NvmlObservation,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.sources.child_process import ChildRights, ProcessResult
from mps_exporter.sources.control_tool import ControlTool
from mps_exporter.sources.host import SourceError
from mps_exporter.sources.processes import observations_by_exit
from testing import fake_mps_control
from testing.fake_host import H200
from testing.mps_logs import EIGHT, LOGS, PIPE
from testing.world.model import DAEMON, World


class WorldHost:
    """The interface sources/host.Host over a world."""

    def __init__(self, world: World, *, history: bool = False) -> None:
        """With `history`, what is written now is from before the exporter's start."""
        self._world = world
        self._read = dict.fromkeys(LOGS, 0)
        self._history_ends = {log: len(world.logs[log]) if history else 0 for log in LOGS}
        self._exits_seen = len(world.exits) if history else 0
        self._polls = 0
        self._tool = ControlTool(
            "tool", 2.0, 5.0, run=self._run, now=self.now, clock=lambda: self.now() - EIGHT
        )

    def now(self) -> float:
        return self._world.now_ms / 1000

    async def _run(
        self,
        argv: Sequence[str],
        stdin: bytes,
        environment: Mapping[str, str],
        timeout_seconds: float,
        rights: ChildRights,
    ) -> ProcessResult:
        del argv, environment, timeout_seconds, rights
        commands = stdin.decode().splitlines()
        replies = [fake_mps_control.reply(self._state(), one) for one in commands]
        self._world.say_query(fake_mps_control.log_lines(commands, replies))
        lines = [line for reply in replies for line in reply]
        return ProcessResult(0, "".join(f"{line}\n" for line in lines).encode())

    def _state(self) -> dict[str, Any]:
        """Return what the control tool can see, in the form of fake_mps_control."""
        server = self._world.server
        if server is None or not server.ready:
            return {"devices": [H200]}
        clients = [
            {"pid": one.pid, "contexts": {"0": [1]}} for one in server.clients if one.contexts
        ]
        return {"devices": [H200], "servers": [{"pid": server.pid, "clients": clients}]}

    def _processes(self) -> dict[int, ProcessFacts]:
        """Return the servers and clients that exist now."""
        world = self._world
        found = {
            one.pid: ProcessFacts(
                one.pid, one.started_ms / 1000, uid=one.uid, state="S", mps_environment={}
            )
            for one in world.clients.values()
            if one.exists
        }
        if (server := world.server) is not None:
            found[server.pid] = ProcessFacts(
                server.pid,
                server.started_ms / 1000,
                uid=server.uid,
                name="nvidia-cuda-mps-server",
                state="S",
                namespace_pids=(server.pid,),
            )
        return found

    def _daemon(self) -> DaemonFacts:
        server = self._world.server
        return DaemonFacts(
            PIPE,
            "/log",
            process=ProcessFacts(
                DAEMON, EIGHT, name=fake_mps_control.NAME, state="S", namespace_pids=(DAEMON,)
            ),
            servers=() if server is None else (self._processes()[server.pid],),
            lock_tested=True,
            lock_holder_pid=DAEMON,
        )

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        del deadline_seconds
        return (self._daemon(),)

    def forget(self, present: Collection[str]) -> None:
        self._tool.forget(present)

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        del deadline_seconds
        there = {pid: facts for pid, facts in self._processes().items() if pid in pids}
        gone = tuple(sorted(set(pids) - there.keys()))
        return ProcfsObservation(self.now(), daemons=(self._daemon(),), processes=there, gone=gone)

    async def exit_observations(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        exits = self._world.exits[self._exits_seen :]
        self._exits_seen = len(self._world.exits)
        ended = {pid: at_ms / 1000 for pid, at_ms in exits if pid in watched}
        if not ended:
            return ()
        observation = await self.identify({*watched, *others}, deadline_seconds)
        return observations_by_exit(observation, ended)

    async def probe(
        self, daemon: DaemonFacts, deadline_seconds: float, since: float = 0.0
    ) -> ControlObservation:
        return await self._tool.probe(daemon, deadline_seconds, since)

    async def reconcile(
        self, daemon: DaemonFacts, servers: Sequence[int], deadline_seconds: float
    ) -> ControlObservation:
        return await self._tool.reconcile(daemon, servers, deadline_seconds)

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        del deadline_seconds
        self._polls += 1
        chunks: list[LogChunk] = []
        if daemons:
            for log in LOGS:
                chunks += self._chunks(log)
        states = tuple(LogState(PIPE, log, f"/logs/{log}.log", readable=True) for log in LOGS)
        return LogsObservation(at=self.now(), chunks=tuple(chunks), states=states)

    def _chunks(self, log: LogName) -> list[LogChunk]:
        """Return what is new, in up to three pieces that end anywhere, also within a line."""
        begin, end = self._read[log], len(self._world.logs[log])
        self._read[log] = end
        old = self._history_ends[log]
        random = Random(f"{self._world.seed}/pieces/{log}/{self._polls}")
        cuts = sorted({random.randint(begin, end) for _ in range(2)} | {end})
        if begin < old:
            cuts = [old]
        chunks = []
        for cut in cuts:
            chunks.append(
                LogChunk(
                    at=self.now(),
                    pipe_directory=PIPE,
                    log=log,
                    data=self._world.logs[log][begin:cut],
                    history=begin < old,
                    complete_until=self.now() if cut == end else None,
                    utc_offset_seconds=0.0,
                )
            )
            begin = cut
        return chunks

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        del clients
        return KernelObservation(self.now(), readable=False)

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        del deadline_seconds
        raise SourceError("no GPU here")

    async def tick_gpus(self) -> None:
        """Nothing between collections."""

    def query_counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        return self._tool.counts(pipe_directory)

    async def close(self) -> None:
        """Nothing to close."""
