"""Finds control daemons in /proc, and the directories where they can be reached.

A daemon is a process of the program nvidia-cuda-mps-control that was started as a daemon (-d or
-f), or that holds the write lock on its directory's control_lock. The control tool is the same
program; it does neither. Directories: see daemon_programs_and_directories.py.

Users choose arguments and environment, so only facts from the kernel are trusted: the owner of the
process, the owner of the directory it names, and the holder of the lock there. What ordinary users
may cost is limited: see fairness.py.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.observations import DaemonFacts, ProcessFacts, ProcfsObservation
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.control_groups import (
    CGROUPS,
    container_names,
    frozen_group,
    memory_partitions,
    tracer_of,
)
from mps_exporter.sources.daemon_programs_and_directories import (
    DEFAULT_LOG_DIRECTORY,
    MPS_COMM,
    DaemonDirectories,
    DirectoryLookup,
    PipeDirectory,
    Program,
    directory_status,
    parse_daemon_flags,
)
from mps_exporter.sources.fairness import UserBudget
from mps_exporter.sources.processes import HOST_USERS, Account, Processes

CONTAINER_LOGS = "/var/log/containers"

_Configured = tuple[str, str | None]  # Pipe directory, and log directory if it is configured, too.


class DaemonDiscovery:
    """The control daemons and processes in /proc. Every method may block."""

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
        self.budget = UserBudget(clock)  # Limits for ordinary users, also outside discovery.
        self._processes = Processes(root, passwd, clock, now)
        self._directories = DaemonDirectories(self._processes)
        self._container_logs = container_logs
        self._cgroups = cgroups
        self._now, self._clock = now, clock
        self._ignored = Counter[int]()
        self._left_out = set[int]()  # MPS's processes that are not read: too many.
        self._children = dict[int, int]()
        """Children of ordinary users' daemons -> the daemon. A daemon is a child of no daemon."""
        self._children_until = float("-inf")
        self._calls = BlockingCalls[Any]()  # Checks of directories.
        self._places = dict[Hashable, PipeDirectory]()
        self._lookups = dict[Any, DirectoryLookup]()
        self._recheck_at = self._recheck_new_at = float("-inf")
        """Next check of the directories of all ordinary users' processes; of new processes."""
        self._due = dict[Hashable, None]()  # Users' processes to check, longest due first.
        self._found: tuple[DaemonFacts, ...] = ()
        self._hung: list[str] = []  # Files of the node's daemons that were not read in time.
        self._unplaced: list[str] = []  # The PIDs of the node's daemons whose directory is unknown.
        self._qualified: frozenset[tuple[int, float]] = frozenset()
        """Daemons that have their root in their name."""
        self._of_root = set[object]()  # Configured directories where root ran a daemon.
        self._default_log_of: object = None
        """Identity of the pipe directory of the last trusted daemon that wrote the default log."""

    def discover(
        self, configured: Sequence[_Configured], *, search: bool
    ) -> tuple[DaemonFacts, ...]:
        """Return the configured daemons, and with `search` all that run, sorted by name.

        Raises:
            OSError: If /proc cannot be listed, or the daemons in it cannot be read now.
        """
        logs, shown = dict(configured), Counter[Hashable]()
        found = self._check_directories(configured, self._programs())
        daemons: dict[object, DaemonFacts] = {}
        for pipe, log in configured:
            place = self._places[pipe, log]
            daemons.setdefault(place.identity, _configured_daemon(pipe, log, place))
        for place, daemon in found:
            known = daemons.get(place.identity)
            writes = not daemon.foreground and not daemon.limited
            if daemon.log_path == DEFAULT_LOG_DIRECTORY and writes:
                self._default_log_of = place.identity
            if known is None and search:
                if self.budget.admit_daemon(daemon, shown):
                    daemons[place.identity] = daemon
                elif daemon.owner_uid is not None:
                    self._ignored[daemon.owner_uid] += 1
            elif known and (not known.configured or self._may_run_in(place, daemon)):
                daemons[place.identity] = self._merged(known, daemon, logs)
        for identity, facts in daemons.items():
            # If another daemon wrote to the default log directory, the logs there are foreign to a
            # configured daemon that is not running.
            guessed = facts.process is None and logs.get(facts.pipe_directory) is None
            foreign = guessed and self._default_log_of not in (None, identity)
            limited = facts.limited and not facts.configured
            log_directory = "" if foreign else facts.log_directory
            daemons[identity] = replace(facts, log_directory=log_directory, limited=limited)
        self._found, self._qualified = _with_unique_names(daemons.values(), self._qualified)
        return self._found

    def _may_run_in(self, place: PipeDirectory, daemon: DaemonFacts) -> bool:
        """Return whether a process counts as the daemon of a configured directory.

        Containers mount the directory: after the host's root ran a daemon there, no process of an
        ordinary user or a container's root counts.
        """
        trusted = not daemon.limited
        if trusted and daemon.owner_uid == place.owner_uid == 0:
            self._of_root.add(place.identity)
        elif not trusted and place.identity in self._of_root:
            return False
        return place.belongs_to(daemon.owner_uid, trusted=trusted, strictly=True)

    def _merged(
        self, known: DaemonFacts, found: DaemonFacts, logs: Mapping[str, str | None]
    ) -> DaemonFacts:
        """Combine the facts of one directory: its configuration, and processes that use it.

        If two processes claim the directory, the holder of its lock is the daemon. Logs that an
        ordinary user's process names count only if it has the mounts of the host: in a container,
        its user could forge logs.
        """
        process = found.process
        holds_lock = process is not None and found.lock_holder_pid == process.pid
        if known.process is not None and not holds_lock:
            return known
        if not known.configured:
            return found
        if found.limited and process and not self._processes.shares_mounts(process.pid):
            found = replace(found, log_directory="")
        log_directory = logs.get(known.pipe_directory)
        return replace(
            found,
            pipe_directory=known.pipe_directory,
            log_directory=log_directory or (found.log_directory and found.log_path),
            root="",
            configured=True,
            log_owners=tuple(
                sorted({*found.log_owners, *(known.log_owners if log_directory else ())})
            ),
            directories_assumed=False,
            log_directory_assumed=found.log_directory_assumed and log_directory is None,
        )

    def observe(self, pids: Iterable[int]) -> ProcfsObservation:
        """Return the daemons found last, and the facts of these processes."""
        wanted = set(pids)
        processes, unknown = self._processes.identify(wanted)
        containers = defaultdict[str, list[int]](list)
        for pid, facts in sorted(processes.items()):
            if (container_id := parse_cgroup(facts.cgroup).container_id) is not None:
                containers[container_id].append(pid)
        return ProcfsObservation(
            at=self._now(),
            daemons=self._found,
            processes=processes,
            gone=tuple(sorted(wanted - processes.keys() - unknown.keys())),
            ignored_programs=dict(self._ignored.most_common(policy.MAX_IGNORED_USERS)),
            containers=container_names(self._container_logs, containers),
            error=self._discovery_error() or _unread_error(unknown),
            cgroup_memory=memory_partitions(
                self._cgroups, (one.cgroup for one in processes.values())
            ),
        )

    def _programs(self) -> list[Program]:
        """Return the processes of MPS's programs, trusted users' first, then by PID.

        A child of an ordinary user's daemon is left out for a minute or until its parent ends:
        all processes' names and arguments are read again each minute.
        """
        if self._clock() >= self._children_until:
            self._children_until = self._clock() + policy.PROCESS_REFRESH_INTERVAL_SECONDS
            self._children = {}
        statuses = self._processes.find_program(MPS_COMM, self._left_out | self._children.keys())
        admitted, self._ignored = self.budget.admit_processes(statuses)
        self._left_out = statuses.keys() - admitted
        facts, unknown = self._processes.identify(set(admitted) - self._children.keys())
        running = {pid for pid, one in facts.items() if not one.ended}
        children = {one: of for one, of in self._children.items() if of in running}
        orphans, more = self._processes.identify(
            pid for pid in admitted if pid in self._children and pid not in children
        )
        for error in (*unknown.values(), *more.values()):
            raise error
        facts, found = facts | orphans, []
        for pid, process in facts.items():
            arguments = self._processes.arguments(pid)
            unread = arguments is None
            account = statuses[pid].account
            found.append(Program(process, arguments or (), account, unread))
        controls = {one.pid for one in found if one.is_control and one.account is not None}
        self._children = children | {
            one.pid: one.process.parent_pid
            for one in found
            if one.pid in controls and one.process.parent_pid in controls
        }
        return sorted(found, key=lambda one: (one.account is not None, one.pid))

    def _with_halt(self, process: ProcessFacts) -> ProcessFacts:
        tracer = tracer_of(process.pid, process.state, self._processes.root)
        group = frozen_group(process.cgroup, self._cgroups)
        halted = tracer or group
        return replace(process, tracer=tracer, frozen_group=group) if halted else process

    def _check_directories(
        self, configured: Sequence[_Configured], programs: Sequence[Program]
    ) -> list[tuple[PipeDirectory, DaemonFacts]]:
        """Check directories on threads; update the configured places, and return the daemons.

        If a check does not return now, or is not due, its last result is used.
        """
        candidates = _candidates(programs, self._children)
        pipes = [pipe for pipe, _ in configured]
        self._due = self._due_checks(candidates)
        trusted = [name for name, program in candidates.items() if program.account is None]
        # Configured directories come first, in case threads run out.
        calls: dict[Hashable, tuple[Account, Callable[[], Any]]] = {
            place: (None, partial(self._check_configured, *place)) for place in configured
        }
        for name in (*trusted, *self._due):
            program = candidates[name]
            locate = partial(self._directories.locate, program, pipes, self._lookups.get(name))
            calls[name] = program.account, locate
        self._calls.start(calls)
        self._calls.wait(policy.DIRECTORY_TIMEOUT_SECONDS)
        found = self._calls.results(calls)
        done = found.keys() | self._calls.errors.keys()
        self._due = {name: None for name in self._due if name not in done}
        errors = {one: _error_suffix(self._calls.errors.get(one)) for one in calls}
        hung = [(one.account, f"the memory of PID {one.pid}") for one in programs if one.unread]
        hung += [(None, place[0] + errors[place]) for place in configured if place not in found]
        hung += [
            (one.account, f"the directories of PID {one.pid}{errors[name]}")
            for name, one in candidates.items()
            if name in calls and name not in found
        ]
        self._hung = self._of_node(hung)
        self._places = {place: self._place(place, found) for place in configured}
        latest = {**self._lookups, **found}
        self._lookups = {name: latest[name] for name in candidates if name in latest}
        self._unplaced = self._of_node(
            (candidates[name].account, str(candidates[name].pid))
            for name, lookup in self._lookups.items()
            if lookup == "unplaced"
        )
        return [
            (lookup[0], self._with_servers(lookup[1], candidates[name], programs))
            for name, lookup in self._lookups.items()
            if isinstance(lookup, tuple)
        ]

    def _due_checks(self, candidates: Mapping[Hashable, Program]) -> dict[Hashable, None]:
        """Return ordinary users' processes whose directories are due: first those left over.

        A daemon may have been seen before it holds its lock, so a new process without a directory
        is checked sooner.
        """
        now = self._clock()
        everything, new = now >= self._recheck_at, now >= self._recheck_new_at
        if everything:
            self._recheck_at = now + policy.USERS_CHECK_INTERVAL_SECONDS
        if new:
            self._recheck_new_at = now + policy.NEW_CHECK_INTERVAL_SECONDS
        started = self._now() - 2 * policy.NEW_CHECK_INTERVAL_SECONDS
        due = [
            name
            for name, one in candidates.items()
            if one.account is not None
            and (
                everything
                or name not in self._lookups
                or (
                    new
                    and isinstance(self._lookups[name], str)
                    and one.process.start_time_seconds >= started
                )
            )
        ]
        return dict.fromkeys(name for name in (*self._due, *due) if name in candidates)

    def _with_servers(
        self, daemon: DaemonFacts, program: Program, programs: Sequence[Program]
    ) -> DaemonFacts:
        """Return a daemon with the current facts of its process and servers."""
        servers = [
            one for one in programs if one.process.parent_pid == program.pid and not one.is_control
        ]
        multiuser = any("multiuser" in parse_daemon_flags(one.arguments) for one in servers)
        return replace(
            daemon,
            process=self._with_halt(program.process),
            # (The account is of the first scan, the owner of the last check.)
            limited=program.account is not None or daemon.owner_uid not in (0, os.geteuid()),
            multiuser=daemon.multiuser or multiuser,
            servers=tuple(self._with_halt(one.process) for one in servers),
        )

    def _of_node(self, failures: Iterable[tuple[Account, str]]) -> list[str]:
        """Return the failures that concern no ordinary user; count the others as ignored."""
        found = []
        for account, text in failures:
            if account is None:
                found.append(text)
            elif account[0] is not None:
                self._ignored[account[0]] += 1
        return found

    def _check_configured(self, pipe_directory: str, log_directory: str | None) -> PipeDirectory:
        place = self._directories.check("", pipe_directory, strictly=True)
        owners = {place.owner_uid}
        if log_directory is not None:  # the owner of a configured log directory is trusted
            status = directory_status(log_directory, self._processes.root)
            owners.add(None if status is None else status.st_uid)
        known = sorted(uid for uid in owners if uid is not None)
        return replace(place, log_owners=tuple(known or sorted({0, os.geteuid()})))

    def _place(
        self, configured: _Configured, found: Mapping[Hashable, PipeDirectory]
    ) -> PipeDirectory:
        """Return the last result for a configured directory.

        The holder of the lock at the time of an earlier collection proves nothing about now.
        """
        pipe = configured[0]
        unknown = PipeDirectory("", pipe, lock_tested=False, holder=None, identity=pipe)
        place = found.get(configured, self._places.get(configured, unknown))
        if place.holder_is_root and place.owner_uid == 0:
            self._of_root.add(place.identity)
        elif place.holder and place.identity in self._of_root:
            place = replace(place, holder=None)
        if configured not in found or configured in self._calls.old:
            place = replace(place, lock_tested=False, holder=None)
        return place

    def _discovery_error(self) -> str | None:
        if self._unplaced:
            return (
                f"control daemon with PID {', '.join(self._unplaced)}: its environment cannot be"
                " read, and its pipe directory is unknown; name it with --mps.pipe-directory, or"
                " give the exporter CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
            )
        if self._hung:
            return (
                f"{'; '.join(self._hung[: policy.MAX_HUNG_PATHS_SHOWN])}: access fails or hangs,"
                " for example because a file server is unreachable"
            )
        return None


def _candidates(programs: Sequence[Program], children: Iterable[int]) -> dict[Hashable, Program]:
    """Return the processes that may be daemons; a daemon's child is a server before its exec."""
    controls = {one.pid for one in programs if one.is_control}.union(children)
    return {
        one.identity: one
        for one in programs
        if (one.is_control or one.unread)
        and one.process.parent_pid not in controls
        and not one.process.ended
    }


def _error_suffix(error: OSError | None) -> str:
    return "" if error is None else f" ({(error.strerror or str(error)).lower()})"


def _unread_error(unknown: Mapping[int, OSError]) -> str | None:
    """Return why processes are unreadable; None if only for permissions (hidepid)."""
    errors = {
        pid: error for pid, error in unknown.items() if not isinstance(error, PermissionError)
    }
    if not errors:
        return None
    why = sorted({error.strerror or str(error) for error in errors.values()})
    return f"{len(errors)} processes cannot be read in /proc: {', '.join(why).lower()}"


def _configured_daemon(
    pipe_directory: str, log_directory: str | None, place: PipeDirectory
) -> DaemonFacts:
    return DaemonFacts(
        pipe_directory=pipe_directory,
        log_directory=log_directory or DEFAULT_LOG_DIRECTORY,
        configured=True,
        owner_uid=place.owner_uid,
        log_owners=place.log_owners,
        lock_holder_pid=place.holder,
        lock_tested=place.lock_tested,
    )


def _with_unique_names(
    daemons: Iterable[DaemonFacts], qualified: frozenset[tuple[int, float]]
) -> tuple[tuple[DaemonFacts, ...], frozenset[tuple[int, float]]]:
    """Return the daemons sorted by unique name, and the processes with their root in the name.

    A daemon whose name is taken gets its root in the name and keeps it, so that it is never
    mistaken for the other daemon after that one exits.
    """
    named: dict[str, DaemonFacts] = {}
    keep = set()
    for daemon in sorted(daemons, key=_seniority):
        unique = daemon
        identity = daemon.process_identity
        if daemon.pipe_directory in named or (daemon.root and identity in qualified):
            unique = replace(
                daemon, pipe_directory=daemon.pipe_path, log_directory=daemon.log_path, root=""
            )
            if identity:
                keep.add(identity)
        named.setdefault(unique.pipe_directory, unique)
    return tuple(named[name] for name in sorted(named)), frozenset(keep)


def _seniority(daemon: DaemonFacts) -> tuple[bool, bool, bool, bool, float, int]:
    """Return the sort key for names: configured daemons first, ordinary users' last."""
    process = daemon.process
    return (
        not daemon.configured,
        daemon.limited,
        daemon.owner_uid != 0,
        bool(daemon.root),
        process.start_time_seconds if process else 0.0,
        process.pid if process else 0,
    )
