"""Looks at one process: where it looks for its daemon, and whether it can get there.

Only what the caller may read is read; the rest is None. Paths are walked in the process's own root
with the rights of its user: links that lead out of that root are followed inside it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from mps_exporter.observations import DaemonFacts, ProcessView
from mps_exporter.sources.daemon_discovery import DEFAULT_PIPE_DIRECTORIES
from mps_exporter.sources.procfs_parse import (
    parse_arguments,
    parse_mps_environment,
    parse_stat,
    parse_status,
    text_of,
)

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where a server and its clients share memory

DEBUG_VARIABLES = frozenset(
    {
        "COMPUTE_PROFILE",
        "CUDA_COREDUMP_FILE",
        "CUDA_DEVICE_WAITS_ON_EXCEPTION",
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
        "CUDA_INJECTION32_PATH",
        "CUDA_INJECTION64_PATH",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_PROFILE",
        "NSIGHT_CUDA_DEBUGGER",
        "NVTX_INJECTION64_PATH",
    }
)
"""Those for which DCGM's diagnostics warn, and two more that CUDA's documentation calls so."""

_MAX_LINKS = 40
_MAX_NAMES = 512


def view_process(pid: int, daemons: Iterable[DaemonFacts], procfs: str = "/proc") -> ProcessView:
    """Look at a process; never fails: what cannot be read is None.

    Args:
        pid: As this host numbers processes.
        daemons: Those of the host, to find the one whose directory it uses.
        procfs: Where procfs is mounted.
    """
    base = Path(procfs) / str(pid)
    try:
        found = parse_stat((base / "stat").read_bytes())
        status = parse_status((base / "status").read_bytes())
    except OSError as error:
        gone = error.errno in (errno.ENOENT, errno.ESRCH)
        return ProcessView(pid, present=not gone)
    arguments = parse_arguments(_read(base / "cmdline") or b"")
    command = Path(arguments[0]).name if arguments else found.comm if found else ""
    directory, named, debug = None, False, tuple[str, ...]()
    # Of a process that has ended and not been reaped, an empty text can be read.
    environment = _read(base / "environ")
    if environment:
        variables = parse_mps_environment(environment)
        named = bool(variables.get("CUDA_MPS_PIPE_DIRECTORY"))
        directory = variables.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORIES[0]
        debug = _debug_variables(environment)
    root = str(base / "root")
    path_error, path = None, None
    if directory is not None:
        groups = _groups(base)
        path_error, path = _walk(root, directory, status.uid, groups)
        if not named and path is None:
            path_error = None  # nobody promised that it is there
    daemon = _same_directory(path, daemons)
    shares = None
    if daemon is not None and daemon.process is not None:
        shares = _same_file(
            root + SHARED_MEMORY, f"{procfs}/{daemon.process.pid}/root{SHARED_MEMORY}"
        )
    return ProcessView(
        pid,
        uid=status.uid,
        state=found.state if found is not None else "",
        command=command,
        pipe_directory=directory,
        names_directory=named,
        path_error=path_error,
        daemon_directory=daemon.pipe_directory if daemon is not None else None,
        shares_memory_with_daemon=shares,
        debug_variables=debug,
        oom_kills=_oom_kills(_read(base / "cgroup") or b""),
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _debug_variables(environment: bytes) -> tuple[str, ...]:
    names = {text_of(entry.partition(b"=")[0]) for entry in environment.split(b"\0")}
    return tuple(sorted(names & DEBUG_VARIABLES))


def _groups(base: Path) -> frozenset[int]:
    """The group and the supplementary groups of a process."""
    found: set[int] = set()
    for line in (_read(base / "status") or b"").splitlines():
        key, _, value = line.partition(b":")
        if key in (b"Gid", b"Groups"):
            found |= {int(word) for word in value.split() if word.isdigit()}
    return frozenset(found)


def _walk(
    root: str, path: str, uid: int | None, groups: frozenset[int]
) -> tuple[str | None, str | None]:
    """Walk to a directory in this root as this user.

    Returns:
        Why the user cannot get there (None: nothing in the way is seen), and where the directory
        is from here (None: it is not there, or the caller may not look).
    """
    done: list[str] = []
    names = deque(path.split("/")[:_MAX_NAMES])
    links = 0
    while names:
        name = names.popleft()
        if name == "..":
            del done[-1:]
        if name in ("", ".", ".."):
            continue
        here = "/".join((root, *done, name))
        try:
            entry = Path(here).lstat()
            target = str(Path(here).readlink()) if stat.S_ISLNK(entry.st_mode) else None
        except (OSError, ValueError) as error:
            # What is closed to the caller need not be closed to the process.
            closed = isinstance(error, PermissionError)
            return None if closed else f"/{'/'.join((*done, name))} is not there", None
        if target is None:
            done.append(name)
            if (why := _in_the_way(entry, uid, groups)) is not None:
                return f"/{'/'.join(done)} {why}", None
            continue
        links += 1
        if links > _MAX_LINKS:
            return f"/{'/'.join((*done, name))} is a loop of links", None
        if target.startswith("/"):
            done.clear()
        names.extendleft(reversed(target.split("/")))
    return None, "/".join((root, *done))


def _in_the_way(entry: os.stat_result, uid: int | None, groups: frozenset[int]) -> str | None:
    """Why a user cannot pass this; None: it can."""
    if not stat.S_ISDIR(entry.st_mode):
        return "is not a directory"
    if uid and not _may_pass(entry.st_mode, entry.st_uid, entry.st_gid, uid, groups):
        return f"is closed to user {uid} (mode {stat.S_IMODE(entry.st_mode):04o})"
    return None


def _may_pass(mode: int, owner: int, group: int, uid: int, groups: frozenset[int]) -> bool:
    """Whether the execute bit that applies to this user is set; access lists are not read."""
    if owner == uid:
        return bool(mode & stat.S_IXUSR)
    if group in groups:
        return bool(mode & stat.S_IXGRP)
    return bool(mode & stat.S_IXOTH)


def _same_directory(path: str | None, daemons: Iterable[DaemonFacts]) -> DaemonFacts | None:
    if path is None:
        return None
    return next((one for one in daemons if _same_file(path, one.pipe_path)), None)


def _same_file(one: str, other: str) -> bool | None:
    """Whether two paths are one file; None: one of them cannot be looked at."""
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):
        return None


def _oom_kills(cgroup: bytes) -> int | None:
    """From memory.events of a process's control group (version 2, mounted at /sys/fs/cgroup)."""
    for line in cgroup.splitlines():
        if line.startswith(b"0::/"):
            folder = Path("/sys/fs/cgroup") / text_of(line[4:])
            for entry in (_read(folder / "memory.events") or b"").splitlines():
                key, _, value = entry.partition(b" ")
                if key == b"oom_kill" and value.isdigit():
                    return int(value)
    return None
