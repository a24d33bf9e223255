"""Findings about this host, each with evidence, reason and remedy.

One table feeds ``mps-exporter doctor``, the metric mps_advice and the findings of the status page.
Pure: a snapshot in, findings out. Remedies are commands for the operator: the exporter changes
nothing on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mps_exporter.diagnostics import (
    daemons,
    gpus,
    hangs,
    incidents,
    limits,
    processes,
    servers,
    traces,
    visibility,
)
from mps_exporter.diagnostics.finding import SEVERITIES, Advice, Finding, HostFacts, Kind, Severity
from mps_exporter.diagnostics.visibility import unseen
from mps_exporter.humanize import UserNameLookup
from mps_exporter.observations import DaemonConditions, Leftovers
from mps_exporter.snapshot import Snapshot
from mps_exporter.user_names import UserNames

__all__ = [
    "ADVICE",
    "Advice",
    "Finding",
    "Severity",
    "findings",
    "in_order",
    "most_severe",
    "of_web_configuration",
    "recent_incidents",
    "trace_findings",
    "unseen",
]

_BY_URGENCY = (hangs, servers, daemons, gpus, incidents, processes, limits, visibility, traces)

ADVICE: dict[str, Advice] = {
    advice.name: advice
    for severity in SEVERITIES
    for module in _BY_URGENCY
    for advice in vars(module).values()
    if isinstance(advice, Advice) and advice.severity == severity
}
"""Every advice by its name, the most urgent first."""


def _findings_of(host: HostFacts, *kinds: Kind) -> tuple[Finding, ...]:
    return in_order(
        one for advice in ADVICE.values() if advice.kind in kinds for one in advice.found(host)
    )


def findings(snapshot: Snapshot, name_of: UserNameLookup | None = None) -> tuple[Finding, ...]:
    """All that applies now, the most urgent first.

    Args:
        snapshot: The host.
        name_of: Maps UIDs to names; by default those of the host itself.
    """
    return _findings_of(HostFacts(snapshot, name_of or UserNames(snapshot)), "state", "blindness")


def recent_incidents(
    snapshot: Snapshot,
    name_of: UserNameLookup | None = None,
    views: Mapping[str, DaemonConditions] | None = None,
) -> tuple[Finding, ...]:
    """Recent incidents, for the page and the doctor only: metrics have counters for them.

    Args:
        snapshot: The host.
        name_of: As in findings().
        views: Pipe directory -> what was read of a daemon whose servers cannot start.
    """
    return _findings_of(HostFacts(snapshot, name_of or UserNames(snapshot), views or {}), "news")


def trace_findings(traces: Leftovers) -> tuple[Finding, ...]:
    """What the doctor finds beside the daemons."""
    snapshot = Snapshot(0.0)
    return _findings_of(HostFacts(snapshot, UserNames(snapshot), traces=traces), "trace")


def of_web_configuration(error: str) -> tuple[Finding, ...]:
    """The file of --web.config.file was changed, and is invalid."""
    snapshot = Snapshot(0.0)
    host = HostFacts(snapshot, UserNames(snapshot), config_error=error)
    return tuple(visibility.web_configuration_unusable.found(host))


def most_severe(found: tuple[Finding, ...]) -> Severity | None:
    """The most severe of them; None where there are none."""
    there = {finding.severity for finding in found}
    return next((severity for severity in SEVERITIES if severity in there), None)


_ORDER = list(ADVICE)


def in_order(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """The most urgent first."""
    return tuple(
        sorted(
            found, key=lambda one: (SEVERITIES.index(one.severity), _ORDER.index(one.advice.name))
        )
    )
