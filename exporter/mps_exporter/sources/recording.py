"""Recordings: the observations of a host's sources, in a file, to be replayed anywhere.

A recording is a gzip file of JSON lines. The first line is the header:

    {"format": "mps-exporter-recording", "version": 2, "scenario": "...", "machine": "...", ...}

each further line is an observation with its kind, the last contains the end of the recording:

    {"kind": "procfs", "observation": {"at": 1795162000.1, "daemons": [...], ...}}
    {"kind": "end", "at": 1795162060.0}

Fields at their defaults are omitted. Bytes of logs are text, undecodable bytes lone surrogates. An
observation that only repeats its predecessor is not written. docs/recordings.md describes the
format for users.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from mps_exporter.flags import StartError
from mps_exporter.mps.log_parser import SERVER_ADDED_LINE, LogFilter
from mps_exporter.mps.protocol_v3 import READ_ONLY_V3, anonymised
from mps_exporter.observations import (
    ControlObservation,
    Exchange,
    KernelObservation,
    LogChunk,
    LogName,
    LogsObservation,
    NvmlObservation,
    Observation,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.sources import policy

if TYPE_CHECKING:
    from cattrs.preconf.json import JsonConverter

MAX_NUMBER = 2.0**64
MAX_MOMENT = 4_102_444_800.0
"""The year 2100."""
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
    """The first line of a recording."""

    scenario: str
    machine: str
    driver_version: str
    recorded_at: str
    """ISO 8601, UTC."""
    started_at: float
    exporter_version: str
    anonymised: bool


@cache
def _converter() -> JsonConverter:
    # Imported here: only recording and replaying need it.
    from cattrs.preconf.json import make_converter

    converter = make_converter(omit_if_default=True)
    converter.register_unstructure_hook(bytes, lambda data: data.decode("utf-8", "surrogateescape"))
    converter.register_structure_hook(
        bytes, lambda text, _: text.encode("utf-8", "surrogateescape")
    )
    return converter


class Anonymiser:
    """Replaces names of persons and machines, each name always by the same replacement."""

    _UUID = re.compile(
        r"\b(GPU|MIG)-([0-9a-f]{8}(?:-[0-9a-f]{4}){0,3}(?:-[0-9a-f]{12})?)\b", re.IGNORECASE
    )

    def __init__(self) -> None:
        self._uuids: dict[str, str] = {}
        self._programs: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._pipe_directories: set[str] = set()
        """Pipe directories; an MPS v3 daemon's contains names of servers and namespaces."""
        self._v3 = False
        """An MPS v3 daemon was seen."""

    def observation(self, observation: Observation) -> Observation:
        """Return the observation without names of users and programs, and serial numbers."""
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
            return observation  # kernel_log removes the names of processes
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
            # In a container a daemon's directory has another name, and its servers may be unknown.
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
        """Rename servers and namespaces: below these directories by position, elsewhere by name.

        With a kind, each other part of a path elsewhere is renamed, too.
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
        """Replace every UUID in a line, also if the tool printed only its beginning."""
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
    """Writes observations as they arrive.

    A write error is not raised, because the caller would blame the source; see ``failure``.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._anonymiser = Anonymiser() if header.anonymised else None
        self._previous: dict[str, Observation] = {}
        self._last_at = header.started_at
        self._log_filters: dict[tuple[str, LogName, str], LogFilter] = {}
        first = _converter().unstructure(header) | {"format": FORMAT, "version": VERSION}
        try:
            self._file = _GzipFile(path, self._line(first))
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror}") from error

    @property
    def failure(self) -> OSError | None:
        """Why writing ended, as on a full disk; what was written before can be read."""
        return self._file.failure

    def flush(self) -> None:
        """Make all observations readable, also if the recorder is killed later."""
        self._file.flush()

    def _line(self, record: Mapping[str, Any]) -> str:
        line = json.dumps(record, separators=(",", ":"))
        return (line if self._anonymiser is None else self._anonymiser.text(line)) + "\n"

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(self._line(record))

    def add(self, observation: Observation) -> None:
        """Write an observation, unless it only repeats its predecessor."""
        self._last_at = max(self._last_at, observation.at)
        kind = _NAMES[type(observation)]
        key = stream_of(observation)
        if isinstance(observation, LogsObservation):
            # The sizes in the states change with every line, and only then.
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
        """Add the zone of this host, because timestamps are local time."""
        if chunk.utc_offset_seconds is not None:
            return chunk
        return replace(chunk, utc_offset_seconds=float(time.localtime(chunk.at).tm_gmtoff))

    def close(self) -> None:
        self._write({"kind": "end", "at": self._last_at})
        self._file.close()


class _GzipFile:
    """Text that is compressed as it arrives.

    After flush(), all text can be read, even if the writer is killed. A failed write is the last:
    the file keeps its content.
    """

    def __init__(self, path: Path, beginning: str) -> None:
        """Create the file, or replace an older file once its first block is written.

        Raises:
            OSError: It cannot be written.
        """
        self.failure: OSError | None = None
        self._zip = zlib.compressobj(zlib.Z_BEST_COMPRESSION, wbits=16 + zlib.MAX_WBITS)
        self._changed = False
        _check_owner(path, path.lstat() if path.is_symlink() else None)
        # O_NONBLOCK: do not wait for the reader of a FIFO.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            found = os.fstat(self._file)
            _check_owner(path, found)
            os.set_blocking(self._file, True)
            first = self._zip.compress(beginning.encode()) + self._zip.flush(zlib.Z_SYNC_FLUSH)
            if not stat.S_ISREG(found.st_mode):
                self._put(first)
                return
            with suppress(PermissionError):  # a file of another user, with write permission
                os.fchmod(self._file, 0o600)  # a recording shows what runs on this host
            self._put(first)
            os.ftruncate(self._file, len(first))
        except OSError:
            os.close(self._file)
            raise

    def write(self, text: str) -> None:
        """Append text, unless an earlier write failed."""
        self._changed = True
        self._try(self._zip.compress(text.encode()))

    def flush(self) -> None:
        if self._changed:
            self._changed = False
            self._try(self._zip.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        self._try(self._zip.flush(zlib.Z_FINISH))
        try:
            os.close(self._file)
        except OSError as error:  # some file systems report a full disk only now
            self.failure = self.failure or error

    def _try(self, data: bytes) -> None:
        if self.failure is None:
            try:
                self._put(data)
            except OSError as error:
                self.failure = error

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]


def _check_owner(path: Path, found: os.stat_result | None) -> None:
    """Refuse a file, FIFO or link that an ordinary user created, as in /tmp.

    Raises:
        OSError: It belongs to another user, who could read the recording or redirect it.
    """
    if found is not None and found.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", str(path))


def stream_of(observation: Observation) -> str:
    """Return the source of an observation; of the control tool also the daemon and the query."""
    kind = _NAMES[type(observation)]
    if isinstance(observation, ControlObservation):
        return control_stream(observation.pipe_directory, observation.kind)
    return kind


def control_stream(pipe_directory: str, kind: Literal["probe", "reconciliation"]) -> str:
    return f"control {kind} {pipe_directory}"


@dataclass(frozen=True, slots=True)
class Recording:
    """A complete recording in memory, in the order in which it was made."""

    header: Header
    observations: tuple[Observation, ...]
    ended_at: float

    @property
    def duration_seconds(self) -> float:
        return self.ended_at - self.header.started_at


def read_recording(path: Path) -> Recording:
    """Read a recording from an untrusted source.

    A recording that ends early (a full disk, a killed recorder) is read up to its end.

    Raises:
        RecordingError: The file is missing, not a recording, of a newer version, damaged, or
            exceeds a limit.
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
    limit_seconds = policy.MAX_RECORDING_LOAD_SECONDS
    give_up_at = time.monotonic() + limit_seconds
    header = _recording_header(path, next(lines, None))
    latest = header.started_at + policy.MAX_RECORDING_SECONDS
    days = policy.MAX_RECORDING_SECONDS / 86400
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
        if not header.started_at - policy.MAX_RECORDING_EARLY_SECONDS <= at <= latest:
            raise RecordingError(
                f"{path}: line {number} is not of the {days:.0f} days from the recording's start"
            )
        ended_at = max(ended_at, at)
        if observation is None:
            break
        observations.append(observation)
        if time.monotonic() > give_up_at:
            raise RecordingError(
                f"{path}: line {number}: reading took longer than {limit_seconds:.0f} s"
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
            line = file.readline(policy.MAX_RECORDING_LINE_BYTES + 1)
        except EOFError:
            return  # truncated; the complete lines have been yielded
        except zlib.error as error:
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
    lists = line.count(b"[") + line.count(b"{")
    limit, ratio = policy.MAX_RECORDING_BYTES, policy.MAX_RECORDING_RATIO
    if len(line) > policy.MAX_RECORDING_LINE_BYTES or lists > policy.MAX_RECORDING_LINE_LISTS:
        raise RecordingError(f"{path}: line {number} is too large")
    if size > limit:
        raise RecordingError(f"{path}: larger than {limit >> 20} MiB when unpacked")
    if size > policy.RECORDING_RATIO_FREE_BYTES and size > ratio * compressed:
        raise RecordingError(f"{path}: unpacks to more than {ratio} times its size")


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
