"""The pages in docs/symptoms: a page for each error text or hang that users report.

Each page begins with its title and a comment, ``<!-- symptom``, with one ``key: values`` on a line:
kind (one of KINDS), its findings and alerts, and the recordings of real hosts on which a finding of
the page appears.
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
_KEYS = ("findings", "alerts", "recordings")


@dataclass(frozen=True)
class Symptom:
    """A page, as its header describes it."""

    name: str
    title: str
    kind: str
    findings: tuple[str, ...]
    alerts: tuple[str, ...]
    recordings: tuple[str, ...]

    @property
    def short_title(self) -> str:
        """The title without further names and forms of the same error."""
        return re.split(r"[,;] | \(", self.title)[0]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.md"


def parse(path: Path) -> Symptom:
    """Read a page's title and header.

    Raises:
        ValueError: One of them is missing, or has an unknown kind or key.
    """
    text = path.read_text("utf-8")
    header = _HEADER.search(text)
    if not text.startswith("# ") or header is None:
        raise ValueError(f"{path.name}: no title in the first line, or no <!-- symptom header")
    values = dict(line.split(":", 1) for line in header[1].splitlines())
    kind = values.pop("kind", "").strip()
    if kind not in KINDS or not values.keys() <= {*_KEYS}:
        raise ValueError(f"{path.name}: the header has kind, one of {', '.join(KINDS)}; {_KEYS}")
    words = {key: tuple(values.get(key, "").split()) for key in _KEYS}
    title = text.partition("\n")[0][2:]
    return Symptom(path.stem, title, kind, **words)


def symptoms() -> list[Symptom]:
    pages = [path for path in FOLDER.glob("*.md") if path.name != "README.md"]
    return sorted(map(parse, pages), key=lambda symptom: symptom.title.lower())
