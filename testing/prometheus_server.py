"""A real Prometheus that scrapes exporters, each of which replays a recorded host.

Or that has, at once, what it would have scraped: backfilled() plays recordings with a clock of its
own, so nobody waits, and nothing depends on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mps_exporter.metrics import Build, render
from mps_exporter.metrics.exposition import TEXT_0_0_4, Encoder
from mps_exporter.snapshot import RecordingInfo
from testing.dashboards import Target, filled
from testing.player import RECORDINGS, Player
from testing.ports import free_port
from testing.prometheus_programs import program
from testing.waiting import PATIENCE_SECONDS, wait_for

SCRAPE_SECONDS = 0.5
STARTUP_SECONDS = 60
JOB = "mps-exporter"


Series = tuple[dict[str, str], list[float]]


@dataclass(frozen=True)
class Window:
    """When, by Prometheus's clock, a recording was replayed."""

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


class Prometheus:
    """A Prometheus under way, to be asked."""

    def __init__(self, address: str) -> None:
        self.address = address

    def api(self, path: str, **parameters: object) -> Any:
        """Give the data of an answer."""
        url = f"http://{self.address}/api/v1/{path}"
        body = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(url, body, timeout=PATIENCE_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as failure:
            raise AssertionError(f"{failure.read().decode()}\n{parameters}") from failure

    def moment(self, expr: str, at: float) -> list[Series]:
        """Ask for one moment."""
        found = self.api("query", query=expr, time=at)["result"]
        return [(series["metric"], [float(series["value"][1])]) for series in found]

    def span(self, expr: str, window: Window, step: float = SCRAPE_SECONDS) -> list[Series]:
        """Ask for points from start to end."""
        found = self.api("query_range", query=expr, start=window.start, end=window.end, step=step)[
            "result"
        ]
        return [
            (series["metric"], [float(value) for _, value in series["values"]]) for series in found
        ]

    def target(self, target: Target, window: Window, **choices: str) -> list[Series]:
        """Ask what a panel asks, with these choices at the top of its dashboard.

        What a panel asks for one moment is asked for each moment of the window.
        """
        return self.span(filled(target.expr, **window.variables, **{"job": JOB, **choices}), window)

    def at_end(self, target: Target, window: Window, **choices: str) -> list[Series]:
        """Ask what a panel asks, for the end of the window."""
        expr = filled(target.expr, **window.variables, **{"job": JOB, **choices})
        return self.moment(expr, window.end)


@contextlib.contextmanager
def programs() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of processes that end when the block does."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(folder: Path, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
    """Start a program that writes to a log of this name."""
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)


def until_ready(url: str) -> None:
    """Wait until a server says that it is."""

    def ready() -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=PATIENCE_SECONDS).close()  # noqa: S310, to 127.0.0.1
            return True
        return False

    wait_for(ready)


GONE = "up 0\n"
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")

OF_THE_SCRAPE = (
    "up 1\nscrape_duration_seconds 0.01\nscrape_samples_scraped 500\n"
    "process_cpu_seconds_total {cpu:g}\nprocess_resident_memory_bytes 50e6\n"
)
"""What Prometheus adds, and the exporter says of itself."""


@dataclass(frozen=True)
class Scrapes:
    """What a host showed, and when (Unix time)."""

    instance: str
    pages: tuple[tuple[float, str], ...]

    @property
    def seen_until(self) -> float:
        """When it was there for the last time."""
        return max(at for at, page in self.pages if page != GONE)

    def lines(self) -> Iterator[str]:
        """OpenMetrics, with timestamps."""
        target = f'job="{JOB}",instance="{self.instance}"'
        for at, page in self.pages:
            for line in page.splitlines():
                if found := _SAMPLE.fullmatch(line):
                    labels = ",".join(filter(None, (target, found[2])))
                    yield f"{found[1]}{{{labels}}} {found[3]} {at:.3f}\n"


async def scrapes_of(name: str, began: float, gone_seconds: float = 10.0) -> Scrapes:
    """Play a recording as if it began at this moment, and scrape it; after its end it is gone."""
    player = Player(RECORDINGS / f"{name}.rec.gz")
    header = player.recording.header
    info = RecordingInfo(
        scenario=header.scenario,
        machine=header.machine,
        driver_version=header.driver_version,
        recorded_at=header.recorded_at,
        speed=1.0,
        loop=1,
    )
    seconds = player.recording.ended_at - header.started_at
    pages = []
    for step in range(int((seconds + gone_seconds) / SCRAPE_SECONDS)):
        moment = step * SCRAPE_SECONDS
        if moment >= seconds:
            pages.append((began + moment, GONE))
            continue
        metrics = await player.to(header.started_at + moment)
        families = render(
            replace(metrics.snapshot, recording=info),
            Build("test", "", ""),
            wall=lambda at: began + at - header.started_at,
        )
        text = Encoder().encode(families, [], TEXT_0_0_4).decode()
        pages.append((began + moment, text + OF_THE_SCRAPE.format(cpu=moment / 100)))
    return Scrapes(name, tuple(pages))


def backfilled(
    folder: Path, started: list[subprocess.Popen[bytes]], hosts: Iterable[Scrapes]
) -> Prometheus:
    """A Prometheus that knows what these hosts showed, and evaluates no rules."""
    with (folder / "scraped.om").open("w") as file:
        for host in hosts:
            file.writelines(host.lines())
        file.write("# EOF\n")
    subprocess.run(
        [
            program("promtool"),
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            "--quiet",
            folder / "scraped.om",
            folder / "data",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (folder / "prometheus.yml").write_text("global: {}\n")
    address = f"127.0.0.1:{free_port()}"
    started.append(
        start(
            folder,
            "prometheus",
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            # No scrape failed, and nobody marks the end of a series: what is older has gone.
            f"--query.lookback-delta={2 * SCRAPE_SECONDS:g}s",
            f"--web.listen-address={address}",
        )
    )
    until_ready(f"http://{address}/-/ready")
    return Prometheus(address)
