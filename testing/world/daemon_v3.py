"""An MPS v3 daemon of root on driver 615, by the manual: none was measured.

Each user who connects gets a server of its own, and all of them serve at the same time. What the
manual does not say is left out: how servers end, what they log, and what a fault does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mps_exporter.merge.inputs import SERVER_PROGRAM
from mps_exporter.mps.protocol_v3 import CLIENTS, SERVERS
from testing import fake_mps_v3
from testing.world.daemon import Daemon
from testing.world.processes import Client, Process

if TYPE_CHECKING:
    from testing.world.script import Action


class DaemonV3(Daemon):
    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._servers: dict[int, Process] = {}
        self.truth.unknowable.add("its log shows no server and no client")
        if self.world.random(self.key, "options").random() < 0.7:
            self.protocol = "3"  # else by its environment, which the exporter cannot read

    @property
    def servers(self) -> Sequence[Process]:
        return tuple(self._servers.values())

    def first_lines(self) -> tuple[str, ...]:
        variable = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}"
        return (f"To connect CUDA applications to this daemon, set {variable}",)

    def _act_if_calm(self, action: Action) -> bool:
        return action.kind in ("quit", "kill_daemon") or super()._act_if_calm(action)

    def act_on_client(self, client: Client, action: Action) -> bool:
        if action.kind == "end_client":
            client.alive = False
            self.world.end_process(client)
        return True

    def may_arrive(self, client: Client) -> bool:
        del client
        return not self.stopped

    def arrive(self, client: Client) -> None:
        client.accepted, client.active_ms = True, self.world.now_ms
        self.served.append(client)
        if client.uid not in self._servers:
            server = Process(
                next(self._pids), client.uid, client.started_ms, SERVER_PROGRAM, self.pid
            )
            self._servers[client.uid] = server
            self.world.add(server)

    def reply(self, query: str) -> str | None:
        """Return a list; None if this tool does not know the query."""
        header, *_ = fake_mps_v3.MANUAL.get(query, "").splitlines(keepends=True) or (None,)
        if header is None or query not in (SERVERS, CLIENTS):
            return header
        rows = [
            f"uid_{one.uid},{one.uid},{one.pid},Ready,{self.pipe}/uid_{one.uid},-,-\n"
            for one in self.servers
        ]
        if query == CLIENTS:
            there = [one for one in self.served if one.exists]
            rows = [f"{one.pid},uid_{one.uid},{one.gpus[0]},default,python3\n" for one in there]
        return "".join((header, *rows))
