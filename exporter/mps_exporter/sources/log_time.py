"""Which time zone the stamps of a log are in.

MPS stamps its lines in local time and names no zone. A file's modification time tells which one it
was when its last line was written: where that is what the host's own rules say (as nearly always),
each line is read by these rules, so that a log from before a change of the clocks keeps its times:

    [2026-03-20 12:00:00.000 Control   400] …    Europe/Berlin: an hour east of Greenwich
    [2026-04-02 09:00:00.000 Control   400] …    two hours

Otherwise (a container with a zone of its own) that one offset stands for the whole file.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mps_exporter.sources.log_positions import last_stamp_in, parse_stamp

STEP_SECONDS = 900
"""All time zones are whole quarters of an hour."""

TOLERANCE_SECONDS = 2.0
"""How far a file's modification time may be from the stamp of its last line."""

MAX_SECONDS = 14 * 3600

_DAY = 86400.0
_MAX_SEARCH_BYTES = 4000 * _DAY
_SET_BACK_SECONDS = 1800.0
"""Within the hour that comes twice, a stamp so much before the last one is of the second time."""


@dataclass(frozen=True, slots=True)
class LogZone:
    """How far local time is from Unix time."""

    fixed_seconds: float | None = None
    """East of Greenwich; None: what the host's rules say at each moment."""

    def at(self, moment: float) -> float:
        """Give the offset at a moment of Unix time."""
        return _gmtoff(moment) if self.fixed_seconds is None else self.fixed_seconds


HOST_ZONE = LogZone()


@dataclass(frozen=True, slots=True)
class LastLine:
    """The last line whose offset is known."""

    stamp: float
    offset_seconds: float


def infer_zone(stamp: float | None, mtime: float) -> LogZone | None:
    """Tell the zone from the last line of a file and when it was modified; None: they differ."""
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
    """Give how many bytes the first lines have that share an offset, and the last mark in them.

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
    """Give the offset of a line that stands after this mark."""
    found = _offsets(stamp)
    if len(found) == 1 or last_line is None or last_line.offset_seconds not in found:
        return found[0]
    if stamp < last_line.stamp - _SET_BACK_SECONDS:
        return found[-1]
    return last_line.offset_seconds


def _offsets(stamp: float) -> tuple[float, ...]:
    """Give the offsets that a local time may have by the host's rules, the earlier moment first.

    It has two in the hour that comes twice, and for one that is left out the one before is given.
    """
    near = sorted({_gmtoff(stamp - _DAY), _gmtoff(stamp), _gmtoff(stamp + _DAY)}, reverse=True)
    found = tuple(offset for offset in near if _gmtoff(stamp - offset) == offset)
    return found or (_gmtoff(stamp - _DAY),)


def _common_offset(data: bytes, last: float) -> float | None:
    """Give the one offset of all these lines, where the clocks were not changed meanwhile."""
    first = next(
        (one for line in data.split(b"\n", 64) if (one := parse_stamp(line)) is not None), last
    )
    begin, end = min(first, last) - _DAY, max(first, last) + _DAY
    if end - begin > _MAX_SEARCH_BYTES:
        return None
    offset = _gmtoff(end)
    while begin < end:
        if _gmtoff(begin) != offset:
            return None
        begin += _DAY
    return offset


def _gmtoff(moment: float) -> float:
    return float(time.localtime(moment).tm_gmtoff)
