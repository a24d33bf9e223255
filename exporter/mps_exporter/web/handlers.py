"""The request handlers: metrics, status as JSON and as a page, health, the demo, the manual."""

import asyncio
import math
import re
import time
from functools import cache

from aiohttp import web
from prometheus_client.exposition import choose_encoder, gzip_accepted

from mps_exporter import limits_without_a_flag as policy
from mps_exporter import manual_search
from mps_exporter.backend import Backend
from mps_exporter.metrics.exposition import OPENMETRICS_1_0_0, TEXT_0_0_4, TEXT_1_0_0
from mps_exporter.snapshot import Snapshot
from mps_exporter.web import BACKEND, WEB_CONFIG, text_response
from mps_exporter.web.events import EVENTS
from mps_exporter.web.guard import Limiter, SharedCalls
from mps_exporter.web.status_api import make_status, to_json
from mps_exporter.web.status_page import ASSET_TYPES, ASSETS, render_page, templates

# --------------------------------------------------------------------------------- metrics

GZIP_LEVEL = 1  # Compression level: twice as fast as the default for pages hardly larger.
TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
SCRAPE_LIMITER = web.AppKey[Limiter]("SCRAPES")
RENDERINGS = web.AppKey[SharedCalls]("RENDERINGS")


def choose_format(accept: str) -> str:
    """Return the format that prometheus-client chooses, in the version that is rendered here."""
    try:
        _, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is not a number
        return TEXT_0_0_4
    if "version=0." in content_type:
        return TEXT_0_0_4
    return OPENMETRICS_1_0_0 if "openmetrics" in content_type else TEXT_1_0_0


def collection_deadline(header: str | None) -> float | None:
    """Return the seconds for a collection: the scraper's timeout less a margin for the response.

    The margin is a tenth of the timeout, at most 0.5 s. None without a positive number.
    """
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    seconds = min(seconds, policy.MAX_SCRAPE_TIMEOUT_SECONDS)
    return seconds - min(policy.TIMEOUT_OFFSET_SECONDS, seconds / 10)


def _bad_request(reason: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(reason=f"Bad Request: {reason}")


def selected_collectors(request: web.Request, enabled: tuple[str, ...]) -> frozenset[str] | None:
    """Return the collectors that ``collect[]`` or ``exclude[]`` choose; None for all."""
    wanted = frozenset(request.query.getall("collect[]", ()))
    unwanted = frozenset(request.query.getall("exclude[]", ()))
    if wanted and unwanted:
        raise _bad_request("collect[] and exclude[] cannot be used together")
    unknown = sorted((wanted | unwanted) - set(enabled))
    if unknown:
        name = unknown[0][:64].encode("ascii", "backslashreplace").decode()
        known = ", ".join(enabled) or "none"
        raise _bad_request(f"no collector {name!r} here; enabled are {known}")
    if unwanted:
        return frozenset(enabled) - unwanted
    return wanted or None


async def metrics(request: web.Request) -> web.Response:
    """Collect and render. HEAD returns the headers only."""
    backend = request.app[BACKEND]
    collectors = selected_collectors(request, backend.settings.enabled_collectors())
    form = choose_format(",".join(request.headers.getall("Accept", ())))
    gzip = gzip_accepted(",".join(request.headers.getall("Accept-Encoding", ())))
    headers = {"Content-Type": form, "Vary": "Accept, Accept-Encoding"}
    if gzip:
        headers["Content-Encoding"] = "gzip"
    if request.method == "HEAD":
        return web.Response(headers=headers)
    seconds = collection_deadline(request.headers.get(TIMEOUT_HEADER))
    began = time.monotonic()
    queued = policy.MAX_QUEUE_SECONDS if seconds is None else seconds / 2
    async with request.app[SCRAPE_LIMITER].slot(
        request.remote, min(queued, policy.MAX_QUEUE_SECONDS)
    ):
        if seconds is not None:
            seconds -= time.monotonic() - began
        snapshot = await backend.collect(seconds, collectors)
        request.app[EVENTS].note(snapshot)
        level = GZIP_LEVEL if gzip else 0
        body = await request.app[RENDERINGS].join(
            (id(snapshot), form, gzip), lambda: backend.expose(snapshot, form, level)
        )
    return web.Response(body=body, headers=headers)


# ---------------------------------------------------------------------------------- status


class StatusRenderer:
    """Renders the status on a thread; concurrent requests share the collection and the result."""

    def __init__(self) -> None:
        self._latest: tuple[float, Snapshot] | None = None

    async def _snapshot(self, backend: Backend) -> Snapshot:
        """Return the last snapshot if it is fresh, otherwise a new one."""
        loop = asyncio.get_running_loop()
        if self._latest is not None:
            taken_at, snapshot = self._latest
            if loop.time() - taken_at < policy.STATUS_REUSE_SECONDS:
                return snapshot
        snapshot = await backend.collect(policy.STATUS_TIMEOUT_SECONDS, None)
        self._latest = loop.time(), snapshot
        return snapshot

    async def render(self, app: web.Application, *, as_json: bool) -> bytes:
        backend, events = app[BACKEND], app[EVENTS]
        snapshot = await self._snapshot(backend)
        events.note(snapshot)
        watch = app.get(WEB_CONFIG)
        error = str(watch.error) if watch is not None and watch.error is not None else None

        def encode() -> bytes:
            status = make_status(
                snapshot,
                error,
                events.user_names,
                events.history,
                host=backend.host,
                build=backend.build,
            )
            path = backend.settings.web_telemetry_path
            return (to_json(status) + "\n" if as_json else render_page(status, path)).encode()

        return await app[RENDERINGS].join(
            (id(snapshot), as_json, error), lambda: asyncio.to_thread(encode)
        )

    def forget(self, *_incident: object) -> None:
        """Drop the last snapshot: after an incident, or a jump of the demo, it is old."""
        self._latest = None


RENDERER = web.AppKey[StatusRenderer]("RENDERER")
PAGE_LIMITER = web.AppKey[Limiter]("PAGES")  # Readers of the page do not block scrapes.


async def status(request: web.Request) -> web.Response:
    """Return the page at /, otherwise the JSON."""
    as_json = request.path != "/"
    async with request.app[PAGE_LIMITER].slot(request.remote):
        body = await request.app[RENDERER].render(request.app, as_json=as_json)
    if as_json:
        return web.Response(body=body, content_type="application/json")
    return web.Response(body=body, content_type="text/html", charset="utf-8")


async def incident_recording(request: web.Request) -> web.Response:
    """Return the recording of an incident (/api/v1/incidents/ID/recording, or "latest")."""
    found = re.fullmatch(r"(\d{1,14})-[a-z_]+|latest", request.match_info["id"])
    at = int(found[1]) / 1000 if found and found[1] else None
    async with request.app[PAGE_LIMITER].slot(request.remote):
        data = found and await request.app[BACKEND].recording(at)
    if not found or data is None:
        text = "404 Not Found: this incident is not kept (--record.directory keeps recordings)"
        return text_response(text, status=404)
    headers = {"Content-Disposition": f"attachment; filename=incident-{found[0]}.rec.gz"}
    return web.Response(body=data, content_type="application/octet-stream", headers=headers)


async def asset(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in ASSETS:
        raise web.HTTPNotFound
    return web.Response(
        body=ASSETS[name],
        content_type=ASSET_TYPES[name.rpartition(".")[2]],
        charset="utf-8",
        headers={"Cache-Control": "public, max-age=86400"},
    )


# ------------------------------------------------------------------------- health and demo


async def healthy(_request: web.Request) -> web.Response:
    """Respond with 200. A dead GPU is an alert, not a reason to restart the program."""
    return text_response("Healthy")


async def ready(request: web.Request) -> web.Response:
    if request.app[BACKEND].ready:
        return text_response("Ready")
    return text_response("Not ready: the first collection is not done yet", status=503)


async def jump(request: web.Request) -> web.Response:
    """Continue the demo at a chapter (/api/v1/demo/chapters/NAME), and respond when it plays."""
    if not await request.app[BACKEND].jump(request.match_info["name"]):
        return text_response(
            "404 Not Found: no such chapter; /api/v1/status lists them under recording, chapters",
            status=404,
        )
    request.app[RENDERER].forget()
    return web.Response(status=204)


# ---------------------------------------------------------------------------------- manual

_MANUAL_INDEX = (
    "# Manual\n\n## Error texts and hangs\n\n{}\n\n## Alerts\n\n{}\n{}\n\n"
    "## FAQ\n\n{}\n{}\n\n## Sharing a GPU\n\n{}\n{}\n"
)


@cache
def _manual_page(name: str) -> str:
    """Return a page of the manual, or for "" the list of all, as HTML."""
    import mistune  # late: it takes memory, and most exporters serve no page

    pages = manual_search.pages()
    lists = (
        "\n".join(f"- [{one.title}]({one.name})" for one in pages.values() if one.folder == each)
        for each in (*manual_search.FOLDERS, *manual_search.QUESTIONS)
    )
    text = pages[name].text if name else _MANUAL_INDEX.format(*lists)
    body = str(mistune.create_markdown(plugins=["table"])(text))
    title = pages[name].title if name else "Manual"
    return templates().get_template("manual.html").render(title=title, body=body)


async def manual_page(request: web.Request) -> web.Response:
    """Return a page of the manual, at /docs/ the list of all."""
    name = request.match_info.get("name", "")
    if name and name not in manual_search.pages():
        raise web.HTTPNotFound
    return web.Response(text=_manual_page(name), content_type="text/html", charset="utf-8")
