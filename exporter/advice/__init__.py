"""What an expert would say about this host: findings, each with evidence, reason and remedy.

One table feeds ``mps-exporter doctor``, the metric mps_advice and the notes of the status page.
Pure: a snapshot in, findings out. The remedies are for a person to run: the exporter changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from exporter.advice.blindness import of_host, unseen
from exporter.advice.daemons import of_daemon
from exporter.advice.gpus import of_gpu
from exporter.advice.news import of_incidents
from exporter.advice.table import ADVICE, Advice, Finding, Severity
from exporter.model import Snapshot
from exporter.people import People
from exporter.words import Who

__all__ = [
    "ADVICE", "Advice", "Finding", "Severity", "findings", "in_order", "news", "unseen", "worst",
]  # fmt: skip


def findings(snapshot: Snapshot, who: Who | None = None) -> tuple[Finding, ...]:
    """All that applies now, the most urgent first.

    Args:
        snapshot: The host.
        who: How users are called; by default as the host itself names them.
    """
    who = who or People(snapshot)
    found = [
        *(one for daemon in snapshot.daemons for one in of_daemon(daemon, snapshot.taken_at, who)),
        *(one for gpu in snapshot.gpus for one in of_gpu(gpu, snapshot, who)),
        *of_host(snapshot),
    ]
    return in_order(found)


def news(snapshot: Snapshot, who: Who | None = None) -> tuple[Finding, ...]:
    """What went wrong a moment ago: told to people, while metrics have counters for it."""
    who = who or People(snapshot)
    found = [
        one for daemon in snapshot.daemons for one in of_incidents(daemon, snapshot.taken_at, who)
    ]
    return in_order(found)


def worst(found: tuple[Finding, ...]) -> Severity | None:
    """The most severe of them; None where there are none."""
    severities: tuple[Severity, ...] = ("critical", "warning", "info")
    there = {finding.advice.severity for finding in found}
    return next((severity for severity in severities if severity in there), None)


_ORDER = list(ADVICE)


def in_order(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """The most urgent first."""
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.advice.name)))
