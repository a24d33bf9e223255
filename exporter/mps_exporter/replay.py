"""Plays recordings instead of looking at a host: in a loop, from any position."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from mps_exporter.collector import Collector
from mps_exporter.config import Settings
from mps_exporter.snapshot import Incident, RecordingInfo, Snapshot
from mps_exporter.sources.recording import Header, Recording
from mps_exporter.sources.replay_host import Playlist, ReplayHost, Scene

STEP_SECONDS = 0.5
"""Step of a replay up to the wanted moment: 129 s take 0.2 s."""

MAX_STEPS = 5000
"""Maximum number of steps: beyond 40 minutes they are longer."""

MIN_SCENE_SECONDS = 1.0
"""Minimum time between two scenes, for recordings of one moment."""


async def advance(
    host: ReplayHost, collector: Collector, target: float, *, step_seconds: float = STEP_SECONDS
) -> Snapshot:
    """Play a recording up to `target` seconds after its start, and stop the clock there."""
    elapsed = 0.0
    step_seconds = max(step_seconds, target / MAX_STEPS)
    while True:
        host.hold(elapsed)
        await collector.poll_logs()
        await collector.watch_processes()
        snapshot = await collector.collect()
        if elapsed >= target:
            return snapshot
        elapsed = min(elapsed + step_seconds, target)


@dataclass(frozen=True, slots=True)
class Playing:
    """A scene with its host and its collector."""

    number: int
    scene: Scene
    recording: Recording
    host: ReplayHost
    collector: Collector
    speed: float
    """Recorded seconds for each second of the viewer."""

    @property
    def position(self) -> float:
        """Seconds after the playlist's start."""
        elapsed = self.host.now() - self.recording.header.started_at
        elapsed = min(max(elapsed, self.scene.begin), self.scene.end)
        return self.scene.starts_at + (elapsed - self.scene.begin) / self.scene.speed

    def seconds_left(self) -> float:
        """Until the scene's end, in the viewer's time."""
        elapsed = self.host.now() - self.recording.header.started_at
        return max(0.0, self.scene.end - elapsed) / self.speed


class ReplayPlayer:
    """Plays the scenes of a playlist one after another, and begins again."""

    def __init__(
        self,
        playlist: Playlist,
        settings: Settings,
        *,
        on_incident: Callable[[str, Incident], None],
    ) -> None:
        self.playlist = playlist
        self._settings = settings
        self._on_incident = on_incident
        self._playing: Playing | None = None
        self._jumped = asyncio.Event()
        self._entering = asyncio.Lock()

    # -- what is played

    async def start(self, position: float = 0.0) -> None:
        """Begin this many seconds after the playlist's start, unless a scene is played."""
        async with self._entering:
            if self._playing is None:
                await self._enter(position)

    async def run(self) -> None:
        await self.start()
        while True:
            playing = self._current()
            self._jumped.clear()
            follower = asyncio.create_task(playing.collector.run_between_collections())
            seconds = max(playing.seconds_left(), MIN_SCENE_SECONDS)
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._jumped.wait(), seconds)
            finally:
                follower.cancel()
            await asyncio.wait((follower,))  # not `await follower`, which would raise
            async with self._entering:
                if self._playing is playing:
                    await self._enter(self._after(playing.scene))

    async def jump(self, chapter: str) -> bool:
        """Play this chapter; return whether the playlist has it."""
        wanted = next((one for one in self.playlist.chapters if one.name == chapter), None)
        if wanted is not None:
            async with self._entering:
                await self._enter(wanted.at_seconds)
            self._jumped.set()
        return wanted is not None

    def _after(self, scene: Scene) -> float:
        number = self.playlist.scenes.index(scene) + 1
        return self.playlist.scenes[number % len(self.playlist.scenes)].starts_at

    def _current(self) -> Playing:
        if self._playing is None:
            raise RuntimeError("nothing is played yet")
        return self._playing

    async def _enter(self, position: float) -> None:
        """Play the scene at this position, from there."""
        scene = self.playlist.scene_at(position)
        recording = await asyncio.to_thread(self.playlist.recording, scene)
        speed = self._settings.replay_speed * scene.speed
        host = ReplayHost(recording, speed=speed)

        def publish(daemon: str, incident: Incident) -> None:
            # Incidents before the wanted position are no news.
            if self._playing is entered:
                moment = host.wall(incident.at)
                self._on_incident(daemon, replace(incident, at=moment))

        collector = Collector(host, self._settings, on_incident=publish)
        number = 1 if self._playing is None else self._playing.number + 1
        entered = Playing(number, scene, recording, host, collector, speed)
        offset = scene.begin + (position - scene.starts_at) * scene.speed
        await advance(host, collector, offset)
        host.play()
        self._playing = entered

    # -- what is seen

    @property
    def position(self) -> float:
        """Seconds after the playlist's start, at speed 1."""
        return self._current().position

    @property
    def speed(self) -> float:
        """Recorded seconds for each second of the viewer."""
        return self._current().speed

    @property
    def header(self) -> Header:
        """What the recording that is played says about itself."""
        return self._current().recording.header

    @property
    def collector(self) -> Collector:
        """The collector of what is played now."""
        return self._current().collector

    def _info(self, snapshot: Snapshot, playing: Playing) -> Snapshot:
        """Say what is played in its snapshot."""
        header = playing.recording.header
        position = round(playing.position, 3)
        chapter = self.playlist.chapter_at(position)
        return replace(
            snapshot,
            recording=RecordingInfo(
                scenario=header.scenario,
                machine=header.machine,
                driver_version=header.driver_version,
                recorded_at=header.recorded_at,
                speed=playing.speed,
                loop=playing.number,
                chapters=self.playlist.chapters,
                chapter=None if chapter is None else chapter.name,
                position_seconds=position,
                duration_seconds=round(self.playlist.duration_seconds, 3),
                names_replaced=self.playlist.names_replaced,
                recorded_from=header.started_at,
                played_from=playing.host.played_from,
            ),
        )

    async def collect(
        self, timeout_seconds: float | None, collectors: frozenset[str] | None
    ) -> Snapshot:
        await self.start()
        playing = self._current()
        return self._info(await playing.collector.collect(timeout_seconds, collectors), playing)
