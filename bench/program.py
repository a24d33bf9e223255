"""Cost of the running program: its start, its memory, a second of its life."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.host import FullHost
from bench.http import Program, started
from testing.ports import free_port

ROOT = Path(__file__).parents[1]


def _installed() -> dict[str, str]:
    """Return the environment of an installed program: its modules are compiled."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "mps-exporter-bench")
    modules = (
        "bench.stage, mps_exporter.commands.serve, mps_exporter.web.app, mps_exporter.web.server"
    )
    subprocess.run(
        [sys.executable, "-c", f"import {modules}"], env=environment, cwd=ROOT, check=True
    )
    return environment


@contextmanager
def running(full: FullHost, **environment_variables: str) -> Iterator[Program]:
    """Run the exporter on a synthetic host."""
    port = free_port()
    environment = _installed() | environment_variables
    command = [
        sys.executable,
        "-m",
        "bench.stage",
        str(full.folder),
        *full.flags,
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        (full.folder / "exporter.log").open("wb") as log,
        started(command, url, stderr=log, cwd=ROOT, env=environment) as program,
    ):
        yield program


@dataclass(frozen=True)
class Life:
    """Measurements of a running program."""

    first_scrape_seconds: float
    megabytes: float
    idle_percent: float
    scraped_percent: float
    scrape_ms: float
    threads: int


def life(clients: int, seconds: float) -> Life:
    """Run the program this long without scrapes, then this long with a scrape a second."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FullHost(Path(folder), clients) as full,
        running(full) as program,
    ):
        first = program.until_good('mps_control_up{daemon="')
        program.until_good("mps_client_contexts")
        time.sleep(2)
        before = program.cpu_seconds()
        time.sleep(seconds)
        idle = (program.cpu_seconds() - before) / seconds
        times = []
        before, began = program.cpu_seconds(), time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            program.scrape()
            times.append(time.monotonic() - now)
            time.sleep(max(0.0, 1.0 - times[-1]))
        scraped = (program.cpu_seconds() - before) / (time.monotonic() - began)
        return Life(
            first_scrape_seconds=first,
            megabytes=program.megabytes,
            idle_percent=100 * idle,
            scraped_percent=100 * scraped,
            scrape_ms=1000 * statistics.median(times),
            threads=program.status("Threads"),
        )


def report(clients: int, seen: Life) -> list[str]:
    """Return the lines of a report."""
    return [
        f"the program with {clients} clients:",
        f"  start to first good scrape     {seen.first_scrape_seconds:6.2f} s",
        f"  resident memory                {seen.megabytes:6.1f} MB, {seen.threads} threads",
        f"  a scrape over HTTP, gzip       {seen.scrape_ms:6.1f} ms",
        f"  CPU without scrapes            {seen.idle_percent:6.2f} % of a core",
        f"  CPU with a scrape a second     {seen.scraped_percent:6.2f} % of a core, tools included",
    ]
