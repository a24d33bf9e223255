"""What a control.log tells of a daemon that did not answer: that it serves somebody again.

Its one thread writes these lines, so a thread that is stuck does not:

    [2026-11-21 08:55:42.578 Control   630] Accepting connection...
    [2026-11-21 08:55:42.579 Control   630] NEW CLIENT 632 from user 1001: Server already exists
    [2026-11-21 11:35:40.207 Control   826] Server 863 exited with status 0
    [2026-11-21 11:35:40.458 Control   826] NEW SERVER 878: Ready

A daemon that drains (it was asked to quit, and has clients) writes others, and answers nobody.
"""

from __future__ import annotations

from mps_exporter.mps.log_parser import DAEMON_ACTIVITY_LINE
from mps_exporter.observations import LogChunk
from mps_exporter.sources.log_positions import parse_stamp

_TAIL_BYTES = 65536


def last_activity(chunk: LogChunk) -> float | None:
    """Give when the daemon was last seen to serve somebody (Unix time); None: not in this chunk."""
    if chunk.log != "control" or chunk.history or chunk.utc_offset_seconds is None:
        return None
    lines = DAEMON_ACTIVITY_LINE.findall(chunk.data[-_TAIL_BYTES:])
    stamp = parse_stamp(lines[-1]) if lines else None
    return None if stamp is None else stamp - chunk.utc_offset_seconds
