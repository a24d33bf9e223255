"""Serve an application until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import cast

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
    systemd = options.systemd_socket
    sockets = from_systemd(os.environ) if systemd else listen(options.listen_addresses)
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
    tls = app.get(TLS_CONTEXT)
    tasks: list[asyncio.Task[object]] = []
    try:
        await runner.setup()
        connections = Connections(cast("web.Server", runner.server), options, tls)
        addresses = [display_address(one) for one in sockets]
        for address in addresses:
            _log.info("listening", extra={"fields": {"address": address, "tls": tls is not None}})
        if on_listening is not None:
            on_listening(addresses)
        work = (stop.wait(), connections.abort_slow_clients(), *map(connections.accept, sockets))
        tasks = [asyncio.create_task(one) for one in work]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # all but the first end by a bug only
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        close_sockets(sockets, remove_files=not systemd)
        await runner.cleanup()
        if tasks:
            await connections.abort_all()
