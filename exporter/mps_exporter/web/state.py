"""What the handlers share, kept in the application."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

from mps_exporter.web.backend import Backend
from mps_exporter.web.options import WebOptions
from mps_exporter.web.webconfig import WebConfigWatch

TLSContext = Callable[[], Awaitable[ssl.SSLContext | None]]

BACKEND = web.AppKey[Backend]("BACKEND")
OPTIONS = web.AppKey[WebOptions]("OPTIONS")
TLS_CONTEXT = web.AppKey[TLSContext]("TLS_CONTEXT")
"""Gives the context for the next connection; absent where TLS is off."""

WEB_CONFIG = web.AppKey[WebConfigWatch]("WEB_CONFIG")
"""Absent where no file was given."""
