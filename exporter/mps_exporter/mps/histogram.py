"""Builds histograms of durations."""

from __future__ import annotations

from bisect import bisect_left

from mps_exporter.snapshot import Histogram

WAIT_BOUNDS = (
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
    7200.0,
)
"""A wait behind another user's server: 0.1 s (an idle server is replaced) to 2 h."""

NO_BOUNDS: tuple[float, ...] = ()
"""Only how many and how long together: no rule and no dashboard asks how they are distributed."""


class HistogramBuilder:
    """Counts durations in seconds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; a negative one (the clock was set back) counts as 0."""
        # The logs' stamps are milliseconds: what is finer is an error of the floating point.
        seconds = round(max(seconds, 0.0), 3)
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def snapshot(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), round(self._sum, 3))
