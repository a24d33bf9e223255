"""When the servers are queried, and what their replies change.

The control daemon has one thread: a query that a stuck server does not reply to blocks the daemon
for every user. So servers are queried rarely, and only those whose process looks responsive.

A reply changes the state of a daemon only where it differs from the logs, and counts at most the
ends of clients. Readable logs take precedence, because a reply may be older or newer than their
last line: what they contradict is changed only after a second reply with the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.clients import TrackedClient
from mps_exporter.mps.incidents_and_counters import Moment
from mps_exporter.mps.protocol_v3 import joined, parse_lists
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.tool_commands import ProbeReply, ServerReply, parse_probe, server_replies
from mps_exporter.observations import ControlObservation, DaemonFacts, Outcome, ProcessFacts
from mps_exporter.snapshot import Partitioning

UNRESPONSIVE_PROCESS_STATES = frozenset("DTtZX")
"""States of a process that does not respond: blocked in the kernel (mostly for a moment), stopped,
traced, zombie, dead."""


# ---------------------------------------------------------------------------- last replies


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """The last replies of a daemon about itself and its servers that are still alive."""

    probe: ProbeReply | None = None
    servers: Mapping[int, ServerReply] = field(default_factory=dict)
    """Server PID, in the daemon's PID namespace -> its replies."""
    asked_at: float | None = None  # When servers were last queried.
    answered_at: Mapping[int, float] = field(default_factory=dict)  # Server PID -> time of reply.
    unexplained: frozenset[int] = frozenset()
    """Servers without a reply, or listed by only the daemon or only the log, at the last query."""
    protocol: Literal["2", "3"] | None = None  # Interface of the last reply.
    partitioning: Partitioning = field(default_factory=Partitioning)
    """Named servers, namespaces and partitions, from the last probe and, for a v3 daemon, the
    reconciliation after it."""

    def v3_due(self, probe: ControlObservation) -> bool:
        """Return whether to query a v3 daemon for its clients and partitions after this probe."""
        asked = self.asked_at is not None and self.asked_at >= probe.at
        return self.partitioning.protocol == "3" and not asked

    def younger_than(self, seconds: float, now: float) -> ServerAnswers:
        young = {
            pid: reply
            for pid, reply in self.servers.items()
            if now - self.answered_at.get(pid, now) <= seconds
        }
        return self if len(young) == len(self.servers) else replace(self, servers=young)

    def device_uuids(self) -> dict[int, str]:
        """Return device ordinal of the daemon -> GPU UUID."""
        maps = (reply.devices or {} for reply in self.servers.values())
        return {ordinal: uuid for devices in maps for ordinal, uuid in devices.items()}


def with_probe(answers: ServerAnswers, observation: ControlObservation | None) -> ServerAnswers:
    """Apply a probe; drop replies of servers that it does not list."""
    reply, found = None, Partitioning()
    if observation is not None and observation.outcome is Outcome.OK:
        replies = map(parse_probe, observation.exchanges)
        reply = next((one for one in replies if isinstance(one, ProbeReply)), None)
        found = parse_lists(observation)
        # Details older than this probe are dropped: they are queried next.
        if found.protocol is not None and (answers.asked_at or 0.0) >= observation.at:
            found = joined(found, answers.partitioning)
    protocol = "2" if reply is not None else found.protocol
    answers = replace(answers, partitioning=found, protocol=protocol or answers.protocol)
    if reply is None:
        return replace(answers, probe=None)
    listed = set(reply.server_pids)
    alive = {pid: last_reply for pid, last_reply in answers.servers.items() if pid in listed}
    return replace(answers, probe=reply, servers=alive)


def with_servers(
    answers: ServerAnswers,
    observation: ControlObservation,
    requested: Collection[int] = (),
    logged: Collection[int] = (),
) -> ServerAnswers:
    """Apply a reconciliation of the `requested` servers; `logged` are the servers in the log then.

    The map of devices, queried once in a server's life, is kept.
    """
    if observation.outcome is Outcome.SKIPPED:
        return answers  # no server was queried
    if (details := parse_lists(observation)).protocol is not None:
        found = joined(answers.partitioning, details)
        return replace(answers, partitioning=found, asked_at=observation.at)
    servers = dict(answers.servers)
    answered_at = {pid: at for pid, at in answers.answered_at.items() if pid in servers}
    for reply in server_replies(observation):
        known = servers.get(reply.server_pid)
        if reply.devices is None and known is not None:
            reply = replace(reply, devices=known.devices)  # noqa: PLW2901 - the same, completed
        servers[reply.server_pid] = reply
        answered_at[reply.server_pid] = observation.at
    answers = replace(answers, servers=servers, asked_at=observation.at, answered_at=answered_at)
    return replace(answers, unexplained=_unexplained(answers, requested, logged))


def _unexplained(
    answers: ServerAnswers, requested: Collection[int], logged: Collection[int]
) -> frozenset[int]:
    """Return servers without a reply, and servers that only the list or only the log has."""
    listed = answers.probe.server_pids if answers.probe is not None else ()
    return (frozenset(requested) - answers.servers.keys()) | (frozenset(listed) ^ frozenset(logged))


# ---------------------------------------------------------------------------- when to query


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
    """Return the servers to query now, in the daemon's PID namespace: all responsive ones, or none.

    No server while the daemon quits, or a server is deaf or a ghost: a query may then hang.
    """
    if answers.probe is None or state.daemon.quit_requested_at is not None:
        return ()
    accepts_none = (one for one in state.servers if one.ghost or one.deaf_since is not None)
    if any(one.missing_since is None for one in accepts_none):
        return ()
    logged = {server.pid: server for server in state.servers}
    responsive = tuple(
        pid
        for pid in sorted(set(answers.probe.server_pids))
        if can_answer(pid, facts.servers) and not (pid in logged and _is_starting(logged[pid], now))
    )
    asked_at = answers.asked_at
    if asked_at is None or asked_at > now:  # in the future: the clock was set back
        return responsive
    age = now - asked_at
    due = (
        age >= interval_seconds
        or (not logs_readable and age >= blind_interval_seconds)
        or (state.daemon.configured_at is not None and state.daemon.configured_at >= asked_at)
        or _is_retry_due(answers, responsive, logged, age)
    )
    return responsive if due else ()


def _is_starting(server: TrackedServer, now: float) -> bool:
    """Return whether a server is not ready yet, or was started a moment ago."""
    not_ready = server.ready_at is None and not server.start_unknown
    return not_ready or 0 <= now - server.started_at < policy.MIN_QUERY_AGE_SECONDS


def _is_retry_due(
    answers: ServerAnswers, responsive: Collection[int], logged: Collection[int], age: float
) -> bool:
    """Return whether a server is unexplained, and the retry interval has passed."""
    unexplained = _unexplained(answers, responsive, logged)
    again = unexplained == answers.unexplained
    interval = policy.QUERY_RETRY_INTERVAL_SECONDS if again else policy.MIN_QUERY_AGE_SECONDS
    return bool(unexplained) and age >= interval


def has_resumed(before: DaemonFacts, after: DaemonFacts) -> bool:
    """Return whether the daemon or one of its servers was stopped and now runs again."""
    was = {(one.pid, one.start_time_seconds) for one in before.processes if one.stopped}
    return any(
        (one.pid, one.start_time_seconds) in was and not one.stopped for one in after.processes
    )


def can_answer(server_pid: int, processes: tuple[ProcessFacts, ...]) -> bool:
    """Return whether a server's process looks responsive, or is not visible."""
    for process in processes:
        if server_pid in (process.pid, *process.namespace_pids[-1:]):
            return process.state not in UNRESPONSIVE_PROCESS_STATES
    return True


# ---------------------------------------------------------------------------- effect on the state


def reconcile(
    state: DaemonState, at: float, listed: Collection[int] | None, replies: Iterable[ServerReply]
) -> None:
    """Apply the replies to one query. `listed` are the servers in the daemon's list."""
    now = state.moment(at)
    if not any(state.readable.values()):
        state.advance_to(at)
    if listed is not None:
        _reconcile_servers(state, now, listed)
    for reply in replies:
        server = state.servers.get(reply.server_pid)
        if server is not None:
            for ordinal, uuid in (reply.devices or {}).items():
                state.gpus.add_ordinal(ordinal, uuid, at)
                state.gpus.add_gpu(uuid)
            if reply.client_pids is not None:
                _reconcile_clients(server, now, reply.client_pids)


def _reconcile_servers(state: DaemonState, now: Moment, listed: Collection[int]) -> None:
    servers = state.servers
    for pid in listed:
        known = servers.get(pid) or servers.restore_vanished(pid)
        if known is not None:
            known.unlisted_since = None
            if known.start_unknown and known.ready_at is None:
                known.ready_at = known.started_at
        elif not servers.has_ended(pid):
            # The list may be older than a logged exit, and newer than the last line.
            state.advance_to(now.at)
            servers.adopt(pid, now.at).ready_at = now.at
    for server in servers:
        if server.pid in listed or now.at - server.started_at <= policy.LOG_PRECEDENCE_SECONDS:
            continue
        if not state.readable["control"]:
            server.missing_since = server.missing_since or now.at
        elif server.ready_at is not None:
            server.unlisted_since = server.unlisted_since or now.at
            if now.at - server.unlisted_since >= policy.CONTRADICTION_CONFIRM_SECONDS:
                servers.mark_vanished(server)


def _reconcile_clients(server: TrackedServer, now: Moment, client_pids: Collection[int]) -> None:
    state, reported = server.daemon, {pid for pid in client_pids if pid}
    gone: Collection[TrackedClient] = ()
    if server.logs_pids is not None and state.readable["server"] and not server.start_unknown:
        # The server's log shows all clients, except those whose lines were lost.
        contradicted = _contradicted(server, now.at, reported)
        gone = [client for client in server.clients if client.pid in contradicted - reported]
        reported &= contradicted
    elif not state.readable["server"]:
        gone = [
            client
            for client in server.clients
            if client.pid
            and client.pid not in reported
            and now.at - client.connected_at > policy.LOG_PRECEDENCE_SECONDS
        ]
    for client in gone:
        state.advance_to(now.at)
        server.clients.confirm_exit(client, now)
    for pid in sorted(reported):
        server.clients.adopt(pid, now.at)


def _contradicted(server: TrackedServer, at: float, reported: set[int]) -> frozenset[int]:
    """Return the clients about which two replies, 10 s apart, contradict the log alike."""
    logged = {client.pid for client in server.clients}
    if 0 in logged:
        return frozenset()  # the log does not contain PIDs
    since, before = server.contradiction
    now = frozenset(reported ^ logged)
    if not before or at < since:
        server.contradiction = at, now
    elif at - since >= policy.CONTRADICTION_CONFIRM_SECONDS:
        server.contradiction = at, now
        return now & before
    return frozenset()
