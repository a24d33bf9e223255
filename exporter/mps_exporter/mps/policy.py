"""Limits, timeouts and tolerances of this package.

"Measured" means: on driver 580.159.04, H200, unless another GPU is named.
"""

from dataclasses import dataclass

# Reading the logs

MAX_LINE_BYTES = 65_536
"""Longest line, also of a recording's filter. A longer line is skipped, and counted as unknown."""

MAX_MESSAGE = 512  # Longest message, in characters, that is compared with the known wordings.
MAX_QUOTED = 120  # Longest text that is kept of a message, in characters.

WRITE_RACE_SECONDS = 0.1
"""Time between a line's timestamp and the write. A log read to its end at t is complete to t less
this time."""

MAX_HOLD_SECONDS = 5.0
"""Maximum time for which a line waits until the other log is read up to its timestamp, and a reply
of the control tool until both logs are read up to the query."""

CLOCK_JUMP_SECONDS = 60.0  # Minimum step back in time that shows that a clock was set back.

CLOCK_TOLERANCE_SECONDS = 2.0
"""Maximum time by which a timestamp may be later than the time at which the line was read, and a
start time in /proc, which is counted in ticks since boot, later than a line of the process."""

# The daemon, its servers and clients

ADMISSION_TIMEOUT_SECONDS = 10.0
"""Time after which a client that was sent to a ready server will not connect, and a caller without
credentials was refused. Other clients connect, and NEW CLIENT follows, within 1 ms (measured)."""

SILENCE_SECONDS = 0.25
"""Silence after which a daemon seems stuck. It completes what it began within 0.1 s (measured)."""

EXIT_CONFIRM_SECONDS = 1.0  # Time after an exit by which the last lines have been written.

LOST_LINE_SECONDS = 10.0
"""Time after which the line about a client's disconnection is lost. It is longer than
EXIT_CONFIRM_SECONDS: the server writes the line, not the client."""

SHUTDOWN_TIMEOUT_SECONDS = 5.0
"""Maximum time from a shutdown request to the server's exit: 0.06 to 0.1 s were measured."""

SIMULTANEOUS_SECONDS = 0.01  # Maximum difference of one event's timestamps in the two logs.
REFUSAL_SECONDS = 1.0  # Maximum time between the lines about one refused client.

MAX_RECENT = 256
"""Entries of each list or table of recent events, such as refusals by PID. The oldest go first."""

MAX_CONTEXTS = 256  # Contexts of one client; contexts of one server without a known GPU.
MAX_GPUS = 64  # GPUs of one daemon, server or fault.
TIMELINE_SECONDS = 600  # Time that the timeline covers.
MAX_TIMELINE_SPANS = 400  # Spans of one daemon's timeline. The oldest go first.
MAX_INCIDENTS = 100  # Incidents of one daemon. The oldest go first.
MAX_INCIDENT_PIDS = 64  # Processes that one incident names.

REPEATED_WITHIN_SECONDS = 60.0
"""Time within which equal failed starts and rejections are one incident with a count: a server that
cannot start fails twenty times a second."""

REPEATED_AMONG = 8  # Recent incidents that a repeated incident is compared with.

# Faults

SAME_FAULT_SECONDS = 0.5
"""Maximum time between the lines of server.log about one fault, and between server.log and the
kernel log. Measured: 0.1 s."""

SAME_LINES_SECONDS = 0.15
"""Maximum time between the kernel log's lines about one fault. Measured: 0.12 s, five contexts."""

FAULT_DECISION_SECONDS = 1.5
"""Maximum time from a fault to its line in the kernel log and to the end of the client that left
the work. Measured: 0.5 s, and 1.4 s where 48 clients left together."""

LATE_FAULT_SECONDS = 2.0
"""Maximum time from a client's end to a fault by its work while other clients use the GPU."""

END_TO_FAULT_SECONDS = (0.1, 0.3)
"""Range of the time from the end of a context to a fault by the work that the client left.
Measured: 0.122 to 0.257 s."""

UNFINISHED_END_SECONDS = (0.12, 0.8)
"""Range of the time from the end of the context to the end of the process, for the only client on
a GPU that left work there. Measured: 0.146 to 0.487 s; without work left behind 0.012 to 0.093 s.
A longer time means that the program destroyed its context and continued."""

MAX_END_AGE_SECONDS = 5.0  # Maximum age of an end that explains a fault. The longest took 1.4 s.
RANGES_LIFETIME_SECONDS = 600.0  # Lifetime of a client's address ranges after its end.
MAX_EVIDENCE_PROCESSES = 1024  # Processes whose address ranges are kept for one daemon.
MAX_EVIDENCE_RANGES = 1 << 15  # Address ranges of these: 512 each of 64 clients; 4 MB.


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

# Replies of the control tool

MAX_LIST_ROWS = 1024
"""Maximum number of rows that are read of one list of the control tool; more rows are counted."""

MAX_QUOTED_CHARACTERS = 200  # Maximum length of the control tool's output in a message.

MIN_QUERY_AGE_SECONDS = 1.0
"""Minimum age of a server that is queried: the log lines of its start may not have been read."""

RETRY_INTERVAL_SECONDS = 60.0  # Interval after a reply that explained nothing; doubles.
LOG_PRECEDENCE_SECONDS = 2.0  # Time before a query whose events are left to the log.

CONTRADICTION_CONFIRM_SECONDS = 10.0
"""Minimum time between two replies that contradict the log and so prove that it lost a line."""

# Histograms

WAIT_BOUNDS_SECONDS = (
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
    *(300.0, 600.0, 1800.0, 3600.0, 7200.0),
)
"""Bucket bounds for waits behind another user's server: 0.1 s (an idle server is replaced) to 2 h.
Rules and dashboards do not use the distribution of other durations."""
