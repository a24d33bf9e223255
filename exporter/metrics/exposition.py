"""Families -> bytes: the text format and OpenMetrics, as prometheus-client prints them.

Its own encoders spend their time on what hardly changes from one page to the next: which labels
there are and how their values are escaped. Here a label set is rendered once, and kept for as long
as pages mention it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from prometheus_client import Metric

from exporter.metrics.content_format import ContentFormat, Escaping, Syntax
from exporter.metrics.library_form import encode_metrics
from exporter.metrics.render import states_of
from exporter.metrics.spec import Family, HistogramValue, MetricSpec

TEXT_SUFFIXES = {"counter": "_total", "info": "_info"}
"""What a family's name lacks in OpenMetrics and has in the text format."""

TEXT_TYPES = {"info": "gauge", "stateset": "gauge"}
"""Types that the text format does not know."""

EXPONENT_FROM = 1_000_000.0
"""From here on Go writes whole numbers with an exponent."""

OPENMETRICS_END = b"# EOF\n"


def number(value: float) -> str:
    """A number as Go prints it, which is what prometheus-client prints."""
    value = float(value)
    if -EXPONENT_FROM < value < EXPONENT_FROM:
        return repr(value)
    if value != value:  # noqa: PLR0124 - the quickest way to know a NaN
        return "NaN"
    text = repr(value)
    if "inf" in text:
        return "-Inf" if value < 0 else "+Inf"
    whole, dot, rest = text.partition(".")
    if value < 0 or not dot or len(whole) == 1:
        return text
    mantissa = f"{whole[0]}.{whole[1:]}{rest}".rstrip("0.")
    return f"{mantissa}e+{len(whole) - 1:02d}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


Keys = tuple[tuple[str, str], ...]
"""Label names in the order of the values: as they are sorted, and as they are printed."""


@dataclass(slots=True)
class Labels:
    """Rendered label sets: those of this page, and those of the page before."""

    _now: dict[Keys, dict[tuple[str, ...], str]] = field(default_factory=dict)
    _before: dict[Keys, dict[tuple[str, ...], str]] = field(default_factory=dict)

    def of(self, keys: Keys) -> LabelSets:
        """The sets with these names."""
        return LabelSets(keys, self._now.setdefault(keys, {}), self._before.get(keys, {}))

    def turn(self) -> None:
        """A page is done: forget what it did not mention."""
        self._now, self._before = {}, self._now

    def __len__(self) -> int:
        return sum(len(sets) for kept in (self._now, self._before) for sets in kept.values())


@dataclass(frozen=True, slots=True)
class LabelSets:
    """Renders label values under the same names."""

    keys: Keys
    now: dict[tuple[str, ...], str]
    before: dict[tuple[str, ...], str]

    def __call__(self, values: tuple[str, ...]) -> str:
        """Give ``{name="value",…}``, sorted by name; nothing where there is no label."""
        text = self.now.get(values)
        if text is None:
            text = self.before.get(values)
            if text is None:
                text = self._render(values)
            self.now[values] = text
        return text

    def _render(self, values: tuple[str, ...]) -> str:
        if not self.keys:
            return ""
        pairs = sorted(zip(self.keys, values, strict=True), key=itemgetter(0))
        return "{" + ",".join([f'{key[1]}="{_escaped(value)}"' for key, value in pairs]) + "}"


_LABELS = {escaping: Labels() for escaping in (Escaping.UNDERSCORES, Escaping.DOTS)}


def _plain(name: str) -> str:
    return name


def _dots(name: str) -> str:
    """The scheme "dots" doubles underscores, also of names that need no escaping."""
    return name.replace("_", "__")


class Encoder:
    """Writes pages in one form."""

    def __init__(self, form: ContentFormat) -> None:
        self._openmetrics = form.syntax is Syntax.OPENMETRICS
        dots = form.escaping is Escaping.DOTS
        self._name = _dots if dots else _plain
        self._labels = _LABELS[Escaping.DOTS if dots else Escaping.UNDERSCORES]

    def page(self, families: Iterable[Family]) -> bytes:
        """All families, without OpenMetrics' last line."""
        text = "".join([part for family in families for part in self._family(family)])
        self._labels.turn()
        return text.encode()

    def _family(self, family: Family) -> Iterator[str]:
        spec = family.spec
        yield self._head(spec)
        name = self._name(spec.name)
        if spec.kind == "histogram":
            yield from self._histograms(name, family)
        elif spec.kind == "stateset":
            yield from self._statesets(name, family)
        else:
            labels = self._sets(spec.labels)
            known = labels.now.get  # most pages say what the page before said
            for values, value in family.samples:
                yield f"{name}{known(values) or labels(values)} {number(value)}\n"  # type: ignore[arg-type]

    def _sets(self, names: tuple[str, ...]) -> LabelSets:
        return self._labels.of(tuple((name, self._name(name)) for name in names))

    def _head(self, spec: MetricSpec) -> str:
        suffix = TEXT_SUFFIXES.get(spec.kind, "")
        family = spec.name.removesuffix(suffix)
        if self._openmetrics:
            name, unit = self._name(family), spec.unit if spec.kind != "stateset" else ""
            unit_line = f"# UNIT {name} {unit}\n" if unit else ""
            return f"# HELP {name} {_escaped(spec.help)}\n# TYPE {name} {spec.kind}\n{unit_line}"
        name = self._name(family + suffix)
        words = spec.help.replace("\\", "\\\\").replace("\n", "\\n")
        return f"# HELP {name} {words}\n# TYPE {name} {TEXT_TYPES.get(spec.kind, spec.kind)}\n"

    def _histograms(self, name: str, family: Family) -> Iterator[str]:
        bucket, count, total = (name + self._name(end) for end in ("_bucket", "_count", "_sum"))
        labels = self._sets(family.spec.labels)
        with_bound = self._sets((*family.spec.labels, "le"))
        for values, value in family.samples:
            if not isinstance(value, HistogramValue):
                raise TypeError(f"{family.spec.name} is a histogram, its value is not")
            for bound, so_many in value.buckets:
                yield f"{bucket}{with_bound((*values, bound))} {number(so_many)}\n"
            own = labels(values)
            yield f"{count}{own} {number(value.buckets[-1][1])}\n"
            yield f"{total}{own} {number(value.sum)}\n"

    def _statesets(self, name: str, family: Family) -> Iterator[str]:
        spec = family.spec
        labels = self._sets((*spec.labels, spec.name))
        for values, value in family.samples:
            if not isinstance(value, Mapping):
                raise TypeError(f"{spec.name} is a set of states, its value is not")
            for state, active in states_of(spec, value).items():
                yield f"{name}{labels((*values, state))} {'1.0' if active else '0.0'}\n"


def encode(families: Iterable[Family], extra: Iterable[Metric], form: ContentFormat) -> bytes:
    """Give the page in the form that was asked for; extra metrics stand at its end.

    Those are few, and come in prometheus-client's form: its encoder prints them.
    """
    page = Encoder(form).page(families)
    if metrics := list(extra):
        return page + encode_metrics(metrics, form)
    return page + OPENMETRICS_END if form.syntax is Syntax.OPENMETRICS else page
