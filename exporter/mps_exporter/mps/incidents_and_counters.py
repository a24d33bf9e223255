"""Counters, incidents and GPU names of one daemon, and the time of an event.

increase() misses the value that a series begins with. So every counter begins at 0 when the
exporter starts: for the daemon, for each declared value of a label, and for a user with the first
line about the user.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice, product
from math import inf
from typing import Any, NamedTuple, TypeVar

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.limits_without_a_flag import FULL, Quota
from mps_exporter.mps.metrics_from_logs import LOG_METRICS, LogMetric
from mps_exporter.snapshot import Histogram, Incident, LabelValues, LogMetricValues

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """A dictionary that drops its oldest entry when it is full."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self and len(self) >= self._limit:
            del self[next(iter(self))]
        super().__setitem__(key, value)


class Counters:
    """Counters, histograms and last timestamps of one daemon.

    Every call must use the name and the labels that metrics_from_logs.py declares, in their order:
    else it raises. Users and GPUs beyond the quota count as unknown.
    """

    def __init__(self, quota: Quota = FULL) -> None:
        self._quota = quota
        self._users: set[str | int | None] = set()
        self._values: dict[str, dict[LabelValues, Any]] = {name: {} for name in LOG_METRICS}
        for metric in LOG_METRICS.values():
            if metric.kind != "gauge" and metric.has_fixed_labels:
                self._start_at_zero(metric, ())
        # A caller without credentials has no known user: no earlier line starts the counter.
        self._start_at_zero(LOG_METRICS["mps_client_rejections_total"], (None,))

    def increment(self, name: str, by: int = 1, **labels: str | int | None) -> None:
        """Count events, or milliseconds."""
        key, values = self._key("counter", name, labels), self._values[name]
        values[key] = values.get(key, 0) + by

    def observe(self, name: str, seconds: float | None, **labels: str | int | None) -> None:
        """Count a duration (0 if negative); None only starts the user's counters."""
        key = self._key("histogram", name, labels)
        if seconds is None:
            return
        # Timestamps in the logs are milliseconds: finer digits are floating-point errors.
        seconds = round(max(seconds, 0.0), 3)
        known = self._values[name][key]
        counts = list(known.counts)
        counts[bisect_left(known.bounds, seconds)] += 1
        total = round(known.sum_seconds + seconds, 3)
        self._values[name][key] = Histogram(known.bounds, tuple(counts), total)

    def set_latest(self, name: str, value: float, **labels: str | int | None) -> None:
        """Set a timestamp, which may precede the exporter's start."""
        self._values[name][self._key("gauge", name, labels)] = value

    def snapshot(self) -> LogMetricValues:
        """Return every metric by name, and its values by label values, in declared order."""
        found: dict[str, Mapping[LabelValues, float | Histogram]] = {}
        for name, metric in LOG_METRICS.items():
            values = self._values[name]
            if name.endswith("_seconds_total"):  # counted in milliseconds
                values = {key: number / 1000.0 for key, number in values.items()}
            keys = product(*metric.values.values()) if metric.has_fixed_labels else values
            found[name] = {key: values[key] for key in keys if key in values}
        return found

    def start_user(self, uid: str | int | None) -> str | int | None:
        """Start the counters of a user at 0; return the user to count, None beyond the quota."""
        if uid in self._users:
            return uid
        if uid is not None and len(self._users - {None}) >= self._quota.users:
            return self.start_user(None)
        self._users.add(uid)
        for metric in LOG_METRICS.values():
            if "uid" in metric.values:
                self._start_at_zero(metric, (uid,))
        return uid

    def _key(self, kind: str, name: str, labels: Mapping[str, str | int | None]) -> LabelValues:
        """Return the label values to count under: users and GPUs beyond the quota are unknown."""
        metric, known, key = LOG_METRICS[name], self._values[name], tuple(labels.values())
        if metric.kind != kind or tuple(labels) != metric.labels:
            raise TypeError(f"{name} is a {metric.kind} with the labels {metric.labels}")
        if key in known:
            return key
        for label, values in metric.values.items():
            if values and labels[label] not in values:
                raise ValueError(f"{name} has no {label} {labels[label]!r}")
        if "uid" in metric.values:
            return (self.start_user(key[0]), *key[1:])
        full = metric.labels == ("uuid",) and len(known) >= self._quota.gpus
        return ("",) if full else key

    def _start_at_zero(self, metric: LogMetric, key: LabelValues) -> None:
        """Create the series of these label values, and of each declared value of a label."""
        zero: int | Histogram = 0
        if metric.kind == "histogram":
            zero = Histogram(metric.bounds, (0,) * (len(metric.bounds) + 1), 0.0)
        choices = (
            declared or key[index : index + 1]
            for index, declared in enumerate(metric.values.values())
        )
        for values in product(*choices):
            self._values[metric.name].setdefault(values, zero)


class Incidents:
    """The last incidents, oldest first, numbered so that a reader can fetch the new ones."""

    def __init__(self) -> None:
        self._incidents: deque[Incident] = deque(maxlen=policy.MAX_INCIDENTS)
        self._added = 0

    def add(self, incident: Incident) -> None:
        """Add an incident; the repetition of a recent incident raises its count instead."""
        limit = policy.MAX_INCIDENT_PIDS
        incident = replace(
            incident, pids=incident.pids[:limit], ended_before=incident.ended_before[:limit]
        )
        for back, earlier in enumerate(islice(reversed(self._incidents), policy.REPEATED_AMONG), 1):
            if _repeats(incident, earlier):
                pids = tuple(dict.fromkeys((*earlier.pids, *incident.pids)))[:limit]
                self._incidents[-back] = replace(earlier, count=earlier.count + 1, pids=pids)
                return
        self._incidents.append(incident)
        self._added += 1

    def snapshot(self) -> tuple[Incident, ...]:
        return tuple(self._incidents)

    def since(self, seen: int) -> tuple[tuple[Incident, ...], int]:
        """Return the incidents after the first `seen`, and how many there have been by now."""
        new = min(self._added - seen, len(self._incidents))
        return tuple(self._incidents)[-new:] if new > 0 else (), self._added


def _repeats(incident: Incident, earlier: Incident) -> bool:
    """Return whether a failed start or rejection repeats `earlier`, of whatever process."""
    return (
        incident.kind in {"server_start_failed", "client_rejected"}
        and (incident.kind, incident.uid, incident.detail, incident.counted)
        == (earlier.kind, earlier.uid, earlier.detail, earlier.counted)
        and incident.at - earlier.at <= policy.REPEATED_WITHIN_SECONDS
    )


class Moment(NamedTuple):
    """The time of an event, with the counters and incidents that record it."""

    at: float  # Unix time in seconds.
    counted: bool  # False before the exporter's start: no counter counts the event.
    counters: Counters
    incidents: Incidents

    def increment(self, name: str, **labels: str | int | None) -> None:
        self.counters.increment(name, int(self.counted), **labels)

    def observe(self, name: str, seconds: float, **labels: str | int | None) -> None:
        self.counters.observe(name, seconds if self.counted else None, **labels)

    def add_incident(self, incident: Incident) -> None:
        seconds = incident.seconds
        if seconds is not None:
            seconds = round(max(seconds, 0.0), 3)
        self.incidents.add(replace(incident, counted=self.counted, seconds=seconds))

    def count_loss(self, uid: int | None, cause: str) -> None:
        self.increment("mps_client_losses_total", uid=uid, cause=cause)
        self.counters.set_latest("mps_client_last_loss_timestamp_seconds", self.at)

    def count_rejection(self, uid: int | None, cause: str, pids: Iterable[int] = ()) -> None:
        self.increment("mps_client_rejections_total", uid=uid, cause=cause)
        self.counters.set_latest("mps_client_last_rejection_timestamp_seconds", self.at)
        pids = tuple(pids)
        self.add_incident(Incident(self.at, "client_rejected", uid=uid, pids=pids, detail=cause))


class GpuNames:
    """GPUs of the daemon: device ordinal -> UUID."""

    def __init__(self) -> None:
        self._ordinals: dict[int, str] = {}
        self._shown_at = 0.0  # Last time at which an ordinal was shown with its UUID.
        self._uuids: set[str] = set()

    def add_gpu(self, uuid: str) -> None:
        """Add a GPU that a client was associated with, or that the control tool listed."""
        if len(self._uuids) < policy.MAX_GPUS:
            self._uuids.add(uuid)

    def add_ordinal(self, device: int, uuid: str, at: float) -> None:
        """Add a device ordinal that was shown with the UUID of its GPU."""
        self._shown_at = at
        if device in self._ordinals or len(self._ordinals) < policy.MAX_GPUS:
            self._ordinals[device] = uuid

    def clear_ordinals(self, before: float = inf) -> None:
        """Forget the ordinals, if all of them were shown before this time."""
        if self._shown_at < before:
            self._ordinals.clear()

    def uuid_of(self, device: int, server_devices: Collection[int]) -> str:
        """Return the UUID of a device of a server, "" if unknown."""
        known = self._ordinals.get(device)
        if known is None and len(server_devices) <= 1:
            return self._only_gpu()
        return known or ""

    def by_ordinal(self, used_devices: Collection[int]) -> dict[int, str]:
        """Return ordinal -> UUID. The only known GPU is device 0 if no other device is used."""
        if self._ordinals:
            return dict(self._ordinals)
        only = self._only_gpu()
        return {0: only} if only and set(used_devices) == {0} else {}

    def _only_gpu(self) -> str:
        return next(iter(self._uuids)) if len(self._uuids) == 1 else ""
