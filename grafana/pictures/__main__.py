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
from grafana.pictures.look import Shot, Sight, look, report, wrong
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


async def take_images(folder: Path, address: str, also: Path | None) -> list[str]:
    """Take the pictures of the documents; gives what is wrong."""
    found = {shot.name: shot for shot in shots(also)}
    lines: list[str] = []
    for name, shot in IMAGES.items():
        if shot not in found:
            continue
        async with browser() as tab:
            with tempfile.TemporaryDirectory() as drawn:
                sights = await look(
                    tab, found[shot], address, Path(drawn), width=1400, dark=True, docked=False
                )
                shutil.copy(next(Path(drawn).glob(f"{shot}-*-closed.png")), folder / name)
            lines += wrong(report(sights, tab.complaints))
    return lines


async def take(chosen: argparse.Namespace, address: str) -> list[str]:
    """Take all pictures; gives what is wrong."""
    lines: list[str] = []
    themes = [theme == "dark" for theme in chosen.theme]
    docked = [menu == "docked" for menu in chosen.menu]
    wanted = [
        shot
        for shot in shots(chosen.also, chosen.scenario)
        if shot.dashboard in (*chosen.dashboard, server.FOREIGN)
    ]
    for width, dark, dock in itertools.product(chosen.width, themes, docked):
        # One browser for all: Grafana's programs are read and compiled once.
        async with browser() as tab:
            for shot in wanted:
                before = len(tab.complaints)
                sights: list[Sight] = await look(
                    tab, shot, address, chosen.folder, width=width, dark=dark, docked=dock
                )
                said = list(report(sights, tab.complaints[before:]))
                print(*said, sep="\n", flush=True)
                lines += [f"{shot.name} at {width}: {line}" for line in wrong(said)]
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run everything and look."""
    parser = argparse.ArgumentParser(
        prog="python -m grafana.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument(
        "--minutes", type=float, default=20, help="to let the recordings play first"
    )
    parser.add_argument(
        "--grafana", metavar="URL", help="look at a Grafana that runs already, with --keep"
    )
    for flag, default, kind in (
        ("--dashboard", [board.uid for board in BOARDS], str),
        ("--scenario", list(SCENARIOS), str),
        ("--width", [1366, 1920, 2560], int),
        ("--theme", ["dark", "light"], str),
        ("--menu", ["docked", "closed"], str),
    ):
        known = default if kind is str else None
        parser.add_argument(flag, nargs="+", type=kind, default=default, choices=known)
    parser.add_argument(
        "--also", type=Path, help="a dashboard's file to look at, too: dcgm-exporter's"
    )
    parser.add_argument("--images", type=Path, help="write the documents' pictures there instead")
    parser.add_argument("--keep", action="store_true", help="go on running, to look around")
    chosen = parser.parse_args(arguments)
    if chosen.grafana:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        return _said(asyncio.run(_looked(chosen, chosen.grafana)))
    try:
        server.program(os.environ.get("GRAFANA"))
    except server.NoGrafanaError as error:
        print(error, file=sys.stderr)
        return 2
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with scraped(folder) as prometheus:
            print(f"Prometheus: {prometheus}; playing for {chosen.minutes:g} minutes", flush=True)
            time.sleep(chosen.minutes * 60)
            home = os.environ.get("GRAFANA")
            with server.running(home, folder, free_port(), prometheus, chosen.also) as address:
                print(f"Grafana: {address}", flush=True)
                status = _said(asyncio.run(_looked(chosen, address)))
                while chosen.keep:
                    time.sleep(1)
    return status


async def _looked(chosen: argparse.Namespace, address: str) -> list[str]:
    if chosen.images:
        return await take_images(chosen.images, address, chosen.also)
    return await take(chosen, address)


def _said(found: list[str]) -> int:
    print(*(found or ["Nothing is wrong."]), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
