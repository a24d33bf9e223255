"""All exposed metrics, by name, in the order of the documentation."""

from __future__ import annotations

from mps_exporter.metrics import clients, daemons, exporter, gpus, partitions, users
from mps_exporter.metrics.spec import MetricSpec

SECTIONS = (
    daemons.SECTION,
    daemons.SERVERS,
    clients.SECTION,
    partitions.SECTION,
    users.SECTION,
    gpus.SHARING,
    exporter.ADVICE_SECTION,
    exporter.SECTION,
    gpus.GPUS,
)

CATALOGUE: dict[str, MetricSpec] = {
    spec.name: spec for section in SECTIONS for spec in section.metrics
}
