"""When the servers are asked, and what their answers add up to.

The control daemon has one thread: a question that a stuck server does not answer blocks the daemon
for every user. So servers are asked seldom, and only those whose process looks able to answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from mps_exporter.mps.control_protocol import (
    ProbeReply,
    ServerReply,
    parse_probe,
    parse_reconciliation,
)
from mps_exporter.mps.protocol_v3 import joined, parse_v2_partitions, parse_v3
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonState
from mps_exporter.observations import ControlObservation, DaemonFacts, Outcome, ProcessFacts
from mps_exporter.snapshot import Partitioning

UNRESPONSIVE_PROCESS_STATES = frozenset("DTtZX")
"""States of a process that does not respond: blocked in the kernel (mostly for a moment), stopped,
traced, zombie, dead."""

BACKOFF_SECONDS = 60.0
"""Shortest interval after a reply that explained nothing; it doubles each time."""

SETTLING_SECONDS = 1.0
"""A server this young is left alone: its log lines may not have been read yet."""


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """The last answers of a daemon and of its servers that are still alive."""

    probe: ProbeReply | None = None
    servers: Mapping[int, ServerReply] = field(default_factory=dict)
    """Server PID, as the daemon numbers processes -> its answers."""
    asked_at: float | None = None
    answered_at: Mapping[int, float] = field(default_factory=dict)
    """Server PID -> when it gave its answers."""
    failed_attempts: Mapping[int, int] = field(default_factory=dict)
    """Server PID -> how often it was asked and gave no answer that is understood."""
    disputed: frozenset[int] = frozenset()
    """Servers that the daemon named and the log did not, or the other way round, when asked."""
    disputes: int = 0
    """How often the same ones were disputed."""
    protocol: Literal["2", "3"] | None = None
    """In which interface it gave its last answer."""
    configured: Partitioning | None = None
    """What a probe said of named servers, namespaces and partitions."""
    details: Partitioning | None = None
    """What a v3 daemon said of them in a reconciliation."""

    @property
    def partitioning(self) -> Partitioning | None:
        """All of it; None: of a daemon without any of these."""
        return joined(self.configured, self.details)

    def v3_due(self, probe: ControlObservation) -> bool:
        """Whether to ask a v3 daemon for its clients and partitions: once after each probe."""
        named = self.configured is not None and self.configured.protocol == "3"
        return named and (self.asked_at is None or self.asked_at < probe.at)

    def younger_than(self, seconds: float, now: float) -> ServerAnswers:
        """Leave out the servers whose answers are older than this."""
        young = {
            pid: reply
            for pid, reply in self.servers.items()
            if now - self.answered_at.get(pid, now) <= seconds
        }
        return self if len(young) == len(self.servers) else replace(self, servers=young)

    def device_uuids(self) -> dict[int, str]:
        """Device ordinal of the daemon -> GPU UUID."""
        maps = (reply.devices or {} for reply in self.servers.values())
        return {ordinal: uuid for devices in maps for ordinal, uuid in devices.items()}


def with_probe(answers: ServerAnswers, observation: ControlObservation | None) -> ServerAnswers:
    """Apply a probe: servers that are gone lose their answers."""
    reply = probe_reply(observation)
    configured = None
    if observation is not None and observation.outcome is Outcome.OK:
        configured = parse_v3([observation]) or parse_v2_partitions(observation)
    # What is older than this probe is asked for next; should that fail, it is not known.
    asked_since = observation is not None and (answers.asked_at or 0.0) >= observation.at
    details = answers.details if configured is not None and asked_since else None
    spoken = "2" if reply is not None else configured.protocol if configured is not None else None
    answers = replace(
        answers, configured=configured, details=details, protocol=spoken or answers.protocol
    )
    if reply is None:
        return replace(answers, probe=None)
    listed = set(reply.server_pids)
    alive = {pid: last_reply for pid, last_reply in answers.servers.items() if pid in listed}
    tried = {pid: count for pid, count in answers.failed_attempts.items() if pid in listed}
    return replace(answers, probe=reply, servers=alive, failed_attempts=tried)


def with_servers(
    answers: ServerAnswers,
    observation: ControlObservation,
    requested: Collection[int] = (),
    logged: Collection[int] | None = None,
) -> ServerAnswers:
    """Apply a reconciliation; what is queried once in a server's life is kept.

    Args:
        answers: What is known.
        observation: The reconciliation.
        requested: The servers that were queried.
        logged: The servers that the log named then; None: not compared.
    """
    if observation.outcome is Outcome.SKIPPED:
        return answers  # no server was queried
    if (details := parse_v3([observation])) is not None:
        return replace(answers, details=details, asked_at=observation.at)
    servers = dict(answers.servers)
    answered_at = {pid: at for pid, at in answers.answered_at.items() if pid in servers}
    for reply in server_replies(observation):
        known = servers.get(reply.server_pid)
        if reply.devices is None and known is not None:
            reply = replace(reply, devices=known.devices)  # noqa: PLW2901 - the same, completed
        servers[reply.server_pid] = reply
        answered_at[reply.server_pid] = observation.at
    tried = {
        pid: answers.failed_attempts.get(pid, 0) + 1 for pid in requested if pid not in servers
    }
    disputed = _disputed(answers, logged)
    return replace(
        answers,
        servers=servers,
        asked_at=observation.at,
        answered_at=answered_at,
        failed_attempts={**answers.failed_attempts, **tried},
        disputed=disputed,
        disputes=answers.disputes + 1 if disputed == answers.disputed else 1,
    )


def _disputed(answers: ServerAnswers, logged: Collection[int] | None) -> frozenset[int]:
    """The servers of which only the daemon's list or only the log knows."""
    if answers.probe is None or logged is None:
        return frozenset()
    return frozenset(set(answers.probe.server_pids) ^ set(logged))


def server_replies(observation: ControlObservation) -> list[ServerReply]:
    """What the servers said in a reconciliation, failures left out."""
    replies = parse_reconciliation(observation)
    return [reply for reply in replies if isinstance(reply, ServerReply)]


def probe_reply(observation: ControlObservation | None) -> ProbeReply | None:
    """What a probe brought; None when it failed."""
    if observation is None or observation.outcome is not Outcome.OK:
        return None
    for exchange in observation.exchanges:
        reply = parse_probe(exchange)
        if isinstance(reply, ProbeReply):
            return reply
    return None


def servers_due(
    *,
    now: float,
    interval_seconds: float,
    blind_interval_seconds: float,
    answers: ServerAnswers,
    facts: DaemonFacts,
    state: DaemonState,
    logs_readable: bool,
) -> tuple[int, ...]:
    """Which servers to ask now, as the daemon numbers them.

    All that are able, when the interval is over, or when the daemon has a server that the log does
    not explain or the other way round; where the logs cannot be read, when the shorter blind
    interval is over. None while the daemon is asked to quit or holds a ghost: both block it.
    """
    if answers.probe is None or state.daemon.quit_requested_at is not None:
        return ()
    if any(server.is_ghost for server in state.servers):
        return ()
    logged = {server.pid: server for server in state.servers}
    askable = tuple(
        pid
        for pid in sorted(set(answers.probe.server_pids))
        if can_answer(pid, facts.servers) and not (pid in logged and _is_starting(logged[pid], now))
    )
    asked_at = answers.asked_at
    if asked_at is None or asked_at > now:  # in the future: the clock was set back
        return askable
    age = now - asked_at
    wanted = (
        age >= interval_seconds
        or (not logs_readable and age >= blind_interval_seconds)
        or (state.daemon.configured_at is not None and state.daemon.configured_at >= asked_at)
        or _is_retry_due(answers, askable, age)
        or (logs_readable and _is_dispute_due(answers, logged, age))
    )
    return askable if wanted else ()


def _is_starting(server: TrackedServer, now: float) -> bool:
    """Whether it is not ready yet, or was started a moment ago."""
    not_ready = server.ready_at is None and not server.start_unknown
    return not_ready or 0 <= now - server.started_at < SETTLING_SECONDS


def _is_retry_due(answers: ServerAnswers, askable: Collection[int], age: float) -> bool:
    """Whether a server that has not answered yet may be asked again."""
    return any(
        age >= _backoff(answers.failed_attempts.get(pid, 0))
        for pid in askable
        if pid not in answers.servers
    )


def _is_dispute_due(answers: ServerAnswers, logged: Collection[int], age: float) -> bool:
    """Whether log and answers contradict each other, and have not just been compared."""
    disputed = _disputed(answers, logged)
    disputes = answers.disputes if disputed == answers.disputed else 0
    return bool(disputed) and age >= max(SETTLING_SECONDS, _backoff(disputes))


def _backoff(failed_attempts: int) -> float:
    """How long to wait before the same question, after so many that explained nothing."""
    return 0.0 if failed_attempts == 0 else BACKOFF_SECONDS * 2.0 ** min(failed_attempts - 1, 10)


def has_resumed(before: DaemonFacts, after: DaemonFacts) -> bool:
    """Whether the daemon or one of its servers was stopped, and goes on now."""
    was = {(one.pid, one.start_time_seconds) for one in before.processes if one.stopped}
    return any(
        (one.pid, one.start_time_seconds) in was and not one.stopped for one in after.processes
    )


def can_answer(server_pid: int, processes: tuple[ProcessFacts, ...]) -> bool:
    """Whether a server's process looks able to answer; one that cannot be seen may be."""
    for process in processes:
        if server_pid in (process.pid, *process.namespace_pids[-1:]):
            return process.state not in UNRESPONSIVE_PROCESS_STATES
    return True
