"""Checks that a request must pass before its handler: client certificate and password."""

import asyncio
import base64
import binascii
import hmac
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from aiohttp import web

from mps_exporter.limits_without_a_flag import WRONG_PASSWORD_SECONDS
from mps_exporter.web import Handler, text_response
from mps_exporter.web.guard import network_of

from . import WebConfigWatch
from .config import WebConfig
from .tls import alternative_names

MAX_PASSWORD_BYTES = 72  # Bytes of a password that bcrypt reads. Go compares only these, too.


def has_hash(hashed: str, password: bytes) -> bool:
    import bcrypt  # late: mps-exporter.pyz is without it, and refuses a configuration with users

    try:
        return bcrypt.checkpw(password[:MAX_PASSWORD_BYTES], hashed.encode())
    except ValueError:
        return False


class Passwords:
    """Checks passwords on a thread, one at a time for each address.

    A check takes about 70 ms of CPU. A right password is kept as a keyed digest, and not checked
    again. A wrong password delays the next check of its address only.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._verified: dict[str, bytes] = {}
        self._addresses: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bcrypt")

    async def verify(
        self, users: Mapping[str, str], user: str, password: bytes, address: str
    ) -> bool:
        """Return whether this user has this password; ``address`` is the address of the client."""
        hashed = users.get(user)
        digest = hmac.digest(self._secret, repr((user, hashed, password)).encode(), "sha256")
        if hmac.compare_digest(self._verified.get(user, b""), digest):
            return True
        async with self._addresses.setdefault(network_of(address), asyncio.Semaphore()):
            # An unknown user's password takes as long: the time does not reveal which names exist.
            compared = hashed or next(iter(users.values()))
            loop = asyncio.get_running_loop()
            matches = await loop.run_in_executor(self._thread, has_hash, compared, password)
            if matches and hashed is not None:
                known = {name: one for name, one in self._verified.items() if name in users}
                self._verified = {**known, user: digest}
                return True
            await asyncio.sleep(WRONG_PASSWORD_SECONDS)
            return False


def credentials(request: web.Request) -> tuple[str, bytes, str] | None:
    """Return user, password (Authorization header) and address; None if missing or invalid."""
    # A single blank separates scheme and credentials, as in Go.
    scheme, _, encoded = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None
    user, colon, password = decoded.partition(b":")
    name = user.decode("utf-8", "surrogateescape")
    return (name, password, request.remote or "") if colon else None


def _has_allowed_name(request: web.Request, config: WebConfig) -> bool:
    allowed = config.tls_server_config.client_allowed_sans
    if allowed is None:
        return True
    transport = request.transport
    certificate = transport.get_extra_info("peercert") if transport is not None else None
    return not alternative_names(certificate).isdisjoint(allowed)


def install(app: web.Application, watch: WebConfigWatch) -> None:
    """Add the checks and response headers of the configuration, after the present middlewares."""
    passwords = Passwords()

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        config = watch.active.config
        if not _has_allowed_name(request, config):
            text = "403 Forbidden: no name of the client's certificate is allowed here"
            return text_response(text, status=403)
        users, given = config.basic_auth_users, credentials(request)
        if users and not (given and await passwords.verify(users, *given)):
            headers = {"WWW-Authenticate": "Basic"}
            return text_response("401 Unauthorized", status=401, headers=headers)
        return await handler(request)

    async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
        for name, value in watch.active.config.http_server_config.headers.items():
            if value:
                response.headers[name] = value

    app.middlewares.append(checked)
    app.on_response_prepare.append(add_headers)
