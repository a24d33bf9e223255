"""The application: which path is answered by whom."""

from __future__ import annotations

from aiohttp import web

from exporter.web import debug, events, health, scrape, status
from exporter.web.backend import Backend
from exporter.web.capacity import Places
from exporter.web.connections import watch
from exporter.web.options import WebOptions
from exporter.web.responses import Handler, add_headers, plain_errors
from exporter.web.state import BACKEND, OPTIONS, TLS_CONTEXT, WEB_CONFIG
from exporter.web.webconfig import WebConfigWatch, install


async def _close(app: web.Application) -> None:
    app[status.RENDERED].close()


async def _expect_nothing(_request: web.Request) -> None:
    """Pass over ``Expect``: no body is read here, and aiohttp would answer before the lock does."""


def create_app(backend: Backend, options: WebOptions) -> web.Application:
    """The application, ready to be served.

    Raises:
        WebConfigError: The web configuration file cannot be used.
    """
    app = web.Application(middlewares=[watch, plain_errors])
    app[BACKEND] = backend
    app[OPTIONS] = options
    app[scrape.SCRAPES] = Places(options.max_requests)
    app[scrape.RENDERINGS] = scrape.Renderings()
    app[status.RENDERED] = status.Rendered()
    app[status.VISITS] = Places(options.max_requests)
    app[events.EVENTS] = events.Events()
    app[events.READERS] = Places(options.max_event_streams)
    app[debug.COLLECTIONS] = Places(1)
    app.cleanup_ctx.append(events.follow)
    app.on_shutdown.append(events.close)
    app.on_cleanup.append(_close)
    app.on_response_prepare.append(add_headers)
    if options.config_file is not None:
        watch_file = WebConfigWatch.start(options.config_file)
        install(app, watch_file)
        app[WEB_CONFIG] = watch_file
        if watch_file.uses_tls:
            app[TLS_CONTEXT] = watch_file.tls_context
    pages: dict[str, Handler] = {
        "/": status.status_page,
        "/static/{name}": status.asset,
        "/api/v1/status": status.status_json,
        options.telemetry_path: scrape.metrics,
        "/api/v1/events": events.events,
        "/debug/collect": debug.collect,
        "/-/healthy": health.healthy,
        "/-/ready": health.ready,
    }
    for path, page in pages.items():
        app.router.add_get(path, page, expect_handler=_expect_nothing)
    return app
