"""Counters of a recording that is played again and again: each loop goes on where the last ended.

A recording's own counters begin again with each loop. Shown like that, Prometheus sees no increase
where a counter comes back with the value that it had, and a reset where it began high, as the
energy of a GPU does: a rate of kilowatts.
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


class LoopCounters:
    """What earlier loops counted, to be added to what this loop counts."""

    def __init__(self) -> None:
        self._loop = 0
        self._first: dict[Key, Count] = {}
        self._latest: dict[Key, Count] = {}
        self._carried: dict[int, dict[Key, Count]] = {0: {}}
        self._moments: dict[Key, float] = {}
        self._earlier_moments: dict[Key, float] = {}

    def begin(self, loop: int, families: Iterable[Family]) -> None:
        """Note the families of a loop's first moment, and carry over what the last one gained."""
        carried = dict(self._carried[self._loop])
        for key, latest in self._latest.items():
            first = self._first.get(key)
            gained = latest if first is None else _plus(latest, first, -1)
            carried[key] = _plus(gained, carried[key]) if key in carried else gained
        # A page of the loop before may still be under way.
        self._carried = {self._loop: self._carried[self._loop], loop: carried}
        self._loop = loop
        self._first = dict(_counts(families))
        self._latest = dict(self._first)
        self._earlier_moments = dict(self._moments)

    def applied(self, loop: int, families: Iterable[Family]) -> list[Family]:
        """Give the families of a moment of a loop, with what earlier loops counted."""
        families = list(families)
        if loop == self._loop:
            self._latest.update(_counts(families))
            self._moments.update(_moments(families))
        carried = self._carried.get(loop, {})
        shown = {family.spec.name: self._added(family, carried) for family in families}
        for (name, labels), moment in self._earlier_moments.items():
            family = shown.get(name) or Family(CATALOGUE[name], ())
            if all(labels != there for there, _ in family.samples):
                shown[name] = replace(family, samples=(*family.samples, (labels, moment)))
        return [shown[name] for name in CATALOGUE if name in shown]

    @staticmethod
    def _added(family: Family, carried: Mapping[Key, Count]) -> Family:
        if family.spec.kind not in {"counter", "histogram"}:
            return family
        return replace(
            family,
            samples=tuple(
                (labels, value)
                if isinstance(value, Mapping) or (family.spec.name, labels) not in carried
                else (labels, _plus(value, carried[family.spec.name, labels]))
                for labels, value in family.samples
            ),
        )
