"""Thresholds, ages and sizes that decide whether a finding applies and what its text names."""

# Daemons and servers
RECENT_INCIDENT_SECONDS = 300.0  # Age up to which an incident is recent.
MAX_START_SECONDS = 10.0  # Maximum normal start time of a server; most take less than a second.
MAX_BACKOFF_SECONDS = 51.2
"""Longest pause before the daemon replaces a server that had clients (driver 580)."""
MAX_CONTEXT_CREATION_SECONDS = 30.0
"""Maximum normal time to create a context. Measured: ACTIVE within 2 ms (257 recorded contexts)."""
GHOST_GRACE_SECONDS = 5
"""Time within which a daemon continues after the end of its ghost. Measured (driver 580): with one
GPU it continued immediately (8 of 8). With two GPUs it and the program connected to the ghost
waited for each other until that program exited (7 of 7)."""
FILES_PER_CLIENT = 10
"""Free file descriptors that a server needs for a new client. Measured: 522 open files with 48
clients on one GPU (H200, driver 580); a limit of 72 admitted two clients and refused the third."""

# GPUs and limits
MAX_IDLE_SM_ACTIVITY = 0.3
MIN_BUSY_UTILIZATION = 0.9
MAX_COMMITTED_RATIO = 0.75  # Sum of the limits above which little of the GPU can be idle.
MIN_USED_RATIO = 0.9
"""SM activity, as a part of what the limits allow, from which the limits hold the clients back."""
RATIO_TOLERANCE = 0.005  # Difference up to which two SM limits are equal: a third is written as 33.
NEAR_LIMIT_RATIO = 0.95  # Used part of a memory limit from which the next allocation can fail.
CONTEXT_BYTES = 290 << 20
"""Memory limit with which no context can be created. Measured on an H200: cuDevicePrimaryCtxRetain
failed with error 2; with 1 GiB a client without memory of its own had 753 MiB left."""
MIN_SMS = 2
"""Smallest usable SM limit before Hopper: SMs come in pairs. On Hopper the minimum is 8 SMs for
any percentage (measured)."""

# Logs and texts
LARGE_LOG_BYTES = 1 << 30
"""Size of a large log: a GiB is weeks of a busy host, and nothing rotates the logs."""
MAX_COMMAND_PIDS = 20  # Maximum number of processes in one command.
MAX_NAMED_PROGRAMS = 3
"""Maximum number of programs that a remedy names; a remedy counts more programs instead."""
