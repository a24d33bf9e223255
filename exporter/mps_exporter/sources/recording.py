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
import platform
import socket
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mps_exporter
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.flags import Settings, StartError
from mps_exporter.mps.log_parser import LogFilter
from mps_exporter.observations import (
    ControlObservation,
    KernelObservation,
    LogChunk,
    LogName,
    LogsObservation,
    NvmlObservation,
    Observation,
    ProcfsObservation,
    QueryKind,
)
from mps_exporter.snapshot import RecordingHeader
from mps_exporter.sources.anonymiser import Anonymiser

if TYPE_CHECKING:
    from cattrs.preconf.json import JsonConverter

MAX_NUMBER = 2.0**64
MAX_MOMENT = 4_102_444_800.0  # The year 2100.
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


def make_header(
    gpus: NvmlObservation | None,
    started_at: float,
    scenario: str,
    settings: Settings,
    *,
    anonymised: bool,
) -> RecordingHeader:
    names = [gpu.name or "GPU" for gpu in gpus.gpus] if gpus is not None else []
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    host = "" if anonymised else f"{socket.gethostname()}, "
    return RecordingHeader(
        scenario=scenario,
        machine=f"{counts or 'no GPU'}, {host}Linux {platform.release()}",
        driver_version=(gpus.driver_version if gpus else None) or "unknown",
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        started_at=started_at,
        exporter_version=mps_exporter.__version__,
        anonymised=anonymised,
        flags=settings.changed(),
    )


def make_converter() -> JsonConverter:
    # Imported here: only recording and replaying need it.
    from cattrs.preconf import json as cattrs_json

    converter = cattrs_json.make_converter(omit_if_default=True)
    converter.register_unstructure_hook(bytes, lambda data: data.decode("utf-8", "surrogateescape"))
    converter.register_structure_hook(
        bytes, lambda text, _: text.encode("utf-8", "surrogateescape")
    )
    return converter


_converter = cache(make_converter)


class RecordEncoder:
    """Turns observations into the lines of a recording."""

    def __init__(self, *, anonymised: bool) -> None:
        self._anonymiser = Anonymiser(make_converter()) if anonymised else None
        self._previous: dict[str, object] = {}
        """The last observation of each stream, without its time and data of logs; of replies, which
        users choose, a hash."""
        self._log_filters: dict[tuple[str, LogName, str], LogFilter] = {}

    def header(self, header: RecordingHeader) -> bytes:
        return self.line(_converter().unstructure(header) | {"format": FORMAT, "version": VERSION})

    def observation(self, observation: Observation) -> bytes:
        """Return the line of an observation; b"" if it only repeats its predecessor."""
        stream, new_lines = stream_of(observation), False
        compared: object = replace(observation, at=0.0)
        if isinstance(observation, ControlObservation):
            compared = hash(compared)
        if isinstance(observation, LogsObservation):
            # The sizes in the states change with every line, and only then.
            known = map(self._known_lines, observation.chunks)
            chunks = tuple(chunk for chunk in known if chunk.data or chunk.restarted)
            observation = replace(observation, chunks=chunks)
            compared, new_lines = replace(observation, at=0.0, chunks=()), bool(chunks)
        if not new_lines and self._previous.get(stream) == compared:
            return b""
        self._previous[stream] = compared
        writer = self._anonymiser or _converter()
        unstructured = writer.unstructure(observation)
        return self.line({"kind": _NAMES[type(observation)], "observation": unstructured})

    def line(self, record: Mapping[str, Any]) -> bytes:
        line = json.dumps(record, separators=(",", ":"))
        text = line if self._anonymiser is None else self._anonymiser.text(line)
        return f"{text}\n".encode()

    def prune(self, most: int) -> None:
        """Forget all sources if they are too many: the next observation of each is written."""
        if len(self._previous) + len(self._log_filters) > most:
            self._previous.clear()
            self._log_filters.clear()

    def _known_lines(self, chunk: LogChunk) -> LogChunk:
        stream = chunk.pipe_directory, chunk.log, chunk.server_name
        lines = self._log_filters.setdefault(stream, LogFilter())
        void = chunk.restarted or chunk.lost_bytes > 0
        return replace(chunk, data=lines.feed(chunk.data, restarted=void))


class RecordingWriter:
    """Compresses and writes observations as they arrive.

    After flush(), all of them can be read, even if the recorder is killed. Write errors are in
    ``failure``, and not raised: the caller would blame the source.
    """

    def __init__(self, path: Path, header: RecordingHeader) -> None:
        """Create the file, or replace an older one, or raise RecordingError."""
        self.failure: OSError | None = None  # Why writing ended, such as a full disk.
        self._encoder = RecordEncoder(anonymised=header.anonymised)
        self._last_at = header.started_at
        self._zip = zlib.compressobj(zlib.Z_BEST_COMPRESSION, wbits=16 + zlib.MAX_WBITS)
        beginning = self._zip.compress(self._encoder.header(header))
        beginning += self._zip.flush(zlib.Z_SYNC_FLUSH)
        try:
            self._file = create_private(path, beginning)
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror}") from error

    def add(self, observation: Observation) -> None:
        """Write an observation, unless it only repeats its predecessor."""
        self._last_at = max(self._last_at, observation.at)
        self._write(self._zip.compress(self._encoder.observation(observation)))

    def flush(self) -> None:
        self._write(self._zip.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        end = self._encoder.line({"kind": "end", "at": self._last_at})
        self._write(self._zip.compress(end) + self._zip.flush())
        try:
            os.close(self._file)
        except OSError as error:  # some file systems report a full disk only now
            self.failure = self.failure or error

    def _write(self, data: bytes) -> None:
        """Write data; a failed write is the last: the file keeps its content."""
        if self.failure is None:
            try:
                _write_all(self._file, data)
            except OSError as error:
                self.failure = error


def create_private(path: Path, beginning: bytes) -> int:
    """Return a descriptor of a file with this content, if possible for its owner only.

    Raises:
        OSError: If the file cannot be written, or is another ordinary user's.
    """
    _check_owner(path, path.lstat() if path.is_symlink() else None)
    # O_NONBLOCK: do not wait for the reader of a FIFO.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)
    try:
        found = os.fstat(file)
        _check_owner(path, found)
        os.set_blocking(file, True)
        regular = stat.S_ISREG(found.st_mode)
        if regular:
            with suppress(PermissionError):  # root's file, with write permission
                os.fchmod(file, 0o600)  # a recording shows what runs on this host
        _write_all(file, beginning)
        if regular:
            os.ftruncate(file, len(beginning))
    except OSError:
        os.close(file)
        raise
    return file


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _check_owner(path: Path, found: os.stat_result | None) -> None:
    """Refuse a file, FIFO or link that another ordinary user made, as in /tmp.

    Raises:
        OSError: If it is another ordinary user's, who could read or redirect it.
    """
    if found is not None and found.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", str(path))


def stream_of(observation: Observation) -> str:
    kind = _NAMES[type(observation)]
    if isinstance(observation, ControlObservation):
        return control_stream(observation.pipe_directory, observation.kind)
    return kind


def control_stream(pipe_directory: str, kind: QueryKind) -> str:
    return f"control {kind} {pipe_directory}"


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording in memory, in the order in which it was made."""

    header: RecordingHeader
    observations: tuple[Observation, ...]
    ended_at: float

    @property
    def duration_seconds(self) -> float:
        return self.ended_at - self.header.started_at


def read_recording(path: Path) -> Recording:
    """Read a recording from an untrusted source.

    A recording that ends early (a full disk, a killed recorder) is read up to its end.

    Raises:
        RecordingError: If the file is missing, damaged, not a recording, too new, or exceeds a
            limit.
    """
    try:
        with path.open("rb") as raw:
            if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
                raise ValueError("it is no regular file")  # noqa: TRY301 - as a damaged file
            return _parse_recording(_records(gzip.GzipFile(fileobj=raw)))
    except (OSError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordingError(f"cannot read recording {path}: {reason}") from error


def _parse_recording(records: Iterator[dict[str, Any]]) -> Recording:
    """Convert the records, or raise ValueError."""
    header = _parse_header(next(records, {}))
    earliest = header.started_at - policy.MAX_RECORDING_EARLY_SECONDS
    latest = header.started_at + policy.MAX_RECORDING_SECONDS
    days = policy.MAX_RECORDING_SECONDS / 86400
    observations: list[Observation] = []
    ended_at = header.started_at
    for number, record in enumerate(records, start=2):
        try:
            is_end = record.get("kind") == "end"
            observation = None if is_end else _parse_observation(record)
            at = float(record["at"]) if observation is None else observation.at
        except Exception as error:
            raise ValueError(f"line {number} is no observation: {_first_line(error)}") from error
        if not earliest <= at <= latest:
            raise ValueError(f"line {number} is not of the {days:.0f} days from its start")
        ended_at = max(ended_at, at)
        if observation is None:
            break
        observations.append(observation)
    if not observations:
        raise ValueError("it holds no observation: its recorder was ended at once")
    return Recording(header, tuple(observations), ended_at)


def _parse_header(record: dict[str, Any]) -> RecordingHeader:
    if record.get("format") != FORMAT:
        raise ValueError("it is no recording made by mps-exporter record")
    if record.get("version") != VERSION:
        raise ValueError(
            f"it has version {record.get('version')} of the format, this program reads version"
            f" {VERSION}: use the mps-exporter that made it, or a newer one"
        )
    try:
        return _converter().structure(record, RecordingHeader)
    except Exception as error:
        raise ValueError(f"incomplete first line: {_first_line(error)}") from error


def _parse_observation(record: dict[str, Any]) -> Observation:
    return _converter().structure(record["observation"], _KINDS[record["kind"]])


def _records(file: gzip.GzipFile) -> Iterator[dict[str, Any]]:
    """Yield the records of the complete lines, or raise ValueError."""
    left = policy.MAX_RECORDING_BYTES
    for number in count(1):
        try:
            line = file.readline(policy.MAX_RECORDING_LINE_BYTES + 1)
        except EOFError:
            return
        left -= len(line)
        if left < 0:
            raise ValueError(f"larger than {policy.MAX_RECORDING_BYTES >> 20} MiB when unpacked")
        lists = line.count(b"[") + line.count(b"{")
        if len(line) > policy.MAX_RECORDING_LINE_BYTES or lists > policy.MAX_RECORDING_LINE_LISTS:
            raise ValueError(f"line {number} is too large")
        try:
            record = json.loads(
                line,
                parse_float=_number,
                parse_int=_number,
                parse_constant=_number,
                object_hook=_checked,
            )
        except RecursionError:
            raise ValueError(f"line {number} is nested too deeply") from None
        except ValueError as error:
            if not line.endswith(b"\n"):
                return
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"line {number} is not an object")  # noqa: TRY004 - as other damage
        yield record


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


def _first_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
