"""The lock on the door: what a request must pass before a handler sees it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from .config import WebConfig
from .passwords import REFUSAL_SECONDS, Passwords, TooManyChecksError
from .reload import WebConfigWatch
from .tls import alternative_names

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def credentials(header: str) -> tuple[str, bytes] | None:
    """User and password of an Authorization header; None when there are none in it."""
    # One blank and nothing else stands between the two, as in Go.
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None
    user, colon, password = decoded.partition(b":")
    return (user.decode("utf-8", "surrogateescape"), password) if colon else None


def _refusal(status: int, words: str, **headers: str) -> web.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.Response(text=f"{status} {words}\n", status=status, headers=named)


class TokenBucket:
    """``burst`` requests at once, and one more each ``interval`` seconds."""

    def __init__(self, interval_seconds: float, burst: int, now: float) -> None:
        self.interval_seconds = interval_seconds
        self.burst = burst
        self._tokens = float(burst)
        self._at = now

    def allow(self, now: float) -> bool:
        """Take a token, if there is one."""
        if not self.interval_seconds:
            return True
        gained = max(0.0, now - self._at) / self.interval_seconds
        self._tokens = min(float(self.burst), self._tokens + gained)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class _AuthMiddleware:
    def __init__(self, watch: WebConfigWatch) -> None:
        self._watch = watch
        self._passwords = Passwords()
        self._rate_limiter = TokenBucket(0.0, 0, time.monotonic())

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        config = await self._watch.config()
        refusal = (
            self._check_rate(config)
            or self._check_client_san(request, config)
            or await self._check_password(request, config)
        )
        return refusal if refusal is not None else await handler(request)

    def _check_rate(self, config: WebConfig) -> web.Response | None:
        wanted = config.rate_interval_seconds, config.rate_burst
        now = time.monotonic()
        if (self._rate_limiter.interval_seconds, self._rate_limiter.burst) != wanted:
            self._rate_limiter = TokenBucket(*wanted, now)
        if self._rate_limiter.allow(now):
            return None
        return _refusal(429, "Too Many Requests", Retry_After="1")

    def _check_client_san(self, request: web.Request, config: WebConfig) -> web.Response | None:
        allowed = config.tls.client_allowed_sans
        if allowed is None:
            return None
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport is not None else None
        if alternative_names(certificate).isdisjoint(allowed):
            return _refusal(403, "Forbidden: no name of the client's certificate is allowed here")
        return None

    async def _check_password(self, request: web.Request, config: WebConfig) -> web.Response | None:
        if not config.users:
            return None
        given = credentials(request.headers.get("Authorization", ""))

        def is_gone() -> bool:
            return request.transport is None or request.transport.is_closing()

        try:
            address = request.remote or ""
            if given is not None and await self._passwords.valid(
                config.users, *given, address, is_gone
            ):
                return None
        except TooManyChecksError:
            await asyncio.sleep(REFUSAL_SECONDS)
            return _refusal(503, "Service Unavailable: too many logins", Retry_After="5")
        return _refusal(401, "Unauthorized", WWW_Authenticate="Basic")

    def close(self) -> None:
        self._passwords.close()


def install(app: web.Application, watch: WebConfigWatch) -> None:
    """Let nobody into the application whom the configuration does not let in.

    The middleware goes behind those that are there already. The watch is closed with the
    application.
    """
    guard = _AuthMiddleware(watch)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await guard(request, handler)

    async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
        for name, value in watch.current.headers.items():
            if value:
                response.headers[name] = value

    async def close(_app: web.Application) -> None:
        guard.close()
        watch.close()

    app.middlewares.append(guarded)
    app.on_response_prepare.append(add_headers)
    app.on_cleanup.append(close)
