"""The directories of a daemon: where it is queried, who holds its lock, and where its logs are.

Its environment names them. Where that may not be read, the kernel's list of Unix sockets names the
directories of all daemons, and the lock tells whose is whose: neither needs any right.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mps_exporter.mps.log_parser import control_line_of
from mps_exporter.mps.protocol_v3 import named_protocol
from mps_exporter.observations import DaemonFacts, ProcessFacts
from mps_exporter.sources.processes import Processes
from mps_exporter.sources.procfs_parse import (
    pack_lock_query,
    parse_control_sockets,
    parse_daemon_flags,
    parse_lock_reply,
    program_name,
)
from mps_exporter.sources.resolve_in_root import MAX_PATH_BYTES, opened_directory, resolve_in_root

LOCK_FILE = "control_lock"

_NOT_THERE = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ESRCH,
    }
)
"""It is not there, or not for us. Other errors (no descriptor is left, a file server is gone) are
over some time, and say nothing of it."""


@dataclass(frozen=True, slots=True)
class PipeDirectory:
    """A pipe directory, and what the kernel tells of it."""

    root: str
    directory: str
    lock_tested: bool
    holder: int | None
    """Who holds the lock; only one whose right to it is plain, see belongs_to()."""
    identity: object
    """The same for the same directory, whatever it is called."""
    owner_uid: int | None = None
    """None: it is not there, or cannot be seen."""
    lock_owner_uid: int | None = None

    @property
    def exists(self) -> bool:
        """It can be seen."""
        return self.owner_uid is not None

    def belongs_to(self, uid: int | None, *, strictly: bool) -> bool:
        """Whether a daemon of this user may be what runs here.

        Its lock file has mode 0666, so anybody may take the lock in a directory of root's whose
        daemon is gone. In a directory that all may write to (/tmp), the lock file is the owner's.

        Args:
            uid: None: not known.
            strictly: The directory itself must be the user's, as for one that was configured.
        """
        if uid == 0:
            return True
        if not self.exists:
            return not strictly or uid == os.geteuid()
        return uid is not None and (
            uid == self.owner_uid or (not strictly and uid == self.lock_owner_uid)
        )


class UnlessNotThere:
    """Suppresses the errors which say that a path is not there, or not for us, and no others."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, OSError):
            return error.errno in _NOT_THERE
        return isinstance(error, ValueError)


def look_at(
    root: str,
    directory: str,
    procfs: str,
    uid_of: Callable[[int], int | None],
    *,
    strictly: bool = False,
) -> PipeDirectory:
    """Look at a pipe directory.

    Args:
        root: Prefix under which it is reached: "" or /proc/PID/root.
        directory: Its name.
        procfs: Where procfs is mounted.
        uid_of: Whose process a PID is; None: it cannot be told.
        strictly: See PipeDirectory.belongs_to.

    Raises:
        OSError: Whether it is there cannot be told now.
    """
    path = root + directory
    found = lock_owner = None
    with UnlessNotThere(), opened_directory(path, procfs) as opened:
        found = os.fstat(opened)
        with suppress(OSError):
            lock_owner = os.stat(LOCK_FILE, dir_fd=opened, follow_symlinks=False).st_uid
        tested, holder = lock_holder(LOCK_FILE, opened)
    if found is None:
        return PipeDirectory(root, directory, lock_tested=False, holder=None, identity=path)
    identity = found.st_dev, found.st_ino
    seen = PipeDirectory(root, directory, tested, None, identity, found.st_uid, lock_owner)
    if holder:
        uid = uid_of(holder)
        if uid is not None and not seen.belongs_to(uid, strictly=strictly):
            return seen
    return PipeDirectory(root, directory, tested, holder, identity, found.st_uid, lock_owner)


def identity_of(path: str, procfs: str) -> tuple[int, int] | None:
    """Return the identity of a directory; None and errors: see _status()."""
    found = _status(path, procfs)
    return None if found is None else (found.st_dev, found.st_ino)


def owner_of(path: str, procfs: str) -> int | None:
    """Return the owner of a directory; None and errors: see _status()."""
    found = _status(path, procfs)
    return None if found is None else found.st_uid


def _status(path: str, procfs: str) -> os.stat_result | None:
    """Return the status of a directory; None: it is absent, or cannot be seen.

    Raises:
        OSError: The status cannot be read now.
    """
    with UnlessNotThere(), opened_directory(path, procfs) as opened:
        return os.fstat(opened)
    return None


def lock_holder(path: str, directory: int | None = None) -> tuple[bool, int | None]:
    """Ask the kernel who holds a write lock on a file, without touching it: (tested, holder).

    A daemon holds the one on control_lock while it lives, also while it hangs (measured). The
    holder is 0 when its PID does not show here. Files that are no regular files are left alone.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        found = os.stat(path, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            return False, None
        file = os.open(path, flags, dir_fd=directory)
    except (OSError, ValueError):
        return False, None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return False, None
        answer = fcntl.fcntl(file, fcntl.F_GETLK, pack_lock_query(fcntl.F_WRLCK))
        return True, parse_lock_reply(answer, fcntl.F_UNLCK)
    except OSError:
        return False, None
    finally:
        os.close(file)


LEFT_FILES = ("control", "nvidia-cuda-mps-control.pid")
"""What a daemon has in its pipe directory, and leaves there when it is killed."""


def is_left_over(path: str) -> bool:
    """Whether a daemon has run in a directory, and surely none does: its lock is free."""
    try:
        tested, holder = lock_holder(f"{path}/{LOCK_FILE}")
        return tested and holder is None and any(Path(path, name).exists() for name in LEFT_FILES)
    except OSError:
        return False


CONTROL_PROGRAM = "nvidia-cuda-mps-control"
DEFAULT_PIPE_DIRECTORIES = ("/tmp/nvidia-mps", "/run/nvidia-mps")  # noqa: S108 - where MPS has it
"""The second is that of newer daemons which run as root."""
DEFAULT_LOG_DIRECTORY = "/var/log/nvidia-mps"

MAX_SOCKET_DIRECTORIES = 256
_TAIL_BYTES = 1 << 16
_CLOCK_STEP_SECONDS = 2.0
"""A process's start time is known to a tick and to the boot time's second."""


@dataclass(frozen=True, slots=True)
class Program:
    """A process of one of MPS's two programs (whose names begin alike)."""

    process: ProcessFacts
    arguments: tuple[str, ...]

    @property
    def pid(self) -> int:
        """As it shows here."""
        return self.process.pid

    @property
    def identity(self) -> tuple[int, float]:
        """PID and start time: no other process has both."""
        return self.process.pid, self.process.start_time_seconds

    @property
    def is_control(self) -> bool:
        """Whether it runs the control daemon's program, not the server's."""
        return program_name(self.arguments) == CONTROL_PROGRAM


@dataclass(frozen=True, slots=True)
class FoundDaemon:
    """A process that is a daemon, and its directories."""

    program: Program
    uid: int
    """Whose daemon it is; -1: not known, or of a process with several users."""
    place: PipeDirectory
    log_directory: str
    writes_the_default_log: bool
    assumed: bool

    def facts(self, servers: Sequence[Program]) -> DaemonFacts:
        """Say what it is, with its children."""
        flags = parse_daemon_flags(self.program.arguments)
        return DaemonFacts(
            pipe_directory=self.place.directory,
            log_directory=self.log_directory,
            root=self.place.root,
            owner_uid=None if self.uid < 0 else self.uid,
            log_owners=() if self.uid < 0 else (self.uid,),
            directories_assumed=self.assumed,
            log_directory_assumed=self.program.process.mps_environment is None,
            process=self.program.process,
            foreground=flags.foreground,
            multiuser=flags.multiuser
            or any(parse_daemon_flags(server.arguments).multiuser for server in servers),
            static_partitioning=flags.static_partitioning,
            protocol=named_protocol(self.program.arguments, self.program.process.mps_environment),
            lock_holder_pid=self.place.holder,
            lock_tested=self.place.lock_tested,
            servers=tuple(server.process for server in servers),
        )


Look = FoundDaemon | Literal["none", "unplaced"]
"""What is found of a process: a daemon, none, or one of which nothing tells where it is."""


class DaemonDirectories:
    """Looks at the directories that processes name, or may have. Every method may block."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._writers = set[Hashable]()
        """Daemons that wrote the log in the default directory."""

    def forget(self, programs: Sequence[Program]) -> None:
        """Drop what is remembered of all processes but these."""
        here = {one.identity for one in programs}
        self._writers &= here

    def look(self, program: Program, configured: Sequence[str]) -> Look:
        """Look where this process is the daemon. Runs on a thread of its own."""
        uid = self._processes.sole_user(program.pid)
        uid = -1 if uid is None else uid
        environment = program.process.mps_environment
        candidates = list(self._pipe_directories(program, configured))
        places = [place for place in candidates if place.belongs_to(uid, strictly=False)]
        held = [place for place in places if place.holder == program.pid]
        if not held and not parse_daemon_flags(program.arguments).daemon:
            return "none"
        # A daemon holds its lock, so it is not where somebody tested the lock and nobody has it.
        # (0: somebody whose PID does not show here.) Nor is it where nothing is, if one of the two
        # default directories is there: a daemon that is ending has released its lock, and whose it
        # was cannot be read any more.
        anywhere = environment is not None and not any(place.exists for place in candidates)
        free = [
            place
            for place in places
            if (not place.lock_tested or place.holder == 0) and (anywhere or place.exists)
        ]
        if not held and self._processes.is_ending(program.pid):
            # Its directories cannot be reached any more, and the host's of the same names are not
            # its own. (Taken for them, a user who got the PID was taken for the daemon.)
            return "none"
        if not held and not free:
            return "none" if environment is not None else "unplaced"
        place = (held or free)[0]
        log_directory, default = self._log_directory(program, place, uid)
        return FoundDaemon(
            program=program,
            uid=uid,
            place=place,
            log_directory=log_directory,
            writes_the_default_log=default,
            assumed=environment is None and not held,
        )

    def pipe_directory(self, root: str, directory: str, *, strictly: bool = False) -> PipeDirectory:
        """Return what there is in a directory, seen from a root."""
        procfs = self._processes.root
        return look_at(root, directory, procfs, self._processes.sole_user, strictly=strictly)

    def _pipe_directories(
        self, program: Program, configured: Sequence[str]
    ) -> Iterator[PipeDirectory]:
        """Return the pipe directories that the daemon may have, the likely ones first."""
        environment = program.process.mps_environment
        if environment is not None:
            named = environment.get("CUDA_MPS_PIPE_DIRECTORY")
            for directory in (named,) if named else DEFAULT_PIPE_DIRECTORIES:
                if self._may_be_named(directory):
                    yield self.pipe_directory(*self._reached(program.pid, directory))
            return
        sockets = parse_control_sockets(self._processes.sockets(program.pid))
        candidates = dict.fromkeys((*DEFAULT_PIPE_DIRECTORIES, *configured, *sockets))
        for directory in list(candidates)[:MAX_SOCKET_DIRECTORIES]:
            yield self.pipe_directory("", directory)
            root, inside = self._reached(program.pid, directory)
            if root:
                yield self.pipe_directory(root, inside)

    def _may_be_named(self, directory: str) -> bool:
        """Whether a process may call this its directory: not another process's, nor endless."""
        inside_procfs = f"{directory}/".startswith(f"{self._processes.root}/")
        return len(os.fsencode(directory)) <= MAX_PATH_BYTES and not inside_procfs

    def _log_directory(self, program: Program, place: PipeDirectory, uid: int) -> tuple[str, bool]:
        """Return the log directory, "" when it cannot be told; and whether it has the default one.

        Where the environment may not be read, the default may well be another daemon's: it is this
        one's only when the log there has lines that this process wrote.
        """
        process = program.process
        environment = process.mps_environment
        directory = (environment or {}).get("CUDA_MPS_LOG_DIRECTORY") or DEFAULT_LOG_DIRECTORY
        if not self._may_be_named(directory):
            return "", False
        root = place.root
        if root:
            with UnlessNotThere():
                directory = resolve_in_root(root, directory)
        else:
            root, directory = self._reached(process.pid, directory)
        if environment is None and program.identity not in self._writers:
            if not self._was_written_by(root + directory, process):
                return "", False
            self._writers.add(program.identity)
        procfs = self._processes.root
        there = identity_of(root + directory, procfs)
        default = (
            parse_daemon_flags(program.arguments).foreground is False
            and there is not None
            and there == identity_of(DEFAULT_LOG_DIRECTORY, procfs)
            and uid in (0, owner_of(DEFAULT_LOG_DIRECTORY, procfs))
        )
        return (directory if place.root else root + directory), default

    def _reached(self, pid: int, directory: str) -> tuple[str, str]:
        """Return the prefix under which a process's directory is reached from here, and its name.

        No prefix is needed when the same directory has the same name here, or when nothing better
        can be reached.
        """
        procfs = self._processes.root
        root = f"{procfs}/{pid}/root"
        with UnlessNotThere():
            inside = resolve_in_root(root, directory)
            there = identity_of(root + inside, procfs)
            if there is not None and there != identity_of(directory, procfs):
                return root, inside
        return "", directory

    def _was_written_by(self, log_directory: str, process: ProcessFacts) -> bool:
        """Tell whether its control.log was written by this daemon: lines carry the writer's PID."""
        data = _tail(log_directory, self._processes.root, process)
        return control_line_of(process.own_pid).search(data) is not None


def _tail(log_directory: str, procfs: str, process: ProcessFacts) -> bytes:
    """Read the end of a control.log; nothing when it is another user's, or older than a process."""
    since = process.start_time_seconds - _CLOCK_STEP_SECONDS
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with suppress(OSError, ValueError), opened_directory(log_directory, procfs) as directory:
        file = os.open("control.log", flags, dir_fd=directory)
        try:
            found = os.fstat(file)
            own = stat.S_ISREG(found.st_mode) and found.st_uid == process.uid
            if own and found.st_mtime >= since:
                return os.pread(file, _TAIL_BYTES, max(found.st_size - _TAIL_BYTES, 0))
        finally:
            os.close(file)
    return b""
