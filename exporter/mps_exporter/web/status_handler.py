"""The status of the host, as data (/api/v1/status) and as a page (/)."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from aiohttp import web

from mps_exporter.snapshot import Snapshot
from mps_exporter.web.assets import PAGE_ASSETS
from mps_exporter.web.backend import Backend
from mps_exporter.web.events import EVENTS, Events
from mps_exporter.web.limiter import ConcurrencyLimiter, LimitExceededError
from mps_exporter.web.responses import text_response
from mps_exporter.web.shared_renderings import SharedRenderings
from mps_exporter.web.state import BACKEND, OPTIONS, WEB_CONFIG
from mps_exporter.web.status_findings import make_status

REUSE_SECONDS = 1.0
"""A status that is not older serves the next one who asks, unless an incident came since."""
AFTER_INCIDENT_SECONDS = 0.2
"""Incidents in a row cause no more collections than this allows."""
COLLECT_TIMEOUT_SECONDS = 5.0


class StatusRenderer:
    """The status as bytes, made on a thread, and shared by those who ask at the same moment."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="status")
        self._latest: tuple[float, Snapshot] | None = None
        self._collecting: asyncio.Task[Snapshot] | None = None
        self._renderings = SharedRenderings()

    async def snapshot(self, backend: Backend, events: Events) -> Snapshot:
        """The last snapshot when it is fresh, else a new one."""
        loop = asyncio.get_running_loop()
        if self._latest is not None:
            taken_at, snapshot = self._latest
            if events.last_at > taken_at:
                await asyncio.sleep(taken_at + AFTER_INCIDENT_SECONDS - loop.time())
            elif loop.time() - taken_at < REUSE_SECONDS:
                return snapshot
        if self._collecting is None:
            self._collecting = loop.create_task(self._collect(backend))
        return await asyncio.shield(self._collecting)

    async def _collect(self, backend: Backend) -> Snapshot:
        try:
            snapshot = await backend.collect(COLLECT_TIMEOUT_SECONDS, None)
            self._latest = asyncio.get_running_loop().time(), snapshot
            return snapshot
        finally:
            self._collecting = None

    async def answer(self, request: web.Request, *, as_json: bool) -> bytes:
        """The status, in one of its forms."""
        events = request.app[EVENTS]
        snapshot = await self.snapshot(request.app[BACKEND], events)
        events.note(snapshot)
        options = request.app[OPTIONS]
        watch = request.app.get(WEB_CONFIG)
        error = str(watch.error) if watch is not None and watch.error is not None else None

        def encode() -> bytes:
            status = make_status(snapshot, options, error, events.user_names, events.history)
            if as_json:
                return json.dumps(asdict(status), allow_nan=False).encode() + b"\n"
            # Late: the template's engine takes 3 MiB, and of most exporters nobody sees a page.
            from mps_exporter.web.status_page import render_page

            return render_page(status, options).encode()

        loop = asyncio.get_running_loop()
        return await self._renderings.join(
            (id(snapshot), as_json, error), lambda: loop.run_in_executor(self._thread, encode)
        )

    def forget(self) -> None:
        """Answer the next one with a new snapshot."""
        self._latest = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


RENDERED = web.AppKey[StatusRenderer]("RENDERED")
PAGE_LIMITER = web.AppKey[ConcurrencyLimiter]("VISITS")
"""Not those of the scrapes: no crowd in front of the page keeps Prometheus out."""


async def status_json(request: web.Request) -> web.Response:
    return await _answer(request, "application/json", as_json=True)


async def status_html(request: web.Request) -> web.Response:
    return await _answer(request, "text/html", as_json=False)


async def _answer(request: web.Request, content_type: str, *, as_json: bool) -> web.Response:
    try:
        with request.app[PAGE_LIMITER].acquire(request.remote or ""):
            body = await request.app[RENDERED].answer(request, as_json=as_json)
    except LimitExceededError:
        limit = request.app[OPTIONS].max_requests
        return text_response(
            f"503 Service Unavailable: more than {limit} visitors at once, or most of them from "
            "one address (--web.max-requests)",
            status=503,
            headers={"Retry-After": "1"},
        )
    charset = None if as_json else "utf-8"
    return web.Response(body=body, content_type=content_type, charset=charset)


async def asset(request: web.Request) -> web.Response:
    found = PAGE_ASSETS.get(request.match_info["name"])
    if found is None:
        raise web.HTTPNotFound
    return web.Response(
        body=found.content,
        content_type=found.content_type,
        charset="utf-8",
        headers={"Cache-Control": "public, max-age=86400"},
    )
