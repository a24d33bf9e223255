"""See what users see: python -m grafana.pictures FOLDER, with GRAFANA=/path/to/grafana.

Runs the Grafana server of any installation, provisioned as docs/dashboards.md describes, over a
real Prometheus with our rules that scrapes replayed recordings; opens every dashboard in Chromium;
takes pictures; and reports for each panel whether it is drawn, its text, and its faults: error
badges, cut titles, panels without content, complaints in the console. Exits with 1 if there is one.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from grafana.__main__ import DASHBOARDS
from grafana.boards import BOARDS
from grafana.pictures import hosts
from grafana.pictures.look import Shot, look, report
from testing.devtools import browser
from testing.ports import free_port
from testing.prometheus_programs import prometheus, running, until_ready
from testing.prometheus_server import JOB
from testing.rule_files import ROOT

PROVISIONING = Path(__file__).parents[1] / "provisioning"
SCRAPE_SECONDS = 5
DEAD = "gpu99-dead:9400"
SLOW = "slow-tour:9400"
FOREIGN = "foreign"  # The uid of a dashboard of another project.
FLEET_NAMES = """
tour three-users wait-served starved stopped fault-held fault limits context-limit server-killed
daemon-killed crash-loop draining percentages wait-abandoned-sigkill training-10-mps
training-10-direct two-gpus-one-daemon three-daemons multi-user own-pid-namespace terminate-client
containers streams data-parallel memory-limit stranded foreground
"""
FLEET = {
    f"gpu{number:02}-{name}:9400": name for number, name in enumerate(FLEET_NAMES.split(), start=1)
}
REPLAYS = {SLOW: "tour@0.1", "quiet:9400": "quiet@0.5", **FLEET}
"""Label instance -> recording, and how fast it is replayed."""
SCENARIOS = {
    "fleet": "",
    "tour": SLOW,
    "quiet": "quiet:9400",
    "no-mps": "gpu17-training-10-direct:9400",
    "dead": DEAD,
    "eight-gpus": hosts.MADE_UP,
    "mps-v3": hosts.V3,
}
"""Name -> the chosen host; "" for all hosts, or for the dashboard's first."""
IMAGES = {
    "mps-fleet": "dashboard-fleet.png",
    "mps-sharing-tour": "dashboard-sharing.png",
    "mps-incidents-tour": "dashboard-incidents.png",
    "mps-user-tour": "dashboard-user.png",
    "also": "dashboard-dcgm.png",
}
"""Shot -> picture of the documents."""
HOW_TO_GET_GRAFANA = """GRAFANA contains no Grafana. Set it to the folder, with bin/, conf/,
public/, of version 12 or newer: /usr/share/grafana of its package; where an archive of
https://grafana.com/grafana/download is unpacked; or /tmp/grafana after
  docker cp $(docker create grafana/grafana:12.3.0):/usr/share/grafana /tmp/grafana"""


def shots(also: Path | None = None, scenarios: Iterable[str] = SCENARIOS) -> list[Shot]:
    """Return every dashboard in every possible scenario, and a foreign dashboard."""
    period = "now-20m"
    found = [Shot(FOREIGN, "also", f"var-instance={SLOW}", period)] if also else []
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


def scrape_config(port: int) -> dict[str, Any]:
    """Return Prometheus' configuration: all hosts behind one port, and one host that is down."""
    addresses = dict.fromkeys((*REPLAYS, hosts.MADE_UP, hosts.V3), f"127.0.0.1:{port}")
    addresses[DEAD] = f"127.0.0.1:{free_port()}"
    targets = []
    for instance, address in addresses.items():
        path = f"/{instance.partition(':')[0]}/metrics"
        labels = {"instance": instance, "__metrics_path__": path}
        targets.append({"targets": [address], "labels": labels})
    every = f"{SCRAPE_SECONDS}s"
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": "10s"},
        "rule_files": [str(ROOT / "rules" / "*.yml"), str(ROOT / "dcgm-compat.rules.yml")],
        "scrape_configs": [{"job_name": JOB, "static_configs": targets}],
    }


@contextlib.contextmanager
def scraped(folder: Path) -> Iterator[str]:
    """Run the replayed hosts and a Prometheus that scrapes them; yield its URL."""
    port = free_port()
    named = [f"{name.partition(':')[0]}={recording}" for name, recording in REPLAYS.items()]
    command = (sys.executable, "-m", "grafana.pictures.hosts", str(port), *named)
    tree = str(ROOT.parent)
    path = os.pathsep.join((tree, f"{tree}/exporter"))
    with (
        running(folder, "hosts", *command, PYTHONPATH=path),
        prometheus(folder, scrape_config(port)) as server,
    ):
        yield f"http://{server.address}"


def grafana_command(home: str) -> list[str]:
    """Return the command that starts the server of an installation; empty if there is none."""
    program = Path(home) / "bin" / "grafana"
    is_there = home and os.access(program, os.X_OK)
    return [str(program), "server", "--homepath", home] if is_there else []


def provision(folder: Path, source_url: str, also: Path | None) -> None:
    """Copy our provisioning and dashboards, with the two addresses that a user has to change."""
    target = folder / "provisioning"
    shutil.copytree(PROVISIONING, target)
    for empty in ("plugins", "alerting"):
        (target / empty).mkdir()
    shutil.copytree(DASHBOARDS, folder / "dashboards")
    if also is not None:
        foreign = json.loads(also.read_text("utf-8")) | {"uid": FOREIGN, "id": None}
        (folder / "dashboards" / "foreign.json").write_text(json.dumps(foreign), "utf-8")
    (source,) = (target / "datasources").glob("*.yml")
    content = yaml.safe_load(source.read_text("utf-8"))
    content["datasources"][0]["url"] = source_url
    content["datasources"][0]["jsonData"]["timeInterval"] = f"{SCRAPE_SECONDS}s"
    source.write_text(yaml.safe_dump(content), "utf-8")
    (provider,) = (target / "dashboards").glob("*.yml")
    content = yaml.safe_load(provider.read_text("utf-8"))
    content["providers"][0]["options"]["path"] = str(folder / "dashboards")
    provider.write_text(yaml.safe_dump(content), "utf-8")


@contextlib.contextmanager
def grafana(home: str, folder: Path, source_url: str, also: Path | None) -> Iterator[str]:
    """Run Grafana on the loopback, readable without a login, without connections to elsewhere."""
    provision(folder, source_url, also)
    port = free_port()
    settings = {
        "SERVER_HTTP_ADDR": "127.0.0.1",
        "SERVER_HTTP_PORT": str(port),
        **{
            f"PATHS_{name}": str(folder / name.lower())
            for name in ("PROVISIONING", "LOGS", "PLUGINS")
        },
        "PATHS_DATA": str(folder / "grafana"),
        "AUTH_ANONYMOUS_ENABLED": "true",
        "ANALYTICS_REPORTING_ENABLED": "false",
        "ANALYTICS_CHECK_FOR_UPDATES": "false",
        "ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "PLUGINS_PREINSTALL_DISABLED": "true",
        "NEWS_NEWS_FEED_ENABLED": "false",
        "LOG_LEVEL": "warn",
    }
    variables = {f"GF_{name}": value for name, value in settings.items()}
    with running(folder, "grafana", *grafana_command(home), **variables):
        until_ready(f"http://127.0.0.1:{port}/api/health")
        yield f"http://127.0.0.1:{port}"


async def take(chosen: argparse.Namespace, address: str) -> list[str]:
    """Take all pictures; return what is wrong."""
    lines: list[str] = []
    # One browser for all: Grafana's programs are read and compiled once.
    async with browser() as tab:
        for shot in shots(chosen.also, chosen.scenario):
            if chosen.images and shot.name not in IMAGES:
                continue
            before = len(tab.complaints)
            panels = await look(tab, shot, address, chosen.folder)
            drawn, faults = report(panels, tab.complaints[before:])
            print(*drawn, *(f"FAULT {fault}" for fault in faults), sep="\n  ", flush=True)
            lines += [f"{shot.name}: {fault}" for fault in faults]
            if chosen.images:
                picture = chosen.folder / f"{shot.name}.png"
                shutil.copy(picture, chosen.images / IMAGES[shot.name])
    return lines


def main() -> int:
    """Run all programs, and take the pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m grafana.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of the pictures")
    parser.add_argument("--minutes", type=float, default=20, help="recordings play first")
    known = list(SCENARIOS)
    parser.add_argument("--scenario", nargs="+", default=known, choices=known)
    parser.add_argument("--also", type=Path, help="another dashboard's file: dcgm-exporter's")
    parser.add_argument("--images", type=Path, help="write the documents' pictures there, too")
    chosen = parser.parse_args()
    home = os.environ.get("GRAFANA", "")
    if not grafana_command(home):
        print(HOW_TO_GET_GRAFANA, file=sys.stderr)
        return 2
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, scraped(Path(name)) as source_url:
        print(f"Prometheus: {source_url}; playing for {chosen.minutes:g} minutes", flush=True)
        time.sleep(chosen.minutes * 60)
        with grafana(home, Path(name), source_url, chosen.also) as address:
            found = asyncio.run(take(chosen, address))
    print(*(found or ["Nothing is wrong."]), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
