"""The clients of a server: who they are, and what they may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.mps import client_limits
from mps_exporter.mps.cgroups import parse_cgroup, unified_path, with_parents
from mps_exporter.mps.client_limits import DaemonGpus, MemoryLimits, ThreadPercentage
from mps_exporter.mps.clients import TrackedClient
from mps_exporter.mps.control_protocol import ServerReply
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.observations import ProcessFacts
from mps_exporter.snapshot import (
    Client,
    Namespace,
    NamespaceClient,
    PartitionFault,
    Partitioning,
    SmPartition,
)

PARTITION_VARIABLE = "CUDA_MPS_SM_PARTITION"


@dataclass(frozen=True, slots=True)
class ServerInputs:
    """All that is known of one server of a v2 daemon."""

    daemon: DaemonInputs
    pid: int
    """On this host, if its process is visible; else in the daemon's PID namespace."""
    logged: TrackedServer | None
    """The server as the log shows it; None if it does not."""
    reply: ServerReply | None
    process: ProcessFacts | None
    devices: Mapping[int, str]
    """Device ordinal -> GPU UUID."""

    @property
    def clients_logged(self) -> bool:
        return self.logged is not None and self.daemon.log_readable("server")

    def state(self) -> str | None:
        if self.logged is not None:
            return self.logged.state
        return self.reply.state if self.reply is not None else None

    def uid(self) -> int | None:
        if self.logged is not None and self.logged.uid is not None:
            return self.logged.uid
        return self.process.uid if self.process is not None else None

    def thread_ratio(self) -> float | None:
        if self.logged is not None and self.logged.thread_ratio is not None:
            return self.logged.thread_ratio
        return self.reply.active_thread_ratio if self.reply is not None else None

    def memory_limits_by_ordinal(self) -> Mapping[int, int]:
        """Return device ordinal -> bytes that each new client may pin there."""
        reported = self.reply.pinned_memory_limit_bytes if self.reply is not None else {}
        logged = self.logged.memory_limits if self.logged is not None else {}
        return {**reported, **logged}


@dataclass(frozen=True, slots=True)
class _AllowedLimits:
    """The limits that a server or a namespace sets for its clients."""

    gpus: DaemonGpus
    ordinals: Mapping[str, int]
    """GPU UUID -> device ordinal of the daemon."""
    ratio: float | None
    memory: Mapping[int, int]
    """Device ordinal -> bytes."""


@dataclass(frozen=True, slots=True)
class _ClientInputs:
    """One client as the log or the control tool shows it."""

    pid: int
    """On this host; 0 if unknown."""
    contexts: Mapping[str, int] = field(default_factory=dict)
    """GPU UUID -> contexts."""
    uid: int | None = None
    logged: TrackedClient | None = None


def merge_clients(context: MergeContext, server: ServerInputs) -> tuple[Client, ...] | None:
    """Merge the facts about a server's clients; None if no source lists them."""
    clients = _client_inputs(server)
    if clients is None:
        return None
    if server.daemon.facts.has_own_pid_namespace:
        clients = [
            replace(client, pid=context.host_pid(server.daemon, client.pid)) for client in clients
        ]
    if any(client.pid == 0 for client in clients):
        clients = _resolve_pid0_clients(context, clients, server.pid)
    allowed = _AllowedLimits(
        gpus=_daemon_gpus(context, server),
        ordinals={uuid: ordinal for ordinal, uuid in server.devices.items()},
        ratio=server.thread_ratio(),
        memory=server.memory_limits_by_ordinal(),
    )
    return tuple(
        _merge_client(context, client, server.daemon, server.pid, allowed) for client in clients
    )


def _client_inputs(server: ServerInputs) -> list[_ClientInputs] | None:
    """Return the clients of the log, or else of the control tool; None if neither lists them."""
    logged, reply = server.logged, server.reply
    if logged is not None and server.clients_logged:
        return [
            _ClientInputs(client.pid, client.contexts_by_gpu, client.uid, client)
            for client in logged.clients
        ]
    if reply is None or reply.client_pids is None:
        return None
    return [
        _ClientInputs(
            pid,
            {
                server.devices[ordinal]: counts[pid]
                for ordinal, counts in (reply.contexts or {}).items()
                if pid in counts and ordinal in server.devices
            },
            logged.uid if logged is not None else None,
        )
        for pid in dict.fromkeys(reply.client_pids)
    ]


def _resolve_pid0_clients(
    context: MergeContext, clients: list[_ClientInputs], server_pid: int
) -> list[_ClientInputs]:
    """Find the PIDs of clients that a daemon in its own PID namespace calls PID 0.

    NVML lists PIDs of this host. If it lists as many MPS processes on the server's GPUs as the
    daemon has clients, these are the clients; else it is unknown which of them are.
    """
    listed: dict[int, dict[str, int]] = {}
    for gpu in context.gpus.values():
        of_gpu = {process.pid for process in gpu.processes or () if process.kind == "compute"}
        if server_pid not in of_gpu:
            continue
        for process in gpu.processes or ():
            own = process.pid in of_gpu and process.pid not in context.known_pids
            if process.kind == "mps" and own and process.pid != server_pid:
                listed.setdefault(process.pid, {})[gpu.uuid] = 1
    if len(listed) != len(clients):
        return clients
    return [
        replace(client, pid=pid, contexts=contexts)
        for client, (pid, contexts) in zip(clients, sorted(listed.items()), strict=True)
    ]


def _merge_client(
    context: MergeContext,
    inputs: _ClientInputs,
    daemon: DaemonInputs,
    server_pid: int,
    allowed: _AllowedLimits,
) -> Client:
    logged, process = inputs.logged, context.process(daemon.facts, inputs.pid)
    state, state_since = (None, None) if logged is None else logged.state
    if process is None and daemon.facts.limited:
        # The log of an ordinary user may claim any state of a process that is not that user's.
        state = state_since = None
    environment = process.mps_environment if process is not None else None
    return Client(
        pid=inputs.pid,
        server_pid=server_pid,
        connected_at=logged.connected_at if logged is not None else None,
        state=state,
        state_since=state_since,
        contexts=inputs.contexts,
        memory_used_bytes=context.memory_used(inputs.pid),
        **_process_fields(context, inputs.uid, process),
        **_limits(context, inputs, allowed, environment),
    )


def _process_fields(
    context: MergeContext, uid: int | None, process: ProcessFacts | None
) -> dict[str, Any]:
    """Return the fields of Client about its process, or without one about the user of the log."""
    if process is None:
        return {"uid": uid, "user": context.user(uid), "confirmed": False}
    attribution = parse_cgroup(process.cgroup)
    return {
        "uid": process.uid,
        "user": process.user,
        "command": process.name,
        "container_id": attribution.container_id,
        "pod_uid": attribution.pod_uid,
        "slurm_job_id": attribution.slurm_job_id,
        "systemd_unit": attribution.systemd_unit,
        "pid_namespace": process.pid_namespace,
        "environment_readable": process.mps_environment is not None,
        "confirmed": not process.ended,
        "cgroup": _known_cgroup(context, process),
    }


def _known_cgroup(context: MergeContext, process: ProcessFacts) -> str | None:
    """Return the nearest control group whose GPU memory is known."""
    path = unified_path(process.cgroup) if context.cgroup_memory else None
    groups = () if path is None else with_parents(path)
    return next((group for group in groups if group in context.cgroup_memory), None)


# ---------------------------------------------------------------------------------- limits


def _daemon_gpus(context: MergeContext, server: ServerInputs) -> DaemonGpus:
    """Return the GPUs of a server's daemon, in the driver's order if it is known.

    The driver orders GPUs of one model like NVML, by PCI address. For different models its default
    is "the fastest first", which cannot be seen from outside; neither can the order of MIG devices.
    """
    uuids = frozenset(server.devices.values()) - {""}
    whole = {uuid for uuid, gpu in context.gpus.items() if gpu.parent_uuid is None}
    # The tool's map contains all GPUs; the log only the GPUs that were used.
    mapped = bool(server.daemon.answers.device_uuids())
    complete = mapped or (bool(uuids) and uuids == whole)
    models = {context.gpus[uuid].name or uuid for uuid in uuids & whole}
    order = None
    if complete and (len(uuids) == 1 or (uuids <= whole and len(models) == 1)):
        order = tuple(
            sorted(uuids, key=lambda uuid: context.gpus[uuid].index if uuid in whole else 0)
        )
    return DaemonGpus(uuids, complete, order)


def _limits(
    context: MergeContext,
    inputs: _ClientInputs,
    allowed: _AllowedLimits,
    environment: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Return fields of Client: the lower of its own limits and those in force when it connected."""
    if environment is None:
        return {}  # unknown whether the client lowered its own limits
    allowed_ratio, allowed_memory, logged = allowed.ratio, allowed.memory, inputs.logged
    if logged is not None and logged.thread_ratio is not None:
        allowed_ratio = logged.thread_ratio
    if logged is not None and logged.memory_limits is not None:
        allowed_memory = logged.memory_limits
    percentage = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    memory_text = environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    visible_devices = environment.get("CUDA_VISIBLE_DEVICES")
    uuids = tuple(inputs.contexts)
    own, own_memory = _own_limits(percentage, memory_text, visible_devices, uuids, allowed.gpus)
    ratio = None
    if allowed_ratio is not None:
        ratio = client_limits.effective_ratio(own.ratio, allowed_ratio)
    fields: dict[str, Any] = {
        "active_thread_ratio": ratio,
        "sm_limit": _sm_limits(context, ratio, uuids),
        "priority": client_limits.parse_client_priority(
            environment.get("CUDA_MPS_CLIENT_PRIORITY")
        ),
        "percentage_ignored": percentage if own.ignored else None,
        "memory_limit_ignored": memory_text if own_memory.ignored else None,
    }
    if own_memory.bytes_by_uuid is not None:
        lowered = ratio is not None and ratio != allowed_ratio
        fields["limit_source"] = "client" if lowered else "server"
        fields["memory_limit_bytes"] = {
            uuid: min(known)
            for uuid in uuids
            if (known := _known_limits(uuid, own_memory.bytes_by_uuid, allowed, allowed_memory))
        }
    return fields


def _known_limits(
    uuid: str, own: Mapping[str, int], allowed: _AllowedLimits, memory: Mapping[int, int]
) -> list[int]:
    limits = own.get(uuid), memory.get(allowed.ordinals.get(uuid, -1))
    return [limit for limit in limits if limit is not None]


@lru_cache(maxsize=64)
def _own_limits(
    percentage: str | None,
    memory_text: str | None,
    visible_devices: str | None,
    uuids: tuple[str, ...],
    gpus: DaemonGpus,
) -> tuple[ThreadPercentage, MemoryLimits]:
    """Return the limits in a client's environment. The clients of a server are mostly alike."""
    visible = client_limits.visible_gpus(visible_devices, gpus)
    memory = client_limits.client_memory_limits(memory_text, visible, uuids, gpus)
    return client_limits.parse_active_thread_percentage(percentage), memory


def _sm_limits(
    context: MergeContext, ratio: float | None, uuids: tuple[str, ...]
) -> dict[str, int]:
    """Return GPU UUID -> SMs of this ratio, if the GPU's own number is known."""
    sms: dict[str, int] = {}
    for uuid in uuids:
        gpu = context.gpus.get(uuid)
        if ratio is None or gpu is None or gpu.sm_count is None:
            continue
        count = client_limits.sms_of_ratio(ratio, gpu.sm_count, gpu.compute_capability)
        if count is not None:
            sms[uuid] = count
    return sms


# ---------------------------------------------------------------------------------- MPS v3


def merge_listed_client(
    context: MergeContext,
    daemon: DaemonInputs,
    found: Partitioning,
    server_pid: int,
    listed: NamespaceClient,
) -> Client:
    names = listed.server_name, listed.namespace
    namespace = next(
        (one for one in found.namespaces or () if (one.server_name, one.name) == names), None
    )
    inputs = _ClientInputs(listed.pid, dict.fromkeys(listed.devices, 1))
    limits = _namespace_limits(found, listed, namespace)
    client = _merge_client(context, inputs, daemon, server_pid, limits)
    unlimited = client.memory_limit_ignored is not None or namespace is None
    return replace(
        client,
        contexts={},
        gpu_uuids=listed.devices,
        command=client.command or listed.command,
        server_name=listed.server_name,
        namespace=listed.namespace,
        # An entry for a GPU that the client does not see voids the namespace's limit, too
        # (measured by ai-dynamo on driver 615).
        memory_limit_bytes={} if unlimited else client.memory_limit_bytes,
    )


def _namespace_limits(
    found: Partitioning, listed: NamespaceClient, namespace: Namespace | None
) -> _AllowedLimits:
    """Return what its namespace allows a client, on each of its GPUs.

    The lower of the namespace's and the client's own share is in force (measured by ai-dynamo on
    driver 615: 25 % of 188 SMs are 46; with 10 % of its own a client has 18). Limits of a server
    hold for its namespace "default", which is in the list with them.
    """
    devices = [one for one in found.devices or () if one.server_name in ("", listed.server_name)]
    uuids = frozenset(one.uuid for one in devices)
    ratio = namespace.active_thread_ratio if namespace is not None else None
    if namespace is not None and "active_threads" in namespace.unlimited:
        ratio = 1.0
    memory = namespace.pinned_memory_limit_bytes if namespace is not None else None
    ordinals = {uuid: number for number, uuid in enumerate(listed.devices)}
    numbered = sorted((one.ordinal, one.uuid) for one in devices if one.ordinal is not None)
    order = tuple(uuid for _, uuid in numbered) if len(numbered) == len(uuids) > 0 else None
    return _AllowedLimits(
        gpus=DaemonGpus(uuids, complete=bool(uuids), order=order),
        ordinals=ordinals,
        ratio=ratio,
        memory={} if memory is None else dict.fromkeys(ordinals.values(), memory),
    )


# ---------------------------------------------------------------------------------- SM partitions


def in_partition(
    context: MergeContext, by_id: Mapping[str | None, SmPartition] | None, client: Client
) -> Client:
    """Add the SM partition that a client's environment names.

    by_id: ID -> partition of the client's daemon; None if the daemon did not list them.
    """
    process = context.processes.get(client.pid)
    environment = process.mps_environment if process is not None else None
    device, _, partition_id = (environment or {}).get(PARTITION_VARIABLE, "").partition("/")
    if not partition_id:
        return client
    partition = (by_id or {}).get(partition_id)
    fault = _partition_fault(context, client, device, partition) if by_id is not None else None
    # The share of all SMs means nothing in a partition. The SMs are unknown in a partition that
    # was not meant for the client, or was deleted since it started.
    sms = {}
    if partition is not None and partition.sms is not None and fault is None:
        sms = {partition.device: partition.sms}
    return replace(
        client,
        sm_partition=partition_id,
        sm_partition_name=partition.label if partition is not None else None,
        sm_partition_fault=fault,
        active_thread_ratio=None,
        sm_limit=sms,
    )


def _partition_fault(
    context: MergeContext, client: Client, device: str, partition: SmPartition | None
) -> PartitionFault | None:
    """Return why a partition cannot be meant for a client: MPS lets a client choose any."""
    if partition is None:
        return "unknown"
    if partition.server_name and client.server_name not in (None, partition.server_name):
        return "other_server"
    if not (partition.device.startswith(device) or device.startswith(partition.device)):
        return "other_gpu"
    used = {*client.contexts, *client.gpu_uuids, *client.memory_used_bytes}
    known = used and partition.device in context.gpus
    return "other_gpu" if known and partition.device not in used else None
