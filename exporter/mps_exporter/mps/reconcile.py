"""Applies the control tool's replies, where they differ from the logs.

Nothing is counted that cannot be known. Where the logs can be read they are right, and a reply may
be older or newer than the last line; so only what is missing is added, and only where the logs
cannot be read is something removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mps_exporter.mps.clients import TrackedClient
from mps_exporter.mps.control_protocol import ServerReply
from mps_exporter.mps.record import Moment
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonState

RECENT_SECONDS = 2.0
"""What happened this shortly before the query is left to the log."""

CONFIRM_SECONDS = 10.0
"""Two replies this far apart that both contradict the log: a line of it was lost."""

MAX_CONTEXTS = 256


def reconcile(
    state: DaemonState, at: float, listed: Collection[int] | None, replies: Iterable[ServerReply]
) -> None:
    """Apply the replies to one query.

    Args:
        state: The daemon.
        at: When it was queried.
        listed: The servers that it listed; None: it did not say.
        replies: What it replied about each of its servers.
    """
    now = state.moment(at)
    if not any(state.readable.values()):
        state.advance_to(at)
    if listed is not None:
        _reconcile_servers(state, now, listed)
    for reply in replies:
        server = state.servers.get(reply.server_pid)
        if server is not None:
            for ordinal, uuid in (reply.devices or {}).items():
                state.gpus.add_ordinal(ordinal, uuid)
                state.gpus.add_gpu(uuid)
            if reply.client_pids is not None:
                _reconcile_clients(state, server, now, reply.client_pids)
            if state.readable["server"]:
                server.reported_state = None
            else:
                _without_log(state, server, reply)


def _reconcile_servers(state: DaemonState, now: Moment, listed: Collection[int]) -> None:
    servers = state.servers
    for pid in listed:
        known = servers.get(pid) or servers.restore_vanished(pid)
        if known is not None:
            known.unlisted_since = None
            if known.start_unknown and known.ready_at is None:
                known.ready_at = known.started_at
        elif not servers.has_ended(pid):
            # The log shows a server's end before the list does, and its start after.
            state.advance_to(now.at)
            servers.adopt(pid, now.at).ready_at = now.at
    for server in servers:
        if server.pid in listed or now.at - server.started_at <= RECENT_SECONDS:
            continue
        if not state.readable["control"]:
            server.missing_since = server.missing_since or now.at
        elif server.ready_at is not None:
            server.unlisted_since = server.unlisted_since or now.at
            if now.at - server.unlisted_since >= CONFIRM_SECONDS:
                servers.mark_vanished(server, now)


def _reconcile_clients(
    state: DaemonState, server: TrackedServer, now: Moment, client_pids: Collection[int]
) -> None:
    reported = {pid for pid in client_pids if pid}
    gone: Collection[TrackedClient] = ()
    if server.logs_pids is not None and state.readable["server"] and not server.start_unknown:
        # Its log shows all of them, but for lines that were lost.
        contradicted = _contradicted(server, now.at, reported)
        gone = [client for client in server.clients if client.pid in contradicted - reported]
        reported &= contradicted
    elif not state.readable["server"]:
        gone = [
            client
            for client in server.clients
            if client.pid
            and client.pid not in reported
            and now.at - client.connected_at > RECENT_SECONDS
        ]
    for client in gone:
        state.advance_to(now.at)
        server.clients.drop(client, now)
    for pid in sorted(reported):
        server.clients.adopt(pid, now.at)


def _contradicted(server: TrackedServer, at: float, reported: set[int]) -> frozenset[int]:
    """Return the clients about which two replies in a row contradict the log in the same way."""
    logged = {client.pid for client in server.clients}
    if 0 in logged:
        return frozenset()  # the log does not number them
    since, before = server.contradiction
    now = frozenset(reported ^ logged)
    if not before or at < since:
        server.contradiction = at, now
    elif at - since >= CONFIRM_SECONDS:
        server.contradiction = at, now
        return now & before
    return frozenset()


def _without_log(state: DaemonState, server: TrackedServer, reply: ServerReply) -> None:
    """Without server.log, only the control tool shows the contexts, the state and the limit."""
    server.reported_state = reply.state
    if reply.active_thread_ratio is not None:
        server.thread_ratio = reply.active_thread_ratio
    if reply.contexts is None:
        return
    for client in server.clients:
        client.contexts = {}
    for device, counts in reply.contexts.items():
        uuid = state.gpus.uuid_of(device, server.devices)
        for pid, count in counts.items():
            owner = server.clients.get(pid)
            if owner is not None:
                owner.had_context = True
                for _ in range(min(count, MAX_CONTEXTS)):
                    owner.contexts[len(owner.contexts)] = uuid
