r"""Bytes of a daemon's two logs -> events, in the order in which they happened.

    [2026-11-21 08:55:42.578 Control   630] NEW CLIENT 632 from user 1001: Server already exists
     timestamp               component pid  message

The timestamp is local time without a zone. The component is one of Control, Server, Client, Other
and "Legacy Server". A line without such a prefix continues the record before it. Nothing here
raises, whatever the bytes.

The logs are read separately, late and in arbitrary pieces; a line may come in halves. The meaning
of a line often depends on a line of the other log (a server's "Exiting" is in server.log, its exit
in control.log), so the two are merged by their timestamps, and a line is held until the other log
is known to be complete up to then. A log that cannot be read holds nothing back.

Timestamps can jump (daylight saving, a clock set back). So no line is held for longer than
MAX_HOLD_SECONDS, unless the other log is still being read, and no line counts as later than the
time at which it was read.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.log_wordings import (
    CONTINUATION,
    CONTROL_LINES,
    LINES_LOST,
    NUMBER,
    SERVER_LINES,
    UNRECOGNIZED,
    Event,
    LogEntry,
    Shapes,
)
from mps_exporter.observations import LogChunk, LogName

LINE_TOO_LONG = Event(UNRECOGNIZED, ("(a line longer than the maximum)",))

_PREFIX = re.compile(
    r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) "
    r"([A-Z][A-Za-z]{0,15}(?: [A-Z][a-z]{1,15})?) +(\d{1,7})\](.*)",
    re.ASCII | re.DOTALL,
)
# Drivers before 535 begin many messages of a server with one of these.
_OLD_PREFIX = re.compile(r"^(?:Volta MPS Server: |Volta MPS: |MPS Server: )")

# For searches without parsing: only this module and log_wordings contain wordings of the logs.

DAEMON_STARTING_LINE = re.compile(
    rb"^\[\d{4}-\d\d-\d\d [\d:.]{8,16} Control +\d+\] "
    rb"Start(?:ing control daemon using socket.*)?\r?$",
    re.MULTILINE,
)
"""First line of a control daemon."""

SERVER_ADDED_LINE = re.compile(rb"(Adding server ')([a-z0-9_]{1,64})(')")
"""Line of an MPS v3 daemon about a new server, with the server's name."""


def control_line_of(pid: int) -> re.Pattern[bytes]:
    return re.compile(rb"^\[[^\]\n]* Control +%d\] " % pid, re.MULTILINE)


class Line(NamedTuple):
    """A line with its prefix parsed."""

    stamp_ms: int | None
    """Milliseconds since 1970 in the daemon's local time; None without a valid prefix."""
    component: str
    pid: int  # PID of the writer: the daemon, a server or a client.
    event: Event


def parse_line(line: str | bytes) -> Line:
    """Parse a line, given without its line end."""
    found = _PREFIX.fullmatch(line if isinstance(line, str) else line.decode("utf-8", "replace"))
    if found is None:
        return Line(None, "", 0, CONTINUATION)
    try:
        time = datetime.fromisoformat(found[1] + "+00:00")
    except ValueError:  # there is no such time
        return Line(None, "", 0, CONTINUATION)
    component, message = found[2], found[4].strip()
    if component != "Control":
        event = _event(SERVER_LINES, _OLD_PREFIX.sub("", message, count=1))
    elif message.startswith("Cmd:"):
        event = Event("ui_command", (message[4 : 4 + policy.MAX_QUOTED_MESSAGE],))
    else:
        event = _event(CONTROL_LINES, message)
    return Line(round(time.timestamp() * 1000), component, int(found[3]), event)


def _event(shapes: Shapes, message: str) -> Event:
    if message.isdigit() and message.isascii() and len(message) <= 10:
        return Event(NUMBER, (int(message),))
    event = shapes.event(message) if len(message) <= policy.MAX_MESSAGE else None
    return event or Event(UNRECOGNIZED, (message[: policy.MAX_QUOTED_MESSAGE],))


# ------------------------------------------------------------------ both logs, in order


_Name = tuple[LogName, str]  # Log, and name of the MPS v3 server that owns it, or "".


class LogMerger:
    """Merges control.log and the logs of the servers of one daemon."""

    def __init__(self, readable: dict[LogName, bool]) -> None:
        """`readable`: log -> whether it can be followed; if not, it holds nothing back."""
        self._readable = readable
        self._logs = {name: _LogBuffer(name[0]) for name in (("server", ""), ("control", ""))}
        """Logs by name and server; all servers of a v2 daemon have one log. The daemon's log is the
        last: if timestamps are equal, the servers' lines go before the daemon's."""

    def add_chunk(self, chunk: LogChunk) -> None:
        """Add bytes of one of the logs, in the order in which they were read."""
        name = chunk.log, chunk.server_name
        if name not in self._logs:
            self._logs = {name: _LogBuffer(chunk.log), **self._logs}
        self._readable[chunk.log] = True
        self._logs[name].add_chunk(chunk)

    def mark_idle(self, log: LogName, until: float, busy: Collection[_Name] = ()) -> None:
        """Record that a log, except the `busy` logs, had no new data at this Unix time."""
        for name, buffer in self._logs.items():
            if name[0] == log and name not in busy:
                buffer.mark_idle(until)

    def pop_ready(self, now: float) -> Iterator[LogEntry]:
        """Yield the entries whose order is certain, or that are overdue."""
        logs, latest = self._logs.values(), now + policy.CLOCK_TOLERANCE_SECONDS
        for log in logs:
            # The clock was set back after these lines: the time of their read is in the future.
            while (head := log.peek()) is not None and head[1] > latest:
                yield log.pop()
        overdue = now - policy.MAX_HOLD_SECONDS
        while True:
            heads = [(head, log) for log in logs if (head := log.peek()) is not None]
            if not heads:
                return
            # min() returns the first of equal items
            (key, read_at, _), first = min(heads, key=lambda head_and_log: head_and_log[0][0])
            for other in logs:
                if other is first or not self._readable[other.name]:
                    continue
                if other.holds_back(key) and (read_at > overdue or other.is_behind(overdue)):
                    return
            yield first.pop()

    @property
    def complete_until(self) -> float | None:
        """Time before which everything has been released; None if unknown."""
        logs = (log for log in self._logs.values() if self._readable[log.name])
        times = [log.complete_until() for log in logs]
        known = [time for time in times if time is not None]
        return min(known) if times and len(known) == len(times) else None


_BufferedEntry = tuple[float, float, LogEntry]  # Sort key, time of the read, and the entry.


class _LogBuffer:
    """A log: chunks that are not parsed yet, and entries that wait for the other log."""

    def __init__(self, name: LogName) -> None:
        self.name = name
        self._chunks: deque[LogChunk] = deque()
        self._partial_line = b""
        self._too_long = False
        self._entries: deque[_BufferedEntry] = deque()
        self._last_key = float("-inf")
        self._last_at: float | None = None
        self._complete = float("-inf")
        self._behind_at = float("-inf")  # Time of the last read, if more data was waiting then.

    def add_chunk(self, chunk: LogChunk) -> None:
        self._behind_at = chunk.at if chunk.complete_until is None else float("-inf")
        if chunk.data or chunk.restarted or chunk.lost_bytes:
            self._chunks.append(chunk)
        elif chunk.complete_until is not None:
            self.mark_idle(chunk.complete_until)

    def mark_idle(self, until: float) -> None:
        if self._chunks:
            # The last chunk is not parsed yet, and no data follows it.
            self._chunks[-1] = replace(self._chunks[-1], complete_until=until)
        else:
            until -= policy.WRITE_RACE_SECONDS
            if until > self._complete or until < self._complete - policy.CLOCK_JUMP_SECONDS:
                self._complete = until

    def peek(self) -> _BufferedEntry | None:
        while not self._entries and self._chunks:
            self._parse_chunk(self._chunks.popleft())
        return self._entries[0] if self._entries else None

    def pop(self) -> LogEntry:
        return self._entries.popleft()[2]

    def holds_back(self, key: float) -> bool:
        """Return whether a line before this key may still come: not if entries are buffered."""
        return not self._entries and key > self._complete and key >= self._last_key

    def is_behind(self, since: float) -> bool:
        return self._behind_at > since

    def complete_until(self) -> float | None:
        head = self.peek()
        if head is not None:
            return head[0]
        if self._last_key - policy.CLOCK_JUMP_SECONDS > self._complete > float("-inf"):
            return self._complete  # the clock was set back after the last line
        known = max(self._complete, self._last_key)
        return None if known == float("-inf") else known

    def _parse_chunk(self, chunk: LogChunk) -> None:
        if chunk.restarted or chunk.lost_bytes:
            if not chunk.history:
                event = Event(LINES_LOST, (chunk.lost_bytes,))
                lost = LogEntry(chunk.at, self.name, 0, "", event, False)
                self._entries.append((self._last_key, chunk.at, lost))
            # The rest of an earlier half line is lost.
            self._partial_line, self._too_long = b"", False
            self._last_key = float("-inf")
        *lines, self._partial_line = (self._partial_line + chunk.data).split(b"\n")
        for line in lines:
            too_long = self._too_long or len(line) > policy.MAX_LINE_BYTES
            self._append(Line(None, "", 0, LINE_TOO_LONG) if too_long else parse_line(line), chunk)
            self._too_long = False
        if len(self._partial_line) > policy.MAX_LINE_BYTES:
            self._partial_line, self._too_long = b"", True
        if chunk.complete_until is not None:
            self._complete = chunk.complete_until - policy.WRITE_RACE_SECONDS

    def _append(self, line: Line, chunk: LogChunk) -> None:
        stamp_ms, component, pid, event = line
        read_at, last = chunk.at, self._last_key
        if stamp_ms is None:
            # A line without a timestamp belongs to the line before it.
            at = read_at if self._last_at is None else self._last_at
            key = last
        else:
            key = at = stamp_ms / 1000.0 - (chunk.utc_offset_seconds or 0.0)
            if last - policy.CLOCK_JUMP_SECONDS < at < last:
                key = last  # written by several threads: the file's order holds
            if at > read_at + policy.CLOCK_TOLERANCE_SECONDS:
                at, key = read_at, last  # a false timestamp must not mislead other lines
            self._last_at, self._last_key = at, key
        entry = LogEntry(at, self.name, pid, component, event, not chunk.history)
        self._entries.append((key, read_at, entry))


# ------------------------------------------------------------------ lines for a recording

_V2_COMMAND = re.compile(
    r"\s*(?:get_|set_|start_server|shutdown_server|terminate_client|device_query|sm_partition|lspart"
    r"|ps|quit|help)"
)
"""Commands of the older interface, which contain numbers. Commands of MPS v3 contain names that
users chose."""


def withhold_unknown(data: bytes) -> bytes:
    """Return the data fit to leave the host: known lines of MPS are kept.

    Other commands become "(withheld)", other lines their length and a hash: users can choose the
    target of a log's path, so the file may not be a log. A replaced line keeps its prefix, if any,
    so that a replay counts it as the live exporter did.
    """
    return b"\n".join(map(_withhold, data.split(b"\n")))


def _withhold(line: bytes) -> bytes:
    text = line.removesuffix(b"\r")
    if not text:
        return line
    parsed = parse_line(text)
    name, values = parsed.event
    if name == "ui_command":
        known = _V2_COMMAND.match(str(values[0])) is not None
        return line if known else line.partition(b"Cmd:")[0] + b"Cmd:(withheld)"
    if name not in (UNRECOGNIZED, CONTINUATION.name):
        return line
    prefix, message = b"", text
    if parsed.stamp_ms is not None:
        prefix, _, message = text.partition(b"]")
        prefix, message = prefix + b"] ", message.lstrip()
    digest = hashlib.sha256(message).hexdigest()[:12]
    return prefix + f"(withheld: {len(message)} bytes, sha256 {digest})".encode()


class LogFilter:
    """Applies withhold_unknown() to a log that is read in pieces, line by line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, *, restarted: bool) -> bytes:
        """Return the filtered lines that are now complete; `restarted` voids a half line."""
        if restarted:
            self._rest = b""
        complete, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > policy.MAX_LINE_BYTES:
            complete, newline, self._rest = complete + newline + self._rest, b"\n", b""
        return withhold_unknown(complete) + newline if newline else b""
