"""Accepts connections: limits their number, and closes those of slow clients.

aiohttp does neither. So connections are accepted here, each wrapped in a :class:`Connection`
that knows since when it waits for the client. Once a second those beyond a timeout are aborted. At
the limit on connections one of the address with the most connections is aborted for the new one:
the one that has been idle longest; or one with a request, where an address has more than half of
all places and the new one is another's. None is aborted for an address that has more itself.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import cast

from aiohttp import web

from mps_exporter.web.options import WebOptions
from mps_exporter.web.responses import Handler
from mps_exporter.web.slow_clients import SWEEP_INTERVAL_SECONDS, is_too_slow
from mps_exporter.web.state import TLSContext

_log = logging.getLogger(__name__)

MAX_UNANSWERED_BYTES = 65_536
"""Of a request that is not complete: far above what aiohttp accepts."""
TLS_CLOSE_TIMEOUT = 2.0
TLS_RECORD_BYTES = 16_384
WARN_INTERVAL = 60.0
"""Whoever opens connections could fill the log otherwise."""


class Connection(asyncio.Protocol):
    """aiohttp's protocol with timeouts."""

    def __init__(self, server: Connections, address: str) -> None:
        self.address = address
        self.busy = 0
        """Requests in progress."""
        self.waiting_since: float | None = asyncio.get_running_loop().time()
        """Since when a request is being received, or waits to be let in; None while one is
        answered, or between them."""
        self.idle_since = self.waiting_since
        self.unsent_since: float | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when it is closed."""
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None
        self._received = 0
        self._heard = False
        """Whether data came since the last answer began."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands (with TLS: the handshake is done)."""
        self._transport = cast("asyncio.Transport", transport)
        self._inner = self._server.new_protocol()
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is not None:
            self._inner.connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()
        self._server.remove(self)

    def data_received(self, data: bytes) -> None:
        now = asyncio.get_running_loop().time()
        if self.waiting_since is None and not self.busy:
            self.waiting_since = now
        self.idle_since = now
        self._heard = True
        self._received += len(data)
        if self._received > MAX_UNANSWERED_BYTES and self._inner is not None:
            self.abort()
        elif self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def request_started(self) -> None:
        """A complete request is here, and may be answered."""
        self.busy += 1
        self.waiting_since = None
        self._received = 0

    def request_finished(self) -> None:
        self.busy -= 1
        self.idle_since = asyncio.get_running_loop().time()

    def answer_begins(self) -> bool:
        """Note it. Gives whether its request had come before the answer to the one before began."""
        pipelined, self._heard = not self._heard, False
        return pipelined

    def abort(self) -> None:
        """Close it now, and drop what is still to be sent."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self._server.cancel_handshake(self)

    def client_is_too_slow(self, now: float, options: WebOptions) -> bool:
        """Whether its client is too slow; to be asked at least once a second."""
        unsent = self._transport is not None and self._transport.get_write_buffer_size() > 0
        if not unsent:
            self.unsent_since = None
        elif self.unsent_since is None:
            self.unsent_since = now
        return is_too_slow(
            now,
            self.waiting_since,
            self.unsent_since,
            request_timeout=options.request_timeout,
            send_timeout=options.send_timeout,
        )


class Connections:
    """All connections of the server."""

    def __init__(
        self, server: Callable[[], asyncio.Protocol], options: WebOptions, tls: TLSContext | None
    ) -> None:
        self.new_protocol = server
        self._options = options
        self._tls = tls
        if tls is not None:
            # asyncio gives each connection 256 KiB to receive into, and none has larger records.
            sslproto.SSLProtocol.max_size = TLS_RECORD_BYTES
        self._open: dict[Connection, asyncio.Task[None] | None] = {}
        self._warned_at = float("-inf")

    def __len__(self) -> int:
        return len(self._open)

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # this client went away before it was accepted
                if loop.time() - self._warned_at >= WARN_INTERVAL:
                    self._warned_at = loop.time()
                    _log.warning("cannot accept a connection", extra={"fields": {"err": error}})
                self._evict_for(None)
                await asyncio.sleep(0.1)
                continue
            host = address[0] if isinstance(address, tuple) else ""
            if len(self._open) >= self._options.max_connections and not self._evict_for(host):
                client.close()
                continue
            connection = Connection(self, host)
            self._open[connection] = None
            task = loop.create_task(self._start(connection, client))
            # One that is cancelled before it begins does not close it.
            task.add_done_callback(partial(_close_if_cancelled, client))
            if not task.done() and connection in self._open:
                self._open[connection] = task

    async def _start(self, connection: Connection, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._tls is not None:
                await _readable(client)
            context = await self._tls() if self._tls is not None else None
            if context is None:
                await loop.connect_accepted_socket(lambda: connection, client)
            else:
                await loop.connect_accepted_socket(
                    lambda: connection,
                    client,
                    ssl=context,
                    ssl_handshake_timeout=self._options.request_timeout,
                    ssl_shutdown_timeout=TLS_CLOSE_TIMEOUT,
                )
        except (OSError, asyncio.CancelledError) as error:
            client.close()
            self.remove(connection)
            _log.debug("no connection came of it", extra={"fields": {"err": error}})
        except Exception:  # noqa: BLE001 - who is not let go here would wait for ever
            client.close()
            self.remove(connection)
            _log.exception("a connection failed")
        else:
            if connection in self._open:
                self._open[connection] = None

    def remove(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def cancel_handshake(self, connection: Connection) -> None:
        """Close it before the handshake is done."""
        task = self._open.pop(connection, None)
        if task is not None:
            task.cancel()

    def _evict_for(self, newcomer: str | None) -> bool:
        """Abort one connection. False: none may be.

        512 requests of one address, all waiting for their turn, kept every other address out, and
        its next connection took the place of another's that was idle between two scrapes.

        Args:
            newcomer: Address of the new connection; None: descriptors are scarce.
        """
        counts = Counter(connection.address for connection in self._open)
        own = 0 if newcomer is None else counts[newcomer]

        def may_go(one: Connection) -> bool:
            count = counts[one.address]
            if not one.busy:
                return count >= own
            majority = count > self._options.max_connections // 2
            return newcomer is not None and one.address != newcomer and majority

        candidates = [one for one in self._open if may_go(one)]
        if not candidates:
            return False
        victim = min(
            candidates,
            key=lambda one: (
                -counts[one.address],
                bool(one.busy),
                one.waiting_since or one.idle_since,
            ),
        )
        victim.abort()
        self.remove(victim)
        return True

    async def abort_slow_clients(self) -> None:
        """Abort those whose client is too slow, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_SECONDS)
            now = loop.time()
            for connection in list(self._open):
                if connection.client_is_too_slow(now, self._options):
                    connection.abort()

    def abort_all(self) -> None:
        for connection in list(self._open):
            connection.abort()


def _close_if_cancelled(client: socket.socket, task: asyncio.Task[None]) -> None:
    if task.cancelled():
        client.close()


async def _readable(client: socket.socket) -> None:
    """Wait for the first byte, before TLS takes its memory: 0.3 MB for each idle connection."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(client, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(client)


def connection_of(request: web.Request) -> Connection | None:
    """The connection that a request came on; None where it is gone, or another server's."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, Connection) else None


@web.middleware
async def track_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection that a request is complete and let in, and when it has been answered."""
    connection = connection_of(request)
    if connection is None:
        return await handler(request)
    connection.request_started()
    try:
        return await handler(request)
    finally:
        connection.request_finished()


async def close_after_pipelined(request: web.Request, response: web.StreamResponse) -> None:
    """Signal: an answer to a request that did not wait for the one before is the connection's last.

    No scraper or browser sends such requests, and nothing tells whether their client reads the
    answers: the kernel takes megabytes for it. HTTP lets a server close the connection; the
    requests behind are to be sent again.
    """
    connection = connection_of(request)
    if connection is not None and connection.answer_begins():
        response.force_close()
        response.headers["Connection"] = "close"
