"""Limits on clients: number of connections and requests, and time. aiohttp has no such limits.

Connections are accepted here, each wrapped in a :class:`Connection`, and aborted if the client is
slow.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast
from weakref import WeakValueDictionary

from aiohttp import web

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.logging import TransitionLogger
from mps_exporter.web import Handler

_log = logging.getLogger(__name__)


def address_limit(total: int) -> int:
    """Return how many of ``total`` slots one address may have."""
    return max(1, int(total * policy.ADDRESS_FRACTION))


def network_of(address: str) -> str:
    """Return the address; for IPv6 its /64 network, all of which one host may have."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address  # a Unix socket
    if parsed.version == 6 and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(parsed), 64), strict=False))
    return address


class Limiter:
    """Slots for ``total`` concurrent requests (0: no limit), a fraction of them for one address."""

    def __init__(self, total: int, what: str, retry_after_seconds: int = 1) -> None:
        self._total = total
        self._what = what
        self._retry_after = str(retry_after_seconds)
        self._all = asyncio.Semaphore(total)
        self._addresses: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def slot(self, address: str | None, timeout_seconds: float = 0.0) -> AsyncIterator[None]:
        """Hold a slot. Respond with 503 if none becomes free within this time."""
        name = network_of(address or "")
        own = self._addresses.setdefault(name, asyncio.Semaphore(address_limit(self._total)))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(timeout_seconds):
                    for slots in (own, self._all) if self._total else ():
                        await held.enter_async_context(slots)
            except TimeoutError:
                many = f"more than {self._total} {self._what}, or most of them from one address"
                raise web.HTTPServiceUnavailable(
                    reason=f"Service Unavailable: {many}",
                    headers={"Retry-After": self._retry_after},
                ) from None
            yield


class SharedCalls:
    """Renderings in progress; concurrent calls with the same key share the result."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, asyncio.Future[bytes]] = {}

    async def join(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Call, or join the same call. ``call`` must hold objects with ids in ``key``."""
        result = self._pending.get(key)
        if result is None:
            result = self._pending[key] = asyncio.create_task(call())
            result.add_done_callback(lambda _: self._pending.pop(key, None))
        return await asyncio.shield(result)


class Connection(asyncio.Protocol):
    """aiohttp's protocol with timeouts."""

    def __init__(self, inner: asyncio.Protocol, registry: dict[Connection, str]) -> None:
        self.requests = 0  # Requests in progress.
        self.waiting_since: float | None = asyncio.get_running_loop().time()
        """Start of the request that is being received or waits for its password check."""
        self.received = 0  # Bytes since the last complete request.
        self._inner = inner
        self._registry = registry
        self._transport: asyncio.Transport | None = None
        self._unsent_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; with TLS the handshake is done."""
        self._transport = cast("asyncio.Transport", transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)
        self._registry.pop(self, None)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.waiting_since is None and not self.requests:
            self.waiting_since = asyncio.get_running_loop().time()
        self.received += len(data)
        if self.received > policy.MAX_UNANSWERED_BYTES:
            self.abort()
        else:
            self._inner.data_received(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def is_too_slow(self, now: float) -> bool:
        if self._transport is None or not self._transport.get_write_buffer_size():
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = now
        receiving, sending = self.waiting_since or now, self._unsent_since or now
        slow = now - receiving > policy.REQUEST_TIMEOUT_SECONDS
        return slow or now - sending > policy.SEND_TIMEOUT_SECONDS


_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connections:
    """All connections of the server."""

    def __init__(
        self, server: Callable[[], asyncio.Protocol], tls: Callable[[], ssl.SSLContext | None]
    ) -> None:
        self._new_protocol = server
        self._tls = tls  # Returns the context for a new connection; None without TLS.
        self._open: dict[Connection, str] = {}  # Connection -> address.

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        transitions = TransitionLogger(_log)
        async with asyncio.TaskGroup() as starting:
            while True:
                try:
                    client, peer = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno in _SHORTAGES:
                        transitions.failed(message="cannot accept a connection", err=error)
                        await asyncio.sleep(policy.ACCEPT_RETRY_SECONDS)
                    continue
                transitions.recovered(message="connections are accepted again")
                if _is_reset(client):
                    client.close()
                    continue
                address = network_of(peer[0]) if isinstance(peer, tuple) else ""
                limit, used = policy.MAX_CONNECTIONS, list(self._open.values())
                if len(used) >= limit or used.count(address) >= address_limit(limit):
                    client.close()
                    continue
                connection = Connection(self._new_protocol(), self._open)
                self._open[connection] = address
                starting.create_task(self._start(connection, client))

    async def _start(self, connection: Connection, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        try:
            async with asyncio.timeout(policy.REQUEST_TIMEOUT_SECONDS):
                if self._tls() is not None:
                    await _readable(client)
                    tls = {
                        "ssl": self._tls(),
                        "ssl_shutdown_timeout": policy.TLS_CLOSE_TIMEOUT_SECONDS,
                    }
                await loop.connect_accepted_socket(lambda: connection, client, **tls)
        except (OSError, asyncio.CancelledError) as error:
            _log.debug("connection setup failed", extra={"fields": {"err": error}})
        except Exception:  # noqa: BLE001 - otherwise its client would wait indefinitely
            _log.exception("a connection failed")
        else:
            return
        client.close()
        self._open.pop(connection, None)

    async def abort_slow_clients(self) -> None:
        while True:
            await asyncio.sleep(policy.SWEEP_INTERVAL_SECONDS)
            now = asyncio.get_running_loop().time()
            for connection in list(self._open):
                if connection.is_too_slow(now):
                    connection.abort()

    async def abort_all(self) -> None:
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)


_TCP_CLOSE = 7


def _is_reset(client: socket.socket) -> bool:
    """Return whether the client reset the connection, even if its request is still unread."""
    if client.family == socket.AF_UNIX:
        return False
    # The first byte of struct tcp_info is the state.
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE


async def _readable(client: socket.socket) -> None:
    """Wait for the first byte: TLS takes 0.3 MB for each connection, idle or not."""
    loop = asyncio.get_running_loop()
    received = asyncio.Event()
    loop.add_reader(client, received.set)
    try:
        await received.wait()
    finally:
        loop.remove_reader(client)


@web.middleware
async def track_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count a complete, admitted request on its connection until the response ends."""
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError
    connection = request.transport.get_protocol()
    if not isinstance(connection, Connection):
        return await handler(request)
    connection.requests += 1
    connection.waiting_since, connection.received = None, 0
    try:
        return await handler(request)
    finally:
        connection.requests -= 1
