"""How long Prometheus works for one look at a dashboard of a whole fleet.

    python -m bench.dashboards [--hosts 200] [--hours 6] [--dashboard mps-fleet]

The hosts are made of real ones: each has the series that a recorded host had at some moment, as
the exporter gives them, with counters that grow and gauges that stay. Prometheus gets them by
promtool, and is asked what the dashboard asks, one question after the other: panels, variables and
annotations.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from grafana.__main__ import DASHBOARDS
from grafana.promql import metrics_in
from mps_exporter.metrics.content_format import TEXT_0_0_4
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.metrics.render import Build, render
from testing.dashboards import filled, load, panels, targets, variable_selector, variables
from testing.player import RECORDINGS, Player
from testing.ports import free_port
from testing.prometheus_programs import program
from testing.prometheus_server import JOB, Prometheus, programs, start, until_ready

SCRAPE_SECONDS = 30
PIXELS = 1400
KINDS = ("quiet", "limits", "wait-served", "three-users", "fault-held", "context-limit")
"""Recorded hosts, and all hosts of the fleet are like one of them; the last has 48 clients."""
_LINE = re.compile(r"(\w+?)(?:\{(.*)\})? (\S+)")


async def page(recording: str) -> list[tuple[str, str, float]]:
    """Give (metric, labels, value) of a recorded host, in the midst of its recording."""
    player = Player(RECORDINGS / f"{recording}.rec.gz")
    header = player.recording.header
    middle = (header.started_at + player.recording.ended_at) / 2
    metrics = await player.to(middle)
    text = (
        Encoder().encode(render(metrics.snapshot, Build("bench", "", "")), [], TEXT_0_0_4).decode()
    )
    lines = (_LINE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))
    return [(line[1], line[2] or "", float(line[3])) for line in lines if line]


def series_text(
    name: str, labels: str, value: float, moments: Iterable[int], now: int
) -> Iterator[str]:
    """Give a series as OpenMetrics: a counter gains something at some of its moments."""
    counts = name.endswith(("_total", "_bucket", "_count", "_sum"))
    # A timestamp that stood still for six hours would be a wait of six hours.
    stamp = name.endswith("_timestamp_seconds")
    joined = f"{name}{{{labels}}}"
    for moment in moments:
        if counts and random.random() < 0.02:
            value += 1
        yield f"{joined} {now - 60 if stamp else value} {moment}\n"


def write_fleet(
    file: TextIO,
    kinds: list[list[tuple[str, str, float]]],
    hosts: int,
    hours: float,
    used: set[str],
) -> tuple[int, int]:
    """Write all hosts; gives the number of series, and of samples.

    What the dashboard asks for is there all the time, the rest for the last half hour: other
    series cost a query nothing but the search for its own.
    """
    now = int(time.time())
    often = range(now - int(hours * 3600) - 3600, now, SCRAPE_SECONDS)
    seldom = range(now - 1800, now, 300)
    series = samples = 0
    for host in range(hosts):
        kind = kinds[host % len(kinds) if host % 10 == 0 else host % (len(kinds) - 1)]
        target = f'job="{JOB}",instance="host{host:03}:9400"'
        for name, labels, value in (*kind, ("up", "", 1.0)):
            moments = often if name in used else seldom
            file.writelines(
                series_text(name, ",".join(filter(None, (target, labels))), value, moments, now)
            )
            series += 1
            samples += len(moments)
    file.write("# EOF\n")
    return series, samples


def used_by(dashboard: str) -> set[str]:
    """Give the names of series that the dashboard asks for."""
    used = {"up", "mps_exporter_build_info"}
    for target in targets():
        if target.dashboard == dashboard:
            names = metrics_in(target.expr)
            used |= {f"{name}{end}" for name in names for end in ("", "_bucket", "_sum", "_count")}
    return used


def questions(
    dashboard: str, hours: float, now: float
) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Give (what asks, API path, parameters) of one look at a dashboard."""
    seconds = int(hours * 3600)
    step = max(SCRAPE_SECONDS, seconds // PIXELS)
    board = load(DASHBOARDS / f"{dashboard}.json")
    since = now - seconds
    for variable in variables(board):
        selector = filled(variable_selector(variable["query"]))
        yield f"${variable['name']}", "series", {"match[]": selector, "start": since, "end": now}
    for annotation in board["annotations"]["list"]:
        if "expr" in annotation:
            requested = {
                "query": filled(annotation["expr"]),
                "start": since,
                "end": now,
                "step": 30,
            }
            yield annotation["name"], "query_range", requested
    for panel in panels(board):
        least = {"": 0, "1m": 60}[panel.get("interval", "")]
        pace = max(step, least, seconds // panel.get("maxDataPoints", PIXELS))
        values = {
            "__interval": f"{pace}s",
            "__rate_interval": f"{max(4 * SCRAPE_SECONDS, pace)}s",
            "__range": f"{seconds}s",
            "__range_s": str(seconds),
        }
        for target in panel["targets"]:
            expr = filled(target["expr"], **values)
            name = f"{panel['title']} {target['refId']}"
            if target["instant"]:
                yield name, "query", {"query": expr, "time": now}
            else:
                requested = {"query": expr, "start": since, "end": now, "step": pace}
                yield name, "query_range", requested


def look(prometheus: Prometheus, dashboard: str, hours: float) -> dict[str, float]:
    """Ask everything once; gives the seconds of each."""
    taken: dict[str, float] = {}
    for name, path, parameters in questions(dashboard, hours, time.time()):
        began = time.perf_counter()
        prometheus.api(path, **parameters)
        taken[name] = time.perf_counter() - began
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--hours", type=float, default=6)
    parser.add_argument("--dashboard", default="mps-fleet")
    parser.add_argument("--program", default="prometheus3", help="or prometheus, the older")
    options = parser.parse_args()
    random.seed(1)
    kinds = [asyncio.run(page(name)) for name in KINDS]
    with tempfile.TemporaryDirectory() as place, programs() as started:
        folder = Path(place)
        with (folder / "fleet.om").open("w") as file:
            used = used_by(options.dashboard)
            series, samples = write_fleet(file, kinds, options.hosts, options.hours, used)
        print(f"{options.hosts} hosts, {series} series, {samples} samples; loading them ...")
        subprocess.run(
            [
                program("promtool"),
                "tsdb",
                "create-blocks-from",
                "openmetrics",
                "--quiet",
                folder / "fleet.om",
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
                program(options.program),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--storage.tsdb.retention.time=10y",
                f"--web.listen-address={address}",
            )
        )
        until_ready(f"http://{address}/-/ready")
        looks = [look(Prometheus(address), options.dashboard, options.hours) for _ in range(4)]
    names = looks[0].keys()
    # The first look warms what any later one finds warm.
    median = {name: statistics.median(taken[name] for taken in looks[1:]) for name in names}
    for name, seconds in sorted(median.items(), key=lambda pair: -pair[1])[:12]:
        print(f"{seconds * 1000:8.0f} ms  {name}")
    print(f"all {len(names)} questions of {options.dashboard}, one after the other: ", end="")
    print(f"{sum(median.values()):.2f} s (first look: {sum(looks[0].values()):.2f} s)")


if __name__ == "__main__":
    main()
