"""Cost of one collection, from the sources to the bytes of the page.

Medians of several runs, next to each source alone.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench.host import GPUS, FullHost
from mps_exporter.cli import configure_malloc
from mps_exporter.collector import Collector
from mps_exporter.flags import Settings
from mps_exporter.metrics import Build, SparseSeries, render
from mps_exporter.metrics.exposition import TEXT_0_0_4, Encoder
from mps_exporter.snapshot import Snapshot

RUNS = 15
ENCODER = Encoder()
SPARSE = SparseSeries()
BUILD = Build("bench", "", "")


@dataclass(frozen=True)
class Cost:
    """Medians, in milliseconds."""

    wall: float
    cpu: float
    """CPU of this process."""
    children: float
    """CPU of the control tool."""

    def __str__(self) -> str:
        return f"{self.wall:6.1f} ms wall {self.cpu:6.1f} ms CPU (+ {self.children:.1f} of tools)"


def _cpu(name_of: int) -> float:
    usage = resource.getrusage(name_of)
    return usage.ru_utime + usage.ru_stime


async def measure(works: Sequence[Callable[[], Awaitable[object]]], runs: int = RUNS) -> list[Cost]:
    """Repeat these alternately with pauses, like scrapes; the first run does not count."""
    found: list[list[tuple[float, ...]]] = [[] for _ in works]
    for number in range(runs + 1):
        for work, times in zip(works, found, strict=True):
            began = time.perf_counter(), time.process_time(), _cpu(resource.RUSAGE_CHILDREN)
            await work()
            ended = time.perf_counter(), time.process_time(), _cpu(resource.RUSAGE_CHILDREN)
            if number:
                times.append(tuple(b - a for a, b in zip(began, ended, strict=True)))
            await asyncio.sleep(0.02)
    return [
        Cost(*(1000 * statistics.median(column) for column in zip(*times, strict=True)))
        for times in found
    ]


@dataclass(frozen=True)
class Result:
    """Measurements of one host."""

    clients: int
    samples: int
    page_bytes: int
    whole: Cost
    """A collection with a query to each daemon."""
    unasked: Cost
    """A collection without queries: cached replies are fresh, as in most collections."""
    alone: dict[str, Cost]
    """Each source, and the page."""


async def collection(clients: int, runs: int = RUNS) -> Result:
    """Measure a host with this many clients."""
    configure_malloc()  # as the program does
    gc.freeze()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        full = stack.enter_context(FullHost(Path(folder), clients))
        seldom = replace(full.settings, mps_min_query_interval=Settings().mps_min_query_interval)
        collectors = []
        for settings in (full.settings, seldom):
            host = full.live(settings)
            stack.push_async_callback(host.close)
            collectors.append(Collector(host, settings))
        await asyncio.sleep(1.1)  # servers are old enough to be queried
        works = [_whole(collector) for collector in collectors]
        for work in works * 2:
            await work()
        (whole,), (unasked,) = await measure(works[:1], runs), await measure(works[1:], runs)
        return await _result(full, collectors[0], (whole, unasked), runs)


def _page(snapshot: Snapshot) -> bytes:
    return ENCODER.encode(SPARSE.shown(render(snapshot, BUILD)), (), TEXT_0_0_4)


def _whole(collector: Collector) -> Callable[[], Awaitable[object]]:
    async def whole() -> None:
        _page(await collector.collect())

    return whole


async def _result(
    full: FullHost, collector: Collector, whole: tuple[Cost, Cost], runs: int
) -> Result:
    host = collector._host  # noqa: SLF001 - its sources are read alone
    snapshot = await collector.collect()

    async def exposition() -> None:
        _page(snapshot)

    facts = await host.discover(5)
    pids = [pid for daemon in full.daemons for pid in daemon.clients]

    async def tools() -> None:
        await asyncio.gather(*(host.probe(daemon, 5) for daemon in facts))

    alone: dict[str, Callable[[], Awaitable[object]]] = {
        "NVML": lambda: host.read_gpus(5),
        "/proc, daemons": lambda: host.discover(5),
        "/proc, clients": lambda: host.identify(pids, 5),
        "control tool": tools,
        "logs": lambda: host.poll_logs(facts, 5),
        "page": exposition,
    }
    costs = dict(zip(alone, await measure(list(alone.values()), runs), strict=True))
    page = _page(snapshot)
    found = sum(len(server.clients) for daemon in snapshot.daemons for server in daemon.servers)
    expected = sum(len(daemon.clients) for daemon in full.daemons)
    if found != expected or not all(result.success for result in snapshot.collectors):
        raise AssertionError(f"{found} of {expected} clients seen; {snapshot.collectors}")
    return Result(
        clients=found,
        samples=sum(1 for line in page.splitlines() if not line.startswith(b"#")),
        page_bytes=len(page),
        whole=whole[0],
        unasked=whole[1],
        alone=costs,
    )


def report(result: Result) -> list[str]:
    """Return the lines of a report."""
    return [
        f"{GPUS} GPUs, {result.clients} clients: {result.samples} samples, "
        f"{result.page_bytes / 1e6:.2f} MB",
        f"  one collection, with its page  {result.whole}",
        f"  one that asks no daemon        {result.unasked}",
        *(f"  {name + ' alone':30} {cost}" for name, cost in result.alone.items()),
    ]
