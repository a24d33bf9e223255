"""Measures the status page in Chromium beside a replay: ``python -m tests.browser.measure``.

How long after a crash in a recording the open page shows it, and whether the page's DOM and heap
grow (``--minutes``). For a person to run; no test asserts how fast something is.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from testing.devtools import Page, browser
from testing.program import running

WATCH = """
window.seen = 0;
const texts = () => document.querySelector('.events').textContent;
let clear = false; // the page may be opened after the crash: then the next round counts
const shown = new MutationObserver(() => {
  if (!texts().includes('crashed;')) clear = true;
  else if (clear && !window.seen) window.seen = Date.now();
});
shown.observe(document.body, {childList: true, subtree: true, characterData: true});
window.said = 0;
const stream = new EventSource('api/v1/events');
stream.addEventListener('incident', (event) => {
  const incident = JSON.parse(event.data);
  if (clear && !window.said && incident.kind === 'server_crashed') window.said = Date.now();
});
"""


async def crash_latency() -> None:
    """Replay a crash beside an open page."""
    recording = "tests/recordings/server-killed.rec.gz"
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), "demo", recording) as program, browser() as page:
            await page.open(f"{program.url}/")
            await page.evaluate(WATCH)
            while not await page.evaluate("window.seen && window.said"):
                await asyncio.sleep(0.05)
            _, text = await program.get("/metrics")
            found = re.search(
                r'mps_server_last_exit_timestamp_seconds\{[^}]*cause="crashed"[^}]*\} (\S+)', text
            )
            assert found is not None
            # The metric is mapped to the viewer's clock; the page is written in that of the loop.
            crashed = float(found[1])
            seen = await page.evaluate("window.seen") / 1000
            said = await page.evaluate("window.said") / 1000
            if seen < crashed:
                return  # the replay began again before the metric was read
            sys.stdout.write(
                f"from the crash to the event stream {1000 * (said - crashed):.0f} ms, "
                f"to its appearance on the page {1000 * (seen - crashed):.0f} ms\n"
            )


async def size(page: Page) -> tuple[int, float]:
    """DOM nodes and the JavaScript heap in MB, after a collection of garbage."""
    await page.call("HeapProfiler.collectGarbage")
    counters = await page.call("Memory.getDOMCounters")
    metrics = (await page.call("Performance.getMetrics"))["metrics"]
    heap = next(one["value"] for one in metrics if one["name"] == "JSHeapUsedSize")
    return counters["nodes"], heap / 1e6


async def growth(minutes: float) -> None:
    """Leave the page open beside a busy replay."""
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), "demo", "--speed=4") as program, browser() as page:
            await page.open(f"{program.url}/")
            await page.call("Performance.enable")
            while True:
                nodes, heap = await size(page)
                stamp = datetime.now().strftime("%H:%M:%S")  # noqa: DTZ005 - for a person
                sys.stdout.write(f"{stamp} nodes {nodes}, heap {heap:.2f} MB\n")
                sys.stdout.flush()
                if time.monotonic() > end:
                    break
                await asyncio.sleep(min(60.0, max(1.0, 60 * minutes / 10)))
            sys.stdout.write(f"complaints: {page.complaints}\n")


async def main(rounds: int, minutes: float) -> None:
    """Measure and tell."""
    for _ in range(rounds):
        await crash_latency()
    if minutes:
        await growth(minutes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="crashes to replay")
    parser.add_argument("--minutes", type=float, default=0.0, help="how long to watch for growth")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.rounds, arguments.minutes))
