"""All types of findings, and the order in which findings are shown: by severity, then by type."""

from collections.abc import Iterable

from mps_exporter.findings import (
    daemons_and_servers,
    gpus,
    incidents_and_leftovers,
    limits,
    visibility,
)
from mps_exporter.findings.finding import SEVERITIES, Finding, FindingType, Severity

_DECLARED = [
    declared
    for module in (daemons_and_servers, incidents_and_leftovers, gpus, limits, visibility)
    for declared in vars(module).values()
    if isinstance(declared, FindingType)
]
ADVICE: dict[str, FindingType] = {
    one.name: one
    for one in sorted(
        _DECLARED, key=lambda one: (SEVERITIES.index(one.severity), one.kind == "trace")
    )
}
"""All types of findings by name, the most urgent first."""

_URGENCY = {name: number for number, name in enumerate(ADVICE)}


def in_order(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, the most urgent first."""
    return tuple(
        sorted(found, key=lambda one: (SEVERITIES.index(one.severity), _URGENCY[one.advice.name]))
    )


def most_severe(found: Iterable[Finding]) -> Severity | None:
    """Return the highest severity; None without findings."""
    return min((one.severity for one in found), key=SEVERITIES.index, default=None)
