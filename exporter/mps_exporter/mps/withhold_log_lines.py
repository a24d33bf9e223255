"""Log lines fit to leave the host: those that MPS writes; of others only the length and a hash.

What a log's path leads to, a user of the host chooses: it need not be a log. A line that is not of
a known shape keeps its prefix, if it has one, so that a replay counts it as the live exporter did.
"""

from __future__ import annotations

import hashlib
import re

from mps_exporter.mps.log_parser import CONTINUATION, UNRECOGNIZED, parse_line

_V2_COMMAND = re.compile(
    r"\s*(?:get_|set_|start_server|shutdown_server|terminate_client|device_query|sm_partition|lspart"
    r"|ps|quit|help)"
)
"""Commands of the older interface hold numbers; those of MPS v3 hold names that users chose."""

MAX_REST_BYTES = 65_536
"""Of a line that has not ended yet; a longer one is of no known shape."""


def withhold_unknown(data: bytes) -> bytes:
    """The same lines, those of unknown shape replaced. Pieces of lines at its ends are unknown."""
    return b"\n".join(map(_line, data.split(b"\n")))


def _line(line: bytes) -> bytes:
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
    """Applies it to one log that is read in pieces: a line is judged when it has ended."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, *, restarted: bool) -> bytes:
        """Give the lines that are complete now; ``restarted``: the rest of before is void."""
        if restarted:
            self._rest = b""
        complete, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > MAX_REST_BYTES:
            complete, newline, self._rest = complete + newline + self._rest, b"\n", b""
        return withhold_unknown(complete) + newline if newline else b""
