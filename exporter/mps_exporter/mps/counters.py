"""What is counted from the logs of one daemon, from 0 on when the exporter starts.

increase() misses what a series begins with. So every counter begins at 0: for the daemon, for each
declared value of a label, and for a user with the first line that is about the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from mps_exporter.mps.histogram import HistogramBuilder
from mps_exporter.mps.log_metrics import LOG_METRICS, LogMetric
from mps_exporter.mps.tracking_quota import FULL, Quota
from mps_exporter.snapshot import Histogram, LabelValues, LogMetricValues


class Counters:
    """Counters, histograms and last moments of one daemon.

    Every name must be declared in log_metrics.py, and be given the labels declared there, in their
    order: anything else raises, also what is not counted.

    Args:
        quota: How many users and GPUs are counted separately; the rest count as unknown.
    """

    def __init__(self, quota: Quota = FULL) -> None:
        self._quota = quota
        self._counted: dict[object, tuple[dict[LabelValues, float], LabelValues]] = {}
        """(name, *labels) that were counted before: each line of a log counts one or two."""
        self._users: set[str | int | None] = set()
        self._numbers: dict[str, dict[LabelValues, float]] = {}
        self._histograms: dict[str, dict[LabelValues, HistogramBuilder]] = {}
        for metric in LOG_METRICS.values():
            if metric.kind == "histogram":
                builders = self._histograms[metric.name] = {}
                if not metric.labels:
                    builders[()] = HistogramBuilder(metric.bounds)
                continue
            numbers = self._numbers[metric.name] = {}
            if metric.kind == "counter" and metric.has_fixed_labels:
                _start_at_zero(numbers, metric, ())
        # Whoever is refused for missing credentials is unknown, and no line comes before that.
        rejections = LOG_METRICS["mps_client_rejections_total"]
        _start_at_zero(self._numbers[rejections.name], rejections, (None,))

    def increment(
        self, name: str, by: int = 1, *, counted: bool = True, **labels: str | int | None
    ) -> None:
        """Count an event, or several; nothing if it happened before the exporter started."""
        cell = name, *labels.items()
        if counted and cell in self._counted:
            numbers, key = self._counted[cell]
            numbers[key] += by
            return
        metric = _declared(name, "counter", labels)
        key = self._key(metric, labels)
        if counted:
            self._add(metric, by, key)
            if key == tuple(labels.values()):
                self._counted[cell] = self._numbers[name], key

    def accumulate(self, name: str, milliseconds: int, **labels: str | int | None) -> None:
        """Count milliseconds that passed since the exporter started."""
        metric = _declared(name, "counter", labels)
        self._add(metric, milliseconds, self._key(metric, labels))

    def observe(
        self, name: str, seconds: float, *, counted: bool = True, **labels: str | int | None
    ) -> None:
        """Count a duration; nothing if it ended before the exporter started."""
        metric = _declared(name, "histogram", labels)
        key = self._key(metric, labels)
        if counted:
            self._histograms[name][key].observe(seconds)

    def set_latest(self, name: str, value: float, **labels: str | int | None) -> None:
        """Set a timestamp; also one from before the exporter started."""
        metric = _declared(name, "gauge", labels)
        self._numbers[name][self._key(metric, labels)] = value

    def snapshot(self) -> LogMetricValues:
        """Return every metric by name, and its values by label values."""
        found: dict[str, Mapping[LabelValues, float | Histogram]] = {}
        for name, numbers in self._numbers.items():
            metric = LOG_METRICS[name]
            if metric.in_milliseconds:
                found[name] = {key: number / 1000.0 for key, number in numbers.items()}
            elif metric.has_fixed_labels:  # in the order of the declaration
                known = product(*metric.values.values())
                found[name] = {key: numbers[key] for key in known if key in numbers}
            else:
                found[name] = dict(numbers)
        for name, builders in self._histograms.items():
            found[name] = {key: builder.snapshot() for key, builder in builders.items()}
        return found

    def see_user(self, uid: str | int | None) -> str | int | None:
        """Let the counters of a user begin. Return whom to count: None for users over the quota."""
        if uid in self._users:
            return uid
        if uid is not None and len(self._users) - (None in self._users) >= self._quota.users:
            return self.see_user(None)
        self._users.add(uid)
        for metric in LOG_METRICS.values():
            if not metric.has_user:
                continue
            if metric.kind == "histogram":
                self._histograms[metric.name][uid,] = HistogramBuilder(metric.bounds)
            else:
                _start_at_zero(self._numbers[metric.name], metric, (uid,))
        return uid

    def _add(self, metric: LogMetric, by: int, key: LabelValues) -> None:
        numbers = self._numbers[metric.name]
        numbers[key] = numbers.get(key, 0) + by

    def _key(self, metric: LogMetric, labels: Mapping[str, str | int | None]) -> LabelValues:
        """Return the label values to count under: users and GPUs beyond the quota are unknown."""
        key = tuple(labels.values())
        if metric.has_user:
            return (self.see_user(key[0]), *key[1:])
        if metric.labels == ("uuid",):
            known = self._numbers[metric.name]
            if key not in known and len(known) >= self._quota.gpus:
                return ("",)
        return key


def _declared(name: str, kind: str, labels: Mapping[str, object]) -> LogMetric:
    metric = LOG_METRICS[name]
    if metric.kind != kind or tuple(labels) != metric.labels:
        raise TypeError(f"{name} is a {metric.kind} with the labels {metric.labels}")
    for label, values in metric.values.items():
        if labels[label] not in values:
            raise ValueError(f"{name} has no {label} {labels[label]!r}")
    return metric


def _start_at_zero(numbers: dict[LabelValues, float], metric: LogMetric, key: LabelValues) -> None:
    """Create the counter of these label values, and of each declared value of a label."""
    choices = (
        metric.values.get(label) or key[index : index + 1]
        for index, label in enumerate(metric.labels)
    )
    for one in product(*choices):
        numbers.setdefault(one, 0)
