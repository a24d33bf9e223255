"""Programs that a test runs to their end."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[1]


def output_of(
    *command: str | Path, check: bool = False, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its output as text; settings: those of subprocess.run()."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=check, **settings)
