"""What /proc shows of a process that uses a daemon."""

from __future__ import annotations

from typing import Any

from mps_exporter.observations import ProcessView


def process_using(pipe_directory: str, pid: int = 77, **more: Any) -> ProcessView:
    """A living process of user 1001 whose environment names a daemon's directory."""
    known = {
        "uid": 1001,
        "state": "S",
        "command": "x",
        "pipe_directory": pipe_directory,
        "names_directory": True,
        "daemon_directory": pipe_directory,
    }
    return ProcessView(pid, **{**known, **more})
