"""The status of the host as JSON (/api/v1/status) and as a page (/), and the page's files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from urllib.parse import urlsplit

from aiohttp import web

from mps_exporter.snapshot import Snapshot
from mps_exporter.web.backend import Backend
from mps_exporter.web.events import EVENTS, Events
from mps_exporter.web.guard import Limiter, LimitExceededError, SharedRenderings
from mps_exporter.web.options import BACKEND, OPTIONS, WEB_CONFIG, busy_response, text_response
from mps_exporter.web.status_api import to_json
from mps_exporter.web.status_findings import make_status

REUSE_SECONDS = 1.0
"""Maximum age of a status that is shown again, unless an incident came since."""
AFTER_INCIDENT_SECONDS = 0.2
"""Minimum time between two collections that incidents cause."""
COLLECT_TIMEOUT_SECONDS = 5.0

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_ASSETS = {
    entry.name: entry.read_bytes()
    for entry in (resources.files("mps_exporter.web") / "static").iterdir()
    if entry.name.rpartition(".")[2] in _TYPES
}
"""The page's files, read once: no request leads to the file system."""


def address(name: str) -> str:
    """Return a file's address relative to /, which changes with the file's content."""
    return f"static/{name}?{hashlib.sha256(_ASSETS[name]).hexdigest()[:12]}"


class StatusRenderer:
    """Renders the status on a thread; concurrent requests share the result."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="status")
        self._latest: tuple[float, Snapshot] | None = None
        self._collecting: asyncio.Task[Snapshot] | None = None
        self._renderings = SharedRenderings()

    async def snapshot(self, backend: Backend, events: Events) -> Snapshot:
        """Return the last snapshot if it is fresh, else a new one."""
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

    async def render(self, request: web.Request, *, as_json: bool) -> bytes:
        """Return the status in one of its forms."""
        events = request.app[EVENTS]
        snapshot = await self.snapshot(request.app[BACKEND], events)
        events.note(snapshot)
        options = request.app[OPTIONS]
        watch = request.app.get(WEB_CONFIG)
        error = str(watch.error) if watch is not None and watch.error is not None else None

        def encode() -> bytes:
            status = make_status(snapshot, options, error, events.user_names, events.history)
            if as_json:
                return to_json(status).encode() + b"\n"
            # Imported late: Jinja takes 3 MiB, and most exporters serve no page.
            from mps_exporter.web.status_page import render_page

            return render_page(status, options).encode()

        loop = asyncio.get_running_loop()
        return await self._renderings.join(
            (id(snapshot), as_json, error), lambda: loop.run_in_executor(self._thread, encode)
        )

    def forget(self) -> None:
        """Serve the next request with a new snapshot."""
        self._latest = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


Jump = Callable[[str], Awaitable[bool]]

RENDERED = web.AppKey[StatusRenderer]("RENDERED")
PAGE_LIMITER = web.AppKey[Limiter]("PAGES")
"""Separate from that of the scrapes: many readers of the page keep no scrape out."""
JUMP = web.AppKey[Jump]("JUMP")


async def status_json(request: web.Request) -> web.Response:
    return await _respond(request, "application/json", as_json=True)


async def status_html(request: web.Request) -> web.Response:
    return await _respond(request, "text/html", as_json=False)


async def _respond(request: web.Request, content_type: str, *, as_json: bool) -> web.Response:
    try:
        async with request.app[PAGE_LIMITER].place(request.remote):
            body = await request.app[RENDERED].render(request, as_json=as_json)
    except LimitExceededError:
        limit = request.app[OPTIONS].max_requests
        return busy_response(f"{limit} readers at once (--web.max-requests)")
    charset = None if as_json else "utf-8"
    return web.Response(body=body, content_type=content_type, charset=charset)


async def asset(request: web.Request) -> web.Response:
    """Return one of the page's files."""
    name = request.match_info["name"]
    if name not in _ASSETS:
        raise web.HTTPNotFound
    return web.Response(
        body=_ASSETS[name],
        content_type=_TYPES[name.rpartition(".")[2]],
        charset="utf-8",
        headers={"Cache-Control": "public, max-age=86400"},
    )


def _is_cross_site(request: web.Request) -> bool:
    """Whether a browser sent it for a page of another origin.

    Browsers name the origin in every POST, and most say how it relates to ours. A program such as
    curl sends neither.
    """
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in {"same-origin", "none"}:
        return True
    origin = request.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc != request.headers.get("Host")


async def jump(request: web.Request) -> web.Response:
    """Continue the demo at a chapter (/api/v1/demo/chapters/NAME), and respond when it plays."""
    if _is_cross_site(request):
        return text_response("403 Forbidden: sent by a page of another site", status=403)
    if not await request.app[JUMP](request.match_info["name"]):
        return text_response(
            "404 Not Found: no such chapter; /api/v1/status lists them under recording, chapters",
            status=404,
        )
    request.app[RENDERED].forget()
    return web.Response(status=204)
