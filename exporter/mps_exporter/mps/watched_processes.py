"""Which processes of a daemon are watched, and which are looked up in /proc at each collection.

Watched between collections are those whose exit no log shows, at the moment it happens: the control
daemon, its servers, the clients that a server was started for and that have not connected, and the
queue. Looked up are these and all connected clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mps_exporter.mps.state import DaemonState
from mps_exporter.observations import DaemonFacts

MAX_PIDS_PER_USER = 512
MAX_PIDS = 2048
"""Of the processes that the logs of ordinary users' daemons name, so many are looked for: of one
user, and of all of them."""


def logged_pids_to_watch(state: DaemonState) -> list[int]:
    """Return the watched servers and clients, by the PIDs that the logs give."""
    pids = []
    for server in state.servers:
        pids += [server.pid, *server.awaited_pids()]
    return pids + [entry.pid for entry in state.queue if not entry.dead]


def pids_to_look_up(state: DaemonState) -> frozenset[int]:
    """Return the processes that /proc is searched for: queued, serving and connected ones."""
    pids = {entry.pid for entry in state.queue}
    if (handover := state.daemon.handover) is not None:
        pids.add(handover.pid)
    for server in state.servers:
        pids.add(server.pid)
        pids.update(client.pid for client in server.clients)
        pids.update(server.awaited_pids())
    return frozenset(pids - {0})


def with_control_daemon(facts: DaemonFacts, logged: list[int]) -> list[int]:
    """Return the control daemon and the processes that its logs name, as the host numbers them.

    A daemon in a PID namespace of its own numbers its servers and clients otherwise.
    """
    process = facts.process
    if process is None:
        return []
    return [process.pid] if len(process.namespace_pids) > 1 else [process.pid, *logged]


def within_quota(pids_of: Iterable[tuple[DaemonFacts, list[int]]]) -> list[int]:
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
