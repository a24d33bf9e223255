"""Limits on requests in progress: in all, and for one client address."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class LimitExceededError(Exception):
    """No place is free."""


class ConcurrencyLimiter:
    """At most ``total`` at once, and of them at most three quarters for one address."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._share = max(1, total * 3 // 4)
        self._in_use: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        """In the order in which they came."""

    @property
    def in_use(self) -> int:
        return self._in_use.total()

    @contextmanager
    def acquire(self, address: str) -> Iterator[None]:
        """Hold one place.

        Raises:
            LimitExceededError: All are taken, or this address has its share.
        """
        if not self._is_free(address):
            raise LimitExceededError
        self._in_use[address] += 1
        try:
            yield
        finally:
            self._release(address)

    @asynccontextmanager
    async def wait(self, address: str, timeout_seconds: float) -> AsyncIterator[None]:
        """Hold one place, as soon as there is one: addresses with few requests come first.

        Raises:
            LimitExceededError: There was none within this time.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((address, turn))
        self._admit()
        try:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await turn
            except TimeoutError:
                if turn.cancelled():
                    raise LimitExceededError from None
            yield
        finally:
            self._waiting = [one for one in self._waiting if one[1] is not turn]
            if turn.done() and not turn.cancelled():
                self._release(address)

    def _admit(self) -> None:
        requests = self._in_use + Counter(address for address, _ in self._waiting)
        for address, turn in sorted(self._waiting, key=lambda one: requests[one[0]]):
            if not turn.done() and self._is_free(address):
                self._in_use[address] += 1
                turn.set_result(None)

    def _is_free(self, address: str) -> bool:
        full = self.in_use >= self._total or self._in_use[address] >= self._share
        return not (self._total and full)

    def _release(self, address: str) -> None:
        self._in_use[address] -= 1
        if not self._in_use[address]:
            del self._in_use[address]
        self._admit()
