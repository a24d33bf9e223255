"""What the web side asks, answered by a collector on this host or on a recording."""

from __future__ import annotations

import asyncio
import gzip as gzip_format
import logging
import os
import platform
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

from prometheus_client import CollectorRegistry, Metric, ProcessCollector

import mps_exporter
from mps_exporter.collector import Collector
from mps_exporter.config import Settings
from mps_exporter.metrics.content_format import TEXT_0_0_4, ContentFormat
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.metrics.loops import LoopCounters
from mps_exporter.metrics.render import Build, render
from mps_exporter.observations import Observation
from mps_exporter.snapshot import Incident, RecordingInfo, Snapshot
from mps_exporter.sources.host import Host
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.recording import Recording, as_json
from mps_exporter.sources.replay_host import ReplayHost
from mps_exporter.web.backend import DebugReport, DebugSource

GZIP_LEVEL = 1
"""Twice as fast as the default level for pages hardly larger."""

MAX_QUEUED_INCIDENTS = 100
"""Incidents kept for a reader of the event stream who does not keep up; the oldest go first."""


def build() -> Build:
    """This program's version."""
    revision = os.environ.get("MPS_EXPORTER_BUILD_REVISION", "")
    return Build(mps_exporter.__version__, revision, platform.python_version())


class CollectorBackend:
    """Implements mps_exporter.web.backend.Backend."""

    def __init__(self, settings: Settings, recording: Recording | None = None) -> None:
        self._settings = settings
        self._recording = recording
        self._loop_number = 1
        self._encoder = Encoder()
        self._renderers = ThreadPoolExecutor(2, thread_name_prefix="render")
        self._process = CollectorRegistry()
        if not settings.web_disable_exporter_metrics:
            ProcessCollector(registry=self._process)
        self._subscribers: set[asyncio.Queue[tuple[str, Incident]]] = set()
        self._ready = False
        self._loops = LoopCounters()
        self._host: Host = LiveHost(settings) if recording is None else self._replay(recording)
        self._collector = self._collector_of(self._host)

    def _replay(self, recording: Recording) -> ReplayHost:
        return ReplayHost(recording, speed=self._settings.replay_speed)

    def _collector_of(self, host: Host) -> Collector:
        return Collector(host, self._settings, on_incident=self._publish)

    # -- the collector's life

    async def run(self) -> None:
        """Follow the logs until cancelled; a recording begins again when it ends."""
        if self._recording is None:
            await self._collector.follow()
        else:
            await self._run_loops(self._recording)

    async def _run_loops(self, recording: Recording) -> None:
        for loop in count(1):
            host = self._replay(recording)
            collector = self._collector_of(host)
            began = await collector.collect()
            # Nobody may see a loop's counters before they go on from where the last one ended.
            self._loops.begin(loop, render(began, build(), wall=host.wall))
            self._host, self._collector, self._loop_number = host, collector, loop
            follower = asyncio.create_task(collector.follow())
            try:
                await host.until_finished()
            finally:
                follower.cancel()
            await asyncio.wait((follower,))
            ended = await collector.collect()
            self._loops.applied(loop, render(ended, build(), wall=host.wall))

    async def close(self) -> None:
        """Let go of everything."""
        await self._host.close()
        self._renderers.shutdown(wait=False, cancel_futures=True)

    # -- what the web side asks

    @property
    def ready(self) -> bool:
        """The first collection is done."""
        return self._ready

    @property
    def enabled_collectors(self) -> tuple[str, ...]:
        """Names that collect[] may ask for."""
        return self._collector.enabled

    async def collect(
        self, timeout_seconds: float | None, collectors: frozenset[str] | None
    ) -> Snapshot:
        """Collect, or join the collection in flight."""
        loop = self._loop_number
        snapshot = await self._collector.collect(timeout_seconds, collectors)
        self._ready = True
        if self._recording is None:
            return snapshot
        header = self._recording.header
        info = RecordingInfo(
            scenario=header.scenario,
            machine=header.machine,
            driver_version=header.driver_version,
            recorded_at=header.recorded_at,
            speed=self._settings.replay_speed,
            loop=loop,
        )
        return replace(snapshot, recording=info)

    def _wall(self) -> Callable[[float], float]:
        host = self._host
        return host.wall if isinstance(host, ReplayHost) else lambda moment: moment

    async def expose(self, snapshot: Snapshot, content_format: ContentFormat, gzip: bool) -> bytes:
        """Render the metrics on a thread of its own."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._renderers, self._encode, snapshot, content_format, gzip, self._wall()
        )

    def _encode(
        self,
        snapshot: Snapshot,
        content_format: ContentFormat,
        gzip: bool,
        wall: Callable[[float], float],
    ) -> bytes:
        families = render(snapshot, build(), wall=wall)
        if snapshot.recording is not None:
            families = self._loops.applied(snapshot.recording.loop, families)
        own: list[Metric] = list(self._process.collect())
        page = self._encoder.encode(families, own, content_format)
        return gzip_format.compress(page, GZIP_LEVEL, mtime=0) if gzip else page

    def _publish(self, daemon: str, incident: Incident) -> None:
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait((daemon, incident))

    async def subscribe(self) -> AsyncIterator[tuple[str, Incident]]:
        """(daemon, incident) from now on, as they are found."""
        queue: asyncio.Queue[tuple[str, Incident]] = asyncio.Queue(MAX_QUEUED_INCIDENTS)
        self._subscribers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)

    async def debug(self, collectors: frozenset[str] | None) -> DebugReport:
        """One collection, with what each source read and said."""
        seen: list[Observation] = []
        lines = _LogCapture()
        logger = logging.getLogger("mps_exporter")
        logger.addHandler(lines)
        self._collector.add_listener(seen.append)
        began = time.monotonic()
        try:
            snapshot = await self.collect(None, collectors)
        finally:
            self._collector.remove_listener(seen.append)
            logger.removeHandler(lines)
        page = await self.expose(snapshot, TEXT_0_0_4, gzip=False)
        raw: dict[str, list[tuple[str, str]]] = {}
        for observation in seen:
            source, text = as_json(observation)
            raw.setdefault(source, []).append((source, text))
        names = {"process": "procfs"}
        return DebugReport(
            taken_at=snapshot.taken_at,
            duration_seconds=time.monotonic() - began,
            sources=tuple(
                DebugSource(
                    name=result.name,
                    success=result.success,
                    duration_seconds=result.duration_seconds,
                    error=result.error,
                    log=tuple(lines.lines) if result.error else (),
                    raw=tuple(raw.get(names.get(result.name, result.name), ())),
                )
                for result in snapshot.collectors
            ),
            metrics=page.decode(),
        )


class _LogCapture(logging.Handler):
    """Keeps log lines for the debug page."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())
