"""The request handlers: metrics, status as JSON and as a page, health, and the demo's chapters."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client.exposition import choose_encoder, gzip_accepted

from mps_exporter.metrics.exposition import OPENMETRICS_1_0_0, TEXT_0_0_4, TEXT_1_0_0
from mps_exporter.snapshot import Snapshot
from mps_exporter.web import BACKEND, OPTIONS, WEB_CONFIG, busy_response, policy, text_response
from mps_exporter.web.events import EVENTS
from mps_exporter.web.guard import Limiter, LimitExceededError, SharedRenderings
from mps_exporter.web.status_api import make_status, to_json

# --------------------------------------------------------------------------------- metrics

TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
SCRAPE_LIMITER = web.AppKey[Limiter]("SCRAPES")
RENDERINGS = web.AppKey[SharedRenderings]("RENDERINGS")


def choose_format(accept: str) -> str:
    """Return the format that prometheus-client chooses, in the version that is rendered here."""
    try:
        _, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is not a number
        return TEXT_0_0_4
    if "version=0." in content_type:
        return TEXT_0_0_4
    form = OPENMETRICS_1_0_0 if "openmetrics" in content_type else TEXT_1_0_0
    escaping = re.search(r"escaping=([a-z0-9-]+)", content_type)
    return form if escaping is None else form.replace("underscores", escaping[1])


def collection_deadline(header: str | None, offset: float) -> float | None:
    """Return the seconds for a collection: the scraper's timeout less a margin for the response.

    The margin is a tenth of the timeout, at most ``offset``. None if the header has no number.
    """
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    seconds = min(seconds, policy.MAX_SCRAPE_TIMEOUT_SECONDS)
    return seconds - min(offset, seconds / 10)


def selected_collectors(request: web.Request, enabled: tuple[str, ...]) -> frozenset[str] | None:
    """Return the collectors that ``collect[]`` or ``exclude[]`` choose; None for all."""
    wanted = frozenset(request.query.getall("collect[]", ()))
    unwanted = frozenset(request.query.getall("exclude[]", ()))
    if wanted and unwanted:
        raise ValueError("collect[] and exclude[] cannot be used together")
    unknown = sorted((wanted | unwanted) - set(enabled))
    if unknown:
        name = unknown[0][:64].encode("ascii", "backslashreplace").decode()
        raise ValueError(f"no collector {name!r} here; enabled are {', '.join(enabled) or 'none'}")
    if unwanted:
        return frozenset(enabled) - unwanted
    return wanted or None


async def metrics(request: web.Request) -> web.Response:
    """Collect and render. HEAD returns the headers only."""
    backend = request.app[BACKEND]
    try:
        collectors = selected_collectors(request, backend.enabled_collectors)
    except ValueError as error:
        return text_response(f"400 Bad Request: {error}", status=400)
    form = choose_format(",".join(request.headers.getall("Accept", ())))
    gzip = gzip_accepted(",".join(request.headers.getall("Accept-Encoding", ())))
    headers = {"Content-Type": form, "Vary": "Accept, Accept-Encoding"}
    if gzip:
        headers["Content-Encoding"] = "gzip"
    if request.method == "HEAD":
        return web.Response(headers=headers)
    options = request.app[OPTIONS]
    seconds = collection_deadline(request.headers.get(TIMEOUT_HEADER), options.timeout_offset)
    began = time.monotonic()
    queued = policy.MAX_QUEUE_SECONDS if seconds is None else seconds / 2
    try:
        async with request.app[SCRAPE_LIMITER].slot(
            request.remote, min(queued, policy.MAX_QUEUE_SECONDS)
        ):
            if seconds is not None:
                seconds -= time.monotonic() - began
            snapshot = await backend.collect(seconds, collectors)
            request.app[EVENTS].note(snapshot)
            body = await request.app[RENDERINGS].join(
                (id(snapshot), form, gzip), lambda: backend.expose(snapshot, form, gzip)
            )
    except LimitExceededError:
        return busy_response(f"{options.max_requests} scrapes at once (--web.max-requests)")
    return web.Response(body=body, headers=headers)


# ---------------------------------------------------------------------------------- status

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_ASSETS = {
    entry.name: entry.read_bytes()
    for entry in (resources.files("mps_exporter.web") / "static").iterdir()
    if entry.name.rpartition(".")[2] in _TYPES
}
"""The page's files, read once: no request accesses the file system."""


class StatusRenderer:
    """Renders the status on a thread; concurrent requests share the result."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="status")
        self._latest: tuple[float, Snapshot] | None = None
        self._collecting: asyncio.Task[Snapshot] | None = None

    async def _snapshot(self, request: web.Request) -> Snapshot:
        """Return the last snapshot if it is fresh, otherwise a new one."""
        loop = asyncio.get_running_loop()
        if self._latest is not None:
            taken_at, snapshot = self._latest
            if request.app[EVENTS].last_at > taken_at:
                await asyncio.sleep(taken_at + policy.AFTER_INCIDENT_SECONDS - loop.time())
            elif loop.time() - taken_at < policy.STATUS_REUSE_SECONDS:
                return snapshot
        if self._collecting is None:
            self._collecting = loop.create_task(self._collect(request.app))
        return await asyncio.shield(self._collecting)

    async def _collect(self, app: web.Application) -> Snapshot:
        try:
            snapshot = await app[BACKEND].collect(policy.STATUS_TIMEOUT_SECONDS, None)
            self._latest = asyncio.get_running_loop().time(), snapshot
            return snapshot
        finally:
            self._collecting = None

    async def render(self, request: web.Request, *, as_json: bool) -> bytes:
        snapshot = await self._snapshot(request)
        events, options = request.app[EVENTS], request.app[OPTIONS]
        events.note(snapshot)
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
        return await request.app[RENDERINGS].join(
            (id(snapshot), as_json, error), lambda: loop.run_in_executor(self._thread, encode)
        )

    def forget(self) -> None:
        self._latest = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


RENDERER = web.AppKey[StatusRenderer]("RENDERER")
PAGE_LIMITER = web.AppKey[Limiter]("PAGES")
"""Separate from SCRAPE_LIMITER, so that readers of the page do not block scrapes."""


async def close_renderer(app: web.Application) -> None:
    app[RENDERER].close()


async def status(request: web.Request) -> web.Response:
    """Return the page at /, otherwise the JSON."""
    as_json = request.path != "/"
    try:
        async with request.app[PAGE_LIMITER].slot(request.remote):
            body = await request.app[RENDERER].render(request, as_json=as_json)
    except LimitExceededError:
        limit = request.app[OPTIONS].max_requests
        return busy_response(f"{limit} readers at once (--web.max-requests)")
    if as_json:
        return web.Response(body=body, content_type="application/json")
    return web.Response(body=body, content_type="text/html", charset="utf-8")


def asset_address(name: str) -> str:
    """Return a file's address relative to /, which changes with the file's content."""
    return f"static/{name}?{hashlib.sha256(_ASSETS[name]).hexdigest()[:12]}"


async def asset(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in _ASSETS:
        raise web.HTTPNotFound
    return web.Response(
        body=_ASSETS[name],
        content_type=_TYPES[name.rpartition(".")[2]],
        charset="utf-8",
        headers={"Cache-Control": "public, max-age=86400"},
    )


# ------------------------------------------------------------------------- health and demo

Jump = Callable[[str], Awaitable[bool]]
JUMP = web.AppKey[Jump]("JUMP")


async def healthy(_request: web.Request) -> web.Response:
    """Respond with 200. A dead GPU is an alert, not a reason to restart the program."""
    return text_response("Healthy")


async def ready(request: web.Request) -> web.Response:
    if request.app[BACKEND].ready:
        return text_response("Ready")
    return text_response("Not ready: the first collection is not done yet", status=503)


def _is_cross_site(request: web.Request) -> bool:
    """Return whether a browser sent the request for a page of another origin.

    Browsers name the origin in every POST, and most report its relation to the server. A program
    such as curl sends neither.
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
    request.app[RENDERER].forget()
    return web.Response(status=204)
