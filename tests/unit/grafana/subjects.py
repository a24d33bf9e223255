"""In which recording each panel shows something: subjects.md has the table, tests read it."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).with_name("subjects.md")
EVERY = "every recording"

_HEADING = re.compile(r"^## .*`(mps-\w+)`$", re.MULTILINE)
_PANEL = re.compile(r"^\| (?!Panel |---)(.+?) \| (.+?) \|$", re.MULTILINE)


def subjects() -> list[tuple[str, str, str]]:
    """(dashboard, panel, recording), in the document's order."""
    parts = _HEADING.split(DOCUMENT.read_text("utf-8"))
    return [
        (dashboard, panel, recording)
        for dashboard, text in zip(parts[1::2], parts[2::2], strict=True)
        for panel, recording in _PANEL.findall(text)
    ]
