"""Paths in another process's file system, reached through /proc/PID/root.

The kernel follows an absolute link on that way from our own root, not from the process's: where a
container has /var/run -> /run, /proc/PID/root/var/run/nvidia-mps would be the host's
/run/nvidia-mps, and so another daemon's.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

_MAX_LINKS = 40
"""As many as the kernel follows."""


def resolve_in_root(root: str, path: str) -> str:
    """Give a path without links that would lead out of a root; the path itself if it has none."""
    done: list[str] = []
    names = deque(path.split("/"))
    links, leads_out = 0, False
    while names:
        name = names.popleft()
        if name in {"", "."}:
            continue
        if name == "..":
            leads_out |= not done
            del done[-1:]
            continue
        target = _read_link("/".join((root, *done, name)))
        if target is None:
            done.append(name)
            continue
        links += 1
        if links > _MAX_LINKS:
            return path  # a loop: the kernel says so, too
        if target.startswith("/"):
            leads_out = True
            done.clear()
        names.extendleft(reversed(target.split("/")))
    return f"/{'/'.join(done)}" if leads_out else path


def _read_link(path: str) -> str | None:
    """Give what a link names; None: it is none, or not there."""
    try:
        return str(Path(path).readlink())
    except (OSError, ValueError):
        return None
