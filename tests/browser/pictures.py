"""Draws the status page in each situation: ``python -m tests.browser.pictures FOLDER``.

Each situation in 1400 and 390 pixels, light and dark. For a person; no test compares them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from testing import snapshots
from tests.browser.recorded import draw, played

SCREENS = ((1400, 900), (390, 844))
RECORDED = {
    "quiet": ("quiet", 80.0),
    "wait": ("tour", 40.0),
    "clients-48": ("context-limit", 5.0),
    "fault": ("fault-held", 6.0),
    "crash": ("server-killed", 3.0),
    "unfinished-work": ("ending-jobs", 53.2),
    "ghost": ("wait-abandoned-sigkill", 10.0),
}
MADE_UP = {
    "clients-8x48": snapshots.full,
    "no-gpu": snapshots.without_gpu,
    "blind": snapshots.logs_unreadable,
}


async def main(folder: Path, names: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or (*RECORDED, *MADE_UP):
        found = await played(*RECORDED[name]) if name in RECORDED else [MADE_UP[name]()]
        files = {
            folder / f"{name}-{width}-{color}.png": (width, height, color == "dark")
            for width, height in SCREENS
            for color in ("light", "dark")
        }
        await draw(found, files)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="situations; all of them by default")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.folder, arguments.names))
