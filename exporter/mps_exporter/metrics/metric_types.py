"""Declarations of metrics: name, labels, help and the function that reads the value, in one object.

A metric belongs to a `Scope`: a kind of thing, and the labels that name each thing. A metric has no
sample for a thing whose value is None.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, ItemsView, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Generic, Literal, TypeVar

from mps_exporter.mps.metrics_from_logs import LOG_METRICS, LogMetric
from mps_exporter.snapshot import ControlDaemon, Histogram, Snapshot

MAX_LABEL_LENGTH = 200  # Maximum length of a label value: users choose names of programs and paths.

MAX_CACHED_LABELS = 4096
"""Maximum label sets in each cache (things, readings): twice those of a full host."""

TOOL = "nvidia-cuda-mps-control"
PROC = "/proc"

Kind = Literal["gauge", "counter", "histogram", "stateset", "info"]
KINDS: Mapping[str, Kind] = {"total": "counter", "info": "info"}
"""Last word of a name -> kind; gauge if not listed."""

ClientSeries = Literal["full", "summary", "off"]
"""Series of single clients: all; all but clients.DETAIL; none."""

RawLabels = tuple[str | int | None, ...]
"""Label values before they are text. No Booleans: 1 and True are the same key of the cache."""

InfoLabels = tuple[str | int | bool | tuple[str, ...] | None, ...]
"""Label values of an info metric before they are text."""

Texts = tuple[str, ...]  # Label values as text.

T = TypeVar("T")


Value = float | Histogram
Samples = Mapping[Texts, Value]
Rows = Iterable[tuple[RawLabels, T]]  # Things, each with the label values that name it.


@dataclass(slots=True, eq=False)
class MetricSpec:
    """One exposed metric. Names are a stable interface."""

    name: str  # The name in the text format, with _total, _info and so on.
    kind: Kind
    help: str = ""
    labels: tuple[str, ...] = ()
    source: str = ""  # Origin of the value, for the documentation.
    states: tuple[str, ...] = ()  # States of a stateset that are always present.
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> all possible values, if the set is closed. A label of an info metric is empty if its
    value is unknown."""
    section: str = ""
    sparse: bool = False  # Each series begins at its first value other than 0, then remains.
    always: frozenset[str] = frozenset()
    """Label values of a sparse metric: series that have all of them begin at 0."""
    samples: Callable[[Page], Samples] = lambda _page: {}
    note: str = ""  # Further text for the documentation: the help on each page of metrics is short.

    def means(self, text: str, note: str = "") -> None:
        self.help, self.note = text, note

    def has_states(self, states: tuple[str, ...]) -> MetricSpec:
        self.kind, self.states, self.sparse = "stateset", states, True
        return self

    @property
    def sample_labels(self) -> tuple[str, ...]:
        """The labels of a sample: a stateset names the state in a label with the metric's name."""
        return (*self.labels, self.name) if self.kind == "stateset" else self.labels

    @property
    def unit(self) -> str:
        """The base unit at the end of the name: "seconds", "bytes", ..., or ""."""
        unit = self.name.removesuffix("_total").rpartition("_")[2]
        units = ("seconds", "bytes", "ratio", "celsius", "watts", "joules", "hertz")
        return unit if unit in units else ""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its samples: label values in the order of spec.sample_labels, and the value."""

    spec: MetricSpec
    samples: tuple[tuple[Texts, Value], ...]


@dataclass(frozen=True, slots=True)
class Build:
    """Labels of mps_exporter_build_info."""

    version: str
    revision: str
    python_version: str


@dataclass(frozen=True, slots=True)
class Page:
    """The input of one page of metrics."""

    snapshot: Snapshot
    build: Build
    clients: ClientSeries
    _rows: dict[object, dict[Texts, Any]] = field(default_factory=dict)

    def rows(self, scope: Scope[T]) -> ItemsView[Texts, T]:
        """Return the things of a scope by the text of their labels. The first of equal labels wins.

        Prometheus refuses a page that has two samples with the same labels.
        """
        rows = self._rows.get(scope.rows)
        if rows is None:
            rows = self._rows[scope.rows] = {}
            for labels, thing in scope.rows(self):
                rows.setdefault(texts(labels), thing)
        return rows.items()

    def gpu(self, uuid: str) -> tuple[str, str]:
        return self.snapshot.gpu_indexes.get(uuid, ""), uuid


class Scope(Generic[T]):
    """The things that a group of metrics describes, and the labels that name each thing.

    Each declaration takes the closed sets of label values as `label=values`, () for an open label.
    Labels that the scope lacks are added to the metric.
    """

    def __init__(self, section: Section, labels: str, rows: Callable[[Page], Rows[T]]) -> None:
        self._section = section
        self.labels = tuple(labels.split())
        self.rows = rows

    def number(
        self, name: str, source: str, value: Callable[[T], float | None], **values: tuple[str, ...]
    ) -> MetricSpec:

        def numbers(thing: T) -> Mapping[RawLabels, float]:
            return {} if (number := value(thing)) is None else {(): number}

        return self.each(name, source, numbers, **values)

    def each(
        self,
        name: str,
        source: str,
        value: Callable[[T], Mapping[RawLabels, Value]],
        /,
        **values: tuple[str, ...],
    ) -> MetricSpec:

        def samples(page: Page) -> Samples:
            return {
                labels + texts(own): number
                for labels, thing in page.rows(self)
                for own, number in value(thing).items()
            }

        return self.add(name, source, samples, values)

    def by_gpu(
        self, name: str, source: str, value: Callable[[T], Mapping[str, Value]]
    ) -> MetricSpec:

        def samples(page: Page) -> Samples:
            return {
                labels + texts(page.gpu(uuid)): number
                for labels, thing in page.rows(self)
                for uuid, number in value(thing).items()
            }

        return self.add(name, source, samples, {"gpu": (), "uuid": ()})

    def info(
        self,
        name: str,
        source: str,
        labels: str,
        value: Callable[[T], InfoLabels | None] | None = None,
        /,
        **values: tuple[str, ...],
    ) -> MetricSpec:
        """Declare a metric whose label values are the information.

        By default they are attributes: "pid" is a label and an attribute, "server=pid" a label and
        the attribute with its value.
        """
        names = dict.fromkeys((label.partition("=")[0] for label in labels.split()), ())
        attributes = [label.rpartition("=")[2] for label in labels.split()]

        def read(thing: T) -> Mapping[RawLabels, float]:
            own = value(thing) if value else tuple(map(partial(getattr, thing), attributes))
            return {} if own is None else {tuple(map(_raw_label, own)): 1.0}

        return self.each(name, source, read, **(names | values))

    def state(
        self, name: str, source: str, states: tuple[str, ...], value: Callable[[T], str | None]
    ) -> MetricSpec:
        """Declare a set of states. An active state that is not among them is added."""

        def flags(thing: T) -> Mapping[RawLabels, float]:
            active = value(thing)
            shown = () if active is None else dict.fromkeys((*states, active))
            return {(state,): float(state == active) for state in shown}

        return self.each(name, source, flags).has_states(states)

    def add(
        self,
        name: str,
        source: str,
        samples: Callable[[Page], Samples],
        values: Mapping[str, tuple[str, ...]],
    ) -> MetricSpec:
        """Declare a metric by the function that returns all its samples."""
        spec = MetricSpec(
            name,
            KINDS.get(name.rpartition("_")[2], "gauge"),
            labels=tuple(dict.fromkeys((*self.labels, *values))),
            source=source,
            values={label: closed for label, closed in values.items() if closed},
            section=self._section.title,
            samples=samples,
        )
        self._section.metrics.append(spec)
        return spec


class Section:
    """A section of the documentation, with its metrics in their order."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.metrics: list[MetricSpec] = []

    def counted(self, *prefixes: str) -> None:
        """Declare the metrics with these prefixes in mps/metrics_from_logs.py, unless declared."""
        declared = {spec.name for spec in self.metrics}
        for name, metric in LOG_METRICS.items():
            if name.startswith(prefixes) and name not in declared:
                self._add_counted(metric)

    def _add_counted(self, metric: LogMetric) -> None:
        scope, name = Scope(self, "daemon", daemon_rows), metric.name

        def counts(daemon: ControlDaemon) -> Mapping[RawLabels, Value]:
            return (daemon.counters or {}).get(name, {})

        def counts_by_gpu(daemon: ControlDaemon) -> Mapping[str, Value]:
            found = {str(uuid): count for (uuid,), count in counts(daemon).items()}
            every = {"", *daemon.gpu_uuids, *found} if daemon.counters is not None else ()
            return {uuid: found.get(uuid, 0) for uuid in sorted(every)}

        if metric.labels == ("uuid",):
            spec = scope.by_gpu(name, metric.source, counts_by_gpu)
        else:
            spec = scope.each(name, metric.source, counts, **metric.values)
        spec.kind = metric.kind
        spec.means(metric.help)


def rows_of_daemons(
    read: Callable[[ControlDaemon], Iterable[T] | None],
    name: Callable[[T, Page], RawLabels] = lambda _thing, _page: (),
) -> Callable[[Page], Rows[T]]:
    """Return a function that yields each daemon's things, with the daemon's label first."""

    def rows(page: Page) -> Rows[T]:
        for daemon in page.snapshot.daemons:
            for thing in read(daemon) or ():
                yield (daemon.pipe_directory, *name(thing, page)), thing

    return rows


daemon_rows = rows_of_daemons(lambda daemon: (daemon,))


def _raw_label(value: str | int | bool | tuple[str, ...] | None) -> str | int | None:
    """Return a label value: a Boolean as a word, several texts joined by commas."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else value


@lru_cache(maxsize=MAX_CACHED_LABELS)
def texts(labels: RawLabels) -> Texts:
    """Return label values as text. Cached: most of them are those of the last page."""
    return tuple(map(_label_text, labels))


def _label_text(value: str | int | None) -> str:
    """Return printable text of limited length: a hash distinguishes texts that are cut."""
    text = "" if value is None else str(value)
    if not text.isprintable():
        # Control characters and lone surrogates of undecodable names become visible escapes.
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
            for char in text
        )
    if len(text) > MAX_LABEL_LENGTH:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        text = f"{text[: MAX_LABEL_LENGTH - 17]}~{digest}"
    return text
