"""Counters of recordings that are played one after another, from any position, and again.

A recording's own counters begin again each time it is played. Shown like that, Prometheus sees no
increase where a counter comes back with the value that it had, and a reset where it began high, as
the energy of a GPU does: a rate of kilowatts. So each counter goes on from the value that was shown
last, and rises by what it rises while it is played.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from mps_exporter.metrics.catalogue import CATALOGUE
from mps_exporter.metrics.spec import Family, HistogramValue

Count = float | HistogramValue
Key = tuple[str, tuple[str, ...]]
"""The metric's name, and its label values."""

_LAST_MOMENT = re.compile(r"_last_\w+_timestamp_seconds$")


def _counts(families: Iterable[Family]) -> Iterator[tuple[Key, Count]]:
    for family in families:
        for labels, value in family.samples:
            if family.spec.kind in {"counter", "histogram"} and not isinstance(value, Mapping):
                yield (family.spec.name, labels), value


def _moments(families: Iterable[Family]) -> Iterator[tuple[Key, float]]:
    for family in families:
        if _LAST_MOMENT.search(family.spec.name):
            for labels, value in family.samples:
                if isinstance(value, float | int):
                    yield (family.spec.name, labels), float(value)


def _plus(value: Count, other: Count, sign: int = 1) -> Count:
    if isinstance(value, HistogramValue) and isinstance(other, HistogramValue):
        buckets = tuple(
            (bound, count + sign * more)
            for (bound, count), (_, more) in zip(value.buckets, other.buckets, strict=True)
        )
        return HistogramValue(buckets, value.sum + sign * other.sum)
    if isinstance(value, HistogramValue) or isinstance(other, HistogramValue):
        raise TypeError("a histogram and a number are of two metrics")
    return value + sign * other


def _total(value: Count) -> float:
    return value.buckets[-1][1] if isinstance(value, HistogramValue) else value


class LoopCounters:
    """What is added to the counters of the recording that is played now."""

    def __init__(self) -> None:
        self._loop = 0
        self._shown: dict[Key, Count] = {}
        self._carried: dict[int, dict[Key, Count]] = {0: {}}
        self._moments: dict[Key, float] = {}
        self._earlier_moments: dict[Key, float] = {}

    def begin(self, loop: int, families: Iterable[Family]) -> None:
        """Begin a loop, whose first moment has these families."""
        first = dict(_counts(families))
        carried = {
            key: _plus(shown, first[key], -1) if key in first else shown
            for key, shown in self._shown.items()
        }
        # A page of the loop before may still be under way.
        self._carried = {self._loop: self._carried[self._loop], loop: carried}
        self._loop = loop
        self._earlier_moments = dict(self._moments)

    def applied(self, loop: int, families: Iterable[Family]) -> list[Family]:
        """Give the families of a moment of a loop, with what earlier loops counted."""
        families = list(families)
        if loop == self._loop:
            self._moments.update(_moments(families))
        carried = self._carried.get(loop, {})
        floor = self._shown if loop == self._loop else {}
        shown = {family.spec.name: self._added(family, carried, floor) for family in families}
        if loop == self._loop:
            self._shown.update(_counts(shown.values()))
        for (name, labels), moment in self._earlier_moments.items():
            family = shown.get(name) or Family(CATALOGUE[name], ())
            if all(labels != there for there, _ in family.samples):
                shown[name] = replace(family, samples=(*family.samples, (labels, moment)))
        return [shown[name] for name in CATALOGUE if name in shown]

    @staticmethod
    def _added(family: Family, carried: Mapping[Key, Count], floor: Mapping[Key, Count]) -> Family:
        if family.spec.kind not in {"counter", "histogram"}:
            return family
        samples = []
        for labels, value in family.samples:
            if isinstance(value, Mapping):
                raise TypeError("a state set is no counter")
            key = family.spec.name, labels
            shown = _plus(value, carried[key]) if key in carried else value
            # The sum may be rounded down, and of two threads that render, the one with the older
            # page may come later.
            if key in floor and _total(shown) <= _total(floor[key]):
                shown = floor[key]
            samples.append((labels, shown))
        return replace(family, samples=tuple(samples))
