"""Plays recordings in a loop, from any position."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from mps_exporter import policy
from mps_exporter.collector import Collector
from mps_exporter.config import Settings
from mps_exporter.snapshot import Incident, RecordingInfo, Snapshot
from mps_exporter.sources.recording import Header, Recording
from mps_exporter.sources.replay_host import Playlist, ReplayHost, Scene


async def advance(host: ReplayHost, collector: Collector, target: float) -> Snapshot:
    """Play a recording up to `target` seconds after its start, and stop its clock there."""
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
        """Return the time until the scene's end, in the viewer's time."""
        elapsed = self.host.now() - self.recording.header.started_at
        return max(0.0, self.scene.end - elapsed) / self.speed


class ReplayPlayer:
    """Plays the scenes of a playlist one after another, in a loop."""

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

    async def start(self, position: float = 0.0) -> None:
        """Begin this many seconds after the playlist's start, unless a scene is being played."""
        async with self._entering:
            if self._playing is None:
                await self._enter(position)

    async def run(self) -> None:
        await self.start()
        while True:
            playing = self._current()
            self._jumped.clear()
            follower = asyncio.create_task(playing.collector.run_between_collections())
            seconds = max(playing.seconds_left(), policy.MIN_SCENE_SECONDS)
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
        """Play this chapter; return whether it exists."""
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
            # Incidents before the wanted position are not reported.
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
        """Header of the recording that is being played."""
        return self._current().recording.header

    def _info(self, snapshot: Snapshot, playing: Playing) -> Snapshot:
        """Add the recording and the position to a snapshot."""
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
