"""Series that are created when they first say something.

Most series of an idle GPU would be zeros: errors that never happened, states that never were. Each
costs memory and time in Prometheus. A series of SPARSE is shown from the moment its value is first
not 0 (a state: first active) since the exporter started, and then stays.

increase() misses what a series begins with. So what a rule asks with increase() is in ALWAYS, and
only the GPU's own rare errors are in SPARSE: no counter of daemons, servers, clients or waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mps_exporter.metrics.spec import Family, HistogramValue

SPARSE = frozenset(
    {
        "mps_control_state",
        "mps_gpu_clock_event_active",
        "mps_gpu_clock_event_seconds_total",
        "mps_gpu_compute_mode",
        "mps_gpu_ecc_errors_total",
        "mps_gpu_engine_utilization_ratio",
        "mps_gpu_fabric_state",
        "mps_gpu_nvlink_errors_total",
        "mps_gpu_pcie_errors_total",
        "mps_gpu_recovery_action",
        "mps_gpu_remapped_rows",
        "mps_gpu_retired_pages",
        "mps_gpu_unobserved_seconds_total",
        "mps_gpu_xid_errors_total",
        "mps_server_state",
    }
)
"""Metrics whose series are created when they are first not 0."""

ALWAYS: Mapping[str, frozenset[str]] = {
    "mps_gpu_ecc_errors_total": frozenset({"uncorrected", "volatile"}),
}
"""Metric -> label values: a series that has all of them is there from the start."""

Labels = tuple[str, ...]


class SparseSeries:
    """Leaves out what has not begun. Keeps what has: of series that are on the pages, no others."""

    def __init__(self) -> None:
        self._begun: dict[str, set[Labels]] = {}

    def shown(self, families: Iterable[Family]) -> list[Family]:
        """Give the families without the series that have not begun; empty ones are left out."""
        return [
            shown
            for family in families
            if (shown := self._family(family) if family.spec.name in SPARSE else family).samples
        ]

    def _family(self, family: Family) -> Family:
        name = family.spec.name
        before, always = self._begun.get(name, set()), ALWAYS.get(name)
        begun = set[Labels]()
        samples: list[tuple[Labels, float | HistogramValue | Mapping[str, bool]]] = []
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
            elif value or labels in before or (always and always.issubset(labels)):
                begun.add(labels)
                samples.append((labels, value))
        self._begun[name] = begun
        return Family(family.spec, tuple(samples))


def words(name: str) -> Iterator[str]:
    """What the documentation says of a metric's series."""
    if name not in SPARSE:
        return
    always = ALWAYS.get(name)
    but = f" (of {' and '.join(sorted(always))}: from the start)" if always else ""
    yield f"A series is created when it is first not 0{but}."
