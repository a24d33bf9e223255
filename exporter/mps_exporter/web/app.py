"""The aiohttp application: routes, middlewares, and the headers of every response."""

from __future__ import annotations

import logging
from html import escape

from aiohttp import web

from mps_exporter.web import events, metrics_handler, status_handler
from mps_exporter.web.backend import Backend
from mps_exporter.web.guard import Limiter, SharedRenderings, track_request
from mps_exporter.web.options import (
    BACKEND,
    OPTIONS,
    TLS_CONTEXT,
    WEB_CONFIG,
    Handler,
    WebOptions,
    text_response,
)
from mps_exporter.web.webconfig import WebConfigWatch, install

_log = logging.getLogger(__name__)

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = "mps-exporter"


def _not_found(request: web.Request) -> web.Response:
    metrics = request.app[OPTIONS].telemetry_path
    if "text/html" not in request.headers.get("Accept", ""):
        return text_response(f"404 Not Found: try / or {metrics}", status=404)
    text = (
        '<!doctype html><html lang="en"><title>Not found</title><h1>404: nothing here</h1>'
        f'<p><a href="/">Status</a> · <a href="{escape(metrics)}">Metrics</a></p></html>\n'
    )
    return web.Response(text=text, content_type="text/html", status=404)


@web.middleware
async def _plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors as a line of text; log unexpected exceptions and return 500."""
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


async def _healthy(_request: web.Request) -> web.Response:
    """The program runs and answers. A dead GPU is an alert, not a reason to restart it."""
    return text_response("Healthy")


async def _ready(request: web.Request) -> web.Response:
    if request.app[BACKEND].ready:
        return text_response("Ready")
    return text_response("Not ready: the first collection is not done yet", status=503)


async def _close(app: web.Application) -> None:
    app[status_handler.RENDERED].close()


async def _ignore_expect(_request: web.Request) -> None:
    """Ignore ``Expect``: no body is read, and aiohttp would answer before the password check."""


def create_app(
    backend: Backend, options: WebOptions, *, jump: status_handler.Jump | None = None
) -> web.Application:
    """Return the application, ready to be served.

    Args:
        backend: Source of snapshots, metrics and incidents.
        options: Addresses, pages and limits.
        jump: Continues a demo at the chapter of this name; returns False if there is none.

    Raises:
        WebConfigError: The web configuration file cannot be used.
    """
    app = web.Application(middlewares=[_plain_errors])
    app[BACKEND] = backend
    app[OPTIONS] = options
    app[metrics_handler.SCRAPE_LIMITER] = Limiter(options.max_requests)
    app[metrics_handler.RENDERINGS] = SharedRenderings()
    app[status_handler.RENDERED] = status_handler.StatusRenderer()
    app[status_handler.PAGE_LIMITER] = Limiter(options.max_requests)
    app[events.EVENTS] = events.Events()
    app[events.STREAM_LIMITER] = Limiter(options.max_event_streams)
    app.cleanup_ctx.append(events.run_event_hub)
    app.on_shutdown.append(events.close_streams)
    app.on_cleanup.append(_close)
    app.on_response_prepare.append(_add_headers)
    if options.config_file is not None:
        watch = WebConfigWatch.start(options.config_file)
        install(app, watch)
        app[WEB_CONFIG] = watch
        if watch.uses_tls:
            app[TLS_CONTEXT] = watch.tls_context
    # After the password check: before it, a request counts as being received.
    app.middlewares.append(track_request)
    pages: dict[str, Handler] = {
        "/": status_handler.status_html,
        "/static/{name}": status_handler.asset,
        "/api/v1/status": status_handler.status_json,
        options.telemetry_path: metrics_handler.metrics,
        "/api/v1/events": events.events,
        "/-/healthy": _healthy,
        "/-/ready": _ready,
    }
    for path, page in pages.items():
        app.router.add_get(path, page, expect_handler=_ignore_expect)
    if jump is not None:
        app[status_handler.JUMP] = jump
        app.router.add_post(
            "/api/v1/demo/chapters/{name}", status_handler.jump, expect_handler=_ignore_expect
        )
    return app
