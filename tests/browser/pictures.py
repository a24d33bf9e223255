"""Draws the status page of recorded hosts: ``python -m tests.browser.pictures [FOLDER [NAME...]]``.

Into FOLDER: each situation in 1400 and 390 pixels, light and dark, for a person. Without arguments:
the pictures of docs/images, and with --film the film there, of terminal and page.
"""

import argparse
import asyncio
import html
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from mps_exporter.snapshot import RecordingInfo, Snapshot
from testing import snapshots
from testing.devtools import Page, browser
from testing.player import RECORDINGS, Player
from testing.program import running
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import served

Screen = tuple[int, int, bool]  # Width, height, and whether dark.

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
DESK, DARK, PHONE = (1200, 800, False), (1200, 800, True), (360, 740, False)
FILM = (960, 860)
CHAPTER = "document.querySelector('[aria-current]').textContent"
TERMINAL = (
    "data:text/html;charset=utf-8,<body style='background:%23161b22;margin:20px'>"
    "<pre style='color:%23e6edf3;font:13px/1.5 monospace;white-space:pre-wrap'>"
)
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
"""Situation -> recording, seconds."""
MADE_UP = {
    "clients-8x48": snapshots.full,
    "no-gpu": snapshots.without_gpu,
    "blind": snapshots.logs_unreadable,
}
DOCUMENTED = {
    "status-wait.png": (*RECORDED["wait"], DESK),
    "status-fault.png": (*RECORDED["fault"], DESK),
    "status-crash.png": (*RECORDED["crash"], DESK),
    "status-ghost.png": (*RECORDED["ghost"], DESK),
    "status-limits-dark.png": ("limits", 8, DARK),
    "status-phone.png": (*RECORDED["wait"], PHONE),
    "scenario-training-direct.png": ("training-10-direct", 10, DESK),
    "scenario-training-mps.png": ("training-10-mps", 5, DESK),
    "scenario-streams-mps.png": ("streams", 25, DESK),
    "scenario-percentages.png": ("percentages", 17, DESK),
    "scenario-data-parallel-direct.png": ("data-parallel", 18, DESK),
    "scenario-data-parallel-mps.png": ("data-parallel", 27, DESK),
    "scenario-containers.png": ("containers", 12, DESK),
    "scenario-three-users.png": ("three-users", 2.5, DESK),
    "scenario-starved.png": ("starved", 4.5, DESK),
    "scenario-stranded.png": ("stranded", 2, DESK),
}
"""Picture of the documents -> recording, seconds, screen."""


async def played(name: str, seconds: float, step_seconds: float = 2.0) -> list[Snapshot]:
    """Return collections of a recording from its beginning on, the last at this second."""
    player = Player(RECORDINGS / f"{name}.rec.gz")
    header = player.recording.header
    info = RecordingInfo(header, played_from=header.started_at)
    found = []
    moment = 0.0
    while moment < seconds:
        moment = min(moment + step_seconds, seconds)
        metrics = await player.to(header.started_at + moment)
        found.append(replace(metrics.snapshot, recording=info))
    return found


async def draw(found: Sequence[Snapshot], files: Mapping[Path, Screen]) -> None:
    """Draw the page after these collections into files."""
    backend = FakeBackend(snapshot=found[-1], earlier=found)
    async with served(backend) as (shown, _), browser() as page:
        for file, (width, height, dark) in files.items():
            await page.look(width, height, dark=dark)
            await page.open(f"http://{shown[0]}/")
            await page.screenshot(file)
            high = await page.evaluate("document.documentElement.scrollHeight")
            print(f"{file}, {high} px high", *page.complaints)


async def film() -> None:
    """Film the demo in a terminal, its page until it repeats, and the doctor on its first wait."""
    shots: list[str] = []  # arguments of the encoder
    doctor = ("mps-exporter", "doctor", "--recording", "tests/recordings/tour.rec.gz", "--at=40")
    said = subprocess.run(doctor, capture_output=True, text=True, check=False).stdout

    async def shoot(page: Page, milliseconds: int) -> None:
        file = Path(folder) / f"{len(shots):05}.png"
        await page.screenshot(file, FILM[1])
        shots.extend(("-d", str(milliseconds), str(file)))

    async def terminal(page: Page, command: str, output: str, milliseconds: int) -> None:
        await page.open(TERMINAL + quote(html.escape(f"$ {command}\n{output}")))
        await shoot(page, milliseconds)

    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), "demo") as demo, browser() as page:
            await page.look(*FILM)
            lines = next(Path(folder).glob("exporter-*.log")).read_text().splitlines()
            words = "\n".join(line for line in lines if not line.startswith("time="))
            await terminal(page, "mps-exporter demo", "", 500)
            await terminal(page, "mps-exporter demo", words, 1300)
            await page.open(demo.url)
            before = ""
            while "limits" not in await page.evaluate(CHAPTER):
                headline = await page.evaluate("headline.textContent.replace(/[0-9]+/g, '')")
                await shoot(page, 200 if headline == before else 900)
                before = headline
                await asyncio.sleep(4)
            await terminal(page, " ".join(doctor), said, 2500)
        encode = ("img2webp", "-loop", "0", "-mixed", "-q", "55", *shots)
        subprocess.run((*encode, "-o", str(IMAGES / "demo.webp")), check=True)


async def main(folder: Path | None, names: Sequence[str]) -> None:
    if folder is None:
        for name, (recording, seconds, screen) in DOCUMENTED.items():
            await draw(await played(recording, seconds), {IMAGES / name: screen})
        return
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
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--film", action="store_true")
    parser.add_argument("names", nargs="*", help="situations; all of them by default")
    arguments = parser.parse_args()
    asyncio.run(film() if arguments.film else main(arguments.folder, arguments.names))
