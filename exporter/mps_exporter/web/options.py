"""Options of the web side, and what its handlers share."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from mps_exporter.web.backend import Backend
from mps_exporter.web.webconfig import WebConfigWatch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TLSContext = Callable[[], Awaitable[ssl.SSLContext | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """Addresses, pages and limits. Durations are in seconds."""

    listen_addresses: tuple[str, ...] = (":9400",)
    telemetry_path: str = "/metrics"
    config_file: str | None = None
    systemd_socket: bool = False
    """Listen on systemd's sockets instead of listen_addresses."""
    host: str = ""
    """Title of the page: the Kubernetes node or the host's name."""
    name: str = "mps-exporter"
    version: str = ""
    revision: str = ""

    max_requests: int = 40
    """Maximum number of concurrent scrapes, and of concurrent pages; 0: no limit."""
    max_connections: int = 512
    max_event_streams: int = 32
    timeout_offset: float = 0.5
    """Maximum difference between a scrape's timeout and the deadline of its collection."""
    request_timeout: float = 10.0
    """Time to send a complete request, from the connection or from its first byte."""
    send_timeout: float = 60.0
    """Time to take a response."""
    keepalive_timeout: float = 120.0
    """Time that an idle connection is kept, above the usual scrape intervals."""
    shutdown_timeout: float = 10.0
    """Time for responses under way when the program is told to stop."""


BACKEND = web.AppKey[Backend]("BACKEND")
OPTIONS = web.AppKey[WebOptions]("OPTIONS")
TLS_CONTEXT = web.AppKey[TLSContext]("TLS_CONTEXT")
"""Returns the context for the next connection; absent where TLS is off."""

WEB_CONFIG = web.AppKey[WebConfigWatch]("WEB_CONFIG")
"""Absent without a web configuration file."""


def text_response(
    text: str, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(text=text + "\n", status=status, headers=headers)


def busy_response(what: str, *, retry_after: int = 1) -> web.Response:
    """Return the response beyond a limit."""
    text = f"503 Service Unavailable: more than {what}, or most of them from one address"
    return text_response(text, status=503, headers={"Retry-After": str(retry_after)})
