"""Limits, timeouts and intervals of the sources."""

from __future__ import annotations

# ---------------------------------------------------------------------- ordinary users
# Root, the exporter's own user and configured daemons have none of these limits.

MAX_PROCESSES_PER_USER = 24
"""Processes of MPS's programs: eight daemons, their servers, and as many runs of the tool."""

MAX_PROCESSES = 512
"""Processes of all ordinary users. Eight GPUs of seven MIG instances need 56 daemons."""

NEW_PROCESSES_PER_SECOND = 1.0
"""Refill rate of a user's new processes. A new process costs 0.3 ms, and 30 ms if it has a daemon's
name and exits at once."""

MAX_NEW_PROCESSES_PER_SECOND = 16.0
"""Refill rate of the new processes of all ordinary users."""

MAX_DAEMONS_PER_USER = 8
"""Daemons shown of one user."""

MAX_DAEMONS = 64
"""Daemons shown of all ordinary users."""

DIRECTORY_CHECKS_PER_SECOND = 1.0
"""Refill rate of the directory checks for a user's daemons, of which MAX_DAEMONS_PER_USER may run
at once. A check takes a thread and 40 system calls."""

MAX_DIRECTORY_CHECKS_PER_SECOND = 16.0
"""Refill rate of the directory checks for all ordinary users."""

FIRST_QUERIES_PER_SECOND = 0.5
"""Refill rate of first queries to a user's new daemons, of which MAX_DAEMONS_PER_USER may run at
once. A run of the control tool costs 8 ms."""

MAX_TOOL_RUNS = 8
"""Concurrent runs of the control tool for trusted daemons, and again for all ordinary users."""

MAX_TOOL_RUNS_PER_USER = 2
"""Concurrent runs of the control tool for one ordinary user."""

MAX_IGNORED_USERS = 32
"""Users whose ignored processes are counted, those with most of them first."""

# ---------------------------------------------------------------------- discovery

DIRECTORY_TIMEOUT_SECONDS = 0.5
"""Timeout of one collection's directory checks. A hung file server must not hold up the rest."""

MAX_DAEMON_NAME_BYTES = 255
"""Length of a daemon's name. A longer path is cut and gets a hash. (A socket's address has at most
108 bytes, so a daemon with a longer path cannot be queried.)"""

MAX_HUNG_PATHS_SHOWN = 8
"""Hung directories named in the error message."""

MAX_SOCKET_DIRECTORIES = 256
"""Directories with a control socket that are checked for a daemon without readable environment."""

LOG_TAIL_BYTES = 1 << 16
"""End of a control.log that is searched for lines of a daemon."""

# ---------------------------------------------------------------------- processes

PROCESS_REFRESH_INTERVAL_SECONDS = 60.0
"""Interval between two reads of what rarely changes: control group, user, names of users."""

CLOCK_STEP_SECONDS = 2.0
"""Smallest change of the boot time that is a step of the clock. /proc/stat contains whole seconds,
and adjustments of the clock move them a little."""

MAX_PROC_FILE_BYTES = 1 << 22
"""Length of a file of /proc."""

MAX_ARGUMENT_BYTES = 1 << 13
"""Length of the arguments that are read: a daemon's flags are at the beginning."""

MAX_VARIABLES = 64
"""MPS variables kept of a process's environment."""

MAX_VARIABLE_NAME_BYTES = 128
"""Length of an MPS variable's name. A variable with a longer name is ignored."""

MAX_VARIABLE_VALUE_BYTES = 4096
"""Length of an MPS variable's value, one byte more than the longest path. The rest is cut."""

MAX_PIDFDS = 128
"""Processes that are watched by descriptor: an eighth of the usual limit of a program, 1024. A
daemon, its server and its queued clients need one each."""

# ---------------------------------------------------------------------- control groups

MAX_CGROUPS = 1024
"""Control groups whose GPU memory is read."""

MAX_CGROUP_DEPTH = 32
"""Levels of a control group's path that are searched for a limit."""

MAX_CGROUP_FILE_BYTES = 1 << 16
"""Length of a control group's file."""

MAX_CONTAINER_LINKS = 20_000
"""Links in the kubelet's folder. A node has 110 pods by default; links of ended containers stay
until their pods are removed."""

# ---------------------------------------------------------------------- doctor

DRIVER_HOLDERS_TIMEOUT_SECONDS = 0.15
"""Timeout of the search for open device files: 4,000 files take about 10 ms."""

MAX_DIRECTORY_ENTRIES = 256
"""Entries read of a directory: open files of a process, systemd units, pipe directories."""
