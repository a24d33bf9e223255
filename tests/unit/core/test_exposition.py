"""The exporter's encoder prints byte for byte what prometheus-client's encoders print."""

from collections.abc import Iterable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import generate_latest as text_encoder
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_encoder
from prometheus_client.utils import floatToGoString

from mps_exporter.metrics import CATALOGUE
from mps_exporter.metrics.exposition import OPENMETRICS_1_0_0, TEXT_0_0_4, TEXT_1_0_0, encode
from mps_exporter.metrics.metric_types import Family, MetricSpec
from mps_exporter.snapshot import Histogram


def to_metric(family: Family) -> Metric:
    spec = family.spec
    base = spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name
    base = base.removesuffix("_info") if spec.kind == "info" else base
    metric = Metric(base, spec.help, spec.kind, spec.unit if spec.kind != "stateset" else "")
    for values, value in family.samples:
        labels = dict(zip(spec.sample_labels, values, strict=True))
        if isinstance(value, Histogram):
            bounds = (*map(floatToGoString, value.bounds), "+Inf")
            for bound, count in zip(bounds, accumulate(value.counts), strict=True):
                metric.add_sample(f"{spec.name}_bucket", {**labels, "le": bound}, count)
            metric.add_sample(f"{spec.name}_count", labels, sum(value.counts))
            metric.add_sample(f"{spec.name}_sum", labels, value.sum_seconds)
        else:
            metric.add_sample(spec.name, labels, value)
    return metric


def encode_metrics(metrics: Iterable[Metric], content_type: str) -> bytes:
    """Return the page of these metrics, encoded by prometheus-client."""
    encoder = openmetrics_encoder if "openmetrics" in content_type else text_encoder
    registry: Any = SimpleNamespace(collect=lambda: metrics)
    return encoder(registry, "underscores")


FORMATS = [TEXT_0_0_4, TEXT_1_0_0, OPENMETRICS_1_0_0]

nasty = ['"', "\\", "\n", 'a\\n"b\\\\', "größe", "日本", "🦆"]
words = st.text(max_size=12) | st.sampled_from(nasty)
# UTF-8 has no lone surrogates; label values with them are escaped before they are encoded.
words = words.filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))
numbers = (
    st.floats()
    | st.integers(-(2**70), 2**70)
    | st.floats(1e5, 1e8)
    | st.booleans()
    | st.sampled_from([0.0, -0.0, 1e6, 999999.5, 1e15, 1e16, 1e17, 1e-5, 2.5e9, 1795000000.123])
)


def histogram(bounds: list[float], counts: list[int], total: float) -> Histogram:
    return Histogram(tuple(sorted(bounds)), tuple(counts[: len(bounds) + 1]), total)


histograms = st.builds(
    histogram,
    st.lists(st.floats(0, 1e5), max_size=4, unique=True),
    st.lists(st.integers(0, 10**12), min_size=5, max_size=5),
    st.floats(0),
)


@st.composite
def families(draw: st.DrawFn, specs: st.SearchStrategy[MetricSpec]) -> Family:
    spec = draw(specs)
    labels = st.tuples(*(words for _ in spec.sample_labels))
    values = histograms if spec.kind == "histogram" else numbers
    return Family(spec, tuple(draw(st.lists(st.tuples(labels, values), max_size=3))))


catalogued = st.sampled_from(list(CATALOGUE.values()))
pages = st.lists(st.lists(families(catalogued), max_size=3), min_size=1, max_size=3)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(series=pages)
def test_each_of_several_pages_equals_the_library_s(form: str, series: list[list[Family]]) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    own = list(registry.collect())
    for page in [*series, *series]:
        expected = encode_metrics([*(to_metric(family) for family in page), *own], form)
        assert encode(page, own, form) == expected
