"""The minutes before an incident: the last observations in memory, and recordings of them.

Observations are compressed off the event loop. An incident writes them and the minute after it as a
recording that ``mps-exporter demo FILE`` plays. What is older is reduced to the last observation of
each source and to the logs, from which a replay builds the state of the daemons.
"""

import asyncio
import gzip
import json
import logging
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import (
    ControlObservation,
    KernelObservation,
    LogsObservation,
    NvmlObservation,
    Observation,
)
from mps_exporter.settings import Settings
from mps_exporter.snapshot import Incident
from mps_exporter.sources.policy import MAX_RECORDING_EARLY_SECONDS
from mps_exporter.sources.recording import RecordEncoder, create_private, make_header, stream_of

KEPT_SECONDS = 600.0  # Time before an incident that is kept.
AFTER_SECONDS = 60.0  # Time after an incident that is recorded with it.

ENCODE_INTERVAL_SECONDS = 5.0
"""Interval between compressions, and least time between two observations of one source that are
kept, where nothing was lost or failed. Log lines, exits and lines of the kernel are all kept."""

OLD_LOGS_RATIO = 0.25  # Part of the memory for older lines of logs.
USERS_RATIO = 0.25  # Part of the memory for logs and replies of ordinary users' daemons.
MAX_STREAMS = 1024  # Maximum number of sources that are remembered: users start daemons anywhere.
MAX_NAMES = 50_000  # Maximum number of replaced names. Beyond, the memory begins again.
MAX_FILES, MAX_DIRECTORY_BYTES = 20, 64 << 20  # Limits of the directory.
PACKAGED_DIRECTORY = "/var/lib/mps-exporter/incidents"  # Directory of the packages and the chart.

_FILE_NAME = re.compile(r"incident-\d{8}T\d{6}Z-[a-z_]+\.rec\.gz")
_STAMP = "%Y%m%dT%H%M%SZ"

_log = logging.getLogger(__name__)


class Hindsight:
    """Keeps the last minutes of a host, and writes them after an incident."""

    def __init__(
        self, settings: Settings, now: Callable[[], float], is_limited: Callable[[str], bool]
    ) -> None:
        self._max_bytes = settings.record_memory << 20
        self._is_limited = is_limited
        """Whether a daemon is an ordinary user's: it must not drive out what is kept of others."""
        self._directory = Path(settings.record_directory) if settings.record_directory else None
        self._settings = settings
        self._now = now
        self._encoder = RecordEncoder(anonymised=not settings.record_names)
        self._waiting: list[tuple[Observation, bool]] = []
        """Observations, and whether they are of ordinary users' daemons."""
        self._kept: dict[tuple[str, bool], tuple[float, object]] = {}
        """Source -> time and outcome of the last observation that was kept."""
        self._recent: deque[tuple[float, str, bool, bytes]] = deque()
        """Time, source and compressed line of each observation."""
        self._sizes = [0, 0]  # Bytes of these lines: of the node, and of ordinary users' daemons.
        self._old_logs: tuple[deque[bytes], ...] = deque(), deque()
        """Compressed older lines of logs, likewise."""
        self._old: dict[str, bytes] = {}  # Source -> its last older line, compressed.
        self._gpus: NvmlObservation | None = None
        self._incident: Incident | None = None  # The first incident that waits to be written.
        self._latest_at: float | None = None  # Time of the latest incident since the start.
        self._lock = threading.Lock()
        self._transitions = TransitionLogger(_log)

    # ------------------------------------------------------------------ on the event loop

    def add(self, observation: Observation) -> None:
        """Keep an observation, unless its source was observed just before with this outcome."""
        for part, limited in self._parts(observation):
            stream, mark = (stream_of(part), limited), _mark(part)
            at, before = self._kept.get(stream, (0.0, None))
            recent = 0 <= part.at - at < ENCODE_INTERVAL_SECONDS
            if not recent or mark is None or mark != before:
                self._kept[stream] = part.at, mark
                self._waiting.append((part, limited))

    def _parts(self, one: Observation) -> Iterator[tuple[Observation, bool]]:
        """Yield an observation; that of logs in two, of which the first has all states."""
        if not isinstance(one, LogsObservation):
            yield one, isinstance(one, ControlObservation) and self._is_limited(one.pipe_directory)
            return
        users = tuple(chunk for chunk in one.chunks if self._is_limited(chunk.pipe_directory))
        yield replace(one, chunks=tuple(chunk for chunk in one.chunks if chunk not in users)), False
        if users:
            yield replace(one, chunks=users, states=()), True

    def note(self, incident: Incident) -> None:
        """Write a recording one minute after an incident; incidents within that minute share it."""
        if incident.recorded:
            self._latest_at = incident.at
            self._incident = self._incident or incident

    async def run(self) -> None:
        """Compress, and write recordings of incidents, until cancelled."""
        while True:
            await asyncio.sleep(ENCODE_INTERVAL_SECONDS)
            try:
                await self._step()
            except Exception as error:  # noqa: BLE001 - the exporter continues without recordings
                self._transitions.failed("hindsight", message="cannot record", err=repr(error))
            else:
                self._transitions.recovered("hindsight", message="incidents are recorded again")

    async def _step(self) -> None:
        waiting, self._waiting = self._waiting, []
        if len(self._kept) > MAX_STREAMS:
            self._kept.clear()
        await asyncio.to_thread(self._encode, waiting)
        incident = self._incident
        if incident is not None and self._now() >= incident.at + AFTER_SECONDS:
            self._incident = None
            if self._directory is not None:
                await asyncio.to_thread(self._write, self._directory, incident)

    async def recording(self, at: float | None) -> bytes | None:
        """Return the recording of an incident at this time (None: the latest), if it is kept."""
        return await asyncio.to_thread(self._find, at)

    # ------------------------------------------------------------------ on a thread

    def _encode(self, waiting: list[tuple[Observation, bool]]) -> None:
        with self._lock:
            self._encoder.prune(MAX_STREAMS)
            if self._encoder.names > MAX_NAMES:
                self._encoder = RecordEncoder(anonymised=not self._settings.record_names)
                for kept in (self._recent, self._old, self._old_logs[0], self._old_logs[1]):
                    kept.clear()
                self._sizes = [0, 0]
            for observation, limited in waiting:
                if isinstance(observation, NvmlObservation):
                    self._gpus = observation
                full = self._sizes[1] > USERS_RATIO * self._max_bytes
                if limited and (full or self._encoder.names > MAX_NAMES / 2):
                    continue
                if line := self._encoder.observation(observation):
                    data = zlib.compress(line)
                    self._recent.append((observation.at, stream_of(observation), limited, data))
                    self._sizes[limited] += len(data)
            self._remove_old()

    def _remove_old(self) -> None:
        """Keep of the time before the recent minutes what a replay needs to begin."""
        begin = self._now() - KEPT_SECONDS - AFTER_SECONDS
        while self._recent and (sum(self._sizes) > self._max_bytes or self._recent[0][0] < begin):
            _, stream, limited, data = self._recent.popleft()
            self._sizes[limited] -= len(data)
            if stream in ("logs", "kernel"):
                self._old_logs[limited].append(data)
            else:
                self._old.pop(stream, None)
                self._old[stream] = data
        for logs in self._old_logs:
            while sum(map(len, logs)) > OLD_LOGS_RATIO / 2 * self._max_bytes:
                logs.popleft()
        while len(self._old) > MAX_STREAMS:
            del self._old[next(iter(self._old))]

    def _find(self, at: float | None) -> bytes | None:
        files = _files(self._directory)
        if at is None:
            at = self._latest_at or (_incident_time(files[-1]) if files else 0.0)
        for path in reversed(files):
            written = _incident_time(path)
            if written <= at + 1 and at <= written + AFTER_SECONDS + 1:
                with suppress(OSError):
                    return path.read_bytes()
        with self._lock:
            kept = bool(self._recent) and at >= self._recent[0][0]
            return self._recording("an incident") if kept else None

    def _recording(self, scenario: str) -> bytes:
        """Return the recording of all retained observations."""
        begin = self._recent[0][0]
        names = self._settings.record_names
        header = make_header(self._gpus, begin, scenario, self._settings, anonymised=not names)
        old = map(zlib.decompress, chain(*self._old_logs, self._old.values()))
        lines = [self._encoder.header(header)]
        for record in map(json.loads, old):  # the reader refuses times that are much earlier
            at = max(record["observation"]["at"], begin - MAX_RECORDING_EARLY_SECONDS)
            record["observation"]["at"] = at
            lines.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        lines += (zlib.decompress(data) for *_, data in self._recent)
        lines.append(self._encoder.line({"kind": "end", "at": self._now()}))
        return gzip.compress(b"".join(lines), mtime=0)

    def _write(self, directory: Path, incident: Incident) -> None:
        """Write a recording. A failure loses only the recording."""
        stamp = datetime.fromtimestamp(incident.at, UTC).strftime(_STAMP)
        path = directory / f"incident-{stamp}-{incident.kind}.rec.gz"
        with self._lock:
            data = self._recording(incident.kind.replace("_", " "))
        fields = {"file": str(path), "bytes": len(data)}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = directory / ".incident.rec.gz"  # the next recording replaces the incomplete file
            os.close(create_private(part, data))
            _make_room(directory, len(data))
            part.replace(path)
            _log.info("wrote the recording of an incident", extra={"fields": fields})
        except OSError as error:
            fields["err"] = str(error)
            _log.warning("cannot write the recording of an incident", extra={"fields": fields})


def _mark(observation: Observation) -> object:
    """Return the outcome; None if the observation must be kept."""
    if isinstance(observation, LogsObservation):
        new = any(chunk.data or chunk.restarted for chunk in observation.chunks)
        return None if new else "no new line"
    if isinstance(observation, KernelObservation):
        return None if observation.lines or observation.ranges else observation.readable
    if isinstance(observation, NvmlObservation | ControlObservation):
        return observation.outcome
    found = (process for daemon in observation.daemons for process in daemon.processes)
    return observation.gone, tuple((process.pid, process.state) for process in found)


def _files(directory: Path | None) -> list[Path]:
    """Return the recordings in a directory, the oldest first."""
    try:
        found = directory.iterdir() if directory is not None else ()
        return sorted(one for one in found if _FILE_NAME.fullmatch(one.name))
    except OSError:
        return []


def latest_recording(directory: str | None) -> Path | None:
    """Return the newest recording in the directory of an exporter; None for the packages'."""
    return next(reversed(_files(Path(directory or PACKAGED_DIRECTORY))), None)


def _incident_time(path: Path) -> float:
    return datetime.strptime(path.name[9:25], _STAMP).replace(tzinfo=UTC).timestamp()


def _make_room(directory: Path, needed: int) -> None:
    """Remove the oldest recordings, so that the directory stays within its limits."""
    files = _files(directory)
    sizes = [path.stat().st_size for path in files]
    while files and (len(files) >= MAX_FILES or sum(sizes) + needed > MAX_DIRECTORY_BYTES):
        files.pop(0).unlink()
        sizes.pop(0)
