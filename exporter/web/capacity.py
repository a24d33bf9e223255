"""How many of something may run at once, so that one guest cannot fill the house."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class FullError(Exception):
    """No place is free."""


class Places:
    """At most ``total`` at once, and of them at most three quarters for one address."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._share = max(1, total * 3 // 4)
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How many are inside."""
        return self._taken.total()

    @contextmanager
    def place(self, address: str) -> Iterator[None]:
        """Hold one place.

        Raises:
            FullError: All are taken, or this address has its share.
        """
        if self._total and (self.taken >= self._total or self._taken[address] >= self._share):
            raise FullError
        self._taken[address] += 1
        try:
            yield
        finally:
            self._taken[address] -= 1
            if not self._taken[address]:
                del self._taken[address]
