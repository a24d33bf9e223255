"""Keeps its distance from something that hung."""

from __future__ import annotations

from collections.abc import Callable

INITIAL_BACKOFF_SECONDS = 10.0
MAX_BACKOFF_SECONDS = 300.0


class CircuitBreaker:
    """Open after a hang: 10 s, then twice as long each time, up to 300 s.

    Once the pause is over, the next question is the trial: an answer, of whatever kind, closes the
    breaker, another hang opens it again. The first sign of life ends the pause at once; if the
    trial hangs all the same, later ones end the next pauses 10 s after their hang.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_seconds = 0.0
        self._hung_at = self._until = float("-inf")
        self._seen_alive = False

    def remaining_seconds(self) -> float:
        """For how long nobody may ask; 0 when one may."""
        return max(self._until - self._clock(), 0.0)

    def record_hang(self) -> float:
        """Open it; gives for how long."""
        longer = self._pause_seconds * 2 or INITIAL_BACKOFF_SECONDS
        self._pause_seconds = min(longer, MAX_BACKOFF_SECONDS)
        self._hung_at = self._clock()
        self._until = self._hung_at + self._pause_seconds
        return self._pause_seconds

    def record_activity(self) -> None:
        """It was seen to work since it hung: no need to wait for the whole pause."""
        if not self._pause_seconds:
            return
        least = INITIAL_BACKOFF_SECONDS if self._seen_alive else 0.0
        self._until = min(self._until, self._hung_at + least)
        self._seen_alive = True

    def record_success(self) -> None:
        self._pause_seconds = 0.0
        self._until = float("-inf")
        self._seen_alive = False
