"""The text format and OpenMetrics, byte for byte as prometheus-client prints them.

The library's encoders take 5 times as long, mostly for labels that are the same on each page. Here
the beginning of a line (name and labels) is cached.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

from mps_exporter.metrics.metric_types import Family, MetricSpec, Texts
from mps_exporter.snapshot import Histogram

TEXT_0_0_4 = "text/plain; version=0.0.4; charset=utf-8"
TEXT_1_0_0 = "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"
OPENMETRICS_1_0_0 = TEXT_1_0_0.replace("text/plain", "application/openmetrics-text")
"""Content types. Since 1.0.0 they contain the escaping of names with characters beyond
[a-zA-Z0-9_:]. No metric here has such a name, so another requested escaping is ignored."""

SUFFIXES = {"counter": "_total", "info": "_info"}
"""Kind -> end of a name that OpenMetrics' headers omit."""

TEXT_TYPES = {"info": "gauge", "stateset": "gauge"}  # Types that the text format lacks.

LIBRARY = "prometheus-client"  # Section of the library's metrics, which have no units.
MAX_CACHED_LINES = 16_384  # Lines of two pages of a full host.

format_number: Callable[[float], str] = floatToGoString


def encode(families: Iterable[Family], extra: Iterable[Metric], content_type: str) -> bytes:
    """Return a page; `extra` are metrics of the library without labels, for its end."""
    head = _openmetrics_head if "openmetrics" in content_type else _text_head
    parts = [
        head(family.spec)
        + "".join(
            f"{_beginning(family.spec, key)}{format_number(value)}\n"
            for key, value in _lines(family)
        )
        for family in (*families, *_library_families(extra))
    ]
    return "".join([*parts, "# EOF\n" if head is _openmetrics_head else ""]).encode()


@lru_cache(maxsize=MAX_CACHED_LINES)
def _beginning(spec: MetricSpec, key: Texts) -> str:
    """Return ``name{label="value",…} ``, sorted by label, or ``name `` without labels."""
    name = spec.name
    if spec.kind == "histogram":
        name, key = name + key[0], key[1:]
    # Only the buckets of a histogram have the last label.
    pairs = sorted(zip((*spec.sample_labels, "le"), key, strict=False))
    shown = ",".join([f'{label}="{_escaped(value)}"' for label, value in pairs])
    return f"{name}{{{shown}}} " if shown else f"{name} "


@lru_cache(maxsize=1024)
def _openmetrics_head(spec: MetricSpec) -> str:
    name = spec.name.removesuffix(SUFFIXES.get(spec.kind, ""))
    unit = "" if spec.kind == "stateset" or spec.section == LIBRARY else spec.unit
    unit_line = f"# UNIT {name} {unit}\n" if unit else ""
    return f"# HELP {name} {_escaped(spec.help)}\n# TYPE {name} {spec.kind}\n{unit_line}"


@lru_cache(maxsize=1024)
def _text_head(spec: MetricSpec) -> str:
    text = spec.help.replace("\\", "\\\\").replace("\n", "\\n")
    kind = TEXT_TYPES.get(spec.kind, spec.kind)
    return f"# HELP {spec.name} {text}\n# TYPE {spec.name} {kind}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _lines(family: Family) -> Iterator[tuple[Texts, float]]:
    for labels, value in family.samples:
        if isinstance(value, Histogram):
            yield from _histogram_lines(labels, value)
        else:
            yield labels, value


def _histogram_lines(labels: Texts, value: Histogram) -> Iterator[tuple[Texts, float]]:
    counts = list(accumulate(value.counts))
    bounds = (*(repr(float(bound)) for bound in value.bounds), "+Inf")
    for bound, count in zip(bounds, counts, strict=True):
        yield ("_bucket", *labels, bound), count
    yield ("_count", *labels), counts[-1]
    yield ("_sum", *labels), value.sum_seconds


def _library_families(metrics: Iterable[Metric]) -> Iterator[Family]:
    for metric in metrics:
        for sample in metric.samples:
            spec = _library_spec(sample.name, metric.type, metric.documentation)
            yield Family(spec, (((), sample.value),))


_library_spec = lru_cache(maxsize=32)(partial(MetricSpec, section=LIBRARY))
