"""The directories of a daemon: where it is queried, who holds its lock, and where its logs are.

The daemon's environment names them. If the environment cannot be read, the kernel's list of Unix
sockets names the directories of all daemons, and the lock shows which daemon runs in which: neither
needs any right.
"""

import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.log_parser import control_line_of
from mps_exporter.mps.protocol_v3 import named_protocol
from mps_exporter.observations import DaemonFacts, ProcessFacts
from mps_exporter.sources.processes import Account, Processes, program_name, text_of
from mps_exporter.sources.resolve_in_root import MAX_PATH_BYTES, opened_directory, resolve_in_root

CONTROL_PROGRAM = "nvidia-cuda-mps-control"
MPS_COMM = b"nvidia-cuda-mps"  # Name of both MPS programs in the kernel: 15 bytes.

DEFAULT_LOG_DIRECTORY = "/var/log/nvidia-mps"
LOCK_FILE = "control_lock"
LEFT_FILES = ("control", "nvidia-cuda-mps-control.pid")
"""Files of a daemon in its pipe directory that remain when the daemon is killed."""

_ABSENT = frozenset(
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
"""Errors of a missing or forbidden path. Other errors are temporary, and prove nothing: no free
descriptor, an unreachable file server."""

_CONTROL_SOCKET = re.compile(rb"\S+ \S+ \S+ 00010000 0005 \S+ +\d+ (/.+)/control\n")
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock: type, whence, start, length, pid, and padding.

# ---------------------------------------------------------------------- arguments and sockets


_FOREGROUND = {"f", "foreground", "forground"}  # The last is the tool's spelling up to driver 580.
_FLAGS = {
    "daemon": {"d", "daemon", *_FOREGROUND},  # Without them, the process is a run of the tool.
    "foreground": _FOREGROUND,
    "multiuser": {"M", "m", "multiuser", "multiuser-server"},
    "static_partitioning": {"S", "static-partitioning"},
}
"""Flag of nvidia-cuda-mps-control -> its letters and words."""


def parse_daemon_flags(arguments: tuple[str, ...]) -> set[str]:
    """Return the keys of _FLAGS that are set; several letters may follow one dash, as in "-df"."""
    given = {word.lstrip("-") for word in arguments[1:] if word.startswith("-")}
    # Words may follow one dash, too, but are longer.
    short = (word for word in arguments[1:] if re.fullmatch(r"-[A-Za-z]{1,4}", word))
    given.update(*short)
    return {flag for flag, names in _FLAGS.items() if names & given}


def parse_control_sockets(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the directories of /proc/net/unix where a control daemon's socket may be bound.

        Num       RefCount Protocol Flags    Type St Inode Path
        ffff…:    00000002 00000000 00010000 0005 01 19357 /tmp/mps/control

    The socket listens (flag 00010000) for sequenced packets (type 0005) at a path that ends in
    "/control".
    """
    for line in lines:
        if line.endswith(b"/control\n") and (found := _CONTROL_SOCKET.fullmatch(line)):
            yield text_of(found[1])


# ---------------------------------------------------------------------- pipe directories


@dataclass(frozen=True, slots=True)
class PipeDirectory:
    """A pipe directory, and what the kernel reports of it."""

    root: str
    directory: str
    lock_tested: bool
    holder: int | None
    """The process that holds the lock (0: invisible), unless belongs_to() excludes its user."""
    identity: object  # The same for the same directory under any name.
    owner_uid: int | None = None  # None: the directory does not exist or cannot be seen.
    lock_owner_uid: int | None = None
    holder_is_root: bool = False  # Held by the host's root or the exporter's user.
    log_owners: tuple[int, ...] = ()
    """Users whose files are accepted as the logs of the daemon of a configured directory."""

    @property
    def exists(self) -> bool:
        return self.owner_uid is not None

    def belongs_to(self, uid: int | None, *, trusted: bool, strictly: bool) -> bool:
        """Return whether the daemon that runs here may be this user's.

        The lock file has mode 0666, so every user may take the lock in a directory of root's after
        its daemon has exited. The owner of the lock file counts, too (for /tmp), unless `strictly`:
        a configured directory must be the user's. The host's root (`trusted`) may use any
        directory, root of a container only its own.
        """
        if uid == 0 and trusted:
            return True
        if not self.exists:
            return not strictly or uid == os.geteuid()
        return uid is not None and (
            uid == self.owner_uid or (not strictly and uid == self.lock_owner_uid)
        )


class UnlessAbsent:
    """Suppresses only the errors of a missing, forbidden or impossible path."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, OSError):
            return error.errno in _ABSENT
        return isinstance(error, ValueError)


def directory_status(path: str, procfs: str) -> os.stat_result | None:
    """Return the status; None if missing or hidden. Raise OSError if unreadable now."""
    with UnlessAbsent(), opened_directory(path, procfs) as opened:
        return os.fstat(opened)
    return None


def lock_holder(path: str, directory: int | None = None) -> tuple[bool, int | None]:
    """Return (tested, holder) of the write lock on a file, queried with F_GETLK.

    A daemon holds the lock on control_lock while it lives, also while it hangs (measured). The
    holder is 0 if its PID is invisible here. A daemon does not take a lock of an open file
    description (PID -1); any user can take that lock. The file stays unmodified; only regular
    files are opened.
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
        reply = fcntl.fcntl(file, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        kind, _, _, _, pid = _FLOCK.unpack(reply)
        is_daemons = kind != fcntl.F_UNLCK and pid >= 0
    except OSError:
        return False, None
    else:
        return True, pid if is_daemons else None
    finally:
        os.close(file)


def is_left_over(path: str) -> bool:
    """Return whether a daemon has run in a directory and certainly no longer does."""
    try:
        tested, holder = lock_holder(f"{path}/{LOCK_FILE}")
        return tested and holder is None and any(Path(path, name).exists() for name in LEFT_FILES)
    except OSError:
        return False


# ---------------------------------------------------------------------- daemons


@dataclass(frozen=True, slots=True)
class Program:
    """A process of one of the two MPS programs, whose names begin alike."""

    process: ProcessFacts
    arguments: tuple[str, ...] = ()
    account: Account = None
    unread: bool = False  # Arguments and environment are not read yet: that may hang.

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def identity(self) -> tuple[int, float]:
        """PID and start time, which no other process shares."""
        return self.process.pid, self.process.start_time_seconds

    @property
    def is_control(self) -> bool:
        """Whether the program is the control daemon's (and the tool's), not the server's."""
        return program_name(self.arguments) == CONTROL_PROGRAM


DirectoryLookup = tuple[PipeDirectory, DaemonFacts] | Literal["none", "unplaced"]
"""A daemon with its pipe directory, not a daemon, or a daemon in an unknown directory."""


class DaemonDirectories:
    """Checks the directories that processes name, or may use. Every method may block."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def locate(
        self, program: Program, configured: Sequence[str], before: DirectoryLookup | None = None
    ) -> DirectoryLookup:
        """Find the directory where this process is the daemon; `before` is the last result."""
        uid = self._processes.sole_user(program.pid)
        place = self._place(program, configured, uid, before)
        if isinstance(place, str):
            return place
        environment = program.process.mps_environment
        flags = parse_daemon_flags(program.arguments)
        return place, DaemonFacts(
            pipe_directory=place.directory,
            log_directory=self._log_directory(program, place, before),
            root=place.root,
            owner_uid=uid,
            log_owners=() if uid is None else (uid,),
            directories_assumed=environment is None and place.holder != program.pid,
            log_directory_assumed=environment is None,
            process=program.process,
            foreground="foreground" in flags,
            multiuser="multiuser" in flags,
            static_partitioning="static_partitioning" in flags,
            protocol=named_protocol(program.arguments, environment),
            lock_holder_pid=place.holder,
            lock_tested=place.lock_tested,
        )

    def _place(
        self,
        program: Program,
        configured: Sequence[str],
        uid: int | None,
        before: DirectoryLookup | None,
    ) -> PipeDirectory | Literal["none", "unplaced"]:
        environment = program.process.mps_environment
        places, exists = list[PipeDirectory](), False
        trusted = program.account is None
        for place in self._pipe_directories(program, configured, uid, before):
            exists = exists or place.exists
            if place.belongs_to(uid, trusted=trusted, strictly=False):
                places.append(place)
                if place.holder == program.pid:
                    return place
        # The directories of an ending process can no longer be reached. Using the host's
        # directories here would let a user who gets the PID pose as the daemon.
        is_daemon = "daemon" in parse_daemon_flags(program.arguments)
        if not is_daemon or self._processes.is_ending(program.pid):
            return "none"
        # A daemon holds its lock, so it is not in a directory whose lock was tested and is free (a
        # holder of 0 is a process without visible PID). Nor is it in a missing directory if another
        # exists, or if its environment is unknown: the directory is then only assumed.
        anywhere = environment is not None and not exists
        for place in places:
            if (not place.lock_tested or place.holder == 0) and (anywhere or place.exists):
                return place
        return "none" if environment is not None else "unplaced"

    def check(self, root: str, directory: str, *, strictly: bool = False) -> PipeDirectory:
        """Check a pipe directory below a root ("" or /proc/PID/root).

        Raises:
            OSError: If it is unknown whether the directory exists.
        """
        path = root + directory
        found = lock_owner = None
        with UnlessAbsent(), opened_directory(path, self._processes.root) as opened:
            found = os.fstat(opened)
            with suppress(OSError):
                lock_owner = os.stat(LOCK_FILE, dir_fd=opened, follow_symlinks=False).st_uid
            tested, holder = lock_holder(LOCK_FILE, opened)
        if found is None:
            return PipeDirectory(root, directory, lock_tested=False, holder=None, identity=path)
        identity = found.st_dev, found.st_ino
        seen = PipeDirectory(root, directory, tested, holder, identity, found.st_uid, lock_owner)
        if not holder:
            return seen
        status = self._processes.status(holder)
        trusted = self._processes.account(holder, status) is None
        if status.uid is None:
            return seen
        # The file of another user's program may be in a file system that hangs: do not access it.
        belongs = seen.belongs_to(status.uid, trusted=trusted, strictly=strictly)
        if not belongs or self._processes.sole_user(holder, status) is None:
            return replace(seen, holder=None)
        return replace(seen, holder_is_root=trusted)

    def _pipe_directories(
        self,
        program: Program,
        configured: Sequence[str],
        uid: int | None,
        before: DirectoryLookup | None,
    ) -> Iterator[PipeDirectory]:
        environment = program.process.mps_environment
        if environment is not None:
            named = environment.get("CUDA_MPS_PIPE_DIRECTORY")
            for directory in (named,) if named else policy.DEFAULT_PIPE_DIRECTORIES:
                if self._may_be_named(directory, policy.MAX_PIPE_DIRECTORY_BYTES):
                    yield self.check(*self._reached(program.pid, directory))
            return
        if isinstance(before, tuple):
            yield self.check(before[0].root, before[0].directory)
        sockets = self._socket_directories(program, uid)
        for directory in chain(policy.DEFAULT_PIPE_DIRECTORIES, configured, sockets):
            yield self.check("", directory)
            root, inside = self._reached(program.pid, directory)
            if root:
                yield self.check(root, inside)

    def _socket_directories(self, program: Program, uid: int | None) -> Iterator[str]:
        """Yield the directories of control sockets, those with a socket of this user first.

        Any user can bind more sockets than are checked, and by many names of the same file.
        """
        own, others = dict[object, str](), dict[object, str]()
        most = policy.MAX_USERS_SOCKETS if program.account else policy.MAX_SOCKETS
        path = f"{self._processes.root}/{program.pid}/net/unix"
        with UnlessAbsent(), open(path, "rb") as lines:  # noqa: PTH123
            for directory in parse_control_sockets(islice(lines, most)):
                known, identity = others, object()
                with suppress(OSError, ValueError):
                    found = os.lstat(f"{directory}/control")
                    known = own if found.st_uid == uid else others
                    identity = found.st_dev, found.st_ino
                if len(known) < policy.MAX_SOCKET_DIRECTORIES:
                    known.setdefault(identity, directory)
        yield from islice(chain(own.values(), others.values()), policy.MAX_SOCKET_DIRECTORIES)

    def _may_be_named(self, directory: str, longest: int = MAX_PATH_BYTES) -> bool:
        inside_procfs = f"{directory}/".startswith(f"{self._processes.root}/")
        return len(os.fsencode(directory)) <= longest and not inside_procfs

    def _log_directory(
        self, program: Program, place: PipeDirectory, before: DirectoryLookup | None
    ) -> str:
        """Return the log directory; "" if unknown.

        If the environment cannot be read, the default directory may be another daemon's: it is this
        daemon's only if the log there has lines of this process.
        """
        environment = program.process.mps_environment
        directory = (environment or {}).get("CUDA_MPS_LOG_DIRECTORY") or DEFAULT_LOG_DIRECTORY
        if not self._may_be_named(directory):
            return ""
        root = place.root
        if root:
            with UnlessAbsent():
                directory = resolve_in_root(root, directory)
        else:
            root, directory = self._reached(program.pid, directory)
        path = root + directory
        if environment is None:
            known = isinstance(before, tuple) and before[1].log_directory
            if not known and not _has_lines_of(program.process, path, self._processes.root):
                return ""
        return directory if place.root else path

    def _reached(self, pid: int, directory: str) -> tuple[str, str]:
        """Return the path prefix and the name under which a process's directory can be opened.

        The prefix is "" if the directory has the same name on the host, or if the process's root
        cannot be entered.
        """
        procfs = self._processes.root
        root = f"{procfs}/{pid}/root"
        with UnlessAbsent():
            inside = resolve_in_root(root, directory)
            there = directory_status(root + inside, procfs)
            here = directory_status(directory, procfs)
            if there is not None and (here is None or not os.path.samestat(there, here)):
                return root, inside
        return "", directory


def _has_lines_of(process: ProcessFacts, log_directory: str, procfs: str) -> bool:
    """Return whether the end of control.log has lines of this daemon, which contain its PID.

    A log that belongs to another user, or is older than the process, is not read.
    """
    since = process.start_time_seconds - policy.CLOCK_STEP_SECONDS
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    data = b""
    with suppress(OSError, ValueError), opened_directory(log_directory, procfs) as directory:
        file = os.open("control.log", flags, dir_fd=directory)
        try:
            found = os.fstat(file)
            own = stat.S_ISREG(found.st_mode) and found.st_uid == process.uid
            if own and found.st_mtime >= since:
                start = max(found.st_size - policy.LOG_TAIL_BYTES, 0)
                data = os.pread(file, policy.LOG_TAIL_BYTES, start)
        finally:
            os.close(file)
    return control_line_of(process.own_pid).search(data) is not None
