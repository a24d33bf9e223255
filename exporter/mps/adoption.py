"""What the control tool said, and the log does not explain: servers and clients are adopted.

Nothing is counted of them that cannot be known. Where the logs can be read they are right, and the
tool's answer may be older or younger than the last line; so only what is missing is added, and
only where the logs are unreadable is something taken away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from exporter.mps.books import Books
from exporter.mps.control_text import ServerReply
from exporter.mps.serving import Client, Server

YOUNG_SECONDS = 2.0
"""What happened this shortly before the question is left to the log."""

CONFIRM_SECONDS = 10.0
"""Two answers this far apart that both contradict the log: a line of it was lost."""


def reconcile(
    books: Books, at: float, listed: Collection[int] | None, replies: Iterable[ServerReply]
) -> None:
    """Fill in what the logs do not tell."""
    if not any(books.readable.values()):
        books.settle(at)
    if listed is not None:
        _servers(books, at, listed)
    for reply in replies:
        server = books.servers.get(reply.server_pid)
        if server is not None:
            _devices(books, reply)
            _clients(books, server, at, reply)
            _state(books, server, reply)


def _servers(books: Books, at: float, listed: Collection[int]) -> None:
    for pid in listed:
        known = books.servers.get(pid) or books.returned(pid)
        if known is not None:
            known.unlisted_since = None
            if known.adopted and known.ready_at is None:
                known.ready_at = known.started_at
        elif pid not in books.ended:
            # The log ends a server before the list forgets it, and begins it after.
            server = books.start_server(pid, None, at, adopted=True)
            server.ready_at = at
    for server in list(books.servers.values()):
        if server.pid in listed or at - server.started_at <= YOUNG_SECONDS:
            continue
        if not books.readable["control"]:
            server.missing_since = server.missing_since or at
        elif server.ready_at is not None:
            server.unlisted_since = server.unlisted_since or at
            if at - server.unlisted_since >= CONFIRM_SECONDS:
                books.vanish(server)


def _devices(books: Books, reply: ServerReply) -> None:
    for device in reply.devices or ():
        books.ordinal(device.ordinal, device.uuid)
        books.gpu(device.uuid, device.name)


def _clients(books: Books, server: Server, at: float, reply: ServerReply) -> None:
    if reply.client_pids is None:
        return
    said = {pid for pid in reply.client_pids if pid}
    if server.named is not None and books.readable["server"] and not server.adopted:
        # Its log tells all of them, but for lines that were lost.
        contradicted = _contradicted(server, at, said)
        for pid in contradicted - said:
            server.clients[pid].adopted = True
            books.leave(server, pid, at)
        said &= contradicted
    for pid in sorted(said):
        if pid not in server.clients:
            server.add(Client(pid, server.uid, at, adopted=True))
    if not books.readable["server"]:
        for client in list(server.clients.values()):
            if (
                client.pid
                and client.pid not in reply.client_pids
                and at - client.connected_at > YOUNG_SECONDS
            ):
                client.adopted = True  # when it left is not known: no stay is counted
                books.leave(server, client.pid, at)
        _contexts(books, server, reply)


def _contradicted(server: Server, at: float, said: set[int]) -> frozenset[int]:
    """Give the clients of which two answers in a row say something else than the log."""
    if any(client.pid == 0 for client in server.clients.values()):
        return frozenset()  # the log does not number them
    since, before = server.contradiction
    now = frozenset(said ^ server.clients.keys())
    if not before or at < since:
        server.contradiction = at, now
    elif at - since >= CONFIRM_SECONDS:
        server.contradiction = at, now
        return now & before
    return frozenset()


def _contexts(books: Books, server: Server, reply: ServerReply) -> None:
    """Without server.log, the tool alone knows the contexts."""
    if reply.contexts is None:
        return
    for client in server.clients.values():
        client.contexts = {}
    for device, counts in reply.contexts.items():
        uuid = books.uuid_of(server, device)
        for pid, count in counts.items():
            owner = server.clients.get(pid)
            if owner is not None:
                owner.had_context = True
                for _ in range(min(count, 256)):
                    owner.contexts[len(owner.contexts)] = uuid


def _state(books: Books, server: Server, reply: ServerReply) -> None:
    server.said_state = None if books.readable["server"] else reply.state
    if not books.readable["server"] and reply.active_thread_ratio is not None:
        server.thread_ratio = reply.active_thread_ratio
