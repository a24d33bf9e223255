"""An MPS v3 daemon of root on driver 615, by the manual: none was measured.

Each user who connects gets a server of its own, and all of them serve at the same time. What the
manual does not say is left out: how servers end, what they log, and what a fault does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mps_exporter.merge.inputs import SERVER_PROGRAM
from mps_exporter.mps import protocol_v3
from testing import fake_mps_v3
from testing.world.daemon import Daemon
from testing.world.processes import SMS, Client, Process

if TYPE_CHECKING:
    from testing.world.script import Action


CHUNKS = 16
NAMESPACES = {
    "default": "8G,unlimited,0",
    "small": "300M,25.00,1",
    "free": "unlimited,100.00,0",
    "odd": "8Q,12.50%,0",
}
ALLOWED = {
    "default": (None, 8 << 30, 0),
    "small": (0.25, 300 << 20, 1),
    "free": (1.0, None, 0),
    "odd": (0.125, -1, 0),
}
"""Namespace -> share of the SMs, memory (-1: not understood), and priority of its row."""
PARTITIONS = ("large,4,34,false,created,Kp8A", "-,1,8,-,unallocated,-")


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
        """Return a list, or the manual's example; None if this tool does not know the query."""
        header, *rest = fake_mps_v3.MANUAL.get(query, "").splitlines(keepends=True) or (None,)
        if header is None:
            return None
        return "".join((header, *self._rows().get(query, rest)))

    def _rows(self) -> Mapping[str, Iterable[str]]:
        """Return the rows of its lists by query."""
        names = [(one, f"uid_{one.uid}") for one in self.servers]
        there = [one for one in self.served if one.exists]
        return {
            protocol_v3.SERVERS: (
                f"{name},{one.uid},{one.pid},Ready,{self.pipe}/{name},-,-\n" for one, name in names
            ),
            protocol_v3.CLIENTS: (
                f"{one.pid},uid_{one.uid},{one.gpus[0]},{self.namespace(one)},python3\n"
                for one in there
            ),
            protocol_v3.NAMESPACES: (
                f"{space},{name},Ready,{row},{self.pipe}/{name}/{space}\n"
                for _, name in names
                for space, row in NAMESPACES.items()
            ),
            protocol_v3.DEVICES: (
                f"{at},{name},{gpu.pci},{gpu.uuid},NVIDIA H200,{SMS},{CHUNKS},-\n"
                for _, name in names
                for at, gpu in enumerate(self.gpus)
            ),
            protocol_v3.PARTITIONS: (
                f"{name},{gpu.uuid},{row}\n"
                for _, name in names
                for gpu in self.gpus
                for row in PARTITIONS
            ),
        }

    def namespace(self, client: Client) -> str:
        return self.world.random(client.key, "namespace").choice(tuple(NAMESPACES))

    def samples(self) -> Iterator[tuple[str, str, Mapping[str, object], float]]:
        """Yield query, metric, labels, and value of each sample that the lists mean."""
        for one in self.servers:
            yield from self._of_server(one)
        if self.servers:
            part = {"reply": "namespace_list", "part": "value"}
            odd = len(self.servers)
            yield protocol_v3.NAMESPACES, "mps_control_reply_not_understood", part, odd
        for name in ("memacct", "context-share"):
            labels = {"feature": name, "enabled": "true", "default": "true", "module": name}
            yield protocol_v3.FEATURES, "mps_control_feature_info", labels, 1

    def _of_server(self, one: Process) -> Iterator[tuple[str, str, Mapping[str, object], float]]:
        of = {"server_name": f"uid_{one.uid}"}
        where = f"{self.pipe}/uid_{one.uid}"
        info = {"server": one.pid, "uid": one.uid, "status": "Ready", "pipe_directory": where}
        yield protocol_v3.SERVERS, "mps_named_server_info", of | info, 1
        for name, (ratio, size, low) in ALLOWED.items():
            space = of | {"namespace": name}
            query = protocol_v3.NAMESPACES
            limited = {"active_threads": ratio, "pinned_memory": size}
            for limit, value in limited.items():
                labels = space | {"limit": limit}
                if value != -1:
                    yield query, "mps_namespace_limited", labels, value is not None
            if ratio is not None:
                yield query, "mps_namespace_active_thread_ratio", space, ratio
            if size not in (None, -1):
                yield query, "mps_namespace_pinned_memory_limit_bytes", space, size
            yield query, "mps_namespace_client_priority", space, low
        for gpu in self.gpus:
            here = of | {"uuid": gpu.uuid}
            yield protocol_v3.DEVICES, "mps_server_device_sms", here, SMS
            if self.world.sight.nvml:
                yield protocol_v3.DEVICES, "mps_gpu_served", {"uuid": gpu.uuid}, 1
            yield protocol_v3.DEVICES, "mps_server_device_chunks", here, CHUNKS
            large, query = here | {"partition": "large"}, protocol_v3.PARTITIONS
            yield query, "mps_sm_partition_sms", large, 34
            yield query, "mps_sm_partition_chunks", large, 4
            yield query, "mps_sm_partition_unallocated_sms", here, 8
            yield query, "mps_sm_partition_unallocated_chunks", here, 1
