"""A backend that responds immediately or as slowly as a test requires, and a reader of the page."""

import asyncio
import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser

from mps_exporter.backend import Backend
from mps_exporter.flags import Settings
from mps_exporter.metrics import Build
from mps_exporter.observations import DaemonFacts
from mps_exporter.snapshot import Incident, Snapshot
from mps_exporter.web.status_api import NO_BUILD

ROOTS = DaemonFacts("/tmp/nvidia-mps", "/var/log/nvidia-mps", owner_uid=0)


@dataclass
class FakeBackend(Backend):
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(taken_at=1_000.0))
    earlier: Sequence[Snapshot] = ()
    """Collections that the history of the page remembers, oldest first."""
    settings: Settings = field(default_factory=Settings)
    host: str = "gpu-host"
    build: Build = NO_BUILD
    ready: bool = True
    body: bytes = b"mps_control_up 1\n"
    seconds: float = 0.0
    gate: asyncio.Event | None = None  # While it is closed, no collection ends.
    error: Exception | None = None
    collections: list[tuple[float | None, frozenset[str] | None]] = field(default_factory=list)
    renderings: list[tuple[str, bool]] = field(default_factory=list)
    readers: list[Callable[[DaemonFacts, Incident], None]] = field(default_factory=list)
    recordings: dict[float, bytes] = field(default_factory=dict)
    jumps: list[str] = field(default_factory=list)

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

    async def expose(self, snapshot: Snapshot, content_type: str, gzip_level: int) -> bytes:
        assert snapshot is self.snapshot
        self.renderings.append((content_type, gzip_level > 0))
        await asyncio.sleep(0)
        end = b"# EOF\n" if "openmetrics" in content_type else b""
        body = self.body + end
        return gzip.compress(body, gzip_level) if gzip_level else body

    async def recording(self, at: float | None) -> bytes | None:
        return self.recordings.get(max(self.recordings) if at is None else at)

    async def jump(self, chapter: str) -> bool:
        self.jumps.append(chapter)
        return chapter == "wait"

    def subscribe(self, reader: Callable[[DaemonFacts, Incident], None]) -> None:
        self.readers.append(reader)

    def publish(self, daemon: DaemonFacts, incident: Incident) -> None:
        for reader in self.readers:
            reader(daemon, incident)


class PageReader(HTMLParser):
    """Tags, attributes and text of a page as a browser would read them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data
