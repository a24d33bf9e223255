"""Metric specifications (name, type, unit, labels, help) and sample families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["gauge", "counter", "histogram", "stateset", "info"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One exposed metric. Names are a stable interface."""

    name: str
    """As it stands in the text format: with _total, _info and so on."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    source: str = ""
    """Where the number comes from, for the documentation."""
    states: tuple[str, ...] = ()
    """Of a stateset: the states that are always present."""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Label -> all the values that it can have, where that is a closed set. A label of an info
    metric is also empty, where its value is not known."""
    note: str = ""
    """What else to know, for the documentation: the help on each page of metrics is short."""
    section: str = ""
    quantity: str = ""
    """What the readings are called that the metric shows (see observations.Reading); empty where it
    shows none."""

    @property
    def unit(self) -> str:
        """The base unit in the name: "seconds", "bytes", ... or "" where it has none."""
        stem = self.name.removesuffix("_total")
        for unit in ("seconds", "bytes", "ratio", "celsius", "watts", "joules", "hertz"):
            if stem.endswith(f"_{unit}"):
                return unit
        return ""


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """A histogram's cumulative buckets: (upper bound as printed, count), sum."""

    buckets: tuple[tuple[str, int], ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its samples: label values in the order of spec.labels, and the value.

    A stateset's samples carry the label values without the state's own, and map state -> bool.
    """

    spec: MetricSpec
    samples: tuple[tuple[tuple[str, ...], float | HistogramValue | Mapping[str, bool]], ...]
