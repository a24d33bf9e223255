"""Bytes of a daemon's two logs -> events, in the order in which things happened.

The logs are read apart, late and in arbitrary pieces; a line may come in halves. What a line means
often depends on a line of the other log (a server's "Exiting" stands in server.log, its exit in
control.log), so the two are merged by their stamps, and a line is held until the other log is known
to be complete up to then. A log that cannot be read holds nothing back.

Stamps are local time and can jump (daylight saving, a clock set back). So no line is held for
longer than MAX_HOLD_SECONDS, unless the other log is still being read, and no line counts as later
than the moment in which it was read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mps_exporter.mps.log_lines import Event
from mps_exporter.mps.log_parser import UNRECOGNIZED, Line, parse_line
from mps_exporter.observations import LogChunk, LogName

MAX_LINE_BYTES = 65536
"""A line longer than this is skipped, and counted as unrecognized."""

BLOCK_BYTES = 65536
"""How much is taken apart at once: a long backlog is kept as bytes, not as events."""

WRITE_RACE_SECONDS = 0.1
"""A line is stamped before it is written: so long before its last reading a file is complete."""

MAX_HOLD_SECONDS = 5.0
"""How long a line waits, at most, for the other log to be read as far as its stamp."""

CLOCK_JUMP_SECONDS = 60.0
"""A stamp this much before its predecessor means that the clock was set back."""

CLOCK_TOLERANCE_SECONDS = 2.0
"""A stamp further than this after the moment in which it was read cannot be true."""

LINE_TOO_LONG = Event(UNRECOGNIZED, ("(a line too long to be one)",))


class LogEntry(NamedTuple):
    """An event with when, in which log and by which process it was written."""

    at: float
    """Unix time in seconds."""
    log: LogName
    pid: int
    """Of the writer, as the daemon numbers processes."""
    component: str
    event: Event
    counted: bool
    """False: written before the exporter began to look, so no counter may count it."""


_new = tuple.__new__  # a NamedTuple's own constructor takes twice as long


class LogMerger:
    """Merges control.log and the logs of the servers of one daemon."""

    def __init__(self, pipe_directory: str) -> None:
        self.pipe_directory = pipe_directory
        # Server first: where stamps are equal, its lines go before those of the daemon.
        self._servers = {"": _LogBuffer("server")}
        """By name of the server; all servers of a v2 daemon have one log."""
        self._control = _LogBuffer("control")

    def set_readable(self, log: LogName, readable: bool) -> None:
        """Say whether a log can be followed; one that cannot holds the other back no longer."""
        for buffer in self._logs(log):
            buffer.readable = readable

    def add_chunk(self, chunk: LogChunk) -> None:
        """Add bytes of one of the logs, in the order in which they were read."""
        log = self._control
        if chunk.log == "server":
            log = self._servers.setdefault(chunk.server_name, _LogBuffer("server"))
        log.readable = True
        log.add_chunk(chunk)

    def mark_idle(self, log: LogName, until: float, busy: Collection[str] = ()) -> None:
        """Say that a log had nothing new when it was looked at (Unix time).

        Of the servers' logs, those of the busy servers are left out.
        """
        if log == "control":
            self._control.mark_idle(until)
            return
        for name, buffer in self._servers.items():
            if name not in busy:
                buffer.mark_idle(until)

    def pop_ready(self, now: float) -> Iterator[LogEntry]:
        """Yield the entries whose place in the order is certain."""
        logs = (*self._servers.values(), self._control)
        overdue = now - MAX_HOLD_SECONDS
        for log in logs:
            # Read in what is the future now: the clock was set back, they are from before that.
            yield from log.pop_read_after(now + CLOCK_TOLERANCE_SECONDS)
        while True:
            log, first, upto = _next(logs)
            if first is None:
                return
            for other in logs:
                if (
                    other is not log
                    and other.holds_back(first[0])
                    and (first[1] > overdue or other.is_behind(overdue))
                ):
                    return
            if upto is None:
                yield log.pop()
                continue
            # The other logs' next lines are known: all that comes before them is certain.
            yield from log.pop_until(upto, including=log is not self._control)

    @property
    def any_readable(self) -> bool:
        return any(log.readable for log in (*self._servers.values(), self._control))

    @property
    def complete_until(self) -> float | None:
        """Everything that happened before this moment has been released; None: not known yet."""
        logs = (*self._servers.values(), self._control)
        moments = [log.complete_until() for log in logs if log.readable]
        known = [moment for moment in moments if moment is not None]
        return min(known) if moments and len(known) == len(moments) else None

    def _logs(self, name: LogName) -> Collection[_LogBuffer]:
        return (self._control,) if name == "control" else self._servers.values()


_BufferedEntry = tuple[float, float, LogEntry]
"""An entry with its place in the order, and when it was read."""


def _next(logs: Sequence[_LogBuffer]) -> tuple[_LogBuffer, _BufferedEntry | None, float | None]:
    """Return the log with the next entry, that entry, and the place of the next of another log.

    Of equal places that of the first log counts.
    """
    log, first, upto = logs[0], None, None
    for one in logs:
        head = one.peek()
        if head is None:
            continue
        if first is None:
            log, first = one, head
        elif head[0] < first[0]:
            log, first, upto = one, head, first[0]
        elif upto is None or head[0] < upto:
            upto = head[0]
    return log, first, upto


class _LogBuffer:
    """One of the logs: bytes waiting to be taken apart, and entries waiting for the other log."""

    def __init__(self, name: LogName) -> None:
        self.name = name
        self.readable = False
        self._chunks: deque[LogChunk] = deque()
        self._offset = 0  # into the first chunk's data
        self._partial_line = bytearray()
        self._too_long = False
        self._entries: deque[_BufferedEntry] = deque()
        self._last_key = float("-inf")
        self._last_at: float | None = None
        self._complete = float("-inf")
        self._has_data = False
        self._more_waiting = False
        self._fed_at = float("-inf")

    def add_chunk(self, chunk: LogChunk) -> None:
        self._more_waiting = chunk.complete_until is None
        self._fed_at = chunk.at
        if chunk.data or chunk.restarted or chunk.lost_bytes:
            self._chunks.append(chunk)
        elif chunk.complete_until is not None:
            self.mark_idle(chunk.complete_until)

    def mark_idle(self, until: float) -> None:
        if self._chunks:
            # What was read last is not parsed yet, and there is nothing behind it.
            self._chunks[-1] = replace(self._chunks[-1], complete_until=until)
        else:
            until -= WRITE_RACE_SECONDS
            if until > self._complete or until < self._complete - CLOCK_JUMP_SECONDS:
                self._complete = until
            self._has_data = True

    def peek(self) -> _BufferedEntry | None:
        while not self._entries and self._chunks:
            self._parse_block()
        return self._entries[0] if self._entries else None

    def pop(self) -> LogEntry:
        return self._entries.popleft()[2]

    def pop_until(self, key: float, *, including: bool) -> Iterator[LogEntry]:
        """Yield what comes before this place in the order, as far as it is parsed."""
        held = self._entries
        while held and (held[0][0] < key or (including and held[0][0] == key)):
            yield held.popleft()[2]

    def pop_read_after(self, moment: float) -> Iterator[LogEntry]:
        """Yield what was read after this moment."""
        while (head := self.peek()) is not None and head[1] > moment:
            yield self.pop()

    def holds_back(self, key: float) -> bool:
        """Whether a line that belongs before this key may still come.

        Called only for a log whose next line, if there is one, comes later.
        """
        if not self.readable or self._entries:
            return False
        return key > self._complete and key >= self._last_key

    def is_behind(self, since: float) -> bool:
        """Whether more of it is waiting to be read, and it was read after this moment."""
        return self._more_waiting and self._fed_at > since

    def complete_until(self) -> float | None:
        if self._entries or self._chunks:
            head = self.peek()
            if head is not None:
                return head[0]
        if not self._has_data:
            return None
        if self._last_key - CLOCK_JUMP_SECONDS > self._complete > float("-inf"):
            return self._complete  # the clock was set back after the last line
        known = max(self._complete, self._last_key)
        return None if known == float("-inf") else known

    def _parse_block(self) -> None:
        """Take the next block of the first chunk apart."""
        chunk = self._chunks[0]
        if self._offset == 0 and (chunk.restarted or chunk.lost_bytes):
            # Half a line from before means nothing any more.
            self._partial_line.clear()
            self._too_long = False
            self._last_key = float("-inf")
        end = self._offset + BLOCK_BYTES
        block = chunk.data[self._offset : end]
        self._offset = end
        self._parse_lines(block, chunk)
        if end >= len(chunk.data):
            self._chunks.popleft()
            self._offset = 0
            self._has_data = True
            if chunk.complete_until is not None:
                self._complete = chunk.complete_until - WRITE_RACE_SECONDS

    def _parse_lines(self, block: bytes, chunk: LogChunk) -> None:
        last = block.rfind(b"\n")
        if last < 0:
            self._keep_partial(block)
            return
        whole, rest = block[:last], block[last + 1 :]
        if self._partial_line or self._too_long:
            first, separator, whole = whole.partition(b"\n")
            self._keep_partial(first)
            if self._too_long:
                self._append(Line(None, "", 0, LINE_TOO_LONG), chunk)
            else:
                self._append(parse_line(bytes(self._partial_line)), chunk)
            self._partial_line.clear()
            self._too_long = False
            if not separator:
                self._keep_partial(rest)
                return
        for text in whole.decode("utf-8", "replace").split("\n"):
            self._append(parse_line(text), chunk)
        self._keep_partial(rest)

    def _keep_partial(self, part: bytes) -> None:
        if self._too_long or len(self._partial_line) + len(part) > MAX_LINE_BYTES:
            self._too_long = True
            self._partial_line.clear()
        else:
            self._partial_line += part

    def _append(self, line: Line, chunk: LogChunk) -> None:
        stamp_ms, component, pid, event = line
        read_at, last = chunk.at, self._last_key
        if stamp_ms is None:
            # Without a stamp of its own: it belongs to the line before it.
            at = read_at if self._last_at is None else self._last_at
            key = last
        else:
            key = at = stamp_ms / 1000.0 - (chunk.utc_offset_seconds or 0.0)
            if last - CLOCK_JUMP_SECONDS < at < last:
                key = last  # written by several threads: the file's order holds
            if at > read_at + CLOCK_TOLERANCE_SECONDS:
                at, key = read_at, last  # a stamp that cannot be true misleads no other line
            self._last_at, self._last_key = at, key
        entry = _new(LogEntry, (at, self.name, pid, component, event, not chunk.history))
        self._entries.append((key, read_at, entry))
