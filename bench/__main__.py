"""Cost of the whole program on a full host.

    python -m bench [--quick]

Each result is printed with its limit.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.host import FullHost
from bench.http import measure, running

CPU_MS, MEGABYTES, IDLE_PERCENT, START_SECONDS = 45.0, 75.0, 1.0, 1.0
"""Limits: CPU of a scrape without queries, memory, CPU without scrapes, start."""


def against(name: str, value: float, limit: float, unit: str) -> str:
    met = "met    " if value <= limit else "NOT MET"
    return f"{met} {name}: {value:.2f}{unit} (at most {limit:g}{unit})"


def life(seconds: int) -> Iterator[str]:
    """Run the program this long without scrapes, then this long with a scrape a second."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FullHost(Path(folder)) as full,
        running(full, "--mps.min-query-interval=1h") as program,
    ):
        first = program.until_good('mps_control_up{daemon="')
        program.until_good("mps_client_contexts")
        time.sleep(2)  # servers are old enough to be queried
        (cost,) = measure({"mps-exporter": program}, seconds)
        yield json.dumps({**asdict(cost), "threads": program.status("Threads")})
        yield f"median of a scrape: {cost.median_ms:.1f} ms"
    cpu = 10 * (cost.cpu_percent - cost.idle_cpu_percent)
    yield against("CPU of a scrape that asks no daemon", cpu, CPU_MS, " ms")
    yield against("resident memory", cost.rss_megabytes, MEGABYTES, " MB")
    yield against("CPU without scrapes", cost.idle_cpu_percent, IDLE_PERCENT, " % of a core")
    yield against("start to first good scrape", first, START_SECONDS, " s")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    seconds = 5 if parser.parse_args(arguments).quick else 15
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores,")
    print(f"load {os.getloadavg()[0]:.1f} (other work on the machine makes all times longer)")
    for line in life(seconds):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
