"""What all our rules cost Prometheus, and how many series a fleet is.

    python -m bench.rules [hosts] [minutes]

Serves the exporter's own output for that many hosts of 8 GPUs with 48 clients each (a control
daemon for each GPU, as Slurm and Kubernetes start them) and kube-state-metrics' view of their pods
to a real Prometheus with our rules, and prints what it says about its rules after some minutes.
Readings of the GPUs are those of a recorded H200.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector

from mps_exporter.metrics.content_format import TEXT_0_0_4
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.metrics.render import Build, ClientSeries, SparseSeries, render
from mps_exporter.mps.log_metrics import LOG_METRICS
from mps_exporter.mps.record import Counters
from mps_exporter.observations import GpuObservation, LogState, NvmlObservation
from mps_exporter.snapshot import (
    PROCESS_KINDS,
    Client,
    CollectorResult,
    ControlDaemon,
    Gpu,
    Histogram,
    LabelValues,
    LogMetricValues,
    Server,
    Snapshot,
    Wait,
)
from mps_exporter.sources.recording import read_recording
from testing.fleet_page import dropped
from testing.ports import free_port
from testing.prometheus_programs import UNITS, program
from testing.rule_files import ROOT, RULE_FILES

GPUS = 8
CLIENTS = 48
USERS = (1001, 1002, 1003)
HOUR_OF_CLIENTS = 400
SCRAPE_SECONDS = 15
RULES_SECONDS = 30
NOW = time.time()
HOST = "HOST"


def recorded_gpu() -> GpuObservation:
    """An H200 with every reading that it gives."""
    recording = read_recording(ROOT.parent / "tests" / "recordings" / "limits.rec.gz")
    seen = [item for item in recording.observations if isinstance(item, NvmlObservation)]
    return max((gpu for item in seen for gpu in item.gpus), key=lambda gpu: len(gpu.readings))


def client(daemon: int, number: int, uuid: str) -> Client:
    """A client in a pod of its own."""
    pid = 10_000 + daemon * 100 + number
    uid = USERS[number % len(USERS)]
    return Client(
        pid=pid,
        server_pid=5_000 + daemon,
        uid=uid,
        user=f"user{uid}",
        command="python3",
        container_id=f"containerd://{HOST}{pid:032x}{'0' * 28}",
        pod_uid=f"{HOST}0000-0000-4000-8000-{pid:012x}",
        pid_namespace=4026530000 + pid,
        limit_source="client",
        environment_readable=True,
        connected_at=NOW - 600,
        contexts={uuid: 1},
        memory_used_bytes={uuid: 10**9},
        memory_limit_bytes={uuid: 2 * 10**9},
        active_thread_ratio=0.1,
        sm_limit={uuid: 13},
        priority=0,
        state="active",
        state_since=NOW - 60,
    )


def counters(uuid: str) -> LogMetricValues:
    """Of a daemon that has met everything."""
    known: dict[str, tuple[str | int | None, ...]] = {"uid": USERS, "uuid": (uuid,)}
    found: dict[str, Mapping[LabelValues, float | Histogram]] = {}
    for name, begun in Counters().snapshot().items():
        metric = LOG_METRICS[name]
        value: float | Histogram = 3 if metric.kind == "counter" else NOW - 86_400
        if metric.kind == "histogram":
            value = Histogram(metric.bounds, (1,) * (len(metric.bounds) + 1), 1000.0)
        labels = (metric.values.get(label) or known[label] for label in metric.labels)
        found[name] = {**begun, **dict.fromkeys(product(*labels), value)}
    return found


def idle_host(gpus: int = GPUS) -> Snapshot:
    """Make a host on which nothing has happened yet: no user, no server, no incident."""
    busy = host(0, gpus)
    daemons = [
        replace(
            daemon,
            servers=(),
            servers_count=0,
            waits=(),
            handover_backoff_seconds=None,
            counters=Counters().snapshot(),
        )
        for daemon in busy.daemons
    ]
    cards = [
        replace(card, processes_by_kind=dict.fromkeys(PROCESS_KINDS, 0), sm_committed_ratio=None)
        for card in busy.gpus
    ]
    return replace(busy, daemons=tuple(daemons), gpus=tuple(cards))


def host(clients: int = CLIENTS, gpus: int = GPUS) -> Snapshot:
    """One host with everything that can be on it."""
    card = replace(recorded_gpu(), compute_mode="exclusive_process")
    daemons, cards = [], []
    for number in range(gpus):
        uuid = f"GPU-{HOST}{number:04d}-0000-4000-8000-000000000000"
        pipe = f"/run/nvidia-mps/{number}"
        server = Server(
            pid=5_000 + number,
            uid=1001,
            user="user1001",
            start_time_seconds=NOW - 900,
            state="ACTIVE",
            ghost=False,
            clients_connected=clients,
            contexts={uuid: clients},
            contexts_limit={uuid: 60},
            active_thread_ratio=1.0,
            memory_used_bytes={uuid: 7 * 10**7},
            pinned_memory_limit_bytes={uuid: 2 * 10**9},
            clients=tuple(client(number, index, uuid) for index in range(clients)),
        )
        daemons.append(
            ControlDaemon(
                pipe_directory=pipe,
                log_directory=f"/var/log/mps/{number}",
                state="answering",
                pid=4_000 + number,
                uid=0,
                user="root",
                start_time_seconds=NOW - 9000,
                binary_version="13000",
                protocol="2",
                multiuser=False,
                query_duration_seconds=0.003,
                queries=1000,
                default_active_thread_ratio=1.0,
                default_client_priority=0,
                servers_count=1,
                servers=(server,),
                waits=(Wait(20_000 + number, 1002, NOW - 20, 1001),),
                handover_backoff_seconds=51.2,
                gpu_uuids=(uuid,),
                logs=tuple(
                    LogState(pipe, log, f"{log}.log", readable=True, size_bytes=10**6)
                    for log in ("control", "server")
                ),
                counters=counters(uuid),
            )
        )
        cards.append(
            Gpu(
                observation=replace(card, index=number, uuid=uuid),
                index=str(number),
                uuid=uuid,
                served_by=(pipe,),
                stranded_clients=0,
                processes_by_kind={
                    "mps_client": clients,
                    "mps_server": 1,
                    "direct": 0,
                    "graphics": 0,
                },
                sm_committed_ratio=clients * 0.04,
                client_memory_committed_bytes=clients * 2 * 10**9,
            )
        )
    names = ("nvml", "control", "logs", "process")
    return Snapshot(
        taken_at=NOW,
        driver_version="580.159.04",
        cuda_version="13.0",
        gpus=tuple(cards),
        gpu_indexes={card.uuid: card.index for card in cards},
        daemons=tuple(daemons),
        collectors=tuple(CollectorResult(name, True, 0.01) for name in names),  # type: ignore[arg-type]
        unreadable_environments=0,
        unknown_readings=0,
    )


def exposition(clients: int = CLIENTS, gpus: int = GPUS) -> bytes:
    """What the exporter on such a host says; HOST stands where hosts differ."""
    return page_of(host(clients, gpus))


def page_of(snapshot: Snapshot, clients: ClientSeries = "full") -> bytes:
    """The first page of an exporter that sees this."""
    build = Build("0", "", "3.11")
    families = SparseSeries().shown(render(snapshot, build, clients=clients))
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    return Encoder().encode(families, tuple(process.collect()), TEXT_0_0_4)


def pods(hosts: int) -> bytes:
    """What kube-state-metrics says of all clients' pods."""
    lines = []
    for number in range(hosts):
        name = f"{number:04x}"
        for index in range(GPUS * CLIENTS):
            pid = 10_000 + index // CLIENTS * 100 + index % CLIENTS
            uid = f"{name}0000-0000-4000-8000-{pid:012x}"
            pod = f'namespace="research",pod="job-{name}-{pid}",uid="{uid}"'
            container = f"containerd://{name}{pid:032x}{'0' * 28}"
            lines.append(
                f'kube_pod_container_info{{{pod},container="main",image_spec="i:1",image="i:1",'
                f'image_id="i@sha256:1",container_id="{container}"}} 1'
            )
            lines.append(
                f'kube_pod_info{{{pod},host_ip="10.0.0.1",pod_ip="10.1.0.1",node="{name}",'
                'created_by_kind="Job",created_by_name="job",priority_class="",'
                'host_network="false"} 1'
            )
    return ("\n".join(lines) + "\n").encode()


def by_name(text: bytes) -> Counter[str]:
    """Samples of one scrape, by the names of their series."""
    samples = (line for line in text.splitlines() if line and not line.startswith(b"#"))
    return Counter(re.split(rb"[{ ]", line)[0].decode() for line in samples)


def series(text: bytes) -> int:
    """Samples of one scrape."""
    return by_name(text).total()


def series_table() -> Iterator[str]:
    """Give the table of docs/fleet.md."""
    full, half = exposition(), exposition(CLIENTS // 2)
    idle, one_gpu = exposition(0), exposition(0, GPUS - 1)
    yield "| | series |"
    yield "|---|---|"
    yield f"| the exporter itself | {series(exposition(0, 0))} |"
    quiet = series(page_of(idle_host())) - series(page_of(idle_host(GPUS - 1)))
    yield f"| a GPU with its own control daemon, while nothing happens | {quiet} |"
    met = series(idle) - series(one_gpu)
    yield f"| the same after waits, crashes, faults and refusals of three users | {met} |"
    per_client = (series(full) - series(half)) / (GPUS * CLIENTS / 2)
    yield f"| a client with one GPU | {per_client:.0f} |"
    host_words = f"a host of {GPUS} GPUs with {CLIENTS} clients each, after all that"
    yield f"| {host_words} | {series(full):,} |"
    levels: tuple[ClientSeries, ...] = ("summary", "off")
    for level in levels:
        count = series(page_of(host(), level))
        yield f"| that host with `--collector.clients={level}` | {count:,} |"


def print_sizes() -> None:
    """Series of a host, what each GPU, daemon and client adds, and what comes and goes."""
    full, half = exposition(), exposition(CLIENTS // 2)
    idle, one_gpu = exposition(0), exposition(0, GPUS - 1)
    print(f"a host of {GPUS} GPUs with {CLIENTS} clients each:")
    print(f"  {series(full):6d} series")
    print(
        f"  {len(full) / 1e6:6.2f} MB a scrape, {len(gzip.compress(full, 1)) / 1e3:.0f} kB in gzip"
    )
    per_client = (series(full) - series(half)) / (GPUS * CLIENTS / 2)
    print(f"  {per_client:6.0f} series a client (more with several GPUs)")
    print(f"  {series(idle) - series(one_gpu):6d} series a GPU with its daemon, without clients")
    print(f"  {series(exposition(0, 0)):6d} series of the exporter itself")
    churn = HOUR_OF_CLIENTS * per_client
    print(f"  {churn:6.0f} new series an hour, if {HOUR_OF_CLIENTS} clients start in it")
    few = sum(count for name, count in by_name(full).items() if not dropped(name))
    print(f"  {few:6d} series without those that docs/fleet.md drops")
    names = by_name(idle)
    gpu = sum(count for name, count in names.items() if name.startswith("mps_gpu_"))
    parts = ("_bucket", "_count", "_sum")
    histograms = sum(count for name, count in names.items() if name.endswith(parts))
    print(f"  {gpu:6d} about GPUs, {histograms} of histograms, without clients")


async def serve(hosts: int, port: int) -> web.AppRunner:
    """All hosts behind one port: /0/metrics to /N/metrics, and /pods."""
    body, all_pods = exposition(), pods(hosts)

    async def metrics(request: web.Request) -> web.Response:
        name = f"{int(request.match_info['host']):04x}".encode()
        return web.Response(body=body.replace(HOST.encode(), name), content_type="text/plain")

    async def kube(request: web.Request) -> web.Response:
        del request
        return web.Response(body=all_pods, content_type="text/plain")

    app = web.Application()
    app.router.add_get("/{host:[0-9]+}/metrics", metrics)
    app.router.add_get("/pods", kube)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


def configuration(hosts: int, port: int) -> dict[str, Any]:
    """One target for each host: they differ in their path, and so in the label instance."""
    target = f"127.0.0.1:{port}"
    return {
        "global": {
            "scrape_interval": f"{SCRAPE_SECONDS}s",
            "evaluation_interval": f"{RULES_SECONDS}s",
        },
        "rule_files": ["rules/*.yml"],
        "scrape_configs": [
            {
                "job_name": "mps-exporter",
                "static_configs": [
                    {
                        "targets": [target],
                        "labels": {"instance": f"h{n}", "__metrics_path__": f"/{n}/metrics"},
                    }
                    for n in range(hosts)
                ],
            },
            {
                "job_name": "kube-state-metrics",
                "honor_labels": True,
                "metrics_path": "/pods",
                "static_configs": [{"targets": [target]}],
            },
        ],
    }


def write_rules(folder: Path) -> dict[str, float]:
    """Our rules, all evaluated at the same interval to be measured as often as the others.

    Gives each group's real share: a group that is evaluated every minute has a half.
    """
    shares = {}
    for file in RULE_FILES:
        content = yaml.safe_load(file.read_text())
        for group in content["groups"]:
            interval = group.pop("interval", f"{RULES_SECONDS}s")
            seconds = int(interval[:-1]) * UNITS[interval[-1]]
            shares[group["name"]] = RULES_SECONDS / seconds
        (folder / file.name).write_text(yaml.safe_dump(content, width=10_000))
    return shares


async def ask(base: str, path: str, **parameters: str) -> Any:
    """One question to Prometheus's API."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"http://{base}/api/v1/{path}", params=parameters) as response,
    ):
        return json.loads(await response.text())["data"]


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


class Times:
    """How long each evaluation took, by group and by rule, as Prometheus says."""

    def __init__(self, shares: dict[str, float]) -> None:
        self.share = shares
        self.groups: dict[str, list[float]] = {}
        self.rules: dict[str, list[float]] = {}
        self._last: dict[str, str] = {}

    async def look(self, base: str) -> None:
        """Take down what was evaluated since the last look."""
        for group in (await ask(base, "rules"))["groups"]:
            name = group["name"]
            if group["lastEvaluation"] == self._last.get(name):
                continue
            self._last[name] = group["lastEvaluation"]
            self.groups.setdefault(name, []).append(group["evaluationTime"])
            for rule in group["rules"]:
                assert rule["health"] in {"ok", "unknown"}, rule.get("lastError")
                self.rules.setdefault(rule["name"], []).append(rule["evaluationTime"])

    def print(self) -> None:
        """The later half of the evaluations: the first met an empty database."""
        settled = {name: times[len(times) // 2 :] for name, times in self.groups.items()}
        for name, times in sorted(settled.items(), key=lambda item: -median(item[1])):
            print(
                f"  {name:24s} {1000 * median(times):8.1f} ms, worst {1000 * max(times):8.1f} ms, "
                f"every {RULES_SECONDS / self.share[name]:g} s"
            )
        total = sum(self.share[name] * median(times) for name, times in settled.items())
        print(f"  all groups, each by its interval: {total:.3f} s of each {RULES_SECONDS} s")
        print("  dearest rules:")
        medians = {name: median(times[len(times) // 2 :]) for name, times in self.rules.items()}
        for name, middle in sorted(medians.items(), key=lambda item: -item[1])[:6]:
            print(f"    {name:48s} {1000 * middle:8.1f} ms")


async def number(base: str, expr: str) -> float:
    """The one value of an expression."""
    return float((await ask(base, "query", query=expr))["result"][0]["value"][1])


async def measure(hosts: int, minutes: float) -> None:
    """Run Prometheus for some minutes and print what its rules cost."""
    port, base = free_port(), f"127.0.0.1:{free_port()}"
    runner = await serve(hosts, port)
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder, "rules")
        rules.mkdir()
        times = Times(write_rules(rules))
        config = Path(folder, "prometheus.yml")
        config.write_text(yaml.safe_dump(configuration(hosts, port)))
        process = await asyncio.create_subprocess_exec(
            program("prometheus3"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={base}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + minutes * 60
            while time.monotonic() < deadline:
                await asyncio.sleep(5)
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await times.look(base)
            print(
                f"{hosts} hosts, {minutes:g} minutes, on {os.cpu_count()} cores "
                f"with {os.getloadavg()[0]:.1f} busy processes:"
            )
            print(f"  {await number(base, 'sum(up)'):.0f} targets up")
            every = await number(base, "count({__name__=~'.+'})")
            ours = await number(base, "count({__name__=~'.+:.+'})")
            print(f"  {every:.0f} series, of which our rules made {ours:.0f}")
            scrape = await number(base, "max(scrape_duration_seconds{job='mps-exporter'})")
            print(
                f"  {resident_bytes(process.pid) / 1e9:.1f} GB resident, "
                f"slowest scrape {scrape:.3f} s"
            )
        finally:
            process.terminate()
            await process.wait()
            await runner.cleanup()
    times.print()


def main() -> None:
    """Sizes first, then the measurement."""
    hosts = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    minutes = float(sys.argv[2]) if len(sys.argv) > 2 else 5
    print_sizes()
    asyncio.run(measure(hosts, minutes))


if __name__ == "__main__":
    main()
