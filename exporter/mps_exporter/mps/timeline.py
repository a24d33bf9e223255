"""Who held the GPU and who waited during the last ten minutes, as spans of time.

Times are milliseconds of the logs' stamps, as in the running totals, and do not depend on the steps
in which time is advanced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mps_exporter.snapshot import TimelineKind, TimelineSpan

WINDOW_MS = 600_000
MAX_SPANS = 400
"""Spans kept of one daemon; beyond it the oldest go first."""

Occupant = tuple[TimelineKind, int | None]
"""What goes on, and for which user."""


@dataclass(slots=True)
class _Span:
    occupant: Occupant
    start_ms: int
    end_ms: int


class Timeline:
    """The spans of one daemon, oldest first."""

    def __init__(self) -> None:
        self._spans: deque[_Span] = deque(maxlen=MAX_SPANS)
        self._open: dict[Occupant, _Span] = {}
        self._since_ms: int | None = None

    def line_read(self, at: float) -> None:
        """A line of a log is applied: the first one is where knowledge begins."""
        if self._since_ms is None:
            self._since_ms = round(at * 1000)

    def restart(self) -> None:
        """Forget all: the clock was set back."""
        self._spans.clear()
        self._open.clear()
        self._since_ms = None

    def add(self, from_ms: int, to_ms: int, occupants: Iterable[Occupant]) -> None:
        """Say what went on from the last moment up to this one."""
        going_on: dict[Occupant, _Span] = {}
        for occupant in occupants:
            span = self._open.get(occupant)
            if span is None:
                span = _Span(occupant, from_ms, to_ms)
                self._spans.append(span)
            span.end_ms = to_ms
            going_on[occupant] = span
        self._open = going_on
        while self._spans and self._spans[0].end_ms < to_ms - WINDOW_MS:
            self._spans.popleft()

    def snapshot(self, now: float) -> tuple[float | None, tuple[TimelineSpan, ...]]:
        """Return since when anything is known, and the spans of the ten minutes before ``now``."""
        begin_ms = round(now * 1000) - WINDOW_MS
        spans = tuple(
            TimelineSpan(
                kind=span.occupant[0],
                uid=span.occupant[1],
                start=max(span.start_ms, begin_ms) / 1000,
                end=span.end_ms / 1000,
                ongoing=self._open.get(span.occupant) is span,
            )
            for span in self._spans
            if span.end_ms > begin_ms
        )
        since_ms = self._since_ms
        if since_ms is None and self._spans:
            since_ms = self._spans[0].start_ms  # only the control tool tells
        return (None if since_ms is None else max(since_ms, begin_ms) / 1000), spans
