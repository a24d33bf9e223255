r"""A line of control.log or server.log -> what it says.

    [2026-11-21 08:55:42.578 Control   630] NEW CLIENT 632 from user 1001: Server already exists
     stamp                   component pid  message

The stamp is local time without a zone. The component is one of Control, Server, Client, Other and
"Legacy Server". A line without such a prefix continues the record before it. Nothing here raises,
whatever the bytes.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from mps_exporter.mps.control_log import CONTROL_LINES
from mps_exporter.mps.log_lines import MAX_QUOTED, Event
from mps_exporter.mps.server_log import SERVER_LINES

MAX_MESSAGE = 512
"""Maximum characters of a message, apart from commands and replies."""

CACHE_SIZE = 4096
"""Messages that are remembered: few of them make many lines."""

UNRECOGNIZED = "unrecognized"
"""Event of a line of unknown wording: a reply to a query, or a driver's new wording."""
NUMBER = "number"
"""Event of a bare number: a reply to a query, or an item of a list in server.log."""
CONTINUATION = Event("continuation")
"""A line without a prefix: it belongs to the record before it."""

_PREFIX = re.compile(
    r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.(\d{3}) "
    r"([A-Z][A-Za-z]{0,15}(?: [A-Z][a-z]{1,15})?) +(\d{1,7})\](.*)",
    re.ASCII | re.DOTALL,
)
# Drivers before 535 begin many messages of a server with one of these.
_OLD_PREFIX = re.compile(r"Volta MPS Server: |Volta MPS: |MPS Server: ")


class Line(NamedTuple):
    """A line with its prefix read."""

    stamp_ms: int | None
    """The stamp, as milliseconds since 1970 of a clock that shows the daemon's local time.
    None: the line has no prefix."""
    component: str
    pid: int
    """The writer: the daemon, a server, a client."""
    event: Event


_UNPREFIXED = Line(None, "", 0, CONTINUATION)

# For those who search a log without parsing every line: the wording stands in this module only.

DAEMON_STARTING_LINE = re.compile(
    rb"^\[\d{4}-\d\d-\d\d [\d:.]{8,16} Control +\d+\] "
    rb"Start(?:ing control daemon using socket.*)?\r?$",
    re.MULTILINE,
)
"""A control daemon came up: e.DaemonStarting."""

DAEMON_ACTIVITY_LINE = re.compile(
    rb"^\[[^\]\n]{1,64} Control +\d+\] "
    rb"(?:Accepting connection|NEW UI|NEW CLIENT|NEW SERVER|Server \d+ exited)",
    re.MULTILINE,
)
"""The control daemon serves a client or a tool: its one thread is not stuck."""


SERVER_ADDED_LINE = re.compile(rb"(Adding server ')([a-z0-9_]{1,64})(')")
"""An MPS v3 daemon has a new server, by this name."""


def control_line_of(pid: int) -> re.Pattern[bytes]:
    """Return the pattern of the lines that the control daemon with this PID writes."""
    return re.compile(rb"^\[[^\]\n]* Control +%d\] " % pid, re.MULTILINE)


def parse_line(line: str | bytes) -> Line:
    """Read one line, given without its line end."""
    found = _PREFIX.fullmatch(line if isinstance(line, str) else line.decode("utf-8", "replace"))
    second_ms = None if found is None else _second_ms(found[1])
    if found is None or second_ms is None:
        return _UNPREFIXED
    component, message = found[3], found[5]
    event = (_long_event if len(message) > MAX_MESSAGE else _event)(component == "Control", message)
    return Line(second_ms + int(found[2]), component, int(found[4]), event)


@lru_cache(maxsize=256)
def _second_ms(text: str) -> int | None:
    """Read "2026-11-21 08:55:42", in milliseconds; None: there is no such time."""
    try:
        moment = datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(moment.timestamp()) * 1000


def _long_event(control: bool, message: str) -> Event:
    """Read a message that is too long to be anything but a command or a reply."""
    message = message.lstrip()
    if control and message.startswith("Cmd:"):
        return Event("ui_command", (message[4 : 4 + MAX_QUOTED],))
    return Event(UNRECOGNIZED, (message[:MAX_QUOTED],))


@lru_cache(maxsize=CACHE_SIZE)
def _event(control: bool, message: str) -> Event:
    """Read the message of a line, which the control daemon wrote or another process."""
    message = message.strip()
    if control and message.startswith("Cmd:"):
        return _long_event(control, message)
    if not control and message[:1] in ("V", "M"):
        old = _OLD_PREFIX.match(message)
        message = message if old is None else message[old.end() :]
    if message.isdigit() and message.isascii() and len(message) <= 10:
        return Event(NUMBER, (int(message),))
    event = (CONTROL_LINES if control else SERVER_LINES).event(message)
    return event or Event(UNRECOGNIZED, (message[:MAX_QUOTED],))
