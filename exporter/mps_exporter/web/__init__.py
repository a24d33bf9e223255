"""The web server: metrics, status page, events, TLS and passwords; and what its modules share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from mps_exporter.backend import Backend

if TYPE_CHECKING:
    from mps_exporter.web.webconfig import WebConfigWatch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BACKEND = web.AppKey[Backend]("BACKEND")
WEB_CONFIG: web.AppKey[WebConfigWatch] = web.AppKey("WEB_CONFIG")
"""Absent without a web configuration file."""


def text_response(
    text: str, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(text=text + "\n", status=status, headers=headers)
