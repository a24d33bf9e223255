"""Our metrics in prometheus-client's form: its encoders say what ours must print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.exposition import generate_latest as text_encoder
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_encoder

from mps_exporter.metrics.content_format import ContentFormat, Escaping, Syntax
from mps_exporter.metrics.spec import Family, HistogramValue


def to_metric(family: Family) -> Metric:
    """One family in prometheus-client's form."""
    spec = family.spec
    base = spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name
    base = base.removesuffix("_info") if spec.kind == "info" else base
    metric = Metric(base, spec.help, spec.kind, spec.unit if spec.kind != "stateset" else "")
    for values, value in family.samples:
        labels = dict(zip(spec.labels, values, strict=True))
        if isinstance(value, HistogramValue):
            for bound, count in value.buckets:
                metric.add_sample(f"{spec.name}_bucket", {**labels, "le": bound}, count)
            metric.add_sample(f"{spec.name}_count", labels, value.buckets[-1][1])
            metric.add_sample(f"{spec.name}_sum", labels, value.sum)
        elif isinstance(value, Mapping):
            for state, active in value.items():
                metric.add_sample(spec.name, {**labels, spec.name: state}, float(active))
        else:
            metric.add_sample(spec.name, labels, value)
    return metric


class _Prepared:
    """A registry-like thing that holds finished metrics: no collection happens in the encoder."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def encode_metrics(metrics: Iterable[Metric], form: ContentFormat) -> bytes:
    """Return a page of these metrics, made by prometheus-client's encoder."""
    encoder = openmetrics_encoder if form.syntax is Syntax.OPENMETRICS else text_encoder
    # The scheme "values" leaves names like ours alone; that encoder changes half of them.
    values = form.escaping is Escaping.VALUES
    return encoder(_Prepared(metrics), Escaping.UNDERSCORES if values else form.escaping)
