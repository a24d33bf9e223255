"""Time stamps of log lines: where in a file a time is, and which time zone a file is in.

MPS writes local time and names no zone. A file's modification time shows the zone of its last line:
where the host's own rules give the same time (as nearly always), each line is read by these rules,
so that a log from before a change of the clocks keeps its times:

    [2026-03-20 12:00:00.000 Control   400] …    Europe/Berlin: an hour east of Greenwich
    [2026-04-02 09:00:00.000 Control   400] …    two hours

Otherwise (a container with a zone of its own) that one offset is the whole file's.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from mps_exporter.mps.log_parser import DAEMON_ACTIVITY_LINE, DAEMON_STARTING_LINE
from mps_exporter.observations import LogChunk

BLOCK_BYTES = 64 * 1024

STEP_SECONDS = 900
"""All time zones are whole quarters of an hour."""

TOLERANCE_SECONDS = 2.0
"""Maximum distance of a file's modification time from the stamp of its last line."""

MAX_SECONDS = 14 * 3600

_DAY = 86400.0
_MAX_SEARCH_SECONDS = 4000 * _DAY
_SET_BACK_SECONDS = 1800.0
"""Within the hour that comes twice, a stamp so much before the last stamp is of the second time."""

_STAMP = re.compile(
    rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.(\d{3})"
    rb" [A-Z][A-Za-z]{0,15}(?: [A-Z][a-z]{1,15})? +\d{1,7}\]"
)


def parse_stamp(line: bytes) -> float | None:
    """Return a line's stamp: seconds of a clock that shows local time.

    [2026-11-21 08:55:42.578 Control   630] NEW UI
    """
    found = _STAMP.match(line)
    if found is None:
        return None
    try:
        moment = datetime.fromisoformat(found[1].decode()).replace(tzinfo=UTC)
    except ValueError:
        return None
    return (int(moment.timestamp()) * 1000 + int(found[2])) / 1000.0


def last_activity(chunk: LogChunk) -> float | None:
    """Return when the daemon was last seen to serve somebody (Unix time); None: not in this chunk.

    Its one thread writes these lines, so a thread that is stuck does not. A daemon that drains (it
    was asked to quit, and has clients) writes others, and answers nobody.
    """
    if chunk.log != "control" or chunk.history or chunk.utc_offset_seconds is None:
        return None
    lines = DAEMON_ACTIVITY_LINE.findall(chunk.data[-BLOCK_BYTES:])
    stamp = parse_stamp(lines[-1]) if lines else None
    return None if stamp is None else stamp - chunk.utc_offset_seconds


# ---------------------------------------------------------------------- places in a file


def last_stamp_in(data: bytes) -> float | None:
    """Return the stamp of the last whole line that has one."""
    end = data.rfind(b"\n")
    while end >= 0:
        begin = data.rfind(b"\n", 0, end) + 1
        if (stamp := parse_stamp(data[begin:end])) is not None:
            return stamp
        end = begin - 1
    return None


def find_last_start(descriptor: int, size: int, bound: int) -> int | None:
    """Return where the last line of a daemon's start is; 0 when the file is read whole."""
    end, carried = size, b""
    while end > bound:
        begin = max(bound, end - BLOCK_BYTES)
        block = os.pread(descriptor, end - begin, begin) + carried
        found = None
        for found in DAEMON_STARTING_LINE.finditer(block):  # noqa: B007 - the last one is wanted
            pass
        # A match at the block's own edge may be a line's middle: the regex wants its bracket.
        if found is not None and (begin + found.start() == 0 or found.start() > 0):
            return begin + found.start()
        first = block.find(b"\n")
        carried = block[: first + 1 if 0 <= first < 1024 else 1024]
        end = begin
    return 0 if bound == 0 else None


def read_last_stamp(descriptor: int, size: int) -> float | None:
    """Return the stamp of the last whole line of a file that has one."""
    begin = max(0, size - BLOCK_BYTES)
    return last_stamp_in(os.pread(descriptor, size - begin, begin))


def read_line_at(descriptor: int, offset: int) -> bytes:
    """Return the beginning of the line that begins here."""
    return os.pread(descriptor, 128, offset).partition(b"\n")[0]


def find_next_line(descriptor: int, offset: int, size: int) -> int:
    """Return where the first line begins after this place."""
    while offset < size:
        block = os.pread(descriptor, BLOCK_BYTES, offset)
        end = block.find(b"\n")
        if end >= 0:
            return offset + end + 1
        if not block:
            break
        offset += len(block)
    return size


def find_first_line_since(
    descriptor: int, size: int, bound: int, stamp: float | None
) -> int | None:
    """Return where the first line is that was written at this stamp or later; None: unknown stamp.

    The stamps of a file grow, so halving finds the place without reading all of it.
    """
    if stamp is None:
        return None if bound else 0
    low, high = bound, size  # every line before low is older, every one from high on is not
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        at, found = _find_stamped_line(descriptor, middle, high)
        if found is None:
            high = middle
        elif found < stamp:
            low = at
        else:
            high = middle
    place = low if low == 0 else find_next_line(descriptor, low - 1, size)
    for line in os.pread(descriptor, 2 * BLOCK_BYTES, place).split(b"\n"):
        found = parse_stamp(line)
        if found is not None and found >= stamp:
            return place
        place += len(line) + 1
    return min(size, place)


def _find_stamped_line(descriptor: int, begin: int, end: int) -> tuple[int, float | None]:
    """The first line with a stamp that begins between these places."""
    place = find_next_line(descriptor, begin, end)
    block = os.pread(descriptor, max(0, min(BLOCK_BYTES, end - place)), place)
    for line in block.split(b"\n"):
        stamp = parse_stamp(line)
        if stamp is not None:
            return place, stamp
        place += len(line) + 1
    return end, None


# ---------------------------------------------------------------------- time zones


@dataclass(frozen=True, slots=True)
class LogZone:
    """How far local time is from Unix time."""

    fixed_seconds: float | None = None
    """East of Greenwich; None: what the host's rules say at each moment."""

    def at(self, moment: float) -> float:
        """Return the offset at a moment of Unix time."""
        return _gmtoff(moment) if self.fixed_seconds is None else self.fixed_seconds


HOST_ZONE = LogZone()


@dataclass(frozen=True, slots=True)
class LastLine:
    """The last line whose offset is known."""

    stamp: float
    offset_seconds: float


def infer_zone(stamp: float | None, mtime: float) -> LogZone | None:
    """Return the zone from the last line of a file and when it was modified; None: they differ."""
    if stamp is None:
        return None
    if any(_fits(stamp, zone, mtime) for zone in _offsets(stamp)):
        return HOST_ZONE
    rounded = float(round((stamp - mtime) / STEP_SECONDS) * STEP_SECONDS)
    if abs(rounded) <= MAX_SECONDS and _fits(stamp, rounded, mtime):
        return LogZone(rounded)
    return None


def same_zone_prefix(
    data: bytes, zone: LogZone, before: LastLine | None, mtime: float | None
) -> tuple[int, LastLine | None]:
    """Return how many bytes the first lines have that share an offset, and the last mark in them.

    Args:
        data: Lines; the first and the last may be halves.
        zone: That of the log.
        before: The last mark before these lines.
        mtime: When the last line was written; None: not known.
    """
    last = last_stamp_in(data)
    if last is None:
        return len(data), before
    if zone.fixed_seconds is not None:
        return len(data), LastLine(last, zone.fixed_seconds)
    steady = _common_offset(data, last)
    if steady is not None:
        return len(data), LastLine(last, steady)
    place, last_line, length = 0, before, 0
    within: LastLine | None = None
    while (end := data.find(b"\n", place)) >= 0:
        stamp = parse_stamp(data[place:end])
        if stamp is not None:
            last_line = LastLine(stamp, _offset_after(stamp, last_line))
            if within is not None and last_line.offset_seconds != within.offset_seconds:
                return length, within
            within = last_line
        place = length = end + 1
    # The clocks may have been changed in silence: the last line's own time tells.
    told = [one for one in _offsets(last) if mtime is not None and _fits(last, one, mtime)]
    if told and within is not None and within.offset_seconds not in told:
        within = LastLine(last, told[0])
    return len(data), within


def _fits(stamp: float, offset: float, mtime: float) -> bool:
    return abs(stamp - offset - mtime) <= TOLERANCE_SECONDS


def _offset_after(stamp: float, last_line: LastLine | None) -> float:
    """Return the offset of a line that stands after this mark."""
    found = _offsets(stamp)
    if len(found) == 1 or last_line is None or last_line.offset_seconds not in found:
        return found[0]
    if stamp < last_line.stamp - _SET_BACK_SECONDS:
        return found[-1]
    return last_line.offset_seconds


def _offsets(stamp: float) -> tuple[float, ...]:
    """Return the offsets that a local time may have by the host's rules, the earlier moment first.

    It has two in the hour that comes twice, and for one that is left out the one before is given.
    """
    near = sorted({_gmtoff(stamp - _DAY), _gmtoff(stamp), _gmtoff(stamp + _DAY)}, reverse=True)
    found = tuple(offset for offset in near if _gmtoff(stamp - offset) == offset)
    return found or (_gmtoff(stamp - _DAY),)


def _common_offset(data: bytes, last: float) -> float | None:
    """Return the one offset of all these lines, where the clocks were not changed meanwhile."""
    first = next(
        (one for line in data.split(b"\n", 64) if (one := parse_stamp(line)) is not None), last
    )
    begin, end = min(first, last) - _DAY, max(first, last) + _DAY
    if end - begin > _MAX_SEARCH_SECONDS:
        return None
    offset = _gmtoff(end)
    while begin < end:
        if _gmtoff(begin) != offset:
            return None
        begin += _DAY
    return offset


def _gmtoff(moment: float) -> float:
    return float(time.localtime(moment).tm_gmtoff)
