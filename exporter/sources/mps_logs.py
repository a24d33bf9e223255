"""Follows control.log and server.log of every daemon. Reads only; waits for nobody.

A daemon appends to its logs over all its restarts, so a first look begins at its last start. After
that the logs are followed through everything that happens to log files: truncated in place
(copytruncate, the only rotation that works with MPS: a renamed log is still written to under its
new name), replaced, missing for a while, forbidden, half written.

Call poll() a few times a second, from one thread: it costs two stat calls for each log.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.mps.log_lines import parse
from exporter.observations import LogChunk, LogName, LogsObservation, LogState

BACKLOG_BYTES = 16 * 1024 * 1024
"""How far back a first look goes in each log."""

POLL_BYTES = 1024 * 1024
"""How much of each log one poll brings, at most; the rest waits for the next."""

BLOCK_BYTES = 64 * 1024

TRACE_BYTES = 64
"""A file whose last bytes before our position have changed was truncated and written anew."""

SETTLING_SECONDS = 1.0
"""So long after new lines, poll() also says that there were no more."""

ZONE_STEP_SECONDS = 900
"""All time zones are whole quarters of an hour."""

ZONE_TOLERANCE_SECONDS = 2.0
"""How far a file's modification time may be from the stamp of its last line."""

MAX_ZONE_SECONDS = 14 * 3600

LOGS: tuple[LogName, LogName] = ("control", "server")

_START = re.compile(
    rb"^\[\d{4}-\d\d-\d\d [\d:.]{8,16} Control +\d+\] "
    rb"Start(?:ing control daemon using socket.*)?\r?$",
    re.MULTILINE,
)
_log = logging.getLogger(__name__)

Target = tuple[str, str, str]
"""(pipe directory, log directory, root under which both are reached from here)"""


@dataclass(slots=True)
class _Daemon:
    """The logs of one daemon."""

    tails: dict[LogName, _Tail]
    utc_offset_seconds: float | None = None
    news_at: float = float("-inf")


@dataclass(slots=True)
class _Tail:
    """One log file, as far as it has been read."""

    log: LogName
    path: str = ""
    descriptor: int | None = None
    identity: tuple[int, int] = (0, 0)
    begin: int = 0
    """Where the first look began."""
    offset: int = 0
    history_until: int = 0
    """Bytes before this were there before the exporter was."""
    trace: bytes = b""
    """The last bytes before the offset."""
    last_line: bytes = b""
    """The last whole line that was read, or the beginning of it."""
    restarted: bool = False
    lost_bytes: int = 0
    looked: bool = False
    was_missing: bool = False
    error: str | None = None
    complained: str | None = field(default="")

    def close(self) -> None:
        """Let go of the file."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class LogTails:
    """The logs of many daemons.

    Args:
        clock: Unix time in seconds.
        backlog_bytes: How far back a first look goes in each log.
        poll_bytes: How much of each log one poll brings, at most.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        backlog_bytes: int = BACKLOG_BYTES,
        poll_bytes: int = POLL_BYTES,
    ) -> None:
        self._clock = clock
        self._backlog_bytes = backlog_bytes
        self._poll_bytes = poll_bytes
        self._started_at = clock()
        self._daemons: dict[str, _Daemon] = {}

    def poll(self, targets: Sequence[Target]) -> LogsObservation:
        """Read what the logs of these daemons gained; those of all others are let go of.

        A log that is readable and has no chunk has gained nothing. A chunk without complete_until
        says that more is waiting: poll again soon.
        """
        at = self._clock()
        named = {pipe_directory for pipe_directory, _, _ in targets}
        for gone in self._daemons.keys() - named:
            self._forget(gone)
        chunks: list[LogChunk] = []
        states: list[LogState] = []
        for pipe_directory, log_directory, root in targets:
            daemon = self._daemons.get(pipe_directory)
            if daemon is None:
                daemon = _Daemon({log: _Tail(log) for log in LOGS})
                self._daemons[pipe_directory] = daemon
            read: list[LogChunk] = []
            for log in LOGS:
                tail = daemon.tails[log]
                tail.path = _path(root, log_directory, log)
                self._look(daemon, tail)
                chunk = self._read(daemon, tail, pipe_directory)
                if chunk is not None:
                    read.append(chunk)
                states.append(self._state(tail, pipe_directory))
            if any(chunk.data for chunk in read):
                daemon.news_at = at
            if at - daemon.news_at <= SETTLING_SECONDS:
                chunks += read
            else:
                chunks += [chunk for chunk in read if chunk.restarted or chunk.lost_bytes]
        return LogsObservation(at=at, chunks=tuple(chunks), states=tuple(states))

    def close(self) -> None:
        """Let go of all files."""
        for pipe_directory in list(self._daemons):
            self._forget(pipe_directory)

    def _forget(self, pipe_directory: str) -> None:
        for tail in self._daemons.pop(pipe_directory).tails.values():
            tail.close()

    # ------------------------------------------------------------------ which file

    def _look(self, daemon: _Daemon, tail: _Tail) -> None:
        """Make sure that the file which is being followed is the one that is written to."""
        if not tail.path:
            tail.error = None if tail.descriptor is not None else _UNKNOWN
            return
        try:
            found = Path(tail.path).lstat()
        except OSError as error:
            # Renamed or removed: the daemon goes on writing to the file that we hold, if we do.
            tail.was_missing |= error.errno in (errno.ENOENT, errno.ENOTDIR)
            tail.error = None if tail.descriptor is not None else _reason(error)
            return
        if not stat.S_ISREG(found.st_mode):
            tail.close()
            tail.error = "not a regular file"
            return
        tail.error = None
        if tail.descriptor is None:
            self._open(daemon, tail)
        elif (found.st_dev, found.st_ino) != tail.identity and found.st_size > 0:
            self._replace(daemon, tail)

    def _replace(self, daemon: _Daemon, tail: _Tail) -> None:
        """Go over to a new file, once the old one is read to its end."""
        if tail.descriptor is not None and os.fstat(tail.descriptor).st_size > tail.offset:
            return
        tail.close()
        self._open(daemon, tail)

    def _open(self, daemon: _Daemon, tail: _Tail) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        try:
            descriptor = os.open(tail.path, flags)
        except OSError as error:
            tail.error = _reason(error)
            return
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            tail.error = "not a regular file"
            return
        tail.descriptor = descriptor
        tail.identity = (found.st_dev, found.st_ino)
        tail.offset = tail.history_until = tail.lost_bytes = 0
        tail.trace = tail.last_line = b""
        tail.restarted = tail.looked
        if not tail.looked and not tail.was_missing:
            self._first_look(daemon, tail, descriptor, found.st_size, found.st_mtime)
        tail.looked = True

    # ------------------------------------------------------------------ the first look

    def _first_look(
        self, daemon: _Daemon, tail: _Tail, descriptor: int, size: int, mtime: float
    ) -> None:
        """Decide where to begin, and what of it was there before the exporter."""
        bound = max(0, size - self._backlog_bytes)
        if tail.log == "control":
            begin = _last_start(descriptor, size, bound)
        else:
            control = daemon.tails["control"]
            first = b""
            if control.descriptor is not None:
                first = _line_at(control.descriptor, control.begin)
            begin = _first_line_from(descriptor, size, bound, _stamp(first))
        if begin is None:
            begin = _next_line(descriptor, bound, size) if bound else 0
            tail.lost_bytes = begin
        tail.offset = tail.begin = begin
        self._learn_zone(daemon, _last_line(descriptor, size), mtime)
        tail.history_until = self._history_end(daemon, descriptor, begin, size)

    def _history_end(self, daemon: _Daemon, descriptor: int, begin: int, size: int) -> int:
        """Where the lines begin that were written after the exporter had started."""
        zone = daemon.utc_offset_seconds
        stamp = _stamp(_last_line(descriptor, size))
        if stamp is None:
            return size
        if zone is None:
            zone = _local_offset(stamp)
        if stamp - zone < self._started_at:
            return size
        found = _first_line_from(descriptor, size, begin, self._started_at + zone)
        return size if found is None else found

    # ------------------------------------------------------------------ reading

    def _read(self, daemon: _Daemon, tail: _Tail, pipe_directory: str) -> LogChunk | None:
        """Read what is new, up to the bound of one poll."""
        if tail.descriptor is None:
            return None
        looked_at = self._clock()
        try:
            data, size, mtime = self._read_bytes(tail, tail.descriptor)
        except OSError as error:
            tail.close()
            tail.error = _reason(error)
            return None
        at = self._clock()
        complete = tail.offset >= size
        if data:
            self._remember(daemon, tail, data, mtime if complete else None)
        zone = daemon.utc_offset_seconds
        if zone is None:
            stamp = _stamp(tail.last_line)
            zone = None if stamp is None else _local_offset(stamp)
        chunk = LogChunk(
            at=at,
            pipe_directory=pipe_directory,
            log=tail.log,
            data=data,
            history=tail.offset <= tail.history_until and bool(data),
            restarted=tail.restarted,
            lost_bytes=tail.lost_bytes,
            complete_until=looked_at if complete else None,
            utc_offset_seconds=zone,
        )
        tail.restarted, tail.lost_bytes = False, 0
        return chunk

    def _read_bytes(self, tail: _Tail, descriptor: int) -> tuple[bytes, int, float]:
        found = os.fstat(descriptor)
        if found.st_size < tail.offset or (
            found.st_size > tail.offset
            and tail.trace
            and os.pread(descriptor, len(tail.trace), tail.offset - len(tail.trace)) != tail.trace
        ):
            tail.offset = tail.history_until = 0
            tail.trace = tail.last_line = b""
            tail.restarted = True
        wanted = min(found.st_size - tail.offset, self._poll_bytes)
        if tail.history_until > tail.offset:
            # What is history has chunks of its own.
            wanted = min(wanted, tail.history_until - tail.offset)
        data = os.pread(descriptor, wanted, tail.offset) if wanted > 0 else b""
        tail.offset += len(data)
        return data, found.st_size, found.st_mtime

    def _remember(self, daemon: _Daemon, tail: _Tail, data: bytes, mtime: float | None) -> None:
        tail.trace = (tail.trace + data[-TRACE_BYTES:])[-TRACE_BYTES:]
        end = data.rfind(b"\n")
        if end < 0:
            return
        begin = data.rfind(b"\n[", 0, end)
        tail.last_line = data[begin + 1 : min(end, begin + 129)]
        if mtime is not None:
            self._learn_zone(daemon, tail.last_line, mtime)

    def _learn_zone(self, daemon: _Daemon, line: bytes, mtime: float) -> None:
        """The last line was written when the file was modified: that tells its clock's zone."""
        stamp = _stamp(line)
        if stamp is None:
            return
        local = _local_offset(stamp)
        rounded = round((stamp - mtime) / ZONE_STEP_SECONDS) * ZONE_STEP_SECONDS
        for zone in (local, float(rounded)):
            off = abs(stamp - zone - mtime)
            if off <= ZONE_TOLERANCE_SECONDS and abs(zone) <= MAX_ZONE_SECONDS:
                daemon.utc_offset_seconds = zone
                return

    # ------------------------------------------------------------------ state

    def _state(self, tail: _Tail, pipe_directory: str) -> LogState:
        size = None
        if tail.descriptor is not None:
            with contextlib.suppress(OSError):
                size = os.fstat(tail.descriptor).st_size
        if tail.error != tail.complained:
            self._complain(tail, pipe_directory)
        return LogState(
            pipe_directory=pipe_directory,
            log=tail.log,
            path=tail.path,
            readable=tail.descriptor is not None,
            size_bytes=size,
            error=tail.error,
        )

    def _complain(self, tail: _Tail, pipe_directory: str) -> None:
        fields = {"daemon": pipe_directory, "path": tail.path, "err": tail.error}
        if not tail.path and tail.error is not None:
            if tail.log == "control":  # both logs are missed for one reason: one line
                del fields["path"]
                _log.warning("cannot tell where a daemon has its logs", extra={"fields": fields})
        elif tail.error is None:
            _log.info("following a log", extra={"fields": fields})
        elif tail.error == _MISSING:
            _log.info("a log is not there yet", extra={"fields": fields})
        else:
            _log.warning("cannot read a log", extra={"fields": fields})
        tail.complained = tail.error


def _path(root: str, log_directory: str, log: LogName) -> str:
    if not log_directory:
        return ""
    directory = f"{root}/{log_directory.lstrip('/')}" if root else log_directory
    return f"{directory}/{log}.log"


_MISSING = "no such file"
_UNKNOWN = (
    "its environment cannot be read, and the log in the default place is not its own: name the"
    " place with --mps.log-directory, or give the exporter CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
)


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return _MISSING
    if error.errno == errno.ELOOP:
        return "a symbolic link, which is not followed"
    return (error.strerror or str(error)).lower()


def _local_offset(stamp: float) -> float:
    """The host's zone at a local time, in seconds east of Greenwich."""
    guess = time.localtime(stamp).tm_gmtoff
    return float(time.localtime(stamp - guess).tm_gmtoff)


def _stamp(line: bytes) -> float | None:
    """A line's stamp: seconds of a clock that shows local time."""
    stamp_ms = parse(line[:128]).stamp_ms
    return None if stamp_ms is None else stamp_ms / 1000.0


# ---------------------------------------------------------------- finding a place in a file


def _last_start(descriptor: int, size: int, bound: int) -> int | None:
    """Where the last line is that says that a daemon starts; 0 when the file is read whole."""
    end, carried = size, b""
    while end > bound:
        begin = max(bound, end - BLOCK_BYTES)
        block = os.pread(descriptor, end - begin, begin) + carried
        found = None
        for found in _START.finditer(block):  # noqa: B007 - the last one is wanted
            pass
        # A match at the block's own edge may be a line's middle: the regex wants its bracket.
        if found is not None and (begin + found.start() == 0 or found.start() > 0):
            return begin + found.start()
        first = block.find(b"\n")
        carried = block[: first + 1 if 0 <= first < 1024 else 1024]
        end = begin
    return 0 if bound == 0 else None


def _last_line(descriptor: int, size: int) -> bytes:
    """The last whole line that has a stamp."""
    begin = max(0, size - BLOCK_BYTES)
    lines = os.pread(descriptor, size - begin, begin).split(b"\n")[:-1]
    for line in reversed(lines):
        if _stamp(line) is not None:
            return line
    return b""


def _line_at(descriptor: int, offset: int) -> bytes:
    return os.pread(descriptor, 128, offset).partition(b"\n")[0]


def _next_line(descriptor: int, offset: int, size: int) -> int:
    """Where the first line begins after this place."""
    while offset < size:
        block = os.pread(descriptor, BLOCK_BYTES, offset)
        end = block.find(b"\n")
        if end >= 0:
            return offset + end + 1
        if not block:
            break
        offset += len(block)
    return size


def _first_line_from(descriptor: int, size: int, bound: int, stamp: float | None) -> int | None:
    """Where the first line is that was written at this stamp or later; None: unknown stamp.

    The stamps of a file grow, so halving finds the place without reading all of it.
    """
    if stamp is None:
        return None if bound else 0
    low, high = bound, size  # every line before low is older, every one from high on is not
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        at, found = _stamped_line(descriptor, middle, high)
        if found is None:
            high = middle
        elif found < stamp:
            low = at
        else:
            high = middle
    place = low if low == 0 else _next_line(descriptor, low - 1, size)
    for line in os.pread(descriptor, 2 * BLOCK_BYTES, place).split(b"\n"):
        found = _stamp(line)
        if found is not None and found >= stamp:
            return place
        place += len(line) + 1
    return min(size, place)


def _stamped_line(descriptor: int, begin: int, end: int) -> tuple[int, float | None]:
    """The first line with a stamp that begins between these places."""
    place = _next_line(descriptor, begin, end)
    block = os.pread(descriptor, max(0, min(BLOCK_BYTES, end - place)), place)
    for line in block.split(b"\n"):
        stamp = _stamp(line)
        if stamp is not None:
            return place, stamp
        place += len(line) + 1
    return end, None
