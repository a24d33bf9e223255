"""Samples of named servers, namespaces, SM partitions and memory partitions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.snapshot import (
    NAMESPACE_LIMITS,
    Client,
    ControlDaemon,
    Namespace,
    Partitioning,
    SmPartition,
    Snapshot,
)

AddSample = Callable[[str, tuple[str | int | None, ...], float | int | None], None]
"""(metric, labels, value): None adds nothing."""


def add_partitioning(
    add: AddSample, daemon: ControlDaemon, indexes: Mapping[str, str], *, single_clients: bool
) -> None:
    """Add what only MPS v3 daemons have, and partitions; nothing of any other daemon."""
    found = daemon.partitioning
    if found is None:
        return
    d = (daemon.pipe_directory,)
    clients = [client for server in daemon.servers for client in server.clients]
    for client in clients if single_clients else ():
        if client.pid:  # of those that cannot be told apart there is only the number
            _client_samples(add, d, client, indexes)
    _server_samples(add, d, found)
    client_counts = found.clients_by_namespace()
    for namespace in found.namespaces or ():
        _namespace_samples(add, d, namespace, client_counts)
    for partition in found.partitions or ():
        _partition_samples(add, d, partition, indexes, daemon.clients_in(partition))
    _device_samples(add, d, found, indexes)
    for (reply, part), count in sorted(found.not_understood.items()):
        add("mps_control_reply_not_understood", (*d, reply, part), count)


def _client_samples(
    add: AddSample, d: tuple[str], client: Client, indexes: Mapping[str, str]
) -> None:
    dsp = (*d, client.server_pid, client.pid)
    for uuid in client.gpu_uuids or ("",) if client.server_name is not None else ():
        gpu = (indexes.get(uuid, ""), uuid)
        add("mps_client_namespace_info", (*dsp, *gpu, client.server_name, client.namespace), 1.0)
    if client.sm_partition is not None:
        labels = (*dsp, client.sm_partition_name or client.sm_partition, client.sm_partition_fault)
        add("mps_client_sm_partition_info", labels, 1.0)


def _server_samples(add: AddSample, d: tuple[str], found: Partitioning) -> None:
    for server in found.servers or ():
        labels = (
            *d,
            server.name,
            server.pid,
            server.uid,
            server.status,
            server.pipe_directory,
            ",".join(server.allowed_devices),
            server.context_ids,
        )
        add("mps_named_server_info", labels, 1.0)


def _namespace_samples(
    add: AddSample,
    d: tuple[str],
    namespace: Namespace,
    client_counts: Mapping[tuple[str, str], int],
) -> None:
    n = (*d, namespace.server_name, namespace.name)
    add("mps_namespace_info", (*n, namespace.status, namespace.pipe_directory), 1.0)
    limits: dict[str, float | None] = {
        "active_threads": namespace.active_thread_ratio,
        "pinned_memory": namespace.pinned_memory_limit_bytes,
    }
    for limit in NAMESPACE_LIMITS:
        if limit in namespace.unlimited or limits[limit] is not None:
            add("mps_namespace_limited", (*n, limit), float(limit not in namespace.unlimited))
    add("mps_namespace_active_thread_ratio", n, namespace.active_thread_ratio)
    add("mps_namespace_pinned_memory_limit_bytes", n, namespace.pinned_memory_limit_bytes)
    add("mps_namespace_client_priority", n, namespace.client_priority)
    add("mps_namespace_clients", n, client_counts.get((namespace.server_name, namespace.name)))


def _partition_samples(
    add: AddSample,
    d: tuple[str],
    partition: SmPartition,
    indexes: Mapping[str, str],
    clients: int | None,
) -> None:
    uuid = partition.device
    gpu = (*d, partition.server_name, indexes.get(uuid, ""), uuid)
    if partition.unallocated:
        add("mps_sm_partition_unallocated_sms", gpu, partition.sms)
        add("mps_sm_partition_unallocated_chunks", gpu, partition.chunks)
        return
    p = (*gpu, partition.label)
    remainder = partition.include_remainder
    shown = None if remainder is None else str(remainder).lower()
    add("mps_sm_partition_info", (*p, partition.partition_id, partition.status, shown), 1.0)
    add("mps_sm_partition_sms", p, partition.sms)
    add("mps_sm_partition_chunks", p, partition.chunks)
    add("mps_sm_partition_clients", p, clients)
    if partition.has_clients is not None:
        add("mps_sm_partition_in_use", p, float(partition.has_clients))


def _device_samples(
    add: AddSample, d: tuple[str], found: Partitioning, indexes: Mapping[str, str]
) -> None:
    for one in found.devices or ():
        gpu = (*d, one.server_name, indexes.get(one.uuid, ""), one.uuid)
        info = (*gpu, one.ordinal, one.pci, one.name, one.attributes)
        add("mps_server_device_info", info, 1.0)
        add("mps_server_device_sms", gpu, one.sms)
        add("mps_server_device_chunks", gpu, one.chunks)
    for feature in found.features or ():
        flags = tuple(str(flag).lower() for flag in (feature.enabled, feature.default))
        add(
            "mps_control_feature_info",
            (*d, feature.name, *flags, feature.module, feature.covers),
            1.0,
        )


CGROUP_MAX = 200
"""Longer paths are cut, and told apart by a hash."""


def add_cgroups(add: AddSample, snapshot: Snapshot, *, single_clients: bool) -> None:
    """Add the GPU memory of control groups, and which client is in which."""
    for path, by_gpu in snapshot.cgroup_memory.items():
        name, place = _cgroup(path), parse_cgroup(f"0::{path}")
        labels = (place.container_id, place.pod_uid, place.slurm_job_id, place.systemd_unit)
        add("mps_cgroup_info", (name, *labels), 1.0)
        for uuid, memory in by_gpu.items():
            c = (name, snapshot.gpu_indexes.get(uuid, ""), uuid)
            add("mps_cgroup_memory_used_bytes", c, memory.used_bytes)
            add("mps_cgroup_memory_soft_limit_bytes", c, memory.soft_limit_bytes)
            add("mps_cgroup_memory_hard_limit_bytes", c, memory.hard_limit_bytes)
            if memory.hard_unlimited or memory.hard_limit_bytes is not None:
                add("mps_cgroup_memory_limited", c, float(not memory.hard_unlimited))
    for daemon in snapshot.daemons if single_clients else ():
        for server in daemon.servers:
            for client in server.clients:
                if client.cgroup is not None:
                    dsp = (daemon.pipe_directory, client.server_pid, client.pid)
                    add("mps_client_cgroup_info", (*dsp, _cgroup(client.cgroup)), 1.0)


def _cgroup(path: str) -> str:
    if len(path) <= CGROUP_MAX:
        return path
    digest = hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{path[: CGROUP_MAX - 17]}~{digest}"
