"""Which processes have exited, by /proc: no line of a log says so.

A process may be seen to be gone before the log has been read up to that moment. So an exit is noted
first, and applied when the log is read up to a second after it: the lines of an orderly end would
be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from mps_exporter.mps.record import Moment
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonLifetime, DaemonState
from mps_exporter.observations import DaemonFacts, ProcessFacts

IsAlive = Callable[[int, float], bool | None]
"""(PID as the log prints it, a moment at which it was alive) -> whether that process is there.
False also when its PID was reused; None: not known."""


class _HasMissingSince(Protocol):
    missing_since: float | None


EXIT_CONFIRM_SECONDS = 1.0
"""A process was seen to be gone: its last lines are in the log by then, if it wrote any."""

LOST_LINE_SECONDS = 10.0
"""server.log shows when a client disconnects. If it has not so long after, the line was lost."""

START_TIME_TOLERANCE_SECONDS = 2.0
"""How far the start times of /proc may be off: they are counted in ticks since boot."""


def liveness_from_proc(
    facts: DaemonFacts,
    processes: Mapping[int, ProcessFacts],
    requested: frozenset[int],
    started_at: float | None = None,
) -> tuple[IsAlive, bool | None]:
    """Return which processes are alive by /proc, and whether the daemon is.

    Nothing is known of processes of a daemon whose PIDs are not the host's.

    Args:
        facts: The daemon.
        processes: Those that are there.
        requested: Those that were looked for.
        started_at: When the daemon started, by its log. If /proc says later, then the clock was
            set forward since: stamps from before that make processes look too young.
    """
    daemon = facts.process
    if daemon is None:
        # Only a daemon that was found by its process can be missing.
        held = facts.lock_holder_pid is not None
        return (lambda _pid, _at: None), held if facts.lock_tested else None
    if len(daemon.namespace_pids) > 1:
        return (lambda _pid, _at: None), True

    children = {server.pid for server in facts.servers}
    slack = START_TIME_TOLERANCE_SECONDS
    if started_at is not None:
        slack += max(0.0, daemon.start_time_seconds - started_at)

    def alive(pid: int, at: float) -> bool | None:
        if pid not in requested:
            return None
        process = processes.get(pid)
        if process is None or process.ended:
            return False
        return pid in children or process.start_time_seconds <= at + slack

    return alive, not daemon.ended


def note_missing(state: DaemonState, now: float, alive: IsAlive, daemon: bool | None) -> None:
    """Note which processes are gone, and which are there after all."""
    lifetime = state.daemon
    if daemon and lifetime.ended_at is not None and not state.readable["control"]:
        lifetime = state.daemon = DaemonLifetime()  # another one started, and no log shows it
    lifetime.counted |= bool(daemon)
    if lifetime.ended_at is None:
        _update_missing_since(lifetime, now, daemon)
    for entry in state.queue:
        if entry.pid and not entry.dead:
            _update_missing_since(entry, now, alive(entry.pid, entry.since))
    for server in state.servers:
        _update_missing_since(server, now, alive(server.pid, server.started_at))
        server.note_missing_queued(alive)
        for client in server.clients:
            if client.pid:
                _update_missing_since(client, now, alive(client.pid, client.connected_at))


def _update_missing_since(process: _HasMissingSince, now: float, alive: bool | None) -> None:
    if alive is False:
        process.missing_since = min(process.missing_since or now, now)
    elif alive:
        process.missing_since = None


def confirm_exits(state: DaemonState, complete_until: float) -> None:
    """Apply the exits that are certain, given that the logs have been read up to this moment."""
    now = state.moment(complete_until)
    lifetime = state.daemon
    died_at = _confirmed_at(lifetime, complete_until)
    if lifetime.ended_at is None and died_at is not None:
        state.daemon_died(now._replace(at=died_at, counted=now.counted and lifetime.counted))
    for entry in state.queue:
        at = _confirmed_at(entry, complete_until)
        if at is not None and not entry.dead:
            entry.abandon(now._replace(at=at))
            entry.dead = True
    for server in state.servers:
        gone_at = _confirmed_at(server, complete_until)
        if gone_at is not None:
            _confirm_server_exit(state, server, now._replace(at=gone_at))
        else:
            _confirm_client_exits(server, now)
            server.detect_ghost(now)


def _confirmed_at(
    process: _HasMissingSince, complete_until: float, seconds: float = EXIT_CONFIRM_SECONDS
) -> float | None:
    """Return when a process exited, if that is certain by now."""
    at = process.missing_since
    return at if at is not None and complete_until >= at + seconds else None


def _confirm_server_exit(state: DaemonState, server: TrackedServer, when: Moment) -> None:
    """A server is gone, and control.log does not say so."""
    if state.daemon.missing_since is not None and state.daemon.ended_at is None:
        return  # the daemon is gone, too, which explains it
    if state.readable["control"]:
        state.servers.mark_vanished(server, when)  # a line was lost, not recognized, or is late
    elif state.readable["server"]:
        state.server_exited(server, when)
    else:
        state.servers.remove(server)


def _confirm_client_exits(server: TrackedServer, now: Moment) -> None:
    confirm_seconds = LOST_LINE_SECONDS if server.names_clients else EXIT_CONFIRM_SECONDS
    for client in server.clients:
        at = _confirmed_at(client, now.at, confirm_seconds)
        if at is not None:
            server.clients.confirm_exit(client, now._replace(at=at))
