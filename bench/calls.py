"""Where a scrape's time goes on this host: each NVML function, and each part of a collection.

    python -m bench.calls [--scrapes N] [--interval SECONDS] [--page FILE]

Runs the exporter in this process as the program does, with its work between scrapes, and collects
and renders N times. Every function of pynvml and every part of a collection is counted and timed:
wall time, and CPU of the thread that it ran on, the kernel's part included. What happens between
scrapes (a tick a second) is listed apart. Timing a call costs about a microsecond.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from mps_exporter import backend as backend_module
from mps_exporter import collector as collector_module
from mps_exporter.config import Settings
from mps_exporter.metrics.content_format import TEXT_0_0_4
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.nvml import NvmlSession
from mps_exporter.sources.nvml.pynvml_api import NvmlApi

SKIPPED = {"nvmlEventSetWait_v2"}
"""It waits for an event, on a thread of its own."""

SOURCES = ("discover", "identify", "poll_logs", "read_gpus", "probe", "reconcile")

Key = tuple[str, str]
"""When (scrape or tick), and what."""


@dataclass(slots=True)
class Spent:
    """What one function cost in all of its calls."""

    calls: int = 0
    wall: float = 0.0
    cpu: float = 0.0


class Meter:
    """Wraps functions, and adds up how often and how long they ran."""

    def __init__(self) -> None:
        self.spent: dict[Key, Spent] = defaultdict(Spent)
        self.counting = False
        self._thread = threading.local()

    def _when(self) -> str:
        return getattr(self._thread, "when", "scrape")

    def add(self, key: Key, wall: float, cpu: float) -> None:
        """Count one call."""
        if self.counting:
            one = self.spent[key]
            one.calls += 1
            one.wall += wall
            one.cpu += cpu

    def timed(
        self, name: str, function: Callable[..., Any], when: str | None = None
    ) -> Callable[..., Any]:
        """The function, measured; ``when`` says on whose behalf the calls inside are made."""

        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            before = self._when()
            self._thread.when = when or before
            key = self._thread.when, described(name, arguments)
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.add(key, time.perf_counter() - began, time.thread_time() - cpu)
                self._thread.when = before

        return measured

    def awaited(
        self, name: str, function: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        """The coroutine function, its wall time measured: others run on its thread meanwhile."""

        @functools.wraps(function)
        async def measured(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return await function(*arguments, **named)
            finally:
                self.add(("scrape", name), time.perf_counter() - began, 0.0)

        return measured


def described(name: str, arguments: Sequence[Any]) -> str:
    """Name of a call with its numbers; of a batch of fields, how many."""
    if not name.startswith("nvml"):
        return name
    if name == "nvmlDeviceGetFieldValues":
        return f"{name}({len(arguments[1])} fields)"
    if name == "nvml process list":
        return f"{name}, {arguments[2]}"
    numbers = [str(one) for one in arguments if type(one) is int]
    if name == "nvmlDeviceGetSamples":
        numbers = numbers[:1]
    return f"{name}({', '.join(numbers)})" if numbers else name


@contextlib.contextmanager
def measured(meter: Meter) -> Iterator[None]:
    """Measure what is called inside the block."""
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, function: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)

        for name in dir(pynvml):
            function = getattr(pynvml, name)
            if name.startswith("nvml") and name not in SKIPPED and callable(function):
                replace(pynvml, name, meter.timed(name, function))
        listing = meter.timed("nvml process list", NvmlApi.processes)
        replace(NvmlApi, "processes", listing)
        for name in ("observe", "tick"):
            when = "tick" if name == "tick" else "scrape"
            replace(
                NvmlSession, name, meter.timed(f"= NVML, {name}", getattr(NvmlSession, name), when)
            )
        for name in SOURCES:
            replace(LiveHost, name, meter.awaited(f"- source {name}", getattr(LiveHost, name)))
        replace(collector_module, "merge", meter.timed("- merge", collector_module.merge))
        replace(
            backend_module,
            "render_families",
            meter.timed("- render", backend_module.render_families),
        )
        replace(Encoder, "encode", meter.timed("- encode", Encoder.encode))
        gzip = backend_module.gzip_format
        replace(gzip, "compress", meter.timed("- gzip", gzip.compress))
        yield


async def run(settings: Settings, meter: Meter, scrapes: int, interval: float) -> bytes:
    """Collect and render so many times; gives the last page."""
    backend = backend_module.CollectorBackend(settings)
    following = asyncio.create_task(backend.run())
    try:
        for number in range(-3, scrapes):
            if number == 0:
                meter.counting = True
            began, cpu = time.perf_counter(), time.process_time()
            snapshot = await backend.collect(None, None)
            collected = time.perf_counter()
            await backend.expose(snapshot, TEXT_0_0_4, gzip=True)
            done = time.perf_counter()
            meter.add(("scrape", "collection with page"), done - began, time.process_time() - cpu)
            meter.add(("scrape", "- collect"), collected - began, 0.0)
            await asyncio.sleep(max(0.0, began + interval - time.perf_counter()))
        meter.counting = False
        return await backend.expose(snapshot, TEXT_0_0_4, gzip=False)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        await backend.close()


def report(meter: Meter, scrapes: int) -> list[str]:
    """Give two tables: what a scrape cost, and what was done between scrapes."""
    lines = []
    for when in ("scrape", "tick"):
        rows = {name: one for (at, name), one in meter.spent.items() if at == when}
        if not rows:
            continue
        lines += [
            "",
            f"{when}: {'calls/scrape':>60s}{'wall ms/scrape':>16s}{'CPU ms':>9s}{'us/call':>10s}",
        ]
        for name, one in sorted(rows.items(), key=lambda row: -row[1].wall):
            lines.append(
                f"  {name:54s}{one.calls / scrapes:12.2f}{1000 * one.wall / scrapes:16.3f}"
                f"{1000 * one.cpu / scrapes:9.3f}{1e6 * one.wall / one.calls:10.1f}"
            )
        inside = [one for name, one in rows.items() if name.startswith("nvml")]
        lines.append(
            f"  {'all NVML functions':54s}{sum(one.calls for one in inside) / scrapes:12.2f}"
            f"{1000 * sum(one.wall for one in inside) / scrapes:16.3f}"
            f"{1000 * sum(one.cpu for one in inside) / scrapes:9.3f}"
        )
    return lines


def profile(
    settings: Settings, scrapes: int = 30, interval: float = 1.0
) -> tuple[list[str], bytes]:
    """Measure on this host; the report, and the last page."""
    meter = Meter()
    with measured(meter):
        page = asyncio.run(run(settings, meter, scrapes, interval))
    return report(meter, scrapes), page


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scrapes", type=int, default=30)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds (default: 1)")
    parser.add_argument("--page", type=Path, help="write the last page here")
    chosen = parser.parse_args()
    lines, page = profile(Settings(), chosen.scrapes, chosen.interval)
    print("\n".join(lines))
    if chosen.page:
        chosen.page.write_bytes(page)


if __name__ == "__main__":
    main()
