"""The state of a host at one moment, with units in the names.

A :class:`Snapshot` is the result of one collection, and the only input of metrics, pages and
findings. ``None`` means "not available": such a value is absent from every output, never guessed.
Times are Unix timestamps in seconds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar, get_args

from mps_exporter.observations import (
    CgroupMemory,
    ContainerName,
    DaemonFacts,
    GpuObservation,
    KernelObservation,
    LogName,
    LogState,
    ProcessFacts,
)

T = TypeVar("T")

ControlState = Literal["answering", "absent", "unresponsive", "draining", "refused"]
CONTROL_STATES: tuple[ControlState, ...] = get_args(ControlState)

SERVER_STATES = ("INITIALIZING", "ACTIVE", "FAULT")
"""Server states that the control tool prints; other states of a newer driver are passed through."""

ClientState = Literal["waiting", "connecting", "creating_context", "active", "torn_down"]
CLIENT_STATES: tuple[ClientState, ...] = get_args(ClientState)  # In the order of a client's life.

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


JoinReason = Literal["variable", "mount", "default"]
"""How a client found its daemon: by its variable, a mount of its own, or the default directory."""

LimitSource = Literal["client", "server", "per_context", "unknown"]
LIMIT_SOURCES: tuple[LimitSource, ...] = get_args(LimitSource)

ProcessKind = Literal["mps_client", "mps_server", "direct", "graphics"]
PROCESS_KINDS: tuple[ProcessKind, ...] = get_args(ProcessKind)
"""Roles of the processes on a GPU; "direct" computes without MPS."""

QUERY_FAILURE_REASONS = ("timeout", "absent", "refused", "unparsable")
"""Outcomes of a query that count as failures."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations in buckets, not cumulative: counts[i] are at or below bounds[i] (seconds).

    One more count than bounds: the last count is of the observations above all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float


@dataclass(frozen=True, slots=True)
class PossibleUnfinishedWork:
    """A client, the last on its GPUs, that exited as slowly as a client with unfinished work."""

    pid: int
    uid: int | None
    ended_at: float
    seconds: float  # Duration of its exit.
    gpu_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """A client that waits behind another user's server: in the queue, or behind a ghost."""

    pid: int
    uid: int
    since: float
    behind_uid: int | None  # User of the server that holds the GPU.
    dead: bool = False  # The process has exited, but is still queued.
    overtaken_by: int = 0  # Clients of other users that were admitted while it waited.
    users_before: int = 0  # Other users who wait, and entered the queue before its user.


@dataclass(frozen=True, slots=True)
class Handover:
    """A client that the daemon, as its last action, sent to a running server."""

    at: float
    pid: int
    uid: int
    server_pid: int | None = None  # A server whose exit the daemon has not noticed.
    answered: bool = False  # server.log has a line from then or later: the server works.


TimelineKind = Literal["held", "ghost", "idle", "waited"]
"""Clients of this user were connected; this user's server was a ghost; this user's server was idle
while others waited; a client of this user waited behind another user's server."""


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Part of the last ten minutes of one daemon."""

    kind: TimelineKind
    uid: int | None
    start: float
    end: float  # At most the time up to which the logs have been read.
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


RECORDED_INCIDENTS: frozenset[IncidentKind] = frozenset(
    {"fault", "unfinished_work", "ghost", "server_crashed", "daemon_died"}
)
"""Incidents that are recorded: see hindsight.py."""

FaultProof = Literal["", "address", "unit", "unknown", "unread"]
"""Proof of a fault's cause in the kernel log: an "address" of one client, or the "unit" of running
clients. "unknown" without proof, "unread" without the log, "" without a fault."""


@dataclass(frozen=True, slots=True)
class EndedBefore:
    """A client that exited shortly before a fault."""

    pid: int
    seconds: float  # Time from the end of its context to the fault.


@dataclass(frozen=True, slots=True)
class Incident:
    """An event that operators are shown."""

    at: float
    kind: IncidentKind
    server_pid: int | None = None
    uid: int | None = None
    pids: tuple[int, ...] = ()
    """Clients lost, rejected or waiting; for a fault also the client that caused it."""
    blamed_pid: int | None = None  # The client that MPS blames for a fault, without proof.
    caused_by_pids: tuple[int, ...] = ()  # Clients that caused a fault, proved by the kernel log.
    proof: FaultProof = ""
    ended_before: tuple[EndedBefore, ...] = ()
    """Clients with a context that ended just before a fault of unknown cause: left work may have
    caused it."""
    gpu_uuids: tuple[str, ...] = ()
    seconds: float | None = None  # Duration of a wait or a recovery.
    detail: str = ""  # Name of a cause, or its evidence.
    count: int = 1  # Occurrences: a server that cannot start fails twenty times a second.
    counted: bool = True  # False if from before the exporter's start: not in counters.

    @property
    def id(self) -> str:
        """Name of the incident in the URL of its recording."""
        return f"{round(self.at * 1000)}-{self.kind}"

    @property
    def recorded(self) -> bool:
        """Whether the minutes around it are to be recorded."""
        return self.counted and self.kind in RECORDED_INCIDENTS


LabelValues = tuple[str | int | None, ...]
LogMetricValues = Mapping[str, Mapping[LabelValues, float | Histogram]]
"""Metric of the logs -> values of its labels without the daemon -> value. An unknown user is None,
an unknown GPU ""."""


@dataclass(frozen=True, slots=True)
class NamedServer:
    """A server as an MPS v3 daemon lists it. It may be configured and have no process yet."""

    name: str
    uid: int | None = None
    pid: int | None = None  # In the daemon's PID namespace; None if stopped or unreported.
    status: str | None = None  # The driver's own text: Ready, ...
    pipe_directory: str | None = None
    allowed_devices: tuple[str, ...] = ()
    context_ids: str | None = None


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace of a server: the limits of the clients that connect through its directory."""

    name: str
    server_name: str
    status: str | None = None  # Status of its server.
    pipe_directory: str | None = None
    active_thread_ratio: float | None = None  # math.inf if unlimited.
    pinned_memory_limit_bytes: float | None = None  # On each GPU; math.inf if unlimited.
    client_priority: int | None = None
    clients: int | None = None  # None if some client or its namespace is unknown.


@dataclass(frozen=True, slots=True)
class NamespaceClient:
    """A client as an MPS v3 daemon lists it."""

    pid: int  # In the daemon's PID namespace.
    server_name: str
    namespace: str | None = None
    devices: tuple[str, ...] = ()  # UUIDs, or ordinals in the server's list.
    command: str | None = None


@dataclass(frozen=True, slots=True)
class SmPartition:
    """SMs of a GPU that only clients of this partition use, or SMs that are in no partition."""

    device: str  # UUID of the GPU, or its beginning, or an ordinal in the server's list.
    server_name: str  # Empty for a v2 daemon: its partitions belong to no server.
    status: str  # configured, created, unallocated, or another text of the driver.
    partition_id: str | None = None
    """Name behind the slash in CUDA_MPS_SM_PARTITION; None before creation, or for other SMs."""
    name: str = ""
    chunks: int | None = None
    sms: int | None = None
    include_remainder: bool | None = None
    has_clients: bool | None = None  # Reported by a v2 daemon only.
    clients: int | None = None
    """Number of clients that name this partition; None if some clients or environments are unknown,
    or the partition has no ID."""

    @property
    def label(self) -> str:
        """The name, or the ID with a v2 daemon, whose partitions have no names."""
        return self.name or self.partition_id or ""

    @property
    def unallocated(self) -> bool:
        """Whether these SMs are in no partition."""
        return self.status == "unallocated"


@dataclass(frozen=True, slots=True)
class ServerDevice:
    """A GPU as a server of an MPS v3 daemon numbers it."""

    uuid: str
    server_name: str = ""
    ordinal: int | None = None
    pci: str | None = None
    model: str | None = None
    sms: int | None = None
    chunks: int | None = None
    attributes: str | None = None


@dataclass(frozen=True, slots=True)
class Feature:
    """An optional behaviour of an MPS v3 daemon."""

    feature: str
    state: str  # enabled or disabled, with " (default)" if NVIDIA ships it in this state.
    module: str | None = None
    covers: str | None = None

    @property
    def enabled(self) -> bool:
        return self.state.startswith("enabled")

    @property
    def default(self) -> bool:
        return self.state.endswith("(default)")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the memory accounting of an MPS v3 daemon."""

    key: str
    value: str | None = None


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The named servers, namespaces and partitions that a daemon lists."""

    protocol: Literal["2", "3"] | None = None  # None if no list was read.
    lists: Mapping[type, tuple[Any, ...]] = field(default_factory=dict)  # Class of rows -> rows.
    unknown_columns: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """(query, column of a newer driver) -> distinct cells."""
    not_understood: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(query, one of REPLY_PARTS) -> number of such parts of its last reply of unknown meaning."""

    def rows(self, kind: type[T]) -> tuple[T, ...]:
        """Return the rows of a list; () if it is empty or unknown."""
        return self.lists.get(kind, ())

    def changed(self, change: Callable[[Any], Any]) -> Self:
        """Return these lists with every row changed."""
        lists = {kind: tuple(map(change, rows)) for kind, rows in self.lists.items()}
        return replace(self, lists=lists)

    def devices_of(self, server_name: str) -> list[ServerDevice]:
        """Return the GPUs in a server's own list and in the daemon's list."""
        return [one for one in self.rows(ServerDevice) if one.server_name in ("", server_name)]

    @property
    def lends_sms(self) -> bool:
        """Whether an enabled feature or a used column may let clients exceed their partitions."""
        names = [one.feature for one in self.rows(Feature) if one.enabled]
        names += [name for (_, name), cells in self.unknown_columns.items() if {*cells} - _OFF]
        return any("borrow" in name or "lend" in name for name in names)

    def is_whole(self, kind: type, reply: str) -> bool:
        """Return whether a list is known and complete, so that its rows can be counted."""
        return kind in self.lists and not self.not_understood.get((reply, "row"))


_OFF = frozenset({"", "-", "0", "no", "false", "off", "disabled", "none"})
REPLY_PARTS = ("reply", "column", "row", "value")

PartitionFault = Literal["unknown", "other_server", "other_gpu"]
PARTITION_FAULTS: tuple[PartitionFault, ...] = get_args(PartitionFault)
"""The daemon has no such partition; the partition is another server's; the partition is on a GPU
that the client does not use."""


@dataclass(frozen=True, slots=True)
class SmUse:
    """Bounds of a client's SM use on a GPU, since the client's first collection."""

    low: float = 0.0  # SM-seconds that no other process on the GPU can have used.
    high: float = 0.0  # SM-seconds that the client can have used at most.
    alone_seconds: float = 0.0  # Time in which no other process had a context on the GPU.
    alone_sm_seconds: float = 0.0  # SM-seconds of the client in that time.
    sampled_at: float | None = None  # Time of the GPU's sample up to which the bounds count.


ClientKey = tuple[str, int, int]  # Pipe directory, PID of the server, PID of the client.


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
    """Owner of the lower active thread percentage; "per_context" if each context has one, "unknown"
    if the environment is not readable, or the server's percentage or the GPU of the memory limit is
    unknown. All limits of a client are upper bounds: a program may lower its own at its start
    (os.environ), invisibly from outside."""
    environment_readable: bool | None = None
    joined_by: JoinReason | None = None  # None if the environment is not readable.
    limiter: str = ""  # See ProcessFacts.
    own_shared_memory: bool = False  # Its /dev/shm is certainly not its daemon's.
    connected_at: float | None = None
    contexts: Mapping[str, int] = field(default_factory=dict)
    memory_used_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_limit_bytes: Mapping[str, int] = field(default_factory=dict)
    active_thread_ratio: float | None = None
    sm_limit: Mapping[str, int] = field(default_factory=dict)
    priority: int | None = None
    percentage_ignored: str | None = None  # CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, if CUDA ignores it.
    memory_limit_ignored: str | None = None
    """CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, if CUDA ignores it: one of its entries is for a GPU that
    the process does not see."""
    state: ClientState | None = None
    state_since: float | None = None
    confirmed: bool = True  # A process with this PID exists, and this daemon may serve its user.
    server_name: str | None = None
    namespace: str | None = None  # Name and namespace of its server: MPS v3 only.
    gpu_uuids: tuple[str, ...] = ()
    """GPUs that an MPS v3 daemon lists for the client, without numbers of contexts."""
    sm_partition: str | None = None
    """Name behind the slash in its CUDA_MPS_SM_PARTITION, if its daemon has partitions."""
    sm_partition_name: str | None = None  # Label of that partition, if the daemon has it.
    sm_partition_fault: PartitionFault | None = None
    """Why the client cannot be in the partition that it names."""
    cgroup: str | None = None  # The nearest control group in Snapshot.cgroup_memory.

    @property
    def may_work(self) -> bool:
        """Whether it may have a context, and so is lost if its server is ended."""
        return bool(self.contexts) or self.state not in ("connecting", "creating_context")


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
    """The process with this PID is an MPS server, and this daemon may serve its user."""
    name: str | None = None  # MPS v3 only.
    shares_by_file: bool = False  # Its log shows that its memory for clients is a file in /dev/shm.


@dataclass(frozen=True, slots=True)
class ControlDaemon:
    """An MPS control daemon, named by its pipe directory."""

    pipe_directory: str
    log_directory: str
    state: ControlState | None  # None if queries and /proc do not show it.
    facts: DaemonFacts
    last: DaemonFacts | None = None  # Facts of its last process, also after its exit.
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
    gpu_uuids: tuple[str, ...] = ()  # GPUs that the daemon serves, or served until it exited.
    logs: tuple[LogState, ...] = ()
    counters: LogMetricValues | None = None  # None if its control.log was never readable.
    incidents: tuple[Incident, ...] = ()
    timeline: tuple[TimelineSpan, ...] = ()
    timeline_since: float | None = None
    dropped_clients: int = 0
    error: str | None = None
    partitioning: Partitioning = field(default_factory=Partitioning)
    """With PIDs of this host, and with UUIDs of GPUs if known."""
    resumed: bool = False
    """Whether the daemon or a server has continued from a stop since its last query hung."""
    handover: Handover | None = None  # Last action of an unresponsive daemon, if the client exists.

    def follows(self, log: LogName) -> bool:
        """Return whether this log is readable now."""
        return any(state.log == log and state.readable for state in self.logs)

    @property
    def shows_waits(self) -> bool:
        """Whether a waiting client would be visible: MPS v3's log lines about waits are unknown."""
        return self.protocol != "3" and self.follows("control")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU with the roles of its processes in MPS."""

    observation: GpuObservation
    index: str
    uuid: str
    processes_by_kind: Mapping[str, int] | None = None
    """ProcessKind -> count in the readable lists; None if no list was readable."""
    direct_pids: tuple[int, ...] = ()  # Compute processes without MPS.
    direct_processes: tuple[ProcessFacts, ...] = ()  # The same processes, if /proc shows them.
    served_by: tuple[str, ...] = ()  # Pipe directories of the running daemons that serve this GPU.
    seems_stranded: tuple[int, ...] | None = None
    """MPS processes without a server now, perhaps because they are just exiting."""
    stranded_pids: tuple[int, ...] | None = None  # MPS processes without a server for a while.
    stranded_clients: int | None = None
    sm_committed_ratio: float | None = None
    client_memory_committed_bytes: int | None = None

    def reading(self, quantity: str, **labels: str) -> float | None:
        """Return a reading of NVML; None if it is absent or not finite."""
        wanted = labels.items()
        for one in self.observation.readings:
            if one.quantity == quantity and dict(one.labels).items() == wanted:
                return one.value if math.isfinite(one.value) else None
        return None


CollectorName = Literal["nvml", "control", "logs", "process"]
COLLECTORS: tuple[CollectorName, ...] = ("nvml", "control", "logs", "process")


@dataclass(frozen=True, slots=True)
class CollectorResult:
    """Result of one source in this collection."""

    name: CollectorName
    success: bool
    duration_seconds: float
    timed_out: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Chapter:
    """A position in a demo with a name."""

    name: str
    title: str
    at_seconds: float  # Position in the demo, at speed 1.


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """The first line of a recording."""

    scenario: str
    machine: str
    driver_version: str
    recorded_at: str  # ISO 8601, UTC.
    started_at: float
    exporter_version: str
    anonymised: bool
    flags: tuple[str, ...] = ()  # The exporter's settings that are not at their defaults.


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """The recording that is replayed instead of a live host."""

    header: RecordingHeader
    speed: float = 1.0  # Recorded seconds per second of the viewer.
    loop: int = 1  # 1, plus one for each further scene, also after a jump.
    chapters: tuple[Chapter, ...] = ()
    chapter: str | None = None  # Name of the current chapter.
    position_seconds: float = 0.0  # On the scale of the chapters' positions.
    duration_seconds: float = 0.0  # Duration of one loop, on the same scale.
    names_replaced: bool = False  # Names of users and programs are not from the recording.
    played_from: float = 0.0  # Start of the recording on the viewer's clock.

    def viewer_time(self, moment: float) -> float:
        """Return the time on the viewer's clock at which a recorded time is played."""
        return self.played_from + (moment - self.header.started_at) / self.speed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the host at one moment."""

    taken_at: float
    driver_version: str | None = None
    cuda_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_indexes: Mapping[str, str] = field(default_factory=dict)
    """GPU UUID -> index, also of GPUs that only a daemon's device map contains; "" if unknown."""
    daemons: tuple[ControlDaemon, ...] = ()
    collectors: tuple[CollectorResult, ...] = ()
    user_names: Mapping[int, str] = field(default_factory=dict)
    """UID -> name, for the users of the processes that were identified."""
    containers: tuple[ContainerName, ...] = ()  # Containers of identified processes.
    cgroup_memory: Mapping[str, Mapping[str, CgroupMemory]] = field(default_factory=dict)
    """Control group -> GPU UUID -> its memory on that GPU."""
    unreadable_environments: int | None = None  # Processes whose environment is not readable.
    ignored_processes: Mapping[int, int] = field(default_factory=dict)
    """User -> number of MPS processes, and clients of the user's daemons, omitted by quotas."""
    sm_use: Mapping[ClientKey, Mapping[str, SmUse]] = field(default_factory=dict)
    """Client -> GPU UUID -> bounds of its use, where SM activity is measured (Hopper and later)."""
    kernel_log: KernelObservation | None = None  # None if nothing shows whether it is readable.
    recording: RecordingInfo | None = None

    @property
    def pods(self) -> dict[int, str]:
        """PID -> namespace/name of its pod, where the kubelet names it."""
        return {pid: f"{one.namespace}/{one.pod}" for one in self.containers for pid in one.pids}
