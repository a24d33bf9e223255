"""What is exported: all metrics, and their values for a snapshot."""

from collections.abc import Callable, Iterable

from mps_exporter.metrics import clients, daemons, exporter_itself, gpus, partitions
from mps_exporter.metrics.metric_types import Build, ClientSeries, Family, MetricSpec, Page, Texts
from mps_exporter.snapshot import Snapshot

__all__ = ["CATALOGUE", "SECTIONS", "Build", "ClientSeries", "SparseSeries", "render"]

SECTIONS = (
    daemons.SECTION,
    daemons.SERVERS,
    clients.SECTION,
    partitions.SECTION,
    clients.USERS,
    gpus.SHARING,
    exporter_itself.ADVICE_SECTION,
    exporter_itself.SECTION,
    gpus.GPUS,
)

CATALOGUE: dict[str, MetricSpec] = {
    spec.name: spec for section in SECTIONS for spec in section.metrics
}
"""All metrics by name, in the order of the documentation."""


def render(
    snapshot: Snapshot,
    build: Build,
    *,
    wall: Callable[[float], float] | None = None,
    clients: ClientSeries = "full",
) -> list[Family]:
    """Return metrics with samples; `wall` converts a recording's times to the viewer's clock."""
    page = Page(snapshot, build, clients)
    families = []
    for spec in CATALOGUE.values():
        samples = spec.samples(page)
        if wall is not None and spec.name.endswith(("_timestamp_seconds", "_start_time_seconds")):
            samples = {key: wall(at) for key, at in samples.items() if isinstance(at, float | int)}
        if samples:
            families.append(Family(spec, tuple(samples.items())))
    return families


class SparseSeries:
    """Omits the series of sparse metrics that have not begun: most of an idle GPU would be zeros.

    A series begins with its first value but 0, and lasts while it has samples. Series of
    `always` begin at 0: increase() misses a first value.
    """

    def __init__(self) -> None:
        self._begun: dict[str, set[Texts]] = {}

    def shown(self, families: Iterable[Family]) -> list[Family]:
        """Return the families with series that have begun; families without series are dropped."""
        found = (self._begun_in(family) if family.spec.sparse else family for family in families)
        return [family for family in found if family.samples]

    def _begun_in(self, family: Family) -> Family:
        spec, before = family.spec, self._begun.get(family.spec.name, set())
        samples = tuple(
            (labels, value)
            for labels, value in family.samples
            if value or labels in before or (spec.always and spec.always.issubset(labels))
        )
        self._begun[spec.name] = {labels for labels, _ in samples}
        return Family(spec, samples)
