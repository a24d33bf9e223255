"""Answers in plain words, and the headers that every answer carries."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from html import escape

from aiohttp import web

from mps_exporter.web.state import OPTIONS

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def text_response(
    words: str, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """A line of text."""
    return web.Response(text=words + "\n", status=status, headers=headers)


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Signal: the headers of every answer, unless the answer has its own."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = "mps-exporter"


def _not_found(request: web.Request) -> web.Response:
    """Nothing here: where to go instead."""
    metrics = request.app[OPTIONS].telemetry_path
    if "text/html" not in request.headers.get("Accept", ""):
        return text_response(f"404 Not Found: try / or {metrics}", status=404)
    return web.Response(
        text=(
            '<!doctype html><html lang="en"><title>Not found</title><h1>404: nothing here</h1>'
            f'<p><a href="/">Status</a> · <a href="{escape(metrics)}">Metrics</a></p></html>\n'
        ),
        content_type="text/html",
        status=404,
    )


@web.middleware
async def plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors are answered with a line of text; what nobody foresaw is logged and gives 500."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        if error.status == 404:
            return _not_found(request)
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return text_response(f"{error.status} {error.reason}", status=error.status, headers=allowed)
    except (ConnectionError, TimeoutError):
        raise
    except Exception:  # noqa: BLE001 - the last one to catch it says so in the log
        _log.exception("a request failed", extra={"fields": {"path": request.path[:200]}})
        return text_response("500 Internal Server Error: see the exporter's log", status=500)
