"""Backend of the web server: a collector on this host or on a recording."""

from __future__ import annotations

import asyncio
import gzip as gzip_format
import os
import platform
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from prometheus_client import ProcessCollector

import mps_exporter
from mps_exporter import policy
from mps_exporter.collector import Collector
from mps_exporter.config import Settings
from mps_exporter.metrics import Build, ClientSeries, SparseSeries, render
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.metrics.spec import Family
from mps_exporter.replay import ReplayPlayer
from mps_exporter.snapshot import Incident, Snapshot
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.replay_host import Playlist


def build() -> Build:
    """Return this program's version."""
    revision = os.environ.get("MPS_EXPORTER_BUILD_REVISION", "")
    return Build(mps_exporter.__version__, revision, platform.python_version())


def render_families(snapshot: Snapshot, clients: ClientSeries = "full") -> list[Family]:
    """Return all metrics of a snapshot, in the viewer's time."""
    if snapshot.recording is None:
        return render(snapshot, build(), clients=clients)
    return render(snapshot, build(), wall=snapshot.recording.viewer_time, clients=clients)


class CollectorBackend:
    """Implements mps_exporter.web.Backend."""

    def __init__(self, settings: Settings, playlist: Playlist | None = None) -> None:
        self._encoder = Encoder()
        self._sparse = SparseSeries()
        self._clients = cast("ClientSeries", settings.collector_clients)
        self._renderers = ThreadPoolExecutor(policy.RENDER_THREADS, thread_name_prefix="render")
        self._process = (
            None if settings.web_disable_exporter_metrics else ProcessCollector(registry=None)
        )
        self._subscribers: set[asyncio.Queue[tuple[str, Incident]]] = set()
        self._ready = False
        self.enabled_collectors = settings.enabled_collectors()
        self.player: ReplayPlayer | None = None
        """Plays recordings; None on a live host."""
        if playlist is None:
            self._live = LiveHost(settings)
            self._live_collector = Collector(self._live, settings, on_incident=self._publish)
        else:
            self.player = ReplayPlayer(playlist, settings, on_incident=self._publish)

    async def run(self) -> None:
        """Follow the logs until cancelled; replay a recording in a loop."""
        await (
            self._live_collector.run_between_collections()
            if self.player is None
            else self.player.run()
        )

    async def close(self) -> None:
        if self.player is None:
            await self._live.close()
        self._renderers.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        """Whether the first collection is done."""
        return self._ready

    async def collect(
        self, timeout_seconds: float | None, collectors: frozenset[str] | None
    ) -> Snapshot:
        """Collect, or join the collection in flight."""
        source = self._live_collector if self.player is None else self.player
        snapshot = await source.collect(timeout_seconds, collectors)
        self._ready = True
        return snapshot

    async def expose(self, snapshot: Snapshot, content_type: str, gzip: bool) -> bytes:
        """Render the metrics on a separate thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._renderers, self._encode, snapshot, content_type, gzip
        )

    def _encode(self, snapshot: Snapshot, content_type: str, gzip: bool) -> bytes:
        families = self._sparse.shown(render_families(snapshot, self._clients))
        own = () if self._process is None else self._process.collect()
        page = self._encoder.encode(families, own, content_type)
        return gzip_format.compress(page, policy.GZIP_LEVEL, mtime=0) if gzip else page

    def _publish(self, daemon: str, incident: Incident) -> None:
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait((daemon, incident))

    async def subscribe(self) -> AsyncIterator[tuple[str, Incident]]:
        """Yield each new incident with its daemon."""
        queue: asyncio.Queue[tuple[str, Incident]] = asyncio.Queue(policy.MAX_QUEUED_INCIDENTS)
        self._subscribers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)
