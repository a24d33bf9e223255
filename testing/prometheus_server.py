"""A real Prometheus with all that it would have scraped from hosts that replay recordings.

The recordings are played with a clock of their own, so nothing waits, and nothing depends on how
busy the machine is.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mps_exporter.snapshot import RecordingInfo
from testing.dashboards import Target, filled
from testing.page import text_of
from testing.player import RECORDINGS, Player
from testing.prometheus_programs import Prometheus, Series, program, prometheus

SCRAPE_SECONDS = 0.5
JOB = "mps-exporter"


@dataclass(frozen=True)
class Window:
    """Start and end of a replay, in Prometheus' time."""

    start: float
    end: float

    @property
    def variables(self) -> dict[str, str]:
        seconds = str(round(self.end - self.start))
        return {
            "__range": f"{seconds}s",
            "__range_s": seconds,
            "__interval": "500ms",
            "__rate_interval": "4s",
        }


class Scraped(Prometheus):
    def span(self, expr: str, window: Window, step: float = SCRAPE_SECONDS) -> list[Series]:
        """Query the points from start to end."""
        times = {"start": window.start, "end": window.end, "step": step}
        found = self.api("query_range", query=expr, **times)["result"]
        return [
            (series["metric"], [float(value) for _, value in series["values"]]) for series in found
        ]

    def target(self, target: Target, window: Window, **choices: str) -> list[Series]:
        """Query what a panel shows, with these choices at the top of its dashboard.

        A query for one time is sent for each time of the window.
        """
        return self.span(filled(target.expr, **window.variables, **{"job": JOB, **choices}), window)

    def at_end(self, target: Target, window: Window, **choices: str) -> list[Series]:
        """Query what a panel shows at the end of the window."""
        expr = filled(target.expr, **window.variables, **{"job": JOB, **choices})
        return self.moment(expr, window.end)


GONE = "up 0\n"
_SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")

OF_THE_SCRAPE = (
    "up 1\nscrape_duration_seconds 0.01\nscrape_samples_scraped 500\n"
    "process_cpu_seconds_total {cpu:g}\nprocess_resident_memory_bytes 50e6\n"
    "process_start_time_seconds {since}\n"
)
"""Samples that Prometheus adds, and those of the exporter's process."""


@dataclass(frozen=True)
class Scrapes:
    """The pages of a host with their times (Unix time)."""

    instance: str
    pages: tuple[tuple[float, str], ...]

    @property
    def seen_until(self) -> float:
        return max(at for at, page in self.pages if page != GONE)

    def lines(self) -> Iterator[str]:
        """Yield OpenMetrics lines with timestamps."""
        target = f'job="{JOB}",instance="{self.instance}"'
        for at, page in self.pages:
            for line in page.splitlines():
                if found := _SAMPLE.fullmatch(line):
                    labels = ",".join(filter(None, (target, found[2])))
                    yield f"{found[1]}{{{labels}}} {found[3]} {at:.3f}\n"


async def scrapes_of(name: str, began: float) -> Scrapes:
    """Play a recording as if it began at this time, and scrape it; it is gone for 10 s then."""
    player = Player(RECORDINGS / f"{name}.rec.gz")
    header = player.recording.header
    seconds = player.recording.ended_at - header.started_at
    pages = []
    for step in range(int((seconds + 10.0) / SCRAPE_SECONDS)):
        moment = step * SCRAPE_SECONDS
        if moment >= seconds:
            pages.append((began + moment, GONE))
            continue
        metrics = await player.to(header.started_at + moment)
        text = text_of(
            replace(metrics.snapshot, recording=RecordingInfo(header)),
            wall=lambda at: began + at - header.started_at,
        )
        pages.append((began + moment, text + OF_THE_SCRAPE.format(cpu=moment / 100, since=began)))
    return Scrapes(name, tuple(pages))


@contextmanager
def backfilled(folder: Path, hosts: Iterable[Scrapes]) -> Iterator[Scraped]:
    """Run a Prometheus that has scraped these hosts, and evaluates no rules."""
    with (folder / "scraped.om").open("w") as file:
        for host in hosts:
            file.writelines(host.lines())
        file.write("# EOF\n")
    create = ["tsdb", "create-blocks-from", "openmetrics", "--quiet", "scraped.om", "data"]
    subprocess.run(
        [program("promtool"), *create], check=True, stdout=subprocess.DEVNULL, cwd=folder
    )
    # No scrape failed, and nothing marks the end of a series: an older sample is stale.
    lookback = f"--query.lookback-delta={2 * SCRAPE_SECONDS:g}s"
    with prometheus(folder, "global: {}\n", lookback) as found:
        yield Scraped(found.address)
