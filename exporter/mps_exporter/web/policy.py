"""Limits, intervals and timeouts of the web server, in one place.

Durations are in seconds. The options of :class:`WebOptions` can differ between servers.
"""

from dataclasses import dataclass, field

from mps_exporter.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """The settings of a server, its titles, and the limits that no setting changes."""

    settings: Settings = field(default_factory=Settings)
    host: str = ""  # Title of the page: the Kubernetes node or the host's name.
    version: str = ""
    revision: str = ""

    max_connections: int = 512
    max_event_streams: int = 32
    timeout_offset: float = 0.5
    """Maximum difference between a scrape's timeout and the deadline of its collection."""
    request_timeout: float = 10.0
    """Time to send a complete request, from the connection or from its first byte."""
    send_timeout: float = 60.0  # Time to take a response.
    keepalive_timeout: float = 120.0
    """Lifetime of an idle connection, above the usual scrape intervals."""
    shutdown_timeout: float = 10.0  # Time for the responses in progress when the program stops.


# ------------------------------------------------------------------------------ connections

MAX_UNANSWERED_BYTES = 65_536  # Maximum size of an incomplete request, above aiohttp's limits.
ADDRESS_FRACTION = 0.75  # Fraction of the connections or requests that one client address may have.
SWEEP_INTERVAL_SECONDS = 1.0  # Interval between searches for slow clients.

TLS_CLOSE_TIMEOUT_SECONDS = 2.0

LINGERING_TIMEOUT_SECONDS = 2.0  # Time to read the rest of a request that is already answered.

ACCEPT_RETRY_SECONDS = 1.0
"""Delay before the next connection is accepted when descriptors or memory are short."""

LISTEN_BACKLOG = 1024

# ---------------------------------------------------------------------------------- scrapes

MAX_SCRAPE_TIMEOUT_SECONDS = 300.0  # Maximum scrape timeout that is taken from the request.
MAX_QUEUE_SECONDS = 5.0  # Maximum wait of a scrape for a slot; at most half of its timeout.
GZIP_LEVEL = 1  # Compression level: twice as fast as the default for pages hardly larger.

# --------------------------------------------------------------------- status page and JSON

STATUS_REUSE_SECONDS = 1.0
"""Maximum age of a status that is shown again, unless an incident occurred since."""

AFTER_INCIDENT_SECONDS = 0.2  # Minimum interval between two collections that incidents cause.
STATUS_TIMEOUT_SECONDS = 5.0  # Timeout of a collection for the status.
INCIDENT_LEAD_SECONDS = 60.0  # Age of an incident that no longer precedes current warnings.
HISTORY_SECONDS = 600.0  # Period of the drawings on the page.
SAMPLE_INTERVAL_SECONDS = 2.0  # Minimum interval between two samples of a GPU's activity.
MAX_SAMPLES = round(HISTORY_SECONDS / SAMPLE_INTERVAL_SECONDS) + 1  # Samples of one GPU.
LANE_WINDOWS_SECONDS = (60.0, 120.0, 300.0, HISTORY_SECONDS)  # Periods of a daemon's lanes.
SPARSE_SAMPLES = 20  # Number of samples in the period below which the page calls them sparse.

GAP_SECONDS = 30.0
"""Minimum interval between samples that breaks a line, unless the usual interval is longer."""

# Entries that the page shows unfolded.
SHOWN_INCIDENTS = 8
SHOWN_GROUPS = 4
SHOWN_FINDINGS = 4
SHOWN_WAITS = 4
SHOWN_LINES = 16
SHOWN_LANES = 6

# ----------------------------------------------------------------------------------- events

REPLAYED_EVENTS = 256  # Number of past events that a reconnecting reader can get.

MAX_QUEUED_EVENTS = 64
"""Maximum number of events that wait for a slow reader; it loses the oldest, with a notice."""

KEEP_ALIVE_INTERVAL_SECONDS = 15.0  # Interval between comments on an idle event stream.
RECONNECT_MILLISECONDS = 3000  # Delay after which a browser reconnects to the event stream.

# ------------------------------------------------------------------- web configuration file

CONFIG_CHECK_INTERVAL_SECONDS = 1.0  # Interval between checks of the files for changes.
MAX_CERTIFICATE_BYTES = 4 << 20  # Maximum size of a file with certificates or a key.
WRONG_PASSWORD_SECONDS = 0.5  # Delay after a wrong password before the address's next check.
