"""Limits on requests in progress: in all, and for one client address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class LimitExceededError(Exception):
    """No place is free."""


class ConcurrencyLimiter:
    """At most ``total`` at once, and of them at most three quarters for one address."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._share = max(1, total * 3 // 4)
        self._in_use: Counter[str] = Counter()

    @property
    def in_use(self) -> int:
        """How many are inside."""
        return self._in_use.total()

    @contextmanager
    def acquire(self, address: str) -> Iterator[None]:
        """Hold one place.

        Raises:
            LimitExceededError: All are taken, or this address has its share.
        """
        if self._total and (self.in_use >= self._total or self._in_use[address] >= self._share):
            raise LimitExceededError
        self._in_use[address] += 1
        try:
            yield
        finally:
            self._in_use[address] -= 1
            if not self._in_use[address]:
                del self._in_use[address]
