"""The inputs of a merge, and the indexes over them that several of its parts use."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mps_exporter.mps.server_queries import ServerAnswers
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.xid_lines import pci_address
from mps_exporter.observations import (
    CgroupMemory,
    ControlObservation,
    DaemonFacts,
    GpuObservation,
    LogState,
    NvmlObservation,
    Outcome,
    ProcessFacts,
    ProcfsObservation,
)

SERVER_PROGRAM = "nvidia-cuda-mps-server"


@dataclass(frozen=True, slots=True)
class DaemonInputs:
    """All that is known of one daemon at the end of a collection."""

    facts: DaemonFacts
    probe: ControlObservation | None = None
    answers: ServerAnswers = field(default_factory=ServerAnswers)
    state: DaemonState = field(default_factory=DaemonState)  # The state that its logs show.
    logs: tuple[LogState, ...] = ()
    was_readable: bool = False  # control.log was readable at some time, so the counters are valid.
    server_log_was_readable: bool = True
    """server.log was readable, too; without it, the counters from its lines are unknown."""
    hung: bool = False  # The last query timed out, and the log shows no activity since.
    resumed: bool = False  # The daemon or a server has continued from a stop since.
    queries: int = 0
    query_failures: Mapping[str, int] = field(default_factory=dict)
    last: DaemonFacts | None = None  # Facts of its last process.

    @property
    def speaks_v3(self) -> bool:
        """Whether its last reply, or else its command line, shows an MPS v3 daemon."""
        return (self.answers.protocol or self.facts.protocol) == "3"

    def log_readable(self, log: str) -> bool:
        return any(state.log == log and state.readable for state in self.logs)

    def log_names_servers(self) -> bool:
        """Return whether the log shows which servers exist; an MPS v3 daemon's does not."""
        unknown = self.answers.protocol is None and self.facts.protocol is None
        if unknown and self.facts.servers and not any(self.state.servers):
            return False  # perhaps a v3 daemon with an unreadable environment
        return self.log_readable("control") and not self.speaks_v3

    def device_uuids(self) -> dict[int, str]:
        """Return device ordinal of the daemon -> GPU UUID, from the log, else the tool."""
        return {**self.answers.device_uuids(), **self.state.devices}

    def visible_devices(self) -> str | None:
        process = self.facts.process
        environment = process.mps_environment if process is not None else None
        return (environment or {}).get("CUDA_VISIBLE_DEVICES")


class MergeContext:
    """Indexes over the observations of a collection."""

    def __init__(
        self,
        gpus: NvmlObservation | None,
        processes: ProcfsObservation | None,
        daemons: Sequence[DaemonInputs],
        stranded_since: Mapping[int, float] | None,
    ) -> None:
        self.nvml = gpus or NvmlObservation(math.inf, Outcome.ABSENT)
        self.procfs = processes or ProcfsObservation(math.inf)
        self.stranded_since = stranded_since
        self.gpus: Mapping[str, GpuObservation] = {gpu.uuid: gpu for gpu in self.nvml.gpus}
        """UUID -> GPU."""
        self.gpu_indexes = _gpu_indexes(self.nvml.gpus, daemons)
        self.processes = self.procfs.processes
        of_daemons = [process for inputs in daemons for process in inputs.facts.processes]
        self.users = _user_names((*self.processes.values(), *of_daemons))
        self.server_pids = frozenset(
            pid for pid, facts in self.processes.items() if is_server(facts)
        )
        self.known_pids = self.server_pids | _logged_client_pids(daemons)
        """PIDs on this host of servers, and of clients that a log names."""
        self.cgroup_memory = _cgroup_memory(self.nvml.gpus, self.procfs)
        self._host_pids = _host_pids(self.processes.values())
        self._memory_by_process = _memory_by_process(self.nvml.gpus)

    def process(self, daemon: DaemonFacts, pid: int) -> ProcessFacts | None:
        """Return the process that a daemon names as server or client; None if unknown or foreign.

        The log of an ordinary user's daemon may name any PID, but that daemon can serve only its
        own user: a process of another user is not its client, and is not shown.
        """
        found = self.processes.get(pid)
        if found is None or (daemon.limited and found.account != daemon.account):
            return None
        return found

    def host_pid(self, inputs: DaemonInputs, pid: int) -> int:
        """Return the PID on this host of a process that a daemon names; 0 if it is not found."""
        if not inputs.facts.has_own_pid_namespace:
            return pid
        process = inputs.facts.process
        namespace = process.pid_namespace if process is not None else None
        return self._host_pids.get((namespace, pid), 0) if pid and namespace is not None else 0

    def user(self, uid: int | None) -> str | None:
        return None if uid is None else self.users.get(uid)

    def memory_used(self, pid: int) -> Mapping[str, int]:
        return self._memory_by_process.get(pid, {})


def is_server(facts: ProcessFacts) -> bool:
    """Return whether a process is an MPS server, by its name (the kernel keeps 15 characters)."""
    return SERVER_PROGRAM.startswith(facts.name[:15]) and facts.name.startswith("nvidia-cuda-mps")


def _user_names(processes: Iterable[ProcessFacts]) -> dict[int, str]:
    return {facts.uid: facts.user for facts in processes if facts.uid is not None and facts.user}


def _host_pids(processes: Iterable[ProcessFacts]) -> dict[tuple[int, int], int]:
    """Return (PID namespace, PID in it) -> PID on this host."""
    found: dict[tuple[int, int], int] = {}
    for facts in processes:
        if facts.pid_namespace is not None and facts.namespace_pids:
            found.setdefault((facts.pid_namespace, facts.namespace_pids[-1]), facts.pid)
    return found


def _logged_client_pids(daemons: Iterable[DaemonInputs]) -> frozenset[int]:
    """Return the PIDs of clients in logs that use host PIDs."""
    return frozenset(
        client.pid
        for inputs in daemons
        if inputs.log_names_servers() and not inputs.facts.has_own_pid_namespace
        for server in inputs.state.servers
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
    gpus: Iterable[GpuObservation], processes: ProcfsObservation
) -> dict[str, dict[str, CgroupMemory]]:
    """Return path of a control group -> GPU UUID -> its memory, for the GPUs that NVML shows."""
    uuids = {
        pci_address(gpu.pci_bus_id): gpu.uuid
        for gpu in gpus
        if gpu.pci_bus_id is not None and gpu.parent_uuid is None
    }
    found: dict[str, dict[str, CgroupMemory]] = {}
    for memory in processes.cgroup_memory:
        uuid = uuids.get(pci_address(memory.pci_bus_id))
        if uuid is not None:
            found.setdefault(memory.path, {})[uuid] = memory
    return found


def _gpu_indexes(gpus: Iterable[GpuObservation], daemons: Iterable[DaemonInputs]) -> dict[str, str]:
    """Return GPU UUID -> index, also of GPUs that only a daemon names; "" if unknown."""
    indexes = {gpu.uuid: str(gpu.index) for gpu in gpus}
    for inputs in daemons:
        # A daemon without a known selection numbers the GPUs of one model like NVML.
        whole = inputs.visible_devices() is None
        for ordinal, uuid in inputs.device_uuids().items():
            indexes.setdefault(uuid, str(ordinal) if whole else "")
    return indexes
