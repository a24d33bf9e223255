"""Metrics of named servers, namespaces, SM partitions, and memory by control group."""

import math
from collections.abc import Callable, Iterable, Mapping

from mps_exporter.metrics.clients import client_rows
from mps_exporter.metrics.metric_types import (
    PROC,
    TOOL,
    Page,
    RawLabels,
    Rows,
    Scope,
    Section,
    T,
    rows_of_daemons,
)
from mps_exporter.mps.cgroups import Attribution, parse_cgroup
from mps_exporter.mps.protocol_v3 import REPLIES
from mps_exporter.observations import CgroupMemory
from mps_exporter.snapshot import (
    PARTITION_FAULTS,
    REPLY_PARTS,
    Client,
    Feature,
    NamedServer,
    Namespace,
    Partitioning,
    ServerDevice,
    SmPartition,
)

_OF_DAEMON = "MPS v3 daemon"
_DMEM, _OR_NVML = "/sys/fs/cgroup", "NVML"
_WORDS = ("true", "false")
_NAMESPACE_LIMITS = ("active_threads", "pinned_memory")


SECTION = Section("Named servers, namespaces and SM partitions")


def _scope(
    labels: str, read: Callable[[Partitioning], Iterable[T]], name: Callable[[T, Page], RawLabels]
) -> Scope[T]:
    """Return the scope of each daemon's rows, with the labels that name a row."""
    rows = rows_of_daemons(lambda daemon: read(daemon.partitioning), name)
    return Scope(SECTION, f"daemon {labels}", rows)


def _partitions(*, unallocated: bool) -> Callable[[Partitioning], Iterable[SmPartition]]:
    return lambda p: (one for one in p.rows(SmPartition) if one.unallocated == unallocated)


def _namespace_client_rows(page: Page) -> Rows[Client]:
    for labels, client in client_rows(page):
        if client.pid and client.server_name is not None:
            for uuid in client.gpu_uuids or ("",):
                yield (*labels, *page.gpu(uuid)), client


def _cgroup_rows(page: Page) -> Rows[Attribution]:
    for path in page.snapshot.cgroup_memory:
        yield (path,), parse_cgroup(f"0::{path}")


def _cgroup_gpu_rows(page: Page) -> Rows[CgroupMemory]:
    for path, by_gpu in page.snapshot.cgroup_memory.items():
        for uuid, memory in by_gpu.items():
            yield (path, *page.gpu(uuid)), memory


def _limits_of_namespace(namespace: Namespace) -> Mapping[RawLabels, float]:
    limits = namespace.active_thread_ratio, namespace.pinned_memory_limit_bytes
    return {
        (name,): limit < math.inf
        for name, limit in zip(_NAMESPACE_LIMITS, limits, strict=True)
        if limit is not None
    }


def _finite(limit: float | None) -> float | None:
    return None if limit == math.inf else limit


def _is_hard_limited(memory: CgroupMemory) -> bool | None:
    known = memory.hard_unlimited or memory.hard_limit_bytes is not None
    return not memory.hard_unlimited if known else None


NAMED_SERVER = _scope("server_name", lambda p: p.rows(NamedServer), lambda s, _: (s.name,))
NAMESPACE = _scope(
    "server_name namespace", lambda p: p.rows(Namespace), lambda n, _: (n.server_name, n.name)
)
NAMESPACE_CLIENT = Scope(SECTION, "daemon server pid gpu uuid", _namespace_client_rows)
PARTITION = _scope(
    "server_name gpu uuid partition",
    _partitions(unallocated=False),
    lambda one, page: (one.server_name, *page.gpu(one.device), one.label),
)
UNALLOCATED = _scope(
    "server_name gpu uuid",
    _partitions(unallocated=True),
    lambda one, page: (one.server_name, *page.gpu(one.device)),
)
CLIENT = Scope(SECTION, "daemon server pid", client_rows)
DEVICE = _scope(
    "server_name gpu uuid",
    lambda p: p.rows(ServerDevice),
    lambda one, page: (one.server_name, *page.gpu(one.uuid)),
)
FEATURE = _scope("feature", lambda p: p.rows(Feature), lambda f, _: (f.feature,))
CGROUP = Scope(SECTION, "cgroup", _cgroup_rows)
CGROUP_GPU = Scope(SECTION, "cgroup gpu uuid", _cgroup_gpu_rows)
NOT_UNDERSTOOD = _scope(
    "reply part", lambda p: sorted(p.not_understood.items()), lambda item, _: item[0]
)

NAMED_SERVER.info(
    "mps_named_server_info",
    _OF_DAEMON,
    "server=pid uid status pipe_directory allowed_devices context_ids",
).means("A server of an MPS v3 daemon; server is its PID, empty while it has no process.")
NAMESPACE.info("mps_namespace_info", _OF_DAEMON, "status pipe_directory").means(
    "A namespace of a server; status is the server's."
)
NAMESPACE.each(
    "mps_namespace_limited", _OF_DAEMON, _limits_of_namespace, limit=_NAMESPACE_LIMITS
).means("1 when the namespace limits this for its clients, 0 when the daemon reports unlimited.")
NAMESPACE.number(
    "mps_namespace_active_thread_ratio", _OF_DAEMON, lambda n: _finite(n.active_thread_ratio)
).means("Share of the SMs of each GPU that the namespace allows each client.")
NAMESPACE.number(
    "mps_namespace_pinned_memory_limit_bytes",
    _OF_DAEMON,
    lambda n: _finite(n.pinned_memory_limit_bytes),
).means("Device memory that the namespace allows each client on each GPU.")
NAMESPACE.number("mps_namespace_client_priority", _OF_DAEMON, lambda n: n.client_priority).means(
    "Priority of the namespace's clients: 0 normal, 1 below normal."
)
NAMESPACE.number("mps_namespace_clients", _OF_DAEMON, lambda n: n.clients).means(
    "Client processes in the namespace."
)
NAMESPACE_CLIENT.info("mps_client_namespace_info", _OF_DAEMON, "server_name namespace").means(
    "The named server and the namespace that a client connected through, for each of its GPUs."
)
PARTITION.info(
    "mps_sm_partition_info", TOOL, "partition_id status include_remainder", include_remainder=_WORDS
).means(
    "A static SM partition. partition_id: the part of CUDA_MPS_SM_PARTITION behind the slash; "
    "partition: its name, or with a v2 daemon its ID."
)
PARTITION.number("mps_sm_partition_sms", TOOL, lambda p: p.sms).means("SMs of the partition.")
PARTITION.number("mps_sm_partition_chunks", TOOL, lambda p: p.chunks).means(
    "Chunks of the partition: the units in which the driver divides a GPU."
)
PARTITION.number(
    "mps_sm_partition_clients", f"{PROC}/PID/environ, {TOOL}", lambda p: p.clients
).means(
    "Clients that name this partition. Absent where the environment of a client cannot be read."
)
PARTITION.number("mps_sm_partition_in_use", TOOL, lambda p: p.has_clients).means(
    "1 when the v2 daemon reports clients of the partition, 0 when it reports none."
)
UNALLOCATED.number("mps_sm_partition_unallocated_sms", TOOL, lambda p: p.sms).means(
    "SMs of the GPU that are in no partition."
)
UNALLOCATED.number("mps_sm_partition_unallocated_chunks", TOOL, lambda p: p.chunks).means(
    "Chunks of the GPU that are in no partition."
)
CLIENT.info(
    "mps_client_sm_partition_info",
    f"{PROC}/PID/environ, {TOOL}",
    "partition fault",
    lambda c: (
        (c.sm_partition_name or c.sm_partition, c.sm_partition_fault)
        if c.pid and c.sm_partition is not None
        else None
    ),
    fault=PARTITION_FAULTS,
).means("The partition that a client names. fault: why it cannot have been meant for it.")
DEVICE.info(
    "mps_server_device_info", _OF_DAEMON, "ordinal pci_bus_id=pci name=model attributes"
).means("A GPU as a named server numbers it.")
DEVICE.number("mps_server_device_sms", _OF_DAEMON, lambda d: d.sms).means(
    "SMs of the GPU, as the daemon counts them."
)
DEVICE.number("mps_server_device_chunks", _OF_DAEMON, lambda d: d.chunks).means(
    "Chunks of the GPU."
)
FEATURE.info(
    "mps_control_feature_info",
    _OF_DAEMON,
    "enabled default module covers",
    enabled=_WORDS,
    default=_WORDS,
).means("An optional behaviour of the daemon. default: whether it is as shipped.")
CGROUP.info("mps_cgroup_info", _DMEM, "container_id pod_uid slurm_job_id systemd_unit").means(
    "A control group with GPU memory of its own, and what it belongs to."
)
CGROUP_GPU.number(
    "mps_cgroup_memory_used_bytes", f"dmem.current, else {_OR_NVML}", lambda m: m.used_bytes
).means("Device memory of all processes in the control group.")
CGROUP_GPU.number(
    "mps_cgroup_memory_soft_limit_bytes", f"dmem.min, else {_OR_NVML}", lambda m: m.soft_limit_bytes
).means(
    "Device memory guaranteed to the control group: above it MPS may end a client of the group."
)
CGROUP_GPU.number(
    "mps_cgroup_memory_hard_limit_bytes", f"dmem.max, else {_OR_NVML}", lambda m: m.hard_limit_bytes
).means("Device memory beyond which allocations of the control group fail.")
CGROUP_GPU.number(
    "mps_cgroup_memory_limited", f"dmem.max, else {_OR_NVML}", _is_hard_limited
).means(
    "1 when the control group itself has a hard limit, 0 when that is max: a group above it may "
    "have one."
)
CLIENT.info(
    "mps_client_cgroup_info",
    f"{PROC}/PID/cgroup",
    "cgroup",
    lambda c: None if c.cgroup is None else (c.cgroup,),
).means("The control group whose GPU memory the client uses.")
NOT_UNDERSTOOD.number(
    "mps_control_reply_not_understood", TOOL, lambda item: item[1], reply=REPLIES, part=REPLY_PARTS
).means("Parts of the daemon's last replies that are not understood.")
