"""The application: which path is answered by whom."""

from __future__ import annotations

from aiohttp import web

from mps_exporter.web import (
    demo_handler,
    events,
    health,
    metrics_handler,
    status_handler,
)
from mps_exporter.web.backend import Backend
from mps_exporter.web.connections import close_after_pipelined, track_request
from mps_exporter.web.limiter import ConcurrencyLimiter
from mps_exporter.web.options import WebOptions
from mps_exporter.web.responses import Handler, add_headers, plain_errors
from mps_exporter.web.shared_renderings import SharedRenderings
from mps_exporter.web.state import BACKEND, OPTIONS, TLS_CONTEXT, WEB_CONFIG
from mps_exporter.web.webconfig import WebConfigWatch, install


async def _close(app: web.Application) -> None:
    app[status_handler.RENDERED].close()


async def _expect_nothing(_request: web.Request) -> None:
    """Pass over ``Expect``: no body is read here, and aiohttp would answer before the lock does."""


def create_app(
    backend: Backend, options: WebOptions, *, jump: demo_handler.Jump | None = None
) -> web.Application:
    """The application, ready to be served.

    Args:
        backend: Answers what is asked.
        options: Where to listen, and limits.
        jump: Goes on at a chapter of a demo, by its name; False where there is none of this name.

    Raises:
        WebConfigError: The web configuration file cannot be used.
    """
    app = web.Application(middlewares=[plain_errors])
    app[BACKEND] = backend
    app[OPTIONS] = options
    app[metrics_handler.SCRAPE_LIMITER] = ConcurrencyLimiter(options.max_requests)
    app[metrics_handler.RENDERINGS] = SharedRenderings()
    app[status_handler.RENDERED] = status_handler.StatusRenderer()
    app[status_handler.PAGE_LIMITER] = ConcurrencyLimiter(options.max_requests)
    app[events.EVENTS] = events.Events()
    app[events.STREAM_LIMITER] = ConcurrencyLimiter(options.max_event_streams)
    app.cleanup_ctx.append(events.run_event_hub)
    app.on_shutdown.append(events.close_streams)
    app.on_cleanup.append(_close)
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(close_after_pipelined)
    if options.config_file is not None:
        watch_file = WebConfigWatch.start(options.config_file)
        install(app, watch_file)
        app[WEB_CONFIG] = watch_file
        if watch_file.uses_tls:
            app[TLS_CONTEXT] = watch_file.tls_context
    # Behind the lock: a connection whose password has not been checked makes room for another.
    app.middlewares.append(track_request)
    pages: dict[str, Handler] = {
        "/": status_handler.status_html,
        "/static/{name}": status_handler.asset,
        "/api/v1/status": status_handler.status_json,
        options.telemetry_path: metrics_handler.metrics,
        "/api/v1/events": events.events,
        "/-/healthy": health.healthy,
        "/-/ready": health.ready,
    }
    for path, page in pages.items():
        app.router.add_get(path, page, expect_handler=_expect_nothing)
    if jump is not None:
        app[demo_handler.JUMP] = jump
        app.router.add_post(
            "/api/v1/demo/chapters/{name}", demo_handler.jump, expect_handler=_expect_nothing
        )
    return app
