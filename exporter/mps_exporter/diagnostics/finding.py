"""What a finding is: a kind of problem, where it was seen, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning", "info"]


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
    folder: str = ""
    """One on this host that has to be opened to servers."""

    @property
    def evidence(self) -> str:
        """What was seen."""
        return self.texts()[0]

    @property
    def remedy(self) -> str:
        """What to do."""
        return self.texts()[1]
