"""Programs that a test runs to their end."""

import subprocess
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[1]


def output_of(
    *command: object, check: bool = False, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its output as text.

    Args:
        command: Words of the command line: texts and paths.
        check: Whether to raise CalledProcessError for another status than 0.
        settings: Further arguments of subprocess.run().
    """
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=check, **settings)
