"""Prints the notes of a version, from CHANGELOG.md: python3 tools/release_notes.py 0.2.0.

Before the version has a section of its own, those are the unreleased changes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def notes(changelog: str, version: str) -> str:
    """Return the section of the version, else that of the unreleased changes."""
    section = re.compile(r"^## (\S+)[^\n]*\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    sections = dict(section.findall(changelog))
    found = sections.get(version) or sections.get("Unreleased")
    if not (found or "").strip():
        raise SystemExit(f"CHANGELOG.md has no section for {version}, and no unreleased changes")
    return str(found).strip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(notes(CHANGELOG.read_text("utf-8"), sys.argv[1]))
