"""From samples to counters: pure arithmetic, no NVML and no clock of its own.

A gauge that is read every 30 s misses what happened in between; a counter of seconds does not. The
driver keeps samples of the last seconds and hardware keeps sums, so that counters can be exact as
long as somebody looks often enough. Where nobody did, the hole has a counter of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

COUNTER_32 = 1 << 32

LONGEST_PERIOD_SECONDS = 1.5
"""NVML's sampling period is 1/6 s to 1 s by product. Two samples further apart than this have a
hole between them."""

USUAL_PERIOD_SECONDS = 1 / 6


@dataclass(slots=True)
class SampleIntegral:
    """Adds up samples of "percent busy since the sample before".

    Feeding the same samples twice, or in other portions, changes nothing: every sample counts once,
    by its own timestamp.
    """

    seconds: float = 0.0
    """Busy."""
    unobserved_seconds: float = 0.0
    """Holes: the driver's buffer had turned over, or did not sample."""
    last_timestamp: int | None = None
    """Of the newest sample that was counted, in µs."""
    counted_at: float | None = None
    """When samples were last counted, on the monotonic clock; None: never."""
    _period: float = USUAL_PERIOD_SECONDS

    def start(self, samples: Iterable[tuple[int, float]], now: float) -> None:
        """Count from the newest of these on; what was before is not ours."""
        self.last_timestamp = max((timestamp for timestamp, _ in samples), default=None)
        self.counted_at = now

    def add(self, samples: Iterable[tuple[int, float]], now: float) -> None:
        """Count the samples that are new.

        Args:
            samples: (timestamp in µs, percent) pairs in any order.
            now: Monotonic time in seconds. What passed since samples were last counted bounds a
                hole: the timestamps follow the host's clock, which may jump.
        """
        elapsed_seconds = self.unseen_for(now)
        self.counted_at = now
        covered = hole = 0.0
        for timestamp, percent in sorted(samples):
            if not math.isfinite(percent):
                continue
            if self.last_timestamp is None:
                self.last_timestamp = timestamp
                continue
            between = (timestamp - self.last_timestamp) / 1e6
            if between <= 0:
                continue
            of_sample = between
            if between > LONGEST_PERIOD_SECONDS:
                of_sample = self._period
                hole += between - of_sample
            else:
                self._period = min(between, 1.0)
            covered += of_sample
            self.seconds += of_sample * min(max(percent, 0.0), 100.0) / 100
            self.last_timestamp = timestamp
        self.unobserved_seconds += max(0.0, min(hole, elapsed_seconds - covered))

    def skip(self, samples: Iterable[tuple[int, float]], now: float) -> None:
        """Start again after the host's clock was set back, or the buffer was lost."""
        self.unobserved_seconds += self.unseen_for(now)
        self.start(samples, now)

    def unseen_for(self, now: float) -> float:
        """Seconds since samples were last counted."""
        return 0.0 if self.counted_at is None else now - self.counted_at


@dataclass(slots=True)
class RatioIntegral:
    """Adds up ratios that hold for a whole interval each: GPM's two-sample differences."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By what was active."""
    unobserved_seconds: float = 0.0
    seen_until: float | None = None
    """Up to when every second is in one of the two, on the monotonic clock; None: nothing has
    looked yet."""

    def add(self, now: float, ratios: Mapping[str, float]) -> None:
        """Count what was since the last call. Something that is missing now is a hole in it."""
        interval = self._reach(now)
        if self.seconds.keys() - ratios.keys():
            self.unobserved_seconds += interval
        for name, ratio in ratios.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + interval * ratio

    def skip(self, now: float) -> None:
        """Note that what happened since the last call is not known."""
        self.unobserved_seconds += self._reach(now)

    def _reach(self, now: float) -> float:
        interval = 0.0 if self.seen_until is None else now - self.seen_until
        self.seen_until = now
        return interval


def percent_to_ratio(percent: float) -> float | None:
    """0-100 with a rounding error at the ends -> 0-1; None for what is no number."""
    if not math.isfinite(percent):
        return None
    return min(max(percent / 100, 0.0), 1.0)


def unwrapped_increment(before: int, now: int, expected: float) -> int:
    """How far a 32-bit counter went, given about how far it should have gone.

    The counter alone shows the increment only modulo 2**32, which at 50 GB/s is gone in 90 ms. A
    second, coarser measurement of the same traffic shows how often it wrapped: the answer is
    the possible increment nearest to it, exact when that measurement is off by less than 2 GiB.

    Args:
        before: An earlier reading.
        now: This reading.
        expected: The increment by the other measurement.
    """
    increment = (now - before) % COUNTER_32
    turns = round((expected - increment) / COUNTER_32)
    return increment + max(0, turns) * COUNTER_32
