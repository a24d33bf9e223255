"""What the merge starts from, and what several of its parts look up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mps_exporter.mps.control_protocol import ServerReply
from mps_exporter.mps.server_queries import ServerAnswers
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonState
from mps_exporter.observations import (
    CgroupMemory,
    ControlObservation,
    DaemonFacts,
    GpuObservation,
    LogState,
    NvmlObservation,
    ProcessFacts,
    ProcfsObservation,
)

SERVER_PROGRAM = "nvidia-cuda-mps-server"

STRANDED_SECONDS = 1.0
"""A client that ends leaves NVML's list within this time after it left its server."""


@dataclass(frozen=True, slots=True)
class DaemonInputs:
    """All that is known of one daemon at the end of a collection."""

    facts: DaemonFacts
    probe: ControlObservation | None = None
    answers: ServerAnswers = field(default_factory=ServerAnswers)
    state: DaemonState = field(default_factory=DaemonState)
    """What its logs say."""
    logs: tuple[LogState, ...] = ()
    was_readable: bool = False
    """Its control.log could be read at some time: its counters mean something."""
    hung: bool = False
    """The last question that was put to it was not answered in time."""
    resumed: bool = False
    """It, or a server of its, was stopped then, and goes on now."""
    queries: int = 0
    query_failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def speaks_v3(self) -> bool:
        """Whether it is an MPS v3 daemon; what it answered counts more than how it was started."""
        return (self.answers.protocol or self.facts.protocol) == "3"

    def log_readable(self, log: str) -> bool:
        """Whether this log can be read now."""
        return any(state.log == log and state.readable for state in self.logs)

    def logged_servers(self) -> tuple[TrackedServer, ...]:
        """The servers of the log; none where it does not tell."""
        return tuple(self.state.servers) if self.log_names_servers() else ()

    def log_names_servers(self) -> bool:
        """Whether the log tells which servers there are; that of an MPS v3 daemon does not."""
        return self.log_readable("control") and not self.speaks_v3

    def device_uuids(self) -> dict[int, str]:
        """Device ordinal of the daemon -> GPU UUID, from the tool's map or the log."""
        return {**self.answers.device_uuids(), **self.state.devices}

    def visible_devices(self) -> str | None:
        """The daemon's CUDA_VISIBLE_DEVICES, where its environment can be read."""
        process = self.facts.process
        environment = process.mps_environment if process is not None else None
        return (environment or {}).get("CUDA_VISIBLE_DEVICES")

    def has_own_pid_namespace(self) -> bool:
        """Whether the daemon numbers processes otherwise than this host."""
        return self.facts.process is not None and len(self.facts.process.namespace_pids) > 1


@dataclass(frozen=True, slots=True)
class ServerInputs:
    """All that is known of one server."""

    daemon: DaemonInputs
    pid: int
    """As this host numbers it, where its process is seen."""
    logged: TrackedServer | None
    """What the log says of it."""
    reply: ServerReply | None
    process: ProcessFacts | None
    devices: Mapping[int, str]
    """Device ordinal -> GPU UUID."""

    @property
    def clients_logged(self) -> bool:
        """Whether the server's log names its clients."""
        return self.logged is not None and self.daemon.log_readable("server")

    def state(self) -> str | None:
        """The server's state, from the log or the tool."""
        if self.logged is not None:
            return self.logged.state
        return self.reply.state if self.reply is not None else None

    def uid(self) -> int | None:
        """The user of the server, from the log or its process."""
        if self.logged is not None and self.logged.uid is not None:
            return self.logged.uid
        return self.process.uid if self.process is not None else None

    def thread_ratio(self) -> float | None:
        """The active thread limit of its new clients."""
        if self.logged is not None and self.logged.thread_ratio is not None:
            return self.logged.thread_ratio
        return self.reply.active_thread_ratio if self.reply is not None else None

    def memory_limits_by_ordinal(self) -> Mapping[int, int]:
        """Device ordinal -> bytes that each of its new clients may pin there."""
        reported = self.reply.pinned_memory_limit_bytes if self.reply is not None else {}
        logged = self.logged.memory_limits if self.logged is not None else {}
        return {**reported, **logged}


@dataclass(frozen=True, slots=True)
class MergeContext:
    """What several parts of the merge look up."""

    gpus: Mapping[str, GpuObservation]
    """By UUID."""
    gpu_indexes: Mapping[str, str]
    driver_version: str | None
    processes: Mapping[int, ProcessFacts]
    users: Mapping[int, str]
    server_pids: frozenset[int]
    host_pids: Mapping[tuple[int, int], int]
    """(PID namespace, PID in it) -> PID as the host sees it."""
    known_pids: frozenset[int]
    """Processes, by the host's PIDs, whose daemons are known."""
    memory_by_process: Mapping[int, Mapping[str, int]]
    """PID -> GPU UUID -> bytes."""
    cgroup_memory: Mapping[str, Mapping[str, CgroupMemory]]
    """Path of a control group -> GPU UUID -> its memory; of GPUs that NVML does not show, none."""
    stranded_since: Mapping[int, float] | None
    stranded_before: float
    """Only a process that has looked stranded since then is."""

    @classmethod
    def of(
        cls,
        gpus: NvmlObservation | None,
        processes: ProcfsObservation | None,
        daemons: Sequence[DaemonInputs],
        stranded_since: Mapping[int, float] | None,
    ) -> MergeContext:
        """Arrange what the sources brought for looking it up."""
        observed = gpus.gpus if gpus is not None else ()
        identified = processes.processes if processes is not None else {}
        server_pids = frozenset(pid for pid, facts in identified.items() if is_server(facts))
        return cls(
            gpus={gpu.uuid: gpu for gpu in observed},
            gpu_indexes=_gpu_indexes(observed, daemons),
            driver_version=gpus.driver_version if gpus is not None else None,
            processes=identified,
            users=_users((*identified.values(), *_daemon_processes(daemons))),
            server_pids=server_pids,
            host_pids=_host_pids(identified.values()),
            known_pids=server_pids | _logged_client_pids(daemons),
            memory_by_process=_memory_by_process(observed),
            cgroup_memory=_cgroup_memory(observed, processes),
            stranded_since=stranded_since if gpus is not None else None,
            stranded_before=gpus.at - STRANDED_SECONDS if gpus is not None else math.inf,
        )

    def process(self, daemon: DaemonFacts, pid: int) -> ProcessFacts | None:
        """Return the process that a daemon calls its server or client; None: it is none of its own.

        The log of an ordinary user's daemon may name any PID. It can serve that user only, so the
        process of another is not its client, and nothing is told of it.
        """
        found = self.processes.get(pid)
        if found is None or (daemon.limited and found.uid != daemon.user):
            return None
        return found

    def is_stranded(self, pid: int) -> bool:
        """Whether a process has looked stranded for long enough to be."""
        if self.stranded_since is None:
            return True
        return self.stranded_since.get(pid, math.inf) <= self.stranded_before

    def user(self, uid: int | None) -> str | None:
        """The name of a user, where one of its processes shows it."""
        return None if uid is None else self.users.get(uid)

    def memory_used(self, pid: int) -> Mapping[str, int]:
        """GPU UUID -> bytes that the process uses there, as far as NVML reports it."""
        return self.memory_by_process.get(pid, {})


def is_server(facts: ProcessFacts) -> bool:
    """Whether a process is an MPS server, by its name (of which the kernel keeps 15 letters)."""
    return SERVER_PROGRAM.startswith(facts.name[:15]) and facts.name.startswith("nvidia-cuda-mps")


def _users(processes: Iterable[ProcessFacts]) -> dict[int, str]:
    """UID -> user name."""
    return {
        facts.uid: facts.user
        for facts in processes
        if facts.uid is not None and facts.user is not None
    }


def _daemon_processes(daemons: Iterable[DaemonInputs]) -> Iterable[ProcessFacts]:
    for inputs in daemons:
        if inputs.facts.process is not None:
            yield inputs.facts.process
        yield from inputs.facts.servers


def _host_pids(processes: Iterable[ProcessFacts]) -> dict[tuple[int, int], int]:
    """(PID namespace, PID in it) -> PID as the host sees it."""
    found: dict[tuple[int, int], int] = {}
    for facts in processes:
        if facts.pid_namespace is not None and facts.namespace_pids:
            found.setdefault((facts.pid_namespace, facts.namespace_pids[-1]), facts.pid)
    return found


def _logged_client_pids(daemons: Iterable[DaemonInputs]) -> frozenset[int]:
    """The clients that a log names by the host's PIDs."""
    return frozenset(
        client.pid
        for inputs in daemons
        if not inputs.has_own_pid_namespace()
        for server in inputs.logged_servers()
        for client in server.clients
    )


def _memory_by_process(gpus: Iterable[GpuObservation]) -> dict[int, dict[str, int]]:
    used: dict[int, dict[str, int]] = {}
    for gpu in gpus:
        for process in gpu.processes or ():
            if process.kind == "compute" and process.used_memory_bytes is not None:
                used.setdefault(process.pid, {})[gpu.uuid] = process.used_memory_bytes
    return used


def _cgroup_memory(
    gpus: Iterable[GpuObservation], processes: ProcfsObservation | None
) -> dict[str, dict[str, CgroupMemory]]:
    uuids = {
        _pci(gpu.pci_bus_id): gpu.uuid
        for gpu in gpus
        if gpu.pci_bus_id is not None and gpu.parent_uuid is None
    }
    found: dict[str, dict[str, CgroupMemory]] = {}
    for one in processes.cgroup_memory if processes is not None else ():
        uuid = uuids.get(_pci(one.pci_bus_id))
        if uuid is not None:
            found.setdefault(one.path, {})[uuid] = one
    return found


def _pci(address: str) -> str:
    """Write a PCI address as the kernel does: 00000000:02:00.0, in small letters."""
    return address.lower().rjust(len("00000000:02:00.0"), "0")


def _gpu_indexes(gpus: Iterable[GpuObservation], daemons: Iterable[DaemonInputs]) -> dict[str, str]:
    """GPU UUID -> its index, also of GPUs that only a daemon names; empty: not known."""
    indexes = {gpu.uuid: str(gpu.index) for gpu in gpus}
    for inputs in daemons:
        # A daemon that sees all GPUs numbers them as NVML does; one with a choice does not.
        whole = inputs.visible_devices() is None
        for ordinal, uuid in inputs.device_uuids().items():
            indexes.setdefault(uuid, str(ordinal) if whole else "")
    return indexes
