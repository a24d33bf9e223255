"""What the web side needs from the rest of the program, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from mps_exporter.snapshot import Incident, Snapshot


class Backend(Protocol):
    """The exporter as its web side sees it."""

    @property
    def ready(self) -> bool:
        """The first collection is done."""

    @property
    def enabled_collectors(self) -> tuple[str, ...]:
        """Names that ``collect[]`` may ask for."""

    async def collect(
        self, timeout_seconds: float | None, collectors: frozenset[str] | None
    ) -> Snapshot:
        """Collect, or join the collection in flight. None: the default deadline; every source."""

    async def expose(self, snapshot: Snapshot, content_type: str, gzip: bool) -> bytes:
        """Render the metrics, not on the event loop."""

    def subscribe(self) -> AsyncIterator[tuple[str, Incident]]:
        """(daemon, incident) from now on, as they are found."""
