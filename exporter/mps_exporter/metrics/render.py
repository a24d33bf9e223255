"""Snapshot -> families of samples. Pure: the same snapshot always gives the same metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mps_exporter.metrics.catalogue import CATALOGUE
from mps_exporter.metrics.spec import Build, ClientSeries, Family, MetricSpec, Page, Texts, Value
from mps_exporter.snapshot import Snapshot

__all__ = ["Build", "ClientSeries", "SparseSeries", "render"]


def render(
    snapshot: Snapshot,
    build: Build,
    *,
    wall: Callable[[float], float] | None = None,
    clients: ClientSeries = "full",
) -> list[Family]:
    """Return all metrics of a snapshot. A metric without samples is left out.

    Args:
        snapshot: The result of one collection.
        build: The exporter's own version.
        wall: Converts moments of a recording to the viewer's clock.
        clients: Which series single clients have.
    """
    page = Page(snapshot, build, clients)
    families = (_family(spec, page, wall) for spec in CATALOGUE.values())
    return [family for family in families if family.samples]


def _family(spec: MetricSpec, page: Page, wall: Callable[[float], float] | None) -> Family:
    found: dict[Texts, Value] = {}
    for labels, value in spec.samples(page):
        # Prometheus refuses a whole page with two samples of the same labels.
        found.setdefault(labels, value)
    if wall is not None and spec.is_moment:
        found = {key: wall(one) for key, one in found.items() if isinstance(one, float | int)}
    return Family(spec, tuple(found.items()))


class SparseSeries:
    """Leaves out the series of sparse metrics that have not begun.

    Most series of an idle GPU would be zeros: errors and states that never occurred. Each costs
    memory and time in Prometheus. A begun series is kept while it is on the pages.

    increase() misses the first value of a series. So series that rules query with increase() begin
    at 0; sparse are only states and rare errors of the GPU itself.
    """

    def __init__(self) -> None:
        self._begun: dict[str, set[Texts]] = {}

    def shown(self, families: Iterable[Family]) -> list[Family]:
        """Return the families without the series that have not begun, and without empty ones."""
        found = (self._begun_in(one) if one.spec.sparse else one for one in families)
        return [family for family in found if family.samples]

    def _begun_in(self, family: Family) -> Family:
        spec = family.spec
        before = self._begun.get(spec.name, set())
        begun = set[Texts]()
        samples: list[tuple[Texts, Value]] = []
        for labels, value in family.samples:
            if isinstance(value, Mapping):
                states = {
                    state: active
                    for state, active in value.items()
                    if active or (*labels, state) in before
                }
                begun.update((*labels, state) for state in states)
                if states:
                    samples.append((labels, states))
            elif value or labels in before or (spec.always and spec.always.issubset(labels)):
                begun.add(labels)
                samples.append((labels, value))
        self._begun[spec.name] = begun
        return Family(spec, tuple(samples))
