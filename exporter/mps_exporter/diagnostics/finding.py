"""What a finding is: a kind of problem, where it was seen, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mps_exporter.diagnostics.safe_commands import Action

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


def effective_severity(severity: Severity, *, limited: bool) -> Severity:
    """At most a warning for an ordinary user's daemon: any user can break that of his own."""
    return "warning" if limited and severity == "critical" else severity


@dataclass(frozen=True, slots=True)
class Advice:
    """One kind of finding: what it means on any host."""

    name: str
    severity: Severity
    title: str
    why: str
    kind: Literal["state", "blindness", "news", "trace"] = "state"
    """A state of the host, something that this exporter cannot see, something that happened, or
    something that only the doctor looks for."""


Texts = Callable[[], tuple[str, str]]
"""Composes the evidence and the remedy of a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An advice that applies here, with what was seen and what to do, each in sentences.

    The sentences are composed when they are read: a scrape needs none of them. Names that others
    chose (programs, users, paths) are made fit to be shown.
    """

    advice: Advice
    texts: Texts
    daemon: str = ""
    gpu: str = ""
    uuid: str = ""
    since: float | None = None
    offered: tuple[Action, ...] = ()
    """Its commands, where the table has none; only actions() gives them to anyone."""
    limited: bool = False
    """It is about an ordinary user's daemon (DaemonFacts.limited)."""

    @property
    def severity(self) -> Severity:
        """The severity that page, doctor, metric and alert agree on."""
        return effective_severity(self.advice.severity, limited=self.limited)

    @property
    def evidence(self) -> str:
        return self.texts()[0]

    @property
    def remedy(self) -> str:
        return self.texts()[1]
