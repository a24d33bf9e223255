"""What is recorded of one daemon: counters, incidents, GPU names, and the moment of an event.

increase() misses what a series begins with. So every counter begins at 0 when the exporter starts:
for the daemon, for each declared value of a label, and for a user with the first line about the
user.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from mps_exporter.mps.log_metrics import LOG_METRICS, LogMetric
from mps_exporter.snapshot import (
    EndedBefore,
    FaultProof,
    Histogram,
    Incident,
    IncidentKind,
    LabelValues,
    LogMetricValues,
)

MAX_INCIDENTS = 100

MAX_PIDS = 64
"""Processes that one incident names."""

SAME_WITHIN_SECONDS = 60.0
"""A server that fails to start does so twenty times a second: one incident with a count."""

RECENT = 8
"""The last incidents among which an earlier one of the same kind is looked for."""

_REPEATED = frozenset({"server_start_failed", "client_rejected"})


@dataclass(frozen=True, slots=True)
class Quota:
    """How many of each are followed; of the others only some totals are kept."""

    servers: int = 64
    clients: int = 2048
    """Of one server. The hardware serves 48 or 60 contexts a GPU."""
    queued: int = 1024
    """More than a GPU host has ever had; the oldest are dropped beyond it."""
    users: int = 512
    """Every user may write into the daemon's log pipe, so a log can name any number of them."""
    gpus: int = 512


FULL = Quota()

OF_ORDINARY_USER = Quota(servers=2, clients=256, queued=256, users=8, gpus=64)
"""Of a daemon that is an ordinary user's and not configured. It serves that user only, with one
server at a time. Its log can be forged: 22 MB of lines cost 141 MB of memory with the full quota,
and 3 MB with this one."""


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


def _same_but_for_time(one: Incident, other: Incident) -> bool:
    """Whether they differ only in their time and their processes."""
    return (
        (one.kind, one.uid, one.detail, one.counted)
        == (other.kind, other.uid, other.detail, other.counted)
    ) and other.at - one.at <= SAME_WITHIN_SECONDS


class Incidents:
    """The last ones, oldest first, numbered so that a reader can ask for the new ones."""

    def __init__(self) -> None:
        self._incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self._added = 0

    def add(self, incident: Incident) -> None:
        """Add one; a repetition of a recent one raises its count instead."""
        if max(len(incident.pids), len(incident.ended_before)) > MAX_PIDS:
            pids, ended = incident.pids[:MAX_PIDS], incident.ended_before[:MAX_PIDS]
            incident = replace(incident, pids=pids, ended_before=ended)
        if incident.kind in _REPEATED:
            for index in range(-1, -1 - min(RECENT, len(self._incidents)), -1):
                earlier = self._incidents[index]
                if _same_but_for_time(earlier, incident):
                    pids = tuple(dict.fromkeys((*earlier.pids, *incident.pids)))[:MAX_PIDS]
                    self._incidents[index] = replace(earlier, count=earlier.count + 1, pids=pids)
                    return
        self._incidents.append(incident)
        self._added += 1

    def snapshot(self) -> tuple[Incident, ...]:
        return tuple(self._incidents)

    def since(self, seen: int) -> tuple[tuple[Incident, ...], int]:
        """Return those after the first `seen` ones, and how many there have been by now."""
        new = min(self._added - seen, len(self._incidents))
        if new <= 0:
            return (), self._added
        return tuple(self._incidents)[-new:], self._added


class Moment(NamedTuple):
    """A moment, with the counters and incidents of the daemon."""

    at: float
    """Unix time in seconds."""
    counted: bool
    """False: before the exporter started. The event rebuilds the state and no counter counts it."""
    counters: Counters
    incidents: Incidents

    def increment(self, name: str, by: int = 1, **labels: str | int | None) -> None:
        self.counters.increment(name, by, counted=self.counted, **labels)

    def observe(self, name: str, seconds: float, **labels: str | int | None) -> None:
        self.counters.observe(name, seconds, counted=self.counted, **labels)

    def add_incident(
        self,
        kind: IncidentKind,
        *,
        at: float | None = None,
        server_pid: int | None = None,
        uid: int | None = None,
        pids: Iterable[int] = (),
        blamed_pid: int | None = None,
        caused_by_pids: Iterable[int] = (),
        proof: FaultProof = "",
        ended_before: Iterable[EndedBefore] = (),
        gpu_uuids: Iterable[str] = (),
        seconds: float | None = None,
        detail: str = "",
    ) -> None:
        """Record an incident; `at` where it is not this moment."""
        incident = Incident(
            at=self.at if at is None else at,
            kind=kind,
            server_pid=server_pid,
            uid=uid,
            pids=tuple(pids),
            blamed_pid=blamed_pid,
            caused_by_pids=tuple(caused_by_pids),
            proof=proof,
            ended_before=tuple(ended_before),
            gpu_uuids=tuple(uuid for uuid in gpu_uuids if uuid),
            seconds=None if seconds is None else round(max(seconds, 0.0), 3),
            detail=detail,
            counted=self.counted,
        )
        self.incidents.add(incident)

    def count_loss(self, uid: int | None, cause: str) -> None:
        """Count a client that ended abnormally."""
        self.increment("mps_client_losses_total", uid=uid, cause=cause)
        self.counters.set_latest("mps_client_last_loss_timestamp_seconds", self.at)

    def count_rejection(self, uid: int | None, cause: str, pids: Iterable[int] = ()) -> None:
        self.increment("mps_client_rejections_total", uid=uid, cause=cause)
        self.counters.set_latest("mps_client_last_rejection_timestamp_seconds", self.at)
        self.add_incident("client_rejected", uid=uid, pids=pids, detail=cause)


MAX_GPUS = 64


class GpuNames:
    """Which device ordinal of the daemon is which GPU."""

    def __init__(self) -> None:
        self._ordinals: dict[int, str] = {}
        self._uuids: set[str] = set()

    def add_gpu(self, uuid: str) -> None:
        """A client was associated with a GPU, or the control tool listed it."""
        if len(self._uuids) < MAX_GPUS:
            self._uuids.add(uuid)

    def add_ordinal(self, device: int, uuid: str) -> None:
        """A device ordinal was shown with the UUID of its GPU."""
        if device in self._ordinals or len(self._ordinals) < MAX_GPUS:
            self._ordinals[device] = uuid

    def clear_ordinals(self) -> None:
        """Another daemon may number its devices differently."""
        self._ordinals.clear()

    def uuid_of(self, device: int, server_devices: Collection[int]) -> str:
        """Return the UUID of a device of a server, "" if the logs do not show it."""
        known = self._ordinals.get(device)
        if known is not None:
            return known
        return self._only_gpu() if len(server_devices) <= 1 else ""

    def by_ordinal(self, used_devices: Collection[int]) -> dict[int, str]:
        """Return ordinal -> UUID. One GPU and device 0 alone are the same."""
        if self._ordinals:
            return dict(self._ordinals)
        only = self._only_gpu()
        return {0: only} if only and set(used_devices) == {0} else {}

    def _only_gpu(self) -> str:
        return next(iter(self._uuids)) if len(self._uuids) == 1 else ""
