"""Serve an application until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from mps_exporter.web.guard import Connections
from mps_exporter.web.listen import close_sockets, display_address, from_systemd, listen
from mps_exporter.web.options import TLS_CONTEXT, WebOptions

_log = logging.getLogger(__name__)


class _ClientErrorFilter(logging.Filter):
    """Keeps errors of clients out of the log, or any client could fill it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let errors of this program pass."""
        error = record.exc_info[1] if record.exc_info else None
        theirs = HttpProcessingError, web.RequestPayloadError, ConnectionError
        return not isinstance(error, theirs) or _log.isEnabledFor(logging.DEBUG)


def _protocol_log() -> logging.Logger:
    log = logging.getLogger(f"{__name__}.protocol")
    if not log.filters:
        log.addFilter(_ClientErrorFilter())
    return log


async def serve_app(
    app: web.Application,
    options: WebOptions,
    stop: asyncio.Event,
    *,
    on_listening: Callable[[Sequence[str]], None] | None = None,
) -> None:
    """Serve until ``stop`` is set, then finish the responses under way.

    ``on_listening`` is called with the addresses (with the real port for port 0).

    Raises:
        ListenError: An address cannot be used.
    """
    if options.systemd_socket:
        sockets = from_systemd(os.environ)
    else:
        sockets = listen(options.listen_addresses)
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_protocol_log(),
        auto_decompress=False,
        handle_signals=False,
        handler_cancellation=True,
        keepalive_timeout=options.keepalive_timeout,
        lingering_time=2.0,
        shutdown_timeout=options.shutdown_timeout,
    )
    try:
        await runner.setup()
        await _serve_until_stopped(runner, options, stop, sockets, on_listening)
    finally:
        close_sockets(sockets, remove_files=not options.systemd_socket)
        await runner.cleanup()


async def _serve_until_stopped(
    runner: web.AppRunner,
    options: WebOptions,
    stop: asyncio.Event,
    sockets: Sequence[socket.socket],
    on_listening: Callable[[Sequence[str]], None] | None,
) -> None:
    tls = runner.app.get(TLS_CONTEXT)
    server = runner.server
    if server is None:  # pragma: no cover - setup() has just made it
        raise RuntimeError("no server")
    connections = Connections(server, options, tls)
    addresses = [display_address(one) for one in sockets]
    for address in addresses:
        _log.info("listening", extra={"fields": {"address": address, "tls": tls is not None}})
    if on_listening is not None:
        on_listening(addresses)
    accepting: list[asyncio.Task[None]] = [
        asyncio.create_task(connections.accept(one)) for one in sockets
    ]
    sweeping = asyncio.create_task(connections.abort_slow_clients())
    stopping = asyncio.create_task(stop.wait())
    try:
        # An accept loop ends only by a bug: the program must not run on without it.
        await asyncio.wait([*accepting, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in accepting:
            if task.done():
                task.result()
    finally:
        stopping.cancel()
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, stopping, return_exceptions=True)
        close_sockets(sockets, remove_files=not options.systemd_socket)
        await runner.cleanup()
        sweeping.cancel()
        await connections.abort_all()
