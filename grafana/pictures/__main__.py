"""See what users see: python -m grafana.pictures FOLDER, with GRAFANA=/path/to/grafana.

Runs the Grafana server of any installation, provisioned as docs/dashboards.md says, over a real
Prometheus with our rules that scrapes replayed recordings; opens every dashboard in Chromium; takes
pictures; and says of each panel whether it is drawn, what it says, and what is wrong: error badges,
cut titles, panels without anything, complaints in the console. 1 where something is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from grafana.boards import BOARDS
from grafana.pictures import hosts, server
from grafana.pictures.look import Shot, look, report, wrong
from testing.devtools import browser
from testing.ports import free_port
from testing.prometheus_programs import program
from testing.prometheus_server import JOB, programs, start, until_ready
from testing.rule_files import ROOT

SCRAPE_SECONDS = 5
DEAD = "gpu99-dead:9400"
SLOW = "slow-tour:9400"
FLEET = (
    "tour",
    "three-users",
    "wait-served",
    "starved",
    "stopped",
    "fault-held",
    "fault",
    "limits",
    "context-limit",
    "server-killed",
    "daemon-killed",
    "crash-loop",
    "draining",
    "percentages",
    "wait-abandoned-sigkill",
    "training-10-mps",
    "training-10-direct",
    "two-gpus-one-daemon",
    "three-daemons",
    "multi-user",
    "own-pid-namespace",
    "terminate-client",
    "containers",
    "streams",
    "data-parallel",
    "memory-limit",
    "stranded",
    "foreground",
)


def replays() -> dict[str, str]:
    """Label instance -> recording, and how fast it is replayed."""
    fleet = {f"gpu{number:02}-{name}:9400": name for number, name in enumerate(FLEET, start=1)}
    return {SLOW: "tour@0.1", "quiet:9400": "quiet@0.5", **fleet}


FLEET_SCENARIO = "fleet"
SCENARIOS = {
    FLEET_SCENARIO: "",
    "tour": SLOW,
    "quiet": "quiet:9400",
    "no-mps": "gpu17-training-10-direct:9400",
    "dead": DEAD,
    "eight-gpus": hosts.MADE_UP,
    "mps-v3": hosts.V3,
}
"""Name -> the host that is chosen; all of them, or the dashboard's first, where there is none."""

IMAGES = {
    "dashboard-fleet.png": "mps-fleet",
    "dashboard-sharing.png": "mps-sharing-tour",
    "dashboard-incidents.png": "mps-incidents-tour",
    "dashboard-user.png": "mps-user-tour",
    "dashboard-dcgm.png": "also",
}
"""Pictures of the documents, and what they show."""


def shots(also: Path | None = None, scenarios: Iterable[str] = SCENARIOS) -> list[Shot]:
    """Every dashboard in every scenario that it can be in, and a foreign one."""
    period = "now-20m"
    found = [Shot(server.FOREIGN, "also", "", period)] if also else []
    for board, scenario in itertools.product(BOARDS, scenarios):
        host = SCENARIOS[scenario]
        if board.of_one_host and not host:
            continue
        choices = [f"var-job={JOB}", f"var-instance={host}"] if host else []
        if board.uid == "mps-user":
            choices.append("var-uid=1002")
        name = f"{board.uid}-{scenario}" if host else board.uid
        found.append(Shot(board.uid, name, "&".join(choices), period))
    return found


@contextmanager
def scraped(folder: Path) -> Iterator[str]:
    """Run the replayed hosts, and a Prometheus that scrapes them; gives its address."""
    replayed = replays()
    port, dead, prometheus = free_port(), free_port(), free_port()
    addresses = dict.fromkeys((*replayed, hosts.MADE_UP, hosts.V3), f"127.0.0.1:{port}")
    targets = [
        {
            "targets": [address],
            "labels": {
                "instance": instance,
                "__metrics_path__": f"/{instance.partition(':')[0]}/metrics",
            },
        }
        for instance, address in {**addresses, DEAD: f"127.0.0.1:{dead}"}.items()
    ]
    config = {
        "global": {
            "scrape_interval": f"{SCRAPE_SECONDS}s",
            "scrape_timeout": f"{SCRAPE_SECONDS}s",
            "evaluation_interval": "10s",
        },
        "rule_files": [str(ROOT / "rules" / "*.yml"), str(ROOT / "dcgm-compat.rules.yml")],
        "scrape_configs": [{"job_name": JOB, "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with programs() as started:
        named = [f"{name.partition(':')[0]}={recording}" for name, recording in replayed.items()]
        started.append(
            start(
                folder, "hosts", sys.executable, "-m", "grafana.pictures.hosts", str(port), *named
            )
        )
        started.append(
            start(
                folder,
                "prometheus",
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{prometheus}",
            )
        )
        until_ready(f"http://127.0.0.1:{prometheus}/-/ready")
        yield f"http://127.0.0.1:{prometheus}"


async def take(chosen: argparse.Namespace, address: str) -> list[str]:
    """Take all pictures; gives what is wrong."""
    lines: list[str] = []
    drawn = {shot: name for name, shot in IMAGES.items()} if chosen.images else {}
    # One browser for all: Grafana's programs are read and compiled once.
    async with browser() as tab:
        for shot in shots(chosen.also, chosen.scenario):
            if drawn and shot.name not in drawn:
                continue
            before = len(tab.complaints)
            sights = await look(tab, shot, address, chosen.folder)
            said = list(report(sights, tab.complaints[before:]))
            print(*said, sep="\n", flush=True)
            lines += [f"{shot.name}: {line}" for line in wrong(said)]
            if drawn:
                picture = chosen.folder / f"{shot.name}.png"
                shutil.copy(picture, chosen.images / drawn[shot.name])
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run everything and look."""
    parser = argparse.ArgumentParser(
        prog="python -m grafana.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--minutes", type=float, default=20, help="recordings play first")
    known = list(SCENARIOS)
    parser.add_argument("--scenario", nargs="+", default=known, choices=known)
    parser.add_argument("--also", type=Path, help="another dashboard's file: dcgm-exporter's")
    parser.add_argument("--images", type=Path, help="write the documents' pictures there, too")
    chosen = parser.parse_args(arguments)
    home = os.environ.get("GRAFANA")
    try:
        server.program(home)
    except server.NoGrafanaError as error:
        print(error, file=sys.stderr)
        return 2
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, scraped(Path(name)) as prometheus:
        print(f"Prometheus: {prometheus}; playing for {chosen.minutes:g} minutes", flush=True)
        time.sleep(chosen.minutes * 60)
        with server.running(home, Path(name), free_port(), prometheus, chosen.also) as address:
            found = asyncio.run(take(chosen, address))
    print(*(found or ["Nothing is wrong."]), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
