"""Metrics in prometheus-client's form, as families.

Its own encoder took a fifth of a small page's time for the nine metrics of this process.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from prometheus_client import Metric

from mps_exporter.metrics.spec import Family, Kind, MetricSpec


class _LibrarySpec(MetricSpec):
    """A metric of the library, which tells no units of these."""

    __slots__ = ()

    @property
    def unit(self) -> str:
        return ""


@lru_cache(maxsize=32)
def _library_spec(name: str, kind: Kind, text: str) -> MetricSpec:
    return _LibrarySpec(name, kind, text)


def families_of(metrics: Iterable[Metric]) -> list[Family]:
    """Give metrics that have one sample each, without labels."""
    return [
        Family(_library_spec(sample.name, metric.type, metric.documentation), (((), sample.value),))
        for metric in metrics
        for sample in metric.samples
    ]
