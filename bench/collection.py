"""Cost of one collection, from the sources to the bytes of the page.

Medians of several runs.
"""

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.host import FullHost
from bench.http import children_cpu_seconds
from mps_exporter.cli import configure_malloc
from mps_exporter.collector import Collector
from mps_exporter.flags import Settings
from mps_exporter.metrics import Build, SparseSeries, render
from mps_exporter.metrics.exposition import TEXT_0_0_4, encode
from mps_exporter.snapshot import Snapshot

SPARSE = SparseSeries()
BUILD = Build("bench", "", "")


@dataclass(frozen=True)
class Cost:
    """Medians, in milliseconds."""

    wall: float
    cpu: float
    tools_cpu: float


async def measure(work: Callable[[], Awaitable[object]], runs: int) -> Cost:
    """Repeat this with pauses, like scrapes; the first two runs do not count."""
    times: list[tuple[float, ...]] = []
    for _ in range(runs + 2):
        began = time.perf_counter(), time.process_time(), children_cpu_seconds()
        await work()
        ended = time.perf_counter(), time.process_time(), children_cpu_seconds()
        times.append(tuple(b - a for a, b in zip(began, ended, strict=True)))
        await asyncio.sleep(0.02)
    return Cost(*(round(1000 * statistics.median(row), 2) for row in zip(*times[2:], strict=True)))


@dataclass(frozen=True)
class Result:
    """Measurements of one host."""

    clients: int
    samples: int
    page_bytes: int
    whole: Cost
    """A collection with a query to each daemon, and its page."""
    unasked: Cost
    """The same without queries: cached replies are fresh, as in most collections."""
    page_alone: Cost


async def collection(clients: int, runs: int) -> Result:
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
        whole, unasked = [await measure(partial(_whole, one), runs) for one in collectors]
        snapshot = await collectors[0].collect()
        _check_complete(full, snapshot)
        page = await _page(snapshot)
        return Result(
            clients=sum(len(daemon.clients) for daemon in full.daemons),
            samples=sum(1 for line in page.splitlines() if not line.startswith(b"#")),
            page_bytes=len(page),
            whole=whole,
            unasked=unasked,
            page_alone=await measure(partial(_page, snapshot), runs),
        )


async def _whole(collector: Collector) -> None:
    await _page(await collector.collect())


async def _page(snapshot: Snapshot) -> bytes:
    return encode(SPARSE.shown(render(snapshot, BUILD)), (), TEXT_0_0_4)


def _check_complete(full: FullHost, snapshot: Snapshot) -> None:
    found = sum(len(server.clients) for daemon in snapshot.daemons for server in daemon.servers)
    expected = sum(len(daemon.clients) for daemon in full.daemons)
    if found != expected or not all(result.success for result in snapshot.collectors):
        raise AssertionError(f"{found} of {expected} clients seen; {snapshot.collectors}")
