"""What only the doctor reads: one process, a daemon that fails to start servers, and leftovers.

Leftovers are what MPS left on a host. A search through the open files of all processes is too
expensive for every scrape. Only what the caller may read is read; everything else is None or left
out. Paths are resolved in the process's own root with the rights of its user: links that lead out
of that root are followed inside it.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import (
    ClosedFolder,
    DaemonConditions,
    DaemonFacts,
    Leftovers,
    MpsDirectory,
    OpenFiles,
    ProcessFacts,
    ProcessView,
)
from mps_exporter.sources.control_groups import (
    CGROUPS,
    frozen_group,
    group_file,
    oom_kills,
    tracer_of,
)
from mps_exporter.sources.daemon_programs_and_directories import MPS_COMM, is_left_over
from mps_exporter.sources.processes import Processes, bytes_of, text_of

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
"""Variables of which DCGM's diagnostics warn, and two that slow CUDA (its documentation)."""

_PASS, _WRITE = 0o1, 0o2
"""Bits of a mode that a client or a server needs: of each folder on the path; of the socket."""
_MAX_LINKS = 40
_MAX_NAMES = 512

PROMISES = (
    ("run/nvidia/mps/*/*/pipe", "NVIDIA's device plugin for Kubernetes"),
    ("var/lib/kubelet/plugins/gpu.nvidia.com/mps/*/pipe", "NVIDIA's DRA driver for Kubernetes"),
)
"""Pipe directories that exist as long as a daemon should run there, and their creators."""

UNITS = "etc/systemd/system/*.wants/*.service"
_START = re.compile(rb"^ExecStart\S*=.*nvidia-cuda-mps-control", re.MULTILINE)
_DIRECTORY = re.compile(rb"CUDA_MPS_PIPE_DIRECTORY=[\"']?([^\s\"']+)")
_OPEN_FILES = re.compile(rb"^Max open files\s+(\d+)", re.MULTILINE)

# ---------------------------------------------------------------------- one process


def view_process(pid: int, daemons: Iterable[DaemonFacts], procfs: str = "/proc") -> ProcessView:
    """Read one process, and which daemon it uses; never fails: unreadable facts are None."""
    base, processes = Path(procfs, str(pid)), Processes(procfs)
    found, unknown = processes.identify([pid])
    facts = found.get(pid)
    if facts is None:
        return ProcessView(pid, present=pid in unknown)
    if processes.arguments(pid) is None:
        return ProcessView(
            pid, uid=facts.uid, state=facts.state, command=facts.name, reading_hangs=True
        )
    status, variables = processes.status(pid), facts.mps_environment
    debug = _debug_variables(bytes_of(f"{base}/environ"))
    user = _User(status.uid, status.group | status.supplementary_groups)
    named = (variables or {}).get("CUDA_MPS_PIPE_DIRECTORY")
    directory = None if variables is None else named or policy.DEFAULT_PIPE_DIRECTORIES[0]
    path = None if directory is None else _absolute(base, directory)
    walk = _walk_as(str(base / "root"), path, user) if path else _Walk()
    if not named and walk.end is None:
        walk = _Walk()  # the default directory need not exist
    on_host = bool(_is_same_file(str(base / "root"), "/"))
    daemon = _same_directory(walk.end, daemons)
    return ProcessView(
        pid,
        uid=status.uid,
        state=facts.state,
        command=facts.name,
        pipe_directory=directory,
        names_directory=bool(named),
        path_error=walk.error,
        closed_folder=walk.closed if on_host else None,
        daemon_directory=daemon.pipe_directory if daemon is not None else None,
        leftover=walk.end is not None and is_left_over(walk.end),
        hidden=processes.hidden,
        own_proc=_own_proc(facts, processes) if len(facts.namespace_pids) > 1 else None,
        mps_environment=variables,
        debug_variables=tuple(sorted(debug)),
        missing_libraries=tuple(
            name
            for name, file in sorted(debug.items())
            if on_host and name.endswith("_PATH") and file.startswith("/") and _is_missing(file)
        ),
        oom_kills=oom_kills(facts.cgroup, CGROUPS),
        parent_pid=facts.parent_pid,
        children=tuple(child for child in processes.children(pid) if child != os.getpid()),
        tracer=tracer_of(pid, facts.state, procfs),
        frozen_group=frozen_group(facts.cgroup, CGROUPS),
        shared_memory=facts.shared_memory,
        default_mounted=facts.default_mounted,
        profile=profile_with("CUDA_MPS_PIPE_DIRECTORY", named) if named and on_host else "",
        closed_socket=_closed_socket(walk.end, user) if walk.end is not None else "",
    )


def view_daemon(facts: DaemonFacts, uids: Iterable[int], procfs: str = "/proc") -> DaemonConditions:
    """Read a control daemon whose servers for these users cannot start; never fails.

    A server has its client's user, the daemon's group, and none of the client's groups. On an H200
    servers of root's daemon ended at once below root's folder of mode 0701 or 0705, through which
    the client passed, and below a folder of mode 0710 that was open to the client's group; they ran
    with 0711, and with 0710 for a client in root's group; a closed path to the logs did no harm.
    Whether a server keeps the daemon's supplementary groups was not measured: a folder that is open
    to these groups is not reported as closed.
    """
    if facts.process is None:
        return DaemonConditions()
    pid = facts.process.pid
    status = Processes(procfs).status(pid)
    closed: dict[int, ClosedFolder] = {}
    for uid in filter(None, uids):
        user = _User(uid, status.group, status.supplementary_groups)
        walk = _walk_as(f"{procfs}/{pid}/root", facts.pipe_directory, user)
        if walk.closed is not None:
            closed[uid] = walk.closed
    cgroup = facts.process.cgroup
    limit = group_file(cgroup, "memory.max", CGROUPS).strip()
    return DaemonConditions(
        closed, oom_kills(cgroup, CGROUPS), int(limit) if limit.isdigit() else None
    )


def _absolute(base: Path, directory: str) -> str | None:
    """Return a directory's path in a process's root; a relative one is below its cwd."""
    if directory.startswith("/"):
        return directory
    try:
        root, here = (base / "root").readlink(), (base / "cwd").readlink()
    except OSError:
        return None
    return f"/{here.relative_to(root) if here.is_relative_to(root) else here}/{directory}"


def profile_with(name: str, value: str, folder: Path = Path("/etc")) -> str:
    """Return a file that sets a variable to this value at each login; "" if none."""
    setting = re.compile(rf"\b{name}=[\"']?{re.escape(value)}[\"']?\s*(?:[#;]|$)", re.MULTILINE)
    files = (folder / "environment", folder / "profile", *sorted(folder.glob("profile.d/*.sh")))
    for file in islice(files, policy.MAX_DIRECTORY_ENTRIES):
        with suppress(OSError, UnicodeDecodeError):
            if setting.search(file.read_text()):
                return str(file)
    return ""


def _closed_socket(directory: str, user: _User) -> str:
    """Return the mode of a control socket to which a user may not connect; "" if unseen."""
    path = f"{directory}/control"
    with suppress(OSError):
        entry = Path(path).lstat()
        if stat.S_ISSOCK(entry.st_mode) and _is_closed(path, entry, _WRITE, user):
            return f"{stat.S_IMODE(entry.st_mode):04o}"
    return ""


def _debug_variables(environment: bytes) -> dict[str, str]:
    found = (entry.partition(b"=") for entry in environment.split(b"\0"))
    names = ((text_of(name), text_of(value)) for name, _, value in found)
    return {name: value for name, value in names if name in DEBUG_VARIABLES}


def _is_missing(path: str) -> bool:
    """Return whether a file certainly does not exist."""
    try:
        Path(path).stat()
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError)
    return False


def _own_proc(facts: ProcessFacts, processes: Processes) -> bool | None:
    """Return whether a process's /proc shows its PID namespace; None if unknown.

    There, its own PID must have its own start time. Start times are world-readable. Comparing
    namespaces would need trace permission for both processes, and process 1 of a host may have a
    capability that even root in a container lacks.
    """
    seen = Processes(f"{processes.root}/{facts.pid}/root/proc").start_ticks([facts.own_pid])
    started = processes.start_ticks([facts.pid]).get(facts.pid)
    known = started is not None and facts.own_pid in seen
    return seen[facts.own_pid] == started if known else None


class _User(NamedTuple):
    """A user, and groups that the user has, or may have."""

    uid: int | None
    groups: frozenset[int]
    possible_groups: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Walk:
    """The path to a directory, walked as one user."""

    error: str | None = None  # Why the user cannot reach the directory; None if not seen.
    closed: ClosedFolder | None = None  # The folder that is closed to the user.
    end: str | None = None  # Path of the directory on the host; None if not reached.


def _walk_as(root: str, path: str, user: _User) -> _Walk:
    """Walk to a directory in this root as this user."""
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
            target = os.readlink(here) if stat.S_ISLNK(entry.st_mode) else None  # noqa: PTH115
        except (OSError, ValueError) as error:
            # A directory that is closed to the exporter may be open to the process.
            closed = isinstance(error, PermissionError)
            return _Walk(None if closed else f"/{'/'.join((*done, name))} is not there")
        if target is None:
            done.append(name)
            folder = f"/{'/'.join(done)}"
            if not stat.S_ISDIR(entry.st_mode):
                return _Walk(f"{folder} is not a directory")
            if _is_closed(here, entry, _PASS, user):
                mode = f"{stat.S_IMODE(entry.st_mode):04o}"
                why = f"{folder} is closed to user {user.uid} (mode {mode})"
                return _Walk(why, ClosedFolder(folder, why, entry.st_uid))
            continue
        links += 1
        if links > _MAX_LINKS:
            return _Walk(f"/{'/'.join((*done, name))} is a loop of links")
        if target.startswith("/"):
            done.clear()
        names.extendleft(reversed(target.split("/")))
    return _Walk(end="/".join((root, *done)))


def _is_closed(path: str, entry: os.stat_result, needed: int, user: _User) -> bool:
    """Return whether the mode denies a user the needed bit, as owner, group or others.

    False for root, and if an access list may permit access.
    """
    bits = entry.st_mode
    if entry.st_uid == user.uid:
        bits >>= 6
    elif entry.st_gid in user.groups:
        bits >>= 3
    elif entry.st_gid in user.possible_groups:
        bits |= bits >> 3
    if not user.uid or bits & needed:
        return False
    with suppress(OSError):
        return "system.posix_acl_access" not in os.listxattr(path, follow_symlinks=False)
    return True


def _same_directory(path: str | None, daemons: Iterable[DaemonFacts]) -> DaemonFacts | None:
    """Return the daemon whose pipe directory this is (by device and inode), or None.

    A client of a v3 daemon names its server's or its namespace's directory below the daemon's,
    perhaps the only part that its container has.
    """
    if path is None:
        return None
    below = ["", *("/".join(Path(path).parts[-depth:]) for depth in (1, 2))]
    for daemon in daemons:
        names = below if daemon.protocol == "3" else below[:1]
        if any(_is_same_file(path, f"{daemon.pipe_path}/{name}") for name in names):
            return daemon
    return None


def _is_same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):
        return False


# ---------------------------------------------------------------------- leftovers


def find_leftovers(daemons: Iterable[DaemonFacts], procfs: str = "/proc") -> Leftovers:
    """Search the processes of the whole host, on which these daemons run."""
    processes = Processes(procfs)
    programs: dict[int, ProcessFacts] = {}
    with suppress(OSError):
        programs, _ = processes.identify(processes.find_program(MPS_COMM))
    return Leftovers(
        tuple(one for one in programs.values() if one.state == "Z"),
        tuple(
            one
            for one in programs.values()
            if one.state != "Z" and one.name.endswith("-server") and one.parent_pid not in programs
        ),
        open_files=open_files(_running(daemons), procfs),
        holders=tuple(processes.identify(_driver_holders(procfs))[0].values()),
        hidden=processes.hidden,
    )


def find_directories(daemons: Iterable[DaemonFacts], root: str = "/") -> tuple[MpsDirectory, ...]:
    """Search for pipe directories where a daemon has run or should run, and no daemon runs."""
    running, found = _running(daemons), _left_directories(Path(root))
    return tuple(one for one in found if not _is_served(root, one, running))


def _running(daemons: Iterable[DaemonFacts]) -> list[DaemonFacts]:
    return [one for one in daemons if one.process is not None]


def open_files(daemons: Iterable[DaemonFacts], procfs: str = "/proc") -> tuple[OpenFiles, ...]:
    found = []
    for daemon in daemons:
        for server in daemon.servers:
            base, count = Path(procfs, str(server.pid)), None
            with suppress(OSError):
                count = sum(1 for _ in (base / "fd").iterdir())
            if limit := _OPEN_FILES.search(bytes_of(f"{base}/limits")):
                found.append(OpenFiles(server.pid, daemon.pipe_directory, int(limit[1]), count))
    return tuple(found)


def _left_directories(root: Path) -> Iterator[MpsDirectory]:
    for name in policy.DEFAULT_PIPE_DIRECTORIES:
        path = root / name[1:]
        if is_left_over(str(path)):
            yield from _left_directory(root, path, "")
    for pattern, promised_by in PROMISES:
        for path in islice(root.glob(pattern), policy.MAX_DIRECTORY_ENTRIES):
            yield from _left_directory(root, path, promised_by)
    for unit in islice(root.glob(UNITS), policy.MAX_DIRECTORY_ENTRIES):
        with suppress(OSError):
            text = unit.read_bytes()
            if _START.search(text):
                named = _DIRECTORY.search(text)
                name = os.fsdecode(named[1]) if named else policy.DEFAULT_PIPE_DIRECTORIES[0]
                yield MpsDirectory(name, unit.stat().st_uid, f"the enabled unit {unit.name}")


def _left_directory(root: Path, path: Path, promised_by: str) -> Iterator[MpsDirectory]:
    with suppress(OSError):
        yield MpsDirectory(f"/{path.relative_to(root)}", path.stat().st_uid, promised_by)


def _is_served(root: str, one: MpsDirectory, running: Iterable[DaemonFacts]) -> bool:
    path = str(Path(root, one.path[1:]))
    return any(
        # An ordinary user can have a directory of any name in a mount namespace.
        (one.path == daemon.pipe_directory and not daemon.limited)
        or _is_same_file(path, daemon.pipe_path)
        for daemon in running
    )


def _driver_holders(procfs: str) -> Iterator[int]:
    """Yield PIDs with an open file of the driver, except this process's, which exits soon."""
    end = time.monotonic() + policy.DRIVER_HOLDERS_TIMEOUT_SECONDS
    own, bases = "", list[Path]()
    with suppress(OSError):
        bases = sorted(base for base in Path(procfs).iterdir() if base.name.isdecimal())
        own = os.readlink(f"{procfs}/self")  # noqa: PTH115
    for base in bases:
        if time.monotonic() > end:
            return
        with suppress(OSError):
            if base.name != own and _has_driver_open(base):
                yield int(base.name)


def _has_driver_open(base: Path) -> bool:
    files = islice((base / "fd").iterdir(), policy.MAX_DIRECTORY_ENTRIES)
    return any(str(file.readlink()).startswith("/dev/nvidia") for file in files)
