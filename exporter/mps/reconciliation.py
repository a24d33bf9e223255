"""When the servers are asked, and what their answers add up to.

The control daemon has one thread: a question that a stuck server does not answer blocks the daemon
for every user. So servers are asked seldom, and only those whose process looks able to answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from exporter.model import LedgerView
from exporter.mps.control_text import (
    Device,
    ProbeReply,
    ServerReply,
    read_probe,
    read_reconciliation,
)
from exporter.observations import ControlObservation, DaemonFacts, Outcome, ProcessFacts

UNABLE_STATES = frozenset("TtZX")
"""States of a process that answers nobody: stopped, traced, zombie, dead."""

SETTLING_SECONDS = 1.0
"""A server this young is left alone: its log lines may not have been read yet."""


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """The last answers of a daemon and of its servers that are still alive."""

    probe: ProbeReply | None = None
    servers: Mapping[int, ServerReply] = field(default_factory=dict)
    """Server PID, as the daemon numbers processes -> its answers."""
    asked_at: float | None = None

    def device_uuids(self) -> dict[int, str]:
        """Device ordinal of the daemon -> GPU UUID."""
        devices: list[Device] = []
        for reply in self.servers.values():
            devices += reply.devices or ()
        return {device.ordinal: device.uuid for device in devices}


def with_probe(answers: ServerAnswers, observation: ControlObservation | None) -> ServerAnswers:
    """Take in a probe: servers that are gone lose their answers."""
    reply = probe_reply(observation)
    if reply is None:
        return replace(answers, probe=None)
    alive = {pid: said for pid, said in answers.servers.items() if pid in reply.server_pids}
    return replace(answers, probe=reply, servers=alive)


def with_servers(answers: ServerAnswers, observation: ControlObservation) -> ServerAnswers:
    """Take in a reconciliation; what was asked once in a server's life is kept."""
    servers = dict(answers.servers)
    for reply in server_replies(observation):
        known = servers.get(reply.server_pid)
        if reply.devices is None and known is not None:
            reply = replace(reply, devices=known.devices)  # noqa: PLW2901 - the same, completed
        servers[reply.server_pid] = reply
    return replace(answers, servers=servers, asked_at=observation.at)


def server_replies(observation: ControlObservation) -> list[ServerReply]:
    """What the servers said in a reconciliation, failures left out."""
    replies = read_reconciliation(observation)
    return [reply for reply in replies if isinstance(reply, ServerReply)]


def probe_reply(observation: ControlObservation | None) -> ProbeReply | None:
    """What a probe brought; None when it failed."""
    if observation is None or observation.outcome is not Outcome.OK:
        return None
    for exchange in observation.exchanges:
        reply = read_probe(exchange)
        if isinstance(reply, ProbeReply):
            return reply
    return None


def due(
    *,
    now: float,
    interval_seconds: float,
    blind_interval_seconds: float,
    answers: ServerAnswers,
    facts: DaemonFacts,
    view: LedgerView,
    logs_readable: bool,
) -> tuple[int, ...]:
    """Which servers to ask now, as the daemon numbers them.

    All that are able, when the interval is over, or when the daemon has a server that the log does
    not explain or the other way round; where the logs cannot be read, when the shorter blind
    interval is over. None while the daemon is asked to quit or holds a ghost: both make it deaf.
    """
    if answers.probe is None or view.quit_requested_at is not None:
        return ()
    if any(server.ghost for server in view.servers):
        return ()
    listed = set(answers.probe.server_pids)
    logged = {server.pid: server for server in view.servers}
    age = None if answers.asked_at is None else now - answers.asked_at
    unexplained = logs_readable and listed != logged.keys()
    never_asked = listed - answers.servers.keys()
    wanted = (
        age is None
        or (not logs_readable and age >= blind_interval_seconds)
        or age >= interval_seconds
        or bool(never_asked)
        or (unexplained and age >= SETTLING_SECONDS)
    )
    if not wanted:
        return ()
    return tuple(
        pid
        for pid in sorted(listed)
        if able(pid, facts.servers)
        and not (pid in logged and logged[pid].ready_at is None)
        and not (pid in logged and now - logged[pid].started_at < SETTLING_SECONDS)
    )


def able(server_pid: int, processes: tuple[ProcessFacts, ...]) -> bool:
    """Whether a server's process looks able to answer; one that cannot be seen may be."""
    for process in processes:
        if server_pid in (process.pid, *process.namespace_pids[-1:]):
            return process.state not in UNABLE_STATES
    return True
