"""The observations that sources return: frozen, raw, and recordable.

An observation has a time and the source's own text: the control tool's output, the log's bytes, the
facts of a process. ``mps_exporter.mps`` interprets them. A recording contains only observations, so
a replayed host runs the same code as a live one.

Times are Unix timestamps in seconds unless a name says otherwise. ``None`` means "not available".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Self

LogName = Literal["control", "server"]
QueryKind = Literal["probe", "reconciliation"]


class Outcome(StrEnum):
    """The outcome of a query or a call outside the process."""

    OK = "ok"
    TIMEOUT = "timeout"  # No reply before the deadline.
    ABSENT = "absent"  # Nothing to query: no daemon, no tool, no library.
    REFUSED = "refused"  # Refused, also after a retry if time was left.
    UNPARSABLE = "unparsable"  # A reply of unknown wording.
    SKIPPED = "skipped"  # Not sent, or given up early: a pause, no time, or no slot.


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process as /proc shows it. A process is named by (pid, start_time_seconds)."""

    pid: int
    start_time_seconds: float
    uid: int | None = None  # The effective user: the one that MPS logs.
    user: str | None = None
    name: str = ""  # The program's name only: argv[0] without its directory, else comm.
    state: str = ""  # One letter of /proc/PID/stat: R S D T t Z X I.
    parent_pid: int | None = None
    namespace_pids: tuple[int, ...] = ()
    """The NSpid line: the PID in each nested PID namespace, outermost first."""
    pid_namespace: int | None = None  # Inode; None without the right to read it.
    cgroup: str | None = None  # Text of /proc/PID/cgroup.
    mps_environment: Mapping[str, str] | None = None
    """The MPS variables (and CUDA_VISIBLE_DEVICES, CUDA_DEVICE_MAX_CONNECTIONS) of the environment,
    nothing else of it; None without the right to read it."""
    tracer: str = ""
    """PID and program of the debugger that has stopped the process, "12 (gdb)", if visible."""
    frozen_group: str = ""  # Folder of the frozen control group of the process, if visible.
    shared_memory: str = ""  # Device number of its /dev/shm, "0:25"; "" if not a mount or unknown.
    limiter: str = ""
    """Name of a program, preloaded or mounted for the process, that limits the use of GPUs."""
    default_mounted: bool = False
    """Its mount namespace has a mount at a default pipe directory, as in NVIDIA's containers."""

    @property
    def own_pid(self) -> int:
        """The PID in its own PID namespace, as in its log lines."""
        return self.namespace_pids[-1] if self.namespace_pids else self.pid

    @property
    def account(self) -> tuple[int | None, int | None]:
        """Its user, and for root the PID namespace: root of a container is not the host's root."""
        return self.uid, self.pid_namespace if self.uid == 0 else None

    @property
    def stopped(self) -> bool:
        """Whether a signal, a debugger or a frozen control group stops the process."""
        return self.state in ("T", "t") or bool(self.frozen_group)

    def has_own_shared_memory(self, other: Self) -> bool:
        """Return whether their /dev/shm are known and different."""
        devices = {self.shared_memory, other.shared_memory}
        return len(devices) == 2 and "" not in devices

    @property
    def ended(self) -> bool:
        """Whether the process has exited, and at most waits to be reaped."""
        return self.state in ("Z", "X")


@dataclass(frozen=True, slots=True)
class ClosedFolder:
    """A folder that a user may not enter."""

    path: str  # Path in the root where the folder was found.
    why: str  # Text with the folder, the user and the mode.
    owner_uid: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessView:
    """The facts in /proc about the process that `doctor --pid` examines."""

    pid: int
    present: bool = True
    uid: int | None = None  # The effective user.
    state: str = ""
    command: str = ""  # The program's name only.
    reading_hangs: bool = False
    """The environment, or a directory that it names, could not be read in time."""
    pipe_directory: str | None = None  # None if its environment is not readable.
    names_directory: bool = False  # CUDA_MPS_PIPE_DIRECTORY is set; else it is the default.
    profile: str = ""  # File on the host that sets this variable for every login, if any.
    path_error: str | None = None  # Why its pipe directory is unusable, with the folder at fault.
    closed_folder: ClosedFolder | None = None
    """The folder that is closed to its user, if the host has it under the same path."""
    closed_socket: str = ""  # Mode of the daemon's control socket, if its user may not connect.
    daemon_directory: str | None = None
    """`pipe_directory` of the daemon with the same directory, by device and inode."""
    leftover: bool = False  # The directory contains the socket or PID file of an earlier daemon.
    own_proc: bool | None = None
    """Whether /proc in its root shows its nested PID namespace; None if unknown or not nested."""
    mps_environment: Mapping[str, str] | None = None  # See ProcessFacts.
    debug_variables: tuple[str, ...] = ()  # Variables that make CUDA slow or serial.
    missing_libraries: tuple[str, ...] = ()  # The debug variables that name a missing file.
    oom_kills: int | None = None
    """Processes of its control group that the kernel killed when memory ran out."""
    children: tuple[int, ...] = ()  # Without the doctor; empty on a kernel that does not list them.
    parent_pid: int | None = None
    tracer: str = ""
    frozen_group: str = ""
    shared_memory: str = ""
    default_mounted: bool = False  # For these four see ProcessFacts.
    hidden: str = ""  # What the doctor itself cannot see: see Processes.hidden.


@dataclass(frozen=True, slots=True)
class DaemonConditions:
    """The facts in /proc and /sys about a control daemon whose servers cannot start."""

    closed: Mapping[int, ClosedFolder] = field(default_factory=dict)
    """User -> folder on the path to the pipe directory, in the daemon's root, that is closed
    to a server of this user."""
    oom_kills: int | None = None  # See ProcessView, for the daemon's control group.
    memory_limit_bytes: int | None = None
    """Limit of that group's host memory; None if unlimited or not readable."""


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """Number of files that a server has open."""

    server_pid: int
    pipe_directory: str  # Pipe directory of its daemon.
    limit: int
    count: int | None = None  # None if not readable.


@dataclass(frozen=True, slots=True)
class MpsDirectory:
    """A pipe directory where no daemon runs."""

    path: str
    owner_uid: int
    promised_by: str = ""  # Source that announces a daemon there; "" if only files are left.


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Leftovers of MPS on a host, and signs that a daemon should run. Read by the doctor only."""

    zombies: tuple[ProcessFacts, ...] = ()  # MPS processes that exited and were not reaped.
    orphans: tuple[ProcessFacts, ...] = ()  # Servers without a control daemon as parent.
    directories: tuple[MpsDirectory, ...] = ()
    open_files: tuple[OpenFiles, ...] = ()  # For the servers of running daemons.
    holders: tuple[ProcessFacts, ...] = ()
    """Processes with an open device file of the driver, if visible to the caller."""
    hidden: str = ""  # See Processes.hidden.


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """One control daemon: running (found in /proc) or only configured."""

    pipe_directory: str
    """The configured path, else the daemon's own: the label `daemon`, and unique. If daemons use
    one name in different mount namespaces, all except the first contain their root in the path
    (and have none in `root`)."""
    log_directory: str
    """Empty if unknown: the environment is not readable, and the log in the default directory has
    no line of this daemon."""
    root: str = ""  # Prefix of both directories for the exporter: "" or "/proc/PID/root".
    directories_assumed: bool = False
    """Both are the defaults: the environment is not readable, and there is no other source."""
    log_directory_assumed: bool = False
    """The environment is not readable: the log directory is empty, or the default one if its log
    has lines of this daemon. (The pipe directory can be certain: its lock names the daemon.)"""
    process: ProcessFacts | None = None  # None if configured without a visible process.
    configured: bool = False
    owner_uid: int | None = None
    """User of its process, else the owner of the configured directory; None if unknown."""
    log_owners: tuple[int, ...] = ()  # Users whose files are accepted as its logs.
    limited: bool = False
    """A daemon that is not configured, of an ordinary user (see sources.processes.account).
    Queries and reads of it are limited, and a collection waits for it only briefly."""
    foreground: bool = False  # Started with -f: without log files.
    multiuser: bool = False
    static_partitioning: bool = False
    protocol: Literal["2", "3"] | None = None
    """Interface in its arguments or its environment; None if they name no interface."""
    lock_holder_pid: int | None = None
    """Holder of the write lock on control_lock (F_GETLK): a live daemon, even if it hangs. None
    without a holder or a test (see lock_tested); 0 for a process in an invisible PID namespace."""
    lock_tested: bool = False
    servers: tuple[ProcessFacts, ...] = ()  # Its children named nvidia-cuda-mps-server.

    @property
    def user(self) -> int | None:
        """The daemon's user; recordings of earlier versions have only the process's user."""
        if self.owner_uid is None and self.process is not None:
            return self.process.uid
        return self.owner_uid

    @property
    def account(self) -> tuple[int | None, int | None]:
        """The account whose limits apply, if the daemon is limited."""
        namespace = self.process.pid_namespace if self.process is not None else None
        return self.user, namespace if self.user == 0 else None

    @property
    def process_identity(self) -> tuple[int, float] | None:
        """PID and start time of its process."""
        return None if self.process is None else (self.process.pid, self.process.start_time_seconds)

    @property
    def has_own_pid_namespace(self) -> bool:
        """Whether it is known to have its own PID namespace."""
        return self.process is not None and len(self.process.namespace_pids) > 1

    @property
    def pipe_path(self) -> str:
        """Path of the pipe directory for the exporter."""
        return self.root + self.pipe_directory

    @property
    def log_path(self) -> str:
        """Path of the log directory for the exporter."""
        return self.root + self.log_directory

    @property
    def processes(self) -> tuple[ProcessFacts, ...]:
        """The processes of the daemon and its servers that were found."""
        return self.servers if self.process is None else (self.process, *self.servers)


@dataclass(frozen=True, slots=True)
class ContainerName:
    """Names of a container in Kubernetes."""

    container_id: str  # See Attribution: with the runtime as prefix.
    namespace: str
    pod: str
    container: str
    pids: tuple[int, ...] = ()  # Identified processes of the container.


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """Use and limits of one GPU's memory by the processes of a control group."""

    path: str  # Path in the version 2 hierarchy.
    pci_bus_id: str  # In lower case.
    used_bytes: int | None = None
    soft_limit_bytes: int | None = None
    """Above this limit, MPS may end a client of the group when others need the memory."""
    hard_limit_bytes: int | None = None
    hard_unlimited: bool = False  # The hard limit is "max".

    @property
    def limited(self) -> bool:
        return bool(self.soft_limit_bytes) or self.hard_limit_bytes is not None


@dataclass(frozen=True, slots=True)
class ProcfsObservation:
    """One scan of /proc."""

    at: float
    daemons: tuple[DaemonFacts, ...] = ()
    processes: Mapping[int, ProcessFacts] = field(default_factory=dict)
    """PID on this host -> process, for the requested processes that could be read."""
    gone: tuple[int, ...] = ()  # Requested processes that do not exist.
    ignored_programs: Mapping[int, int] = field(default_factory=dict)
    """User -> number of skipped processes of MPS programs: the user has too many, or their reads
    fail or hang."""
    containers: tuple[ContainerName, ...] = ()  # Containers whose names the kubelet knows.
    error: str | None = None
    cgroup_memory: tuple[CgroupMemory, ...] = ()
    """Memory of the processes' control groups, and of their parents with a limit."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One run of the control tool: commands in, text out."""

    commands: tuple[str, ...]
    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    return_code: int | None = None  # None if the tool was killed or not run.
    duration_seconds: float = 0.0  # Duration of the last attempt.
    attempts: int = 1
    error: str | None = None  # Error text for a person.


@dataclass(frozen=True, slots=True)
class ControlObservation:
    """The replies to a probe, which needs the daemon alone, or to queries about its servers."""

    at: float
    pipe_directory: str
    kind: QueryKind
    outcome: Outcome  # OK if all exchanges are OK, else the first other outcome.
    exchanges: tuple[Exchange, ...] = ()
    error: str | None = None  # Error text for a person, also on a pause.


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes read from one log of one daemon, in order; ``complete_until`` orders two logs."""

    at: float  # Time of the read.
    pipe_directory: str
    log: LogName
    data: bytes = b""
    history: bool = False  # Older than the exporter's start: rebuilds the state, counts nothing.
    restarted: bool = False
    """The file was truncated or replaced before these bytes: a half line before them is void."""
    lost_bytes: int = 0  # Bytes skipped before these because the backlog exceeded its limit.
    complete_until: float | None = None
    """Time of a read to the file's end: all lines before that time are read. None if the file has
    more data."""
    utc_offset_seconds: float | None = None
    """Time zone of the timestamps, in seconds east of Greenwich: from the file's modification time
    and its last line, else the host's. None before the first timestamp."""
    server_name: str = ""  # The MPS v3 server that owns the log; empty for v2.


@dataclass(frozen=True, slots=True)
class LogState:
    """Whether one log of one daemon is readable."""

    pipe_directory: str
    log: LogName
    path: str
    readable: bool
    size_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LogsObservation:
    """The new data of the logs since the last poll; a readable log without a chunk has none."""

    at: float
    chunks: tuple[LogChunk, ...] = ()
    states: tuple[LogState, ...] = ()


ProcessList = Literal["compute", "mps", "graphics"]


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process in one of NVML's three lists of a GPU."""

    pid: int
    kind: ProcessList
    used_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of a GPU, in the base unit (seconds, bytes, watts, hertz, a ratio from 0 to 1)."""

    quantity: str
    """Name of the quantity: "power", "memory_used", ... It never changes: recordings contain it.
    The metrics have names of their own."""
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    """Such as (("sensor", "memory"),). A state is the label "state" with the value 1."""


@dataclass(frozen=True, slots=True)
class GpuObservation:
    """One GPU or MIG instance in NVML."""

    index: int
    uuid: str
    parent_uuid: str | None = None  # GPU of a MIG instance.
    mig_instance: str | None = None  # GPU instance and compute instance, "1/0".
    name: str | None = None
    pci_bus_id: str | None = None
    architecture: str | None = None
    compute_capability: tuple[int, int] | None = None
    vbios_version: str | None = None
    serial: str | None = None
    sm_count: int | None = None
    compute_mode: str | None = None  # default, exclusive_thread, prohibited or exclusive_process.
    processes: tuple[GpuProcess, ...] | None = None
    """The three lists, concatenated; None if no list was readable."""
    unread_lists: tuple[ProcessList, ...] = ()  # Lists that were not readable while others were.
    readings: tuple[Reading, ...] = ()
    activity_age_seconds: float | None = None
    """Age of the last sample of the SMs' activity; None without a sample."""
    lost: bool = False  # The GPU has fallen off the bus or must be reset.


@dataclass(frozen=True, slots=True)
class NvmlObservation:
    """All GPUs in NVML."""

    at: float
    outcome: Outcome
    error: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    confidential: bool = False  # Confidential computing is on.
    gpus: tuple[GpuObservation, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelLine:
    """An Xid line of the kernel log, without the name of a process."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class AddressRanges:
    """The address ranges that a process reserved without access."""

    at: float
    pid: int
    uid: int | None  # The effective user.
    ranges: tuple[tuple[int, int], ...]  # (first address, first address after the range).


@dataclass(frozen=True, slots=True)
class KernelObservation:
    """New evidence of the cause of a GPU fault."""

    at: float
    readable: bool  # Whether the kernel log is being read.
    error: str = ""  # Why the kernel log cannot be read, for a person.
    lines: tuple[KernelLine, ...] = ()
    ranges: tuple[AddressRanges, ...] = ()  # Ranges of clients that earlier calls requested.


Observation = (
    ProcfsObservation | ControlObservation | LogsObservation | NvmlObservation | KernelObservation
)
