"""The pages in docs/symptoms: a page for each error text or hang that users report.

Each page begins with its title and a comment, ``<!-- symptom``, with one ``key: values`` on a line:
kind (one of KINDS), its findings and alerts, the public threads that report it, and the recordings
of real hosts on which a finding of the page appears.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "symptoms"

KINDS = {
    "hang": "It hangs",
    "error": "A CUDA error",
    "fault": "Programs die together",
    "start": "MPS does not start or stop",
    "limits": "Limits and speed",
    "accounting": "Monitoring and accounting",
    "log": "A line in the log",
}
_HEADER = re.compile(r"<!-- symptom\n(.*?)-->", re.DOTALL)
_KEYS = ("kind", "findings", "alerts", "reported", "recordings")


class SymptomError(ValueError):
    """A page's header that cannot be read; says which page and why."""


@dataclass(frozen=True)
class Symptom:
    """A page, as its header describes it."""

    name: str
    title: str
    kind: str
    findings: tuple[str, ...]
    alerts: tuple[str, ...]
    reported: tuple[str, ...]
    recordings: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where the page lies."""
        return FOLDER / f"{self.name}.md"


def parse(name: str, text: str) -> Symptom:
    """Read a page's title and header; raises SymptomError."""
    title, header = text.partition("\n")[0], _HEADER.search(text)
    if not title.startswith("# ") or header is None:
        raise SymptomError(f"{name}.md: no title in the first line, or no <!-- symptom header")
    values: dict[str, str] = {}
    for line in header[1].splitlines():
        key, colon, value = line.partition(":")
        if not colon or key not in _KEYS:
            raise SymptomError(f"{name}.md: {line!r} is not one of {', '.join(_KEYS)}")
        values[key] = value.strip()
    if values.get("kind") not in KINDS:
        raise SymptomError(f"{name}.md: kind is not one of {', '.join(KINDS)}")
    words = {key: tuple(values.get(key, "").split()) for key in _KEYS[1:]}
    return Symptom(name, title[2:], values["kind"], **words)


def symptoms() -> list[Symptom]:
    """All pages, by their titles."""
    pages = [path for path in FOLDER.glob("*.md") if path.name != "README.md"]
    found = [parse(path.stem, path.read_text("utf-8")) for path in pages]
    return sorted(found, key=lambda symptom: symptom.title.lower())
