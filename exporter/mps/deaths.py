"""What /proc tells and no log line does: which processes are gone.

A process may be seen to be gone before the log has been read so far. So a death is noted first, and
believed only when the log is read up to a second after it: had it been an orderly end, its lines
would be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from exporter.mps.books import DEATH_SECONDS, Books, Daemon
from exporter.mps.serving import Server
from exporter.observations import DaemonFacts, ProcessFacts

Alive = Callable[[int, float], bool | None]
"""(PID as the log prints it, a moment at which it was alive) -> whether that process is there.
False also when its number was given to a younger process; None: it cannot be told."""


class _Mortal(Protocol):
    missing_since: float | None


LOST_LINE_SECONDS = 10.0
"""server.log tells when a client leaves. If it has not told so long after, the line was lost."""

CLOCK_SECONDS = 2.0
"""How far the start times of /proc may be off: they are counted in ticks since boot."""


def liveness(
    facts: DaemonFacts,
    processes: Mapping[int, ProcessFacts],
    asked: frozenset[int],
    started_at: float | None = None,
) -> tuple[Alive, bool | None]:
    """Give what /proc tells of processes, and of the daemon itself.

    Nothing can be told of processes of a daemon whose PIDs are not the host's.

    Args:
        facts: The daemon.
        processes: Those that are there.
        asked: Those that were looked for.
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
    slack = CLOCK_SECONDS
    if started_at is not None:
        slack += max(0.0, daemon.start_time_seconds - started_at)

    def alive(pid: int, at: float) -> bool | None:
        if pid not in asked:
            return None
        process = processes.get(pid)
        if process is None or process.state in ("Z", "X"):
            return False
        return pid in children or process.start_time_seconds <= at + slack

    return alive, daemon.state not in ("Z", "X")


def notice(books: Books, now: float, alive: Alive, daemon: bool | None) -> None:
    """Note who is gone, and who is not after all."""
    life = books.daemon
    if daemon and life.ended_at is not None and not books.readable["control"]:
        life = books.daemon = Daemon()  # there is another, and no log says so
    life.counted |= bool(daemon)
    if daemon is not None and life.ended_at is None:
        _note(life, now, daemon)
    for entry in books.queue:
        if entry.pid and not entry.dead:
            _note(entry, now, alive(entry.pid, entry.since))
    for server in books.servers.values():
        _note(server, now, alive(server.pid, server.started_at))
        if not server.ever_connected:
            _notice_nobody(server, alive)
        for client in server.clients.values():
            if client.pid:
                _note(client, now, alive(client.pid, client.connected_at))


def _notice_nobody(server: Server, alive: Alive) -> None:
    """Those for whom the server was made may be gone."""
    for pid, dead in server.started_for.items():
        if not dead and alive(pid, server.started_at) is False:
            server.started_for[pid] = True


def _note(process: _Mortal, now: float, alive: bool | None) -> None:
    if alive is False:
        process.missing_since = min(process.missing_since or now, now)
    elif alive:
        process.missing_since = None


def believe(books: Books, settled: float) -> None:
    """Draw the conclusions, as of a moment up to which everything in the logs has been read."""
    counting = books.tally.counting
    books.tally.counting = books.counts_at(settled)
    life = books.daemon
    died_at = _sure(life, settled)
    if life.ended_at is None and died_at is not None:
        books.tally.counting &= life.counted
        books.daemon_died(died_at)
        books.tally.counting = books.counts_at(settled)
    for entry in books.queue:
        at = _sure(entry, settled)
        if at is not None and not entry.dead:
            books.abandoned(entry, at)
            entry.dead = True
    for server in list(books.servers.values()):
        gone_at = _sure(server, settled)
        if gone_at is not None:
            _server_gone(books, server, gone_at)
        else:
            _clients_gone(books, server, settled)
            _find_ghost(books, server, settled)
    books.tally.counting = counting


def _sure(process: _Mortal, settled: float, seconds: float = DEATH_SECONDS) -> float | None:
    """When it went, if that is certain by now."""
    at = process.missing_since
    return at if at is not None and settled >= at + seconds else None


def _server_gone(books: Books, server: Server, at: float) -> None:
    """A server is gone, and control.log does not say so."""
    if books.daemon.missing_since is not None and books.daemon.ended_at is None:
        return  # the daemon is going, too: its death explains this one
    if books.readable["control"]:
        books.vanish(server)  # a line was lost, or is not understood, or comes late
        return
    cause, detail = books.exit_cause(server, 0, at)
    if not books.readable["server"]:
        del books.servers[server.pid]
        books.ended.append(server.pid)
        return
    books.end_server(server, at, cause, detail)


def _clients_gone(books: Books, server: Server, settled: float) -> None:
    patience = LOST_LINE_SECONDS if books.names_clients(server) else DEATH_SECONDS
    for client in list(server.clients.values()):
        at = _sure(client, settled, patience)
        if at is None:
            continue
        if server.unnamed_departures:
            server.unnamed_departures -= 1  # counted when it left; now it has a name
            server.clients.pop(client.pid, None)
            server.announced.pop(client.pid, None)
        else:
            client.adopted = True  # its end is known to a scrape only: no stay is counted
            books.leave(server, client.pid, at)


def _find_ghost(books: Books, server: Server, settled: float) -> None:
    """Ready for a user whose queued clients are all dead, and nobody ever connected."""
    if server.complained:
        return  # its log has said so
    if server.ever_connected or server.ready_at is None:
        server.ghost = False
        return
    named_dead = bool(server.started_for) and all(server.started_for.values())
    if named_dead and not server.started_for_unnamed:
        books.ghost(server, settled)
