"""Password checks against bcrypt hashes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

MAX_PASSWORD_BYTES = 72
"""Bytes of a password that bcrypt reads. Of a longer password Go compares these, too."""
REFUSAL_SECONDS = 0.5
"""Delay after a wrong password, before the next check for the same address."""


def has_hash(hashed: str, password: bytes) -> bool:
    import bcrypt  # imported late: most hosts have no passwords, and it takes memory

    try:
        return bcrypt.checkpw(password[:MAX_PASSWORD_BYTES], hashed.encode())
    except ValueError:
        return False


def dummy_hash(users: Mapping[str, str]) -> str:
    """Return a hash that no password has, of the users' cost.

    The password of an unknown user is compared with it, so that the response time does not reveal
    which names exist.
    """
    cost = Counter(hashed[4:6] for hashed in users.values()).most_common(1)[0][0]
    return f"$2b${cost}$" + "." * 53


class Passwords:
    """Checks on a thread, one at a time for each address.

    A check takes about 70 ms of CPU. A right password is remembered as a keyed digest and never
    waits. A wrong one delays the next check of its address only.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._good: dict[str, bytes] = {}
        self._addresses: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bcrypt")

    async def valid(
        self, users: Mapping[str, str], user: str, password: bytes, address: str
    ) -> bool:
        """Return whether this user has this password. ``address`` is the client's."""
        hashed = users.get(user)
        digest = self._digest(user, hashed, password)
        if self._is_known(user, digest):
            return True
        async with self._addresses.setdefault(network_of(address), asyncio.Semaphore()):
            if self._is_known(user, digest):
                return True
            loop = asyncio.get_running_loop()
            matches = await loop.run_in_executor(
                self._thread, has_hash, hashed or dummy_hash(users), password
            )
            if matches and hashed is not None:
                self._good = {name: one for name, one in self._good.items() if name in users}
                self._good[user] = digest
                return True
            await asyncio.sleep(REFUSAL_SECONDS)
            return False

    def _is_known(self, user: str, digest: bytes) -> bool:
        return hmac.compare_digest(self._good.get(user, b""), digest)

    def _digest(self, user: str, hashed: str | None, password: bytes) -> bytes:
        name = user.encode("utf-8", "surrogateescape")
        parts = (name, (hashed or "").encode(), password)
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._secret, message, hashlib.sha256)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def network_of(address: str) -> str:
    """Return the address, of IPv6 the /64: one host may have all addresses of that."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address  # a Unix socket
    if parsed.version == 6 and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(parsed), 64), strict=False))
    return address
