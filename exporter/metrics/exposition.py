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


_PLANS: dict[tuple[bool, bool], dict[str, tuple[MetricSpec, str, Keys]]] = {}


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
        self._plans = _PLANS.setdefault((self._openmetrics, dots), {})

    def page(self, families: Iterable[Family]) -> bytes:
        """All families, without OpenMetrics' last line."""
        text = "".join([part for family in families for part in self._family(family)])
        self._labels.turn()
        return text.encode()

    def _family(self, family: Family) -> list[str]:
        spec = family.spec
        head, keys = self._plan(spec)
        name = self._name(spec.name)
        labels = self._labels.of(keys)
        if spec.kind == "histogram":
            return [head, *self._histograms(name, labels, family)]
        if spec.kind == "stateset":
            return [head, *_statesets(name, labels, family)]
        lines = [head]
        known = labels.now.get  # a label set that another family has, too
        for values, value in family.samples:
            plain = float(value)  # type: ignore[arg-type]
            text = repr(plain) if -EXPONENT_FROM < plain < EXPONENT_FROM else number(plain)
            lines.append(f"{name}{known(values) or labels(values)} {text}\n")
        return lines

    def _plan(self, spec: MetricSpec) -> tuple[str, Keys]:
        """The lines before the samples, and the labels' names: the same on every page."""
        plan = self._plans.get(spec.name)
        if plan is None or plan[0] is not spec:
            own = {"histogram": ("le",), "stateset": (spec.name,)}.get(spec.kind, ())
            keys = tuple((name, self._name(name)) for name in (*spec.labels, *own))
            plan = self._plans[spec.name] = spec, self._head(spec), keys
        return plan[1:]

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

    def _histograms(self, name: str, with_bound: LabelSets, family: Family) -> Iterator[str]:
        bucket, count, total = (name + self._name(end) for end in ("_bucket", "_count", "_sum"))
        labels = self._labels.of(with_bound.keys[:-1])
        for values, value in family.samples:
            if not isinstance(value, HistogramValue):
                raise TypeError(f"{family.spec.name} is a histogram, its value is not")
            for bound, so_many in value.buckets:
                yield f"{bucket}{with_bound((*values, bound))} {number(so_many)}\n"
            own = labels(values)
            yield f"{count}{own} {number(value.buckets[-1][1])}\n"
            yield f"{total}{own} {number(value.sum)}\n"


def _statesets(name: str, labels: LabelSets, family: Family) -> Iterator[str]:
    spec = family.spec
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
