"""What a program leaves behind: descendants that put themselves into sessions of their own.

They are in no process group that could be killed. So this process adopts its orphaned descendants
(PR_SET_CHILD_SUBREAPER), and kills those that carry the mark which a program gets in its
environment, but for the sessions of programs that still run. Without the mark nothing is killed:
where this process is the first of a container, daemons that others start become its children, too.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_MARK = "MPS_EXPORTER_RUN"
_RUN = secrets.token_hex(8)


@cache
def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def marked(environment: Mapping[str, str]) -> dict[str, str]:
    """Give the environment of a program whose descendants are to be known."""
    return {**environment, _MARK: _RUN}


def kill_orphans(running: Collection[int], killed: set[int]) -> bool:
    """Kill and reap them; gives whether there may be more: the children of those that were killed.

    Adopted processes that have ended by themselves are reaped: nobody else does it.

    Args:
        running: Leaders of the sessions that are left alone.
        killed: Those that an earlier call killed, to which this one adds its own.
    """
    own, found = os.getsid(0), False
    for pid in _children():
        with suppress(ProcessLookupError, PermissionError, ChildProcessError):
            if os.getsid(pid) in (own, *running):
                continue
            if os.waitpid(pid, os.WNOHANG)[0]:
                found |= pid in killed
            elif pid in killed:
                found = True  # it is on its way out, and its environment is gone
            elif _is_marked(pid):
                found = True
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
    return found


def _children() -> list[int]:
    """Give this process's children (none where the kernel has no CONFIG_PROC_CHILDREN)."""
    found = list[int]()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # that thread has just ended
            found += map(int, path.read_text().split())
    return found


def _is_marked(pid: int) -> bool:
    try:
        return f"{_MARK}={_RUN}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
