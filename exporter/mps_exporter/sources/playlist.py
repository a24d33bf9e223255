"""Recordings that are played one after another, and the chapters that can be jumped to.

The demo's playlist is a JSON file beside its recordings (docs/recordings.md). It may name users and
programs: a recording that was anonymised holds numbers of users and stand-ins for programs. Nothing
that was measured is changed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mps_exporter.observations import Observation, ProcessFacts, ProcfsObservation
from mps_exporter.snapshot import Chapter
from mps_exporter.sources.recording import Recording, read_recording


@dataclass(frozen=True, slots=True)
class Scene:
    """A part of a recording."""

    path: Path
    begin: float
    """Seconds after the recording's start."""
    end: float
    speed: float
    """Recorded seconds for each second of the playlist."""
    starts_at: float
    """Seconds after the playlist's start."""

    @property
    def duration_seconds(self) -> float:
        """How long it is played at speed 1."""
        return (self.end - self.begin) / self.speed


@dataclass(frozen=True, slots=True)
class StandInNames:
    """Names for users and programs."""

    users: Mapping[int, str] = field(default_factory=dict)
    programs: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """User and recorded name -> name."""

    def apply(self, recording: Recording) -> Recording:
        """Return the recording with these names instead of those that it holds."""
        if not self.users and not self.programs:
            return recording
        observations = tuple(self._observation(one) for one in recording.observations)
        return replace(recording, observations=observations)

    def _observation(self, observation: Observation) -> Observation:
        if not isinstance(observation, ProcfsObservation):
            return observation
        processes = {pid: self._process(facts) for pid, facts in observation.processes.items()}
        return replace(observation, processes=processes)

    def _process(self, facts: ProcessFacts) -> ProcessFacts:
        uid = -1 if facts.uid is None else facts.uid
        return replace(
            facts,
            user=self.users.get(uid, facts.user),
            name=self.programs.get((uid, facts.name), facts.name),
        )


class Playlist:
    """Scenes in their order, and chapters in theirs."""

    def __init__(
        self,
        scenes: tuple[Scene, ...],
        chapters: tuple[Chapter, ...] = (),
        names: StandInNames | None = None,
        recordings: Mapping[Path, Recording] | None = None,
    ) -> None:
        self.scenes = scenes
        self.chapters = chapters
        self.names_replaced = names is not None
        self._names = names or StandInNames()
        self._recordings = dict(recordings or {})

    @classmethod
    def of(cls, recording: Recording) -> Playlist:
        """One recording, whole."""
        path = Path()
        scene = Scene(path, 0.0, recording.duration_seconds, 1.0, 0.0)
        return cls((scene,), recordings={path: recording})

    @property
    def duration_seconds(self) -> float:
        """How long it is at speed 1."""
        return sum(scene.duration_seconds for scene in self.scenes)

    def recording(self, scene: Scene) -> Recording:
        """Return the recording of a scene, read when it is needed first.

        Raises:
            RecordingError: It cannot be read.
        """
        if scene.path not in self._recordings:
            self._recordings[scene.path] = self._names.apply(read_recording(scene.path))
        return self._recordings[scene.path]

    def scene_at(self, position: float) -> Scene:
        """Return the scene at so many seconds after the start."""
        number = bisect_right([scene.starts_at for scene in self.scenes], position)
        return self.scenes[max(0, number - 1)]

    def chapter_at(self, position: float) -> Chapter | None:
        """Return the chapter at so many seconds after the start."""
        begun = [chapter for chapter in self.chapters if chapter.at_seconds <= position]
        return begun[-1] if begun else None


def read_playlist(path: Path) -> Playlist:
    """Read a playlist that is part of the program; its recordings lie beside it."""
    document = json.loads(path.read_text("utf-8"))
    scenes: list[Scene] = []
    chapters: list[Chapter] = []
    starts_at = 0.0
    for one in document["scenes"]:
        scene = Scene(
            path=path.parent / one["recording"],
            begin=float(one["begin"]),
            end=float(one["end"]),
            speed=float(one["speed"]),
            starts_at=starts_at,
        )
        scenes.append(scene)
        chapters += [
            Chapter(
                chapter["name"],
                chapter["title"],
                round(starts_at + (float(chapter["at"]) - scene.begin) / scene.speed, 3),
            )
            for chapter in one["chapters"]
        ]
        starts_at += scene.duration_seconds
    names = document["names"]
    return Playlist(
        tuple(scenes),
        tuple(chapters),
        StandInNames(
            users={int(uid): name for uid, name in names["users"].items()},
            programs={(one["uid"], one["recorded"]): one["name"] for one in names["programs"]},
        ),
    )
