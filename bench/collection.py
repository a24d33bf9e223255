"""What one collection costs, from the sources to the bytes of the page.

    python -m bench.collection [clients]

Medians of several runs, beside each source asked alone.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.host import CLIENTS_PER_GPU, GPUS, FullHost
from exporter.collect import Collector
from exporter.memory import be_sparing, keep_what_is_there
from exporter.metrics.content_format import TEXT_0_0_4
from exporter.metrics.exposition import encode
from exporter.metrics.render import Build, render

RUNS = 15
BUILD = Build("bench", "", "")


@dataclass(frozen=True)
class Cost:
    """Medians, in milliseconds."""

    wall: float
    cpu: float
    """Of this process."""
    children: float
    """CPU of the control tool."""

    def __str__(self) -> str:
        return f"{self.wall:6.1f} ms wall {self.cpu:6.1f} ms CPU (+ {self.children:.1f} of tools)"


def _cpu(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


async def measure(work: Callable[[], Awaitable[object]], runs: int = RUNS) -> Cost:
    """Repeat it with a pause in between, as scrapes come; the first does not count."""
    found: list[tuple[float, float, float]] = []
    for number in range(runs + 1):
        began = time.perf_counter(), time.process_time(), _cpu(resource.RUSAGE_CHILDREN)
        await work()
        ended = time.perf_counter(), time.process_time(), _cpu(resource.RUSAGE_CHILDREN)
        if number:
            found.append(tuple(b - a for a, b in zip(began, ended, strict=True)))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
    return Cost(*(1000 * statistics.median(column) for column in zip(*found, strict=True)))


@dataclass(frozen=True)
class Result:
    """What was measured on one host."""

    clients: int
    samples: int
    page_bytes: int
    whole: Cost
    exposition: Cost
    sources: dict[str, Cost]

    @property
    def slowest(self) -> str:
        """The source that takes longest alone."""
        return max(self.sources, key=lambda name: self.sources[name].wall)


async def collection(clients: int, runs: int = RUNS) -> Result:
    """Measure a host with so many clients."""
    be_sparing()  # as the program does
    keep_what_is_there()
    with tempfile.TemporaryDirectory() as folder:
        full = FullHost(Path(folder), clients)
        host = full.live()
        collector = Collector(host, full.settings)
        try:
            return await _collection(full, collector, runs)
        finally:
            await host.close()


async def _collection(full: FullHost, collector: Collector, runs: int) -> Result:
    host = collector._host  # noqa: SLF001 - its sources are to be asked alone
    snapshot = await collector.collect()
    await asyncio.sleep(1.1)  # servers are old enough to be asked; tails have settled
    snapshot = await collector.collect()

    async def whole() -> None:
        families = render(await collector.collect(), BUILD)
        encode(families, (), TEXT_0_0_4)

    async def exposition() -> None:
        encode(render(snapshot, BUILD), (), TEXT_0_0_4)

    cost = await measure(whole, runs)
    snapshot = await collector.collect()
    facts = await host.discover(5)
    pids = [pid for daemon in full.daemons for pid in daemon.clients]

    async def tools() -> None:
        await asyncio.gather(*(host.probe(daemon, 5) for daemon in facts))

    sources = {
        "NVML": await measure(lambda: host.read_gpus(5), runs),
        "/proc, daemons": await measure(lambda: host.discover(5), runs),
        "/proc, clients": await measure(lambda: host.identify(pids, 5), runs),
        "control tool": await measure(tools, runs),
        "logs": await measure(lambda: host.poll_logs(facts, 5), runs),
    }
    page = encode(render(snapshot, BUILD), (), TEXT_0_0_4)
    found = sum(len(server.clients) for daemon in snapshot.daemons for server in daemon.servers)
    expected = sum(len(daemon.clients) for daemon in full.daemons)
    if found != expected or not all(result.success for result in snapshot.collectors):
        raise AssertionError(f"{found} of {expected} clients seen; {snapshot.collectors}")
    return Result(
        clients=found,
        samples=sum(1 for line in page.splitlines() if not line.startswith(b"#")),
        page_bytes=len(page),
        whole=cost,
        exposition=await measure(exposition, runs),
        sources=sources,
    )


def report(result: Result) -> list[str]:
    """Tell it in words."""
    alone = result.sources[result.slowest]
    return [
        f"{GPUS} GPUs, {result.clients} clients: {result.samples} samples, "
        f"{result.page_bytes / 1e6:.2f} MB",
        f"  one collection, with its page  {result.whole}",
        f"  of that, the page              {result.exposition}",
        *(f"  {name + ' alone':30} {cost}" for name, cost in result.sources.items()),
        f"  collection / slowest source ({result.slowest}): {result.whole.wall / alone.wall:.2f}",
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    clients = int(arguments[0]) if arguments else GPUS * CLIENTS_PER_GPU
    print("\n".join(report(asyncio.run(collection(clients)))))


if __name__ == "__main__":
    main(sys.argv[1:])
