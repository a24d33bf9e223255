"""One log file, followed through truncation, replacement, absence and errors.

MPS writes timestamps in local time without a zone. A file's modification time shows the offset of
its last line. If the host's zone rules give the same offset (nearly always), each line is converted
by these rules, so that lines from before a clock change keep their times:

    [2026-03-20 12:00:00.000 Control   400] …    Europe/Berlin: an hour east of Greenwich
    [2026-04-02 09:00:00.000 Control   400] …    two hours

Otherwise (a container with its own zone) this one offset is used for the complete file.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.log_parser import DAEMON_STARTING_LINE
from mps_exporter.observations import LogChunk, LogName, LogState

BLOCK_BYTES = 64 * 1024  # Size of the blocks in which a file is searched.

FINGERPRINT_BYTES = 64
"""Length of the compared data before the read offset: if the data changed, the file was
truncated and written again."""

ZONE_STEP_SECONDS = 900  # Granularity of time zones: a quarter of an hour.
MAX_ZONE_SECONDS = 14 * 3600  # Maximum distance of a time zone from Greenwich.

MTIME_TOLERANCE_SECONDS = 2.0  # Maximum distance of a file's time from its last line's.

MAX_COPIES = 3  # Maximum number of files that are searched for the end of a truncated log.

MISSING = "no such file"
IRREGULAR = "not a regular file"
OTHER_MOUNT = "another file is mounted in its place"
UNKNOWN = (
    "nothing tells where it has its logs: its environment cannot be read, or the log in the default"
    " place is not its own; name the place with --mps.log-directory, or give the exporter"
    " CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
)

_CHANGES: dict[str | None, tuple[int, str]] = {
    None: (logging.INFO, "following a log"),
    MISSING: (logging.INFO, "a log is not there yet"),
}
"""Error of a log -> level and message of the log line about the change; other errors are warned of.
"""

_STAMP = re.compile(
    rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.(\d{3})"
    rb" [A-Z][A-Za-z]{0,15}(?: [A-Z][a-z]{1,15})? +\d{1,7}\]",
    re.MULTILINE,
)

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------------- timestamps


def stamps_in(data: bytes) -> Iterator[tuple[int, float]]:
    """Yield position and timestamp of each stamped line, in seconds of a clock of local time.

    [2026-11-21 08:55:42.578 Control   630] NEW UI
    """
    for found in _STAMP.finditer(data):
        with suppress(ValueError):  # no date
            moment = datetime.fromisoformat(found[1].decode()).replace(tzinfo=UTC)
            yield found.start(), (int(moment.timestamp()) * 1000 + int(found[2])) / 1000.0


def last_stamp_in(data: bytes) -> float | None:
    """Return the last timestamp in the last block; None if there is none."""
    return max(stamps_in(data[-BLOCK_BYTES:]), default=(0, None))[1]


# ---------------------------------------------------------------------- time zones


@dataclass(frozen=True, slots=True)
class LogZone:
    """Distance of local time from Unix time."""

    fixed_seconds: float | None = None  # Seconds east of Greenwich; None for the host's rules.

    def at(self, moment: float) -> float:
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        return float(time.localtime(moment).tm_gmtoff)

    def offsets(self, stamp: float) -> tuple[float, ...]:
        """Return the possible offsets of a local time, that of the earlier time first.

        There are two in the hour that occurs twice. For a skipped hour, return the offset before.
        """
        if self.fixed_seconds is not None:
            return (self.fixed_seconds,)
        whole = int(stamp)
        local = datetime.fromtimestamp(whole, UTC).replace(tzinfo=None)
        first, second = (whole - local.replace(fold=fold).timestamp() for fold in (0, 1))
        return (first, second) if first > second else (first,)


HOST_ZONE = LogZone()


def infer_zone(stamp: float | None, mtime: float) -> LogZone | None:
    """Return the zone that the last timestamp and modification time show; None if unknown."""
    if stamp is None:
        return None
    if any(_fits(stamp, offset, mtime) for offset in HOST_ZONE.offsets(stamp)):
        return HOST_ZONE
    rounded = float(round((stamp - mtime) / ZONE_STEP_SECONDS) * ZONE_STEP_SECONDS)
    if abs(rounded) <= MAX_ZONE_SECONDS and _fits(stamp, rounded, mtime):
        return LogZone(rounded)
    return None


def same_offset_prefix(
    data: bytes, zone: LogZone, last_at: float, mtime: float | None
) -> tuple[int, float | None, float]:
    """Return the length of the first lines that share an offset, the offset, the last line's time.

    `last_at` is the time of the line before the data; the last line was written at `mtime`. The
    offset is None without a timestamp.
    """
    offset, stamp = None, 0.0
    for position, found in stamps_in(data):
        offsets, earliest = zone.offsets(found), last_at - policy.CLOCK_JUMP_SECONDS
        own = next((one for one in offsets if found - one >= earliest), offsets[-1])
        if offset is not None and own != offset:
            return position, offset, last_at
        offset, stamp, last_at = own, found, found - own
    if offset is not None and mtime is not None:
        # The last line may follow a change of the clocks: the modification time shows its offset.
        shown = [one for one in zone.offsets(stamp) if _fits(stamp, one, mtime)]
        if shown and offset not in shown:
            offset, last_at = shown[0], stamp - shown[0]
    return len(data), offset, last_at


def _fits(stamp: float, offset: float, mtime: float) -> bool:
    return abs(stamp - offset - mtime) <= MTIME_TOLERANCE_SECONDS


# ---------------------------------------------------------------------- positions in a file


def _lines_from_end(descriptor: int, size: int, bound: int) -> Iterator[tuple[int, bytes]]:
    """Yield position and data of blocks of lines, the last first; longer lines are cut."""
    end = size
    while end > bound:
        begin = max(bound, end - BLOCK_BYTES)
        block = os.pread(descriptor, end - begin, begin)
        first = block.find(b"\n", 0, -1) + 1 if begin else 0
        if first or not begin:
            yield begin + first, block[first:]
        end = begin + first


def find_last_start(descriptor: int, size: int, bound: int) -> int | None:
    """Return the position of the line of the daemon's last start; None if none."""
    for begin, block in _lines_from_end(descriptor, size, bound):
        if starts := [found.start() for found in DAEMON_STARTING_LINE.finditer(block)]:
            return begin + starts[-1]
    return None


def find_next_line(descriptor: int, offset: int, size: int) -> int:
    while offset < size:
        block = os.pread(descriptor, BLOCK_BYTES, offset)
        end = block.find(b"\n")
        if end >= 0:
            return offset + end + 1
        if not block:
            break
        offset += len(block)
    return size


def find_first_line_since(descriptor: int, size: int, bound: int, stamp: float) -> int:
    """Return the position of the first line since this time, else the size."""
    position = size
    for begin, block in _lines_from_end(descriptor, size, bound):
        stamps = list(stamps_in(block))
        if stamps and stamps[0][1] < stamp:
            return next((begin + at for at, found in stamps if found >= stamp), position)
        if stamps:
            position = begin + stamps[0][0]
    return position


# ---------------------------------------------------------------------- the file


@dataclass(slots=True)
class Times:
    """The clock that all tails share, and the exporter's start."""

    started_at: float  # Start of the exporter (Unix time); earlier lines are history.
    clock: Callable[[], float]  # Unix time.


@dataclass(slots=True)
class LogTail:
    """One log file, up to the position that has been read.

    Methods raise OSError if the file cannot be read now; the next read() continues at the same
    position.
    """

    pipe_directory: str
    log: LogName
    times: Times
    server_name: str = ""  # Name of the v3 server that owns the log; empty for other logs.
    path: str = ""
    owners: frozenset[int] = frozenset()
    """The users whose file is accepted. A daemon's log belongs to the daemon's user: its servers
    write through a pipe of the daemon."""
    error: str | None = None
    descriptor: int | None = None
    start_offset: int = 0  # Where the first read began.
    zone: LogZone | None = None  # Zone that the modification time showed; None if not yet.
    _logged_error: str | None = ""
    _last_at: float = -math.inf  # Unix time of the last line that was read.
    _utc_offset: float | None = None  # UTC offset of that line; None before a timestamp.
    _restarted: bool = False
    _lost_bytes: int = 0
    _file: tuple[int, int] | None = None  # Device and inode of the file that was read last.
    _size_bytes: int = 0  # Size at the last read.
    _complete: bool = False  # The last read reached the end.
    _offset: int = 0
    _history_until: int = 0  # Offset up to which lines are older than the exporter.
    _fingerprint: bytes = b""  # The last bytes before the offset.
    _was_missing: bool = False
    _copy: int | None = None  # Rotated copy of a truncated file, until it has been read.

    def close(self) -> None:
        self._close_copy()
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _close_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            with suppress(OSError):
                os.close(copy)

    def fail(self, error: OSError) -> None:
        """Close a file that cannot be read, and record the reason."""
        self.close()
        self.error = error_text(error)

    def state(self) -> LogState:
        """Return whether the log can be read, and log a change of that."""
        if self.error != self._logged_error:
            self._logged_error = self.error
            level, message = _CHANGES.get(self.error, (logging.WARNING, "cannot read a log"))
            fields = {"daemon": self.pipe_directory, "path": self.path, "err": self.error}
            if self.path or self.log == "control":  # one line if the directory is unknown
                _log.log(level, message, extra={"fields": fields})
        readable = self.descriptor is not None
        size = self._size_bytes if readable else None
        return LogState(self.pipe_directory, self.log, self.path, readable, size, self.error)

    # ------------------------------------------------------------------ which file

    def check_file(self, directory: int | OSError | None, control: LogTail) -> None:
        """Follow the file that is in the directory (None: unknown) now.

        `control` is the same daemon's control.log, which shows its last start.
        """
        if directory is None:
            self.error = None if self.descriptor is not None else UNKNOWN
            return
        try:
            if isinstance(directory, OSError):
                raise directory
            name = f"{self.log}.log"
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            reason = self._rejection(found)
            if self._continues_elsewhere(found, reason):
                self.error = None
                return
            if reason is not None or (found.st_dev, found.st_ino) != self._file:
                self.close()
            self.error = reason
            if reason is None and self.descriptor is None:
                self._open(control, directory, name)
            if self.descriptor is not None and self._copy is None:
                size = os.fstat(self.descriptor).st_size
                if not self._contains_position(self.descriptor, size):
                    with suppress(OSError):
                        self._open_copy(directory, name)
        except OSError as error:
            # Renamed or removed: the daemon continues to write to the open file, if there is one.
            self._was_missing |= error.errno in (errno.ENOENT, errno.ENOTDIR)
            self.error = None if self.descriptor is not None else error_text(error)

    def _continues_elsewhere(self, found: os.stat_result, reason: str | None) -> bool:
        """Return whether to keep the open file: it has more, or the new file is unfit or empty."""
        if self.descriptor is None or (found.st_dev, found.st_ino) == self._file:
            return False
        if reason is not None or not found.st_size or not self._complete:
            return True
        return os.fstat(self.descriptor).st_size > self._size_bytes

    def _rejection(self, found: os.stat_result) -> str | None:
        """Return why this file cannot be the daemon's log; None if it can."""
        if not stat.S_ISREG(found.st_mode):
            return IRREGULAR
        if found.st_uid not in self.owners:
            wanted = " or ".join(str(uid) for uid in sorted(self.owners))
            return f"it belongs to user {found.st_uid}, not to the daemon's user ({wanted})"
        return None

    def _open(self, control: LogTail, directory: int, name: str) -> None:
        descriptor, self.error = self._open_checked(directory, name)
        try:
            if self.error is None:
                found = os.fstat(descriptor)
                # A copy, or a network file system that was mounted again: reading continues.
                file = found.st_dev, found.st_ino
                copied = self._fingerprint and self._contains_position(descriptor, found.st_size)
                if file != self._file and not copied:
                    self._choose_start(control, descriptor, found)
                self._file = file
                self.descriptor = descriptor
        finally:
            if self.descriptor is None:
                os.close(descriptor)

    def _open_checked(self, directory: int, name: str) -> tuple[int, str | None]:
        """Return a file's descriptor, and why it cannot be the daemon's log, or None."""
        # The file may have been replaced since the check.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(name, flags, dir_fd=directory)
        try:
            reason = self._rejection(os.fstat(descriptor))
            if reason is None and _mount_of(descriptor) != _mount_of(directory):
                reason = OTHER_MOUNT
        except OSError:
            os.close(descriptor)
            raise
        return descriptor, reason

    def _open_copy(self, directory: int, name: str) -> None:
        """Open the newest file next to a truncated log that continues the data read so far."""
        with os.scandir(f"/proc/self/fd/{directory}") as entries:
            some = islice(entries, policy.MAX_LOG_DIRECTORY_ENTRIES)
            names = [one.name for one in some if one.name.startswith((f"{name}.", f"{name}-"))]
        found = [(os.stat(one, dir_fd=directory, follow_symlinks=False), one) for one in names]
        long = [
            (one.st_mtime, copy)
            for one, copy in found
            if self._rejection(one) is None and one.st_size > self._offset
        ]
        for _, copy in sorted(long, reverse=True)[:MAX_COPIES]:
            descriptor, reason = self._open_checked(directory, copy)
            try:
                size = os.fstat(descriptor).st_size
                if reason is None and self._contains_position(descriptor, size):
                    self._copy = descriptor
                    return
            finally:
                if self._copy is None:
                    os.close(descriptor)

    def _contains_position(self, descriptor: int, size: int) -> bool:
        """Return whether a file still has the data before the read offset."""
        length = len(self._fingerprint)
        position = self._offset - length
        return size >= self._offset and os.pread(descriptor, length, position) == self._fingerprint

    # ------------------------------------------------------------------ the first read

    def _choose_start(self, control: LogTail, descriptor: int, found: os.stat_result) -> None:
        """Begin at the daemon's last start, and decide which part is history.

        In a file that appeared while the exporter ran, begin at the first line since the exporter's
        start, if that is earlier.
        """
        size = found.st_size
        bound = max(0, size - policy.MAX_LOG_BACKLOG_BYTES)
        stamp = last_stamp_in(os.pread(descriptor, BLOCK_BYTES, max(0, size - BLOCK_BYTES)))
        zone = infer_zone(stamp, found.st_mtime)
        history_end = self._first_new_offset(descriptor, found, stamp, zone or control.zone)
        begin: int | None = None
        if self.log == "control":
            begin = find_last_start(descriptor, size, bound)
        elif control.descriptor is not None:
            first = os.pread(control.descriptor, BLOCK_BYTES, control.start_offset)
            for _, since in islice(stamps_in(first), 1):
                begin = find_first_line_since(descriptor, size, bound, since)
        lost = 0
        if begin is None:
            begin = lost = find_next_line(descriptor, bound, size) if bound else 0
        known = self._file is not None
        if known or self._was_missing:
            begin = min(begin, history_end)
        self.start_offset = self._offset = begin
        self._history_until = history_end
        self.zone, self._last_at, self._utc_offset = zone, -math.inf, None
        self._fingerprint, self._complete = b"", False
        self._restarted, self._lost_bytes = known, lost

    def _first_new_offset(
        self, descriptor: int, found: os.stat_result, stamp: float | None, zone: LogZone | None
    ) -> int:
        """Return the offset of the first line that was written since the exporter started."""
        size = found.st_size
        # Timestamps are truncated to milliseconds: the millisecond of the start is new.
        started_at = math.floor(self.times.started_at * 1000) / 1000
        if found.st_mtime < started_at - MTIME_TOLERANCE_SECONDS:
            return size
        if stamp is None:
            return 0 if self._was_missing else size
        if zone is not None:
            since = started_at + zone.at(started_at)
        elif self._was_missing:
            # The file appeared with an unknown zone: its last line is current.
            since = started_at + stamp - found.st_mtime
        else:
            since = started_at + HOST_ZONE.at(started_at)
        if stamp < since:
            return size
        bound = max(0, size - policy.MAX_LOG_BACKLOG_BYTES)
        return find_first_line_since(descriptor, size, bound, since)

    # ------------------------------------------------------------------ reading

    def read(
        self, descriptor: int, fallback: LogZone | None, max_bytes: int | None = None
    ) -> LogChunk:
        """Return unread data with one offset to Unix time: all of it history, or none.

        A chunk that does not extend to the file's end has no complete_until. `fallback` is the zone
        of the daemon's other log.
        """
        copy = self._copy
        if copy is not None and not self._contains_position(copy, os.fstat(copy).st_size):
            self._close_copy()
            copy = None
        descriptor = descriptor if copy is None else copy
        read_at, found = self.times.clock(), os.fstat(descriptor)
        size = found.st_size
        self._check_position(descriptor, size)
        self._size_bytes = size
        wanted = min(size - self._offset, max_bytes or policy.MAX_LOG_POLL_BYTES)
        if self._history_until > self._offset:
            wanted = min(wanted, self._history_until - self._offset)
        data = os.pread(descriptor, wanted, self._offset) if wanted > 0 else b""
        # A network file system may report a size that the file no longer has: do not wait for it.
        self._complete = self._offset + len(data) >= size or (wanted > 0 and not data)
        end = data.rfind(b"\n") + 1
        if end or self._complete:
            data = data[:end]  # the rest is a line that is not complete yet
        if data:
            data = self._cut_at_clock_change(data, found.st_mtime, fallback)
            self._offset += len(data)
            self._fingerprint = (self._fingerprint + data[-FINGERPRINT_BYTES:])[-FINGERPRINT_BYTES:]
        history = bool(data) and self._offset <= self._history_until
        if copy is not None and self._complete:
            self._close_copy()
            self._complete = False  # the log itself is next
        chunk = LogChunk(
            at=self.times.clock(),
            pipe_directory=self.pipe_directory,
            log=self.log,
            data=data,
            history=history,
            restarted=self._restarted,
            lost_bytes=self._lost_bytes,
            complete_until=read_at if self._complete else None,
            utc_offset_seconds=self._utc_offset,
            server_name=self.server_name,
        )
        self._restarted, self._lost_bytes = False, 0
        if copy is not None and self._copy is None:
            self._restart()
        return chunk

    def _check_position(self, descriptor: int, size: int) -> None:
        """Restart after a truncation; skip data of a log that is far behind."""
        if not self._contains_position(descriptor, size):
            self._lost_bytes += max(0, self._size_bytes - self._offset)
            self._restart()
        if size - self._offset > policy.MAX_LOG_BEHIND_BYTES:
            position = find_next_line(descriptor, size - policy.MAX_LOG_BACKLOG_BYTES, size)
            self._lost_bytes += position - self._offset
            self._offset, self._restarted, self._fingerprint = position, True, b""

    def _restart(self) -> None:
        self._offset, self._restarted, self._fingerprint, self._history_until = 0, True, b"", 0

    def _cut_at_clock_change(self, data: bytes, mtime: float, fallback: LogZone | None) -> bytes:
        """Infer the zone, and return the lines before a change of the clocks."""
        if self._complete:
            self.zone = infer_zone(last_stamp_in(data), mtime) or self.zone
        zone, written_at = self.zone or fallback or HOST_ZONE, mtime if self._complete else None
        length, offset, self._last_at = same_offset_prefix(data, zone, self._last_at, written_at)
        self._utc_offset = self._utc_offset if offset is None else offset
        self._complete &= length == len(data)
        return data[:length]


def _mount_of(descriptor: int) -> bytes | None:
    """Return the mount on which a file was opened.

    Device numbers do not show it: an overlay's files and directories may have different numbers.
    """
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as lines:  # noqa: PTH123 - a descriptor
        return next((line for line in lines if line.startswith(b"mnt_id:")), None)


def error_text(error: OSError) -> str:
    """Return why a log cannot be read, for a person."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return MISSING
    if error.errno == errno.ELOOP:
        return "a symbolic link, which is not followed"
    return (error.strerror or str(error)).lower()
