"""Opens dashboards in Chromium, takes pictures, and reads the content of each panel."""

import asyncio
import base64
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from grafana.style import Json
from testing.devtools import Page

DRAWN_SECONDS = 60.0  # Time allowed for panels to load on a busy machine.
SETTLED_SECONDS = 1.5
MOST_MARKS = 40
"""Maximum number of annotations: more hide the curves of a graph of a third of a screen."""
WIDTH = 1400
HIGHEST = 6000  # Maximum height of a dashboard with all rows opened, in pixels.

OPEN_ALL_ROWS = """(() => {
  const closed = [...document.querySelectorAll(
    '[data-testid^="data-testid dashboard-row-title"], [data-testid^="dashboard-row-title"]')]
    .map((title) => title.closest('button') ?? title)
    .filter((button) => button.getAttribute('aria-label') === 'Expand row'
      || button.getAttribute('aria-expanded') === 'false');
  closed.forEach((button) => button.click());
  return closed.length;
})()"""

LOADING = """document.querySelectorAll('[aria-label="Panel loading bar"]').length"""

PANELS = """[...document.querySelectorAll('section[data-testid^="data-testid Panel header"]')]
  .map((panel) => {
    const title = panel.querySelector('h2, h3, h6');
    const content = panel.querySelector('[data-testid="data-testid panel content"]');
    const badge = panel.querySelector('[data-testid="data-testid Panel status error"]');
    const words = document.createRange();
    if (title) words.selectNodeContents(title);
    const at = panel.getBoundingClientRect();
    const drawn = (panel.querySelector('canvas') ?? content ?? panel).getBoundingClientRect();
    return {
      title: (title?.title || title?.textContent
        || panel.dataset.testid.replace('data-testid Panel header ', '')).trim(),
      cut: !!title && (title.scrollWidth > title.clientWidth
        || words.getBoundingClientRect().width > title.getBoundingClientRect().width),
      error: badge ? badge.getAttribute('aria-label') || 'error' : '',
      marks: panel.querySelectorAll('[data-testid="data-testid annotation-marker"]').length,
      text: (content ?? panel).innerText.replace(/\\s+/g, ' ').trim().slice(0, 300),
      bottom: Math.round(at.bottom),
      area: [drawn.left, drawn.top, drawn.width, drawn.height].map(Math.round),
    };
  })"""

BLANK = """(async () => {
  const bytes = Uint8Array.from(atob('%s'), (letter) => letter.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes], {type: 'image/png'}));
  const paper = new OffscreenCanvas(picture.width, picture.height)
    .getContext('2d', {willReadFrequently: true});
  paper.drawImage(picture, 0, 0);
  return %s.map(([x, y, width, height]) => {
    if (!width || !height) return true;
    const pixels = new Uint32Array(paper.getImageData(x, y, width, height).data.buffer);
    return pixels.every((pixel) => pixel === pixels[0]);
  });
})()"""
"""Whether each of these rectangles of a picture has only one colour."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The content of a panel."""

    dashboard: str
    panel: str
    error: str
    cut: bool
    blank: bool  # The picture shows nothing where the panel's content should be.
    text: str
    marks: int = 0  # Number of annotations drawn over the panel.

    @property
    def faults(self) -> Iterator[str]:
        """Yield the panel's faults."""
        if self.error:
            yield f"error badge: {self.error}"
        if self.cut:
            yield "title cut"
        if self.marks > MOST_MARKS:
            yield f"covered by {self.marks} annotations"
        if self.blank:
            yield "blank in the picture"
        if self.text.startswith(("Data does not have", "Data is missing", "An unexpected error")):
            yield f"reads as an error: {self.text}"


@dataclass(frozen=True, slots=True)
class Shot:
    """A dashboard with its choices."""

    dashboard: str
    name: str
    choices: str = ""  # Further parameters of the URL: var-instance=... and others.
    period: str = "now-1h"

    def url(self, address: str) -> str:
        """Return the URL that a user would open."""
        more = f"&{self.choices}" if self.choices else ""
        return (
            f"{address}/d/{self.dashboard}?orgId=1&from={self.period}&to=now&refresh=&theme=dark"
            f"{more}"
        )


async def look(
    tab: Page, shot: Shot, address: str, folder: Path, width: int = WIDTH
) -> list[Sight]:
    """Take a picture of the dashboard as it opens, then with all rows opened; read the panels."""
    # Grafana draws only what is in the window: so the window is as high as any dashboard.
    await tab.look(width, HIGHEST, dark=True)
    await tab.open(f"{address}/robots.txt")
    for key in ("docked", "open"):
        await tab.evaluate(f"localStorage.setItem('grafana.navigation.{key}', 'false')")
    await tab.open(shot.url(address))
    sights = await _picture(tab, shot, folder / f"{shot.name}.png")
    if await tab.evaluate(OPEN_ALL_ROWS):
        opened = await _picture(tab, shot, folder / f"{shot.name}-open.png")
        # What is wrong as it opens is not hidden by what is right later.
        sights = [*(sight for sight in sights if any(sight.faults)), *opened]
    return sights


async def _picture(tab: Page, shot: Shot, path: Path) -> list[Sight]:
    """Take the picture until each panel is drawn in it, or DRAWN_SECONDS are over."""
    deadline = time.monotonic() + DRAWN_SECONDS
    still, before = 0, -1
    while True:
        await asyncio.sleep(SETTLED_SECONDS / 3)
        panels = await tab.evaluate(PANELS)
        is_late = time.monotonic() > deadline
        loading = await tab.evaluate(LOADING)
        still = still + 1 if panels and len(panels) == before and not loading else 0
        before = len(panels)
        if still < 4 and not is_late:
            continue
        bottom = max((each["bottom"] for each in panels), default=900)
        await tab.screenshot(path, min(HIGHEST, bottom + 16))
        sights = await _sights(tab, shot, panels, path)
        # A slow query shows a button next to the title, which is cut meanwhile.
        if is_late or not any(True for sight in sights for _ in sight.faults):
            return sights


async def _sights(tab: Page, shot: Shot, panels: list[Json], path: Path) -> list[Sight]:
    picture = base64.b64encode(path.read_bytes()).decode()
    areas = [panel["area"] for panel in panels]
    blank = await tab.evaluate(BLANK % (picture, areas))
    return [
        Sight(
            dashboard=shot.dashboard,
            panel=panel["title"],
            blank=is_blank,
            **{name: panel[name] for name in ("error", "cut", "text", "marks")},
        )
        for panel, is_blank in zip(panels, blank, strict=True)
    ]


def _matters(complaint: str) -> bool:
    """Return False for what Grafana itself causes: cookies, labels of forms, software graphics."""
    return not re.search(r"^issue:|WebGL|favicon\.ico", complaint)


def report(sights: Iterable[Sight], complaints: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return a line for each panel, and the faults."""
    lines, faults = [], []
    for sight in sights:
        drawn = "blank" if sight.blank else "drawn"
        lines.append(f"{drawn} {sight.panel}: {sight.text[:100]}")
        faults += [f"{sight.dashboard} / {sight.panel}: {fault}" for fault in sight.faults]
    return lines, [*faults, *(f"console: {each}" for each in complaints if _matters(each))]
