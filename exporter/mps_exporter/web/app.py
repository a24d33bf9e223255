"""The aiohttp application: routes, middlewares, and the headers of every response."""

import logging

from aiohttp import web

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.backend import Backend
from mps_exporter.web import BACKEND, WEB_CONFIG, Handler, events, handlers, text_response
from mps_exporter.web.guard import Limiter, SharedCalls, track_request

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
_ERROR_HEADERS = ("Allow", "Retry-After")


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = "mps-exporter"


@web.middleware
async def _plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors as a line of text; log unexpected exceptions and return 500."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        if error.status == 404:
            metrics = request.app[BACKEND].settings.web_telemetry_path
            return text_response(f"404 Not Found: try / or {metrics}", status=404)
        kept = {name: error.headers[name] for name in _ERROR_HEADERS if name in error.headers}
        return text_response(f"{error.status} {error.reason}", status=error.status, headers=kept)
    except (ConnectionError, TimeoutError):
        raise
    except Exception:  # noqa: BLE001 - logged here, and the client gets a response
        _log.exception("a request failed", extra={"fields": {"path": request.path[:200]}})
        return text_response("500 Internal Server Error: see the exporter's log", status=500)


async def _ignore_expect(_request: web.Request) -> None:
    """Ignore ``Expect``: no body is read, and aiohttp would respond before the password check."""


def create_app(backend: Backend) -> web.Application:
    settings = backend.settings
    app = web.Application(middlewares=[_plain_errors])
    app[BACKEND] = backend
    flag = "at once (--web.max-requests)"
    app[handlers.SCRAPE_LIMITER] = Limiter(settings.web_max_requests, f"scrapes {flag}")
    app[handlers.RENDERINGS] = SharedCalls()
    app[handlers.RENDERER] = handlers.StatusRenderer()
    app[handlers.PAGE_LIMITER] = Limiter(settings.web_max_requests, f"readers {flag}")
    app[events.EVENTS] = events.Events()
    app[events.STREAM_LIMITER] = Limiter(policy.MAX_EVENT_STREAMS, "readers already", 30)
    backend.subscribe(app[handlers.RENDERER].forget)
    backend.subscribe(app[events.EVENTS].add)
    app.on_shutdown.append(events.close_streams)
    app.on_response_prepare.append(_add_headers)
    if settings.web_config_file is not None:
        # Imported late: YAML takes memory.
        from mps_exporter.web.webconfig import WebConfigWatch
        from mps_exporter.web.webconfig.auth import install

        app[WEB_CONFIG] = WebConfigWatch(settings.web_config_file)
        install(app, app[WEB_CONFIG])
    # After the password check: before it, a request counts as being received.
    app.middlewares.append(track_request)
    pages: dict[str, Handler] = {
        "/": handlers.status,
        "/static/{name}": handlers.asset,
        "/docs/": handlers.manual_page,
        "/docs/{name}": handlers.manual_page,
        "/api/v1/status": handlers.status,
        "/api/v1/incidents/{id}/recording": handlers.incident_recording,
        settings.web_telemetry_path: handlers.metrics,
        "/api/v1/events": events.events,
        "/-/healthy": handlers.healthy,
        "/-/ready": handlers.ready,
    }
    for path, page in pages.items():
        app.router.add_get(path, page, expect_handler=_ignore_expect)
    path = "/api/v1/demo/chapters/{name}"
    app.router.add_post(path, handlers.jump, expect_handler=_ignore_expect)
    return app
