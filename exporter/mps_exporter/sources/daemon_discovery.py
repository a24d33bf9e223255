"""Finds control daemons in /proc, and the directories where they can be reached.

A daemon is a process of the program nvidia-cuda-mps-control that was started as one (-d or -f), or
that holds the write lock on its directory's control_lock. The tool that asks questions is the same
program; it does neither. Daemons are found with their directories through their environment. Where
that may not be read, the kernel's list of Unix sockets names the directories of all daemons, and
the lock tells whose is whose: neither needs any right.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from mps_exporter.mps.log_parser import control_line_of
from mps_exporter.observations import DaemonFacts, ProcessFacts, ProcfsObservation
from mps_exporter.sources.processes import HOST_USERS, Processes
from mps_exporter.sources.procfs_parse import (
    COMM_LENGTH,
    pack_lock_query,
    parse_control_sockets,
    parse_daemon_flags,
    parse_lock_reply,
)
from mps_exporter.sources.resolve_in_root import resolve_in_root

CONTROL_PROGRAM = "nvidia-cuda-mps-control"
SERVER_PROGRAM = "nvidia-cuda-mps-server"

DEFAULT_PIPE_DIRECTORIES = ("/tmp/nvidia-mps", "/run/nvidia-mps")  # noqa: S108 - where MPS has it
"""The second is that of newer daemons which run as root."""
DEFAULT_LOG_DIRECTORY = "/var/log/nvidia-mps"

_COMM = CONTROL_PROGRAM[:COMM_LENGTH].encode()
_LOCK_FILE = "control_lock"
_TAIL_BYTES = 1 << 16
_CLOCK_STEP_SECONDS = 2.0
"""A process's start time is known to a tick and to the boot time's second."""


@dataclass(frozen=True, slots=True)
class _Program:
    """A process of one of MPS's two programs (whose names begin alike)."""

    process: ProcessFacts
    arguments: tuple[str, ...]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_control(self) -> bool:
        return bool(self.arguments) and PurePosixPath(self.arguments[0]).name == CONTROL_PROGRAM


@dataclass(frozen=True, slots=True)
class _PipeDirectory:
    """A pipe directory as it is reached from here, and who holds the lock in it."""

    root: str
    directory: str
    lock_tested: bool
    holder: int | None
    identity: object
    """The same for the same directory, whatever it is called."""
    exists: bool


@dataclass(frozen=True, slots=True)
class _FoundDaemon:
    program: _Program
    place: _PipeDirectory
    servers: tuple[_Program, ...]
    assumed: bool

    def facts(self, log_directory: str) -> DaemonFacts:
        flags = parse_daemon_flags(self.program.arguments)
        return DaemonFacts(
            pipe_directory=self.place.directory,
            log_directory=log_directory,
            root=self.place.root,
            directories_assumed=self.assumed,
            log_directory_assumed=self.program.process.mps_environment is None,
            process=self.program.process,
            foreground=flags.foreground,
            multiuser=flags.multiuser
            or any(parse_daemon_flags(server.arguments).multiuser for server in self.servers),
            static_partitioning=flags.static_partitioning,
            lock_holder_pid=self.place.holder,
            lock_tested=self.place.lock_tested,
            servers=tuple(server.process for server in self.servers),
        )


class DaemonDiscovery:
    """What /proc tells about control daemons and processes. Every method may block.

    Args:
        root: Where procfs is mounted.
        passwd: File with the names of users.
        now: Unix time.
        clock: Monotonic time.
    """

    def __init__(
        self,
        root: str = "/proc",
        passwd: str = HOST_USERS,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = Processes(root, passwd, clock)
        self._now = now
        self._found: tuple[DaemonFacts, ...] = ()
        self._unplaced: list[int] = []
        self._with_root: frozenset[tuple[int, float]] = frozenset()
        self._writers: set[tuple[int, float]] = set()
        """Daemons that wrote the log in the default directory."""
        self._default_log_of: str | None = None
        """The pipe directory of the last daemon that had its log there."""

    def discover(
        self, configured: Sequence[tuple[str, str | None]], *, search: bool
    ) -> tuple[DaemonFacts, ...]:
        """Give the daemons that run, and those that were configured, sorted by name.

        Args:
            configured: (pipe directory, log directory or None), included even when nothing runs.
            search: Also give daemons that nobody configured.

        Raises:
            OSError: /proc cannot be listed, or the daemons in it cannot be read now.
        """
        programs = self._programs()
        self._unplaced = []
        running = {(one.process.pid, one.process.start_time_seconds) for one in programs}
        self._writers &= running
        entries: dict[object, DaemonFacts] = {}
        for pipe_directory, log_directory in configured:
            pipe_directory_ = _pipe_directory("", pipe_directory)
            entries.setdefault(
                pipe_directory_.identity, _configured_daemon(pipe_directory_, log_directory)
            )
        logs = dict(configured)
        for program in programs:
            daemon = self._daemon(program, programs, [pipe for pipe, _ in configured])
            if daemon is None:
                continue
            known = entries.get(daemon.place.identity)
            facts = _merged(known, daemon.facts(self._log_directory(daemon)), logs)
            if _writes_the_default_log(facts):
                self._default_log_of = facts.pipe_directory
            if known is not None or search:
                entries[daemon.place.identity] = facts
        own = [self._drop_foreign_default_log(facts, logs) for facts in entries.values()]
        self._found, self._with_root = _with_unique_names(own, self._with_root)
        return self._found

    def observe(self, pids: Iterable[int]) -> ProcfsObservation:
        """Give the daemons found last, and the facts of these processes."""
        wanted = set(pids)
        processes, unknown = self._processes.identify(wanted)
        return ProcfsObservation(
            at=self._now(),
            daemons=self._found,
            processes=processes,
            gone=tuple(sorted(wanted - processes.keys() - unknown.keys())),
            error=self._unplaced_error() or _unread_error(unknown),
            unreadable_environments=sum(
                facts.mps_environment is None and facts.state not in "ZX"
                for facts in processes.values()
            ),
        )

    def _programs(self) -> list[_Program]:
        """Give all processes of MPS's programs, by PID."""
        facts, unknown = self._processes.identify(sorted(self._processes.running(_COMM)))
        for error in unknown.values():
            raise error
        return [_Program(process, self._processes.arguments(pid)) for pid, process in facts.items()]

    def _daemon(
        self, program: _Program, programs: Sequence[_Program], configured: Sequence[str]
    ) -> _FoundDaemon | None:
        """Give the daemon that this process is; None: it is none, or cannot be told where."""
        controls = {other.pid for other in programs if other.is_control}
        if not program.is_control or program.process.parent_pid in controls:
            return None  # a daemon's child that has not become a server yet
        started_as_one = parse_daemon_flags(program.arguments).daemon
        places = list(self._pipe_directories(program, configured))
        held = [
            pipe_directory_ for pipe_directory_ in places if pipe_directory_.holder == program.pid
        ]
        if not held and not started_as_one:
            return None
        readable = program.process.mps_environment is not None
        # A daemon holds its lock, so it is not where somebody tested the lock and nobody has it.
        free = [
            pipe_directory_
            for pipe_directory_ in places
            if readable or (pipe_directory_.exists and not pipe_directory_.lock_tested)
        ]
        if not held and not free:
            self._unplaced.append(program.pid)
            return None
        servers = (
            other
            for other in programs
            if other.process.parent_pid == program.pid and not other.is_control
        )
        return _FoundDaemon(
            program=program,
            place=(held or free)[0],
            servers=tuple(servers),
            assumed=not readable and not held,
        )

    def _pipe_directories(
        self, program: _Program, configured: Sequence[str]
    ) -> Iterator[_PipeDirectory]:
        """Give the pipe directories that the daemon may have, the likely ones first."""
        environment = program.process.mps_environment
        if environment is not None:
            named = environment.get("CUDA_MPS_PIPE_DIRECTORY")
            for directory in (named,) if named else DEFAULT_PIPE_DIRECTORIES:
                yield _pipe_directory(*self._reached(program.pid, directory))
            return
        sockets = parse_control_sockets(self._processes.sockets(program.pid))
        for directory in dict.fromkeys((*DEFAULT_PIPE_DIRECTORIES, *configured, *sockets)):
            yield _pipe_directory("", directory)
            root, inside = self._reached(program.pid, directory)
            if root:
                yield _pipe_directory(root, inside)

    def _log_directory(self, daemon: _FoundDaemon) -> str:
        """Give the log directory; "" when it cannot be told.

        Where the environment may not be read, the default may well be another daemon's: it is this
        one's only when the log there has lines that this process wrote.
        """
        process = daemon.program.process
        environment = process.mps_environment
        directory = (environment or {}).get("CUDA_MPS_LOG_DIRECTORY") or DEFAULT_LOG_DIRECTORY
        root = daemon.place.root
        if root:
            directory = resolve_in_root(root, directory)
        else:
            root, directory = self._reached(process.pid, directory)
        name_of = (process.pid, process.start_time_seconds)
        if environment is None and name_of not in self._writers:
            if not _was_written_by(f"{root}{directory}/control.log", process):
                return ""
            self._writers.add(name_of)
        return directory if daemon.place.root else root + directory

    def _reached(self, pid: int, directory: str) -> tuple[str, str]:
        """Give the prefix under which a process's directory is reached from here, and its name.

        No prefix is needed when the same directory has the same name here, or when nothing better
        can be reached.
        """
        root = f"{self._processes.root}/{pid}/root"
        inside = resolve_in_root(root, directory)
        there = _identity(root + inside)
        if there is not None and there != _identity(directory):
            return root, inside
        return "", directory

    def _drop_foreign_default_log(
        self, facts: DaemonFacts, logs: Mapping[str, str | None]
    ) -> DaemonFacts:
        """Give a daemon that does not run no default log that another one writes, or wrote."""
        guessed = facts.process is None and logs.get(facts.pipe_directory) is None
        if guessed and self._default_log_of not in {None, facts.pipe_directory}:
            return replace(facts, log_directory="")
        return facts

    def _unplaced_error(self) -> str | None:
        if not self._unplaced:
            return None
        pids = ", ".join(str(pid) for pid in self._unplaced)
        return (
            f"control daemon with PID {pids}: its environment cannot be read, and nothing else"
            " tells its pipe directory; name it with --mps.pipe-directory, or give the exporter"
            " CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
        )


def _unread_error(unknown: Mapping[int, OSError]) -> str | None:
    """Say of whom nothing can be said now.

    (Processes that are hidden from us, as by the mount option hidepid=1, are no failure.)
    """
    errors = {
        pid: error for pid, error in unknown.items() if not isinstance(error, PermissionError)
    }
    if not errors:
        return None
    why = sorted({error.strerror or str(error) for error in errors.values()})
    return f"{len(errors)} processes cannot be read in /proc: {', '.join(why).lower()}"


def _identity(path: str) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        found = Path(path).stat()
        return found.st_dev, found.st_ino
    return None


def _pipe_directory(root: str, directory: str) -> _PipeDirectory:
    path = root + directory
    tested, holder = lock_holder(f"{path}/{_LOCK_FILE}")
    identity = _identity(path)
    return _PipeDirectory(root, directory, tested, holder, identity or path, identity is not None)


def _was_written_by(log: str, process: ProcessFacts) -> bool:
    """Tell whether a control.log was written by this daemon: its lines carry the writer's PID."""
    data = _tail(log, since=process.start_time_seconds)
    pid = process.namespace_pids[-1] if process.namespace_pids else process.pid
    return control_line_of(pid).search(data) is not None


def _tail(path: str, since: float) -> bytes:
    """Read the end of a regular file; nothing when it was not written to since then."""
    with suppress(OSError, ValueError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_mtime >= since - _CLOCK_STEP_SECONDS:
                return os.pread(file, _TAIL_BYTES, max(found.st_size - _TAIL_BYTES, 0))
        finally:
            os.close(file)
    return b""


def lock_holder(path: str) -> tuple[bool, int | None]:
    """Ask the kernel who holds a write lock on a file, without touching it: (tested, holder).

    A daemon holds the one on control_lock while it lives, also while it hangs (measured). The
    holder is 0 when its PID does not show here. Files that are no regular files are left alone.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        if not stat.S_ISREG(Path(path).lstat().st_mode):
            return False, None
        file = os.open(path, flags)
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


def _configured_daemon(pipe_directory_: _PipeDirectory, log_directory: str | None) -> DaemonFacts:
    return DaemonFacts(
        pipe_directory=pipe_directory_.directory,
        log_directory=log_directory or DEFAULT_LOG_DIRECTORY,
        configured=True,
        lock_holder_pid=pipe_directory_.holder,
        lock_tested=pipe_directory_.lock_tested,
    )


def _merged(
    known: DaemonFacts | None, found: DaemonFacts, logs: Mapping[str, str | None]
) -> DaemonFacts:
    """Put together what is known of one directory: its configuration, and processes that use it."""
    if known is None:
        return found
    if known.process is not None and not _holds_the_lock(found):
        return known
    if not known.configured:
        return found
    log_directory = logs.get(known.pipe_directory)
    return replace(
        found,
        pipe_directory=known.pipe_directory,
        log_directory=log_directory or (found.log_directory and found.log_path),
        root="",
        configured=True,
        directories_assumed=False,
        log_directory_assumed=found.log_directory_assumed and log_directory is None,
    )


def _writes_the_default_log(daemon: DaemonFacts) -> bool:
    if daemon.process is None or daemon.foreground or not daemon.log_directory:
        return False
    there = _identity(daemon.log_path)
    return there is not None and there == _identity(DEFAULT_LOG_DIRECTORY)


def _holds_the_lock(daemon: DaemonFacts) -> bool:
    """Of two processes that claim one directory, the one that holds its lock is the daemon."""
    return daemon.process is not None and daemon.lock_holder_pid == daemon.process.pid


def _with_unique_names(
    daemons: Iterable[DaemonFacts], with_root: frozenset[tuple[int, float]]
) -> tuple[tuple[DaemonFacts, ...], frozenset[tuple[int, float]]]:
    """Give them sorted, with the root in the name of those whose name is taken, and who these are.

    Who has it once (with_root), keeps it: when the daemon with the short name goes away, nobody
    else is to be taken for it.
    """
    named: dict[str, DaemonFacts] = {}
    keep = set()
    for daemon in sorted(daemons, key=_seniority):
        unique = daemon
        process = daemon.process
        name_of = (process.pid, process.start_time_seconds) if process else None
        if daemon.pipe_directory in named or (daemon.root and name_of in with_root):
            unique = replace(
                daemon, pipe_directory=daemon.pipe_path, log_directory=daemon.log_path, root=""
            )
            if name_of:
                keep.add(name_of)
        named.setdefault(unique.pipe_directory, unique)
    return tuple(named[name] for name in sorted(named)), frozenset(keep)


def _seniority(daemon: DaemonFacts) -> tuple[bool, bool, float, int]:
    process = daemon.process
    return (
        not daemon.configured,
        bool(daemon.root),
        process.start_time_seconds if process else 0.0,
        process.pid if process else 0,
    )
