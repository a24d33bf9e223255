"""Readings -> series: which metric shows a quantity, and with which label values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mps_exporter.metrics.gpu_catalogue import GPU_METRICS, IDENTITY
from mps_exporter.metrics.spec import MetricSpec
from mps_exporter.observations import Reading

STATE = "state"
"""The label of a reading that names a state."""

READINGS_KEPT = 4096
"""Quantities with their labels whose series is remembered: those of the largest host, thrice."""

BY_QUANTITY = {spec.quantity: spec for spec in GPU_METRICS if spec.quantity}


@dataclass(frozen=True, slots=True)
class Series:
    """Where a reading is shown."""

    metric: MetricSpec
    labels: tuple[str, ...]
    """The values of the metric's labels after those that name the GPU."""
    state: str | None
    """Of a state set: the state that the reading names."""


def series_of(reading: Reading) -> Series | None:
    """Return where this reading is shown.

    None: the catalogue does not know this quantity with these labels. A recording may hold such
    readings, as those of another version of this program.
    """
    return _series(reading.quantity, reading.labels)


@lru_cache(maxsize=READINGS_KEPT)
def _series(quantity: str, labels: tuple[tuple[str, str], ...]) -> Series | None:
    metric = BY_QUANTITY.get(quantity)
    if metric is None:
        return None
    is_state = metric.kind == "stateset"
    expected = metric.labels[len(IDENTITY) :]
    names = [name for name, _ in labels]
    if sorted(names) != sorted((*expected, STATE) if is_state else expected):
        return None
    values = dict(labels)
    own = tuple(values[name] for name in expected)
    return Series(metric, own, values[STATE] if is_state else None)
