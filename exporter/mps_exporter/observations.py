"""What the sources bring in: frozen, raw, and able to be written to a file and read back.

An observation says what was seen and when, in the words of the one who said it: the control tool's
text, the log's bytes, a process's facts. Knowing what it means is the business of
``mps_exporter.mps``. Because a recording is nothing but observations, a replayed host takes the
same path as a live one.

Times are Unix timestamps in seconds unless a name says otherwise. ``None`` means "not available".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

LogName = Literal["control", "server"]


class Outcome(StrEnum):
    """How a question to the outside ended."""

    OK = "ok"
    TIMEOUT = "timeout"
    """Nobody answered before the deadline."""
    ABSENT = "absent"
    """Nothing to query: no daemon, no tool, no library."""
    REFUSED = "refused"
    """An answer came, and it was no (also after one retry)."""
    UNPARSABLE = "unparsable"
    """A reply of unknown wording."""
    SKIPPED = "skipped"
    """Not asked: the circuit breaker is open, or the answer could harm the host."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process as /proc shows it. A process is named by (pid, start_time_seconds)."""

    pid: int
    start_time_seconds: float
    uid: int | None = None
    """The effective user: the one that MPS logs."""
    user: str | None = None
    name: str = ""
    """The program's name only: argv[0] without its directory, else comm."""
    state: str = ""
    """One letter of /proc/PID/stat: R S D T t Z X I."""
    parent_pid: int | None = None
    namespace_pids: tuple[int, ...] = ()
    """The NSpid line: the PID in each nested PID namespace, outermost first."""
    pid_namespace: int | None = None
    """Inode of the PID namespace; None without the right to read it."""
    cgroup: str | None = None
    """/proc/PID/cgroup as it stands."""
    mps_environment: Mapping[str, str] | None = None
    """The MPS variables (and CUDA_VISIBLE_DEVICES, CUDA_DEVICE_MAX_CONNECTIONS) of the environment,
    nothing else of it; None without the right to read it."""
    tracer: str = ""
    """PID and program of the debugger that has stopped it, as "12 (gdb)", where that was seen."""
    frozen_group: str = ""
    """Folder of the frozen control group that it is in, where that was seen."""

    @property
    def own_pid(self) -> int:
        """Its PID in its own PID namespace: the one that its log lines carry."""
        return self.namespace_pids[-1] if self.namespace_pids else self.pid

    @property
    def stopped(self) -> bool:
        """Whether a signal, a debugger or a frozen control group keeps it from running."""
        return self.state in ("T", "t") or bool(self.frozen_group)

    @property
    def ended(self) -> bool:
        """Whether it has ended, and at most waits for its parent to take notice."""
        return self.state in ("Z", "X")


@dataclass(frozen=True, slots=True)
class ClosedFolder:
    """A folder that a user may not pass."""

    path: str
    """In the root in which it was found."""
    why: str
    """With the folder, the user and the mode."""
    owner_uid: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessView:
    """What /proc shows of one process that somebody asks about."""

    pid: int
    present: bool = True
    uid: int | None = None
    """The effective user."""
    state: str = ""
    command: str = ""
    """The program's name only."""
    pipe_directory: str | None = None
    """Where it looks for a daemon; None: its environment cannot be read."""
    names_directory: bool = False
    """CUDA_MPS_PIPE_DIRECTORY is set; else the directory is CUDA's default."""
    path_error: str | None = None
    """Why it cannot use that directory, with the folder on the way that is missing or closed to
    its user."""
    closed_folder: ClosedFolder | None = None
    """The folder that is closed to its user, where the host has it under the same path."""
    closed_socket: str = ""
    """Mode of the daemon's control socket, where its user may not connect to it."""
    daemon_directory: str | None = None
    """`pipe_directory` of the daemon whose directory it is, by device and inode."""
    leftover: bool = False
    """A daemon ran in the directory: its socket or its PID file is there."""
    own_proc: bool | None = None
    """Whether the /proc in its root is that of its PID namespace; None: cannot be seen."""
    mps_environment: Mapping[str, str] | None = None
    """As in ProcessFacts."""
    debug_variables: tuple[str, ...] = ()
    """Names of variables in its environment that make CUDA slow or serial."""
    missing_libraries: tuple[str, ...] = ()
    """Names of those among them that name a file which is not there."""
    oom_kills: int | None = None
    """Processes of its control group that the kernel has ended for want of memory."""
    parent_pid: int | None = None
    tracer: str = ""
    frozen_group: str = ""
    """Both as in ProcessFacts."""


@dataclass(frozen=True, slots=True)
class DaemonConditions:
    """What /proc and /sys show of a control daemon whose servers cannot start."""

    closed: Mapping[int, ClosedFolder] = field(default_factory=dict)
    """User -> the folder on the way to the pipe or log directory, in the daemon's root, that is
    closed to a server of this user."""
    oom_kills: int | None = None
    """As in ProcessView, of the daemon's control group."""
    memory_limit_bytes: int | None = None
    """Of host memory, of that group; None: no limit, or not readable."""


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """How many files a server has open."""

    server_pid: int
    pipe_directory: str
    """Of its daemon."""
    limit: int
    count: int | None = None
    """None: not readable."""


@dataclass(frozen=True, slots=True)
class MpsDirectory:
    """A pipe directory where no daemon runs."""

    path: str
    owner_uid: int
    promised_by: str = ""
    """What says that a daemon runs there; "": nothing, its files are left."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What MPS left on a host, and what shows that a daemon should run. Read by the doctor only."""

    zombies: tuple[ProcessFacts, ...] = ()
    """Processes of MPS's programs that have ended and were not reaped."""
    orphans: tuple[ProcessFacts, ...] = ()
    """Servers whose parent is no control daemon."""
    directories: tuple[MpsDirectory, ...] = ()
    open_files: tuple[OpenFiles, ...] = ()
    """Of the servers of running daemons."""
    holders: tuple[ProcessFacts, ...] = ()
    """Processes that have a device file of the driver open, as far as the caller may see."""


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """One control daemon: running (found in /proc) or only configured."""

    pipe_directory: str
    """As it was configured, else as the daemon itself names it: the label `daemon`, and unique.
    Of two daemons that use the same name in mount namespaces of their own, all but the first carry
    their root in it (and have none in `root`)."""
    log_directory: str
    """Empty when nothing tells: its environment could not be read, and the log in the default
    directory has no line of its own."""
    root: str = ""
    """Prefix under which both directories are reached from here: "" or "/proc/PID/root"."""
    directories_assumed: bool = False
    """These are the defaults: the process's environment could not be read, and no other source."""
    log_directory_assumed: bool = False
    """Its environment could not be read: the log directory is empty, or the default one where the
    log has lines of this daemon. (The pipe directory can still be sure: the lock in it names its
    daemon.)"""
    process: ProcessFacts | None = None
    """None: configured, but no such process is visible."""
    configured: bool = False
    owner_uid: int | None = None
    """Whose daemon it is: the user of its process, else the owner of the configured directory.
    None: neither is known."""
    log_owners: tuple[int, ...] = ()
    """The users whose files are accepted as its logs."""
    limited: bool = False
    """Another user's than root's and the exporter's own, and not configured: it is asked and read
    within limits, and nobody waits for it for long."""
    foreground: bool = False
    """Started with -f: it writes no log files."""
    multiuser: bool = False
    static_partitioning: bool = False
    protocol: Literal["2", "3"] | None = None
    """The interface that its arguments or its environment ask for; None: they do not say."""
    lock_holder_pid: int | None = None
    """Who holds the write lock on control_lock (F_GETLK): a live daemon, even when it hangs.
    None: nobody, or it could not be tested (see lock_tested). 0: somebody in a PID namespace that
    is not visible from here."""
    lock_tested: bool = False
    servers: tuple[ProcessFacts, ...] = ()
    """Its children named nvidia-cuda-mps-server."""

    @property
    def user(self) -> int | None:
        """Whose daemon it is; recordings of earlier versions have only the process's user."""
        if self.owner_uid is None and self.process is not None:
            return self.process.uid
        return self.owner_uid

    @property
    def pipe_path(self) -> str:
        """The pipe directory as it is reached from here."""
        return self.root + self.pipe_directory

    @property
    def log_path(self) -> str:
        """The log directory as it is reached from here."""
        return self.root + self.log_directory

    @property
    def processes(self) -> tuple[ProcessFacts, ...]:
        """Its own and its servers' processes, as far as they were found."""
        return self.servers if self.process is None else (self.process, *self.servers)


@dataclass(frozen=True, slots=True)
class ContainerName:
    """What Kubernetes calls a container."""

    container_id: str
    """As in Attribution: with the runtime in front."""
    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """Memory of one GPU that the processes of a control group have, and may have."""

    path: str
    """In the version 2 hierarchy."""
    pci_bus_id: str
    """In small letters."""
    used_bytes: int | None = None
    soft_limit_bytes: int | None = None
    """Above it MPS may end a client of the group when others need the memory."""
    hard_limit_bytes: int | None = None
    hard_unlimited: bool = False
    """The hard limit is "max"."""

    @property
    def limited(self) -> bool:
        """Whether any limit is set."""
        return bool(self.soft_limit_bytes) or self.hard_limit_bytes is not None


@dataclass(frozen=True, slots=True)
class ProcfsObservation:
    """One walk through /proc."""

    at: float
    daemons: tuple[DaemonFacts, ...] = ()
    processes: Mapping[int, ProcessFacts] = field(default_factory=dict)
    """The processes that were asked for and are there, by PID as the host sees it."""
    gone: tuple[int, ...] = ()
    """Those that were asked for and are not there."""
    unreadable_environments: int = 0
    ignored_programs: Mapping[int, int] = field(default_factory=dict)
    """User -> processes of MPS's programs that are not looked at: that user has too many."""
    containers: tuple[ContainerName, ...] = ()
    """Those of the processes that the kubelet has names for."""
    error: str | None = None
    cgroup_memory: tuple[CgroupMemory, ...] = ()
    """Of the processes' control groups, and of limited ones above them."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One run of the control tool: commands in, text out."""

    commands: tuple[str, ...]
    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    return_code: int | None = None
    """None: it never ran to its end."""
    duration_seconds: float = 0.0
    """Of the last attempt."""
    attempts: int = 1
    error: str | None = None
    """What went wrong, for a person."""


@dataclass(frozen=True, slots=True)
class ControlObservation:
    """What one daemon answered, in one probe or one reconciliation.

    A probe asks only what the daemon answers alone; a reconciliation asks its servers.
    """

    at: float
    pipe_directory: str
    kind: Literal["probe", "reconciliation"]
    outcome: Outcome
    """OK when every exchange was, else the first that was not."""
    exchanges: tuple[Exchange, ...] = ()
    error: str | None = None
    """What was attempted and how it failed, for a person."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes read from one log of one daemon, in order.

    A reader that reached the end of the file knows all that was written before it looked:
    ``complete_until``. That is what lets two logs be merged in the order in which things happened,
    however late and in whatever pieces their bytes arrive.
    """

    at: float
    """When these bytes were read."""
    pipe_directory: str
    log: LogName
    data: bytes = b""
    history: bool = False
    """Written before the exporter looked for the first time: rebuilds the state, counts nothing."""
    restarted: bool = False
    """The file was truncated or replaced before these bytes: a half line before them is void."""
    lost_bytes: int = 0
    """Skipped before these bytes because the backlog was larger than the bound."""
    complete_until: float | None = None
    """The file was read to its end at this moment (None: more is waiting)."""
    utc_offset_seconds: float | None = None
    """The zone of the stamps, in seconds east of Greenwich: learnt from the file's modification
    time against its last line, else the host's. None: no line has a stamp yet."""
    server_name: str = ""
    """Whose log it is: each server of an MPS v3 daemon has one. Empty: of a v2 daemon."""


@dataclass(frozen=True, slots=True)
class LogState:
    """Whether one log of one daemon can be followed."""

    pipe_directory: str
    log: LogName
    path: str
    readable: bool
    size_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LogsObservation:
    """What the tails brought since the last look.

    A log that is readable and has no chunk had nothing new at that moment.
    """

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
    """What was measured: "power", "memory_used", ... Recordings keep this name for ever; which
    metric shows it is the catalogue's business."""
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    """Which of several: (("sensor", "memory"),). A state is the label "state", with the value 1."""


@dataclass(frozen=True, slots=True)
class GpuObservation:
    """One GPU, or one MIG instance, as NVML shows it now."""

    index: int
    uuid: str
    parent_uuid: str | None = None
    """Of a MIG instance: the GPU it is a part of."""
    mig_instance: str | None = None
    """Of a MIG instance: "GPU instance/compute instance"."""
    name: str | None = None
    pci_bus_id: str | None = None
    architecture: str | None = None
    compute_capability: tuple[int, int] | None = None
    vbios_version: str | None = None
    serial: str | None = None
    sm_count: int | None = None
    compute_mode: str | None = None
    """default, exclusive_thread, prohibited or exclusive_process."""
    processes: tuple[GpuProcess, ...] | None = None
    """As listed, all three lists after one another; None when no list could be read."""
    unread_lists: tuple[ProcessList, ...] = ()
    """The lists that could not be read, beside others that could: who is in them is not known."""
    readings: tuple[Reading, ...] = ()
    lost: bool = False
    """Fallen off the bus: it was there, and NVML says it is gone."""


@dataclass(frozen=True, slots=True)
class NvmlObservation:
    """All GPUs."""

    at: float
    outcome: Outcome
    error: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    gpus: tuple[GpuObservation, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelLine:
    """An Xid line of the kernel log, without the name of a process."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class AddressRanges:
    """The parts of a process's address space that the process reserved without access."""

    at: float
    pid: int
    uid: int | None
    """The effective user."""
    ranges: tuple[tuple[int, int], ...]
    """(first address, first address after the range)."""


@dataclass(frozen=True, slots=True)
class KernelObservation:
    """What shows who caused a GPU fault, as far as it is new."""

    at: float
    readable: bool
    """Whether the kernel log is being read."""
    error: str = ""
    """Why the kernel log cannot be read, for a person."""
    lines: tuple[KernelLine, ...] = ()
    ranges: tuple[AddressRanges, ...] = ()
    """Of clients whose context became ACTIVE."""


Observation = (
    ProcfsObservation | ControlObservation | LogsObservation | NvmlObservation | KernelObservation
)
