"""All exposed metrics, by name."""

from __future__ import annotations

from mps_exporter.metrics.gpu_catalogue import GPU_METRICS
from mps_exporter.metrics.mps_catalogue import MPS_METRICS
from mps_exporter.metrics.spec import MetricSpec

CATALOGUE: dict[str, MetricSpec] = {spec.name: spec for spec in (*MPS_METRICS, *GPU_METRICS)}
