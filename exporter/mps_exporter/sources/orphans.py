"""What a program leaves behind: descendants that put themselves into sessions of their own.

They are in no process group that could be killed. So this process adopts its orphaned descendants
(PR_SET_CHILD_SUBREAPER), and kills those of sessions that are not its own and not those of programs
that still run. NVIDIA's control tool has no children; what NVML starts stays in this session.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


@cache
def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans(running: Collection[int]) -> bool:
    """Kill and reap them; gives whether there were any.

    Args:
        running: Leaders of the sessions that are left alone.
    """
    own, found = os.getsid(0), False
    for pid in _children():
        with suppress(ProcessLookupError, PermissionError, ChildProcessError):
            if os.getsid(pid) not in (own, *running):
                found = True
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
    return found


def _children() -> list[int]:
    """Give this process's children (none where the kernel has no CONFIG_PROC_CHILDREN)."""
    found = list[int]()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # that thread has just ended
            found += map(int, path.read_text().split())
    return found
