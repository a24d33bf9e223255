"""What the web side needs from the rest of the program, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from mps_exporter.metrics.content_format import ContentFormat
from mps_exporter.snapshot import Incident, Snapshot


@dataclass(frozen=True, slots=True)
class DebugSource:
    """One source's part in one collection, for a person who looks for a fault."""

    name: str
    success: bool
    duration_seconds: float
    error: str | None = None
    log: tuple[str, ...] = ()
    """Its log lines during this collection."""
    raw: tuple[tuple[str, str], ...] = ()
    """What it read, as it came: (where from, text)."""


@dataclass(frozen=True, slots=True)
class DebugReport:
    """One collection with everything that went in and the metrics that came out."""

    taken_at: float
    duration_seconds: float
    sources: tuple[DebugSource, ...]
    metrics: str


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

    async def expose(self, snapshot: Snapshot, content_format: ContentFormat, gzip: bool) -> bytes:
        """Render the metrics, not on the event loop."""

    def subscribe(self) -> AsyncIterator[tuple[str, Incident]]:
        """(daemon, incident) from now on, as they are found."""

    async def debug(self, collectors: frozenset[str] | None) -> DebugReport:
        """One collection, with what each source read and said."""
