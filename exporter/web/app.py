"""The application: which path is answered by whom."""

from __future__ import annotations

from aiohttp import web

from exporter.web import debug, events, health, scrape, status
from exporter.web.backend import Backend
from exporter.web.capacity import Places
from exporter.web.connections import watch
from exporter.web.options import WebOptions
from exporter.web.responses import add_headers, plain_errors
from exporter.web.state import BACKEND, OPTIONS, TLS_CONTEXT, WEB_CONFIG
from exporter.web.webconfig import WebConfigWatch, install


async def _close(app: web.Application) -> None:
    app[status.RENDERED].close()


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
    app[events.EVENTS] = events.Events()
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
    app.router.add_get("/", status.status_page)
    app.router.add_get("/static/{name}", status.asset)
    app.router.add_get("/api/v1/status", status.status_json)
    app.router.add_get(options.telemetry_path, scrape.metrics)
    app.router.add_get("/api/v1/events", events.events)
    app.router.add_get("/debug/collect", debug.collect)
    app.router.add_get("/-/healthy", health.healthy)
    app.router.add_get("/-/ready", health.ready)
    return app
