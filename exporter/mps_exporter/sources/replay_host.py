"""A recorded host, and playlists of recordings.

The demo's playlist is a JSON file next to its recordings (docs/recordings.md). It may name users
and programs: an anonymised recording contains numbers of users and replacements for programs. No
measured value is changed.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    KernelObservation,
    LogChunk,
    LogsObservation,
    LogState,
    NvmlObservation,
    Observation,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import Chapter
from mps_exporter.sources import policy
from mps_exporter.sources.host import SourceError
from mps_exporter.sources.recording import Recording, control_stream, read_recording, stream_of


class RecordingCursor:
    """Returns the observations of each source at a time of the recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._logs = [o for o in recording.observations if isinstance(o, LogsObservation)]
        self._next_log = 0
        self._log_states: tuple[LogState, ...] = ()
        self._waiting: list[LogChunk] = []
        self._streams: dict[str, tuple[list[float], list[Observation]]] = {}
        # An exit may be recorded after a later scan of /proc: it is replayed at its own time.
        for observation in sorted(recording.observations, key=lambda one: one.at):
            times, stream = self._streams.setdefault(stream_of(observation), ([], []))
            times.append(observation.at)
            stream.append(observation)

    def latest(self, stream: str, now: float) -> Observation | None:
        """Return the last observation of this stream (see stream_of) up to now.

        The first observation is returned early: sources are slow at their start.
        """
        times, observations = self._streams.get(stream, ([], []))
        position = bisect_right(times, now)
        if not position and times and times[0] <= now + policy.MAX_FIRST_REPLY_SECONDS:
            position = 1
        return observations[position - 1] if position else None

    def between(self, stream: str, since: float, until: float) -> Sequence[Observation]:
        times, observations = self._streams.get(stream, ([], []))
        return observations[bisect_right(times, since) : bisect_right(times, until)]

    def logs(self, now: float, followed: Collection[str]) -> LogsObservation:
        """Return the new data of these daemons' logs (pipe directories) since the last call.

        Data of other daemons is retained until they are followed.
        """
        while self._next_log < len(self._logs) and self._logs[self._next_log].at <= now:
            observation = self._logs[self._next_log]
            self._waiting += observation.chunks
            self._log_states = observation.states or self._log_states
            self._next_log += 1
        chunks = [chunk for chunk in self._waiting if chunk.pipe_directory in followed]
        self._waiting = [c for c in self._waiting if c.pipe_directory not in followed]
        states = tuple(state for state in self._log_states if state.pipe_directory in followed)
        busy = {(chunk.pipe_directory, chunk.log) for chunk in chunks}
        chunks += [
            self._idle_chunk(state, now)
            for state in states
            if state.readable and (state.pipe_directory, state.log) not in busy
        ]
        return LogsObservation(at=now, chunks=tuple(chunks), states=states)

    def _idle_chunk(self, state: LogState, now: float) -> LogChunk:
        """Return until when a log without new data is known to be complete.

        Reads without new data are not recorded. So a log is complete until now, unless its next
        lines were read soon afterwards: some of them may have been written before.
        """
        later = (
            chunk.at
            for observation in self._logs[self._next_log :]
            for chunk in observation.chunks
            if (chunk.pipe_directory, chunk.log) == (state.pipe_directory, state.log)
        )
        upcoming = next(later, math.inf)
        # No line follows the last line of a recording, which must not be held back.
        interval = policy.RECORDED_POLL_INTERVAL_SECONDS
        reach = now + interval if now >= self.recording.ended_at else now
        return LogChunk(
            at=now,
            pipe_directory=state.pipe_directory,
            log=state.log,
            complete_until=min(reach, upcoming - interval),
        )


class ReplayHost:
    """Host over a recording. Its time is the recording's, at the chosen speed."""

    def __init__(
        self, recording: Recording, *, speed: float = 1.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._cursor = RecordingCursor(recording)
        self._speed = speed
        self._clock = clock
        self._started_at = clock()
        self._held: float | None = None
        self._replayed_until = recording.header.started_at
        """Time of the last observation of /proc that was returned."""
        self._kernel_read_until = float("-inf")
        self._kernel: KernelObservation | None = None

    def now(self) -> float:
        """Return the recording's time, which stops at its end, and while it is held."""
        recording = self._cursor.recording
        elapsed = self._held
        if elapsed is None:
            elapsed = (self._clock() - self._started_at) * self._speed
        return min(recording.header.started_at + elapsed, recording.ended_at)

    def hold(self, elapsed: float) -> None:
        """Stop the clock this many seconds after the recording's start."""
        self._held = elapsed

    def play(self) -> None:
        self._started_at, self._held = self.played_from, None

    @property
    def played_from(self) -> float:
        """The viewer's time of the recording's start; while it is held, if it were played now."""
        if self._held is not None:
            return self._clock() - self._held / self._speed
        return self._started_at

    def wall(self, moment: float) -> float:
        return self.played_from + (moment - self._cursor.recording.header.started_at) / self._speed

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        return self._processes().daemons

    def forget(self, present: Collection[str]) -> None:
        """Do nothing: a recording has no state."""

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        """Return the processes that the recorder requested at this time."""
        return self._processes()

    async def exit_observations(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        if not watched:
            return ()
        found = self._cursor.between("procfs", self._replayed_until, self.now())
        self._replayed_until = max(self._replayed_until, self.now())
        return [one for one in found if isinstance(one, ProcfsObservation)]

    def _processes(self) -> ProcfsObservation:
        found = self._cursor.latest("procfs", self.now())
        if isinstance(found, ProcfsObservation):
            self._replayed_until = max(self._replayed_until, found.at)
            return found
        # A recorder scans /proc for the first time just after its start.
        return ProcfsObservation(at=self.now())

    async def probe(
        self, daemon: DaemonFacts, deadline_seconds: float, since: float = 0.0
    ) -> ControlObservation:
        return self._control(daemon, "probe")

    async def reconcile(
        self, daemon: DaemonFacts, servers: Sequence[int], deadline_seconds: float
    ) -> ControlObservation:
        return self._control(daemon, "reconciliation")

    def _control(
        self, daemon: DaemonFacts, kind: Literal["probe", "reconciliation"]
    ) -> ControlObservation:
        name = daemon.pipe_directory
        found = self._cursor.latest(control_stream(name, kind), self.now())
        if isinstance(found, ControlObservation):
            return found
        raise SourceError(f"the recording holds no answer of {name} yet")

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        return self._cursor.logs(self.now(), {daemon.pipe_directory for daemon in daemons})

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        now = self.now()
        found = self._cursor.between("kernel", self._kernel_read_until, now)
        self._kernel_read_until = max(self._kernel_read_until, now)
        known = [one for one in found if isinstance(one, KernelObservation)]
        self._kernel = known[-1] if known else self._kernel
        return KernelObservation(
            at=now,
            readable=self._kernel is not None and self._kernel.readable,
            error="" if self._kernel is None else self._kernel.error,
            lines=tuple(line for one in known for line in one.lines),
            ranges=tuple(ranges for one in known for ranges in one.ranges),
        )

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        found = self._cursor.latest("nvml", self.now())
        if not isinstance(found, NvmlObservation):
            raise SourceError("the recording holds nothing of NVML yet")
        return found

    async def tick_gpus(self) -> None:
        """Do nothing: a recording loses nothing between collections."""

    def query_counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        """Return no queries: a replay runs no control tool."""
        return 0, {}

    async def close(self) -> None:
        """Do nothing: a recording has no open files."""


# ---------------------------------------------------------------------- playlists


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
        return (self.end - self.begin) / self.speed


@dataclass(frozen=True, slots=True)
class StandInNames:
    """Names for users and programs."""

    users: Mapping[int, str] = field(default_factory=dict)
    programs: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """User and recorded name -> name."""

    def apply(self, recording: Recording) -> Recording:
        observations = tuple(self._observation(one) for one in recording.observations)
        return replace(recording, observations=observations)

    def _observation(self, observation: Observation) -> Observation:
        if not isinstance(observation, ProcfsObservation):
            return observation
        processes = {pid: self._process(facts) for pid, facts in observation.processes.items()}
        return replace(observation, processes=processes)

    def _process(self, facts: ProcessFacts) -> ProcessFacts:
        uid = -1 if facts.uid is None else facts.uid
        user, name = self.users.get(uid, facts.user), self.programs.get((uid, facts.name))
        return replace(facts, user=user, name=name or facts.name)


class Playlist:
    """Scenes and chapters in their order."""

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
        path = Path()
        scene = Scene(path, 0.0, recording.duration_seconds, 1.0, 0.0)
        return cls((scene,), recordings={path: recording})

    @property
    def duration_seconds(self) -> float:
        return sum(scene.duration_seconds for scene in self.scenes)

    def recording(self, scene: Scene) -> Recording:
        """Return the recording of a scene; read it when it is first needed.

        Raises:
            RecordingError: It cannot be read.
        """
        if scene.path not in self._recordings:
            self._recordings[scene.path] = self._names.apply(read_recording(scene.path))
        return self._recordings[scene.path]

    def scene_at(self, position: float) -> Scene:
        number = bisect_right([scene.starts_at for scene in self.scenes], position)
        return self.scenes[max(0, number - 1)]

    def chapter_at(self, position: float) -> Chapter | None:
        begun = [chapter for chapter in self.chapters if chapter.at_seconds <= position]
        return begun[-1] if begun else None


def read_playlist(path: Path) -> Playlist:
    """Read a playlist that is part of the program; its recordings are in the same directory."""
    document = json.loads(path.read_text("utf-8"))
    scenes: list[Scene] = []
    chapters: list[Chapter] = []
    starts_at = 0.0
    for one in document["scenes"]:
        begin, end, speed = float(one["begin"]), float(one["end"]), float(one["speed"])
        scenes.append(Scene(path.parent / one["recording"], begin, end, speed, starts_at))
        for chapter in one["chapters"]:
            position = round(starts_at + (float(chapter["at"]) - begin) / speed, 3)
            chapters.append(Chapter(chapter["name"], chapter["title"], position))
        starts_at += scenes[-1].duration_seconds
    names = document["names"]
    users = {int(uid): name for uid, name in names["users"].items()}
    programs = {(one["uid"], one["recorded"]): one["name"] for one in names["programs"]}
    return Playlist(tuple(scenes), tuple(chapters), StandInNames(users, programs))
