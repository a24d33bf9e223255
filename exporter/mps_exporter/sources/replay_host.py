"""A recorded host, and playlists of recordings.

The demo's playlist is a JSON file next to its recordings (docs/recordings.md). It may name users
and programs: an anonymised recording contains numbers of users and replacements for programs. No
measured value is changed.
"""

import asyncio
import json
import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    KernelObservation,
    LogChunk,
    LogName,
    LogsObservation,
    LogState,
    NvmlObservation,
    Observation,
    ProcessFacts,
    ProcfsObservation,
    QueryKind,
)
from mps_exporter.snapshot import Chapter
from mps_exporter.sources import SourceError
from mps_exporter.sources.recording import Recording, control_stream, read_recording, stream_of

_TIME = attrgetter("at")


class ReplayHost:
    """Host over a recording. Its time is the recording's, at the chosen speed."""

    def __init__(
        self,
        recording: Recording,
        *,
        speed: float = 1.0,
        end: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._recording = recording
        self._ended_at = max(recording.ended_at, recording.header.started_at + end)
        self.speed = speed
        self._clock = clock
        self._started_at = clock()
        self._held: float | None = None
        self._streams: dict[str, list[Any]] = defaultdict(list)  # Observations by source and time.
        # An exit may be recorded after a later scan of /proc: it is replayed at its own time.
        for observation in sorted(recording.observations, key=_TIME):
            self._streams[stream_of(observation)].append(observation)
        self._read_until = {"procfs": recording.header.started_at}
        """Source -> time up to which observations were returned."""
        self._kernel = KernelObservation(0.0, readable=False)
        self._chunks: list[LogChunk] = []  # Data of logs that were not followed yet.
        self._log_states: dict[tuple[str, LogName], LogState] = {}

    # ------------------------------------------------------------------ the clock

    def now(self) -> float:
        """Return the recording's time, which stops at its end, or at the scene's later end."""
        elapsed = self._held
        if elapsed is None:
            elapsed = (self._clock() - self._started_at) * self.speed
        return min(self._recording.header.started_at + elapsed, self._ended_at)

    def hold(self, elapsed: float) -> None:
        """Stop the clock this many seconds after the recording's start."""
        self._held = elapsed

    def play(self) -> None:
        self._started_at, self._held = self.played_from, None

    @property
    def played_from(self) -> float:
        """The recording's start on the viewer's clock; while held, it moves with the clock."""
        if self._held is not None:
            return self._clock() - self._held / self.speed
        return self._started_at

    def wall(self, moment: float) -> float:
        return self.played_from + (moment - self._recording.header.started_at) / self.speed

    # ------------------------------------------------------------------ observations

    def _latest(self, stream: str) -> Any:
        """Return the last observation of a source up to now; None if none.

        The first observation is returned early: sources are slow at their start.
        """
        observations, now = self._streams[stream], self.now()
        position = bisect_right(observations, now, key=_TIME)
        if not position and observations:
            position = int(observations[0].at <= now + policy.MAX_FIRST_REPLY_SECONDS)
        return observations[position - 1] if position else None

    def _new(self, stream: str) -> list[Any]:
        observations, now = self._streams[stream], self.now()
        since = self._read_until.get(stream, -math.inf)
        self._read_until[stream] = max(since, now)
        first = bisect_right(observations, since, key=_TIME)
        return observations[first : bisect_right(observations, now, key=_TIME)]

    async def discover(self, deadline_seconds: float) -> tuple[DaemonFacts, ...]:
        return (await self.identify((), deadline_seconds)).daemons

    async def identify(self, pids: Collection[int], deadline_seconds: float) -> ProcfsObservation:
        """Return the recorded observation of this time, whatever `pids`."""
        found: ProcfsObservation | None = self._latest("procfs")
        if found is None:
            # A recorder scans /proc for the first time just after its start.
            return ProcfsObservation(self.now())
        self._read_until["procfs"] = max(self._read_until["procfs"], found.at)
        return found

    async def exit_observations(
        self, watched: Collection[int], others: Collection[int], deadline_seconds: float
    ) -> Sequence[ProcfsObservation]:
        return self._new("procfs") if watched else ()

    @property
    def control(self) -> Self:
        return self

    async def probe(
        self,
        daemon: DaemonFacts,
        deadline_seconds: float,
        since: float = 0.0,
        active_at: float = 0.0,
    ) -> ControlObservation:
        return self._reply(daemon, "probe")

    async def reconcile(
        self, daemon: DaemonFacts, servers: Sequence[int], deadline_seconds: float
    ) -> ControlObservation:
        return self._reply(daemon, "reconciliation")

    def counts(self, pipe_directory: str) -> tuple[int, Mapping[str, int]]:
        return 0, {}  # a replay runs no control tool

    def forget(self, present: Collection[str]) -> None:
        """Do nothing: a recording has no state."""

    def _reply(self, daemon: DaemonFacts, kind: QueryKind) -> ControlObservation:
        name = daemon.pipe_directory
        found: ControlObservation | None = self._latest(control_stream(name, kind))
        if found is None:
            raise SourceError(f"the recording holds no answer of {name} yet")
        return found

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        """Return the new data of these daemons' logs; retain the data of other logs."""
        now, followed = self.now(), {daemon.pipe_directory for daemon in daemons}
        for observation in self._new("logs"):
            self._chunks += observation.chunks
            self._log_states |= {(one.pipe_directory, one.log): one for one in observation.states}
        chunks = [chunk for chunk in self._chunks if chunk.pipe_directory in followed]
        self._chunks = [one for one in self._chunks if one.pipe_directory not in followed]
        states = tuple(one for one in self._log_states.values() if one.pipe_directory in followed)
        busy = {(chunk.pipe_directory, chunk.log) for chunk in chunks}
        chunks += [
            self._idle_chunk(state, now)
            for state in states
            if state.readable and (state.pipe_directory, state.log) not in busy
        ]
        return LogsObservation(at=now, chunks=tuple(chunks), states=states)

    def _idle_chunk(self, state: LogState, now: float) -> LogChunk:
        """Return a chunk with the time until which a log without new data is complete.

        Reads without new data are not recorded. So a log is complete until now, unless its next
        lines were read soon afterwards: some of them may have been written before.
        """
        logs, interval = self._streams["logs"], policy.RECORDED_POLL_INTERVAL_SECONDS
        begin, end = (bisect_right(logs, now + ahead, key=_TIME) for ahead in (0, 3 * interval))
        later = (
            chunk.at
            for observation in logs[begin:end]
            for chunk in observation.chunks
            if (chunk.pipe_directory, chunk.log) == (state.pipe_directory, state.log)
        )
        # No line follows the last line of a recording, which must not be held back.
        reach = now + interval if now >= self._recording.ended_at else now
        until = min(reach, next(later, math.inf) - interval)
        return LogChunk(now, state.pipe_directory, state.log, complete_until=until)

    def read_kernel(self, clients: Mapping[int, int | None]) -> KernelObservation:
        found: list[KernelObservation] = self._new("kernel")
        self._kernel = found[-1] if found else self._kernel
        return replace(
            self._kernel,
            at=self.now(),
            lines=tuple(line for one in found for line in one.lines),
            ranges=tuple(ranges for one in found for ranges in one.ranges),
        )

    async def read_gpus(self, deadline_seconds: float) -> NvmlObservation:
        found: NvmlObservation | None = self._latest("nvml")
        if found is None:
            raise SourceError("the recording holds nothing of NVML yet")
        return found

    async def wait_for_next_poll(self) -> None:
        await asyncio.sleep(policy.LOG_POLL_INTERVAL_SECONDS)


# ---------------------------------------------------------------------- playlists


@dataclass(frozen=True, slots=True)
class Scene:
    """A part of a recording."""

    path: Path
    begin: float  # Seconds after the recording's start.
    end: float  # Seconds after the recording's start; what was read last is shown until then.
    starts_at: float  # Seconds after the playlist's start.

    @property
    def duration_seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Playlist:
    """Scenes and chapters in their order."""

    scenes: tuple[Scene, ...]
    chapters: tuple[Chapter, ...] = ()
    users: Mapping[int, str] = field(default_factory=dict)  # User -> name.
    programs: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """User and recorded name of a program -> replacement."""
    recordings: dict[Path, Recording] = field(default_factory=dict)  # The recordings read so far.

    @classmethod
    def of(cls, recording: Recording) -> Self:
        path = Path()
        scene = Scene(path, 0.0, recording.duration_seconds, 0.0)
        return cls((scene,), recordings={path: recording})

    @property
    def names_replaced(self) -> bool:
        return bool(self.users or self.programs)

    @property
    def duration_seconds(self) -> float:
        return sum(scene.duration_seconds for scene in self.scenes)

    def recording(self, scene: Scene) -> Recording:
        """Return the recording of a scene; read it when it is first needed.

        Raises:
            RecordingError: If the recording cannot be read.
        """
        if scene.path not in self.recordings:
            found = read_recording(scene.path)
            observations = tuple(map(self._with_names, found.observations))
            self.recordings[scene.path] = replace(found, observations=observations)
        return self.recordings[scene.path]

    def _with_names(self, observation: Observation) -> Observation:
        if not isinstance(observation, ProcfsObservation):
            return observation
        processes = {pid: self._named(facts) for pid, facts in observation.processes.items()}
        return replace(observation, processes=processes)

    def _named(self, facts: ProcessFacts) -> ProcessFacts:
        uid = -1 if facts.uid is None else facts.uid
        name = self.programs.get((uid, facts.name), facts.name)
        return replace(facts, user=self.users.get(uid, facts.user), name=name)

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
        begin, end = float(one["begin"]), float(one["end"])
        scenes.append(Scene(path.parent / one["recording"], begin, end, starts_at))
        for chapter in one["chapters"]:
            position = round(starts_at + float(chapter["at"]) - begin, 3)
            chapters.append(Chapter(chapter["name"], chapter["title"], position))
        starts_at += scenes[-1].duration_seconds
    names = document["names"]
    users = {int(uid): name for uid, name in names["users"].items()}
    programs = {(one["uid"], one["recorded"]): one["name"] for one in names["programs"]}
    return Playlist(tuple(scenes), tuple(chapters), users, programs)
