"""Backend of the web server: a collector on this host, or recordings played in a loop."""

import asyncio
import contextlib
import gzip
import os
import platform
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

from prometheus_client import ProcessCollector

import mps_exporter
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.collector import Collector
from mps_exporter.flags import REVISION_VARIABLE, Settings
from mps_exporter.hindsight import Hindsight
from mps_exporter.metrics import Build, ClientSeries, SparseSeries, render
from mps_exporter.metrics.exposition import encode
from mps_exporter.observations import DaemonFacts
from mps_exporter.snapshot import Incident, RecordingInfo, Snapshot
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.recording import Recording
from mps_exporter.sources.replay_host import Playlist, ReplayHost, Scene


def build() -> Build:
    revision = os.environ.get(REVISION_VARIABLE, "")
    return Build(mps_exporter.__version__, revision, platform.python_version())


async def advance(host: ReplayHost, collector: Collector, target: float) -> Snapshot:
    """Play to `target` seconds after a recording's start, stop there; return the snapshot."""
    elapsed = 0.0
    step_seconds = max(policy.REPLAY_STEP_SECONDS, target / policy.MAX_REPLAY_STEPS)
    while True:
        host.hold(elapsed)
        await collector.poll_logs()
        await collector.watch_processes()
        snapshot = await collector.collect()
        if elapsed >= target:
            return snapshot
        elapsed = min(elapsed + step_seconds, target)


async def play(recording: Recording, settings: Settings, target: float) -> Snapshot:
    """Return what a recording shows this many seconds after its start."""
    host = ReplayHost(recording)
    return await advance(host, Collector(host, settings), target)


@dataclass(frozen=True, slots=True)
class Playing:
    """A scene with its host and its collector."""

    number: int
    scene: Scene
    recording: Recording
    host: ReplayHost
    collector: Collector

    @property
    def position(self) -> float:
        """Seconds after the playlist's start."""
        return self.scene.starts_at + self._elapsed - self.scene.begin

    def seconds_left(self) -> float:
        """Return the time until the scene's end, in the viewer's time."""
        return (self.scene.end - self._elapsed) / self.host.speed

    @property
    def _elapsed(self) -> float:
        """Seconds after the recording's start, within the scene."""
        elapsed = self.host.now() - self.recording.header.started_at
        return min(max(elapsed, self.scene.begin), self.scene.end)


class ReplayPlayer:
    """Plays the scenes of a playlist one after another, in a loop."""

    def __init__(
        self,
        playlist: Playlist,
        settings: Settings,
        *,
        on_incident: Callable[[DaemonFacts, Incident], None],
    ) -> None:
        self.playlist = playlist
        self._settings = settings
        self._on_incident = on_incident
        self._playing: Playing | None = None
        self._scene_end: asyncio.Timeout | None = None
        self._entering = asyncio.Lock()

    async def start(self, position: float = 0.0) -> None:
        """Begin this many seconds after the playlist's start, unless a scene is being played."""
        async with self._entering:
            if self._playing is None:
                await self._enter(position)

    async def run_between_collections(self) -> None:
        """Play the scenes until cancelled."""
        await self.start()
        while True:
            playing = self.playing
            seconds = max(playing.seconds_left(), policy.MIN_SCENE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds) as self._scene_end:
                    await playing.collector.run_between_collections()
            async with self._entering:
                if self._playing is playing:
                    scenes = self.playlist.scenes
                    following = (scenes.index(playing.scene) + 1) % len(scenes)
                    await self._enter(scenes[following].starts_at)

    async def jump(self, chapter: str) -> bool:
        """Play this chapter. Return whether the chapter exists."""
        wanted = next((one for one in self.playlist.chapters if one.name == chapter), None)
        if wanted is not None:
            async with self._entering:
                await self._enter(wanted.at_seconds)
                if self._scene_end is not None and not self._scene_end.expired():
                    self._scene_end.reschedule(asyncio.get_running_loop().time())
        return wanted is not None

    @property
    def playing(self) -> Playing:
        """The scene that is being played."""
        if self._playing is None:
            raise RuntimeError("nothing is played yet")
        return self._playing

    async def _enter(self, position: float) -> None:
        """Begin to play at this position of the playlist."""
        scene = self.playlist.scene_at(position)
        recording = await asyncio.to_thread(self.playlist.recording, scene)
        host = ReplayHost(recording, speed=self._settings.replay_speed, end=scene.end)

        def publish(daemon: DaemonFacts, incident: Incident) -> None:
            # Incidents before the wanted position are not reported.
            if self._playing is entered:
                self._on_incident(daemon, replace(incident, at=host.wall(incident.at)))

        collector = Collector(host, self._settings, on_incident=publish)
        number = 1 if self._playing is None else self._playing.number + 1
        entered = Playing(number, scene, recording, host, collector)
        await advance(host, collector, scene.begin + position - scene.starts_at)
        host.play()
        self._playing = entered

    def _info(self, snapshot: Snapshot, playing: Playing) -> Snapshot:
        position = round(playing.position, 3)
        chapter = self.playlist.chapter_at(position)
        return replace(
            snapshot,
            recording=RecordingInfo(
                playing.recording.header,
                speed=playing.host.speed,
                loop=playing.number,
                chapters=self.playlist.chapters,
                chapter=None if chapter is None else chapter.name,
                position_seconds=position,
                duration_seconds=round(self.playlist.duration_seconds, 3),
                names_replaced=self.playlist.names_replaced,
                played_from=playing.host.played_from,
            ),
        )

    async def collect(
        self, timeout_seconds: float | None, collectors: frozenset[str] | None
    ) -> Snapshot:
        await self.start()
        playing = self.playing
        return self._info(await playing.collector.collect(timeout_seconds, collectors), playing)


class Backend:
    """The snapshots, metrics and recordings that the web server shows."""

    def __init__(self, settings: Settings, playlist: Playlist | None = None) -> None:
        self.settings = settings
        self.host = os.environ.get("NODE_NAME") or socket.gethostname()  # Title of the page.
        self.build = build()
        self._sparse = SparseSeries()
        self._clients = cast("ClientSeries", settings.collector_clients)
        self._renderers = ThreadPoolExecutor(policy.RENDER_THREADS, thread_name_prefix="render")
        self._process = (
            None if settings.web_disable_exporter_metrics else ProcessCollector(registry=None)
        )
        self._readers: list[Callable[[DaemonFacts, Incident], None]] = []
        self.ready = False  # Whether the first collection is done.
        self.player: ReplayPlayer | None = None  # Plays recordings; None on a live host.
        self._host: LiveHost | None = None
        self._hindsight: Hindsight | None = None
        self._source: Collector | ReplayPlayer
        if playlist is None:
            self._host = host = LiveHost(settings)
            self._source = live = Collector(host, settings, on_incident=self._publish)
            if settings.record_memory:
                self._hindsight = Hindsight(settings, host.now, live.is_limited)
                live.on_observation = self._hindsight.add
        else:
            self._source = self.player = ReplayPlayer(playlist, settings, on_incident=self._publish)

    async def run(self) -> None:
        """Follow the logs, or play recordings in a loop, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._source.run_between_collections())
            if self._hindsight is not None:
                tasks.create_task(self._hindsight.run())

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close()
        self._renderers.shutdown(wait=False, cancel_futures=True)

    async def collect(
        self, timeout_seconds: float | None, collectors: frozenset[str] | None
    ) -> Snapshot:
        """Collect, or join a collection. None means the default timeout, or all collectors."""
        snapshot = await self._source.collect(timeout_seconds, collectors)
        self.ready = True
        return snapshot

    async def expose(self, snapshot: Snapshot, content_type: str, gzip_level: int) -> bytes:
        """Render the metrics, not on the event loop. gzip_level 0: without compression."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._renderers, self._encode, snapshot, content_type, gzip_level
        )

    def _encode(self, snapshot: Snapshot, content_type: str, gzip_level: int) -> bytes:
        wall = snapshot.recording.viewer_time if snapshot.recording is not None else None
        families = render(snapshot, self.build, wall=wall, clients=self._clients)
        own = () if self._process is None else self._process.collect()
        page = encode(self._sparse.shown(families), own, content_type)
        return gzip.compress(page, gzip_level, mtime=0) if gzip_level else page

    async def recording(self, at: float | None) -> bytes | None:
        """Return the recording of the incident at this time (None: the latest), or None."""
        return None if self._hindsight is None else await self._hindsight.recording(at)

    def _publish(self, daemon: DaemonFacts, incident: Incident) -> None:
        # An ordinary user's incidents must not replace recordings of the node's incidents.
        if self._hindsight is not None and not daemon.limited:
            self._hindsight.note(incident)
        for reader in self._readers:
            reader(daemon, incident)

    async def jump(self, chapter: str) -> bool:
        """Continue the demo at this chapter. Return whether the chapter exists."""
        return self.player is not None and await self.player.jump(chapter)

    def subscribe(self, reader: Callable[[DaemonFacts, Incident], None]) -> None:
        """Call the reader on the event loop with the daemon and each new incident."""
        self._readers.append(reader)
