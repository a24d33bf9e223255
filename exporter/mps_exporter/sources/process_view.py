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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mps_exporter.observations import ClosedFolder, DaemonConditions, DaemonFacts, ProcessView
from mps_exporter.sources.control_groups import CGROUPS, frozen_group, tracer_of
from mps_exporter.sources.daemon_directories import DEFAULT_PIPE_DIRECTORIES, is_left_over
from mps_exporter.sources.procfs_parse import (
    ProcessStat,
    parse_arguments,
    parse_mps_environment,
    parse_stat,
    parse_status,
    program_name,
    text_of,
)

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

_PASS, _WRITE = 0o1, 0o2
"""What a client and a server need of each folder on the way, and of the socket, as bits of a mode.
"""
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
    arguments = parse_arguments(_read_or_none(base / "cmdline") or b"")
    command = program_name(arguments) if arguments else found.comm if found else ""
    root = str(base / "root")
    variables, debug = None, dict[str, str]()
    # Of a process that has ended and not been reaped, an empty text can be read.
    environment = _read_or_none(base / "environ")
    if environment:
        variables, debug = parse_mps_environment(environment), _debug_variables(environment)
    named = bool(variables and variables.get("CUDA_MPS_PIPE_DIRECTORY"))
    directory, way, groups = None, _Way(), frozenset().union(*_groups_of_process(base))
    if variables is not None:
        directory = variables.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORIES[0]
        path = _absolute(base, directory)
        way = _walk_as(root, path, status.uid, groups) if path is not None else _Way()
        if not named and way.end is None:
            way = _Way()  # nobody promised that it is there
    on_host = bool(_is_same_file(root, "/"))
    daemon = _same_directory(way.end, daemons)
    cgroup = _read_or_none(base / "cgroup") or b""
    state = found.state if found is not None else ""
    return ProcessView(
        pid,
        uid=status.uid,
        state=state,
        command=command,
        pipe_directory=directory,
        names_directory=named,
        path_error=way.error,
        closed_folder=way.closed if on_host else None,
        daemon_directory=daemon.pipe_directory if daemon is not None else None,
        leftover=way.end is not None and is_left_over(way.end),
        own_proc=_own_proc(base, status.namespace_pids[-1], found)
        if found is not None and len(status.namespace_pids) > 1
        else None,
        mps_environment=variables,
        debug_variables=tuple(sorted(debug)),
        missing_libraries=tuple(
            sorted(
                name
                for name, value in debug.items()
                if on_host and name.endswith("_PATH") and value[:1] == "/" and _missing(value)
            )
        ),
        oom_kills=_oom_kills(cgroup),
        parent_pid=status.parent_pid,
        tracer=tracer_of(pid, state, procfs),
        frozen_group=frozen_group(text_of(cgroup), CGROUPS),
        closed_socket=_closed_socket(way.end, status.uid, groups) if way.end is not None else "",
    )


def view_daemon(facts: DaemonFacts, uids: Iterable[int], procfs: str = "/proc") -> DaemonConditions:
    """Look at a control daemon whose servers for these users cannot start; never fails.

    A server has its client's user, the daemon's group, and none of the client's groups. On an H200
    servers of root's daemon ended at once below root's folder of mode 0701 or 0705, through which
    the client passed, and below one of mode 0710 that was open to the client's group; they ran with
    0711, and with 0710 for a client in root's group. Whether it keeps the daemon's supplementary
    groups was not measured: what these may pass is not called closed.
    """
    if facts.process is None:
        return DaemonConditions()
    base = Path(procfs) / str(facts.process.pid)
    group, more = _groups_of_process(base)
    closed: dict[int, ClosedFolder] = {}
    for uid in uids:
        for directory in (facts.pipe_directory, facts.log_directory):
            if uid and directory:
                way = _walk_as(str(base / "root"), directory, uid, group, more)
                if way.closed is not None:
                    closed.setdefault(uid, way.closed)
    cgroup = _read_or_none(base / "cgroup") or b""
    limit = (_memory_file(cgroup, "memory.max") or b"").strip()
    return DaemonConditions(closed, _oom_kills(cgroup), int(limit) if limit.isdigit() else None)


def _absolute(base: Path, directory: str) -> str | None:
    """Give the path of a directory in the root of a process, as seen from its working directory."""
    if directory.startswith("/"):
        return directory
    try:
        root, here = (base / "root").readlink(), (base / "cwd").readlink()
    except OSError:
        return None
    return f"/{here.relative_to(root) if here.is_relative_to(root) else here}/{directory}"


def _closed_socket(directory: str, uid: int | None, groups: frozenset[int]) -> str:
    """Give the mode of a control socket to which a user may not connect; "": none is seen."""
    path = f"{directory}/control"
    with suppress(OSError):
        entry = Path(path).lstat()
        open_to = _mode_bits_for(entry, uid or 0, groups, frozenset()) & _WRITE
        if stat.S_ISSOCK(entry.st_mode) and uid and not open_to and not _has_access_list(path):
            return f"{stat.S_IMODE(entry.st_mode):04o}"
    return ""


def _read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _debug_variables(environment: bytes) -> dict[str, str]:
    found = (entry.partition(b"=") for entry in environment.split(b"\0"))
    names = ((text_of(name), text_of(value)) for name, _, value in found)
    return {name: value for name, value in names if name in DEBUG_VARIABLES}


def _missing(path: str) -> bool:
    """Whether a file is surely not there."""
    try:
        Path(path).stat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _own_proc(base: Path, own_pid: int, itself: ProcessStat) -> bool | None:
    """Whether a process in a PID namespace of its own sees that namespace's /proc.

    There its own number must be itself, by the time at which it started: that anybody may read.
    (Namespaces could be compared only by one who may trace both processes, and process 1 of a host
    may have a right that even root in a container lacks.)
    """
    seen = base / "root" / "proc"
    try:
        (seen / "stat").stat()
        there = parse_stat((seen / str(own_pid) / "stat").read_bytes())
    except OSError as error:
        gone = error.errno in (errno.ENOENT, errno.ESRCH)
        return False if gone and (seen / "stat").exists() else None
    return None if there is None else there.start_ticks == itself.start_ticks


def _groups_of_process(base: Path) -> tuple[frozenset[int], frozenset[int]]:
    """The group and the supplementary groups of a process."""
    found: dict[bytes, frozenset[int]] = {}
    for line in (_read_or_none(base / "status") or b"").splitlines():
        key, _, value = line.partition(b":")
        found[key] = frozenset(int(word) for word in value.split() if word.isdigit())
    return found.get(b"Gid", frozenset()), found.get(b"Groups", frozenset())


@dataclass(frozen=True, slots=True)
class _Way:
    """The way to a directory, for one user."""

    error: str | None = None
    """Why the user cannot get there; None: nothing in the way is seen."""
    closed: ClosedFolder | None = None
    """The folder that is closed to the user."""
    end: str | None = None
    """Where the directory is from here; None: it is not there, or the caller may not look."""


def _walk_as(
    root: str,
    path: str,
    uid: int | None,
    groups: frozenset[int],
    perhaps: frozenset[int] = frozenset(),
) -> _Way:
    """Walk to a directory in this root as this user.

    Args:
        root: Where the walk begins.
        path: The directory, as it is called there.
        uid: The user.
        groups: Those that it is in.
        perhaps: Those that it may be in.
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
            return _Way(None if closed else f"/{'/'.join((*done, name))} is not there")
        if target is None:
            done.append(name)
            folder = f"/{'/'.join(done)}"
            if not stat.S_ISDIR(entry.st_mode):
                return _Way(f"{folder} is not a directory")
            closed_to = uid and not _mode_bits_for(entry, uid, groups, perhaps) & _PASS
            if closed_to and not _has_access_list(here):
                mode = f"{stat.S_IMODE(entry.st_mode):04o}"
                why = f"{folder} is closed to user {uid} (mode {mode})"
                return _Way(why, ClosedFolder(folder, why, entry.st_uid))
            continue
        links += 1
        if links > _MAX_LINKS:
            return _Way(f"/{'/'.join((*done, name))} is a loop of links")
        if target.startswith("/"):
            done.clear()
        names.extendleft(reversed(target.split("/")))
    return _Way(end="/".join((root, *done)))


def _mode_bits_for(
    entry: os.stat_result, uid: int, groups: frozenset[int], perhaps: frozenset[int]
) -> int:
    """What a mode lets a user do: the bits of owner, group or others, whichever apply."""
    if entry.st_uid == uid:
        return entry.st_mode >> 6
    if entry.st_gid in groups:
        return entry.st_mode >> 3
    return entry.st_mode >> 3 | entry.st_mode if entry.st_gid in perhaps else entry.st_mode


def _has_access_list(path: str) -> bool:
    """Whether more than the mode says who may pass; what it says is not read."""
    try:
        return "system.posix_acl_access" in os.listxattr(path, follow_symlinks=False)
    except OSError:
        return False


def _same_directory(path: str | None, daemons: Iterable[DaemonFacts]) -> DaemonFacts | None:
    if path is None:
        return None
    # A client of an MPS v3 daemon names its server's directory below it, or its namespace's, which
    # may be all that its container has of it.
    inside = ["", *("/".join(Path(path).parts[-depth:]) for depth in (1, 2))]
    return next(
        (
            one
            for one in daemons
            if any(
                _is_same_file(path, f"{one.pipe_path}/{below}")
                for below in inside[: 3 if one.protocol == "3" else 1]
            )
        ),
        None,
    )


def _is_same_file(one: str, other: str) -> bool | None:
    """Whether two paths are one file; None: one of them cannot be looked at."""
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):
        return None


def _memory_file(cgroup: bytes, name: str) -> bytes | None:
    """A file of a process's control group (version 2, mounted at /sys/fs/cgroup)."""
    for line in cgroup.splitlines():
        if line.startswith(b"0::/"):
            return _read_or_none(Path(CGROUPS, text_of(line[4:]), name))
    return None


def _oom_kills(cgroup: bytes) -> int | None:
    for entry in (_memory_file(cgroup, "memory.events") or b"").splitlines():
        key, _, value = entry.partition(b" ")
        if key == b"oom_kill" and value.isdigit():
            return int(value)
    return None
