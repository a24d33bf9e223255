r"""Facts about processes, read from /proc and cached.

Only ENOENT, or ESRCH during a read, means that a process has exited. Any other error, such as
EMFILE, is inconclusive, and is raised or reported.

Names and arguments of processes are bytes that their users choose: bytes that are not UTF-8 are
kept as ``\xNN``, and the parsers return None or an empty value for unexpected text, never an error.

Paths are plain strings: pathlib interns each component, and Python 3.12.0 to 3.12.6 never free an
interned string (python/cpython#113993; 38 MB for 500,000 PIDs).
"""

import errno
import os
import pwd
import re
import stat as stat_bits
import time
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import ProcessFacts
from mps_exporter.sources.blocking import BlockingCalls

HOST_USERS = "/etc/passwd"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - most containers have their own

_VARIABLE = re.compile(
    rb"(CUDA_(?<![^\0]CUDA_)(?:MPS_[^=\0]{0,%d}|VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS))=([^\0]*)"
    % policy.MAX_VARIABLE_NAME_BYTES
)
"""Pattern of a kept variable. Splitting an environment, which users choose, needs 15 times its
memory."""

_PRELOADED = re.compile(rb"LD_PRELOAD=(?<![^\0]LD_PRELOAD=)[^\0]*")
_LIMITERS = {b"vgpu": "HAMi-core", b"nvshare": "nvshare", b"shimcuda": "xsched"}
_LIMITER = re.compile(rb"[/=: ]lib(vgpu|nvshare|shimcuda)\.so\b")

_NUMBERS = re.compile(rb"\n(Uid|Gid|Groups|NSpid|PPid):([\d \t]*)(?=\n)")
_CAPABILITIES = re.compile(rb"\nCapEff:\t([0-9a-f]+)\n")

_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel: the host's.
_ENDED = frozenset("ZX")
_GONE = (errno.ENOENT, errno.ESRCH)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # Temporary: the file still exists.

# ---------------------------------------------------------------------- contents of files


def text_of(raw: bytes) -> str:
    """Decode bytes that should be UTF-8."""
    return raw.decode("utf-8", "backslashreplace")


class ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that are used.

    457 (nvidia-cuda-mps) S 445 445 445 0 -1 4194560 …
    pid (comm) state ppid pgrp session … 22nd: start time in ticks since boot
    """

    comm: str
    state: str
    parent_pid: int
    start_ticks: int


def parse_stat(raw: bytes) -> ProcessStat | None:
    """Parse /proc/PID/stat. The name may contain blanks, parentheses and line ends."""
    opening, closing = raw.find(b"("), raw.rfind(b")")
    fields = raw[closing + 1 :].split(None, 20) if 0 <= opening < closing else []
    if len(fields) < 20:
        return None
    try:
        return ProcessStat(
            comm=text_of(raw[opening + 1 : closing]),
            state=text_of(fields[0]),
            parent_pid=int(fields[1]),
            start_ticks=int(fields[19]),
        )
    except ValueError:
        return None


Account = tuple[int | None, int | None] | None
"""User, and root's PID namespace, whose limits hold for a process. None if no limits hold."""

_SYS_ADMIN = 1 << 21  # CAP_SYS_ADMIN; a container has it only if it administers its host.


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The fields of /proc/PID/status that are used."""

    uid: int | None = None  # The effective user.
    namespace_pids: tuple[int, ...] = ()
    parent_pid: int | None = None
    real_uid: int | None = None
    several_uids: bool = False
    """Real, effective and saved user differ: a set-user-ID program, whose arguments and environment
    were chosen by another user than the effective one."""
    group: frozenset[int] = frozenset()  # Real, effective, saved and file system group.
    supplementary_groups: frozenset[int] = frozenset()
    capabilities: int = 0  # Effective capabilities, in the process's own user namespace.
    account: Account = (None, None)  # See Processes.account().


def parse_status(raw: bytes) -> ProcessStatus:
    """Parse the lines of numbers, as "Uid: real effective saved filesystem"."""
    values: dict[bytes, list[int]] = {}
    for key, numbers in _NUMBERS.findall(b"\n" + raw):
        values.setdefault(key, [*map(int, numbers.split())])
    uids = values.get(b"Uid", [])
    capabilities = _CAPABILITIES.search(raw)
    return ProcessStatus(
        uid=uids[1] if len(uids) > 1 else None,
        namespace_pids=tuple(values.get(b"NSpid", ())),
        parent_pid=next(iter(values.get(b"PPid", ())), None),
        real_uid=uids[0] if len(uids) > 1 else None,
        several_uids=len(set(uids[:3])) > 1,
        group=frozenset(values.get(b"Gid", ())),
        supplementary_groups=frozenset(values.get(b"Groups", ())),
        capabilities=int(capabilities[1], 16) if capabilities else 0,
    )


def parse_arguments(raw: bytes) -> tuple[str, ...]:
    """Parse /proc/PID/cmdline. Kernel threads, zombies and some programs have no arguments."""
    return tuple(text_of(part) for part in raw.split(b"\0")[:-1]) if raw else ()


def program_name(arguments: Sequence[str]) -> str:
    """Return the last component of the program's path."""
    return arguments[0].rstrip("/").rpartition("/")[2] if arguments else ""


def parse_mps_environment(raw: bytes) -> dict[str, str]:
    """Parse the variables that matter to MPS in /proc/PID/environ, and no others.

    The file contains the environment at the start of the program, without later changes. If a
    variable is set twice, the first value wins, as with getenv().
    """
    found: dict[str, str] = {}
    for entry in islice(_VARIABLE.finditer(raw), policy.MAX_VARIABLE_ENTRIES):
        name, value = text_of(entry[1]), entry[2][: policy.MAX_VARIABLE_VALUE_BYTES]
        if name not in found and len(found) < policy.MAX_VARIABLES:
            found[name] = text_of(value)
    return found


def parse_mountinfo(raw: bytes) -> tuple[str, bool]:
    """Return shared_memory and default_mounted of ProcessFacts, from /proc/PID/mountinfo.

    53 31 0:25 / /dev/shm rw,nosuid - tmpfs shm rw
    number parent device root folder …
    """
    rows = (line.split(b" ", 5) for line in raw.split(b"\n"))
    # The last mount of a folder hides the others.
    devices = {text_of(row[4]): text_of(row[2]) for row in rows if len(row) == 6}
    return devices.get(SHARED_MEMORY, ""), any(
        one in devices for one in policy.DEFAULT_PIPE_DIRECTORIES
    )


def find_limiter(environment: bytes, mounts: bytes) -> str:
    """Return the limiter whose library LD_PRELOAD or one of the mounts names; "" if none."""
    preloaded = _PRELOADED.search(environment)
    found = (preloaded and _LIMITER.search(preloaded[0])) or _LIMITER.search(mounts)
    return _LIMITERS[found[1]] if found else ""


def parse_passwd(raw: bytes) -> dict[int, str]:
    """Parse /etc/passwd: user ID -> name. If an ID is listed twice, the first name wins."""
    names: dict[int, str] = {}
    for line in raw.split(b"\n"):
        fields = line.split(b":")
        if len(fields) >= 3 and re.fullmatch(rb"\d{1,10}", fields[2]) and fields[0]:
            names.setdefault(int(fields[2]), text_of(fields[0]))
    return names


# ---------------------------------------------------------------------- processes


class PasswdNames:
    """Names in a file like /etc/passwd; for the host's, also in directory services."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._names: dict[int, str | None] = {}
        self._read_at = float("-inf")

    def name_of(self, uid: int | None) -> str | None:
        if uid is None:
            return None
        if self._clock() - self._read_at >= policy.PROCESS_REFRESH_INTERVAL_SECONDS:
            self._read_at = self._clock()
            if raw := bytes_of(self._path):
                self._names = {**parse_passwd(raw)}
        if uid not in self._names:
            self._names[uid] = None
            if self._path == HOST_USERS:
                with suppress(KeyError, OverflowError):
                    self._names[uid] = pwd.getpwuid(uid).pw_name
        return self._names[uid]


@dataclass(slots=True)
class _CachedFacts:
    stat: ProcessStat  # The file when the facts were read.
    read_at: float
    facts: ProcessFacts
    arguments: tuple[str, ...] | None = None  # None: only stat and status were read.

    def is_of(self, stat: ProcessStat) -> bool:
        """Return whether the process is the same, and has not executed another program."""
        return (self.stat.start_ticks, self.stat.comm) == (stat.start_ticks, stat.comm)


class Processes:
    """The processes below one mount of procfs.

    A reused PID is detected by its start time, an exec mostly by the new name; control group and
    user are read again every minute. If the clock is set, a process keeps the start time computed
    first, and so matches its log lines.
    """

    def __init__(
        self,
        root: str = "/proc",
        passwd: str = HOST_USERS,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.root = root
        self._clock, self._now = clock, now
        self._user_names = PasswdNames(passwd, clock)
        self._known: dict[int, _CachedFacts] = {}
        self._calls = BlockingCalls[_CachedFacts]()
        self._statuses: dict[tuple[int, int], ProcessStatus] = {}
        """First status of the program's processes, by PID and inode of the directory in /proc."""
        self._clock_distance = self._boot_time = self._earliest_boot_time = float("inf")
        self._set_at = 0.0  # Seconds from the boot to the first read after a step of the clock.

    def find_program(self, comm: bytes, ignored: Container[int] = ()) -> dict[int, ProcessStatus]:
        """Return PID -> first status of the processes with this kernel name, sorted by PID.

        An exec may change a name, so it is read each time, except that of a kernel thread. A
        process in `ignored` that was returned last time is returned again, unread.

        Raises:
            OSError: If /proc cannot be listed, or names in it cannot be read now.
        """
        with os.scandir(self.root) as entries:
            listed = {int(entry.name): entry.inode() for entry in entries if entry.name.isdecimal()}
        if not listed:  # at least this process
            raise FileNotFoundError("no process is listed in procfs")
        self._known = {pid: known for pid, known in self._known.items() if pid in listed}
        pids = sorted(listed.keys() - self._kernel_threads())
        # A process that gets a used PID has another inode.
        before, keys = self._statuses, [(pid, listed[pid]) for pid in pids]
        found = [
            key
            for key in keys
            if (key[0] in ignored and key in before) or self._comm(key[0]) == comm
        ]
        self._statuses = {key: before.get(key) or self._first_status(key[0]) for key in found}
        return {pid: status for (pid, _), status in self._statuses.items()}

    def _kernel_threads(self) -> set[int]:
        if self._comm(2) != b"kthreadd":
            return set()
        children = _read_file(f"{self.root}/2/task/2/children") or b""
        return {int(pid) for pid in children.split()}

    def _comm(self, pid: int) -> bytes:
        return (_read_line(f"{self.root}/{pid}/comm", _GONE + _FORBIDDEN) or b"")[:-1]

    def arguments(self, pid: int) -> tuple[str, ...] | None:
        """Return the arguments of a process that identify() found; None if not read yet."""
        return self._known[pid].arguments

    def _first_status(self, pid: int) -> ProcessStatus:
        status = self.status(pid)
        return replace(status, account=self.account(pid, status))

    def account(self, pid: int, status: ProcessStatus | None = None) -> Account:
        """Return whose limits hold for a process; None if root's or the exporter's own user's.

        Every user can read the files that prove this:

        - `Uid` is that of the exporter's user namespace: in a namespace that an ordinary user made
          it is never 0. Root of most containers has 0.
        - `uid_map` is that of process 1: it has the same user namespace, in which its capabilities
          are valid. (Only root can give another namespace the same map.)
        - CAP_SYS_ADMIN in `CapEff`: it has the rights of the host's root. Without it, root's
          process is in the PID namespace of this procfs (`NSpid` is one number) and shares the
          mounts of process 1.

        The exporter's user counts only in the exporter's own PID namespace: a pod may have any
        user. That user can read the link to the namespace. A process whose files are unreadable
        is an ordinary user's. Only root can put a process with UID 0 into a PID namespace, so each
        such namespace has its own limits. An ordinary user can make any number of namespaces.
        """
        status = status or self.status(pid)
        uid, namespace = status.real_uid, self._namespace(pid)
        if uid == 0:
            same_users = self._read(pid, "uid_map") == self._read(1, "uid_map")
            trusted = same_users and (
                bool(status.capabilities & _SYS_ADMIN)
                or (len(status.namespace_pids) == 1 and self.shares_mounts(pid))
            )
        else:
            trusted = uid == os.geteuid() and namespace == self._namespace("self") is not None
        return None if trusted else (uid, None if uid else namespace)

    def shares_mounts(self, pid: int) -> bool:
        """Return whether a process has the mounts of process 1 (by the first mount's number)."""
        first = [self._read(one, "mountinfo", policy.MAX_MOUNT_NUMBER_BYTES) for one in (pid, 1)]
        numbers = {line.split(b" ", 1)[0] if line else None for line in first}
        return len(numbers) == 1 and None not in numbers

    def sole_user(self, pid: int, status: ProcessStatus | None = None) -> int | None:
        """Return the user who chose a process's arguments and environment; None if unknown.

        It is unknown for a set-user-ID program: any user may start root's program su, with the
        name of an MPS program and any environment.
        """
        status = status or self.status(pid)
        with suppress(OSError):
            mode = os.stat(f"{self.root}/{pid}/exe").st_mode  # noqa: PTH116
            if mode & (stat_bits.S_ISUID | stat_bits.S_ISGID):
                return None
        return None if status.several_uids else status.uid

    def is_ending(self, pid: int) -> bool:
        """Return whether a process has ended, or has begun to.

        The kernel closes its files, and with them its locks, and removes its root directory some
        time before it is a zombie (do_exit).
        """
        try:
            os.readlink(f"{self.root}/{pid}/root")  # noqa: PTH115
        except OSError as error:
            return error.errno in _GONE
        return False

    def identify(self, pids: Iterable[int]) -> tuple[dict[int, ProcessFacts], dict[int, OSError]]:
        """Return the facts of processes that exist, and why others cannot be read now.

        Reads of files that show a process's memory may hang: its user can keep it locked. So such
        files are read in calls of that user (see blocking.py). Before that, the facts are
        those of stat and status, which need no such lock. A read that hangs is not repeated.

        Between two reads of a process's files, unchanged facts are the same object.
        """
        unknown, stats = dict[int, OSError](), dict[int, ProcessStat]()
        calls: dict[Hashable, tuple[Account, Callable[[], _CachedFacts]]] = {}
        for pid in pids:
            try:
                self._notice_clock_step()
                stat = self._stat(pid)
                if stat is None:
                    self._known.pop(pid, None)
                    continue
                known = self._known.get(pid)
                if known is None or not known.is_of(stat) or not self._is_recent(known, stat):
                    known, call = self._known_by_stat(pid, stat, known)
                    calls[pid, stat.start_ticks] = call
                self._known[pid], stats[pid] = known, stat
            except OSError as error:
                unknown[pid] = error
        self._calls.start(calls)
        self._calls.wait(policy.PROCESS_TIMEOUT_SECONDS, policy.USERS_PROCESS_TIMEOUT_SECONDS)
        read = self._calls.results(calls)
        found = dict[int, ProcessFacts]()
        for pid, stat in stats.items():
            key = pid, stat.start_ticks
            known = self._known[pid] = read.get(key, self._known[pid])
            if known.arguments is None and key in self._calls.errors:
                unknown[pid] = self._calls.errors[key]
                continue
            facts = known.facts
            if facts.state != stat.state or facts.parent_pid != stat.parent_pid:
                known.facts = replace(facts, state=stat.state, parent_pid=stat.parent_pid)
            found[pid] = known.facts
        return found, unknown

    def start_ticks(self, pids: Iterable[int]) -> dict[int, int | None]:
        """Return when processes started, in ticks since the boot; None if a process has exited.

        Processes of which this is unknown are missing.
        """
        found: dict[int, int | None] = {}
        for pid in pids:
            with suppress(OSError):
                stat = self._stat(pid)
                found[pid] = None if stat is None or stat.state in _ENDED else stat.start_ticks
        return found

    def _stat(self, pid: int) -> ProcessStat | None:
        """Read /proc/PID/stat; None if there is no such process.

        Raises:
            OSError: If it is unknown whether the process exists.
        """
        line = _read_line(f"{self.root}/{pid}/stat", _GONE)
        # Process 1 always exists: if it is invisible, the mount option hidepid hides processes, and
        # a missing PID proves nothing.
        hidden = line is None and not os.path.exists(f"{self.root}/1")  # noqa: PTH110
        if hidden and (self.root != "/proc" or _may_exist(pid)):
            raise PermissionError(errno.EACCES, "hidden by the mount option hidepid")
        return None if line is None else parse_stat(line)

    def _is_recent(self, known: _CachedFacts, stat: ProcessStat) -> bool:
        age = self._clock() - known.read_at
        recent = stat.state in _ENDED or age < policy.PROCESS_REFRESH_INTERVAL_SECONDS
        return recent and known.arguments is not None

    def _known_by_stat(
        self, pid: int, stat: ProcessStat, before: _CachedFacts | None
    ) -> tuple[_CachedFacts, tuple[Account, Callable[[], _CachedFacts]]]:
        """Return the known facts of a process, and the call that reads the other facts."""
        same = before is not None and before.stat.start_ticks == stat.start_ticks
        status = self.status(pid)
        facts = ProcessFacts(
            pid=pid,
            start_time_seconds=before.facts.start_time_seconds
            if before is not None and same
            else self._started_at(stat.start_ticks / os.sysconf("SC_CLK_TCK")),
            uid=status.uid,
            user=self._user_names.name_of(status.uid),
            name=stat.comm,
            namespace_pids=status.namespace_pids,
            pid_namespace=self._namespace(pid),
        )
        known = before if before is not None and before.is_of(stat) else None
        call = self.account(pid, status), partial(self._read_memory, stat, facts)
        return known or _CachedFacts(stat, self._clock(), facts), call

    def _read_memory(self, stat: ProcessStat, facts: ProcessFacts) -> _CachedFacts:
        """Read the files whose reads may hang."""
        pid = facts.pid
        arguments = parse_arguments(self._read(pid, "cmdline", policy.MAX_ARGUMENT_BYTES) or b"")
        environment = None if stat.state in _ENDED else self._read(pid, "environ")
        cgroup = self._read(pid, "cgroup")
        mounts = self._read(pid, "mountinfo", policy.MAX_MOUNTS_BYTES) or b""
        shared_memory, default_mounted = parse_mountinfo(mounts)
        facts = replace(
            facts,
            name=program_name(arguments) if arguments and arguments[0] else stat.comm,
            cgroup=None if cgroup is None else text_of(cgroup),
            mps_environment=None if environment is None else parse_mps_environment(environment),
            limiter=find_limiter(environment or b"", mounts),
            shared_memory=shared_memory,
            default_mounted=default_mounted,
        )
        return _CachedFacts(stat, self._clock(), facts, arguments)

    def _started_at(self, seconds: float) -> float:
        """Return a process's start (Unix time); if it may precede a step, by the earlier clock.

        Its log lines may have that clock, too. A start that is too early proves no process dead.
        """
        return seconds + (self._boot_time if seconds > self._set_at else self._earliest_boot_time)

    def _notice_clock_step(self) -> None:
        """Read the start of the host (Unix time) if the clock was set, or the host slept."""
        now, step = self._now(), policy.CLOCK_STEP_SECONDS
        distance = now - self._clock()
        if abs(distance - self._clock_distance) <= step:
            return
        raw = _read_file(f"{self.root}/stat") or b""
        found = re.search(rb"^btime (\d+)$", raw, re.MULTILINE)
        own = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        boot_time = own if found is None else float(found[1])
        if abs(boot_time - self._boot_time) > step:
            self._boot_time, self._set_at = boot_time, now - boot_time
            self._earliest_boot_time = min(self._earliest_boot_time, boot_time)
        self._clock_distance = distance

    @property
    def hidden(self) -> str:
        """What this program cannot see: outside its container, or other users'; "" if nothing."""
        if self.root == "/proc" and self._namespace("self") not in (None, _FIRST_PID_NAMESPACE):
            return "what is outside this container"
        there = os.path.isdir(self.root) and not _read_file(f"{self.root}/1/uid_map")  # noqa: PTH112
        return "processes of other users (hidden by hidepid)" if there else ""

    def _namespace(self, pid: int | str) -> int | None:
        with suppress(OSError):
            link = os.readlink(f"{self.root}/{pid}/ns/pid")  # noqa: PTH115
            found = re.fullmatch(r"pid:\[(\d+)\]", link)
            return int(found[1]) if found else None
        return None

    def children(self, pid: int) -> tuple[int, ...]:
        """Return the processes that the main thread of a process has started."""
        return tuple(map(int, (self._read(pid, f"task/{pid}/children") or b"").split()))

    def status(self, pid: int) -> ProcessStatus:
        return parse_status(self._read(pid, "status") or b"")

    def _read(self, pid: int, name: str, limit: int = policy.MAX_PROC_FILE_BYTES) -> bytes | None:
        return _read_file(f"{self.root}/{pid}/{name}", limit)


def _may_exist(pid: int) -> bool:
    """Return whether a process exists, even if hidden; True if uncertain."""
    try:
        os.kill(pid, 0)  # sends no signal
    except OSError as error:
        return error.errno != errno.ESRCH
    except OverflowError:  # a log or a reply may contain any number
        return False
    return True


def bytes_of(path: str, limit: int = policy.MAX_PROC_FILE_BYTES) -> bytes:
    """Return the beginning of a file; empty if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:  # noqa: PTH123
        return file.read(limit)
    return b""


def _read_file(path: str, limit: int = policy.MAX_PROC_FILE_BYTES) -> bytes | None:
    """Read a file of /proc; None if it does not exist or is unreadable.

    Raises:
        OSError: If descriptors or memory are short, for example EMFILE.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(limit)
    except OSError as error:
        if error.errno in _SHORTAGE:
            raise
        return None


def _read_line(path: str, absent: tuple[int, ...]) -> bytes | None:
    """Read a file of /proc that is one line, which the kernel returns in the first read.

    Hundreds are read in each collection; a second read, to find the end, would double the calls.
    The errors in `absent` return None; others are raised.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, 1 << 12)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in absent:
            return None
        raise
