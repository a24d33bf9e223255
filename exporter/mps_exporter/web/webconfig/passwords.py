"""Checking passwords against bcrypt hashes, without a stall and without telling tales."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

MAX_PASSWORD_BYTES = 72
"""All that bcrypt looks at. Go compares the first 72 bytes of a longer password; so do we."""
MAX_WAITING = 64
REMEMBERED_FAILURES = 100

Key = bytes


class TooManyChecksError(Exception):
    """Too many passwords wait to be checked."""


def check(hashed: str, password: bytes) -> bool:
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


class Passwords:
    """Checks on one thread of its own, and remembers answers.

    A bcrypt check takes some 70 ms of a processor: it must stall neither the event loop nor, when
    a hundred wrong ones come at once, the right one that was seen before. Passwords are remembered
    only as a keyed digest, and successes apart from failures: no flood of failures can push a
    success out.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._good: dict[str, Key] = {}
        self._bad: OrderedDict[Key, None] = OrderedDict()
        self._under_way: dict[Key, asyncio.Future[bool]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bcrypt")

    async def valid(self, users: Mapping[str, str], user: str, password: bytes) -> bool:
        """Whether this user has this password.

        Raises:
            TooManyChecksError: Too many wait already.
        """
        hashed = users.get(user)
        key = self._digest(user, hashed, password)
        if hashed is not None and hmac.compare_digest(self._good.get(user, b""), key):
            return True
        if key in self._bad:
            return False
        checking = self._under_way.get(key)
        if checking is None:
            if len(self._under_way) >= MAX_WAITING:
                raise TooManyChecksError
            checking = asyncio.get_running_loop().run_in_executor(
                self._thread, check, hashed or dummy_hash(users), password
            )
            self._under_way[key] = checking
            checking.add_done_callback(lambda _: self._under_way.pop(key, None))
        valid = await asyncio.shield(checking) and hashed is not None
        if valid:
            self._good = {name: one for name, one in self._good.items() if name in users}
            self._good[user] = key
        else:
            self._bad[key] = None
            while len(self._bad) > REMEMBERED_FAILURES:
                self._bad.popitem(last=False)
        return valid

    def _digest(self, user: str, hashed: str | None, password: bytes) -> Key:
        name = user.encode("utf-8", "surrogateescape")
        parts = (name, (hashed or "").encode(), password)
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._secret, message, hashlib.sha256)

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
