"""A host with one control daemon; tests set its clocks, logs, processes and replies."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mps_exporter.collector import Collector
from mps_exporter.flags import Settings
from mps_exporter.observations import (
    DaemonFacts,
    KernelObservation,
    LogName,
    LogsObservation,
    NvmlObservation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import ControlDaemon
from mps_exporter.sources import SourceError
from mps_exporter.sources.child_process import ChildRights, ProcessResult
from mps_exporter.sources.control_tool import ControlTool
from testing import fake_mps_control
from testing.fake_host import H200
from testing.mps_logs import EIGHT, LOGS, PIPE, Logs, observation, script
from testing.mps_script import HOLDER

DAEMON, SERVER, CLIENT = 630, 110, 100


class ScriptedHost:
    """Daemon 630 with server 110 of user 1001 and its client 100, two minutes after they came."""

    def __init__(self, logs: Logs | None = None) -> None:
        self.wall = EIGHT + 120.0
        self.monotonic = 1000.0
        self.daemon = ProcessFacts(
            DAEMON, EIGHT, name="nvidia-cuda-mps-control", state="S", namespace_pids=(DAEMON,)
        )
        self.server = ProcessFacts(
            SERVER,
            EIGHT + 1,
            uid=1001,
            name="nvidia-cuda-mps-server",
            state="S",
            namespace_pids=(SERVER,),
        )
        self.client = ProcessFacts(CLIENT, EIGHT + 1, uid=1001, state="S", mps_environment={})
        self.facts = DaemonFacts(
            PIPE,
            "/log",
            process=self.daemon,
            servers=(self.server,),
            lock_tested=True,
            lock_holder_pid=DAEMON,
        )
        self.answers: dict[str, Any] = {
            "servers": [{"pid": SERVER, "clients": [{"pid": CLIENT, "contexts": {"0": [1]}}]}],
            "devices": [H200],
        }
        self.readable: tuple[LogName, ...] = LOGS
        self.hangs_on = ""
        self.gate: asyncio.Event | None = None
        """While it is closed, no run of the control tool ends."""
        self.gpus: NvmlObservation | None = None
        self.watched: list[int] = []
        self.runs: list[list[str]] = []
        """The commands of each run of the control tool."""
        self._logs: dict[LogName, bytes] = {}
        self.write(script(HOLDER) if logs is None else logs)
        self.control = ControlTool(
            "tool", 2.0, 5.0, run=self._run, now=self.now, clock=lambda: self.monotonic
        )

    def collector(self, **settings: Any) -> Collector:
        return Collector(self, replace(Settings(), **settings))

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def write(self, logs: Logs) -> None:
        for log in LOGS:
            self._logs[log] = self._logs.get(log, b"") + logs[log]

    async def _run(
        self,
        argv: Sequence[str],
        stdin: bytes,
        environment: Mapping[str, str],
        timeout_seconds: float,
        rights: ChildRights,
    ) -> ProcessResult:
        del argv, environment, rights
        commands = stdin.decode().splitlines()
        self.runs.append(commands)
        if self.gate is not None:
            await self.gate.wait()
        if self.hangs_on and any(self.hangs_on in command for command in commands):
            self.passes(timeout_seconds)
            return ProcessResult(None, timed_out=True, duration_seconds=timeout_seconds)
        lines = [line for one in commands for line in fake_mps_control.reply(self.answers, one)]
        return ProcessResult(0, "".join(f"{line}\n" for line in lines).encode())

    # -- the interface Host

    def now(self) -> float:
        return self.wall

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        del deadline_seconds
        return (self.facts,) if self.facts.process is not None else ()

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        del deadline_seconds
        there = {one.pid: one for one in (self.server, self.client) if one.pid in pids}
        gone = tuple(sorted(set(pids) - there.keys()))
        return ProcfsObservation(self.wall, daemons=(self.facts,), processes=there, gone=gone)

    async def exit_observations(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        """Record the watched processes; all of them run on."""
        del others, deadline_seconds
        self.watched = list(watched)
        return ()

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        """What was written since."""
        del daemons, deadline_seconds
        written, self._logs = self._logs, {}
        return observation(self.wall, written, readable=self.readable)

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        del clients
        return KernelObservation(self.now(), readable=False)

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        del deadline_seconds
        if self.gpus is None:
            raise SourceError("no GPU here")
        return replace(self.gpus, at=self.wall, outcome=Outcome.OK)

    async def wait_for_next_poll(self) -> None:
        """Return at once."""


async def look(collector: Collector, **arguments: Any) -> ControlDaemon:
    """Collect; return the only daemon."""
    (daemon,) = (await collector.collect(**arguments)).daemons
    return daemon
