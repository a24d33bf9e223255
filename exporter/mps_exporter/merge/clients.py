"""The clients of a server: who they are, and what they may use."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from mps_exporter.merge.daemon_inputs import DaemonInputs, MergeContext, ServerInputs
from mps_exporter.mps import client_limits
from mps_exporter.mps.cgroups import parse_cgroup, unified_path, with_parents
from mps_exporter.mps.clients import TrackedClient
from mps_exporter.observations import ProcessFacts
from mps_exporter.snapshot import Client, LimitSource

LIMIT_VARIABLES = (
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass(frozen=True, slots=True)
class _ClientLimits:
    """What a client may use, according to its environment and its server."""

    source: LimitSource = "unknown"
    ratio: float | None = None
    sms: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    priority: int | None = None
    percentage_ignored: str | None = None
    memory_ignored: str | None = None


_NOT_KNOWN = _ClientLimits()


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits that a server sets for its clients."""

    gpus: client_limits.DaemonGpus
    ordinals: Mapping[str, int]
    """GPU UUID -> device ordinal of the daemon."""
    ratio: float | None
    memory: Mapping[int, int]
    """Device ordinal -> bytes."""
    found: dict[Hashable, _ClientLimits] = field(default_factory=dict)
    """Clients' limits by what they follow from: a server's clients are mostly alike."""


@dataclass(frozen=True, slots=True)
class ClientInputs:
    """What the log, the tool and NVML say of one client."""

    pid: int
    """As this host numbers it; 0: not known."""
    contexts: Mapping[str, int] = field(default_factory=dict)
    """GPU UUID -> contexts."""
    uid: int | None = None
    logged: TrackedClient | None = None


def merge_clients(context: MergeContext, server: ServerInputs) -> tuple[Client, ...] | None:
    """Merge what is known of a server's clients; None: neither log nor control tool shows them."""
    clients = _client_inputs(server)
    if clients is None:
        return None
    if server.daemon.has_own_pid_namespace():
        clients = [replace(one, pid=host_pid(context, server.daemon, one.pid)) for one in clients]
    if any(one.pid == 0 for one in clients):
        clients = _resolve_pid0_clients(context, clients, server.pid)
    server_limits = ServerLimits(
        gpus=_daemon_gpus(context, server),
        ordinals={uuid: ordinal for ordinal, uuid in server.devices.items()},
        ratio=server.thread_ratio(),
        memory=server.memory_limits_by_ordinal(),
    )
    return tuple(client_of(context, one, server, server_limits) for one in clients)


def _client_inputs(server: ServerInputs) -> list[ClientInputs] | None:
    """The clients as the log names them, or else the tool; None when neither does."""
    logged, reply = server.logged, server.reply
    if logged is not None and server.clients_logged:
        return [ClientInputs(one.pid, one.contexts_by_gpu, one.uid, one) for one in logged.clients]
    if reply is None or reply.client_pids is None:
        return None
    return [
        ClientInputs(
            pid,
            {
                server.devices[ordinal]: clients[pid]
                for ordinal, clients in (reply.contexts or {}).items()
                if pid in clients and ordinal in server.devices
            },
            logged.uid if logged is not None else None,
        )
        for pid in dict.fromkeys(reply.client_pids)
    ]


def host_pid(context: MergeContext, inputs: DaemonInputs, pid: int) -> int:
    """Find whom a daemon in its own PID namespace calls so; 0: nobody who could be found."""
    process = inputs.facts.process
    namespace = process.pid_namespace if process is not None else None
    return context.host_pids.get((namespace, pid), 0) if pid and namespace is not None else 0


def _resolve_pid0_clients(
    context: MergeContext, clients: list[ClientInputs], server_pid: int
) -> list[ClientInputs]:
    """Clients that the daemon calls PID 0, since it lives in a PID namespace of its own.

    NVML knows their true PIDs. Where it lists as many MPS processes on the server's GPUs as the
    daemon has clients, they are these; else it is not known which are whose.
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
        replace(one, pid=pid, contexts=contexts)
        for one, (pid, contexts) in zip(clients, sorted(listed.items()), strict=True)
    ]


def client_of(
    context: MergeContext, inputs: ClientInputs, server: ServerInputs, server_limits: ServerLimits
) -> Client:
    """Merge what is known of one client."""
    logged = inputs.logged
    state, state_since = (None, None) if logged is None else logged.state
    process = context.process(server.daemon.facts, inputs.pid)
    uid = process.uid if process is not None else inputs.uid
    attribution = parse_cgroup(process.cgroup if process is not None else None)
    environment = process.mps_environment if process is not None else None
    # An ordinary user's log may say anything of a process that is not that user's.
    unproved = process is None and server.daemon.facts.limited
    # Without its environment: whether it lowered its own limits is not known.
    own = (
        _NOT_KNOWN if environment is None else _limits(context, inputs, server_limits, environment)
    )
    return Client(
        pid=inputs.pid,
        server_pid=server.pid,
        uid=uid,
        user=process.user if process is not None else context.user(uid),
        command=process.name if process is not None else None,
        container_id=attribution.container_id,
        pod_uid=attribution.pod_uid,
        slurm_job_id=attribution.slurm_job_id,
        systemd_unit=attribution.systemd_unit,
        pid_namespace=process.pid_namespace if process is not None else None,
        environment_readable=environment is not None if process is not None else None,
        connected_at=logged.connected_at if logged is not None else None,
        state=None if unproved else state,
        state_since=None if unproved else state_since,
        contexts=inputs.contexts,
        memory_used_bytes=context.memory_used(inputs.pid),
        limit_source=own.source,
        active_thread_ratio=own.ratio,
        sm_limit=own.sms,
        memory_limit_bytes=own.memory,
        priority=own.priority,
        percentage_ignored=own.percentage_ignored,
        memory_limit_ignored=own.memory_ignored,
        confirmed=process is not None and not process.ended,
        cgroup=_known_cgroup(context, process),
    )


def _known_cgroup(context: MergeContext, process: ProcessFacts | None) -> str | None:
    """The nearest control group whose GPU memory is known."""
    path = unified_path(process.cgroup) if context.cgroup_memory and process is not None else None
    groups = () if path is None else with_parents(path)
    return next((group for group in groups if group in context.cgroup_memory), None)


# ---------------------------------------------------------------------------------- limits


def _daemon_gpus(context: MergeContext, server: ServerInputs) -> client_limits.DaemonGpus:
    """The GPUs of a server's daemon, in the driver's order.

    The driver orders GPUs of one model as NVML does, by PCI address. Where the models differ its
    default is "the fastest first", which cannot be seen from outside; neither can that of MIG.
    """
    uuids = frozenset(server.devices.values()) - {""}
    whole = {uuid for uuid, gpu in context.gpus.items() if gpu.parent_uuid is None}
    # The tool's map has all of them; the log only those that were used.
    mapped = bool(server.daemon.answers.device_uuids())
    complete = mapped or (bool(uuids) and uuids == whole)
    models = {context.gpus[uuid].name or uuid for uuid in uuids & whole}
    order = None
    if complete and (len(uuids) == 1 or (uuids <= whole and len(models) == 1)):
        order = tuple(
            sorted(uuids, key=lambda uuid: context.gpus[uuid].index if uuid in whole else 0)
        )
    return client_limits.DaemonGpus(uuids, complete, order)


def _limits(
    context: MergeContext,
    inputs: ClientInputs,
    server_limits: ServerLimits,
    environment: Mapping[str, str],
) -> _ClientLimits:
    """Return a client's limits; equal ones are computed once."""
    allowed_ratio, allowed_memory, at_connect = (
        server_limits.ratio,
        server_limits.memory,
        inputs.logged,
    )
    if at_connect is not None and at_connect.thread_ratio is not None:
        allowed_ratio = at_connect.thread_ratio
    if at_connect is not None and at_connect.memory_limits is not None:
        allowed_memory = at_connect.memory_limits
    reported = tuple(map(environment.get, LIMIT_VARIABLES))
    reasons = allowed_ratio, tuple(allowed_memory.items()), reported, tuple(inputs.contexts)
    found = server_limits.found.get(reasons)
    if found is None:
        uuids = tuple(inputs.contexts)
        found = _limits_of(context, allowed_ratio, allowed_memory, uuids, server_limits, *reported)
        server_limits.found[reasons] = found
    return found


def _limits_of(
    context: MergeContext,
    allowed_ratio: float | None,
    allowed_memory: Mapping[int, int],
    uuids: tuple[str, ...],
    server_limits: ServerLimits,
    percentage: str | None,
    memory_text: str | None,
    priority: str | None,
    visible_devices: str | None,
) -> _ClientLimits:
    own = client_limits.parse_active_thread_percentage(percentage)
    ratio = (
        client_limits.effective_ratio(own.ratio, allowed_ratio)
        if allowed_ratio is not None
        else None
    )
    lowered = own.ratio is not None and allowed_ratio is not None and own.ratio < allowed_ratio
    visible = client_limits.visible_gpus(visible_devices, server_limits.gpus)
    own_memory = client_limits.client_memory_limits(memory_text, visible, uuids, server_limits.gpus)
    memory: dict[str, int] = {}
    source: LimitSource = "unknown"
    if own_memory.bytes_by_uuid is not None:
        allowed = {
            uuid: allowed_memory.get(ordinal) for uuid, ordinal in server_limits.ordinals.items()
        }
        memory = _memory_limits(own_memory.bytes_by_uuid, allowed, uuids)
        source = "client" if lowered else "server"
    return _ClientLimits(
        source=source,
        ratio=ratio,
        sms=_sm_limits(context, ratio, uuids) if ratio is not None else {},
        memory=memory,
        priority=client_limits.parse_client_priority(priority),
        percentage_ignored=percentage if own.ignored else None,
        memory_ignored=memory_text if own_memory.ignored else None,
    )


def _sm_limits(context: MergeContext, ratio: float, uuids: Iterable[str]) -> dict[str, int]:
    """GPU UUID -> SMs that this ratio is there, where the GPU's own number is known."""
    sms: dict[str, int] = {}
    for uuid in uuids:
        gpu = context.gpus.get(uuid)
        if gpu is None or gpu.sm_count is None:
            continue
        count = client_limits.sms_of_ratio(ratio, gpu.sm_count, gpu.compute_capability)
        if count is not None:
            sms[uuid] = count
    return sms


def _memory_limits(
    own: Mapping[str, int], allowed: Mapping[str, int | None], uuids: Iterable[str]
) -> dict[str, int]:
    """GPU UUID -> the lower of the client's own limit and its server's."""
    memory: dict[str, int] = {}
    for uuid in uuids:
        known = [limit for limit in (own.get(uuid), allowed.get(uuid)) if limit is not None]
        if known:
            memory[uuid] = min(known)
    return memory
