"""Limits, intervals and timeouts of collections and of the merge."""

# ---------------------------------------------------------------------- between collections

GPU_SAMPLE_INTERVAL_SECONDS = 1.0
"""Interval between samples of the GPUs' activity: an integral in these steps has 2 % error."""

EXIT_DETAILS_TIMEOUT_SECONDS = 1.0
"""Timeout for reading processes after an exit. The next poll of the logs waits for it."""

DAEMON_SEARCH_INTERVAL_SECONDS = 5.0  # Interval between searches of /proc for a first daemon.
DAEMON_SEARCH_TIMEOUT_SECONDS = 5.0  # Timeout of that search, and of a poll of the logs.

# ---------------------------------------------------------------------- collections

GPU_DEADLINE_RATIO = 0.7  # Part of the deadline for the GPUs; the rest is for their processes.

USERS_QUERY_WAIT_SECONDS = 0.25  # Maximum time to wait only for daemons of ordinary users.

PROBE_VALID_INTERVALS = 5.0
"""Multiple of --mps.min-query-interval for which a probe is valid while the logs show no change.
The tool writes 0.4 kB into control.log each time: 2.3 MB a day at a scrape every 15 s."""

SERVER_REPLY_VALID_INTERVALS = 3.0
"""Multiple of --mps.min-query-interval for which a server's reply is shown if the logs cannot be
read: a stopped server is not queried, and may have changed since."""

MIN_SERVER_REPLY_VALID_SECONDS = 15.0  # Minimum time for which it is shown.

MAX_KEPT_EVIDENCE = 256  # Maximum number of faults, and of ranges, kept for a later daemon.

# ---------------------------------------------------------------------- daemons

SHOWN_AFTER_QUIT_SECONDS = 120.0  # Time for which an unconfigured daemon that quit is shown.
SHOWN_AFTER_DEATH_SECONDS = 24 * 3600.0  # The same time for a daemon that died.

MAX_ABSENT_DAEMONS = 32
"""Maximum number of absent daemons of root and the exporter's user, and again of other users."""

MAX_LOGGED_PIDS = 2048  # Maximum number of processes read because users' daemons log them.

USERS_PER_LIMIT = 4  # Number of ordinary users who can exhaust one of these limits together.

MAX_CLIENTS_PER_USER = 256
"""Maximum number of clients with metrics, of the daemons of one ordinary user."""

MAX_USERS_CLIENTS = 1024  # Maximum number of such clients of all ordinary users together.

STRANDED_SECONDS = 1.0
"""Minimum time without a server after which a client is stranded. A client that exits leaves NVML's
list within this time after it left its server."""

# ---------------------------------------------------------------------- replays

REPLAY_STEP_SECONDS = 0.5  # Step of a replay up to a position: 129 s take 0.2 s.
MAX_REPLAY_STEPS = 5000  # Maximum number of steps; of more than 40 minutes, the steps are longer.
MIN_SCENE_SECONDS = 1.0  # Minimum time between two scenes, for recordings of one instant.

# ---------------------------------------------------------------------- rendering

RENDER_THREADS = 2  # Number of threads that render metrics, so that the event loop continues.
