"""Limits, timeouts and intervals of the sources."""

# ---------------------------------------------------------------------- ordinary users
# Root, the exporter's own user and configured daemons have none of these limits.

MAX_PROCESSES_PER_USER = 24
"""Processes of MPS's programs: eight daemons, their servers, and as many runs of the tool."""

MAX_DIRECTORY_CHECKS_PER_USER = 2
"""Processes of a user whose directories are checked again in one collection: 40 system calls each,
on a thread."""

MAX_PROCESSES = 192  # Processes of all ordinary users: those of 64 daemons.

NEW_PROCESSES_PER_SECOND = 1.0
"""Refill rate of a user's new processes. A new process costs 0.3 ms, and 30 ms if it has a daemon's
name and exits at once: 8 ms are a run of the control tool."""

MAX_NEW_PROCESSES_PER_SECOND = 16.0  # Refill rate of the new processes of all ordinary users.
MAX_DAEMONS_PER_USER = 8  # Daemons shown of one user.
MAX_DAEMONS = 64  # Daemons shown of all ordinary users. Eight GPUs with MIG need 56 daemons.

MAX_TOOL_RUNS = 8
"""Concurrent runs of the control tool for trusted daemons, and again for all ordinary users."""

MAX_TOOL_RUNS_PER_USER = 2  # Concurrent runs of the control tool for one ordinary user.
MAX_IGNORED_USERS = 32  # Users whose ignored processes are counted, by number of processes.

# ---------------------------------------------------------------------- discovery

DEFAULT_PIPE_DIRECTORIES = ("/tmp/nvidia-mps", "/run/nvidia-mps")  # noqa: S108 - where MPS has it
"""The second is the default of newer daemons that run as root."""

DIRECTORY_TIMEOUT_SECONDS = 0.5
"""Timeout of one collection's directory checks. A hung file server must not hold up the rest."""

MAX_PIPE_DIRECTORY_BYTES = 255
"""Length of a pipe directory's path. No daemon can run at a longer path: a socket's address has at
most 108 bytes."""

MAX_HUNG_PATHS_SHOWN = 8  # Hung directories named in the error message.

MAX_SOCKET_DIRECTORIES = 256
"""Directories with a control socket that are checked for a daemon without readable environment."""

MAX_SOCKETS, MAX_USERS_SOCKETS = 1 << 18, 1 << 15
"""Unix sockets that are searched for these, for a daemon of root and of an ordinary user: 0.3 s for
100,000."""

LOG_TAIL_BYTES = 1 << 16  # End of a control.log that is searched for lines of a daemon.

# ---------------------------------------------------------------------- processes

PROCESS_REFRESH_INTERVAL_SECONDS = 60.0
"""Interval between two reads of what rarely changes: control group, user, names of users."""

PROCESS_TIMEOUT_SECONDS = 0.5
"""Timeout for reading the memory of processes: arguments and environment, 0.05 ms each."""

USERS_PROCESS_TIMEOUT_SECONDS = 0.1
"""Part of that timeout in which processes of ordinary users are waited for."""

CLOCK_STEP_SECONDS = 2.0
"""Smallest change of the boot time that is a step of the clock. /proc/stat contains whole seconds,
and adjustments of the clock move them a little."""

MAX_PROC_FILE_BYTES = 1 << 22  # Length of a file of /proc.
MAX_MOUNT_NUMBER_BYTES = 64  # Beginning of a list of mounts, with the first number.
MAX_MOUNTS_BYTES = 1 << 18  # Length of a list of mounts; most have less than 16 KiB.

MAX_ARGUMENT_BYTES = 1 << 13
"""Length of the arguments that are read: a daemon's flags are at the beginning."""

MAX_VARIABLES = 64  # MPS variables kept of a process's environment.
MAX_VARIABLE_ENTRIES = 4096  # Settings of MPS variables that are searched for these.
MAX_VARIABLE_NAME_BYTES = 128  # Length of an MPS variable's name; longer names are ignored.

MAX_VARIABLE_VALUE_BYTES = 4096
"""Length of an MPS variable's value, one byte more than the longest path. The rest is cut."""

MAX_PIDFDS = 128
"""Processes that are watched by descriptor: an eighth of the usual limit of a program, 1024. A
daemon, its server and its queued clients need one each."""

# ---------------------------------------------------------------------- control groups

MAX_CGROUPS = 1024  # Control groups whose GPU memory is read.
MAX_CGROUP_DEPTH = 32  # Levels of a control group's path that are searched for a limit.
MAX_CGROUP_FILE_BYTES = 1 << 16  # Length of a control group's file.

MAX_CONTAINER_LINKS = 20_000
"""Links in the kubelet's folder. A node has 110 pods by default; links of ended containers stay
until their pods are removed."""

# ---------------------------------------------------------------------- doctor

DOCTOR_TIMEOUT_SECONDS = 2.0  # Timeout for the files that only the doctor reads.

DRIVER_HOLDERS_TIMEOUT_SECONDS = 0.15
"""Timeout of the search for open device files: 4,000 files take about 10 ms."""

MAX_DIRECTORY_ENTRIES = 256
"""Entries read of a directory: open files of a process, systemd units, pipe directories."""

# ---------------------------------------------------------------------- blocking calls

MAX_IDLE_THREADS = 8  # Threads that are kept for later calls; a start costs 0.1 ms.

MAX_HUNG_CALLS = 64
"""Maximum number of calls in progress from earlier rounds, after which no call is started."""

MAX_HUNG_CALLS_PER_USER = 4  # The same limit for calls that read files of one ordinary user.

MAX_USERS_CALLS = 24
"""Maximum number of ordinary users' calls in progress that one round starts, each on a thread. Of
400 calls that return at once, 13 are in progress. The systemd unit allows 128 tasks."""

# ---------------------------------------------------------------------- logs

LOG_POLL_INTERVAL_SECONDS = 0.2  # Interval between polls of the logs.
LOG_POLL_TIMEOUT_SECONDS = 2.0  # Timeout of one poll of all logs.

USERS_LOG_POLL_TIMEOUT_SECONDS = 0.1
"""Part of that timeout in which a poll waits for logs of ordinary users."""

LOG_UNREADABLE_AFTER_SECONDS = 5.0
"""Duration of a hanging read after which a log is reported as unreadable."""

SERVER_LOG_SEARCH_INTERVAL_SECONDS = 5.0
"""Interval between searches of a v3 daemon's log directory for logs of new servers."""

MAX_LOG_BACKLOG_BYTES = 16 << 20  # Maximum part of a log that its first read covers, from the end.

MAX_LOG_BEHIND_BYTES = 64 << 20
"""Maximum unread part of a log. A log that grew by more is skipped up to its last lines."""

MAX_LOG_POLL_BYTES = 1 << 20  # Maximum part of a log that one poll reads.

MAX_USER_LOG_POLL_BYTES = 64 << 10
"""Maximum size that one poll reads of all logs of an ordinary user (0.33 MB/s; a daemon writes
some kB/s)."""

MAX_USERS_LOG_POLL_BYTES = 128 << 10  # The same for all ordinary users together.
MIN_USER_LOG_POLL_BYTES = 4096  # Minimum share of each log in these two limits.
MAX_SERVER_LOGS = 64  # Maximum number of server logs that are followed for a v3 daemon.
MAX_LOG_DIRECTORY_ENTRIES = 4096  # Entries that are searched for server logs.

# ---------------------------------------------------------------------- the control tool

MAX_CONTROL_ATTEMPTS = 2  # Maximum number of runs for one query: the second follows a refusal.
CONTROL_RETRY_DELAY_SECONDS = 0.04  # Delay before the second run.

MIN_CONTROL_RUN_SECONDS = 0.5
"""Minimum time for a run (or half of its timeout): starting the tool takes a part of it."""

MIN_CONTROL_RETRY_SECONDS = 0.1  # Minimum time for the second run.

CONTROL_HANG_RATIO = 0.9
"""Part of the timeout of a run without any reply, over all runs since the last, that is a hang."""

CONTROL_BACKOFF_SECONDS = 10.0  # Pause after a daemon's first hang; doubles each time.
MAX_CONTROL_BACKOFF_SECONDS = 300.0  # Maximum pause after a hang.

USERS_CONTROL_BACKOFF_SECONDS = 5.0
"""Delay before another query of an ordinary user's daemon that refused or was absent. Each
following delay is twice as long. A run of the tool costs the exporter 8 ms."""

MAX_USERS_CONTROL_BACKOFF_SECONDS = 60.0  # Maximum of that delay.

MAX_CONTROL_OUTPUT_BYTES = 1 << 20
"""Maximum length of each output. The kernel ends a tool that writes more."""

MAX_KEPT_OUTPUT_CHARACTERS = 4096  # Length that is kept of such an output.
CONTROL_REAP_SECONDS = 1.0  # Maximum time to wait for the exit of a killed tool.
MAX_CONTROL_CPU_SECONDS = 10  # Maximum CPU time of a run.
MAX_CONTROL_OPEN_FILES = 64  # Maximum number of open files of a run.

# ---------------------------------------------------------------------- recordings

RECORDED_POLL_INTERVAL_SECONDS = 1.0  # Maximum poll interval of the logs during a recording.
MAX_FIRST_REPLY_SECONDS = 5.0  # Maximum time of a source's first observation.

MAX_RECORDING_BYTES = 128 << 20
"""Maximum size of an unpacked recording. In memory it takes up to five times that."""

MAX_RECORDING_LINE_BYTES = 32 << 20  # Maximum size of one line.
MAX_RECORDING_LINE_LISTS = 1_000_000  # Maximum number of lists and objects in one line.
MAX_RECORDING_SECONDS = 7 * 86400.0  # Maximum duration of a recording.

MAX_RECORDING_EARLY_SECONDS = 86400.0
"""Maximum time of an observation before the recording's start: an exit is recorded with its own
time."""

# ---------------------------------------------------------------------- the kernel log

MAX_KERNEL_HISTORY_SECONDS = 600.0
"""Maximum age of a line that was in the kernel log before the exporter started."""

MAX_KERNEL_RECORDS = 1 << 14  # Maximum records of one poll: they take about 50 ms.
MAX_MAPS_BYTES = 1 << 20  # Maximum size of /proc/PID/maps; 500 mappings of PyTorch take 60 KB.
MAX_RANGES_PER_PROCESS = 512  # Maximum ranges kept for a process: the smallest.

MAX_MAPS_WAITING_PER_USER = 512
"""Maximum number of an ordinary user's processes whose maps wait to be read."""

MAX_USER_MAPS_BYTES = 16 << 20
"""Maximum size of all maps that one read takes from one ordinary user's processes."""

USER_MAPS_BYTES_PER_SECOND = MAX_USER_MAPS_BYTES / 60.0  # Refill rate of that limit.

# ---------------------------------------------------------------------- this host

MEMORY_LIMITS_TIMEOUT_SECONDS = 0.5  # Timeout for the memory limits that only NVML reports.
EXIT_POLL_INTERVAL_SECONDS = 1.0  # Interval between scans for exits without a pidfd.
GPU_SAMPLE_TIMEOUT_SECONDS = 5.0  # Timeout for one sample of the GPUs' activity.
CLOSE_TIMEOUT_SECONDS = 1.0  # Timeout for closing each source.
