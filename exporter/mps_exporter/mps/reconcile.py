"""What the control tool said, and the log does not explain: servers and clients are adopted.

Nothing is counted of them that cannot be known. Where the logs can be read they are right, and the
tool's answer may be older or younger than the last line; so only what is missing is added, and
only where the logs are unreadable is something taken away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mps_exporter.mps.control_protocol import ServerReply
from mps_exporter.mps.servers import TrackedClient, TrackedServer
from mps_exporter.mps.state import DaemonState

RECENT_SECONDS = 2.0
"""What happened this shortly before the question is left to the log."""

CONFIRM_SECONDS = 10.0
"""Two answers this far apart that both contradict the log: a line of it was lost."""


def reconcile(
    state: DaemonState, at: float, listed: Collection[int] | None, replies: Iterable[ServerReply]
) -> None:
    """Fill in what the logs do not tell."""
    if not any(state.readable.values()):
        state.advance_to(at)
    if listed is not None:
        _servers(state, at, listed)
    for reply in replies:
        server = state.servers.get(reply.server_pid)
        if server is not None:
            _devices(state, reply)
            _clients(state, server, at, reply)
            _state(state, server, reply)


def _servers(state: DaemonState, at: float, listed: Collection[int]) -> None:
    for pid in listed:
        known = state.servers.get(pid) or state.restore_vanished(pid)
        if known is not None:
            known.unlisted_since = None
            if known.start_unknown and known.ready_at is None:
                known.ready_at = known.started_at
        elif pid not in state.ended_pids:
            # The log ends a server before the list forgets it, and begins it after.
            server = state.start_server(pid, None, at, adopted=True)
            server.ready_at = at
    for server in list(state.servers.values()):
        if server.pid in listed or at - server.started_at <= RECENT_SECONDS:
            continue
        if not state.readable["control"]:
            server.missing_since = server.missing_since or at
        elif server.ready_at is not None:
            server.unlisted_since = server.unlisted_since or at
            if at - server.unlisted_since >= CONFIRM_SECONDS:
                state.mark_vanished(server)


def _devices(state: DaemonState, reply: ServerReply) -> None:
    for device in reply.devices or ():
        state.learn_ordinal(device.ordinal, device.uuid)
        state.learn_gpu(device.uuid, device.name)


def _clients(state: DaemonState, server: TrackedServer, at: float, reply: ServerReply) -> None:
    if reply.client_pids is None:
        return
    reported = {pid for pid in reply.client_pids if pid}
    if server.logs_pids is not None and state.readable["server"] and not server.start_unknown:
        # Its log tells all of them, but for lines that were lost.
        contradicted = _contradicted(server, at, reported)
        for pid in contradicted - reported:
            server.clients[pid].from_control_tool = True
            state.disconnect(server, pid, at)
        reported &= contradicted
    for pid in sorted(reported):
        if pid not in server.clients:
            server.add_client(TrackedClient(pid, server.uid, at, from_control_tool=True))
    if not state.readable["server"]:
        for client in list(server.clients.values()):
            if (
                client.pid
                and client.pid not in reply.client_pids
                and at - client.connected_at > RECENT_SECONDS
            ):
                client.from_control_tool = True  # when it left is not known: no stay is counted
                state.disconnect(server, client.pid, at)
        _contexts(state, server, reply)


def _contradicted(server: TrackedServer, at: float, reported: set[int]) -> frozenset[int]:
    """Give the clients of which two answers in a row say something else than the log."""
    if any(client.pid == 0 for client in server.clients.values()):
        return frozenset()  # the log does not number them
    since, before = server.contradiction
    now = frozenset(reported ^ server.clients.keys())
    if not before or at < since:
        server.contradiction = at, now
    elif at - since >= CONFIRM_SECONDS:
        server.contradiction = at, now
        return now & before
    return frozenset()


def _contexts(state: DaemonState, server: TrackedServer, reply: ServerReply) -> None:
    """Without server.log, the tool alone knows the contexts."""
    if reply.contexts is None:
        return
    for client in server.clients.values():
        client.contexts = {}
    for device, counts in reply.contexts.items():
        uuid = state.uuid_of(server, device)
        for pid, count in counts.items():
            owner = server.clients.get(pid)
            if owner is not None:
                owner.had_context = True
                for _ in range(min(count, 256)):
                    owner.contexts[len(owner.contexts)] = uuid


def _state(state: DaemonState, server: TrackedServer, reply: ServerReply) -> None:
    server.reported_state = None if state.readable["server"] else reply.state
    if not state.readable["server"] and reply.active_thread_ratio is not None:
        server.thread_ratio = reply.active_thread_ratio
