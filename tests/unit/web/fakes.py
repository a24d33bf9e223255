"""A backend that answers at once, or as slowly as a test wants."""

from __future__ import annotations

import asyncio
import gzip as gzip_module
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from mps_exporter.snapshot import COLLECTORS, Incident, Snapshot


@dataclass
class FakeBackend:
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(taken_at=1_000.0))
    earlier: Sequence[Snapshot] = ()
    """Collections that the history of the page remembers, oldest first."""
    ready: bool = True
    enabled_collectors: tuple[str, ...] = COLLECTORS
    body: bytes = b"mps_control_up 1\n"
    seconds: float = 0.0
    gate: asyncio.Event | None = None
    """While it is closed, no collection ends."""
    error: Exception | None = None
    collections: list[tuple[float | None, frozenset[str] | None]] = field(default_factory=list)
    renderings: list[tuple[str, bool]] = field(default_factory=list)
    incidents: asyncio.Queue[tuple[str, Incident]] = field(default_factory=asyncio.Queue)

    async def collect(
        self, timeout_seconds: float | None, collectors: frozenset[str] | None
    ) -> Snapshot:
        self.collections.append((timeout_seconds, collectors))
        await asyncio.sleep(self.seconds)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.snapshot

    async def expose(self, snapshot: Snapshot, content_type: str, gzip: bool) -> bytes:
        assert snapshot is self.snapshot
        self.renderings.append((content_type, gzip))
        await asyncio.sleep(0)
        end = b"# EOF\n" if "openmetrics" in content_type else b""
        body = self.body + end
        return gzip_module.compress(body, 1) if gzip else body

    async def subscribe(self) -> AsyncIterator[tuple[str, Incident]]:
        while True:
            yield await self.incidents.get()
