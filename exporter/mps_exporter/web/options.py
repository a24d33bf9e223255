"""The settings of a server, its titles, and its limits, which tests change."""

from dataclasses import dataclass, field

from mps_exporter import limits_timeouts_intervals as policy
from mps_exporter.flags import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """The settings of a server, its titles, and the limits that no setting changes."""

    settings: Settings = field(default_factory=Settings)
    host: str = ""  # Title of the page: the Kubernetes node or the host's name.
    version: str = ""
    revision: str = ""

    max_connections: int = policy.MAX_CONNECTIONS
    max_event_streams: int = policy.MAX_EVENT_STREAMS
    timeout_offset: float = policy.TIMEOUT_OFFSET_SECONDS
    request_timeout: float = policy.REQUEST_TIMEOUT_SECONDS
    send_timeout: float = policy.SEND_TIMEOUT_SECONDS
    keepalive_timeout: float = policy.KEEPALIVE_TIMEOUT_SECONDS
    shutdown_timeout: float = policy.DRAIN_TIMEOUT_SECONDS
