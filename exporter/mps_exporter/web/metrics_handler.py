"""/metrics: what Prometheus comes for."""

from __future__ import annotations

import math
import time

from aiohttp import web

from mps_exporter.web.events import EVENTS
from mps_exporter.web.limiter import ConcurrencyLimiter, LimitExceededError
from mps_exporter.web.negotiation import accepts_gzip, choose_format
from mps_exporter.web.responses import text_response
from mps_exporter.web.shared_renderings import SharedRenderings
from mps_exporter.web.state import BACKEND, OPTIONS

TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
MAX_TIMEOUT_SECONDS = 300.0
MAX_WAIT_SECONDS = 5.0
"""So long, and at most half of its time, a scrape waits while too many others are answered."""


def collection_deadline(header: str | None, offset: float) -> float | None:
    """Seconds for a collection: the scraper's timeout less a margin to send the answer in.

    The margin is a tenth of the timeout, at most ``offset``. None when the header tells nothing.
    """
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    seconds = min(seconds, MAX_TIMEOUT_SECONDS)
    return seconds - min(offset, seconds / 10)


def selected_collectors(request: web.Request, enabled: tuple[str, ...]) -> frozenset[str] | None:
    """The collectors that ``collect[]`` or ``exclude[]`` ask for; None for all.

    Raises:
        ValueError: They name what is not there, or contradict each other.
    """
    wanted = frozenset(request.query.getall("collect[]", ()))
    unwanted = frozenset(request.query.getall("exclude[]", ()))
    if wanted and unwanted:
        raise ValueError("collect[] and exclude[] cannot be used together")
    strangers = sorted((wanted | unwanted) - set(enabled))
    if strangers:
        name = strangers[0][:64].encode("ascii", "backslashreplace").decode()
        raise ValueError(f"no collector {name!r} here; enabled are {', '.join(enabled) or 'none'}")
    if unwanted:
        return frozenset(enabled) - unwanted
    return wanted or None


SCRAPE_LIMITER = web.AppKey[ConcurrencyLimiter]("SCRAPES")
RENDERINGS = web.AppKey[SharedRenderings]("RENDERINGS")


async def metrics(request: web.Request) -> web.Response:
    """Collect and render; HEAD only tells in which form an answer would come."""
    backend = request.app[BACKEND]
    try:
        collectors = selected_collectors(request, backend.enabled_collectors)
    except ValueError as error:
        return text_response(f"400 Bad Request: {error}", status=400)
    form = choose_format(",".join(request.headers.getall("Accept", ())))
    gzip = accepts_gzip(",".join(request.headers.getall("Accept-Encoding", ())))
    headers = {"Content-Type": form.content_type, "Vary": "Accept, Accept-Encoding"}
    if gzip:
        headers["Content-Encoding"] = "gzip"
    if request.method == "HEAD":
        return web.Response(headers=headers)
    options = request.app[OPTIONS]
    seconds = collection_deadline(request.headers.get(TIMEOUT_HEADER), options.timeout_offset)
    began = time.monotonic()
    wait_seconds = MAX_WAIT_SECONDS if seconds is None else min(seconds / 2, MAX_WAIT_SECONDS)
    try:
        async with request.app[SCRAPE_LIMITER].wait(request.remote or "", wait_seconds):
            if seconds is not None:
                seconds -= time.monotonic() - began
            snapshot = await backend.collect(seconds, collectors)
            request.app[EVENTS].note(snapshot)
            body = await request.app[RENDERINGS].join(
                (id(snapshot), form, gzip), lambda: backend.expose(snapshot, form, gzip)
            )
    except LimitExceededError:
        return text_response(
            f"503 Service Unavailable: more than {options.max_requests} scrapes at once, or most "
            "of them from one address (--web.max-requests)",
            status=503,
            headers={"Retry-After": "1"},
        )
    return web.Response(body=body, headers=headers)
