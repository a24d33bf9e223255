"""Makes pictures of the status page in each situation: ``python -m tests.browser.pictures FOLDER``.

Each situation in 1400 and 390 pixels, light and dark. For a person to look at; tests compare none.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from mps_exporter.snapshot import Snapshot
from testing import snapshots
from testing.devtools import browser
from tests.browser.recorded import played
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import served

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


async def situation(name: str) -> list[Snapshot]:
    """Collections of a situation; the last is what the page shows."""
    if name in RECORDED:
        return await played(*RECORDED[name])
    return [MADE_UP[name]()]


async def main(folder: Path, names: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or (*RECORDED, *MADE_UP):
        found = await situation(name)
        backend = FakeBackend(snapshot=found[-1], earlier=found)
        async with served(backend) as (shown, _), browser() as page:
            for width, height in SCREENS:
                for dark in (False, True):
                    await page.look(width, height, dark=dark)
                    await page.open(f"http://{shown[0]}/")
                    file = folder / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                    await page.screenshot(file)
                    high = await page.evaluate("document.documentElement.scrollHeight")
                    sys.stdout.write(f"{file} {high} px high\n")
            if page.complaints:
                sys.stdout.write(f"{name}: {page.complaints}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="situations; all of them by default")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.folder, arguments.names))
