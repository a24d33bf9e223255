"""A fleet of made-up hosts into Prometheus, our rules, Alertmanager and a webhook.

    python -m bench.fleet [--hosts 1000] [--minutes 12] [--scrape-seconds 30] [--victoria-metrics]

With --victoria-metrics a single VictoriaMetrics scrapes and stores, and vmalert evaluates.

Each host says what the exporter says of a host of 8 GPUs: a tenth are full (48 clients on each
GPU), six tenths have 6 clients on each, three tenths are idle. Every CHURN_SECONDS an eighth of all
clients ends and as many start. On a tenth of the hosts waits end, and on a fiftieth a client is
lost and one refused each minute. Rules are evaluated at their own intervals. Then servers crash on
single hosts, one after the other, and the time until the webhook has the alert is taken; and
everything that the dashboard Fleet asks is asked. The readings stay as they are: constant
samples compress better than real ones, so the size on disk is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from bench.dashboards import look
from bench.http import cpu_seconds
from bench.rules import (
    GPUS,
    HOST,
    NOW,
    USERS,
    ask,
    client,
    host,
    idle_host,
    page_of,
    resident_bytes,
    series,
)
from mps_exporter.mps.log_metrics import WAIT_BOUNDS
from mps_exporter.snapshot import ControlDaemon, Histogram, LabelValues, Snapshot
from testing.fleet_page import settings
from testing.ports import free_port
from testing.prometheus_programs import alertmanager, program
from testing.prometheus_server import Prometheus
from testing.rule_files import RULE_FILES

_STARTED = re.compile(rb"^(process_start_time_seconds ).*$", re.MULTILINE)

ROOT = Path(__file__).parents[1]
CHURN_SECONDS = 60
PARTS = 8
"""One client in so many is replaced at a time."""
WAITS_ON = 10
"""Waits end on one host in so many."""
TROUBLE_ON = 50
"""Clients are lost and refused on one host in so many."""
INCIDENTS = 3
NOTIFIED_WITHIN = 90.0
QUERY_WITHIN = 2.0
INTERVAL_SHARE = 1 / 3
DASHBOARD = "mps-fleet"
LATENCY_SECONDS = 10
"""How far VictoriaMetrics and vmalert stay behind (30 s by default, for slow networks)."""
CLIENTS_OF_KIND = {"full": 48, "shared": 6, "idle": 0}
BUSY_SHARE = 0.7
"""How busy cores and memory may be for the estimate of the largest fleet."""


def kind_of(number: int) -> str:
    """Give the kind of a host."""
    return "full" if number % 10 == 0 else "shared" if number % 10 < 7 else "idle"


def fleet_host(clients: int, generation: int) -> Snapshot:
    """A host whose clients come and go, and on which no user waits."""
    if not clients:
        return idle_host()
    found = host(0)
    daemons = []
    for number, daemon in enumerate(found.daemons):
        (uuid,) = daemon.gpu_uuids
        crowd = tuple(
            client(number, index + 1000 * ((generation + index) // PARTS), uuid)
            for index in range(clients)
        )
        server = replace(
            daemon.servers[0], clients=crowd, clients_connected=clients, contexts={uuid: clients}
        )
        daemons.append(replace(daemon, servers=(server,), waits=(), handover_backoff_seconds=None))
    return replace(found, daemons=tuple(daemons))


class Counted:
    """The counters of a daemon, and more."""

    def __init__(self, daemon: ControlDaemon) -> None:
        self._daemon = daemon
        self._counters = dict(daemon.counters or {})

    def plus(self, name: str, key: LabelValues, by: float) -> None:
        """Let a counter grow."""
        before = self._counters[name].get(key, 0)
        assert isinstance(before, int | float)
        self.set(name, key, before + by)

    def set(self, name: str, key: LabelValues, value: float | Histogram) -> None:
        """Set what is no counter."""
        self._counters[name] = {**self._counters[name], key: value}

    @property
    def daemon(self) -> ControlDaemon:
        """The daemon with what it has counted now."""
        return replace(self._daemon, counters=self._counters)


def crashed(snapshot: Snapshot, at: float) -> Snapshot:
    """The same host after a crash of its first daemon's server."""
    first, *rest = snapshot.daemons
    counted = Counted(first)
    counted.plus("mps_server_exits_total", ("crashed",), 1)
    for uid in USERS:
        counted.plus("mps_client_losses_total", (uid, "server_crashed"), 2)
    counted.set("mps_server_last_exit_timestamp_seconds", ("crashed",), at)
    counted.set("mps_client_last_loss_timestamp_seconds", (), at)
    return replace(snapshot, daemons=(counted.daemon, *rest))


def waited(snapshot: Snapshot, generation: int) -> Snapshot:
    """The same host, of whose users each has waited once a generation for each daemon."""
    daemons = []
    for daemon in snapshot.daemons:
        counted = Counted(daemon)
        for uid in USERS:
            waits = Histogram(
                WAIT_BOUNDS, (1,) * len(WAIT_BOUNDS) + (1 + generation,), 1000.0 + 10 * generation
            )
            counted.set("mps_uid_wait_seconds", (uid,), waits)
        daemons.append(counted.daemon)
    return replace(snapshot, daemons=tuple(daemons))


def troubled(snapshot: Snapshot, generation: int) -> Snapshot:
    """The same host, whose first daemon loses and refuses a client in each generation."""
    first, *rest = snapshot.daemons
    counted, at = Counted(first), NOW + generation * CHURN_SECONDS
    counted.plus("mps_client_losses_total", (USERS[0], "terminated"), generation)
    counted.set("mps_client_last_loss_timestamp_seconds", (), at)
    counted.plus("mps_client_rejections_total", (USERS[0], "context_limit"), generation)
    counted.set("mps_client_last_rejection_timestamp_seconds", (), at)
    return replace(snapshot, daemons=(counted.daemon, *rest))


class Fleet:
    """Serves the pages of all hosts, and takes the notifications."""

    def __init__(self) -> None:
        self._began = time.time()
        self.crashed_at: dict[int, float] = {}
        """Host -> when a server crashed there (Unix time)."""
        self.notified_at: dict[str, float] = {}
        """Label instance -> when the webhook had the alert about the crash."""
        self.notifications = 0

    def page(self, number: int) -> bytes:
        """What this host's exporter says now."""
        generation = int((time.time() - self._began) / CHURN_SECONDS)
        text = _page(
            kind_of(number),
            generation,
            self.crashed_at.get(number),
            waits=number % WAITS_ON == 1,
            trouble=number % TROUBLE_ON == 1,
        )
        return text.replace(HOST.encode(), f"{number:04x}".encode())

    @contextlib.asynccontextmanager
    async def served(self) -> Any:
        """Serve on a free port, which is given."""

        async def metrics(request: web.Request) -> web.Response:
            body = self.page(int(request.match_info["host"]))
            return web.Response(body=body, content_type="text/plain")

        async def notify(request: web.Request) -> web.Response:
            for alert in (await request.json())["alerts"]:
                self.notifications += 1
                labels = alert["labels"]
                if labels["alertname"] == "MpsServerCrashed" and alert["status"] == "firing":
                    self.notified_at.setdefault(labels["instance"], time.time())
            return web.Response()

        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/{host:[0-9]+}/metrics", metrics)
        app.router.add_post("/{receiver}", notify)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield port
        finally:
            await runner.cleanup()


@lru_cache(maxsize=32)
def _page(
    kind: str,
    generation: int,
    crash: float | None,
    *,
    waits: bool = False,
    trouble: bool = False,
) -> bytes:
    snapshot = fleet_host(CLIENTS_OF_KIND[kind], generation)
    if waits:
        snapshot = waited(snapshot, generation)
    if trouble:
        snapshot = troubled(snapshot, generation)
    text = page_of(snapshot if crash is None else crashed(snapshot, crash))
    # What a new exporter has counted is new to the rules; these have run for a day.
    return _STARTED.sub(rb"\g<1>%d" % (NOW - 86_400), text)


def scrape_configuration(hosts: int, port: int, scrape_seconds: int) -> dict[str, Any]:
    """One target for each host: they differ in their path, and so in the label instance."""
    return {
        "global": {
            "scrape_interval": f"{scrape_seconds}s",
            "scrape_timeout": "10s",
            "evaluation_interval": "30s",
        },
        "scrape_configs": [
            {
                "job_name": "mps-exporter",
                "static_configs": [
                    {
                        "targets": [f"127.0.0.1:{port}"],
                        "labels": {"instance": f"h{n}", "__metrics_path__": f"/{n}/metrics"},
                    }
                    for n in range(hosts)
                ],
            }
        ],
    }


@contextlib.asynccontextmanager
async def running(folder: Path, name: str, *command: str | Path) -> Any:
    """Run a program, and end it."""
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*map(str, command), stdout=log, stderr=log)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@dataclass(frozen=True)
class Store:
    """What scrapes, stores and evaluates."""

    name: str
    base: str
    """Answers queries."""
    rules_base: str
    """Answers for the rules."""
    pids: tuple[int, ...]

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all its programs."""
        return sum(cpu_seconds(pid) for pid in self.pids)

    @property
    def resident_bytes(self) -> int:
        """Memory of all its programs."""
        return sum(resident_bytes(pid) for pid in self.pids)

    async def series(self) -> int:
        """Series that were seen since the start, churn and recorded ones included."""
        status = await ask(self.base, "status/tsdb")
        return int(
            status["headStats"]["numSeries"] if "headStats" in status else status["totalSeries"]
        )


async def start_prometheus(
    stack: contextlib.AsyncExitStack, folder: Path, config: dict[str, Any], notifier: str
) -> Store:
    """Start a Prometheus that scrapes, stores and evaluates."""
    base = f"127.0.0.1:{free_port()}"
    config["rule_files"] = [str(file) for file in RULE_FILES]
    config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [notifier]}]}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = await stack.enter_async_context(
        running(
            folder,
            "prometheus",
            program("prometheus3"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={base}",
        )
    )
    return Store("Prometheus", base, base, (process.pid,))


async def start_victoria_metrics(
    stack: contextlib.AsyncExitStack, folder: Path, config: dict[str, Any], notifier: str
) -> Store:
    """Start a VictoriaMetrics that scrapes and stores, and a vmalert that evaluates."""
    base, rules_base = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    del config["global"]["evaluation_interval"]
    (folder / "scrape.yml").write_text(yaml.safe_dump(config))
    store = await stack.enter_async_context(
        running(
            folder,
            "victoria-metrics",
            program("victoria-metrics"),
            f"-storageDataPath={folder / 'data'}",
            f"-httpListenAddr={base}",
            f"-promscrape.config={folder / 'scrape.yml'}",
            f"-search.latencyOffset={LATENCY_SECONDS}s",
        )
    )
    await until_answering(f"http://{base}/health")
    rules = await stack.enter_async_context(
        running(
            folder,
            "vmalert",
            program("vmalert"),
            *(f"-rule={file}" for file in RULE_FILES),
            f"-datasource.url=http://{base}",
            f"-remoteWrite.url=http://{base}",
            f"-remoteRead.url=http://{base}",
            f"-notifier.url=http://{notifier}",
            f"-httpListenAddr={rules_base}",
            "-evaluationInterval=30s",
            f"-rule.evalDelay={LATENCY_SECONDS}s",
        )
    )
    await until_answering(f"http://{rules_base}/health")
    return Store("VictoriaMetrics and vmalert", base, rules_base, (store.pid, rules.pid))


async def until_answering(url: str) -> None:
    """Wait until a program answers."""
    async with aiohttp.ClientSession() as session:
        for _ in range(120):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
    raise AssertionError(f"no answer from {url}")


class GroupTimes:
    """How long each group took, and how often it is evaluated."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.every: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        """Rules that could not be evaluated, and why."""
        self._last: dict[str, str] = {}

    async def look(self, base: str) -> None:
        """Take down what was evaluated since the last look."""
        self.note((await ask(base, "rules"))["groups"])

    def note(self, groups: list[dict[str, Any]]) -> None:
        """Take down what the answer about the rules says, of Prometheus or of vmalert."""
        for group in groups:
            name = group["name"]
            self.every[name] = float(group["interval"])
            # vmalert tells the time of each rule, and evaluates them one after the other, too.
            seconds = group.get("evaluationTime") or sum(
                rule["evaluationTime"] for rule in group["rules"]
            )
            if group["lastEvaluation"] != self._last.get(name):
                self._last[name] = group["lastEvaluation"]
                self.seconds.setdefault(name, []).append(seconds)
            for rule in group["rules"]:
                if rule["health"] in ("err", "error"):
                    self.failed[rule["name"]] = rule.get("lastError", "")

    def rows(self) -> Iterator[tuple[str, float, float, float]]:
        """Group, median and longest evaluation, interval: the later half, dearest first."""
        found = [
            (name, statistics.median(late), max(late), self.every[name])
            for name, times in self.seconds.items()
            if (late := times[len(times) // 2 :])
        ]
        yield from sorted(found, key=lambda row: -row[1] / row[3])

    @property
    def busy(self) -> float:
        """Share of one core that all rules take."""
        return sum(median / every for _, median, _, every in self.rows())


async def until_scraped(base: str, hosts: int, scrape_seconds: int) -> None:
    """Wait until each host was scraped."""
    end = time.monotonic() + 20 * scrape_seconds
    while time.monotonic() < end:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError):
            found = (await ask(base, "query", query="sum(up)"))["result"]
            if found and float(found[0]["value"][1]) == hosts:
                return
        await asyncio.sleep(2)
    raise AssertionError("not every host could be scraped")


async def number(base: str, expr: str) -> float:
    """The one value of an expression; 0 where there is none."""
    found = (await ask(base, "query", query=expr))["result"]
    return float(found[0]["value"][1]) if found else 0.0


async def watch(
    fleet: Fleet, rules_base: str, hosts: int, minutes: float
) -> tuple[GroupTimes, dict[int, float]]:
    """Look at the rules for so long, and let servers crash; gives the crashes, too."""
    times, crashes = GroupTimes(), dict[int, float]()
    began = time.monotonic()
    # Late: the rules compare with 5 minutes before. Each on a host of another kind.
    due = [began + 60 * minutes * (0.5 + 0.13 * turn) for turn in range(INCIDENTS)]
    choices = iter((0, 1, 11))
    while time.monotonic() < began + 60 * minutes:
        if due and time.monotonic() >= due[0]:
            due.pop(0)
            target = next(choices) % hosts
            fleet.crashed_at[target] = crashes[target] = time.time()
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await times.look(rules_base)
        await asyncio.sleep(2)
    return times, crashes


def kept_for_long() -> str:
    """Select what remote write sends on with the settings of docs/fleet.md."""
    (target,) = settings()["remote_write"]
    (rule,) = target["write_relabel_configs"]
    return f'{{__name__=~"{rule["regex"]}"}}'


def print_rules(times: GroupTimes) -> bool:
    """Give whether every group stays below a third of its interval."""
    print("\ngroup                          median     longest   every    longest / interval")
    met = True
    for name, median, longest, every in times.rows():
        met &= longest <= INTERVAL_SHARE * every
        print(
            f"  {name:26s} {1000 * median:8.0f} ms {1000 * longest:8.0f} ms {every:5.0f} s"
            f" {longest / every:12.3f}"
        )
    print(f"  all groups: {100 * times.busy:.1f} % of a core")
    for name, why in times.failed.items():
        print(f"  FAILED {name}: {why}")
    return met and not times.failed


def print_queries(base: str, hours: float) -> bool:
    """Give whether every query of the dashboard is quick enough, on the second look."""
    look(Prometheus(base), DASHBOARD, hours)
    taken = look(Prometheus(base), DASHBOARD, hours)
    slowest = sorted(taken.items(), key=lambda pair: -pair[1])
    print(f"\n{len(taken)} queries of {DASHBOARD}, over {60 * hours:.0f} minutes; the slowest:")
    for name, seconds in slowest[:5]:
        print(f"  {1000 * seconds:8.0f} ms  {name}")
    return slowest[0][1] <= QUERY_WITHIN


def print_incidents(fleet: Fleet, crashes: dict[int, float]) -> bool:
    """Give whether each crash reached the webhook in time."""
    print("\na server crashes, until the webhook has the alert:")
    met = True
    for target, at in crashes.items():
        heard = fleet.notified_at.get(f"h{target}")
        words = "never" if heard is None else f"{heard - at:.0f} s"
        met &= heard is not None and heard - at <= NOTIFIED_WITHIN
        print(f"  host {target:4d} ({kind_of(target)}): {words}")
    return met


async def measure(
    hosts: int, minutes: float, scrape_seconds: int, *, victoria_metrics: bool = False
) -> bool:
    """Run it all and print; gives whether the bars are met."""
    fleet, notifier = Fleet(), f"127.0.0.1:{free_port()}"
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-fleet-")))
        port = await stack.enter_async_context(fleet.served())
        config = scrape_configuration(hosts, port, scrape_seconds)
        text = (ROOT / "prometheus" / "alertmanager.yml").read_text()
        text = text.replace("localhost:9099", f"127.0.0.1:{port}")
        templates = ROOT / "prometheus" / "alertmanager" / "*.tmpl"
        text = text.replace("alertmanager/*.tmpl", str(templates))
        (folder / "alertmanager.yml").write_text(text)
        await stack.enter_async_context(
            running(
                folder,
                "alertmanager",
                *alertmanager(),
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alerts'}",
                f"--web.listen-address={notifier}",
                "--cluster.listen-address=",
            )
        )
        start = start_victoria_metrics if victoria_metrics else start_prometheus
        store = await start(stack, folder, config, notifier)
        base = store.base
        await until_scraped(base, hosts, scrape_seconds)
        began, cpu = time.monotonic(), store.cpu_seconds
        times, crashes = await watch(fleet, store.rules_base, hosts, minutes)
        cores = (store.cpu_seconds - cpu) / (time.monotonic() - began)
        seen, memory = await store.series(), store.resident_bytes
        pages = [series(_page(kind, 0, None)) for kind in map(kind_of, range(hosts))]
        print(
            f"{store.name}: {hosts} hosts of {GPUS} GPUs, a scrape every {scrape_seconds} s,"
            f" {minutes:g} minutes, on {os.cpu_count()} cores; load {os.getloadavg()[1]:.1f}, other"
            " work included"
        )
        print(f"  {sum(pages):10,} series at a time, {sum(pages) / hosts:,.0f} a host")
        print(f"  {seen:10,} series since the start, churn and rules included")
        print(f"  {sum(pages) / scrape_seconds:10,.0f} samples/s")
        print(f"  {cores:10.2f} cores, {1000 * cores / hosts:.2f} ms of each second a host")
        print(f"  {memory / 2**30:10.2f} GiB resident, {memory / hosts / 2**20:.2f} MiB a host")
        kept = await number(base, f"count({kept_for_long()})")
        print(
            f"  {kept:10,.0f} series for long retention, {kept / hosts:.0f} a host; at most"
            f" {kept / scrape_seconds:,.0f} samples/s"
        )
        slowest = await number(base, "max(scrape_duration_seconds)")
        print(f"  {await number(base, 'sum(up)'):10.0f} hosts up, slowest scrape {slowest:.2f} s")
        for have_cores, have_gib in ((2, 8), (4, 16), (8, 32), (16, 64)):
            by_cores = BUSY_SHARE * have_cores / cores * hosts
            by_memory = BUSY_SHARE * have_gib * 2**30 / memory * hosts
            print(
                f"  {have_cores:3d} cores, {have_gib:3d} GiB: {min(by_cores, by_memory):7,.0f} such"
                f" hosts ({BUSY_SHARE:.0%} busy; cores {by_cores:,.0f}, memory {by_memory:,.0f})"
            )
        met = {
            "every rule group under a third of its interval": print_rules(times),
            f"an incident reaches the webhook within {NOTIFIED_WITHIN:.0f} s": print_incidents(
                fleet, crashes
            ),
            f"every query of the board under {QUERY_WITHIN:g} s": await asyncio.to_thread(
                print_queries, base, min(1.0, minutes / 60)
            ),
        }
    print(f"\n{fleet.notifications} alerts in notifications")
    for words, good in met.items():
        print(f"{'met   ' if good else 'NOT MET'} {words}")
    return all(met.values())


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--scrape-seconds", type=int, default=30)
    parser.add_argument("--victoria-metrics", action="store_true", help="instead of Prometheus")
    chosen = parser.parse_args()
    met = asyncio.run(
        measure(
            chosen.hosts,
            chosen.minutes,
            chosen.scrape_seconds,
            victoria_metrics=chosen.victoria_metrics,
        )
    )
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
