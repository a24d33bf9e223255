"""Named servers, namespaces and SM partitions: of MPS v3 daemons, and partitions of v2 ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mps_exporter.merge.clients import ClientInputs, ServerLimits, client_of, host_pid
from mps_exporter.merge.daemon_inputs import DaemonInputs, MergeContext, ServerInputs, is_server
from mps_exporter.mps import client_limits
from mps_exporter.mps.protocol_v3 import PARTITION_REPLIES, partition_identity, unique
from mps_exporter.snapshot import (
    Client,
    NamedServer,
    Namespace,
    NamespaceClient,
    PartitionFault,
    Partitioning,
    Server,
    SmPartition,
)

PARTITION_VARIABLE = "CUDA_MPS_SM_PARTITION"


def merge_partitioning(context: MergeContext, inputs: DaemonInputs) -> Partitioning | None:
    """Return what a daemon says, with this host's PIDs and with UUIDs of GPUs."""
    found = inputs.answers.partitioning
    if found is None:
        return None
    # Two names of one GPU may make one partition of two rows.
    partitions, refused = unique(
        (
            replace(one, device=_uuid(context, found, one.server_name, one.device) or one.device)
            for one in found.partitions or ()
        ),
        partition_identity,
    )
    counts = Counter(found.not_understood)
    counts[PARTITION_REPLIES[found.protocol], "row"] += refused
    return replace(
        found,
        not_understood={key: count for key, count in counts.items() if count},
        servers=found.servers
        and tuple(
            replace(one, pid=_own_pid(context, inputs, one.pid or 0) or None)
            for one in found.servers
        ),
        clients=found.clients
        and tuple(
            replace(
                one,
                pid=_own_pid(context, inputs, one.pid),
                devices=tuple(
                    uuid
                    for device in one.devices
                    if (uuid := _uuid(context, found, one.server_name, device)) is not None
                ),
            )
            for one in found.clients
        ),
        partitions=None if found.partitions is None else partitions,
    )


def _own_pid(context: MergeContext, inputs: DaemonInputs, pid: int) -> int:
    """Return the PID of this host; 0: none, or nobody who could be found."""
    return host_pid(context, inputs, pid) if inputs.has_own_pid_namespace() else pid


def _uuid(context: MergeContext, found: Partitioning, server_name: str, device: str) -> str | None:
    """Find the GPU that a daemon calls so: by UUID, by its beginning, or by ordinal."""
    if device.isdigit():
        named = {
            one.uuid
            for one in found.devices or ()
            if one.ordinal == int(device) and one.server_name in ("", server_name)
        }
    elif device in context.gpus:
        return device
    else:
        named = {uuid for uuid in context.gpus if uuid.startswith(device)} or {device}
    return named.pop() if len(named) == 1 else None


def merge_named_servers(
    context: MergeContext, inputs: DaemonInputs, found: Partitioning
) -> tuple[Server, ...]:
    """Return the servers of an MPS v3 daemon that have a process."""
    return tuple(
        _listed_server(context, inputs, found, named) for named in found.servers or () if named.pid
    )


def _listed_server(
    context: MergeContext, inputs: DaemonInputs, found: Partitioning, named: NamedServer
) -> Server:
    pid = named.pid or 0
    process = context.process(inputs.facts, pid)
    uid = named.uid if named.uid is not None else getattr(process, "uid", None)
    whole = found.is_whole("client_list")
    own = [one for one in found.clients or () if one.server_name == named.name]
    return Server(
        pid=pid,
        uid=uid,
        user=context.user(uid),
        start_time_seconds=process.start_time_seconds if process is not None else None,
        state=named.status,
        clients_connected=len(own) if found.clients is not None and whole else None,
        memory_used_bytes=context.memory_used(pid),
        clients=tuple(_listed_client(context, inputs, found, pid, one) for one in own),
        confirmed=process is not None and is_server(process),
        name=named.name,
    )


def _listed_client(
    context: MergeContext,
    inputs: DaemonInputs,
    found: Partitioning,
    server_pid: int,
    listed: NamespaceClient,
) -> Client:
    client_inputs = ClientInputs(listed.pid, dict.fromkeys(listed.devices, 1))
    server = ServerInputs(inputs, server_pid, None, None, None, {})
    namespace = next(
        (
            one
            for one in found.namespaces or ()
            if (one.server_name, one.name) == (listed.server_name, listed.namespace)
        ),
        None,
    )
    client = client_of(context, client_inputs, server, _namespace_limits(found, listed, namespace))
    unlimited = client.memory_limit_ignored is not None or namespace is None
    return replace(
        client,
        contexts={},
        gpu_uuids=listed.devices,
        command=client.command or listed.command,
        server_name=listed.server_name,
        namespace=listed.namespace,
        # An entry for a GPU that it does not see voids the namespace's limit, too (measured by
        # ai-dynamo on driver 615).
        memory_limit_bytes={} if unlimited else client.memory_limit_bytes,
    )


def _namespace_limits(
    found: Partitioning, listed: NamespaceClient, namespace: Namespace | None
) -> ServerLimits:
    """Return what its namespace allows a client, on each of its GPUs.

    The lower of the namespace's and the client's own share counts (measured by ai-dynamo on driver
    615: 25 % of 188 SMs are 46; with 10 % of its own a client has 18). Limits of a server hold for
    its namespace "default", which is in the list with them.
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
    return ServerLimits(
        gpus=client_limits.DaemonGpus(uuids, complete=bool(uuids), order=order),
        ordinals=ordinals,
        ratio=ratio,
        memory={} if memory is None else dict.fromkeys(ordinals.values(), memory),
    )


def in_partitions(
    context: MergeContext, found: Partitioning | None, servers: Iterable[Server]
) -> tuple[Server, ...]:
    """Add to the clients which partition they are in."""
    if found is None:
        return tuple(servers)
    by_id = None
    if found.partitions is not None:
        by_id = {one.partition_id: one for one in found.partitions if one.partition_id is not None}
    return tuple(
        replace(server, clients=tuple(_in_partition(context, by_id, one) for one in server.clients))
        for server in servers
    )


def clients_by_partition(servers: Sequence[Server]) -> Mapping[str | None, int] | None:
    """Count the clients that name each SM partition; None: see ControlDaemon."""
    clients = [client for server in servers for client in server.clients]
    if any(server.clients_connected is None for server in servers):
        return None
    if not all(client.environment_readable for client in clients):
        return None
    return Counter(client.sm_partition for client in clients)


def _in_partition(
    context: MergeContext, by_id: Mapping[str, SmPartition] | None, client: Client
) -> Client:
    process = context.processes.get(client.pid)
    environment = process.mps_environment if process is not None else None
    device, _, partition_id = (environment or {}).get(PARTITION_VARIABLE, "").partition("/")
    if not partition_id:
        return client
    partition = (by_id or {}).get(partition_id)
    fault = _partition_fault(context, client, device, partition) if by_id is not None else None
    client = replace(
        client,
        sm_partition=partition_id,
        sm_partition_name=partition.label if partition is not None else None,
        sm_partition_fault=fault,
    )
    # Its share of all SMs means nothing there; how many it has in a partition that was not meant
    # for it, or was deleted since it started, is not known.
    sms = {}
    if partition is not None and partition.sms is not None and fault is None:
        sms = {partition.device: partition.sms}
    return replace(client, active_thread_ratio=None, sm_limit=sms)


def _partition_fault(
    context: MergeContext, client: Client, device: str, partition: SmPartition | None
) -> PartitionFault | None:
    """Why a client cannot have been meant for a partition: MPS lets it choose any."""
    if partition is None:
        return "unknown"
    if partition.server_name and client.server_name not in (None, partition.server_name):
        return "other_server"
    if not (partition.device.startswith(device) or device.startswith(partition.device)):
        return "other_gpu"
    used = {*client.contexts, *client.gpu_uuids, *client.memory_used_bytes}
    known = used and partition.device in context.gpus
    return "other_gpu" if known and partition.device not in used else None
