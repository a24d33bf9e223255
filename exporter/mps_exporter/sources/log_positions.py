"""Finds places in a log file by the stamps of its lines, without reading all of it."""

from __future__ import annotations

import os

from mps_exporter.mps.log_parser import DAEMON_STARTING_LINE, parse_line

BLOCK_BYTES = 64 * 1024


def parse_stamp(line: bytes) -> float | None:
    """Read a line's stamp: seconds of a clock that shows local time.

    [2026-11-21 08:55:42.578 Control   630] NEW UI
    """
    stamp_ms = parse_line(line[:128]).stamp_ms
    return None if stamp_ms is None else stamp_ms / 1000.0


def last_stamp_in(data: bytes) -> float | None:
    """Give the stamp of the last whole line that has one."""
    end = data.rfind(b"\n")
    while end >= 0:
        begin = data.rfind(b"\n", 0, end) + 1
        if (stamp := parse_stamp(data[begin:end])) is not None:
            return stamp
        end = begin - 1
    return None


def find_last_start(descriptor: int, size: int, bound: int) -> int | None:
    """Where the last line is that says that a daemon starts; 0 when the file is read whole."""
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
    """Give the stamp of the last whole line of a file that has one."""
    begin = max(0, size - BLOCK_BYTES)
    return last_stamp_in(os.pread(descriptor, size - begin, begin))


def read_line_at(descriptor: int, offset: int) -> bytes:
    """Give the beginning of the line that begins here."""
    return os.pread(descriptor, 128, offset).partition(b"\n")[0]


def find_next_line(descriptor: int, offset: int, size: int) -> int:
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


def find_first_line_since(
    descriptor: int, size: int, bound: int, stamp: float | None
) -> int | None:
    """Where the first line is that was written at this stamp or later; None: unknown stamp.

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
