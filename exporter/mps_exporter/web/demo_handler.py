"""/api/v1/demo/chapters/NAME: goes on at a chapter of the demo. A live host has no such page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from mps_exporter.web.responses import text_response
from mps_exporter.web.status_handler import RENDERED

Jump = Callable[[str], Awaitable[bool]]

JUMP = web.AppKey[Jump]("JUMP")


def _is_cross_site(request: web.Request) -> bool:
    """Whether a browser sent it for a page of another origin.

    Browsers name the origin in every POST, and most say how it relates to ours. A program such as
    curl sends neither.
    """
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in {"same-origin", "none"}:
        return True
    origin = request.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc != request.headers.get("Host")


async def jump(request: web.Request) -> web.Response:
    """Answer when the chapter is played."""
    if _is_cross_site(request):
        return text_response("403 Forbidden: sent by a page of another site", status=403)
    name = request.match_info["name"]
    if not await request.app[JUMP](name):
        return text_response(
            "404 Not Found: no such chapter; /api/v1/status lists them under recording, chapters",
            status=404,
        )
    request.app[RENDERED].forget()
    return web.Response(status=204)
