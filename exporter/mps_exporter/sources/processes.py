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
    parse_newest_pid,
    parse_passwd,
    parse_stat,
    parse_status,
    program_name,
)

HOST_USERS = "/etc/passwd"

_REFRESH_SECONDS = 60.0
_TURNS = 4
"""A process that ran another program is looked at again once in so many listings..."""
_TURN_SECONDS = 2.5
"""...and, where listings are closer than this, once in so many times this. (Each name that is read
lets another thread have the interpreter three times.)"""
_MAX_NEW_READS = 2
"""One that is new is looked at in its first listings: it may be between fork and exec."""
_MAX_NEW_PIDS = 64
"""Where more PIDs than this were given out since the last look, /proc is listed."""
_MAX_PID = 1 << 22
"""The kernel's PID_MAX_LIMIT."""
_Started = tuple[range, range]
_NONE_STARTED = range(0), range(0)
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

    A PID that was reused shows by its start time, a program that was replaced (exec) mostly by its
    name; the rest (control group, user) is read again every minute. A process that vanishes while
    it is read is absent.

    The kernel counts start times from the boot, and the time of the boot moves when the clock is
    set. A process keeps the start time with which it was seen first, and a new one gets the
    clock's: so both agree with what was logged when they started.

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
        self._listings = self._turn = 0
        self._turned_at = float("-inf")
        self._first_listed: dict[int, int] = {}
        self._running: frozenset[int] = frozenset()
        """The programs that were found last."""
        self._shows_newest_pid: bool | None = None
        self._newest_pid: int | None = None
        self._new: frozenset[int] = frozenset()
        """Those that the last look was the first to see."""
        self._hides_at = float("-inf")
        self._hiding = False
        self._boot_time = float("-inf")
        self._boot_time_is_fresh = False
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")

    def all(self) -> Iterator[int]:
        """Give all PIDs.

        Raises:
            OSError: The directory cannot be listed.
        """
        with os.scandir(self.root) as entries:
            yield from (int(entry.name) for entry in entries if entry.name.isdecimal())

    def running(self, comm: bytes) -> list[int]:
        """Give the PIDs of a program, by the first bytes of its name.

        A host of this size has thousands of processes, and all but a few stay what they were. Those
        are read by turns, once in a few listings: one that becomes another program late in its life
        is found a few listings later (10 s, if that is longer). Between turns /proc is not even
        listed where it tells the newest PID: only those given out since the last look are new. (A
        listing takes 1.3 to 4 µs for each process; 4,000 took 5.5 ms at each scrape.)

        Raises:
            OSError: /proc cannot be listed, or names in it cannot be read now.
        """
        newest = self._read_newest_pid()  # first: of those that start meanwhile the next look tells
        started = self._started_until(newest)
        is_turn = self._clock() - self._turned_at >= _TURN_SECONDS
        if is_turn or started is None or sum(map(len, started)) > _MAX_NEW_PIDS:
            found = self._listed(comm, started or _NONE_STARTED, is_turn=is_turn)
        else:
            found = self._looked_at(comm, started)
        self._newest_pid, self._running = newest, frozenset(found)
        return sorted(found)

    def _listed(self, comm: bytes, started: _Started, *, is_turn: bool) -> set[int]:
        """Look for a program in a listing of all processes."""
        self._listings += 1
        now, before, first_listed = self._listings, self._first_listed, dict[int, int]()
        found = set[int]()
        if is_turn:
            self._turn, self._turned_at = self._turn + 1, self._clock()
        for pid in self.all():
            is_new = pid in started[0] or pid in started[1]  # its PID may have been another's
            first = first_listed[pid] = now if is_new else before.get(pid, now)
            is_due = now - first < _MAX_NEW_READS or (is_turn and not (pid + self._turn) % _TURNS)
            if not is_due:
                if pid in self._running:
                    found.add(pid)  # if it is another one now, its facts will tell
            elif self.comm(pid) == comm:
                found.add(pid)
        self._first_listed = first_listed
        self._new = frozenset(pid for pid, first in first_listed.items() if first == now)
        # Facts of thousands of short processes would be megabytes until they are too old.
        for gone in self._known.keys() - first_listed.keys():
            del self._known[gone]
        return found

    def _looked_at(self, comm: bytes, started: _Started) -> set[int]:
        """Look for a program among those that ran it, and those that are new.

        A PID may be a thread's here. Threads are not listed, but are found by their numbers.
        """
        new = frozenset[int]().union(*started)
        same = self._running - new
        found = {
            pid
            for pid in self._running | self._new | new
            if self.comm(pid) == comm and (pid in same or self._is_process(pid))
        }
        for gone in same - found:
            self._first_listed.pop(gone, None)  # who has its PID next is new
        self._new = new
        return found

    def _is_process(self, pid: int) -> bool:
        return parse_status(self._read(pid, "status") or b"").thread_group == pid

    def _started_until(self, newest: int | None) -> _Started | None:
        """Give the PIDs given out since the last look; None: not known."""
        before = self._newest_pid
        if newest is None or before is None:
            return None
        if newest < before:  # they began again after the last one
            return range(before + 1, _MAX_PID + 1), range(newest + 1)
        return range(before + 1, newest + 1), range(0)

    def _read_newest_pid(self) -> int | None:
        """Give the PID that was given out last: the end of /proc/loadavg (proc(5)).

        It is one of the reader's PID namespace, whatever the mount. gVisor says 0 always. (Where it
        is another number, as lxcfs may tell, a new process is found by the next listing.)
        """
        if self._shows_newest_pid is None:
            self._shows_newest_pid = shows_own_pids(self.root)
        if not self._shows_newest_pid:
            return None
        return parse_newest_pid(_read_file(f"{self.root}/loadavg") or b"")

    def comm(self, pid: int) -> bytes:
        """Read the first 15 bytes of a program's name: the cheapest that tells programs apart.

        (The arguments would take a lock that a process stuck in the kernel may hold.)
        """
        return (_read_line(f"{self.root}/{pid}/comm") or b"")[:-1]

    def arguments(self, pid: int) -> tuple[str, ...]:
        """Give a process's arguments, as they were when its facts were read; empty: none."""
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
        """Give the user whose word a process's arguments and environment are; None: not known.

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
        """Give the facts of those that are there, and of whom nothing can be said now, and why."""
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
        """Give the facts of one process; None: it is not there.

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
