"""Facts about processes, read from /proc by PID and kept while they stay true.

That a process is gone is said by the kernel alone: ENOENT, or ESRCH while it is being read. Another
error, as when no file descriptor is left for a moment, says nothing of it: it is raised, or told.

Paths are plain text here: pathlib interns each part of a path, and Python 3.12.0 to 3.12.6 keep an
interned string until the program ends (python/cpython#113993; 38 MB of 500,000 PIDs).
"""

from __future__ import annotations

import errno
import os
import pwd
import stat as stat_bits
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mps_exporter.observations import ProcessFacts
from mps_exporter.sources.procfs_parse import (
    ProcessStat,
    parse_arguments,
    parse_boot_time,
    parse_hidepid,
    parse_mps_environment,
    parse_namespace,
    parse_passwd,
    parse_stat,
    parse_status,
    program_name,
)

HOST_USERS = "/etc/passwd"

_REFRESH_SECONDS = 60.0
_CHUNK_BYTES = 1 << 16
_LINE_BYTES = 1 << 12
_MAX_BYTES = 1 << 22
_MAX_ARGUMENT_BYTES = 1 << 13
"""A daemon's flags and a program's name are at the beginning."""
_ENDED = frozenset("ZX")
_GONE = (errno.ENOENT, errno.ESRCH)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Ours or the host's, and soon over: what is asked is there all the same."""
_CLOCK_STEP_SECONDS = 2.0
"""The boot time is told in whole seconds, and moves a little where the clock is being adjusted."""


@dataclass(slots=True)
class _CachedFacts:
    """Facts, and what must be unchanged for them to be true still."""

    start_ticks: int
    comm: str
    read_at: float
    facts: ProcessFacts
    arguments: tuple[str, ...]


class Processes:
    """The processes below one mount of procfs.

    A new start time or name makes the facts void; control group and user are read again every
    minute. A process keeps its first start time also when the clock is set, as its log lines do.

    Args:
        root: Where procfs is mounted.
        passwd: Names of users. The host's own /etc/passwd stands for all that the host knows, so
            users of a directory service have names too.
        clock: Monotonic time.
    """

    def __init__(
        self,
        root: str = "/proc",
        passwd: str = HOST_USERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = root
        self._clock = clock
        self._users = _UserDatabase(passwd, clock)
        self._known: dict[int, _CachedFacts] = {}
        self._hides_at = float("-inf")
        self._hiding = False
        self._boot_time = float("-inf")
        self._boot_time_is_fresh = False
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")

    def all(self) -> Iterator[int]:
        """Return all PIDs.

        Raises:
            OSError: The directory cannot be listed.
        """
        with os.scandir(self.root) as entries:
            yield from (int(entry.name) for entry in entries if entry.name.isdecimal())

    def running(self, comm: bytes) -> list[int]:
        """Return the PIDs of a program, by the first bytes of its name.

        Raises:
            OSError: /proc cannot be listed, or names in it cannot be read now.
        """
        listed = set(self.all())
        # Facts of thousands of short processes would be megabytes until they are too old.
        self._known = {pid: known for pid, known in self._known.items() if pid in listed}
        return sorted(pid for pid in listed if self.comm(pid) == comm)

    def comm(self, pid: int) -> bytes:
        """Read the first 15 bytes of a program's name: the cheapest that tells programs apart.

        (The arguments would take a lock that a process stuck in the kernel may hold.)
        """
        return (_read_line(f"{self.root}/{pid}/comm") or b"")[:-1]

    def arguments(self, pid: int) -> tuple[str, ...]:
        """Return a process's arguments, as they were when its facts were read; empty: none."""
        known = self._known.get(pid)
        return self._read_arguments(pid) if known is None else known.arguments

    def _read_arguments(self, pid: int) -> tuple[str, ...]:
        raw = self._read(pid, "cmdline", _MAX_ARGUMENT_BYTES) or b""
        return parse_arguments(raw + b"\0" if len(raw) >= _MAX_ARGUMENT_BYTES else raw)

    def user_and_parent(self, pid: int) -> tuple[int | None, int | None]:
        """Read whose process it is, and its parent; None: not to be told."""
        status = parse_status(self._read(pid, "status") or b"")
        return status.real_uid, status.parent_pid

    def sole_user(self, pid: int) -> int | None:
        """Return the user whose word a process's arguments and environment are; None: not known.

        -1: several users'. Anybody may start a set-user-ID program of root's (su) by the name of
        MPS's, with an environment of his choice.
        """
        status = parse_status(self._read(pid, "status") or b"")
        with suppress(OSError):
            mode = os.stat(f"{self.root}/{pid}/exe").st_mode  # noqa: PTH116
            if mode & (stat_bits.S_ISUID | stat_bits.S_ISGID):
                return -1
        return -1 if status.several_uids else status.uid

    def is_ending(self, pid: int) -> bool:
        """Whether a process has ended, or has begun to.

        The kernel closes its files, and with them its locks, and takes its root directory from it
        some time before it is a zombie (do_exit).
        """
        try:
            os.readlink(f"{self.root}/{pid}/root")  # noqa: PTH115
        except OSError as error:
            return error.errno in _GONE
        return False

    def sockets(self, pid: int) -> bytes:
        """Read the Unix sockets of a process's network namespace; no right is needed for that."""
        return self._read(pid, "net/unix") or b""

    def identify(self, pids: Iterable[int]) -> tuple[dict[int, ProcessFacts], dict[int, OSError]]:
        """Return the facts of processes that are there, and why others cannot be read now."""
        found, unknown = dict[int, ProcessFacts](), dict[int, OSError]()
        self._boot_time_is_fresh = False
        for pid in pids:
            try:
                facts = self.facts(pid)
            except OSError as error:
                unknown[pid] = error
            else:
                if facts is not None:
                    found[pid] = facts
        self._drop_old()
        return found, unknown

    def facts(self, pid: int) -> ProcessFacts | None:
        """Return the facts of one process; None: it is not there.

        Facts that did not change are the same object as the last time.

        Raises:
            OSError: Whether it is there cannot be told.
        """
        line = _read_line(f"{self.root}/{pid}/stat", hidden=False) if pid > 0 else None
        if line is None and pid > 0 and self._hides():
            raise PermissionError(errno.EACCES, "hidden by the mount option hidepid")
        stat = None if line is None else parse_stat(line)
        known = self._known.get(pid)
        if stat is None:
            self._known.pop(pid, None)
            return None
        if known is None or not self._is_current(known, stat):
            known = self._known[pid] = self._refreshed(pid, stat, known)
        facts = known.facts
        if facts.state != stat.state or facts.parent_pid != stat.parent_pid:
            facts = known.facts = replace(facts, state=stat.state, parent_pid=stat.parent_pid)
        return facts

    def _refreshed(self, pid: int, stat: ProcessStat, known: _CachedFacts | None) -> _CachedFacts:
        same = known is not None and known.start_ticks == stat.start_ticks
        before = known if same else None
        try:
            return self._read_facts(pid, stat, before)
        except OSError:
            if before is None:
                raise
            return before

    def _hides(self) -> bool:
        """Whether processes that we may not see look as if they were not there.

        The first process is always there, and it is root's. Where it is not to be seen, and the
        mount says so, that another is not to be seen means nothing.
        """
        now = self._clock()
        if now - self._hides_at >= _REFRESH_SECONDS:
            self._hides_at = now
            self._hiding = not Path(f"{self.root}/1").exists() and parse_hidepid(
                _read_file(f"{self.root}/self/mounts") or b""
            )
        return self._hiding

    def _is_current(self, known: _CachedFacts, stat: ProcessStat) -> bool:
        return (
            (known.start_ticks, known.comm) == (stat.start_ticks, stat.comm)
            and (self._clock() - known.read_at < _REFRESH_SECONDS)
        ) or (known.start_ticks == stat.start_ticks and stat.state in _ENDED)

    def _read_facts(self, pid: int, stat: ProcessStat, before: _CachedFacts | None) -> _CachedFacts:
        status = parse_status(self._read(pid, "status") or b"")
        arguments = self._read_arguments(pid)
        environment = None if stat.state in _ENDED else self._read(pid, "environ")
        cgroup = self._read(pid, "cgroup")
        facts = ProcessFacts(
            pid=pid,
            start_time_seconds=before.facts.start_time_seconds
            if before is not None
            else self._booted_at() + stat.start_ticks / self._ticks_per_second,
            uid=status.uid,
            user=self._users.name(status.uid),
            name=program_name(arguments) if arguments and arguments[0] else stat.comm,
            namespace_pids=status.namespace_pids,
            pid_namespace=self._namespace(pid),
            cgroup=None if cgroup is None else cgroup.decode("utf-8", "backslashreplace"),
            mps_environment=None if environment is None else parse_mps_environment(environment),
        )
        return _CachedFacts(stat.start_ticks, stat.comm, self._clock(), facts, arguments)

    def _booted_at(self) -> float:
        """When the host started, by its clock of now (Unix time).

        It is read once in a look at processes, and only when one of them is new.
        """
        if not self._boot_time_is_fresh:
            self._boot_time_is_fresh = True
            found = parse_boot_time(_read_file(f"{self.root}/stat") or b"")
            boot_time = _own_boot_time() if found is None else found
            if abs(boot_time - self._boot_time) > _CLOCK_STEP_SECONDS:
                self._boot_time = boot_time
        return self._boot_time

    def _namespace(self, pid: int) -> int | None:
        with suppress(OSError):
            return parse_namespace(os.readlink(f"{self.root}/{pid}/ns/pid"))  # noqa: PTH115
        return None

    def _read(self, pid: int, name: str, most_bytes: int = _MAX_BYTES) -> bytes | None:
        return _read_file(f"{self.root}/{pid}/{name}", most_bytes)

    def _drop_old(self) -> None:
        oldest = self._clock() - 2 * _REFRESH_SECONDS
        self._known = {pid: known for pid, known in self._known.items() if known.read_at > oldest}


def shows_own_pids(root: str) -> bool:
    """Whether a mount of procfs numbers processes as this program's PID namespace does."""
    with suppress(OSError):
        return os.readlink(f"{root}/self") == str(os.getpid())  # noqa: PTH115
    return False


def _own_boot_time() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _read_file(path: str, most_bytes: int = _MAX_BYTES) -> bytes | None:
    """Read a file of /proc; None: it is not there, or not for us.

    Raises:
        OSError: Not now.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts, size = [], 0
            while size < most_bytes and (part := os.read(file, min(_CHUNK_BYTES, most_bytes))):
                parts.append(part)
                size += len(part)
            return b"".join(parts)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _SHORTAGE:
            raise
        return None


def _read_line(path: str, *, hidden: bool = True) -> bytes | None:
    """Read a file of /proc that is one line; the kernel gives such a one in the first read.

    Hundreds of them are read at each collection: a second read, to see the end, would double that.

    Args:
        path: Of a file that every process has, so without it there is no process: None.
        hidden: Whether a process that we may not see counts as one that is not there.

    Raises:
        OSError: Whether it is there cannot be told.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, _LINE_BYTES)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _GONE or (hidden and error.errno in _FORBIDDEN):
            return None
        raise


class _UserDatabase:
    """Names of users, looked up again every minute."""

    def __init__(self, passwd: str, clock: Callable[[], float]) -> None:
        self._passwd = passwd
        self._clock = clock
        self._names: dict[int, str | None] = {}
        self._read_at = float("-inf")

    def name(self, uid: int | None) -> str | None:
        if uid is None:
            return None
        if self._clock() - self._read_at >= _REFRESH_SECONDS:
            self._names = {**parse_passwd(_read_file(self._passwd) or b"")}
            self._read_at = self._clock()
        if uid not in self._names:
            self._names[uid] = _directory_name(uid) if self._passwd == HOST_USERS else None
        return self._names[uid]


def _directory_name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return None
