"""Which daemons there are and were, and what is kept of each between collections. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.mps.fault_evidence import KernelFault
from mps_exporter.mps.policy import FULL, OF_ORDINARY_USER
from mps_exporter.mps.server_queries import ServerAnswers, can_answer, has_resumed
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import (
    AddressRanges,
    ControlObservation,
    DaemonFacts,
    KernelObservation,
    LogState,
    Outcome,
)

GONE_AFTER_QUIT_SECONDS = 120.0
"""A daemon that was found, not configured, and quit in order, is shown as absent this long."""

GONE_AFTER_DEATH_SECONDS = 24 * 3600.0
"""The same for one that died."""

MAX_GONE_DAEMONS = 32
MAX_GONE_PER_USER = 8
"""So many daemons that are gone are remembered: of root and the exporter's own user, as many of all
others, and of one of those."""


MAX_PIDS_PER_USER = 512
MAX_PIDS = 2048
"""Maximum number of processes that are looked up because logs of ordinary users' daemons name them:
of one user, and of all."""


@dataclass(slots=True)
class DaemonRecord:
    """All that the collector keeps of one daemon between collections."""

    facts: DaemonFacts
    tracker: DaemonTracker
    in_job: bool = False
    """Its process was part of a Slurm job, or of a pod."""
    last_pid: int | None = None
    """Of its process, as it was found last."""
    gone_since: float | None = None
    last_probe: ControlObservation | None = None
    answered_by: tuple[int, float] | None = None
    """The process that gave the last answer."""
    answers: ServerAnswers = field(default_factory=ServerAnswers)
    was_readable: bool = False
    hung_at: float | None = None
    """When its last question was given up; None: that was answered."""
    resumed_at: float | None = None
    """When it, or one of its servers, was last seen to go on after it had been stopped."""
    logs: dict[str, LogState] = field(default_factory=dict)
    published_incidents: int = 0
    knows_ranges: bool = False
    """It was told of the address ranges that were read before it was found."""

    @property
    def state(self) -> DaemonState:
        """What its logs say."""
        return self.tracker.state

    @property
    def ephemeral(self) -> bool:
        """It belongs to a job or a pod, and ends with it: nobody starts it again by this name."""
        if self.facts.configured:
            return False
        return self.in_job or self.facts.pipe_directory.startswith("/proc/")

    @property
    def process_identity(self) -> tuple[int, float] | None:
        return _process_identity(self.facts)

    @property
    def known_absent(self) -> bool:
        """No process and nobody holds the lock: the tool need not be run to know."""
        facts = self.facts
        return facts.process is None and facts.lock_tested and facts.lock_holder_pid is None

    @property
    def logs_readable(self) -> bool:
        """Both of its logs can be read now."""
        return all(log in self.logs and self.logs[log].readable for log in ("control", "server"))

    def pids_to_watch(self) -> list[int]:
        """PIDs, as the host numbers them, whose end must be seen when it happens."""
        return self.missed() or _with_control_daemon(self.facts, self.state.pids_to_watch())

    @property
    def has_host_pids(self) -> bool:
        """Whether its logs number processes as the host does."""
        process = self.facts.process
        return process is not None and len(process.namespace_pids) <= 1

    def observe_kernel(
        self,
        observation: KernelObservation,
        faults: Sequence[KernelFault],
        earlier: Iterable[AddressRanges],
    ) -> None:
        """Apply what shows who caused a fault; an ordinary user's log names only own processes.

        Args:
            observation: What is new.
            faults: The last faults in the kernel log.
            earlier: The last ranges, for a daemon that is new.
        """
        facts, found = self.facts, observation.ranges if self.knows_ranges else earlier
        self.knows_ranges = True
        own = (one for one in found if not facts.limited or one.uid == facts.user)
        self.tracker.observe_kernel(readable=observation.readable, faults=faults, ranges=own)

    def missed(self) -> list[int]:
        """The process that it had, where none is found: a look can fail, and that proves no end."""
        return [self.last_pid] if self.facts.process is None and self.last_pid else []

    def clear_answers(self) -> None:
        """There is another process now, or none: what the last one said means nothing."""
        self.answers = ServerAnswers()
        self.last_probe = None
        self.hung_at = None

    def note(self, reply: ControlObservation) -> None:
        """Note whether a question was answered, if it was put."""
        if reply.outcome is not Outcome.SKIPPED:
            took = sum(exchange.duration_seconds for exchange in reply.exchanges)
            self.hung_at = reply.at + took if reply.outcome is Outcome.TIMEOUT else None

    def hangs(self, now: float) -> bool:
        """Whether its last query was not answered in time."""
        if self.hung_at is None:
            return False
        # What the log shows of it since is newer than the query that it did not answer.
        served_at = self.state.daemon.served_at
        return not (served_at and self.hung_at < served_at <= now)

    @property
    def resumed(self) -> bool:
        """Whether it was stopped when its last question hung, and goes on since."""
        hung_at, resumed_at = self.hung_at, self.resumed_at
        return hung_at is not None and resumed_at is not None and hung_at < resumed_at

    def note_log(self, state: LogState) -> None:
        """Note whether one of its logs can be read."""
        self.logs[state.log] = state
        self.was_readable |= state.log == "control" and state.readable

    def note_found(self, facts: DaemonFacts, now: float) -> None:
        if _process_identity(facts) != self.process_identity:
            self.clear_answers()
        if has_resumed(self.facts, facts):
            self.resumed_at = now
        self.facts = facts
        if facts.process is None:
            self.gone_since = self.gone_since or now
            return
        self.last_pid = facts.process.pid
        place = parse_cgroup(facts.process.cgroup)
        self.in_job = bool(place.slurm_job_id or place.pod_uid)
        self.gone_since = None

    def note_not_found(self, now: float) -> None:
        """Note that nothing of it was found in /proc."""
        self.facts = replace(self.facts, process=None, servers=(), lock_holder_pid=None)
        self.gone_since = self.gone_since or now

    def is_not_succeeded_by(self, facts: DaemonFacts) -> bool:
        """Whether it is root's, and the other one an ordinary user's.

        The directory of a daemon in a container may be an ordinary user's on the host: a process
        of that user there must not hide that root's daemon ended.
        """
        others = _process_identity(facts) != self.process_identity
        return others and facts.limited and not self.facts.limited

    def outdated(self, now: float) -> bool:
        """Whether it has been gone for longer than it is shown."""
        if self.gone_since is None or now - self.gone_since <= GONE_AFTER_QUIT_SECONDS:
            return False
        daemon = self.state.daemon
        quit_in_order = daemon.ended_at is not None and not daemon.died
        short_retention = quit_in_order or self.ephemeral
        max_age_seconds = GONE_AFTER_QUIT_SECONDS if short_retention else GONE_AFTER_DEATH_SECONDS
        return now - self.gone_since > max_age_seconds

    def v3_answer_holds(self, probe: ControlObservation) -> bool:
        """Whether this answer of a v3 daemon is its process's, and not known to be old."""
        return (
            self.answers.configured is not None
            and probe.outcome is Outcome.OK
            and self.answered_by == self.process_identity
            and (self.state.daemon.configured_at or 0.0) < probe.at
        )

    def unchanged_since(self, probe: ControlObservation, server_pids: Iterable[int]) -> bool:
        """Whether logs and processes show that this answer, with these servers, still holds."""
        silent_since = self.tracker.silent_since
        if silent_since is not None and probe.at < silent_since:
            return False
        daemon = self.state.daemon
        return (
            probe.outcome is Outcome.OK
            and self.logs_readable
            and self.answered_by == self.process_identity
            and all(can_answer(process.pid, (process,)) for process in self.facts.processes)
            and daemon.quit_requested_at is None
            and (daemon.configured_at or 0.0) < probe.at
            and {server.pid for server in self.state.servers} == set(server_pids)
        )


class DaemonRegistry(Mapping[str, DaemonRecord]):
    """The daemons that run, are configured, or ended not long ago, by pipe directory."""

    def __init__(self) -> None:
        self._records: dict[str, DaemonRecord] = {}

    def __getitem__(self, pipe_directory: str) -> DaemonRecord:
        return self._records[pipe_directory]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def pids_to_watch(self) -> list[int]:
        """PIDs whose end must be seen when it happens: no log shows it."""
        return _within_quota((one.facts, one.pids_to_watch()) for one in self._records.values())

    def pids_to_look_up(self) -> list[int]:
        """PIDs that the logs name, and daemons that were not found."""
        return _within_quota(
            (one.facts, [*one.missed(), *sorted(one.state.pids_to_look_up())])
            for one in self._records.values()
        )

    def update(self, found: Iterable[DaemonFacts], now: float) -> None:
        """Keep the records up with the daemons that were found in /proc."""
        found = tuple(found)
        self._drop_renamed(found)
        names = set()
        for facts in found:
            record = self._records.get(facts.pipe_directory)
            if record is not None and record.is_not_succeeded_by(facts):
                continue
            names.add(facts.pipe_directory)
            if record is None:
                record = DaemonRecord(facts, _tracker(facts))
                self._records[facts.pipe_directory] = record
            record.note_found(facts, now)
        for name in self._records.keys() - names:
            record = self._records[name]
            record.note_not_found(now)
            if record.outdated(now):
                del self._records[name]
        self._forget_oldest()
        self._set_foreign_writers()

    def _drop_renamed(self, found: Iterable[DaemonFacts]) -> None:
        """Begin anew with daemons that have another name now, and with those that have theirs.

        A daemon in a container has the short name of its directory until one of the host's own
        has the same directory. What was read of one says nothing of the other, least of all that
        it has ended.
        """
        names = {_process_identity(facts): facts.pipe_directory for facts in found}
        for name, record in list(self._records.items()):
            identity = record.process_identity
            if identity is not None and names.get(identity, name) != name:
                del self._records[name]

    def _forget_oldest(self) -> None:
        """Of the daemons that are gone, keep the last ones; a user's do not replace root's."""
        gone = [
            (record.gone_since, name, record.facts)
            for name, record in self._records.items()
            if record.gone_since is not None and not record.facts.configured
        ]
        kept, users = Counter[bool](), Counter[int | None]()
        for _, name, facts in sorted(gone, key=lambda one: one[0], reverse=True):
            kept[facts.limited] += 1
            users[facts.user] += facts.limited
            if kept[facts.limited] > MAX_GONE_DAEMONS or users[facts.user] > MAX_GONE_PER_USER:
                del self._records[name]

    def _set_foreign_writers(self) -> None:
        """Tell the daemons that write to the same logs which lines are not theirs.

        Often only CUDA_MPS_PIPE_DIRECTORY is set for each GPU, and all log into one directory. A
        daemon of another user writes no such line, whatever it says of its log directory (root's
        may); and PIDs that the daemon itself has are its own: in a PID namespace of his, a user can
        give a process the number of any other.
        """
        sharing: dict[str, list[DaemonRecord]] = {}
        for record in self._records.values():
            if record.facts.process is not None:
                sharing.setdefault(record.facts.log_path, []).append(record)
        for records in sharing.values():
            for record in records:
                writers = (0, record.facts.user)
                record.tracker.foreign_pids = frozenset(
                    process.own_pid
                    for other in records
                    if other is not record and other.facts.user in writers
                    for process in other.facts.processes
                ) - {process.own_pid for process in record.facts.processes}


def _tracker(facts: DaemonFacts) -> DaemonTracker:
    return DaemonTracker(facts.pipe_directory, OF_ORDINARY_USER if facts.limited else FULL)


def _process_identity(facts: DaemonFacts) -> tuple[int, float] | None:
    process = facts.process
    return None if process is None else (process.pid, process.start_time_seconds)


def _with_control_daemon(facts: DaemonFacts, logged: list[int]) -> list[int]:
    """Return the control daemon and the processes that its logs name, as the host numbers them.

    A daemon in a PID namespace of its own numbers its servers and clients otherwise.
    """
    process = facts.process
    if process is None:
        return []
    return [process.pid] if len(process.namespace_pids) > 1 else [process.pid, *logged]


def _within_quota(pids_of: Iterable[tuple[DaemonFacts, list[int]]]) -> list[int]:
    """Join the PIDs of all daemons: those of limited daemons last, and few."""
    found, users, total = list[int](), Counter[int | None](), 0
    for facts, pids in sorted(pids_of, key=lambda one: one[0].limited):
        if facts.limited:
            room = max(0, min(MAX_PIDS_PER_USER - users[facts.user], MAX_PIDS - total))
            del pids[room:]
            users[facts.user] += len(pids)
            total += len(pids)
        found += pids
    return found
