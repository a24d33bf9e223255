"""Finds control daemons in /proc, and the directories where they can be reached.

A daemon is a process of the program nvidia-cuda-mps-control that was started as one (-d or -f), or
that holds the write lock on its directory's control_lock. The tool that asks questions is the same
program; it does neither. Daemon directories: see
daemon_directories.py.

A user chooses arguments and environment, so only the kernel is believed: the owner of process and
directory, and the holder of the lock. The number of daemons per user is bounded.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.observations import DaemonFacts, ProcessFacts, ProcfsObservation
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.control_groups import (
    CGROUPS,
    ContainerLogs,
    MemoryPartitions,
    frozen_group,
    tracer_of,
)
from mps_exporter.sources.daemon_directories import (
    CONTROL_PROGRAM,
    DEFAULT_LOG_DIRECTORY,
    DaemonDirectories,
    FoundDaemon,
    Look,
    PipeDirectory,
    Program,
    owner_of,
)
from mps_exporter.sources.fair_share import MAX_DAEMONS, MAX_DAEMONS_PER_USER, FairShare
from mps_exporter.sources.processes import HOST_USERS, Processes
from mps_exporter.sources.procfs_parse import COMM_LENGTH

SERVER_PROGRAM = "nvidia-cuda-mps-server"

CONTAINER_LOGS = "/var/log/containers"

MAX_NAME_BYTES = 255
"""A daemon whose directory has a longer path is called by its beginning and a hash of it. (The
address of a socket has 108 bytes, so nobody can be asked there.)"""

DIRECTORIES_SECONDS = 0.5
"""Timeout for reading the directories of all daemons."""

LOOKS_BY_TURNS = 1
"""So many of an ordinary user's known daemons are looked at again in one discovery, and so many
processes more than there is room for."""

MAX_IGNORED_USERS = 32
MAX_NAMED_HUNG = 8

_COMM = CONTROL_PROGRAM[:COMM_LENGTH].encode()


_Place = tuple[PipeDirectory, tuple[int, ...]]
"""A configured directory, and whose files are believed to be the logs of its daemon."""


class DaemonDiscovery:
    """What /proc tells about control daemons and processes. Every method may block.

    Args:
        root: Where procfs is mounted.
        passwd: File with the names of users.
        container_logs: Folder with the kubelet's links to the logs of containers.
        cgroups: Where cgroup version 2 is mounted.
        now: Unix time.
        clock: Monotonic time.
    """

    def __init__(
        self,
        root: str = "/proc",
        passwd: str = HOST_USERS,
        container_logs: str = CONTAINER_LOGS,
        cgroups: str = CGROUPS,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = Processes(root, passwd, clock)
        self._directories = DaemonDirectories(self._processes)
        self._container_logs = ContainerLogs(container_logs)
        self._cgroups = cgroups
        self._memory_partitions = MemoryPartitions(cgroups)
        self._now = now
        self._own_uid = os.geteuid()
        self._share = FairShare(self._own_uid, clock)
        self._left_out = Counter[int]()
        self._look_calls, self._looks = BlockingCalls[Look](), dict[Hashable, Look]()
        self._place_calls, self._places = BlockingCalls[_Place](), dict[Hashable, _Place]()
        self._turn, self._turns = 0, dict[Hashable, int]()
        self._found: tuple[DaemonFacts, ...] = ()
        self._unplaced: list[int] = []
        self._hung: list[str] = []
        """What could not be looked at in time."""
        self._with_root: frozenset[tuple[int, float]] = frozenset()
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
        self._unplaced, self._hung = [], []
        self._directories.forget(programs)
        # All are put before the first is waited for: waking a thread takes 0.24 ms (H200). What was
        # configured comes first, should no thread be left for the others.
        self._place_calls.start(
            {one: (None, partial(self._look_at_place, *one)) for one in configured}
        )
        candidates, asked = self._start_looks(programs, [pipe for pipe, _ in configured])
        entries: dict[object, DaemonFacts] = {}
        for (pipe, log), (place, owners) in self._configured_places(configured):
            entries.setdefault(place.identity, _configured_daemon(pipe, log, place, owners))
        logs, count = dict(configured), Counter[int]()
        for daemon in self._found_daemons(candidates, asked):
            identity = daemon.place.identity
            known = entries.get(identity)
            if known is None and not search:
                if daemon.writes_the_default_log:
                    self._default_log_of = daemon.place.directory
                continue
            if known is None:
                count[daemon.uid] += 1
                if not self._has_room(daemon.uid, count):
                    count[daemon.uid] -= 1
                    self._left_out[daemon.uid] += 1
                    continue
            elif known.configured and not daemon.place.belongs_to(daemon.uid, strictly=True):
                continue
            facts = _merged(known, daemon.facts(_children(daemon.program, programs)), logs)
            if daemon.writes_the_default_log and facts.process is daemon.program.process:
                self._default_log_of = facts.pipe_directory
            entries[identity] = facts
        entries = {name: self._limited(facts) for name, facts in entries.items()}
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
            ignored_programs=self._ignored(),
            containers=self._container_logs.names(
                container_id
                for facts in processes.values()
                if (container_id := parse_cgroup(facts.cgroup).container_id) is not None
            ),
            error=self._unplaced_error() or self._hung_error() or _unread_error(unknown),
            cgroup_memory=self._memory_partitions.read(one.cgroup for one in processes.values()),
            unreadable_environments=sum(
                facts.mps_environment is None and facts.state not in "ZX"
                for facts in processes.values()
            ),
        )

    def _has_room(self, uid: int, count: Counter[int]) -> bool:
        """Whether one more daemon of this user is shown."""
        others = sum(shown for user, shown in count.items() if not self._is_trusted(user))
        return self._is_trusted(uid) or (
            count[uid] <= MAX_DAEMONS_PER_USER and others <= MAX_DAEMONS
        )

    def _limited(self, facts: DaemonFacts) -> DaemonFacts:
        own = facts.configured or (
            facts.owner_uid is not None and self._is_trusted(facts.owner_uid)
        )
        return facts if own else replace(facts, limited=True)

    def _ignored(self) -> dict[int, int]:
        """Users whose processes are left out, those with most of them first."""
        most = sorted(self._left_out.items(), key=lambda one: -one[1])
        return dict(most[:MAX_IGNORED_USERS])

    def _is_trusted(self, uid: int) -> bool:
        """Whether this user's daemons are shown whatever their number: root's, and our own."""
        return uid in (0, self._own_uid)

    def _programs(self) -> list[Program]:
        """Give the processes of MPS's programs, root's first, then by PID."""
        running, self._left_out = self._share.choose(
            self._processes.running(_COMM), self._processes.user_and_parent
        )
        facts, unknown = self._processes.identify(running)
        for error in unknown.values():
            raise error
        found = [
            Program(self._with_halt(process), self._processes.arguments(pid))
            for pid, process in facts.items()
        ]
        return sorted(found, key=lambda one: (one.process.uid not in (0, self._own_uid), one.pid))

    def _with_halt(self, process: ProcessFacts) -> ProcessFacts:
        tracer = tracer_of(process.pid, process.state, self._processes.root)
        group = frozen_group(process.cgroup, self._cgroups)
        halted = tracer or group
        return replace(process, tracer=tracer, frozen_group=group) if halted else process

    def _configured_places(
        self, configured: Sequence[tuple[str, str | None]]
    ) -> Iterator[tuple[tuple[str, str | None], _Place]]:
        self._place_calls.wait(DIRECTORIES_SECONDS)
        found = self._place_calls.results(configured)
        self._note_missing(self._place_calls, {one: one[0] for one in configured}, found)
        self._places = {**self._places, **found}
        for pipe, log in configured:
            unknown = PipeDirectory("", pipe, lock_tested=False, holder=None, identity=pipe), ()
            place, owners = self._places.get((pipe, log), unknown)
            if (pipe, log) not in found or (pipe, log) in self._place_calls.old:
                # Who held the lock some time ago says nothing of who holds it now.
                place = replace(place, lock_tested=False, holder=None)
            yield (pipe, log), (place, owners)

    def _look_at_place(self, pipe_directory: str, log_directory: str | None) -> _Place:
        place = self._directories.pipe_directory("", pipe_directory, strictly=True)
        users = [place.owner_uid]
        if log_directory is not None:  # whoever configured it knows whose it is
            users.append(owner_of(log_directory, self._processes.root))
        owners = {uid for uid in users if uid is not None} or {0, self._own_uid}
        return place, tuple(sorted(owners))

    def _start_looks(
        self, programs: Sequence[Program], configured: Sequence[str]
    ) -> tuple[dict[Hashable, Program], dict[Hashable, Program]]:
        """Give those that may be daemons, and those of them that are looked at now."""
        controls = {one.pid for one in programs if one.is_control}
        # A daemon's child that has not become a server yet has its name.
        candidates: dict[Hashable, Program] = {
            one.identity: one
            for one in programs
            if one.is_control
            and one.process.parent_pid not in controls
            and not one.process.ended  # its parent has not reaped it
        }
        asked = self._fair_share_of_looks(candidates.values())
        self._look_calls.start(
            {
                name: (one.process.uid, partial(self._directories.look, one, configured))
                for name, one in asked.items()
            }
        )
        return candidates, asked

    def _found_daemons(
        self, candidates: Mapping[Hashable, Program], asked: Mapping[Hashable, Program]
    ) -> list[FoundDaemon]:
        """Give the daemons among them; of one that cannot be looked at now, what was known."""
        self._look_calls.wait(DIRECTORIES_SECONDS)
        found = self._look_calls.results(asked)
        before = self._looks
        self._looks = {name: before[name] for name in candidates if name in before} | found
        names = {name: f"the directories of PID {one.pid}" for name, one in asked.items()}
        self._note_missing(self._look_calls, names, found)
        for name, look in self._looks.items():
            if look == "unplaced":
                self._unplaced.append(candidates[name].pid)
        return [
            replace(look, program=candidates[name])
            for name in candidates
            if isinstance(look := self._looks.get(name, "none"), FoundDaemon)
        ]

    def _fair_share_of_looks(self, programs: Collection[Program]) -> dict[Hashable, Program]:
        """Leave out most of an ordinary user's, by turns: a look is a thread and 40 system calls.

        Of a daemon that is known the last look stands as long as its process is there. Of the
        others as many are looked at as there is room for daemons of that user, and a few more.
        """
        self._turn += 1
        turns: dict[Hashable, int] = {
            one.identity: self._turns.get(one.identity, 0) for one in programs
        }
        known = {name for name, look in self._looks.items() if isinstance(look, FoundDaemon)}
        known &= turns.keys()
        left = Counter[tuple[int | None, bool]]()
        for one in programs:
            left[one.process.uid, one.identity in known] += 1
        chosen = dict[Hashable, Program]()
        taken = Counter[tuple[int | None, bool]]()
        for one in sorted(programs, key=lambda one: turns[one.identity]):
            uid, is_known = one.process.uid, one.identity in known
            room = 0 if is_known else max(0, MAX_DAEMONS_PER_USER - left[uid, True])
            if uid is None or self._is_trusted(uid) or taken[uid, is_known] < room + LOOKS_BY_TURNS:
                taken[uid, is_known] += 1
                turns[one.identity] = self._turn
                chosen[one.identity] = one
        self._turns = turns
        return {one.identity: one for one in programs if one.identity in chosen}

    def _note_missing(
        self, calls: BlockingCalls[Any], names: Mapping[Any, str], found: Mapping[Hashable, object]
    ) -> None:
        for name in names.keys() - found.keys():
            error = calls.errors.get(name)
            why = "" if error is None else f" ({(error.strerror or str(error)).lower()})"
            self._hung.append(names[name] + why)

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

    def _hung_error(self) -> str | None:
        if not self._hung:
            return None
        return (
            f"{'; '.join(self._hung[:MAX_NAMED_HUNG])}: looking there fails or does not return, as"
            " on a file server that is gone"
        )


def _children(parent: Program, programs: Sequence[Program]) -> list[Program]:
    return [one for one in programs if one.process.parent_pid == parent.pid and not one.is_control]


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


def _configured_daemon(
    pipe_directory: str, log_directory: str | None, place: PipeDirectory, owners: tuple[int, ...]
) -> DaemonFacts:
    return DaemonFacts(
        pipe_directory=pipe_directory,
        log_directory=log_directory or DEFAULT_LOG_DIRECTORY,
        configured=True,
        owner_uid=place.owner_uid,
        log_owners=owners,
        lock_holder_pid=place.holder,
        lock_tested=place.lock_tested,
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
        log_owners=tuple(sorted({*found.log_owners, *(known.log_owners if log_directory else ())})),
        directories_assumed=False,
        log_directory_assumed=found.log_directory_assumed and log_directory is None,
    )


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
    for daemon in sorted(map(_with_short_name, daemons), key=_seniority):
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


def _with_short_name(daemon: DaemonFacts) -> DaemonFacts:
    raw = os.fsencode(daemon.pipe_directory)
    if len(raw) <= MAX_NAME_BYTES:
        return daemon
    digest = hashlib.sha256(raw).hexdigest()[:16]
    short = raw[: MAX_NAME_BYTES - len(digest) - 1].decode("utf-8", "ignore")
    return replace(daemon, pipe_directory=f"{short}~{digest}")


def _seniority(daemon: DaemonFacts) -> tuple[bool, bool, bool, float, int]:
    process = daemon.process
    return (
        not daemon.configured,
        daemon.owner_uid != 0,  # nobody takes a name from root
        bool(daemon.root),
        process.start_time_seconds if process else 0.0,
        process.pid if process else 0,
    )
