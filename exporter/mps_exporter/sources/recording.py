"""Recordings: what the sources of a host read, in a file, to be replayed anywhere.

A recording is a gzip file of JSON lines. The first says what it is:

    {"format": "mps-exporter-recording", "version": 2, "scenario": "...", "machine": "...", ...}

each further one is an observation with its kind, the last says when the recording ended:

    {"kind": "procfs", "observation": {"at": 1795162000.1, "daemons": [...], ...}}
    {"kind": "end", "at": 1795162060.0}

Fields at their defaults are left out. Bytes of logs are text, undecodable ones as lone surrogates.
An observation that only repeats its predecessor is not written again. docs/recordings.md describes
the format for people.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import stat
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from mps_exporter.config import StartError
from mps_exporter.mps.log_parser import SERVER_ADDED_LINE, LogFilter
from mps_exporter.mps.protocol_v3 import READ_ONLY_V3, anonymised
from mps_exporter.observations import (
    ControlObservation,
    Exchange,
    KernelObservation,
    LogChunk,
    LogName,
    LogsObservation,
    LogState,
    NvmlObservation,
    Observation,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.sources.gzip_appender import GzipAppender

if TYPE_CHECKING:
    from cattrs.preconf.json import JsonConverter

POLL_SECONDS = 1.0
"""The recorder looked at the logs at least this often."""

FIRST_ANSWER_SECONDS = 5.0
"""How long a source may have taken for its first answer."""

MAX_BYTES = 128 << 20
"""Of the whole recording, unpacked. In memory it takes up to five times that."""
MAX_LINE_BYTES = 32 << 20
"""A first look at the logs of eight daemons has 16 MiB."""
MAX_LINE_LISTS = 1_000_000
MAX_RATIO = 100
"""Unpacked to packed; recordings of real hosts have 30."""
RATIO_FREE_BYTES = 8 << 20
MAX_NUMBER = 2.0**64
MAX_MOMENT = 4_102_444_800.0
"""The year 2100."""
MAX_DURATION_SECONDS = 7 * 86400.0
MAX_EARLY_SECONDS = 86400.0
"""The end of a process is an observation of the moment of its end, which may lie before."""
MAX_LOAD_SECONDS = 60.0
_MOMENTS = frozenset({"at", "started_at", "start_time_seconds", "complete_until"})

FORMAT = "mps-exporter-recording"
VERSION = 2

_KINDS: dict[str, type[Observation]] = {
    "procfs": ProcfsObservation,
    "control": ControlObservation,
    "logs": LogsObservation,
    "nvml": NvmlObservation,
    "kernel": KernelObservation,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class RecordingError(StartError):
    """A recording cannot be read or written; the message says which, where and why."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a recording says about itself."""

    scenario: str
    machine: str
    driver_version: str
    recorded_at: str
    """ISO 8601, UTC."""
    started_at: float
    exporter_version: str
    anonymised: bool
    format: str = FORMAT
    version: int = VERSION


@cache
def _converter() -> JsonConverter:
    # Imported here: only recording and replaying need it, a live exporter starts without.
    from cattrs.preconf.json import make_converter

    converter = make_converter(omit_if_default=True)
    converter.register_unstructure_hook(bytes, lambda data: data.decode("utf-8", "surrogateescape"))
    converter.register_structure_hook(
        bytes, lambda text, _: text.encode("utf-8", "surrogateescape")
    )
    return converter


class Anonymiser:
    """Replaces what could name a person or a machine, the same thing always by the same."""

    _UUID = re.compile(
        r"\b(GPU|MIG)-([0-9a-f]{8}(?:-[0-9a-f]{4}){0,3}(?:-[0-9a-f]{12})?)\b", re.IGNORECASE
    )

    def __init__(self) -> None:
        self._uuids: dict[str, str] = {}
        self._programs: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._pipe_directories: set[str] = set()
        """Below those of MPS v3 daemons are directories with names of servers and namespaces."""
        self._v3 = False
        """Such a daemon was seen."""

    def observation(self, observation: Observation) -> Observation:
        """The same observation without names of users, programs, and serial numbers."""
        if isinstance(observation, ProcfsObservation):
            self._pipe_directories |= {one.pipe_directory for one in observation.daemons}
            self._v3 |= any(one.protocol == "3" for one in observation.daemons)
            return replace(
                observation,
                daemons=tuple(
                    replace(
                        daemon,
                        process=daemon.process and self._process(daemon.process),
                        servers=tuple(map(self._process, daemon.servers)),
                    )
                    for daemon in observation.daemons
                ),
                processes={
                    pid: self._process(facts) for pid, facts in observation.processes.items()
                },
                containers=(),
            )
        if isinstance(observation, NvmlObservation):
            return replace(
                observation, gpus=tuple(replace(gpu, serial=None) for gpu in observation.gpus)
            )
        if isinstance(observation, ControlObservation):
            return self._control(observation)
        if isinstance(observation, KernelObservation):
            return observation  # the names of processes are left out where the lines are read
        chunks = (
            replace(
                chunk,
                data=SERVER_ADDED_LINE.sub(self._added_server, chunk.data),
                server_name=self._rename("server", chunk.server_name),
            )
            for chunk in observation.chunks
        )
        states = (replace(one, path=self._path(one.path)) for one in observation.states)
        return replace(observation, chunks=tuple(chunks), states=tuple(states))

    def _process(self, facts: ProcessFacts) -> ProcessFacts:
        name = facts.name
        if not name.startswith("nvidia-cuda-mps"):
            name = self._rename("program", name)
        user = facts.user if facts.user in (None, "root") else f"user-{facts.uid}"
        environment = facts.mps_environment
        if environment and (directory := environment.get(_PIPE_VARIABLE)):
            # In a container a daemon's directory has another name, and its servers were not listed
            # yet.
            kind = "directory" if self._v3 else ""
            path = self._path(directory, self._pipe_directories, kind)
            environment = {**environment, _PIPE_VARIABLE: path}
        return replace(facts, name=name, user=user, mps_environment=environment)

    def _control(self, observation: ControlObservation) -> ControlObservation:
        self._pipe_directories.add(observation.pipe_directory)
        exchanges = tuple(map(self._exchange, observation.exchanges))
        if exchanges == observation.exchanges:
            return observation
        return replace(observation, exchanges=exchanges, error=observation.error and _WITHHELD)

    def _exchange(self, one: Exchange) -> Exchange:
        """Replace the names that users chose in a reply of an MPS v3 daemon."""
        if len(one.commands) != 1 or one.commands[0] not in READ_ONLY_V3:
            return one
        self._v3 = True
        return replace(
            one,
            stdout=anonymised(one.commands[0], one.stdout, self._rename),
            stderr=one.stderr and _WITHHELD,
            error=one.error and _WITHHELD,
        )

    def _rename(self, kind: str, name: str) -> str:
        if not name:
            return name
        if kind == "path":
            return self._path(name, self._pipe_directories)
        if kind == "program":
            return self._programs.setdefault(name, f"program-{len(self._programs) + 1}")
        number = 1 + sum(known == kind for known, _ in self._names)
        return self._names.setdefault((kind, name), f"{kind}_{number}")

    def _added_server(self, match: re.Match[bytes]) -> bytes:
        name = self._rename("server", match[2].decode("ascii"))
        return match[1] + name.encode("ascii") + match[3]

    def _path(self, path: str, directories: Collection[str] = (), kind: str = "") -> str:
        """Rename servers and namespaces: below these directories by place, elsewhere by name.

        With a kind, all that is elsewhere is renamed.
        """
        above = (one for one in directories if f"{path}/".startswith(f"{one}/"))
        directory = max(above, key=len, default="")
        parts = path.removeprefix(directory).split("/")
        for at, name in enumerate(parts):
            if name in ("", "default"):
                continue
            known = [one for one in ("server", "namespace") if (one, name) in self._names]
            place = ("server" if at == 1 else "namespace") if directory else (*known, kind)[0]
            parts[at] = self._rename(place, name) if place else name
        return directory + "/".join(parts)

    def text(self, line: str) -> str:
        """A line of the file with every UUID replaced, whole or cut short as the tool prints it."""
        return self._UUID.sub(self._uuid, line)

    def _uuid(self, match: re.Match[str]) -> str:
        kind, digits = match.groups()
        head = digits[:8].lower()
        number = self._uuids.setdefault(head, f"{len(self._uuids) + 1:08x}")
        whole = f"{number}-0000-4000-8000-{number:0>12}"
        return f"{kind}-{whole[: len(digits)]}"


_WITHHELD = "(withheld)"
_PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"


class RecordingWriter:
    """Writes observations as they come.

    A file that can no longer be written raises nothing here, where sources would be blamed for it:
    see ``failure``.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._anonymiser = Anonymiser() if header.anonymised else None
        self._previous: dict[str, Observation] = {}
        self._last_at = header.started_at
        self._log_filters: dict[tuple[str, LogName, str], LogFilter] = {}
        first = _converter().unstructure(header) | {"format": FORMAT, "version": VERSION}
        try:
            self._file = GzipAppender(path, self._line(first))
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror}") from error

    @property
    def failure(self) -> OSError | None:
        """Why nothing more can be written, as on a full disk; what was written can be read."""
        return self._file.failure

    def flush(self) -> None:
        """Make what was written readable, lest a recorder that is killed takes it along."""
        self._file.flush()

    def _line(self, record: Mapping[str, Any]) -> str:
        line = json.dumps(record, separators=(",", ":"))
        return (line if self._anonymiser is None else self._anonymiser.text(line)) + "\n"

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(self._line(record))

    def add(self, observation: Observation) -> None:
        """Write an observation, unless it only repeats the one before."""
        self._last_at = max(self._last_at, observation.at)
        kind = _NAMES[type(observation)]
        key = stream_of(observation)
        if isinstance(observation, LogsObservation):
            # The sizes in the states change with every line; without lines nothing has changed.
            known = [self._known_lines(chunk) for chunk in observation.chunks]
            chunks = tuple(self._zoned(c) for c in known if c.data or c.restarted)
            if not chunks and observation.states == getattr(
                self._previous.get(key), "states", None
            ):
                return
            self._previous[key] = observation
            observation = replace(observation, chunks=chunks)
        else:
            previous = self._previous.get(key)
            if previous is not None and replace(observation, at=previous.at) == previous:
                return
            self._previous[key] = observation
        if self._anonymiser is not None:
            observation = self._anonymiser.observation(observation)
        self._write({"kind": kind, "observation": _converter().unstructure(observation)})

    def _known_lines(self, chunk: LogChunk) -> LogChunk:
        stream = chunk.pipe_directory, chunk.log, chunk.server_name
        lines = self._log_filters.setdefault(stream, LogFilter())
        void = chunk.restarted or chunk.lost_bytes > 0
        return replace(chunk, data=lines.feed(chunk.data, restarted=void))

    @staticmethod
    def _zoned(chunk: LogChunk) -> LogChunk:
        """Stamps are local time: the zone of this host travels with them."""
        if chunk.utc_offset_seconds is not None:
            return chunk
        return replace(chunk, utc_offset_seconds=float(time.localtime(chunk.at).tm_gmtoff))

    def close(self) -> None:
        """Write the end."""
        self._write({"kind": "end", "at": self._last_at})
        self._file.close()


def stream_of(observation: Observation) -> str:
    """What an observation repeats or replaces: the source, and of the tool whom it asked what."""
    kind = _NAMES[type(observation)]
    if isinstance(observation, ControlObservation):
        return control_stream(observation.pipe_directory, observation.kind)
    return kind


def control_stream(pipe_directory: str, question: Literal["probe", "reconciliation"]) -> str:
    """The track of one kind of question to one daemon."""
    return f"control {question} {pipe_directory}"


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole recording in memory, in the order in which it was made."""

    header: Header
    observations: tuple[Observation, ...]
    ended_at: float

    @property
    def duration_seconds(self) -> float:
        return self.ended_at - self.header.started_at


def read_recording(path: Path) -> Recording:
    """Read a recording, which may come from anybody.

    Raises:
        RecordingError: The file is missing, no recording, of a newer version, damaged, or beyond
            the limits above. A recording that ends early (a full disk, a killed recorder) is read
            as far as it goes.
    """
    try:
        with path.open("rb") as raw:
            if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
                raise RecordingError(f"cannot read recording {path}: it is no regular file")
            return _read_observations(path, _recorded_lines(path, raw))
    except OSError as error:
        reason = error.strerror or str(error)
        raise RecordingError(f"cannot read recording {path}: {reason}") from error


def _read_observations(path: Path, lines: Iterator[dict[str, Any]]) -> Recording:
    give_up_at = time.monotonic() + MAX_LOAD_SECONDS
    header = _recording_header(path, next(lines, None))
    latest = header.started_at + MAX_DURATION_SECONDS
    observations: list[Observation] = []
    ended_at = header.started_at
    for number, record in enumerate(lines, start=2):
        try:
            is_end = record.get("kind") == "end"
            observation = None if is_end else _observation(record)
            at = float(record["at"]) if observation is None else observation.at
        except Exception as error:
            raise RecordingError(
                f"{path}: line {number} is no observation: {_first_line(error)}"
            ) from error
        if not header.started_at - MAX_EARLY_SECONDS <= at <= latest:
            raise RecordingError(
                f"{path}: line {number} is not of the {MAX_DURATION_SECONDS / 86400:.0f} days from "
                "the recording's start"
            )
        ended_at = max(ended_at, at)
        if observation is None:
            break
        observations.append(observation)
        if time.monotonic() > give_up_at:
            raise RecordingError(
                f"{path}: line {number}: reading took longer than {MAX_LOAD_SECONDS:.0f} s"
            )
    if not observations:
        raise RecordingError(f"{path} holds no observation: its recorder was ended at once")
    return Recording(header, tuple(observations), ended_at)


def _observation(record: dict[str, Any]) -> Observation:
    return _converter().structure(record["observation"], _KINDS[record["kind"]])


def _recorded_lines(path: Path, raw: IO[bytes]) -> Iterator[dict[str, Any]]:
    file = gzip.GzipFile(fileobj=raw)
    number = size = 0
    while True:
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except EOFError:
            return  # cut short: what was complete has been delivered
        except gzip.zlib.error as error:  # type: ignore[attr-defined]
            raise RecordingError(f"{path}: damaged after line {number}: {error}") from error
        if not line:
            return
        number += 1
        size += len(line)
        _check_size(path, number, line, size, raw.tell())
        try:
            record = json.loads(
                line,
                parse_float=_number,
                parse_int=_number,
                parse_constant=_number,
                object_hook=_checked,
            )
        except RecursionError:
            raise RecordingError(f"{path}: line {number} is nested too deeply") from None
        except ValueError as error:
            if not line.endswith(b"\n"):
                return
            raise RecordingError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise RecordingError(f"{path}: line {number} is not an object")
        yield record


def _check_size(path: Path, number: int, line: bytes, size: int, compressed: int) -> None:
    if len(line) > MAX_LINE_BYTES or line.count(b"[") + line.count(b"{") > MAX_LINE_LISTS:
        raise RecordingError(f"{path}: line {number} is too large")
    if size > MAX_BYTES:
        raise RecordingError(f"{path}: larger than {MAX_BYTES >> 20} MiB when unpacked")
    if size > RATIO_FREE_BYTES and size > MAX_RATIO * compressed:
        raise RecordingError(f"{path}: unpacks to more than {MAX_RATIO} times its size")


def _number(text: str) -> float | int:
    number = float(text)
    if not abs(number) <= MAX_NUMBER:
        raise ValueError(f"the number {text[:20]} is out of range")
    return int(text) if text.lstrip("-").isdecimal() else number


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    for key in _MOMENTS & record.keys():
        moment = record[key]
        if isinstance(moment, float | int) and not 0 <= moment <= MAX_MOMENT:
            raise ValueError(f"{key} is no moment: {moment:g}")
    return record


def _recording_header(path: Path, record: dict[str, Any] | None) -> Header:
    if record is None or record.get("format") != FORMAT:
        raise RecordingError(f"{path} is no recording made by mps-exporter record")
    if record.get("version") != VERSION:
        raise RecordingError(
            f"{path} has version {record.get('version')} of the format, this program reads "
            f"version {VERSION}: use the mps-exporter that made it, or a newer one"
        )
    try:
        return _converter().structure(record, Header)
    except Exception as error:
        raise RecordingError(f"{path}: incomplete first line: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


class RecordingCursor:
    """Plays a recording: what each source would have said at a moment of the recording's time."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._logs = [o for o in recording.observations if isinstance(o, LogsObservation)]
        self._next_log = 0
        self._log_states: tuple[LogState, ...] = ()
        self._waiting: list[LogChunk] = []
        self._streams: dict[str, tuple[list[float], list[Observation]]] = {}
        # An end of a process may be written after a later look: it is told at its own moment.
        for observation in sorted(recording.observations, key=lambda one: one.at):
            times, stream = self._streams.setdefault(stream_of(observation), ([], []))
            times.append(observation.at)
            stream.append(observation)

    def latest(self, stream: str, now: float) -> Observation | None:
        """The last observation of this track (see stream_of) up to now.

        Sources are slow at their first question: before the first answer, that one stands.
        """
        times, observations = self._streams.get(stream, ([], []))
        position = bisect_right(times, now)
        if not position and times and times[0] <= now + FIRST_ANSWER_SECONDS:
            position = 1
        return observations[position - 1] if position else None

    def between(self, stream: str, since: float, until: float) -> Sequence[Observation]:
        """Give the observations of this track after a moment, up to another."""
        times, observations = self._streams.get(stream, ([], []))
        return observations[bisect_right(times, since) : bisect_right(times, until)]

    def logs(self, now: float, followed: Collection[str]) -> LogsObservation:
        """What the tails of these daemons (pipe directories) read since the last call.

        What a daemon's logs gained before somebody followed it, waits until somebody does.
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
        """Say up to when a log that brought nothing is known to be complete.

        Looks that brought nothing are not recorded. So a log is complete until now, unless its
        next lines were read soon after: then some of them may have been written before.
        """
        later = (
            chunk.at
            for observation in self._logs[self._next_log :]
            for chunk in observation.chunks
            if (chunk.pipe_directory, chunk.log) == (state.pipe_directory, state.log)
        )
        upcoming = next(later, math.inf)
        # At the end nothing comes after the last line, which must not be held back for it.
        reach = now + POLL_SECONDS if now >= self.recording.ended_at else now
        return LogChunk(
            at=now,
            pipe_directory=state.pipe_directory,
            log=state.log,
            complete_until=min(reach, upcoming - POLL_SECONDS),
        )
