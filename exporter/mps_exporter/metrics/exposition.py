"""Families -> bytes: the text format and OpenMetrics, as prometheus-client prints them.

Its own encoders spend their time on what hardly changes from one page to the next: which labels
there are and how their values are escaped. Here the beginning of a line, name and labels, is made
once and kept until a page has other lines; a number that a page says often is printed once; and a
family whose samples are those of the last page is not printed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from prometheus_client import Metric

from mps_exporter.metrics.client_library import families_of
from mps_exporter.metrics.content_format import ContentFormat, Escaping, Syntax
from mps_exporter.metrics.spec import Family, HistogramValue, MetricSpec

TEXT_SUFFIXES = {"counter": "_total", "info": "_info"}
"""What a family's name lacks in OpenMetrics and has in the text format."""

TEXT_TYPES = {"info": "gauge", "stateset": "gauge"}
"""Types that the text format does not know."""

EXPONENT_FROM = 1_000_000.0
"""From here on Go writes whole numbers with an exponent."""

OPENMETRICS_END = b"# EOF\n"


def format_number(value: float) -> str:
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

LineKey = tuple[str, ...]
"""What tells a family's line from its others: label values, in families of several kinds of lines
after the end of the name."""


@dataclass(slots=True)
class _Plan:
    """What a family's lines have in common from one page to the next."""

    spec: MetricSpec
    head: str
    """The lines before the samples."""
    keys: Keys
    lines: tuple[Sequence[LineKey], Sequence[str]] = ((), ())
    """Those of the last page, and how they begin."""
    printed: tuple[Sequence[object], str] = ((), "")
    """The samples of the last page, and what was printed. Only of samples whose equals are printed
    alike: 0.0 equals -0.0, and states in another order are equal, too."""


def _plain(name: str) -> str:
    return name


def _dots(name: str) -> str:
    """The scheme "dots" doubles underscores, also of names that need no escaping."""
    return name.replace("_", "__")


class Encoder:
    """Writes pages, and keeps how the lines of the last one in each form begin.

    It may be called from several threads: what is kept is only ever replaced in one piece.
    """

    def __init__(self) -> None:
        self._families: dict[tuple[bool, bool], _FamilyEncoder] = {}
        """By whether it is OpenMetrics, and whether names are escaped with dots."""

    def encode(
        self, families: Iterable[Family], extra: Iterable[Metric], form: ContentFormat
    ) -> bytes:
        """Give the page in the form that was asked for; extra metrics stand at its end.

        Those come in prometheus-client's form, with one sample each and without labels.
        """
        openmetrics, dots = key = form.syntax is Syntax.OPENMETRICS, form.escaping is Escaping.DOTS
        encoder = self._families.get(key)
        if encoder is None:
            encoder = self._families[key] = _FamilyEncoder(openmetrics=openmetrics, dots=dots)
        page = encoder.page([*families, *families_of(extra)])
        return page + OPENMETRICS_END if openmetrics else page


class _FamilyEncoder:
    """Writes families in one form."""

    def __init__(self, *, openmetrics: bool, dots: bool) -> None:
        self._openmetrics = openmetrics
        self._name = _dots if dots else _plain
        self._plans: dict[str, _Plan] = {}
        """By the metric's name."""

    def page(self, families: Iterable[Family]) -> bytes:
        """All families, without OpenMetrics' last line."""
        texts: dict[float, str] = {}
        return "".join([self._family(one, texts) for one in families]).encode()

    def _family(self, family: Family, texts: dict[float, str]) -> str:
        plan = self._plan(family.spec)
        before, printed = plan.printed
        if before and before == family.samples:
            return printed
        keys, values = _lines(family)
        parts = [plan.head]
        for beginning, value in zip(self._beginnings(plan, keys), values, strict=True):
            text = texts.get(value)
            if text is None:
                text = format_number(value)
                if value:  # 0.0 and -0.0 are equal, and are printed differently
                    texts[value] = text
            parts.append(f"{beginning}{text}\n")
        lines = "".join(parts)
        repeats = all(values) and family.spec.kind not in SEVERAL_LINES
        plan.printed = (family.samples, lines) if repeats else ((), "")
        return lines

    def _plan(self, spec: MetricSpec) -> _Plan:
        plan = self._plans.get(spec.name)
        if plan is None or plan.spec is not spec:
            own = {"histogram": ("le",), "stateset": (spec.name,)}.get(spec.kind, ())
            keys = tuple((name, self._name(name)) for name in (*spec.labels, *own))
            plan = self._plans[spec.name] = _Plan(spec, self._head(spec), keys)
        return plan

    def _beginnings(self, plan: _Plan, keys: Sequence[LineKey]) -> Sequence[str]:
        """How these lines begin: mostly as those of the last page, which were the same."""
        kept, beginnings = plan.lines
        if kept != keys:
            known = dict(zip(kept, beginnings, strict=True))
            beginnings = [known.get(key) or self._beginning(plan, key) for key in keys]
            plan.lines = keys, beginnings
        return beginnings

    def _beginning(self, plan: _Plan, key: LineKey) -> str:
        """Give ``name{label="value",…} ``, sorted by label; no braces where there is no label."""
        name, values = plan.spec.name, key
        if plan.spec.kind in SEVERAL_LINES:
            name, values = name + key[0], key[1:]
        # A histogram's sum and count lack the last label, the bound.
        pairs = sorted(zip(plan.keys, values, strict=False), key=itemgetter(0))
        labels = ",".join([f'{printed}="{_escaped(value)}"' for (_, printed), value in pairs])
        return f"{self._name(name)}{{{labels}}} " if labels else f"{self._name(name)} "

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


SEVERAL_LINES = ("histogram", "stateset")
"""Kinds that have several lines for each sample."""


def _lines(family: Family) -> tuple[Sequence[LineKey], Sequence[float]]:
    """Give the lines of a family: what tells them apart, and their numbers."""
    if not family.samples:
        return (), ()
    if family.spec.kind in SEVERAL_LINES:
        read = _of_histogram if family.spec.kind == "histogram" else _of_stateset
        rows: Iterable[tuple[LineKey, float]] = [
            row for sample in family.samples for row in read(family.spec, *sample)
        ]
    else:
        rows = family.samples  # type: ignore[assignment] # the other kinds' values are numbers
    if not rows:
        return (), ()
    keys, numbers = zip(*rows, strict=True)
    return keys, numbers


def _of_histogram(
    spec: MetricSpec, values: LineKey, value: object
) -> Iterator[tuple[LineKey, float]]:
    if not isinstance(value, HistogramValue):
        raise TypeError(f"{spec.name} is a histogram, its value is not")
    for bound, so_many in value.buckets:
        yield ("_bucket", *values, bound), so_many
    yield ("_count", *values), value.buckets[-1][1]
    yield ("_sum", *values), value.sum


def _of_stateset(
    spec: MetricSpec, values: LineKey, value: object
) -> Iterator[tuple[LineKey, float]]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{spec.name} is a set of states, its value is not")
    for state, active in value.items():
        yield ("", *values, state), float(active)
