"""Run the server in a test, and speak to it by hand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import patch

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.flags import Settings
from mps_exporter.web.app import create_app
from mps_exporter.web.events import EVENTS
from mps_exporter.web.server import serve_app
from testing.waiting import PATIENCE_SECONDS
from tests.unit.web.fakes import FakeBackend


@asynccontextmanager
async def served(
    backend: FakeBackend, **options: Any
) -> AsyncIterator[tuple[Sequence[str], asyncio.Event]]:
    """Serve, with these settings; names in capitals are limits."""
    limits = {name: options.pop(name) for name in list(options) if name.isupper()}
    backend.settings = Settings(**{"web_listen_address": ("127.0.0.1:0",), **options})
    stop = asyncio.Event()
    shown: list[str] = []
    listening = asyncio.Event()

    def on_listening(addresses: Sequence[str]) -> None:
        shown.extend(addresses)
        listening.set()

    with patch.dict(vars(policy), limits):
        app = create_app(backend)
        for snapshot in backend.earlier:
            app[EVENTS].note(snapshot)
        task = asyncio.create_task(serve_app(app, stop, on_listening=on_listening))
        started = asyncio.create_task(listening.wait())
        try:
            await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            yield shown, stop
        finally:
            stop.set()
            started.cancel()
            await asyncio.wait_for(task, PATIENCE_SECONDS)


@asynccontextmanager
async def connected(
    address: str, **how: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), **how)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
