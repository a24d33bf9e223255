"""Draw the dashboards from recordings: python -m grafana.pictures FOLDER.

This is not Grafana: it is what Grafana publishes of itself on npm (its panels' frames, graphs,
numbers, bars and tables, its units and colours), fed with our panels and the answers of a real
Prometheus that scraped replayed recordings. State timelines, heatmaps and all around the panels are
drawn here, as near as they can be. It is good for seeing what reads badly, and for the pictures in
docs/images. Needs node, npm with its registry (the first time), Chromium, and Prometheus.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from grafana.pictures.answers import Asking
from grafana.style import Json
from tests.browser.devtools import browser
from tests.unit.grafana.reading import FILES, load
from tests.unit.grafana.stage import Prometheus, Window, programs, replayed

HERE = Path(__file__).parent
MODULES = HERE.parents[1] / ".tools" / "pictures"
"""Where npm's packages lie: 640 MB that no other tool shall walk through."""
HTML = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="page.css">
<style>body { margin: 0 } [role=grid] { content-visibility: visible !important }</style>
<body><div id="page"></div>
<script>window.__grafana_public_path__ = "/public/"</script>
<script src="draw.js"></script><script type="module" src="page.js"></script>"""
DRAWN_AFTER_SECONDS = 2.5
CUT_TITLES = """[...document.querySelectorAll("section h2")]
  .filter((title) => title.scrollWidth > title.clientWidth).map((title) => title.textContent)"""


class Shot(NamedTuple):
    """What one picture shows: NAME, or NAME@SECONDS for what was seen so far into it."""

    recording: str
    seconds: float

    @classmethod
    def parsed(cls, text: str) -> Shot:
        """Read the command line's form."""
        name, _, seconds = text.partition("@")
        return cls(name, float(seconds or "inf"))

    def window(self, windows: dict[str, Window]) -> Window:
        """The recording's time in Prometheus, or as much of it as is wanted."""
        whole = windows[self.recording]
        return Window(whole.start, min(whole.end, whole.start + 1 + self.seconds))


def bundle(folder: Path) -> None:
    """Put the page's program into a folder; fetches npm's packages where they are missing."""
    if shutil.which("npm") is None:
        raise SystemExit("node and npm are missing: apt-get install nodejs npm")
    MODULES.mkdir(parents=True, exist_ok=True)
    lock = (HERE / "package-lock.json").read_bytes()
    installed = MODULES / "installed-lock.json"
    if not installed.exists() or installed.read_bytes() != lock:
        print("fetching Grafana's components from npm's registry ...", file=sys.stderr)
        for file in ("package.json", "package-lock.json"):
            shutil.copy(HERE / file, MODULES)
        fetched = subprocess.run(
            ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],  # noqa: S607
            cwd=MODULES, check=False,
        )  # fmt: skip
        if fetched.returncode:
            raise SystemExit("npm could not fetch them; without a registry nothing can be drawn")
        installed.write_bytes(lock)
    modules = MODULES / "node_modules"
    subprocess.run(
        [modules / ".bin" / "esbuild", HERE / "page.jsx", f"--outfile={folder / 'page.js'}",
         "--bundle", "--minify", "--format=esm", "--jsx=automatic", "--log-level=error",
         "--loader:.woff2=dataurl", "--loader:.woff=empty", "--loader:.svg=dataurl",
         "--loader:.ttf=empty", '--define:process.env.NODE_ENV="production"'],
        env={**os.environ, "NODE_PATH": str(modules)}, check=True,
    )  # fmt: skip
    (folder / "page.html").write_text(HTML)
    (folder / "public").mkdir()
    (folder / "public" / "build").symlink_to(modules / "@grafana" / "ui" / "dist" / "public")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on 127.0.0.1; gives the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


async def draw(folder: Path, page: Json, name: str, chosen: argparse.Namespace) -> None:
    """Write a dashboard's pictures."""
    (folder / "draw.js").write_text(f"window.DRAW = {json.dumps(page)}", "utf-8")
    with served(folder) as address:
        for width in chosen.width:
            for theme in chosen.theme:
                async with browser() as tab:
                    await tab.look(width, min(900, chosen.height or 900), dark=theme == "dark")
                    await tab.open(f"{address}/page.html?theme={theme}")
                    await asyncio.sleep(DRAWN_AFTER_SECONDS)
                    if chosen.height:
                        height = f"height: {chosen.height}px; overflow: hidden"
                        await tab.evaluate(f"page.style.cssText = '{height}'")
                    path = chosen.folder / f"{name}-{width}-{theme}.png"
                    await tab.screenshot(path)
                    print(path, *await tab.evaluate(CUT_TITLES), sep="\n  cut: ")
                    wrong = [each for each in tab.complaints if each.startswith("exception")]
                    if wrong:
                        raise SystemExit("\n".join(wrong))


def draw_all(
    prometheus: Prometheus, windows: dict[str, Window], chosen: argparse.Namespace
) -> None:
    """Draw what was chosen, from what Prometheus remembers."""
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bundle(Path(folder))
        for text in chosen.recording:
            shot = Shot.parsed(text)
            for file in FILES:
                if file.stem in chosen.dashboard:
                    asking = Asking(prometheus, load(file), shot.recording, shot.window(windows))
                    name = f"{file.stem}-{text.replace('@', '-')}"
                    asyncio.run(draw(Path(folder), asking.page(), name, chosen))


def main(arguments: list[str] | None = None) -> None:
    """Replay, ask, draw."""
    parser = argparse.ArgumentParser(
        prog="python -m grafana.pictures", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="where the pictures go")
    for flag, default, kind, words in (
        ("--dashboard", [file.stem for file in FILES], str, "mps-sharing and so on"),
        ("--recording", ["tour@42", "fault-held", "server-killed"], str, Shot.__doc__),
        ("--width", [1400, 2560], int, "pixels"),
        ("--theme", ["dark", "light"], str, "dark or light"),
    ):
        parser.add_argument(flag, nargs="+", type=kind, default=default, help=words)
    parser.add_argument("--height", type=int, help="pixels from the top; all of it without")
    chosen = parser.parse_args(arguments)
    names = sorted({Shot.parsed(text).recording for text in chosen.recording})
    with tempfile.TemporaryDirectory() as folder, programs() as started:
        prometheus, windows = replayed(
            Path(folder), started, names, {}, at_a_time=len(names), stay=True
        )
        draw_all(prometheus, windows, chosen)


if __name__ == "__main__":
    main()
