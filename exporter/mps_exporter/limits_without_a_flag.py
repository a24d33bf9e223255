"""Limits, timeouts, intervals, thresholds and sizes that no flag sets.

"Measured" means: on driver 580.159.04, H200, unless another GPU is named. Durations are in seconds.
"""

from dataclasses import dataclass

# ===================================================================================== collections

# ---------------------------------------------------------- one collection

GPU_DEADLINE_RATIO = 0.7  # Part of the deadline for the GPUs; the rest is for their processes.
USERS_QUERY_WAIT_SECONDS = 0.25  # Maximum wait for users' daemons after all others.

PROBE_VALID_INTERVALS = 5.0
"""Multiple of --mps.min-query-interval for which a probe is valid while the logs show no change.
The tool writes 0.4 kB into control.log each time: 2.3 MB a day at a scrape every 15 s."""

SERVER_REPLY_VALID_INTERVALS = 3.0
"""Multiple of --mps.min-query-interval for which a server's reply is shown if the logs cannot be
read: a stopped server is not queried, and may have changed since."""

MIN_SERVER_REPLY_VALID_SECONDS = 15.0  # Minimum time for which such a reply is shown.
MAX_KEPT_EVIDENCE = 256  # Maximum number of faults, and of ranges, kept for a later daemon.

# ----------------------------------------------------- between collections

EXIT_DETAILS_TIMEOUT_SECONDS = 1.0  # Timeout for reading processes after an exit: logs wait for it.
DAEMON_SEARCH_INTERVAL_SECONDS = 5.0  # Interval between searches of /proc for a first daemon.
DAEMON_SEARCH_TIMEOUT_SECONDS = 5.0  # Timeout of that search, and of a poll of the logs.

# ------------------------------------ what is shown of daemons and clients

SHOWN_AFTER_QUIT_SECONDS = 120.0  # Time for which an unconfigured daemon that quit is shown.
SHOWN_AFTER_DEATH_SECONDS = 24 * 3600.0  # The same time for a daemon that died.
MAX_ABSENT_DAEMONS = 32  # Absent daemons kept of trusted users, and again of all others.
MAX_LOGGED_PIDS = 2048  # Maximum number of processes read because users' daemons log them.
USERS_PER_LIMIT = 4  # Number of ordinary users who can together exhaust the last two.
MAX_CLIENTS_PER_USER = 256  # Clients with metrics, of the daemons of one ordinary user.
MAX_USERS_CLIENTS = 1024  # Maximum number of such clients of all ordinary users together.
STRANDED_SECONDS = 1.0  # Minimum time without a server; an exiting client stays for less.

RENDER_THREADS = 2
"""Number of threads that only render metrics. A hung directory of recordings takes others."""

# ========================================================================================= sources

# ---------------------------------------------------------- ordinary users
# Root, the exporter's own user and configured daemons have none of these limits.
MAX_PROCESSES_PER_USER = 24  # Processes of MPS: 8 daemons, their servers, and 8 runs of the tool.

USERS_CHECK_INTERVAL_SECONDS = 30.0
"""Minimum interval between checks of users' directories: 40 system calls each, on a thread.
Whoever connects to the port can cause collections."""
NEW_CHECK_INTERVAL_SECONDS = 5.0
"""The same for a process without a directory, in the first two such intervals of its life."""

MAX_PROCESSES = 192  # Processes of all ordinary users: those of 64 daemons.

NEW_PROCESSES_PER_SECOND = 1.0
"""Refill rate of a user's new processes. A new process costs 0.3 ms, and 30 ms if it has a daemon's
name and exits at once, of which a run of the control tool takes 8 ms."""

MAX_NEW_PROCESSES_PER_SECOND = 16.0  # Refill rate of the new processes of all ordinary users.
MAX_DAEMONS_PER_USER = 8  # Daemons shown of one user.
MAX_DAEMONS = 64  # Daemons shown of all ordinary users. Eight GPUs with MIG need 56 daemons.
MAX_TOOL_RUNS = 8  # Concurrent tool runs for trusted daemons, and again for ordinary users.
MAX_TOOL_RUNS_PER_USER = 2  # Concurrent runs of the control tool for one ordinary user.
MAX_IGNORED_USERS = 32  # Users with the most ignored processes; others' are not shown.

# --------------------------------------------------------------- discovery

DEFAULT_PIPE_DIRECTORIES = ("/tmp/nvidia-mps", "/run/nvidia-mps")  # noqa: S108 - where MPS has it
"""The second is the default of newer daemons that run as root."""

DIRECTORY_TIMEOUT_SECONDS = 0.5  # Timeout of a collection's directory checks: file servers hang.
MAX_PIPE_DIRECTORY_BYTES = 255  # Length of a pipe directory's path: a socket's has at most 108.
MAX_HUNG_PATHS_SHOWN = 8  # Hung directories named in the error message.
MAX_SOCKETS = 1 << 18  # Unix sockets that are searched for a trusted daemon's. 100,000 take 0.3 s.
MAX_USERS_SOCKETS = 1 << 15  # The same limit for an ordinary user's daemon.
MAX_SOCKET_DIRECTORIES = 256  # Directories of the found control sockets that are checked.
LOG_TAIL_BYTES = 1 << 16  # End of a control.log that is searched for lines of a daemon.

# --------------------------------------------------------------- processes

PROCESS_REFRESH_INTERVAL_SECONDS = 60.0  # Interval of reading control groups, users and names.
PROCESS_TIMEOUT_SECONDS = 0.5  # Timeout for reading arguments and environments, 0.05 ms each.
USERS_PROCESS_TIMEOUT_SECONDS = 0.1  # Part of that timeout for processes of ordinary users.
CLOCK_STEP_SECONDS = 2.0  # Smallest step of the boot time: /proc/stat has whole seconds.
MAX_PROC_FILE_BYTES = 1 << 22  # Length of a file of /proc.
MAX_MOUNT_NUMBER_BYTES = 64  # Beginning of a list of mounts: the first mount's number.
MAX_MOUNTS_BYTES = 1 << 18  # Length of a list of mounts; most have less than 16 KiB.
MAX_ARGUMENT_BYTES = 1 << 13  # Length of arguments that is read: a daemon's flags come first.
MAX_VARIABLES = 64  # MPS variables kept of a process's environment.
MAX_VARIABLE_ENTRIES = 4096  # Entries of MPS variables that are read, with repetitions.
MAX_VARIABLE_NAME_BYTES = 128  # Length of an MPS variable's name; longer names are ignored.
MAX_VARIABLE_VALUE_BYTES = 4096  # Length of an MPS variable's value: above the longest path.

# ---------------------------------------------------------- control groups

MAX_CGROUPS = 1024  # Control groups whose GPU memory is read.
MAX_CGROUP_FILE_BYTES = 1 << 16  # Length of a control group's file.
MAX_CGROUP_DEPTH = 32  # Levels of a control group's path that are searched for a limit.
MAX_CONTAINER_LINKS = 20_000  # Links in the kubelet's folder: of 110 pods, and of ended containers.

# -------------------------------------------------------------------- logs

LOG_POLL_INTERVAL_SECONDS = 0.2  # Interval between checks or polls of changed logs.
LOG_POLL_TIMEOUT_SECONDS = 2.0  # Timeout of one poll of all logs.
USERS_LOG_POLL_TIMEOUT_SECONDS = 0.1  # Part of that timeout for logs of ordinary users.
LOG_UNREADABLE_AFTER_SECONDS = 5.0  # Duration of a read after which its log is unreadable.
SERVER_LOG_SEARCH_INTERVAL_SECONDS = 5.0  # Interval between searches for new server logs (v3).
MAX_LOG_BACKLOG_BYTES = 16 << 20  # Maximum part of a log that its first read covers, from the end.
MAX_LOG_BEHIND_BYTES = 64 << 20  # Maximum unread part of a log; of a larger part, the end is read.
MAX_LOG_POLL_BYTES = 1 << 20  # Maximum part of a log that one poll reads.
MAX_USER_LOG_POLL_BYTES = 64 << 10  # Maximum size of one poll of all logs of an ordinary user.
MAX_USERS_LOG_POLL_BYTES = 128 << 10  # The same for all ordinary users together.
MIN_USER_LOG_POLL_BYTES = 4096  # Minimum share of each log in these two limits.
MAX_SERVER_LOGS = 64  # Maximum number of server logs that are followed for a v3 daemon.
MAX_LOG_DIRECTORY_ENTRIES = 4096  # Entries that are searched for server logs and copies.

# -------------------------------------------------------- the control tool

MAX_CONTROL_ATTEMPTS = 2  # Maximum number of runs for one query: the second after a collision.
CONTROL_RETRY_DELAY_SECONDS = 0.04  # Delay before the second run.
MIN_CONTROL_RUN_SECONDS = 0.1  # Minimum time left of a collection for the start of a run.
CONTROL_BACKOFF_SECONDS = 10.0  # Pause after a daemon's first hang; doubles each time.
MAX_CONTROL_BACKOFF_SECONDS = 300.0  # Maximum pause after a hang.

USERS_CONTROL_BACKOFF_SECONDS = 5.0
"""Delay before another query of an ordinary user's daemon after a failure without a hang. Each
following delay is twice as long. A run of the tool costs the exporter 8 ms."""

MAX_USERS_CONTROL_BACKOFF_SECONDS = 60.0  # Maximum of that delay.
MAX_CONTROL_OUTPUT_BYTES = 1 << 20  # Size of each output. The kernel ends a tool that writes more.
MAX_KEPT_OUTPUT_CHARACTERS = 4096  # Length that is kept of such an output.
CONTROL_REAP_SECONDS = 1.0  # Maximum time to wait for the exit of a killed tool.
MAX_CONTROL_CPU_SECONDS = 10  # Maximum CPU time of a run.
MAX_CONTROL_OPEN_FILES = 64  # Maximum number of open files of a run.

# ---------------------------------------------------------- the kernel log

MAX_KERNEL_HISTORY_SECONDS = 600.0  # Maximum age of a line at the exporter's start.
MAX_KERNEL_RECORDS = 1 << 14  # Maximum records of one poll: they take about 50 ms.
MAX_MAPS_BYTES = 1 << 20  # Maximum size of /proc/PID/maps; 500 mappings of PyTorch take 60 KB.
MAX_RANGES_PER_PROCESS = 512  # Maximum ranges kept for a process: the smallest.
MAX_MAPS_WAITING_PER_USER = 512  # An ordinary user's processes whose maps wait to be read.
MAX_USER_MAPS_BYTES = 16 << 20  # Maximum size of one ordinary user's maps read at once.
USER_MAPS_BYTES_PER_SECOND = MAX_USER_MAPS_BYTES / 60.0  # Refill rate of that limit.

# ---------------------------------------------------------- blocking calls

MAX_IDLE_THREADS = 8  # Threads that are kept for later calls; a start costs 0.1 ms.
MAX_HUNG_CALLS = 64  # Hung calls after which none starts: trusted ones, and again users'.
MAX_HUNG_CALLS_PER_USER = 4  # The same limit for calls that read files of one ordinary user.

MAX_USERS_CALLS = 24
"""Maximum number of ordinary users' calls in progress that one round starts, each on a thread. Of
400 calls that return at once, 13 are in progress. The systemd unit allows 128 tasks."""

# --------------------------------------------------- timeouts of this host

MEMORY_LIMITS_TIMEOUT_SECONDS = 0.5  # Timeout for the memory limits that only NVML reports.
EXIT_POLL_INTERVAL_SECONDS = 1.0  # Interval between scans for exits that no log shows.
GPU_SAMPLE_TIMEOUT_SECONDS = 5.0  # Timeout for what NVML reads between collections.
CLOSE_TIMEOUT_SECONDS = 1.0  # Timeout for closing each source.

# -------------------------------------------------- recordings and replays

RECORDED_POLL_INTERVAL_SECONDS = 1.0  # Maximum poll interval of the logs during a recording.
MAX_FIRST_REPLY_SECONDS = 5.0  # Maximum time by which a first observation is replayed early.
MAX_RECORDING_BYTES = 128 << 20  # Size of an unpacked recording. In memory: up to 5 times that.
MAX_RECORDING_LINE_BYTES = 32 << 20  # Maximum size of one line.
MAX_RECORDING_LINE_LISTS = 1_000_000  # Maximum number of lists and objects in one line.
MAX_RECORDING_SECONDS = 7 * 86400.0  # Maximum duration of a recording.
MAX_RECORDING_EARLY_SECONDS = 86400.0  # Maximum time of an observation before the start.
REPLAY_STEP_SECONDS = 0.5  # Step of a replay up to a position: 129 s take 0.2 s.
MAX_REPLAY_STEPS = 5000  # Maximum number of steps; for more than 40 minutes, steps are longer.
MIN_SCENE_SECONDS = 1.0  # Minimum time for which a scene is played.

# ------------------------------------------------------------------ doctor

DOCTOR_TIMEOUT_SECONDS = 2.0  # Timeout for the files that only the doctor reads.
DRIVER_HOLDERS_TIMEOUT_SECONDS = 0.15  # Timeout of the search for open device files (4,000: 10 ms).
MAX_DIRECTORY_ENTRIES = 256  # Entries read: a process's files, systemd units, pipe directories.

# ============================================================================================ NVML

# ------------------------------------------------- intervals of readings
# They depend on the cost of the call and on the rate of change.

EACH = 0.0  # Interval of values that cost microseconds: read at each collection.

SLOW = 5.0
"""Interval of values that may change at any time, but cost 0.3 ms or more. These and
slower values are renewed between collections, so that no collection waits for them. The driver
retains its utilization samples for 14 s; there may be dozens of MIG instances."""

MINUTE = 60.0  # Interval of settings and of counters of rare events, which cost about 1 ms.
HOUR = 3600.0  # Interval of values that only a repair or a new board changes.

# ------------------------------------------------ work between collections

TICK_INTERVAL_SECONDS = 1.0
"""Interval of `NvmlSession.tick`. An integral of a GPU's activity in these steps has 2 % error. GPM
counts cycles: over 7 s with a changing clock rate the busier part weighs 6 % too much. PCIe
counters wrap every 70 ms; GPM's rate corrects an error below 2 GiB."""

MAX_TICK_AGE_SECONDS = 1.5
"""Maximum age of the last tick for a collection to use what the tick read. Sampling takes 3 to 4 ms
on an H200 (GPM 2, utilization 1.25), as much as all other readings together."""

MAX_SECONDS_WITHOUT_SAMPLE = 5.0
"""Time without a new utilization sample that suggests a clock set back.

NVML samples every 1/6 to 1 s."""

MIN_SAMPLE_INTERVAL_SECONDS = 0.1  # Minimum interval of activity samples, of GPM by DCGM's manual.

# ---------------------------------------------------------------- recovery

REFUSED_RETRY_INTERVAL_SECONDS = 600.0  # Interval of a refused query that may be allowed later.
INIT_RETRY_INTERVAL_SECONDS = 10.0  # Interval between initializations while NVML is missing.
LOST_RETRY_INTERVAL_SECONDS = 120.0  # Interval between initializations while a GPU is lost.
MIG_SCAN_INTERVAL_SECONDS = 10.0  # Interval between scans for new MIG instances.

# ------------------------------------------- Xid events and control groups

MAX_XIDS = 1024  # Maximum number of Xid events of one read.
MAX_CGROUPS_PER_GPU = 128  # Control groups whose memory is read: one call for each group and GPU.

# =========================================================================== MPS: logs and replies

# -------------------------------------------------------- reading the logs

MAX_LINE_BYTES = 65_536  # Longest line, also in a recording. A longer line counts as unknown.
MAX_MESSAGE = 512  # Longest message, in characters, that is compared with the known wordings.
MAX_QUOTED_MESSAGE = 120  # Longest text that is kept of a message, in characters.
WRITE_RACE_SECONDS = 0.1  # Maximum time from a line's timestamp until the log contains the line.

MAX_HOLD_SECONDS = 5.0
"""Maximum time for which a line waits until the other log is read up to its timestamp, and a reply
of the control tool until both logs are read up to the query."""

CLOCK_JUMP_SECONDS = 60.0  # Minimum step back in time that shows that a clock was set back.

CLOCK_TOLERANCE_SECONDS = 2.0
"""Maximum time by which a timestamp may be later than the time at which the line was read, and a
start time in /proc, which is counted in ticks since boot, later than a line of the process."""

# ------------------------------------- the daemon, its servers and clients

WAIT_BOUNDS_SECONDS = (
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
    *(300.0, 600.0, 1800.0, 3600.0, 7200.0),
)
"""Bucket bounds for waits behind another user's server: 0.1 s (an idle server is replaced) to 2 h.
Rules and dashboards do not use the distribution of other durations."""

ADMISSION_TIMEOUT_SECONDS = 10.0
"""Time after which a client sent to a ready server is no longer expected, and a caller without
credentials counts as refused. Others connect, or NEW CLIENT follows, within 1 ms (measured)."""

SILENCE_SECONDS = 0.25  # Silence after which a daemon seems stuck. Measured: at most 0.1 s.
EXIT_CONFIRM_SECONDS = 1.0  # Time after an exit by which the last lines have been written.
LOST_LINE_SECONDS = 10.0  # Time after which a server's line about a disconnection is lost.
SHUTDOWN_TIMEOUT_SECONDS = 5.0  # Maximum time from a shutdown request to the exit. Measured: 0.1 s.
SIMULTANEOUS_SECONDS = 0.01  # Maximum difference of one event's timestamps in the two logs.
REFUSAL_SECONDS = 1.0  # Maximum time between the lines about one refused client.
MAX_RECENT = 256  # Entries of each list of recent events, such as refusals. The oldest go first.
MAX_CONTEXTS = 256  # Contexts of one client; of one server without a known GPU; of one fault.
MAX_GPUS = 64  # GPUs of one daemon, server or fault.
TIMELINE_SECONDS = 600  # Time that the timeline covers.
MAX_TIMELINE_SPANS = 400  # Spans of one daemon's timeline. The oldest go first.
MAX_INCIDENTS = 100  # Incidents of one daemon. The oldest go first.
MAX_INCIDENT_PIDS = 64  # Processes that one incident names.
REPEATED_WITHIN_SECONDS = 60.0  # Time within which equal failed starts are one incident.
REPEATED_AMONG = 8  # Recent incidents that a repeated incident is compared with.

# ------------------------------------------------------------------ faults

SAME_FAULT_SECONDS = 0.5
"""Maximum time between the lines of server.log about one fault, and between server.log and the
kernel log. Measured: 0.1 s."""

SAME_LINES_SECONDS = 0.15  # Maximum time between kernel log lines on a fault. Measured: 0.12 s.

FAULT_DECISION_SECONDS = 1.5
"""Maximum time from a fault to its line in the kernel log and to the end of the client that left
the work. Measured: 0.5 s, and 1.4 s where 48 clients left together."""

LATE_FAULT_SECONDS = 2.0  # Maximum time between a client's end and a fault by its work.

END_TO_FAULT_SECONDS = (0.1, 0.3)
"""Range of the time from the end of a context to a fault by the work that the client left.
Measured: 0.122 to 0.257 s."""

UNFINISHED_END_SECONDS = (0.12, 0.8)
"""Range of the time from the end of the context to the end of the process, for the only client on
a GPU that left work there. Measured: 0.146 to 0.487 s; without work left behind 0.012 to 0.093 s.
A longer time means that the program destroyed its context and continued."""

MAX_END_AGE_SECONDS = 5.0  # Maximum age of an end that explains a fault. The longest took 1.4 s.
RANGES_LIFETIME_SECONDS = 600.0  # Lifetime of a client's address ranges after its end.
MAX_EVIDENCE_PROCESSES = 1024  # Clients, and as many processes with ranges, of one daemon.
MAX_EVIDENCE_RANGES = 1 << 15  # Address ranges of all these processes: 512 each of 64; 4 MB.


@dataclass(frozen=True, slots=True)
class Quota:
    """Items of one daemon that are tracked one by one; only some totals include the others."""

    servers: int = 64
    clients: int = 2048  # Clients of one server. The hardware serves 48 or 60 contexts a GPU.
    queued: int = 1024
    """Queued clients, far more than a GPU host has. Beyond it, the oldest entry is dropped."""
    users: int = 512
    """Every user may write into the daemon's log pipe, so a log can name any number of users."""
    gpus: int = 512


FULL = Quota()

OF_ORDINARY_USER = Quota(servers=2, clients=256, queued=256, users=8, gpus=64)
"""Quota for an ordinary user's daemon that is not configured. It serves only that user, with one
server at a time, and its log can be forged: 22 MB of forged lines cost 141 MB of memory with the
full quota, 3 MB with this one."""

# --------------------------------------------- replies of the control tool

MAX_LIST_ROWS = 1024  # Rows read of a list of the control tool; further rows are counted.
MAX_QUOTED_OUTPUT = 200  # Maximum length of the control tool's output in a message.
MIN_QUERY_AGE_SECONDS = 1.0  # Minimum age of a queried server: its first lines may be unread.
QUERY_RETRY_INTERVAL_SECONDS = 60.0  # Interval of queries about unexplained servers.
LOG_PRECEDENCE_SECONDS = 2.0  # Age up to which the log, not a reply, decides on an event.
CONTRADICTION_CONFIRM_SECONDS = 10.0  # Minimum time between two replies that prove a lost line.

# ======================================================================================== findings

# ----------------------------------------------------- daemons and servers

RECENT_INCIDENT_SECONDS = 300.0  # Age up to which an incident is recent.
MAX_START_SECONDS = 10.0  # Maximum normal start time of a server; most take less than a second.
MAX_BACKOFF_SECONDS = 51.2  # Longest pause before a used server is replaced (driver 580).
MAX_CONTEXT_CREATION_SECONDS = 30.0  # Maximum time to create a context. Measured: 2 ms.

GHOST_GRACE_SECONDS = 5
"""Time within which a daemon continues after the end of its ghost. Measured (driver 580): with one
GPU it continued immediately (8 of 8). With two GPUs it and the program connected to the ghost
waited for each other until that program exited (7 of 7)."""

FILES_PER_CLIENT = 10
"""Free file descriptors that a server needs for a new client. Measured: 522 open files with 48
clients on one GPU (H200, driver 580); a limit of 72 admitted two clients and refused the third."""

# --------------------------------------------------------- GPUs and limits

MAX_IDLE_SM_ACTIVITY = 0.3
MIN_BUSY_UTILIZATION = 0.9
MAX_COMMITTED_RATIO = 0.75  # Sum of the limits above which little of the GPU can be idle.
MIN_USED_RATIO = 0.9  # Active part of the allowed SMs from which limits hold clients back.
RATIO_TOLERANCE = 0.005  # Difference up to which two SM limits are equal: a third is written as 33.
NEAR_LIMIT_RATIO = 0.95  # Used part of a memory limit from which the next allocation can fail.

CONTEXT_BYTES = 290 << 20
"""Memory limit with which no context can be created. Measured on an H200: cuDevicePrimaryCtxRetain
failed with error 2; with 1 GiB a client without memory of its own had 753 MiB left."""

MIN_SMS = 2  # Smallest usable SM limit before Hopper: SMs come in pairs. On Hopper: 8 (measured).

# ---------------------------------------------------------- logs and texts

LARGE_LOG_BYTES = 1 << 30  # Size of a large log: weeks of a busy host; nothing rotates the logs.
MAX_COMMAND_PIDS = 20  # Maximum number of processes in one command.

# ============================================================================================= web

# ------------------------------------------------------------- connections

MAX_CONNECTIONS = 512
MAX_EVENT_STREAMS = 32
TIMEOUT_OFFSET_SECONDS = 0.5  # Maximum difference between a scrape's timeout and deadline.
REQUEST_TIMEOUT_SECONDS = 10.0  # Time to send a request, from the connection or the first byte.
SEND_TIMEOUT_SECONDS = 60.0  # Time to accept a response.
KEEPALIVE_TIMEOUT_SECONDS = 120.0  # Lifetime of an idle connection, above usual scrape intervals.
DRAIN_TIMEOUT_SECONDS = 10.0  # Time for the responses in progress when the program stops.
MAX_UNANSWERED_BYTES = 65_536  # Maximum size of an incomplete request, above aiohttp's limits.
ADDRESS_FRACTION = 0.75  # Fraction of the connections or requests that one client address may have.
SWEEP_INTERVAL_SECONDS = 1.0  # Interval between searches for slow clients.
TLS_CLOSE_TIMEOUT_SECONDS = 2.0
LINGERING_TIMEOUT_SECONDS = 2.0  # Time to read the rest of a request that is already answered.
ACCEPT_RETRY_SECONDS = 1.0  # Delay before the next accept when descriptors or memory are short.
LISTEN_BACKLOG = 1024

# ----------------------------------------------------------------- scrapes

MAX_SCRAPE_TIMEOUT_SECONDS = 300.0  # Maximum scrape timeout that is taken from the request.
MAX_QUEUE_SECONDS = 5.0  # Maximum wait of a scrape for a slot; at most half of its timeout.

# ---------------------------------------------------- status page and JSON

STATUS_REUSE_SECONDS = 1.0  # Maximum age of a status that is shown again if no incident followed.
STATUS_TIMEOUT_SECONDS = 5.0  # Timeout of a collection for the status.
INCIDENT_LEAD_SECONDS = 60.0  # Age from which an incident is shown after current warnings.
HISTORY_SECONDS = 600.0  # Period of the drawings on the page.
HISTORY_INTERVAL_SECONDS = 2.0  # Minimum interval between two samples of a GPU's activity.
MAX_HISTORY_SAMPLES = round(HISTORY_SECONDS / HISTORY_INTERVAL_SECONDS) + 1  # Samples of one GPU.
LANE_WINDOWS_SECONDS = (60.0, 120.0, 300.0, HISTORY_SECONDS)  # Periods of a daemon's lanes.
SPARSE_SAMPLES = 20  # Number of samples in the period below which the page calls them sparse.
GAP_SECONDS = 30.0  # Minimum gap that breaks a drawn line, unless samples are rarer.

# Entries that the page shows unfolded.
SHOWN_INCIDENTS = 8
SHOWN_GROUPS = 4
SHOWN_FINDINGS = 4
SHOWN_WAITS = 4
SHOWN_LINES = 16
SHOWN_LANES = 6

# ------------------------------------------------------------------ events

REPLAYED_EVENTS = 256  # Past events for a reconnecting reader; as many again of users' daemons.
MAX_QUEUED_EVENTS = 64  # Events that wait for a slow reader; others are lost, with a notice.
KEEP_ALIVE_INTERVAL_SECONDS = 15.0  # Interval between comments on an idle event stream.
RECONNECT_MILLISECONDS = 3000  # Delay after which a browser reconnects to the event stream.

# -------------------------------------------------- web configuration file

CONFIG_CHECK_INTERVAL_SECONDS = 1.0  # Interval between checks of the files for changes.
MAX_CERTIFICATE_BYTES = 4 << 20  # Maximum size of a file with certificates or a key.
WRONG_PASSWORD_SECONDS = 0.5  # Delay after a wrong password before the address's next check.
