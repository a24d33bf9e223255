"""What /proc tells and no log line does: which processes are gone.

A process may be seen to be gone before the log has been read so far. So a death is noted first, and
believed only when the log is read up to a second after it: had it been an orderly end, its lines
would be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import EXIT_CONFIRM_SECONDS, DaemonLifetime, DaemonState
from mps_exporter.observations import DaemonFacts, ProcessFacts

IsAlive = Callable[[int, float], bool | None]
"""(PID as the log prints it, a moment at which it was alive) -> whether that process is there.
False also when its number was given to a younger process; None: it cannot be told."""


class _HasMissingSince(Protocol):
    missing_since: float | None


LOST_LINE_SECONDS = 10.0
"""server.log tells when a client leaves. If it has not told so long after, the line was lost."""

START_TIME_TOLERANCE_SECONDS = 2.0
"""How far the start times of /proc may be off: they are counted in ticks since boot."""


def liveness_from_proc(
    facts: DaemonFacts,
    processes: Mapping[int, ProcessFacts],
    requested: frozenset[int],
    started_at: float | None = None,
) -> tuple[IsAlive, bool | None]:
    """Give what /proc tells of processes, and of the daemon itself.

    Nothing can be told of processes of a daemon whose PIDs are not the host's.

    Args:
        facts: The daemon.
        processes: Those that are there.
        requested: Those that were looked for.
        started_at: When the daemon started, by its log. If /proc says later, then the clock was
            set forward since: stamps from before that make processes look too young.
    """
    daemon = facts.process
    if daemon is None:
        # Only a daemon that was found by its process can be missed.
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
        if process is None or process.state in ("Z", "X"):
            return False
        return pid in children or process.start_time_seconds <= at + slack

    return alive, daemon.state not in ("Z", "X")


def note_missing(state: DaemonState, now: float, alive: IsAlive, daemon: bool | None) -> None:
    """Note who is gone, and who is not after all."""
    lifetime = state.daemon
    if daemon and lifetime.ended_at is not None and not state.readable["control"]:
        lifetime = state.daemon = DaemonLifetime()  # there is another, and no log says so
    lifetime.counted |= bool(daemon)
    if daemon is not None and lifetime.ended_at is None:
        _update_missing_since(lifetime, now, daemon)
    for entry in state.queue:
        if entry.pid and not entry.dead:
            _update_missing_since(entry, now, alive(entry.pid, entry.since))
    for server in state.servers.values():
        _update_missing_since(server, now, alive(server.pid, server.started_at))
        if not server.ever_connected:
            _note_missing_queued(server, alive)
        for client in server.clients.values():
            if client.pid:
                _update_missing_since(client, now, alive(client.pid, client.connected_at))


def _note_missing_queued(server: TrackedServer, alive: IsAlive) -> None:
    """Those for whom the server was made may be gone."""
    for pid, dead in server.queued_pids.items():
        if not dead and alive(pid, server.started_at) is False:
            server.queued_pids[pid] = True


def _update_missing_since(process: _HasMissingSince, now: float, alive: bool | None) -> None:
    if alive is False:
        process.missing_since = min(process.missing_since or now, now)
    elif alive:
        process.missing_since = None


def confirm_exits(state: DaemonState, complete_until: float) -> None:
    """Draw the conclusions, as of a moment up to which everything in the logs has been read."""
    counting = state.counters.counting
    state.counters.counting = state.is_counted(complete_until)
    lifetime = state.daemon
    died_at = _confirmed_at(lifetime, complete_until)
    if lifetime.ended_at is None and died_at is not None:
        state.counters.counting &= lifetime.counted
        state.daemon_died(died_at)
        state.counters.counting = state.is_counted(complete_until)
    for entry in state.queue:
        at = _confirmed_at(entry, complete_until)
        if at is not None and not entry.dead:
            state.wait_abandoned(entry, at)
            entry.dead = True
    for server in list(state.servers.values()):
        gone_at = _confirmed_at(server, complete_until)
        if gone_at is not None:
            _confirm_server_exit(state, server, gone_at)
        else:
            _confirm_client_exits(state, server, complete_until)
            _detect_ghost(state, server, complete_until)
    state.counters.counting = counting


def _confirmed_at(
    process: _HasMissingSince, complete_until: float, seconds: float = EXIT_CONFIRM_SECONDS
) -> float | None:
    """When it went, if that is certain by now."""
    at = process.missing_since
    return at if at is not None and complete_until >= at + seconds else None


def _confirm_server_exit(state: DaemonState, server: TrackedServer, at: float) -> None:
    """A server is gone, and control.log does not say so."""
    if state.daemon.missing_since is not None and state.daemon.ended_at is None:
        return  # the daemon is going, too: its death explains this one
    if state.readable["control"]:
        state.mark_vanished(server)  # a line was lost, or is not understood, or comes late
        return
    cause, detail = state.exit_cause(server, None, at)
    if not state.readable["server"]:
        del state.servers[server.pid]
        state.ended_pids.append(server.pid)
        return
    state.end_server(server, at, cause, detail)


def _confirm_client_exits(state: DaemonState, server: TrackedServer, complete_until: float) -> None:
    confirm_seconds = LOST_LINE_SECONDS if state.logs_client_pids(server) else EXIT_CONFIRM_SECONDS
    for client in list(server.clients.values()):
        at = _confirmed_at(client, complete_until, confirm_seconds)
        if at is None:
            continue
        if server.unnamed_disconnections:
            server.unnamed_disconnections -= 1  # counted when it left; now it has a name
            server.clients.pop(client.pid, None)
            server.admitted_at.pop(client.pid, None)
        else:
            client.from_control_tool = True  # its end is known to a scrape only: no stay is counted
            state.disconnect(server, client.pid, at)


def _detect_ghost(state: DaemonState, server: TrackedServer, complete_until: float) -> None:
    """Ready for a user whose queued clients are all dead, and nobody ever connected."""
    if server.credentials_missing:
        return  # its log has said so
    if server.ever_connected or server.ready_at is None:
        server.ghost = False
        return
    named_dead = bool(server.queued_pids) and all(server.queued_pids.values())
    if named_dead and not server.queued_unnamed:
        state.ghost(server, complete_until)
