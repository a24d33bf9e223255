"""The exporter's metrics as prometheus-client's, whose encoders define the pages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric
from prometheus_client.exposition import generate_latest as text_encoder
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_encoder
from prometheus_client.utils import floatToGoString

from mps_exporter.metrics.spec import Family
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
