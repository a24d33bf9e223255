"""Checks that a request must pass before its handler: rate, client certificate, password."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from .config import WebConfig
from .passwords import Passwords
from .reload import WebConfigWatch
from .tls import alternative_names

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def credentials(header: str) -> tuple[str, bytes] | None:
    """Return user and password of an Authorization header; None if it has none."""
    # One blank and nothing else separates the two, as in Go.
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None
    user, colon, password = decoded.partition(b":")
    return (user.decode("utf-8", "surrogateescape"), password) if colon else None


def _refusal(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(text=f"{status} {text}\n", status=status, headers=headers)


class TokenBucket:
    """``burst`` requests at once, and one more each ``interval`` seconds (0: no limit)."""

    def __init__(self, interval: float, burst: int, now: float) -> None:
        self.rate = interval, burst
        self._tokens = float(burst)
        self._at = now

    def allow(self, now: float) -> bool:
        """Take a token, if there is one."""
        interval, burst = self.rate
        if not interval:
            return True
        self._tokens = min(float(burst), self._tokens + max(0.0, now - self._at) / interval)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class _Checks:
    def __init__(self, watch: WebConfigWatch) -> None:
        self._watch = watch
        self._bucket = TokenBucket(0.0, 0, time.monotonic())
        self.passwords = Passwords()

    async def refusal(self, request: web.Request) -> web.Response | None:
        """Return the response to a request that fails a check; None if it passes all."""
        config = await self._watch.config()
        if not self._may_come(config):
            return _refusal(429, "Too Many Requests", {"Retry-After": "1"})
        if not _has_allowed_name(request, config):
            return _refusal(403, "Forbidden: no name of the client's certificate is allowed here")
        if not await self._has_password(request, config):
            return _refusal(401, "Unauthorized", {"WWW-Authenticate": "Basic"})
        return None

    def _may_come(self, config: WebConfig) -> bool:
        now = time.monotonic()
        rate = config.rate_limit.interval, config.rate_limit.burst
        if self._bucket.rate != rate:
            self._bucket = TokenBucket(*rate, now)
        return self._bucket.allow(now)

    async def _has_password(self, request: web.Request, config: WebConfig) -> bool:
        users = config.basic_auth_users
        if not users:
            return True
        given = credentials(request.headers.get("Authorization", ""))
        return given is not None and await self.passwords.valid(users, *given, request.remote or "")


def _has_allowed_name(request: web.Request, config: WebConfig) -> bool:
    allowed = config.tls_server_config.client_allowed_sans
    if allowed is None:
        return True
    transport = request.transport
    certificate = transport.get_extra_info("peercert") if transport is not None else None
    return not alternative_names(certificate).isdisjoint(allowed)


def install(app: web.Application, watch: WebConfigWatch) -> None:
    """Add the checks and response headers of the configuration to the application.

    The middleware goes behind those that are there already. The watch is closed with the
    application.
    """
    checks = _Checks(watch)

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = await checks.refusal(request)
        return refusal if refusal is not None else await handler(request)

    async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
        for name, value in watch.current.http_server_config.headers.items():
            if value:
                response.headers[name] = value

    async def close(_app: web.Application) -> None:
        checks.passwords.close()
        watch.close()

    app.middlewares.append(checked)
    app.on_response_prepare.append(add_headers)
    app.on_cleanup.append(close)
