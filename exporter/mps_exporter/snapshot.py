"""The nouns: what is known of a host at one moment, with units in the names.

A :class:`Snapshot` is what one collection makes of the observations and the ledger; the renderer
and the pages know nothing else. ``None`` means "not available": such a value is left out of every
output, never guessed. Times are Unix timestamps in seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from mps_exporter.observations import (
    CgroupMemory,
    ContainerName,
    DaemonFacts,
    GpuObservation,
    LogName,
    LogState,
    ProcessFacts,
)

ControlState = Literal["answering", "absent", "unresponsive", "draining", "refused"]
CONTROL_STATES: tuple[ControlState, ...] = (
    "answering",
    "absent",
    "unresponsive",
    "draining",
    "refused",
)

SERVER_STATES = ("INITIALIZING", "ACTIVE", "FAULT")
"""Words of the control tool; a newer driver's unknown word is passed through beside them."""

ClientState = Literal["waiting", "connecting", "creating_context", "active", "torn_down"]
CLIENT_STATES: tuple[ClientState, ...] = get_args(ClientState)
"""What a client is doing, in the order of a life."""

EXIT_CAUSES = ("requested", "crashed", "start_failed", "daemon_died", "ghost_ended")
LOSS_CAUSES = (
    "server_crashed",
    "daemon_died",
    "own_fault",
    "neighbour_fault",
    "unfinished_work",
    "unattributed_fault",
    "terminated",
)
REJECTION_CAUSES = ("context_limit", "server_not_ready", "invalid_device", "credentials")


LimitSource = Literal["client", "server", "unknown"]
LIMIT_SOURCES: tuple[LimitSource, ...] = get_args(LimitSource)

ProcessKind = Literal["mps_client", "mps_server", "direct", "graphics"]
PROCESS_KINDS: tuple[ProcessKind, ...] = get_args(ProcessKind)
"""What a process on a GPU is to MPS; direct computes beside it."""

QUERY_FAILURE_REASONS = ("timeout", "absent", "refused", "unparsable")
"""Outcomes of a run of the control tool that are failures."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations in buckets, not cumulative: counts[i] fell at or below bounds[i] (seconds).

    The last count, one more than there are bounds, is of those above all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float


@dataclass(frozen=True, slots=True)
class PossibleUnfinishedWork:
    """A client that ended alone, as slowly as with unfinished work; no client connected since."""

    pid: int
    uid: int | None
    ended_at: float
    seconds: float
    """How long its end took."""
    gpu_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """A client that waits behind another user's server: in the queue, or by now on a ghost."""

    pid: int
    uid: int
    since: float
    behind_uid: int | None
    """Whose server holds the GPU."""
    dead: bool = False
    """The process is gone; its entry is not: the daemon hangs when its turn comes."""


@dataclass(frozen=True, slots=True)
class Handover:
    """A client that the daemon sent to its running server, and the last thing that it did."""

    at: float
    pid: int
    uid: int
    server_pid: int | None = None
    """That server, where it has ended and the daemon has not taken notice."""
    answered: bool = False
    """server.log has had a line since: the server works, and so may the client."""


TimelineKind = Literal["held", "ghost", "idle", "waited"]
"""Clients of this user were connected; this user's server was a ghost; it was idle while others
waited; a client of this user waited behind another user's server."""


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """A part of the last ten minutes of one daemon."""

    kind: TimelineKind
    uid: int | None
    start: float
    end: float
    """As far as the logs have been read."""
    ongoing: bool = False


IncidentKind = Literal[
    "daemon_started",
    "daemon_died",
    "daemon_quit",
    "server_crashed",
    "server_start_failed",
    "fault",
    "unfinished_work",
    "fault_recovered",
    "client_terminated",
    "client_rejected",
    "wait_started",
    "wait_served",
    "wait_abandoned",
    "ghost",
    "ghost_ended",
]


FaultProof = Literal["", "address", "unit", "unknown", "unread"]
"""What the kernel log proves about a fault: by the address which client caused it, by the unit that
a running client did, nothing, or that the kernel log was not read. "": no fault."""


@dataclass(frozen=True, slots=True)
class EndedBefore:
    """A client that ended shortly before a fault."""

    pid: int
    seconds: float
    """From the end of its context to the fault."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something an operator would want to know happened, with its numbers."""

    at: float
    kind: IncidentKind
    server_pid: int | None = None
    uid: int | None = None
    pids: tuple[int, ...] = ()
    """Clients lost, refused, or waiting; the lost clients of a fault include the culprit."""
    blamed_pid: int | None = None
    """Of a fault: the client that MPS names, which proves nothing."""
    caused_by_pids: tuple[int, ...] = ()
    """Of a fault: the clients that caused it, proved by the kernel log."""
    proof: FaultProof = ""
    ended_before: tuple[EndedBefore, ...] = ()
    """Of a fault whose cause is not known: clients that ended shortly before, one of which may have
    left the work that caused it."""
    gpu_uuids: tuple[str, ...] = ()
    seconds: float | None = None
    """Of a wait or a recovery: how long it took."""
    detail: str = ""
    """How a cause is known, or its name."""
    count: int = 1
    """How often it was repeated: a server that cannot start fails twenty times a second."""
    counted: bool = True
    """False: it happened before the exporter began, so no counter shows it."""


LabelValues = tuple[str | int | None, ...]
LogMetricValues = Mapping[str, Mapping[LabelValues, float | Histogram]]
"""Metric that is counted from the logs -> values of its labels, without the daemon -> value. An
unknown user is None, an unknown GPU ""."""


@dataclass(frozen=True, slots=True)
class NamedServer:
    """A server as an MPS v3 daemon lists it. It may be configured and have no process yet."""

    name: str
    uid: int | None = None
    pid: int | None = None
    """As the daemon numbers processes; None: none runs, or it was not said."""
    status: str | None = None
    """The driver's own word: Ready, ..."""
    pipe_directory: str | None = None
    allowed_devices: tuple[str, ...] = ()
    context_ids: str | None = None


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace of a server: the limits of those clients that connect through its directory."""

    name: str
    server_name: str
    status: str | None = None
    """Of its server."""
    pipe_directory: str | None = None
    active_thread_ratio: float | None = None
    pinned_memory_limit_bytes: int | None = None
    """For each GPU."""
    unlimited: frozenset[str] = frozenset()
    """Which of NAMESPACE_LIMITS it does not limit, in the daemon's own words."""
    client_priority: int | None = None


NAMESPACE_LIMITS = ("active_threads", "pinned_memory")


@dataclass(frozen=True, slots=True)
class NamespaceClient:
    """A client as an MPS v3 daemon lists it."""

    pid: int
    """As the daemon numbers processes."""
    server_name: str
    namespace: str | None = None
    devices: tuple[str, ...] = ()
    """UUIDs, or ordinals in the server's own list."""
    command: str | None = None


@dataclass(frozen=True, slots=True)
class SmPartition:
    """SMs of a GPU that only clients of this partition use, or those that no partition has."""

    device: str
    """Its UUID, or the beginning of it, or an ordinal of the server's own list."""
    server_name: str = ""
    """Empty for a v2 daemon: its partitions belong to no server."""
    partition_id: str | None = None
    """What CUDA_MPS_SM_PARTITION names behind the slash; None: of no partition, or not carved."""
    name: str = ""
    chunks: int | None = None
    sms: int | None = None
    include_remainder: bool | None = None
    status: str | None = None
    """configured, created, unallocated, or a new word of the driver."""
    has_clients: bool | None = None

    @property
    def label(self) -> str:
        """What it is called: its name, or its ID with a v2 daemon, which knows no names."""
        return self.name or self.partition_id or ""

    @property
    def unallocated(self) -> bool:
        """These SMs are in no partition."""
        return self.status == "unallocated"


@dataclass(frozen=True, slots=True)
class ServerDevice:
    """A GPU as a server of an MPS v3 daemon numbers it."""

    uuid: str
    server_name: str = ""
    ordinal: int | None = None
    pci: str | None = None
    name: str | None = None
    sms: int | None = None
    chunks: int | None = None
    attributes: str | None = None


@dataclass(frozen=True, slots=True)
class Feature:
    """An optional behaviour of an MPS v3 daemon."""

    name: str
    enabled: bool
    default: bool
    """It is as NVIDIA ships it."""
    module: str | None = None
    covers: str | None = None


@dataclass(frozen=True, slots=True)
class Partitioning:
    """What a daemon says of named servers, namespaces and partitions; None: it did not say."""

    protocol: Literal["2", "3"]
    servers: tuple[NamedServer, ...] | None = None
    namespaces: tuple[Namespace, ...] | None = None
    clients: tuple[NamespaceClient, ...] | None = None
    partitions: tuple[SmPartition, ...] | None = None
    devices: tuple[ServerDevice, ...] | None = None
    features: tuple[Feature, ...] | None = None
    not_understood: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(query, one of REPLY_PARTS) -> how many of them in its last reply were left out."""

    def is_whole(self, query: str) -> bool:
        """Whether no row of a list was left out, so that its rows can be counted."""
        return not self.not_understood.get((query, "row"))

    def clients_by_namespace(self) -> Mapping[tuple[str, str], int]:
        """Count the clients of each namespace (server, name); some may not be known."""
        if self.clients is None or not self.is_whole("client_list"):
            return {}
        counts = Counter((client.server_name, client.namespace) for client in self.clients)
        return {
            (one.server_name, one.name): counts[one.server_name, one.name]
            for one in self.namespaces or ()
            if not counts[one.server_name, None]
        }


REPLY_PARTS = ("reply", "column", "row", "value")

PartitionFault = Literal["unknown", "other_server", "other_gpu"]
PARTITION_FAULTS: tuple[PartitionFault, ...] = get_args(PartitionFault)
"""The daemon has no such partition; it is another server's than the client's; it is on a GPU that
the client does not use."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client process of a server."""

    pid: int
    server_pid: int
    uid: int | None = None
    user: str | None = None
    command: str | None = None
    container_id: str | None = None
    pod_uid: str | None = None
    slurm_job_id: str | None = None
    systemd_unit: str | None = None
    pid_namespace: int | None = None
    limit_source: LimitSource = "unknown"
    """Whose active thread percentage is the lower one. "unknown": its environment cannot be read,
    or it is not known which GPU its memory limit is for. All limits of a client are upper bounds:
    a program may lower its own as it starts (os.environ), which is not seen from outside."""
    environment_readable: bool | None = None
    connected_at: float | None = None
    contexts: Mapping[str, int] = field(default_factory=dict)
    memory_used_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_limit_bytes: Mapping[str, int] = field(default_factory=dict)
    active_thread_ratio: float | None = None
    sm_limit: Mapping[str, int] = field(default_factory=dict)
    priority: int | None = None
    percentage_ignored: str | None = None
    """Its CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, where CUDA makes nothing of it."""
    memory_limit_ignored: str | None = None
    """Its CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, where CUDA makes nothing of it: one of its entries is
    for a GPU that the process does not see."""
    state: ClientState | None = None
    state_since: float | None = None
    confirmed: bool = True
    """There is a process of this PID, and of a user whom this daemon may serve."""
    server_name: str | None = None
    namespace: str | None = None
    """Both of an MPS v3 daemon only."""
    gpu_uuids: tuple[str, ...] = ()
    """The GPUs that an MPS v3 daemon names: it does not tell how many contexts there are."""
    sm_partition: str | None = None
    """What its CUDA_MPS_SM_PARTITION names behind the slash, where its daemon has partitions."""
    sm_partition_name: str | None = None
    """What its daemon calls that partition, if it has it."""
    sm_partition_fault: PartitionFault | None = None
    """Why it cannot have been meant for that partition."""
    cgroup: str | None = None
    """The nearest control group whose GPU memory is known: see Snapshot.cgroup_memory."""


@dataclass(frozen=True, slots=True)
class Server:
    """An MPS server."""

    pid: int
    uid: int | None = None
    user: str | None = None
    start_time_seconds: float | None = None
    state: str | None = None
    ghost: bool | None = None
    clients_connected: int | None = None
    contexts: Mapping[str, int] = field(default_factory=dict)
    contexts_limit: Mapping[str, int] = field(default_factory=dict)
    active_thread_ratio: float | None = None
    pinned_memory_limit_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_used_bytes: Mapping[str, int] = field(default_factory=dict)
    possible_unfinished_work: PossibleUnfinishedWork | None = None
    clients: tuple[Client, ...] = ()
    confirmed: bool = True
    """Its PID is now a process of the server's program, of a user whom this daemon may serve."""
    name: str | None = None
    """Of an MPS v3 daemon only."""


@dataclass(frozen=True, slots=True)
class ControlDaemon:
    """An MPS control daemon, named by its pipe directory."""

    pipe_directory: str
    log_directory: str
    state: ControlState | None
    """None: no query was sent, and /proc does not show it."""
    pid: int | None = None
    uid: int | None = None
    user: str | None = None
    start_time_seconds: float | None = None
    binary_version: str | None = None
    protocol: str | None = None
    multiuser: bool | None = None
    visible_devices: str | None = None
    query_duration_seconds: float | None = None
    query_failures: Mapping[str, int] = field(default_factory=dict)
    queries: int = 0
    default_active_thread_ratio: float | None = None
    default_pinned_memory_limit_bytes: Mapping[str, int] = field(default_factory=dict)
    default_client_priority: int | None = None
    servers_count: int | None = None
    servers: tuple[Server, ...] = ()
    waits: tuple[Wait, ...] = ()
    handover_backoff_seconds: float | None = None
    gpu_uuids: tuple[str, ...] = ()
    """The GPUs it serves; of one that is gone, those it served."""
    logs: tuple[LogState, ...] = ()
    counters: LogMetricValues | None = None
    """None: no log of this daemon was ever readable, so nothing was counted."""
    incidents: tuple[Incident, ...] = ()
    timeline: tuple[TimelineSpan, ...] = ()
    timeline_since: float | None = None
    dropped_clients: int = 0
    error: str | None = None
    facts: DaemonFacts | None = None
    partitioning: Partitioning | None = None
    """With PIDs as this host numbers them, and GPUs by UUID where these are known."""
    clients_by_partition: Mapping[str | None, int] | None = None
    """How many clients name each SM partition; None: not all clients are known, or not all of their
    environments."""
    resumed: bool = False
    """It, or a server of its, was stopped when it did not answer, and goes on now."""
    handover: Handover | None = None
    """Where it does not answer: the last thing that it did, and that client's process is there."""

    def clients_in(self, partition: SmPartition) -> int | None:
        """How many clients are in an SM partition; None: not known, as of one without an ID."""
        if self.clients_by_partition is None or partition.partition_id is None:
            return None
        return self.clients_by_partition.get(partition.partition_id, 0)

    def follows(self, log: LogName) -> bool:
        """Whether this log of its can be read now."""
        return any(state.log == log and state.readable for state in self.logs)

    @property
    def has_own_pid_namespace(self) -> bool:
        """Whether it numbers processes otherwise than this host."""
        process = self.facts.process if self.facts is not None else None
        return process is not None and len(process.namespace_pids) > 1

    @property
    def limited(self) -> bool:
        """Whether it is an ordinary user's: see DaemonFacts."""
        return self.facts is not None and self.facts.limited

    @property
    def shows_waits(self) -> bool:
        """Whether a client that waits would be seen.

        What the log of an MPS v3 daemon says of them was never published.
        """
        return self.protocol != "3" and self.follows("control")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU with what its processes are to MPS."""

    observation: GpuObservation
    index: str
    uuid: str
    processes_by_kind: Mapping[str, int] | None = None
    """By ProcessKind: those that the lists tell which could be read; None when no list could."""
    direct_pids: tuple[int, ...] = ()
    """Compute processes beside MPS."""
    direct_processes: tuple[ProcessFacts, ...] = ()
    """Those of them that /proc shows."""
    served_by: tuple[str, ...] = ()
    """Pipe directories of the daemons that serve it and are not gone."""
    seems_stranded: tuple[int, ...] | None = None
    """MPS processes that have no server now; a process that is just ending may be among them."""
    stranded_pids: tuple[int, ...] | None = None
    """Those of them that have had no server for a while."""
    stranded_clients: int | None = None
    sm_committed_ratio: float | None = None
    client_memory_committed_bytes: int | None = None

    def reading(self, quantity: str, **labels: str) -> float | None:
        """Return what NVML measured; None where it has no such reading, or no finite number."""
        wanted = labels.items()
        for one in self.observation.readings:
            if one.quantity == quantity and dict(one.labels).items() == wanted:
                return one.value if math.isfinite(one.value) else None
        return None


CollectorName = Literal["nvml", "control", "logs", "process"]
COLLECTORS: tuple[CollectorName, ...] = ("nvml", "control", "logs", "process")


@dataclass(frozen=True, slots=True)
class CollectorResult:
    """How one source fared in this collection."""

    name: CollectorName
    success: bool
    duration_seconds: float
    timed_out: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Chapter:
    """A moment of a demo that can be jumped to."""

    name: str
    title: str
    at_seconds: float
    """Its position in the demo, at speed 1."""


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """Present only when a recording is replayed instead of a live host."""

    scenario: str
    machine: str
    driver_version: str
    recorded_at: str
    speed: float = 1.0
    """Recorded seconds for each second of the viewer."""
    loop: int = 1
    """How often playing began: 1, and one more for each further recording, loop and jump."""
    chapters: tuple[Chapter, ...] = ()
    chapter: str | None = None
    """Name of the present chapter."""
    position_seconds: float = 0.0
    """On the scale of the chapters' positions."""
    duration_seconds: float = 0.0
    """Of one loop, on the same scale."""
    names_replaced: bool = False
    """Users and programs have names that the recording does not hold."""
    recorded_from: float = 0.0
    """A moment of the recording, ..."""
    played_from: float = 0.0
    """... and the same moment in the viewer's time."""

    def viewer_time(self, moment: float) -> float:
        """Return a recorded time as the viewer's clock had it when it was played."""
        return self.played_from + (moment - self.recorded_from) / self.speed


@dataclass(frozen=True, slots=True)
class KernelLog:
    """Whether the kernel log is being read, which proves who caused a fault."""

    readable: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is known of the host at one moment."""

    taken_at: float
    driver_version: str | None = None
    cuda_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_indexes: Mapping[str, str] = field(default_factory=dict)
    """GPU UUID -> index, also of GPUs that only a daemon's device map names; "" when not known."""
    daemons: tuple[ControlDaemon, ...] = ()
    collectors: tuple[CollectorResult, ...] = ()
    user_names: Mapping[int, str] = field(default_factory=dict)
    """User -> name, of the processes that were identified: also of those that only wait."""
    containers: tuple[ContainerName, ...] = ()
    """Containers of processes on the GPUs that the kubelet has names for."""
    cgroup_memory: Mapping[str, Mapping[str, CgroupMemory]] = field(default_factory=dict)
    """Control group -> GPU UUID -> its memory there."""
    unreadable_environments: int | None = None
    """Processes whose MPS variables this exporter has no right to read."""
    ignored_processes: Mapping[int, int] = field(default_factory=dict)
    """User -> processes of MPS's programs, and clients of that user's daemons, that are left out:
    that user has too many."""
    kernel_log: KernelLog | None = None
    """None: an old recording, which does not say."""
    unknown_readings: int | None = None
    """Readings that were left out since the exporter started: the catalogue does not know them."""
    recording: RecordingInfo | None = None
