"""A real Prometheus that scrapes exporters, each of which replays a recorded host."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from exporter.sources.recording import read
from tests.support.player import RECORDINGS
from tests.support.ports import free_port
from tests.unit.grafana.reading import Target, filled
from tests.unit.rules.rulebook import ROOT
from tests.unit.rules.servers import program

SCRAPE_SECONDS = 0.5
STARTUP_SECONDS = 60
JOB = "mps-exporter"

_BEGAN = re.compile(r'time=(\S+) .*msg="starting mps-exporter"')

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
            with urllib.request.urlopen(url, body, timeout=60) as answer:
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
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(folder: Path, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
    """Start a program that writes to a log of this name."""
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)


def until_ready(url: str) -> None:
    """Wait until a server says that it is."""
    deadline = time.monotonic() + STARTUP_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):  # noqa: S310, to 127.0.0.1
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def start_prometheus(
    folder: Path, started: list[subprocess.Popen[bytes]], targets: Mapping[str, str]
) -> Prometheus:
    """Prometheus with our rules; targets maps the label instance to an address."""
    address = f"127.0.0.1:{free_port()}"
    often = f"{int(SCRAPE_SECONDS * 1000)}ms"
    config = {
        "global": {
            "scrape_interval": often, "scrape_timeout": often, "evaluation_interval": "1s",
        },
        "rule_files": [str(ROOT / "rules" / "*.yml")],
        "scrape_configs": [{
            "job_name": JOB,
            "static_configs": [
                {"targets": [target], "labels": {"instance": name}}
                for name, target in targets.items()
            ],
        }],
    }  # fmt: skip
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    started.append(
        start(
            folder, "prometheus", program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        )
    )  # fmt: skip
    until_ready(f"http://{address}/-/ready")
    return Prometheus(address)


def start_replay(
    folder: Path, started: list[subprocess.Popen[bytes]], name: str, port: int
) -> None:
    """An exporter that replays a recording, again and again."""
    started.append(
        start(
            folder, name, sys.executable, "-m", "exporter", "serve",
            "--replay", RECORDINGS / f"{name}.rec.gz",
            "--web.listen-address", f"127.0.0.1:{port}",
            "--mps.min-query-interval", "0",
            "--log.level", "info",
        )
    )  # fmt: skip


def replayed(
    folder: Path,
    started: list[subprocess.Popen[bytes]],
    names: Sequence[str],
    others: Mapping[str, str],
    at_a_time: int = 4,
    *,
    stay: bool = False,
) -> tuple[Prometheus, dict[str, Window]]:
    """Replay recordings once each, a few at a time, and give the times at which that was.

    Others are hosts that are scraped all the time: a name, and an address. Those that stay go on,
    and begin anew, until all have had their turn.
    """
    ports = {name: free_port() for name in names}
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    prometheus = start_prometheus(folder, started, {**addresses, **others})
    began_at = time.time()
    lengths = {}
    for name in names:
        recording = read(RECORDINGS / f"{name}.rec.gz")
        lengths[name] = recording.ended_at - recording.header.started_at
    windows: dict[str, Window] = {}
    waiting = sorted(names, key=lambda name: -lengths[name])
    running: dict[str, subprocess.Popen[bytes]] = {}
    while waiting or running:
        while waiting and len(running) < at_a_time:
            name = waiting.pop(0)
            start_replay(folder, started, name, ports[name])
            running[name] = started[-1]
        time.sleep(SCRAPE_SECONDS)
        for name, process in list(running.items()):
            log = (folder / f"{name}.log").read_text()
            assert process.poll() is None, log
            began = _BEGAN.search(log)
            if began is None:
                continue
            start = datetime.fromisoformat(began[1]).timestamp()
            # It begins again after its end; what is left out is less than a scrape.
            windows[name] = Window(start - 1, start + lengths[name] - 0.2)
            if time.time() > windows[name].end:
                if not stay:
                    process.terminate()
                del running[name]
    return prometheus, {**windows, **dict.fromkeys(others, Window(began_at, time.time()))}
