"""The minutes before an incident: the last observations in memory, and recordings of them.

Observations are compressed off the event loop. An incident writes them and the minute after it as a
recording that ``mps-exporter demo FILE`` plays. Older observations are reduced to the last of each
source and to log lines, from which a replay builds the state of the daemons.
"""

import asyncio
import json
import logging
import os
import re
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from mps_exporter.flags import Settings
from mps_exporter.limits_without_a_flag import MAX_RECORDING_EARLY_SECONDS
from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import (
    ControlObservation,
    KernelObservation,
    LogsObservation,
    NvmlObservation,
    Observation,
    ProcessFacts,
    ProcfsObservation,
)
from mps_exporter.snapshot import Incident
from mps_exporter.sources.recording import RecordEncoder, create_private, make_header, stream_of

KEPT_SECONDS = 600.0  # Time recorded before an incident.
AFTER_SECONDS = 60.0  # Time recorded after an incident.

ENCODE_INTERVAL_SECONDS = 5.0
"""Interval between compressions, and minimum time between kept observations of one source with
the same outcome. Log lines, exits and lines of the kernel are all kept."""

OLD_LOGS_RATIO = 0.25  # Part of the memory for older log lines: half for users' daemons.

USERS_RATIO = 0.25
"""Part of the memory for what users choose: logs and replies of ordinary users' daemons, address
ranges and long texts of processes."""

MAX_COMPRESSION = 32  # Maximum ratio that counts: users choose texts.
LONG_TEXTS = 8192  # Length above which the texts of a user's processes count in USERS_RATIO.
MAX_STREAMS = 1024  # Maximum number of sources that are remembered: users start daemons anywhere.
MAX_FILES, MAX_DIRECTORY_BYTES = 20, 64 << 20  # Maximum number and total size of the recordings.
PACKAGED_DIRECTORY = "/var/lib/mps-exporter/incidents"  # Directory of the packages and the chart.

_FILE_NAME = re.compile(r"incident-\d{8}T\d{6}Z-[a-z_]+\.rec\.gz")
_STAMP = "%Y%m%dT%H%M%SZ"

_log = logging.getLogger(__name__)


class _Line(NamedTuple):
    """An observation that is kept."""

    at: float
    stream: str
    limited: bool  # Whether it is of an ordinary user's daemon.
    size: int  # Size of the data, but at least the text's / MAX_COMPRESSION.
    users: int  # Part of the size that users chose.
    data: bytes  # The compressed line.


class Hindsight:
    """Keeps a host's last observations, and writes them after an incident."""

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
        self._recent: deque[_Line] = deque()
        self._size, self._users_size = 0, 0  # Size of these lines, and the part that users chose.
        self._old_logs = deque[_Line](), deque[_Line]()  # Older lines of logs: node's, users'.
        self._old = dict[str, _Line](), dict[str, _Line]()  # Source -> its last older line.
        self._gpus: NvmlObservation | None = None
        self._incident: Incident | None = None  # The first incident that waits to be written.
        self._latest_at: float | None = None  # Time of the latest incident since the start.
        self._lock, self._reading = threading.Lock(), asyncio.Lock()
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
        """Yield an observation, or its parts, each with whether it is users'."""
        if isinstance(one, LogsObservation):
            names = {state.pipe_directory for state in one.states}
            names |= {chunk.pipe_directory for chunk in one.chunks}
            limited = set(filter(self._is_limited, names))
            for wanted in (False, True) if limited else (False,):
                chunks = (each for each in one.chunks if (each.pipe_directory in limited) == wanted)
                states = (each for each in one.states if (each.pipe_directory in limited) == wanted)
                yield replace(one, chunks=tuple(chunks), states=tuple(states)), wanted
        elif isinstance(one, KernelObservation) and one.ranges:
            yield replace(one, ranges=()), False
            yield replace(one, lines=()), True
        else:
            yield one, isinstance(one, ControlObservation) and self._is_limited(one.pipe_directory)

    def note(self, incident: Incident) -> None:
        """Schedule a recording a minute after an incident, unless one is scheduled already."""
        if incident.recorded:
            self._latest_at = incident.at
            self._incident = self._incident or incident

    async def run(self) -> None:
        """Compress observations and write recordings until cancelled."""
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
        """Return the recording of an incident at a time, or of the latest; None if not kept."""
        async with self._reading:  # requests wait here, and not each on a thread
            return await asyncio.to_thread(self._find, at)

    # ------------------------------------------------------------------ on a thread

    def _encode(self, waiting: list[tuple[Observation, bool]]) -> None:
        with self._lock:
            self._encoder.prune(MAX_STREAMS)
            for observation, limited in waiting:
                self._add(observation, limited=limited)
            self._remove_old()

    def _add(self, observation: Observation, *, limited: bool) -> None:
        room, users = max(0, int(USERS_RATIO * self._max_bytes) - self._users_size), 0
        if isinstance(observation, NvmlObservation):
            self._gpus = observation
        elif isinstance(observation, ProcfsObservation):
            observation, users = _without_long_texts(observation, room)
        if limited and not room:
            return
        if text := self._encoder.observation(observation):
            data = zlib.compress(text)
            size = max(len(data), len(text) // MAX_COMPRESSION)
            users = size if limited else min(users, size)
            if users <= room:
                stream = stream_of(observation)
                self._recent.append(_Line(observation.at, stream, limited, size, users, data))
                self._size += size
                self._users_size += users

    def _remove_old(self) -> None:
        """Reduce the oldest lines, by age and size, to what a replay needs to begin."""
        begin = self._now() - KEPT_SECONDS - AFTER_SECONDS
        while self._recent and (self._size > self._max_bytes or self._recent[0].at < begin):
            line = self._recent.popleft()
            self._size -= line.size
            self._users_size -= line.users
            if line.stream in ("logs", "kernel"):
                self._old_logs[line.limited].append(line)
            else:
                self._old[line.limited].pop(line.stream, None)
                self._old[line.limited][line.stream] = line
        most = OLD_LOGS_RATIO / 2 * self._max_bytes
        for logs in self._old_logs:
            while sum(line.size for line in logs) > most:
                logs.popleft()
        of_node, of_users = self._old
        while len(of_node) > MAX_STREAMS:
            del of_node[next(iter(of_node))]
        while sum(line.size for line in of_users.values()) > most:
            del of_users[next(iter(of_users))]

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
            kept = bool(self._recent) and at >= self._recent[0].at
            return self._recording("an incident") if kept else None

    def _recording(self, scenario: str) -> bytes:
        begin = self._recent[0].at
        names = self._settings.record_names
        header = make_header(self._gpus, begin, scenario, self._settings, anonymised=not names)
        made = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)  # only one uncompressed line at once
        parts = [made.compress(self._encoder.header(header))]
        for line in chain(*self._old_logs, *(old.values() for old in self._old)):
            record = json.loads(zlib.decompress(line.data))
            # The reader refuses times that are much earlier.
            at = max(record["observation"]["at"], begin - MAX_RECORDING_EARLY_SECONDS)
            record["observation"]["at"] = at
            parts.append(made.compress(json.dumps(record, separators=(",", ":")).encode() + b"\n"))
        parts += (made.compress(zlib.decompress(line.data)) for line in self._recent)
        parts.append(made.compress(self._encoder.line({"kind": "end", "at": self._now()})))
        return b"".join([*parts, made.flush()])

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
    daemons = (daemon for daemon in observation.daemons if not daemon.limited)
    found = (process for daemon in daemons for process in daemon.processes)
    return observation.gone, tuple((process.pid, process.state) for process in found)


def _without_long_texts(one: ProcfsObservation, room: int) -> tuple[ProcfsObservation, int]:
    """Return the observation with the long texts for which there is room, and their length.

    Users choose the texts of their processes and daemons. Users with most text lose it first.
    """
    users = [daemon for daemon in one.daemons if daemon.limited]
    texts = Counter[object]({"groups": sum(len(group.path) for group in one.cgroup_memory)})
    for process in chain(one.processes.values(), *(daemon.processes for daemon in users)):
        words = (process.name, process.cgroup or "", process.tracer, process.frozen_group)
        environment = (process.mps_environment or {}).items()
        texts[process.account] += sum(map(len, chain(words, *environment)))
    for daemon in users:
        texts[daemon.account] += len(daemon.log_directory)
    cut, length = set[object](), 0
    for account, size in reversed(texts.most_common()):
        if size > LONG_TEXTS and length + size > room:
            cut.add(account)
        elif size > LONG_TEXTS:
            length += size
    if not cut:
        return one, length
    processes = {
        pid: _without_texts(process) if process.account in cut else process
        for pid, process in one.processes.items()
    }
    daemons = tuple(each for each in one.daemons if not (each.limited and each.account in cut))
    groups = () if "groups" in cut else one.cgroup_memory
    return replace(one, daemons=daemons, processes=processes, cgroup_memory=groups), length


def _without_texts(one: ProcessFacts) -> ProcessFacts:
    none = replace(one, cgroup=None, mps_environment=None, tracer="", frozen_group="")
    return replace(none, name=one.name[:16])


def _files(directory: Path | None) -> list[Path]:
    """Return the recordings in a directory, the oldest first."""
    try:
        found = directory.iterdir() if directory is not None else ()
        return sorted(one for one in found if _FILE_NAME.fullmatch(one.name))
    except OSError:
        return []


def latest_recording(directory: str | None) -> Path | None:
    """Return the newest recording in a directory, by default in the packages'; None without any."""
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
