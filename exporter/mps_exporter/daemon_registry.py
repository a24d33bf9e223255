"""The daemons that exist and existed, and the state of each between collections."""

from collections import Counter, UserDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.limits_without_a_flag import FULL, OF_ORDINARY_USER
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.mps.server_queries import ServerAnswers, can_answer, has_resumed
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.mps.xid_lines import KernelFault
from mps_exporter.observations import (
    AddressRanges,
    ControlObservation,
    DaemonFacts,
    KernelObservation,
    LogState,
    Outcome,
)


@dataclass(slots=True)
class DaemonRecord:
    """State of one daemon between collections."""

    facts: DaemonFacts
    tracker: DaemonTracker
    in_job: bool = False  # Whether its process belonged to a Slurm job or a pod.
    last: DaemonFacts | None = None  # Facts of the process that was found last.
    gone_since: float | None = None
    last_probe: ControlObservation | None = None
    answered_by: tuple[int, float] | None = None  # PID and start time at the last probe.
    answers: ServerAnswers = field(default_factory=ServerAnswers)
    was_readable: bool = False
    server_log_was_readable: bool = False
    hung_at: float | None = None  # When its last query timed out; None if it did not.
    resumed_at: float | None = None  # When it or one of its servers last continued after a stop.
    logs: dict[str, LogState] = field(default_factory=dict)
    published_incidents: int = 0
    knows_ranges: bool = False  # Whether ranges read before it was found are applied.

    @property
    def state(self) -> DaemonState:
        return self.tracker.state

    @property
    def known_absent(self) -> bool:
        """Whether the daemon has no process and its lock is free, so that no query is needed."""
        facts = self.facts
        return facts.process is None and facts.lock_tested and facts.lock_holder_pid is None

    @property
    def logs_readable(self) -> bool:
        return all(log in self.logs and self.logs[log].readable for log in ("control", "server"))

    def pids_to_watch(self) -> list[int]:
        """Return the PIDs, as the host numbers them, whose exits must be noticed immediately."""
        process = self.facts.process
        if process is None:
            return self.missing_process()
        return [process.pid, *(self.state.pids_to_watch() if self.has_host_pids else ())]

    @property
    def has_host_pids(self) -> bool:
        """Whether its logs are known to contain PIDs of the host."""
        return self.facts.process is not None and not self.facts.has_own_pid_namespace

    def observe_kernel(
        self,
        observation: KernelObservation,
        faults: Sequence[KernelFault],
        earlier: Iterable[AddressRanges],
    ) -> None:
        """Apply evidence for the cause of a fault; a new daemon gets the earlier ranges.

        The address ranges of an ordinary user's daemon are limited to processes of that user.
        """
        facts, found = self.facts, observation.ranges if self.knows_ranges else earlier
        self.knows_ranges, evidence = True, self.state.evidence
        evidence.readable, evidence.faults = observation.readable, faults
        for ranges in found:
            if not facts.limited or ranges.uid == facts.user:
                evidence.add_ranges(ranges)

    def missing_process(self) -> list[int]:
        """Return its last PID if no process is found: a failed scan does not prove an exit."""
        last = self.last.process if self.last is not None else None
        return [last.pid] if self.facts.process is None and last is not None else []

    def clear_answers(self) -> None:
        """Drop the replies of a process that was replaced, or has exited."""
        self.answers = ServerAnswers()
        self.last_probe = None
        self.hung_at = None

    def record_query(self, reply: ControlObservation) -> None:
        """Record whether the query timed out, unless the query was skipped."""
        if reply.outcome is not Outcome.SKIPPED:
            took = sum(exchange.duration_seconds for exchange in reply.exchanges)
            self.hung_at = reply.at + took if reply.outcome is Outcome.TIMEOUT else None

    def last_query_timed_out(self, now: float) -> bool:
        """Return whether its last query timed out, and the log shows no later activity."""
        if self.hung_at is None:
            return False
        served_at = self.state.daemon.served_at
        return not (served_at and self.hung_at < served_at <= now)

    @property
    def resumed(self) -> bool:
        """Whether the daemon or a server has continued from a stop since its last query hung."""
        hung_at, resumed_at = self.hung_at, self.resumed_at
        return hung_at is not None and resumed_at is not None and hung_at < resumed_at

    def record_log(self, state: LogState) -> None:
        """Record whether one of its logs can be read."""
        self.logs[state.log] = state
        self.was_readable |= state.log == "control" and state.readable
        self.server_log_was_readable |= state.log == "server" and state.readable

    def record_found(self, facts: DaemonFacts, now: float) -> None:
        if facts.process_identity != self.facts.process_identity:
            self.clear_answers()
        if has_resumed(self.facts, facts):
            self.resumed_at = now
        self.facts = facts
        if facts.process is None:
            self.gone_since = self.gone_since or now
            return
        self.last = facts
        place = parse_cgroup(facts.process.cgroup)
        self.in_job = bool(place.slurm_job_id or place.pod_uid)
        self.gone_since = None

    def record_absence(self, now: float) -> None:
        """Record that no process of it was found in /proc."""
        self.facts = replace(self.facts, process=None, servers=(), lock_holder_pid=None)
        self.gone_since = self.gone_since or now

    def may_become(self, facts: DaemonFacts) -> bool:
        """Return whether these are facts about this daemon, or about a successor.

        An ordinary user's process in the same directory must not hide the exit of root's daemon.
        """
        same = facts.process_identity == self.facts.process_identity
        return same or self.facts.limited or not facts.limited

    def outdated(self, now: float) -> bool:
        """Return whether the daemon has been absent for longer than absent daemons are shown."""
        if self.gone_since is None:
            return False
        facts, daemon, shown = self.facts, self.state.daemon, policy.SHOWN_AFTER_DEATH_SECONDS
        # A daemon of a job or a pod ends with it, and does not start here again.
        of_job = self.in_job or facts.pipe_directory.startswith("/proc/")
        if (daemon.ended_at is not None and not daemon.died) or (of_job and not facts.configured):
            shown = policy.SHOWN_AFTER_QUIT_SECONDS
        return now - self.gone_since > shown

    def valid_probe(self, now: float, max_age_seconds: float) -> ControlObservation | None:
        """Return the last reply, unless age, logs or processes make it doubtful."""
        probe, reply, daemon = self.last_probe, self.answers.probe, self.state.daemon
        if (
            probe is None
            or probe.outcome is not Outcome.OK
            or not 0 <= now - probe.at < max_age_seconds  # negative: the clock was set back
            or self.answered_by != self.facts.process_identity
            or (daemon.configured_at or 0.0) >= probe.at
        ):
            return None
        if reply is None:  # the logs of an MPS v3 daemon do not show its clients
            return probe if self.answers.partitioning.protocol is not None else None
        silent_since = self.tracker.silent_since
        unchanged = (
            self.logs_readable
            and (silent_since is None or probe.at >= silent_since)
            and daemon.quit_requested_at is None
            and all(can_answer(process.pid, (process,)) for process in self.facts.processes)
            and {server.pid for server in self.state.servers} == set(reply.server_pids)
        )
        return probe if unchanged else None


class DaemonRegistry(UserDict[str, DaemonRecord]):
    """The daemons that run, are configured, or exited recently, by pipe directory."""

    def pids_to_watch(self) -> list[int]:
        """Return the PIDs whose exits must be noticed although no log shows the exits."""
        return _within_quota((one.facts, one.pids_to_watch()) for one in self.values())

    def pids_to_look_up(self) -> list[int]:
        """Return the PIDs that the logs name, and the last PIDs of daemons that were not found."""
        return _within_quota(
            (one.facts, [*one.missing_process(), *sorted(one.state.pids_to_look_up())])
            for one in self.values()
        )

    def refresh(self, found: Iterable[DaemonFacts], now: float) -> None:
        found = tuple(found)
        self._drop_renamed(found)
        names = set()
        for facts in found:
            record = self.get(facts.pipe_directory)
            if record is not None and not record.may_become(facts):
                continue
            names.add(facts.pipe_directory)
            if record is None:
                limits = OF_ORDINARY_USER if facts.limited else FULL
                record = DaemonRecord(facts, DaemonTracker(facts.pipe_directory, limits))
                self[facts.pipe_directory] = record
            record.record_found(facts, now)
        for name in self.keys() - names:
            record = self[name]
            record.record_absence(now)
            if record.outdated(now):
                del self[name]
        self._forget_oldest()
        self._set_foreign_writers()

    def _drop_renamed(self, found: Iterable[DaemonFacts]) -> None:
        """Drop daemons whose process is found under another name.

        A daemon in a container has a short name until a daemon of the host has the same name.
        """
        names = {facts.process_identity: facts.pipe_directory for facts in found}
        for name, record in list(self.items()):
            identity = record.facts.process_identity
            if identity is not None and names.get(identity, name) != name:
                del self[name]

    def _forget_oldest(self) -> None:
        """Drop the longest absent daemons over a limit, users' separately from all others."""
        gone = [
            (record.gone_since, name, record.facts)
            for name, record in self.items()
            if record.gone_since is not None and not record.facts.configured
        ]
        shares = _Shares(policy.MAX_ABSENT_DAEMONS), _Shares(policy.MAX_ABSENT_DAEMONS)
        for _, name, facts in sorted(gone, key=lambda one: one[0], reverse=True):
            if not shares[facts.limited].take(facts, 1):
                del self[name]

    def _set_foreign_writers(self) -> None:
        """Set, for daemons that share their logs, the PIDs of the other writers.

        Often only CUDA_MPS_PIPE_DIRECTORY is set for each GPU, and all daemons log into one
        directory. Only root's daemons and those of the same user can write there, whatever another
        user's daemon claims. PIDs of the daemon itself are never foreign: in a separate PID
        namespace, a user can give a process any number.
        """
        sharing: dict[str, list[DaemonRecord]] = {}
        for record in self.values():
            if record.facts.process is not None:
                sharing.setdefault(record.facts.log_path, []).append(record)
        for records in sharing.values():
            for record in records:
                record.tracker.foreign_pids = frozenset(
                    process.own_pid
                    for other in records
                    if other is not record and _may_write_into(other.facts, record.facts)
                    for process in other.facts.processes
                ) - {process.own_pid for process in record.facts.processes}


def _may_write_into(one: DaemonFacts, other: DaemonFacts) -> bool:
    """Return whether a daemon can write into another's logs: root of a container is not root."""
    if one.user == 0:
        return not one.limited or (other.limited and one.account == other.account)
    return one.user == other.user


class _Shares:
    """A limit for all daemons; those of one ordinary user can use a part of it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = Counter[tuple[int | None, int | None]]()

    def take(self, facts: DaemonFacts, wanted: int) -> int:
        """Return how many of the wanted items this daemon gets."""
        room = self._limit - self._used.total()
        if facts.limited:
            room = min(room, self._limit // policy.USERS_PER_LIMIT - self._used[facts.account])
        taken = max(0, min(wanted, room))
        self._used[facts.account] += taken
        return taken


def _within_quota(pids_of: Iterable[tuple[DaemonFacts, list[int]]]) -> list[int]:
    """Join the PIDs of all daemons; those of ordinary users' daemons come last, and are limited."""
    found, shares = list[int](), _Shares(policy.MAX_LOGGED_PIDS)
    for facts, pids in sorted(pids_of, key=lambda one: one[0].limited):
        found += pids[: shares.take(facts, len(pids))] if facts.limited else pids
    return found
