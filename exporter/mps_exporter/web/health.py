"""/-/healthy and /-/ready."""

from __future__ import annotations

from aiohttp import web

from mps_exporter.web.responses import text_response
from mps_exporter.web.state import BACKEND


async def healthy(_request: web.Request) -> web.Response:
    """The program runs and answers. A dead GPU is an alert, not a reason to restart it."""
    return text_response("Healthy")


async def ready(request: web.Request) -> web.Response:
    """The first collection is done."""
    if request.app[BACKEND].ready:
        return text_response("Ready")
    return text_response("Not ready: the first collection is not done yet", status=503)
