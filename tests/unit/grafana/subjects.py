"""In which recording each panel shows something: subjects.md has the table, tests read it."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).with_name("subjects.md")
EVERY = "every recording"

_HEADING = re.compile(r"^## .*`(mps-\w+)`$", re.MULTILINE)
_PANEL = re.compile(r"^\| (?!Panel |---|\*\*)(.+?) \| (.+?) \|$", re.MULTILINE)
_ROW = re.compile(r"^\| \*\*(.+?)\*\* \| \|$", re.MULTILINE)


def _found(pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
    """The dashboard of each match, and its groups, in the document's order."""
    parts = _HEADING.split(DOCUMENT.read_text("utf-8"))
    return [
        (dashboard, *found.groups())
        for dashboard, text in zip(parts[1::2], parts[2::2], strict=True)
        for found in pattern.finditer(text)
    ]


def subjects() -> list[tuple[str, ...]]:
    """(dashboard, panel, recording)."""
    return _found(_PANEL)


def questions() -> list[tuple[str, ...]]:
    """(dashboard, row)."""
    return _found(_ROW)
