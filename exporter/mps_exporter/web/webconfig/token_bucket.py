"""A token bucket."""

from __future__ import annotations


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
