"""Who keeps a process from running: a debugger, or a frozen control group. May block.

(Paths are plain text: see processes.py.)
"""

from __future__ import annotations

import os
import re

from mps_exporter.mps.cgroups import unified_path, with_parents
from mps_exporter.sources.memory_partitions import CGROUPS

_TRACER = re.compile(rb"^TracerPid:\s*([1-9]\d*)$", re.MULTILINE)
_MAX_BYTES = 1 << 14


def tracer_of(pid: int, state: str, procfs: str) -> str:
    """Give PID and program of the debugger that has stopped a process; "": none is seen."""
    found = _TRACER.search(_read(f"{procfs}/{pid}/status")) if state == "t" else None
    if found is None:
        return ""
    tracer = int(found[1])
    return f"{tracer} ({_read(f'{procfs}/{tracer}/comm').decode('utf-8', 'replace').strip()})"


def frozen_group(cgroup: str | None, root: str = CGROUPS) -> str:
    """Give the folder of the frozen control group that a process is in; "": none is seen.

    Args:
        cgroup: The text of /proc/PID/cgroup.
        root: Where version 2 is mounted, in this program's cgroup namespace.
    """
    path = unified_path(cgroup)
    if not path or b"frozen 1" not in _read(f"{root}{path}/cgroup.events").splitlines():
        return ""
    groups = (f"{root}{one}" for one in with_parents(path))
    return next((one for one in groups if _read(f"{one}/cgroup.freeze").strip() == b"1"), "")


def _read(path: str) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, _MAX_BYTES)
        finally:
            os.close(file)
    except OSError:
        return b""
