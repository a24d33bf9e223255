"""Our metrics in prometheus-client's form: its encoders say what ours must print."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Metric

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
