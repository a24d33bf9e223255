"""The clients of a server: who they are, and what they may use."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.mps import client_limits
from mps_exporter.mps.cgroups import parse_cgroup, unified_path, with_parents
from mps_exporter.mps.client_limits import DaemonGpus
from mps_exporter.mps.clients import TrackedClient
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.tool_commands import ServerReply
from mps_exporter.observations import ProcessFacts
from mps_exporter.snapshot import (
    Client,
    JoinReason,
    Namespace,
    NamespaceClient,
    PartitionFault,
    Partitioning,
    SmPartition,
)

PARTITION_VARIABLE = "CUDA_MPS_SM_PARTITION"
PER_CONTEXT_VARIABLE = "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING"
"""With this variable, each context of a client may have its own percentage."""


class AllowedLimits(NamedTuple):
    """The limits that a server or a namespace sets for its clients."""

    gpus: DaemonGpus
    ratio: float | None = None
    memory: Mapping[str, int] = MappingProxyType({})  # GPU UUID -> bytes.


class _Listed(NamedTuple):
    """One client as the log or the control tool shows it."""

    client: Client
    allowed: AllowedLimits | None  # The limits in force when it connected; None if unknown.


def server_limits(
    context: MergeContext, daemon: DaemonInputs, logged: TrackedServer | None, reply: ServerReply
) -> AllowedLimits:
    """Return the limits that a server sets for new clients, by the log or else the control tool."""
    devices, ratio = daemon.device_uuids(), reply.active_thread_ratio
    memory = dict(reply.pinned_memory_limit_bytes)
    if logged is not None:
        ratio = ratio if logged.thread_ratio is None else logged.thread_ratio
        memory |= logged.memory_limits
    return AllowedLimits(_daemon_gpus(context, daemon), ratio, by_uuid(devices, memory))


def by_uuid(devices: Mapping[int, str], limits: Mapping[int, int]) -> dict[str, int]:
    """Return GPU UUID -> limit, for limits by device ordinal."""
    return {devices[ordinal]: limit for ordinal, limit in limits.items() if ordinal in devices}


def merge_clients(
    context: MergeContext,
    daemon: DaemonInputs,
    server_pid: int,
    logged: TrackedServer | None,
    reply: ServerReply,
    allowed: AllowedLimits,
) -> tuple[Client, ...] | None:
    """Return a server's clients, with host PIDs (0 if unknown); None if no source lists them."""
    devices = daemon.device_uuids()
    if logged is not None and daemon.log_readable("server"):
        found = [_logged_client(devices, one, server_pid, allowed) for one in logged.clients]
    elif reply.client_pids is not None:
        uid = logged.uid if logged is not None else None
        contexts = _contexts_by_pid(devices, reply)
        clients = (Client(pid, server_pid, uid, contexts=contexts[pid]) for pid in contexts)
        found = [_Listed(client, allowed) for client in clients]
    else:
        return None
    if daemon.facts.has_own_pid_namespace:
        found = [
            one._replace(client=replace(one.client, pid=context.host_pid(daemon, one.client.pid)))
            for one in found
        ]
    if any(client.pid == 0 for client, _ in found):
        found = _resolve_pid0_clients(context, found, server_pid)
    return tuple(_merge_client(context, daemon, *one) for one in found)


def _logged_client(
    devices: Mapping[int, str], logged: TrackedClient, server_pid: int, allowed: AllowedLimits
) -> _Listed:
    if logged.thread_ratio is not None:
        allowed = allowed._replace(ratio=logged.thread_ratio)
    if logged.memory_limits is not None:
        allowed = allowed._replace(memory=by_uuid(devices, logged.memory_limits))
    state, since = logged.state
    known: dict[str, Any] = {
        "connected_at": logged.connected_at,
        "state": state,
        "state_since": since,
    }
    contexts = logged.contexts_by_gpu
    return _Listed(Client(logged.pid, server_pid, logged.uid, contexts=contexts, **known), allowed)


def _contexts_by_pid(devices: Mapping[int, str], reply: ServerReply) -> dict[int, dict[str, int]]:
    """Return PID of each client -> GPU UUID -> contexts."""
    contexts: dict[int, dict[str, int]] = {pid: {} for pid in reply.client_pids or ()}
    for ordinal, counts in (reply.contexts or {}).items():
        if ordinal in devices:
            for pid in counts.keys() & contexts.keys():
                contexts[pid][devices[ordinal]] = counts[pid]
    return contexts


def _resolve_pid0_clients(
    context: MergeContext, clients: Sequence[_Listed], server_pid: int
) -> list[_Listed]:
    """Find the PIDs of clients that a daemon in its own PID namespace calls PID 0.

    If NVML lists as many unidentified MPS processes of a user on the server's GPUs as the server
    has such clients of this user, these are the clients; else it is unknown which of them are. If
    GPUs do not tell clients apart, only facts that are equal in all are known. A client that a
    fault hit may have left NVML's list, and another process may be there instead.
    """
    known = context.known_pids | {server_pid} | {client.pid for client, _ in clients}
    listed: dict[int | None, dict[int, dict[str, int]]] = {}
    for gpu in context.gpus.values():
        compute, mps = (
            {process.pid for process in gpu.processes or () if process.kind == kind}
            for kind in ("compute", "mps")
        )
        for pid in (compute & mps) - known if server_pid in compute else ():
            process = context.processes.get(pid)
            of_user = listed.setdefault(None if process is None else process.uid, {})
            of_user.setdefault(pid, {})[gpu.uuid] = 1
    resolved = [one for one in clients if one.client.pid]
    for uid in dict.fromkeys(client.uid for client, _ in clients if not client.pid):
        unnamed = [one for one in clients if not one.client.pid and one.client.uid == uid]
        found = listed.get(uid, {})
        torn_down = any(client.state == "torn_down" for client, _ in unnamed)
        if None in listed or len(unnamed) != len(found) or torn_down:
            resolved += unnamed
        else:
            in_log = sorted(sorted(client.contexts) for client, _ in unnamed)
            by_gpu = in_log == sorted(map(sorted, found.values()))
            alike = unnamed
            for pid, gpus in sorted(found.items()):
                if by_gpu:
                    alike = [one for one in unnamed if one.client.contexts.keys() == gpus.keys()]
                facts = {
                    name: _common(getattr(client, name) for client, _ in alike)
                    for name in ("connected_at", "state", "state_since")
                }
                allowed = _common(allowed for _, allowed in alike)
                client = Client(pid, server_pid, uid, contexts=gpus, **facts)
                resolved.append(_Listed(client, allowed))
    return resolved


def _common(values: Iterable[Any]) -> Any:
    """Return the common value, or None."""
    first, *others = values
    return first if all(one == first for one in others) else None


def _merge_client(
    context: MergeContext, daemon: DaemonInputs, client: Client, allowed: AllowedLimits | None
) -> Client:
    process = context.process(daemon.facts, client.pid)
    if process is None and daemon.facts.limited:
        # The log of an ordinary user may claim any state of a process that is not that user's.
        client = replace(client, state=None, state_since=None)
    environment = None if process is None else process.mps_environment
    return replace(
        client,
        memory_used_bytes=context.memory_used(client.pid),
        **_process_fields(context, client.uid, process, daemon.facts.process),
        **_limits(context, allowed, tuple(client.contexts), environment),
    )


def _process_fields(
    context: MergeContext,
    uid: int | None,
    process: ProcessFacts | None,
    daemon: ProcessFacts | None,
) -> dict[str, Any]:
    """Return the fields of Client about its process; without a process, the user in the log."""
    if process is None:
        return {"uid": uid, "user": context.user(uid), "confirmed": False}
    place = parse_cgroup(process.cgroup)
    return {
        "uid": process.uid,
        "user": process.user,
        "command": process.name,
        "pid_namespace": process.pid_namespace,
        "environment_readable": process.mps_environment is not None,
        "limiter": process.limiter,
        "joined_by": _join_reason(process, daemon),
        "own_shared_memory": daemon is not None and process.has_own_shared_memory(daemon),
        "confirmed": not process.ended,
        "cgroup": _known_cgroup(context, process),
        "container_id": place.container_id,
        "pod_uid": place.pod_uid,
        "slurm_job_id": place.slurm_job_id,
        "systemd_unit": place.systemd_unit,
    }


def _join_reason(process: ProcessFacts, daemon: ProcessFacts | None) -> JoinReason | None:
    if process.mps_environment is None:
        return None
    if process.mps_environment.get("CUDA_MPS_PIPE_DIRECTORY"):
        return "variable"
    on_host = daemon is not None and daemon.default_mounted  # a mount for all processes
    return "mount" if process.default_mounted and not on_host else "default"


def _known_cgroup(context: MergeContext, process: ProcessFacts) -> str | None:
    """Return the process's nearest control group with known GPU memory, if any."""
    path = unified_path(process.cgroup) if context.cgroup_memory else None
    groups = () if path is None else with_parents(path)
    return next((group for group in groups if group in context.cgroup_memory), None)


# ---------------------------------------------------------------------------------- limits


def _daemon_gpus(context: MergeContext, daemon: DaemonInputs) -> DaemonGpus:
    """Return the GPUs of a daemon, in the driver's order if it is known.

    The driver orders GPUs of one model like NVML, by PCI address. For different models its default
    is "the fastest first", which cannot be seen from outside; neither can the order of MIG devices.
    """
    uuids = frozenset(daemon.device_uuids().values()) - {""}
    whole = {uuid for uuid, gpu in context.gpus.items() if gpu.parent_uuid is None}
    # The tool's map contains all GPUs; the log only the GPUs that were used.
    mapped = bool(daemon.answers.device_uuids())
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
    allowed: AllowedLimits | None,
    uuids: tuple[str, ...],
    environment: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Return a client's limits, the lower of its own and those at connection; {} if unknown."""
    if environment is None or allowed is None:
        return {}  # unknown whether the client lowered its own limits
    percentage = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    memory_text = environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    visible = client_limits.visible_gpus(environment.get("CUDA_VISIBLE_DEVICES"), allowed.gpus)
    own = client_limits.parse_active_thread_percentage(percentage)
    own_memory = client_limits.client_memory_limits(memory_text, visible, uuids, allowed.gpus)
    ratio = None
    per_context = environment.get(PER_CONTEXT_VARIABLE, "0") not in ("", "0")
    if allowed.ratio is not None and not per_context:
        ratio = min(own.ratio, allowed.ratio)
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
        limits = own_memory.bytes_by_uuid, allowed.memory
        fields["memory_limit_bytes"] = {
            uuid: min(known)
            for uuid in uuids
            if (known := [memory[uuid] for memory in limits if uuid in memory])
        }
        if ratio is not None:
            fields["limit_source"] = "server" if ratio == allowed.ratio else "client"
    if per_context:
        fields["limit_source"] = "per_context"
    return fields


def _sm_limits(
    context: MergeContext, ratio: float | None, uuids: tuple[str, ...]
) -> dict[str, int]:
    """Return GPU UUID -> SMs of this ratio, if the GPU's SMs and the rounding are known."""
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
    namespaces = {(one.server_name, one.name): one for one in found.rows(Namespace)}
    namespace = namespaces.get((listed.server_name, listed.namespace or ""))
    limits = _namespace_limits(found, listed, namespace)
    client = Client(listed.pid, server_pid, contexts=dict.fromkeys(listed.devices, 1))
    client = _merge_client(context, daemon, client, limits)
    unlimited = client.memory_limit_ignored is not None or namespace is None
    return replace(
        client,
        contexts={},
        gpu_uuids=listed.devices,
        command=client.command or (listed.command or "").partition(" ")[0] or None,
        server_name=listed.server_name,
        namespace=listed.namespace,
        # An entry for a GPU that the client does not see voids the namespace's limit, too
        # (measured by ai-dynamo on driver 615).
        memory_limit_bytes={} if unlimited else client.memory_limit_bytes,
    )


def _namespace_limits(
    found: Partitioning, listed: NamespaceClient, namespace: Namespace | None
) -> AllowedLimits:
    """Return the limits of a client's namespace, by GPU of the client.

    The lower of the namespace's and the client's own share is in force (measured by ai-dynamo on
    driver 615: 25 % of 188 SMs are 46; with 10 % of its own a client has 18). A server's
    limits are listed as those of its namespace "default".
    """
    devices = found.devices_of(listed.server_name)
    uuids = frozenset(one.uuid for one in devices)
    numbered = sorted((one.ordinal, one.uuid) for one in devices if one.ordinal is not None)
    order = tuple(uuid for _, uuid in numbered) if len(numbered) == len(uuids) > 0 else None
    allowed = AllowedLimits(DaemonGpus(uuids, complete=bool(uuids), order=order))
    if namespace is None:
        return allowed
    ratio, memory = namespace.active_thread_ratio, namespace.pinned_memory_limit_bytes
    if memory is not None and memory < math.inf:
        allowed = allowed._replace(memory=dict.fromkeys(listed.devices, int(memory)))
    return allowed._replace(ratio=None if ratio is None else min(ratio, 1.0))


# ---------------------------------------------------------------------------------- SM partitions


def in_partition(context: MergeContext, found: Partitioning, client: Client) -> Client:
    """Add the SM partition that a client's environment names."""
    process = context.processes.get(client.pid)
    environment = process.mps_environment if process is not None else None
    device, _, partition_id = (environment or {}).get(PARTITION_VARIABLE, "").partition("/")
    if not partition_id:
        return client
    listed = found.lists.get(SmPartition)
    partition = next((one for one in listed or () if one.partition_id == partition_id), None)
    fault = _partition_fault(context, client, device, partition) if listed is not None else None
    # The share of all SMs means nothing in a partition. The SMs are unknown in a partition that
    # was not meant for the client or was deleted since it started, or if SMs can be borrowed.
    sms = {}
    certain = fault is None and not found.lends_sms
    if partition is not None and partition.sms is not None and certain:
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
    """Return why a partition is not meant for a client (MPS lets it choose any), else None."""
    if partition is None:
        return "unknown"
    if partition.server_name and client.server_name not in (None, partition.server_name):
        return "other_server"
    if not (partition.device.startswith(device) or device.startswith(partition.device)):
        return "other_gpu"
    used = {*client.contexts, *client.gpu_uuids, *client.memory_used_bytes}
    known = used and partition.device in context.gpus
    return "other_gpu" if known and partition.device not in used else None
