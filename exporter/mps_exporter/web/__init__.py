"""The web server: metrics, status page, events, TLS and passwords; and what its modules share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from mps_exporter.observations import DaemonFacts
from mps_exporter.snapshot import Incident, Snapshot
from mps_exporter.web.options import WebOptions

if TYPE_CHECKING:
    from mps_exporter.web.webconfig import WebConfigWatch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Backend(Protocol):
    """The rest of the exporter as the web server uses it."""

    @property
    def ready(self) -> bool:
        """Whether the first collection is done."""

    @property
    def enabled_collectors(self) -> tuple[str, ...]:
        """Names that ``collect[]`` may contain."""

    async def collect(
        self, timeout_seconds: float | None, collectors: frozenset[str] | None
    ) -> Snapshot:
        """Collect, or join a collection. None means the default timeout, or all collectors."""

    async def expose(self, snapshot: Snapshot, content_type: str, gzip_level: int) -> bytes:
        """Render the metrics, not on the event loop. gzip_level 0: without compression."""

    async def recording(self, at: float | None) -> bytes | None:
        """Return the recording of the incident at this time (None: the latest), or None."""

    def subscribe(self, reader: Callable[[DaemonFacts, Incident], None]) -> None:
        """Call the reader on the event loop with the daemon and each new incident."""


BACKEND = web.AppKey[Backend]("BACKEND")
OPTIONS = web.AppKey[WebOptions]("OPTIONS")
WEB_CONFIG: web.AppKey[WebConfigWatch] = web.AppKey("WEB_CONFIG")
"""Absent without a web configuration file."""


def text_response(
    text: str, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(text=text + "\n", status=status, headers=headers)
