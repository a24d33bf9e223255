"""One log file, followed through everything that happens to log files."""

from __future__ import annotations

import errno
import math
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field

from mps_exporter.observations import LogName
from mps_exporter.sources.logs import stamps
from mps_exporter.sources.logs.stamps import (
    HOST_ZONE,
    LastLine,
    LogZone,
    find_first_line_since,
    find_last_start,
    find_next_line,
    last_stamp_in,
    parse_stamp,
    read_last_stamp,
    read_line_at,
    same_zone_prefix,
)
from mps_exporter.sources.resolve_in_root import opened_directory

FINGERPRINT_BYTES = 64
"""A file whose last bytes before our position have changed was truncated and written anew."""

BEHIND_BYTES = 64 * 1024 * 1024
"""A log that grew by more than this beyond what was read is skipped up to its last lines."""

PARTIAL_BYTES = 128
"""What is kept of a line that is half written: more than its stamp."""

MISSING = "no such file"
IRREGULAR = "not a regular file"
OTHER_MOUNT = "another file is mounted in its place"
UNKNOWN = (
    "nothing tells where it has its logs: its environment cannot be read, or the log in the default"
    " place is not its own; name the place with --mps.log-directory, or give the exporter"
    " CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
)


@dataclass(slots=True)
class ReadLimits:
    """What all tails have in common."""

    started_at: float
    """What was written before this is history (Unix time, by the clock of now)."""
    backlog_bytes: int
    """How far back a first look goes."""
    poll_bytes: int
    """How much one reading brings, at most."""
    behind_bytes: int = BEHIND_BYTES


@dataclass(slots=True)
class LogTail:
    """One log file, as far as it has been read.

    Methods raise OSError when the file cannot be read now; what was read stays read, and the next
    read() goes on from there.
    """

    log: LogName
    limits: ReadLimits
    path: str = ""
    procfs: str = "/proc"
    owners: frozenset[int] = frozenset()
    """The users whose file is believed. A daemon's log belongs to the daemon's user (its servers
    write through a pipe of the daemon); a file of anybody else is none, wherever it lies."""
    error: str | None = None
    logged_error: str | None = field(default="")
    descriptor: int | None = None
    _file: tuple[int, int] | None = None
    """Device and inode of the file that was read last."""
    start_offset: int = 0
    """Where the first look began."""
    zone: LogZone | None = None
    """As the file's modification time told; None: it never did."""
    last_line: LastLine | None = None
    """The last line that was read."""
    restarted: bool = False
    lost_bytes: int = 0
    _offset: int = 0
    _mtime_ns: int = 0
    """When the file had last been written to, as of the last reading."""
    _history_until: int = 0
    """Bytes before this were there before the exporter was."""
    _fingerprint: bytes = b""
    """The last bytes before the offset."""
    _partial_line: bytes = b""
    """The beginning of the line that has no end yet."""
    _opened: bool = False
    _was_missing: bool = False

    def close(self) -> None:
        """Let go of the file, but not of what is known of it."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def fail(self, error: OSError) -> None:
        """Let go of a file that cannot be read, and note why."""
        self.close()
        self.error = error_text(error)

    # ------------------------------------------------------------------ which file

    def check_file(self, control: LogTail) -> None:
        """Make sure that the file which is being followed is the one that is written to.

        Args:
            control: The same daemon's control.log, which says where its last start was.
        """
        if not self.path:
            self.error = None if self.descriptor is not None else UNKNOWN
            return
        folder, _, name = self.path.rpartition("/")
        try:
            with opened_directory(folder or "/", self.procfs) as directory:
                found = os.stat(name, dir_fd=directory, follow_symlinks=False)
                self._check_found(control, directory, name, found)
        except OSError as error:
            # Renamed or removed: the daemon goes on writing to the file that we hold, if we do.
            self._was_missing |= error.errno in (errno.ENOENT, errno.ENOTDIR)
            self.error = None if self.descriptor is not None else error_text(error)

    def _check_found(
        self, control: LogTail, directory: int, name: str, found: os.stat_result
    ) -> None:
        same = (found.st_dev, found.st_ino) == self._file
        if (why := self._why_not(found)) is not None:
            if self.descriptor is not None and stat.S_ISREG(found.st_mode) and not same:
                self.error = None  # the daemon goes on writing to the file that we hold
                return
            self.close()
            self.error = why
            return
        self.error = None
        if self.descriptor is None:
            self._open(control, directory, name)
            return
        # Go over to a new file, once the old one is read to its end.
        if not same and found.st_size > 0 and os.fstat(self.descriptor).st_size <= self._offset:
            self.close()
            self._open(control, directory, name)

    def _why_not(self, found: os.stat_result) -> str | None:
        """Why this file is no log of the daemon's; None: it may be one."""
        if not stat.S_ISREG(found.st_mode):
            return IRREGULAR
        if found.st_uid not in self.owners:
            wanted = " or ".join(str(uid) for uid in sorted(self.owners))
            return f"it belongs to user {found.st_uid}, not to the daemon's user ({wanted})"
        return None

    def _open(self, control: LogTail, directory: int, name: str) -> None:
        # What was there a moment ago may be something else now.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(name, flags, dir_fd=directory)
        try:
            found = os.fstat(descriptor)
            self.error = self._why_not(found)
            if self.error is None and _mount_of(descriptor) != _mount_of(directory):
                self.error = OTHER_MOUNT
            if self.error is None:
                if not self._is_same_file(descriptor, found):
                    self._choose_start(control, descriptor, found)
                self._file = (found.st_dev, found.st_ino)
                self.descriptor, self._opened = descriptor, True
        finally:
            if self.descriptor is None:
                os.close(descriptor)

    def _is_same_file(self, descriptor: int, found: os.stat_result) -> bool:
        """Whether this is the file of before, or a copy of it, so that reading goes on.

        What a network's file system lost and has again may have another device number.
        """
        if not self._opened:
            return False
        if (found.st_dev, found.st_ino) == self._file:
            return True  # if it was truncated meanwhile, reading it will show that
        at = self._offset - len(self._fingerprint)
        return (
            bool(self._fingerprint)
            and found.st_size >= self._offset
            and os.pread(descriptor, len(self._fingerprint), at) == self._fingerprint
        )

    # ------------------------------------------------------------------ the first look

    def _choose_start(self, control: LogTail, descriptor: int, found: os.stat_result) -> None:
        """Decide where to begin in a file, and what of it was there before the exporter.

        It begins at the daemon's last start; where it has come, or come back, while the exporter
        looked, also before that: with the first line that was written after the exporter's start.
        """
        size = found.st_size
        stamp = read_last_stamp(descriptor, size)
        zone = stamps.infer_zone(stamp, found.st_mtime)
        bound = max(0, size - self.limits.backlog_bytes)
        history_end = self._first_new_offset(descriptor, found, stamp, zone or control.zone)
        begin: int | None
        if self.log == "control":
            begin = find_last_start(descriptor, size, bound)
        else:
            first = b""
            if control.descriptor is not None:
                first = read_line_at(control.descriptor, control.start_offset)
            begin = find_first_line_since(descriptor, size, bound, parse_stamp(first))
        lost = 0
        if begin is None:
            begin = lost = find_next_line(descriptor, bound, size) if bound else 0
        if self._opened or self._was_missing:
            begin = min(begin, history_end)
        self.start_offset = self._offset = begin
        self._history_until = history_end
        self.zone, self.last_line = zone, None
        self._fingerprint = self._partial_line = b""
        self.restarted, self.lost_bytes = self._opened, lost

    def _first_new_offset(
        self, descriptor: int, found: os.stat_result, stamp: float | None, zone: LogZone | None
    ) -> int:
        """Where the lines begin that were written after the exporter had started."""
        size = found.st_size
        # Stamps are cut to milliseconds: what was written in the millisecond of the start is news.
        started_at = math.floor(self.limits.started_at * 1000) / 1000
        if found.st_mtime < started_at - stamps.TOLERANCE_SECONDS:
            return size
        if stamp is None:
            return 0 if self._was_missing else size
        if zone is not None:
            since = started_at + zone.at(started_at)
        elif self._was_missing:
            # It appeared under our eyes, with stamps of another clock: its last line is from now.
            since = started_at + stamp - found.st_mtime
        else:
            since = started_at + HOST_ZONE.at(started_at)
        if stamp < since:
            return size
        bound = max(0, size - self.limits.backlog_bytes)
        place = find_first_line_since(descriptor, size, bound, since)
        return size if place is None else place

    # ------------------------------------------------------------------ reading

    def read(
        self, fallback: LogZone | None, most_bytes: int | None = None
    ) -> tuple[bytes, bool, bool]:
        """Return what is new, whether it is history, and whether it goes to the file's end.

        All of it has one offset to Unix time  (that of `last_line`), and is either history or not.

        Args:
            fallback: The zone of the daemon's other log.
            most_bytes: How much is read at most, if less than always.
        """
        descriptor = self.descriptor
        if descriptor is None:
            return b"", False, False
        most_bytes = self.limits.poll_bytes if most_bytes is None else most_bytes
        found = os.fstat(descriptor)
        size = found.st_size
        if self._was_truncated(descriptor, found):
            self._offset = self._history_until = 0
            self._fingerprint = self._partial_line = b""
            self.restarted = True
        if size - self._offset > self.limits.behind_bytes:
            self._skip_to(find_next_line(descriptor, size - self.limits.backlog_bytes, size))
        self._mtime_ns = found.st_mtime_ns
        wanted = min(size - self._offset, most_bytes, self.limits.poll_bytes)
        if self._history_until > self._offset:
            wanted = min(wanted, self._history_until - self._offset)
        data = os.pread(descriptor, wanted, self._offset) if wanted > 0 else b""
        # A size that the file does not have (it may be an old one, of a network's file system) is
        # no reason to wait for more.
        complete = self._offset + len(data) >= size or (wanted > 0 and not data)
        mtime = found.st_mtime if complete else None
        if data:
            data = self._cut_at_zone_change(data, mtime, fallback)
            complete = self._offset + len(data) >= size
            self._offset += len(data)
            self._fingerprint = (self._fingerprint + data[-FINGERPRINT_BYTES:])[-FINGERPRINT_BYTES:]
        history = bool(data) and self._offset <= self._history_until
        return data, history, complete

    def _skip_to(self, offset: int) -> None:
        self.lost_bytes += offset - self._offset
        self._offset = offset
        self._fingerprint = self._partial_line = b""
        self.restarted = True

    def _was_truncated(self, descriptor: int, found: os.stat_result) -> bool:
        fingerprint = self._fingerprint
        as_it_was = (found.st_size, found.st_mtime_ns) == (self._offset, self._mtime_ns)
        return found.st_size < self._offset or (
            not as_it_was
            and bool(fingerprint)
            and os.pread(descriptor, len(fingerprint), self._offset - len(fingerprint))
            != fingerprint
        )

    def _cut_at_zone_change(
        self, data: bytes, mtime: float | None, fallback: LogZone | None
    ) -> bytes:
        """Learn the zone, and cut the data where the clocks were changed."""
        lines = self._partial_line + data
        if mtime is not None:
            self.zone = stamps.infer_zone(last_stamp_in(lines), mtime) or self.zone
        zone = self.zone or fallback or HOST_ZONE
        length, self.last_line = same_zone_prefix(lines, zone, self.last_line, mtime)
        self._partial_line = lines[lines.rfind(b"\n", 0, length) + 1 : length][:PARTIAL_BYTES]
        return lines[len(lines) - len(data) : length]


def _mount_of(descriptor: int) -> bytes | None:
    """The mount that a file was opened on.

    (Device numbers do not tell: on an overlay a file and its directory may have different ones.)
    """
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as lines:  # noqa: PTH123 - a descriptor
        for line in lines:
            if line.startswith(b"mnt_id:"):
                return line
    return None


def error_text(error: OSError) -> str:
    """Why a log cannot be read, for a person."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return MISSING
    if error.errno == errno.ELOOP:
        return "a symbolic link, which is not followed"
    return (error.strerror or str(error)).lower()
