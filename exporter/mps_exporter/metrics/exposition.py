"""Families -> bytes: the text format and OpenMetrics, as prometheus-client prints them.

The library's encoders take 10 times as long, mostly for labels that are the same on each page. Here
the beginning of a line (name and labels) is kept until a page has other lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

from mps_exporter.metrics.content_format import ContentFormat, Escaping, Syntax
from mps_exporter.metrics.spec import Family, HistogramValue, Kind, MetricSpec, Value

SUFFIXES = {"counter": "_total", "info": "_info"}
"""Ends of names in the text format that OpenMetrics omits."""

TEXT_TYPES = {"info": "gauge", "stateset": "gauge"}
"""Replacements of the types that the text format lacks."""

LIBRARY = "prometheus-client"
"""Section of the library's metrics, which have no units."""

format_number: Callable[[float], str] = floatToGoString

LineKey = tuple[str, ...]
"""End of a line's name, in families with several kinds of lines, and label values."""


class Style(NamedTuple):
    """What changes the body: other escapings than "dots" leave names like ours unchanged."""

    openmetrics: bool
    dots: bool

    def name(self, name: str) -> str:
        return name.replace("_", "__") if self.dots else name


class Encoder:
    """Writes pages, and keeps the beginnings of the last page's lines.

    Several threads may use it: what is kept is only replaced in one piece.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Style, str], tuple[MetricSpec, Sequence[LineKey], list[str]]] = {}

    def encode(
        self, families: Iterable[Family], extra: Iterable[Metric], form: ContentFormat
    ) -> bytes:
        """Return the page.

        Args:
            families: The exporter's metrics.
            extra: Metrics of the library with one sample each and without labels, for the end.
            form: Syntax, version and escaping.
        """
        style = Style(form.syntax is Syntax.OPENMETRICS, form.escaping is Escaping.DOTS)
        numbers: dict[float, str] = {}
        parts = [self._family(style, one, numbers) for one in (*families, *_of_library(extra))]
        return "".join([*parts, "# EOF\n" if style.openmetrics else ""]).encode()

    def _family(self, style: Style, family: Family, numbers: dict[float, str]) -> str:
        keys, values = _rows(family)
        parts = [_head(style, family.spec)]
        for beginning, value in zip(
            self._beginnings(style, family.spec, keys), values, strict=True
        ):
            text = numbers.get(value)
            if text is None:
                text = format_number(value)
                if value:  # 0.0 and -0.0 are equal, and are printed differently
                    numbers[value] = text
            parts.append(f"{beginning}{text}\n")
        return "".join(parts)

    def _beginnings(self, style: Style, spec: MetricSpec, keys: Sequence[LineKey]) -> Sequence[str]:
        before, kept, beginnings = self._kept.get((style, spec.name), (spec, (), []))
        if kept != keys or before is not spec:
            known = dict(zip(kept, beginnings, strict=True)) if before is spec else {}
            beginnings = [known.get(key) or _beginning(style, spec, key) for key in keys]
            self._kept[style, spec.name] = spec, keys, beginnings
        return beginnings


def _beginning(style: Style, spec: MetricSpec, key: LineKey) -> str:
    """Return ``name{label="value",…} ``, sorted by label; no braces where there is no label."""
    name, labels, values = spec.name, spec.labels, key
    if spec.kind in ("histogram", "stateset"):
        name, values = name + key[0], key[1:]
        labels = (*labels, "le" if spec.kind == "histogram" else spec.name)
    # A histogram's sum and count lack the last label, the bound.
    pairs = sorted(zip(labels, values, strict=False))
    shown = ",".join([f'{style.name(label)}="{_escaped(value)}"' for label, value in pairs])
    return f"{style.name(name)}{{{shown}}} " if shown else f"{style.name(name)} "


@lru_cache(maxsize=1024)
def _head(style: Style, spec: MetricSpec) -> str:
    name = style.name(spec.name.removesuffix(SUFFIXES.get(spec.kind, "")))
    if style.openmetrics:
        unit = "" if spec.kind == "stateset" or spec.section == LIBRARY else spec.unit
        unit_line = f"# UNIT {name} {unit}\n" if unit else ""
        return f"# HELP {name} {_escaped(spec.help)}\n# TYPE {name} {spec.kind}\n{unit_line}"
    name = style.name(spec.name)
    text = spec.help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {text}\n# TYPE {name} {TEXT_TYPES.get(spec.kind, spec.kind)}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _rows(family: Family) -> tuple[Sequence[LineKey], Sequence[float]]:
    """Return what distinguishes the lines of a family, and their numbers."""
    rows: Iterable[tuple[LineKey, float]]
    if family.spec.kind in ("histogram", "stateset"):
        rows = [row for labels, value in family.samples for row in _several(labels, value, family)]
    else:
        rows = family.samples  # type: ignore[assignment] # the other kinds' values are numbers
    keys, numbers = zip(*rows, strict=True) if rows else ((), ())
    return keys, numbers


def _several(labels: LineKey, value: Value, family: Family) -> Iterator[tuple[LineKey, float]]:
    if isinstance(value, HistogramValue):
        for bound, count in value.buckets:
            yield ("_bucket", *labels, bound), count
        yield ("_count", *labels), value.buckets[-1][1]
        yield ("_sum", *labels), value.sum
    elif isinstance(value, Mapping):
        for state, active in value.items():
            yield ("", *labels, state), float(active)
    else:
        raise TypeError(f"{family.spec.name} is a {family.spec.kind}, its value is a number")


def _of_library(metrics: Iterable[Metric]) -> Iterator[Family]:
    for metric in metrics:
        for sample in metric.samples:
            spec = _library_spec(sample.name, metric.type, metric.documentation)
            yield Family(spec, (((), sample.value),))


@lru_cache(maxsize=32)
def _library_spec(name: str, kind: Kind, text: str) -> MetricSpec:
    return MetricSpec(name, kind, text, section=LIBRARY)
