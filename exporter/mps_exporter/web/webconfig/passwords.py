"""Checking passwords against bcrypt hashes, without a stall and without telling tales."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

MAX_PASSWORD_BYTES = 72
"""All that bcrypt looks at. Go compares the first 72 bytes of a longer password; so do we."""
MAX_WAITING = 384
"""Of 512 connections. Who is sent away at once comes again at once: of 200 clients with wrong
passwords 136 sent so many that the others' turn never came."""
REFUSAL_SECONDS = 1.0
"""So long who is sent away waits for the refusal."""
REMEMBERED_FAILURES = 100
REMEMBERED_ADDRESSES = 10_000

Key = bytes
K = TypeVar("K")
V = TypeVar("V")


class TooManyChecksError(Exception):
    """Too many passwords wait to be checked."""


def has_hash(hashed: str, password: bytes) -> bool:
    """Whether the password has this hash."""
    import bcrypt  # most hosts have no passwords, and it costs memory

    try:
        return bcrypt.checkpw(password[:MAX_PASSWORD_BYTES], hashed.encode())
    except ValueError:
        return False


def dummy_hash(users: Mapping[str, str]) -> str:
    """A hash that no password has, as costly as those of the users.

    It is what the password of an unknown user is compared with, so that the time an answer takes
    does not tell which names exist.
    """
    costs = Counter(hashed[4:6] for hashed in users.values())
    cost = costs.most_common(1)[0][0] if costs else "10"
    return f"$2b${cost}$" + "." * 53


@dataclass(slots=True)
class _Check:
    """A password that waits to be checked."""

    key: Key
    hashed: str
    password: bytes
    address: str
    is_gone: Callable[[], bool]
    result: asyncio.Future[bool]


class Passwords:
    """Checks on one thread of its own, and remembers answers.

    A bcrypt check takes some 70 ms of a processor, so a flood of wrong passwords fills any queue.
    Two things keep right ones from being locked out. Those that were seen before are remembered, as
    a keyed digest and apart from failures: no flood can push a success out. And of those that wait
    one goes first whose address has failed least, among these by turns the newest and any. (With
    the oldest first, each would wait for longer than a scraper does. The newest one's turn comes
    next while clients wait for their answers; where they do not, each has its chance.) When too
    many wait, the last in this order is sent away. A client that is gone waits no more.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._good: dict[str, Key] = {}
        self._bad: OrderedDict[Key, None] = OrderedDict()
        self._failures: OrderedDict[str, int] = OrderedDict()
        """Address -> wrong passwords since the last right one."""
        self._waiting: list[_Check] = []
        """In the order in which they came."""
        self._newest_first = False
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bcrypt")

    async def valid(
        self,
        users: Mapping[str, str],
        user: str,
        password: bytes,
        address: str,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Whether this user has this password.

        ``address`` is the client's; ``is_gone`` tells whether it no longer waits for the answer.

        Raises:
            TooManyChecksError: Too many wait already.
        """
        hashed = users.get(user)
        key = self._digest(user, hashed, password)
        if hashed is not None and hmac.compare_digest(self._good.get(user, b""), key):
            return True
        if key in self._bad:
            return False
        network = network_of(address)
        check = _Check(
            key,
            hashed or dummy_hash(users),
            password,
            network,
            is_gone,
            asyncio.get_running_loop().create_future(),
        )
        self._enqueue(check)
        valid = await check.result and hashed is not None
        if valid:
            self._good = {name: one for name, one in self._good.items() if name in users}
            self._good[user] = key
            self._failures.pop(network, None)
        else:
            _remember(self._bad, key, None, REMEMBERED_FAILURES)
            failures = self._failures.pop(network, 0) + 1
            _remember(self._failures, network, failures, REMEMBERED_ADDRESSES)
        return valid

    def _enqueue(self, check: _Check) -> None:
        self._waiting.append(check)
        if len(self._waiting) > MAX_WAITING:
            self._drop_gone()
        if len(self._waiting) > MAX_WAITING:
            # Of equals min() gives the first, which has waited longest.
            last = min(self._waiting, key=lambda one: -self._failures.get(one.address, 0))
            self._waiting.remove(last)
            last.result.set_exception(TooManyChecksError())
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._check_waiting(), name="passwords")

    def _drop_gone(self) -> None:
        for one in self._waiting:
            if one.is_gone():
                one.result.set_exception(TooManyChecksError())
        self._waiting = [one for one in self._waiting if not one.result.done()]

    def _next(self) -> _Check:
        self._newest_first = not self._newest_first
        least = min(self._failures.get(one.address, 0) for one in self._waiting)
        first = [one for one in self._waiting if self._failures.get(one.address, 0) == least]
        return first[-1] if self._newest_first else secrets.choice(first)

    async def _check_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._drop_gone()
            if not self._waiting:
                return
            chosen = self._next()
            same = [one for one in self._waiting if one.key == chosen.key]
            self._waiting = [one for one in self._waiting if one.key != chosen.key]
            valid = await loop.run_in_executor(
                self._thread, has_hash, chosen.hashed, chosen.password
            )
            for one in same:
                if not one.result.done():
                    one.result.set_result(valid)
            await asyncio.sleep(0)  # their failures count before the next is chosen

    def _digest(self, user: str, hashed: str | None, password: bytes) -> Key:
        name = user.encode("utf-8", "surrogateescape")
        parts = (name, (hashed or "").encode(), password)
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._secret, message, hashlib.sha256)

    def close(self) -> None:
        """Let go of the thread."""
        if self._worker is not None:
            self._worker.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def network_of(address: str) -> str:
    """The address, of IPv6 the /64: one host may have all addresses of that."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address  # a Unix socket
    if parsed.version == 6 and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(parsed), 64), strict=False))
    return address


def _remember(table: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    table[key] = value
    while len(table) > limit:
        table.popitem(last=False)
