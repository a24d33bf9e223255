"""What the web side can be told."""

from __future__ import annotations

from dataclasses import dataclass

from mps_exporter.web.slow_clients import REQUEST_TIMEOUT_SECONDS, SEND_TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """Where to listen, what to serve, and how much to bear. Durations are in seconds."""

    listen_addresses: tuple[str, ...] = (":9400",)
    telemetry_path: str = "/metrics"
    config_file: str | None = None
    systemd_socket: bool = False
    """Listen on the sockets that systemd hands over, instead of listen_addresses."""
    max_requests: int = 40
    """Scrapes answered at the same time; 0 = no limit."""
    timeout_offset: float = 0.5
    """The deadline of a scrape is the scraper's timeout less this, but at most less 10 %."""
    host: str = ""
    """What the page is titled with: the node of Kubernetes, or the host's name."""
    name: str = "mps-exporter"
    version: str = ""
    revision: str = ""

    max_connections: int = 512
    """Beyond it, the connection that has kept us waiting longest makes room."""
    max_event_streams: int = 32
    request_timeout: float = REQUEST_TIMEOUT_SECONDS
    send_timeout: float = SEND_TIMEOUT_SECONDS
    keepalive_timeout: float = 120.0
    """How long an idle connection is kept: above the scrape intervals that are usual."""
    shutdown_timeout: float = 10.0
    """How long answers that are under way may take when the program is asked to stop."""
