"""Findings about this host, each with evidence, reason and remedy.

One table feeds ``mps-exporter doctor``, the metric mps_advice and the findings of the status page.
Pure: a snapshot in, findings out. Remedies are commands for the operator: the exporter changes
nothing on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from mps_exporter.diagnostics.daemons import daemon_findings
from mps_exporter.diagnostics.finding import SEVERITIES, Advice, Finding, Severity
from mps_exporter.diagnostics.finding_titles import ADVICE
from mps_exporter.diagnostics.gpus import gpu_findings
from mps_exporter.diagnostics.incidents import incident_findings
from mps_exporter.diagnostics.visibility import host_visibility_findings, unseen
from mps_exporter.humanize import UserNameLookup
from mps_exporter.observations import DaemonConditions
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
    "recent_incidents",
    "unseen",
]


def findings(snapshot: Snapshot, name_of: UserNameLookup | None = None) -> tuple[Finding, ...]:
    """All that applies now, the most urgent first.

    Args:
        snapshot: The host.
        name_of: Maps UIDs to names; by default those of the host itself.
    """
    name_of = name_of or _names_of(snapshot)
    found = [
        *(
            one
            for daemon in snapshot.daemons
            for one in daemon_findings(daemon, snapshot.taken_at, name_of)
        ),
        *(one for gpu in snapshot.gpus for one in gpu_findings(gpu, snapshot, name_of)),
        *host_visibility_findings(snapshot),
    ]
    return in_order(found)


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
    name_of = name_of or _names_of(snapshot)
    found = [
        one
        for daemon in snapshot.daemons
        for one in incident_findings(
            daemon, snapshot, name_of, (views or {}).get(daemon.pipe_directory)
        )
    ]
    return in_order(found)


def _names_of(snapshot: Snapshot) -> UserNameLookup:
    """Map UIDs to this host's user names; they are looked up when the first one is needed."""
    names = cache(lambda: UserNames(snapshot))

    def name_of(uid: int | None) -> str:
        return names()(uid)

    return name_of


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
