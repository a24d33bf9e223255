"""/metrics, for Prometheus."""

from __future__ import annotations

import math
import re
import time
from functools import lru_cache

from aiohttp import web
from prometheus_client.exposition import choose_encoder, gzip_accepted

from mps_exporter.metrics.exposition import OPENMETRICS_1_0_0, TEXT_0_0_4, TEXT_1_0_0
from mps_exporter.web.events import EVENTS
from mps_exporter.web.guard import Limiter, LimitExceededError, SharedRenderings
from mps_exporter.web.options import BACKEND, OPTIONS, busy_response, text_response

TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
MAX_TIMEOUT_SECONDS = 300.0
MAX_WAIT_SECONDS = 5.0
"""Maximum time that a scrape waits for a place, at most half of its timeout."""
HEADERS_KEPT = 8
"""Accept headers whose choice is remembered: a scraper always sends the same."""


@lru_cache(maxsize=HEADERS_KEPT)
def choose_format(accept: str) -> str:
    """Return the format that prometheus-client chooses, in the version that is rendered here."""
    try:
        _, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return TEXT_0_0_4
    if "version=0." in content_type:
        return TEXT_0_0_4
    form = OPENMETRICS_1_0_0 if "openmetrics" in content_type else TEXT_1_0_0
    escaping = re.search(r"escaping=([a-z0-9-]+)", content_type)
    return form if escaping is None else form.replace("underscores", escaping[1])


def collection_deadline(header: str | None, offset: float) -> float | None:
    """Seconds for a collection: the scraper's timeout less a margin to send the answer in.

    The margin is a tenth of the timeout, at most ``offset``. None if the header has no number.
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
    """Return the collectors that ``collect[]`` or ``exclude[]`` choose; None for all.

    Raises:
        ValueError: They name an unknown collector, or contradict each other.
    """
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


SCRAPE_LIMITER = web.AppKey[Limiter]("SCRAPES")
RENDERINGS = web.AppKey[SharedRenderings]("RENDERINGS")


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
    wait_seconds = MAX_WAIT_SECONDS if seconds is None else min(seconds / 2, MAX_WAIT_SECONDS)
    try:
        async with request.app[SCRAPE_LIMITER].place(request.remote, wait_seconds):
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
