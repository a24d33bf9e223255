"""Cost of a full host: one collection, and the whole program.

    python -m bench [--quick]

Each result is printed with its limit.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from bench import program
from bench.collection import collection
from bench.host import CLIENTS_PER_GPU, GPUS

FULL = GPUS * CLIENTS_PER_GPU

CPU_MS, MEGABYTES, IDLE_PERCENT, START_SECONDS = 45.0, 75.0, 1.0, 1.0
"""Limits: CPU of a collection without queries, memory, CPU without scrapes, start."""


def against(name: str, value: float, limit: float, unit: str) -> str:
    met = "met    " if value <= limit else "NOT MET"
    return f"{met} {name}: {value:.2f}{unit} (at most {limit:g}{unit})"


def everything(quick: bool) -> Iterator[str]:
    """Measure, and yield the lines of the report."""
    yield f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, "
    yield f"load {os.getloadavg()[0]:.1f} (other work on the machine makes all times longer)"
    full = asyncio.run(collection(FULL, 7 if quick else 15))
    yield json.dumps(asdict(full), indent=1)
    seen = program.life(FULL, 5 if quick else 15)
    yield json.dumps(asdict(seen), indent=1)
    yield f"median of a scrape over HTTP: {seen.cost.median_ms:.1f} ms"
    yield against("CPU of a collection that asks no daemon", full.unasked.cpu, CPU_MS, " ms")
    yield against("resident memory", seen.cost.rss_megabytes, MEGABYTES, " MB")
    idle = seen.cost.idle_cpu_percent
    yield against("CPU without scrapes", idle, IDLE_PERCENT, " % of a core")
    yield against("start to first good scrape", seen.first_scrape_seconds, START_SECONDS, " s")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    for line in everything(parser.parse_args(arguments).quick):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
