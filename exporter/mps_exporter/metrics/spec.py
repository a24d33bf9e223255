"""Declarations of metrics: name, labels, help and the function that reads the value, in one object.

A metric belongs to a `Scope`: the things that it describes, each with its label values. A metric
whose value is None has no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from mps_exporter.mps.log_metrics import LOG_METRICS, LogMetric
from mps_exporter.snapshot import ControlDaemon, Histogram, Snapshot

LABEL_VALUE_MAX = 200
"""Maximum length of a label value, except the daemon's: users choose names of programs."""

LABEL_SETS_KEPT = 4096
"""Maximum number of cached label sets: twice those of a full host."""

DAEMON = "daemon"
"""The label whose values are never cut: daemons may differ in the last letter only."""

TOOL = "nvidia-cuda-mps-control"
PROC = "/proc"

Kind = Literal["gauge", "counter", "histogram", "stateset", "info"]
KINDS: Mapping[str, Kind] = {"total": "counter", "info": "info"}
"""Last word of a name -> kind. All other numbers are gauges."""

ClientSeries = Literal["full", "summary", "off"]
"""Series of single clients: all; without limits and start times; none."""

RawLabels = tuple[str | int | None, ...]
"""Label values before they are text. No booleans: 1 and True are the same key."""

Texts = tuple[str, ...]
"""Label values as text."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """A histogram's cumulative buckets: (upper bound as printed, count), sum."""

    buckets: tuple[tuple[str, int], ...]
    sum: float


Value = float | HistogramValue | Mapping[str, bool]
Samples = Iterable[tuple[Texts, Value]]
Rows = Iterable[tuple[RawLabels, T]]
"""Things, each with the label values that name it."""


@dataclass(slots=True, eq=False)
class MetricSpec:
    """One exposed metric. Names are a stable interface."""

    name: str
    """The name in the text format, with _total, _info and so on."""
    kind: Kind
    help: str = ""
    labels: tuple[str, ...] = ()
    source: str = ""
    """Origin of the value, for the documentation."""
    states: tuple[str, ...] = ()
    """States of a stateset that are always present."""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> all possible values, where these are a closed set. A label of an info metric is
    empty when its value is unknown."""
    section: str = ""
    sparse: bool = False
    """Each series begins when it is first not 0 (a state: first active), and then remains."""
    always: frozenset[str] = frozenset()
    """Label values of a sparse metric: series that have all of them begin at 0."""
    samples: Callable[[Page], Samples] = lambda _page: ()
    note: str = ""
    """Further text for the documentation: the help on each page of metrics is short."""

    def means(self, text: str, note: str = "") -> None:
        """Declare what the metric means."""
        self.help, self.note = text, note

    @property
    def unit(self) -> str:
        """The base unit at the end of the name: "seconds", "bytes", ..., or ""."""
        unit = self.name.removesuffix("_total").rpartition("_")[2]
        units = ("seconds", "bytes", "ratio", "celsius", "watts", "joules", "hertz")
        return unit if unit in units else ""

    @property
    def is_moment(self) -> bool:
        """Whether the value is a moment, which a replay converts to the viewer's clock."""
        return self.name.endswith(("_timestamp_seconds", "_start_time_seconds"))


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its samples: label values in the order of spec.labels, and the value.

    Samples of a stateset lack the label of the state, and map state -> bool.
    """

    spec: MetricSpec
    samples: tuple[tuple[Texts, Value], ...]


@dataclass(frozen=True, slots=True)
class Build:
    """Labels of mps_exporter_build_info."""

    version: str
    revision: str
    python_version: str


class Page:
    """What the metrics of one reply are read from."""

    def __init__(self, snapshot: Snapshot, build: Build, clients: ClientSeries) -> None:
        self.snapshot = snapshot
        self.build = build
        self.clients = clients
        self._rows: dict[object, list[tuple[Texts, Any]]] = {}

    def rows(self, scope: Scope[T]) -> list[tuple[Texts, T]]:
        """Return the things of a scope with their label values as text."""
        found = self._rows.get(scope.rows)
        if found is None:
            whole = _daemon_position(scope.labels)
            found = [(texts(labels, whole), thing) for labels, thing in scope.rows(self)]
            self._rows[scope.rows] = found
        return found

    def gpu(self, uuid: str) -> tuple[str, str]:
        """Return the labels gpu and uuid."""
        return self.snapshot.gpu_indexes.get(uuid, ""), uuid


class Scope(Generic[T]):
    """The things that a group of metrics describes, and the labels that name each of them.

    Each declaration takes the closed sets of label values as `label=values`, () where a label is
    open. Labels that the scope lacks are added to the metric.

    Args:
        section: The section of the documentation that declarations are added to.
        labels: Names of the labels, separated by spaces.
        rows: Returns the things of a page with their label values.
    """

    def __init__(self, section: Section, labels: str, rows: Callable[[Page], Rows[T]]) -> None:
        self._section = section
        self.labels = tuple(labels.split())
        self.rows = rows

    def number(
        self, name: str, source: str, value: Callable[[T], float | None], **values: tuple[str, ...]
    ) -> MetricSpec:
        """Declare a metric with one value for each thing."""
        return self.add(name, source, lambda one, _: _sample((), value(one)), values)

    def by_gpu(
        self, name: str, source: str, value: Callable[[T], Mapping[str, float]]
    ) -> MetricSpec:
        """Declare a metric with one value for each thing and GPU, given by UUID."""

        def read(thing: T, page: Page) -> Samples:
            return [(texts(page.gpu(uuid)), found) for uuid, found in value(thing).items()]

        return self.add(name, source, read, {"gpu": (), "uuid": ()})

    def each(
        self,
        name: str,
        source: str,
        value: Callable[[T], Mapping[RawLabels, float]],
        **values: tuple[str, ...],
    ) -> MetricSpec:
        """Declare a metric with values by further labels."""
        whole = _daemon_position([*values])

        def read(thing: T, _page: Page) -> Samples:
            return [(texts(own, whole), found) for own, found in value(thing).items()]

        return self.add(name, source, read, values)

    def info(
        self,
        name: str,
        source: str,
        labels: str,
        value: Callable[[T], RawLabels | None] | None = None,
        **values: tuple[str, ...],
    ) -> MetricSpec:
        """Declare a metric whose label values are the information: by default the attributes."""
        names = labels.split()

        def read(thing: T, _page: Page) -> Samples:
            own = value(thing) if value else tuple([getattr(thing, name) for name in names])
            return () if own is None else ((texts(own), 1.0),)

        return self.add(name, source, read, dict.fromkeys(names, ()) | values)

    def state(
        self, name: str, source: str, states: tuple[str, ...], value: Callable[[T], str | None]
    ) -> MetricSpec:
        """Declare a set of states, of which one is active."""

        def read(thing: T, _page: Page) -> Samples:
            found = value(thing)
            return _sample((), None if found is None else state_value(states, {found: True}))

        return self.add(name, source, read, kind="stateset", states=states, sparse=True)

    def add(
        self,
        name: str,
        source: str,
        read: Callable[[T, Page], Samples],
        values: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        *,
        kind: Kind | None = None,
        states: tuple[str, ...] = (),
        sparse: bool = False,
        always: frozenset[str] = frozenset(),
    ) -> MetricSpec:
        """Declare a metric, given the function that returns a thing's samples: see MetricSpec."""

        def samples(page: Page) -> Samples:
            for row, thing in page.rows(self):
                for own, found in read(thing, page):
                    yield row + own, found

        spec = MetricSpec(
            name,
            kind or KINDS.get(name.rpartition("_")[2], "gauge"),
            labels=tuple(dict.fromkeys((*self.labels, *values))),
            source=source,
            states=states,
            values={label: closed for label, closed in values.items() if closed},
            section=self._section.title,
            sparse=sparse,
            always=always,
            samples=samples,
        )
        self._section.metrics.append(spec)
        return spec


def _sample(labels: Texts, value: Value | None) -> Samples:
    return () if value is None else ((labels, value),)


class Section:
    """A section of the documentation, with its metrics in their order."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.metrics: list[MetricSpec] = []

    def counted(self, *prefixes: str) -> None:
        """Add the metrics of mps/log_metrics.py whose names begin so, but for those added."""
        declared = {spec.name for spec in self.metrics}
        for name, metric in LOG_METRICS.items():
            if name.startswith(prefixes) and name not in declared:
                self._add_counted(metric)

    def _add_counted(self, metric: LogMetric) -> None:
        of_gpu = metric.labels == ("uuid",)

        def read(daemon: ControlDaemon, page: Page) -> Samples:
            values = (daemon.counters or {}).get(metric.name)
            if values is None:
                return
            uuids = {"", *daemon.gpu_uuids, *(str(key[0]) for key in values)} if of_gpu else ()
            for key in sorted((uuid,) for uuid in uuids) if of_gpu else values:
                found = values.get(key, 0)
                own = page.gpu(str(key[0])) if of_gpu else key
                value = histogram_value(found) if isinstance(found, Histogram) else found
                yield texts(own), value

        labels = dict.fromkeys(("gpu", "uuid") if of_gpu else metric.labels, ())
        Scope(self, DAEMON, daemon_rows).add(
            metric.name, metric.source, read, {**labels, **metric.values}, kind=metric.kind
        ).means(metric.help, metric.note)


def daemon_rows(page: Page) -> Rows[ControlDaemon]:
    """Return the control daemons, named by their pipe directories."""
    for daemon in page.snapshot.daemons:
        yield (daemon.pipe_directory,), daemon


def _daemon_position(labels: Sequence[str]) -> int:
    return labels.index(DAEMON) if DAEMON in labels else -1


@lru_cache(maxsize=LABEL_SETS_KEPT)
def texts(labels: RawLabels, whole: int = -1) -> Texts:
    """Return label values as text, all but the one at position `whole` with a maximum length.

    Cached: most label values of a page are those of the last page.
    """
    return tuple(
        _label_text(value, None if position == whole else LABEL_VALUE_MAX)
        for position, value in enumerate(labels)
    )


def _label_text(value: str | int | None, longest: int | None = LABEL_VALUE_MAX) -> str:
    if value is None:
        return ""
    text = str(value)[:longest]
    if not text.isprintable():
        # Control characters and lone surrogates of undecodable names become visible escapes.
        visible = (
            char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
            for char in text
        )
        text = "".join(visible)[:longest]
    return text


def state_value(states: tuple[str, ...], active: Mapping[str, bool]) -> Mapping[str, bool]:
    """Return the known states, then unknown words of the driver."""
    return dict.fromkeys(states, False) | {_label_text(name): one for name, one in active.items()}


def histogram_value(histogram: Histogram) -> HistogramValue:
    """Return the cumulative buckets of the exposition formats."""
    bounds = (*(repr(float(bound)) for bound in histogram.bounds), "+Inf")
    counts = accumulate(histogram.counts)
    return HistogramValue(tuple(zip(bounds, counts, strict=True)), histogram.sum_seconds)
