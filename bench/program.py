"""Cost of the running program: its start, its memory, a second of its life."""

from __future__ import annotations

import contextlib
import gzip
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.host import FullHost
from testing.ports import free_port

ROOT = Path(__file__).parents[1]
START_SECONDS = 20.0
SCRAPE_SECONDS = 120.0
"""Scrape timeout. 10 s ended a run of an hour on an overloaded machine."""
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@dataclass
class Program:
    """A running exporter, observed from outside."""

    pid: int
    url: str
    started: float

    def scrape(self) -> str:
        """Fetch a page as Prometheus does."""
        headers = {"Accept": ACCEPT, "Accept-Encoding": "gzip"}
        request = urllib.request.Request(f"{self.url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=SCRAPE_SECONDS) as answer:
            return gzip.decompress(answer.read()).decode()

    def until_good(self, words: str) -> float:
        """Scrape until the page contains these words; return the seconds since the start."""
        while time.monotonic() < self.started + START_SECONDS:
            try:
                if words in self.scrape():
                    return time.monotonic() - self.started
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.005)
        raise AssertionError(f"no page with {words!r} within {START_SECONDS:.0f} s")

    def cpu_seconds(self) -> float:
        """Return the CPU time of the program and of the tools that it ran."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def status(self, key: str) -> int:
        """Return a number of /proc/PID/status."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        return self.status("VmRSS") / 1024

    @property
    def open_files(self) -> list[str]:
        """Targets of its descriptors, with the kernel's names."""
        found = []
        for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.append(str(descriptor.readlink()))
        return found

    @property
    def children(self) -> int:
        """Number of child processes, zombies included."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(len((task / "children").read_text().split()) for task in tasks)


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
    started = time.monotonic()
    with (full.folder / "exporter.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, cwd=ROOT, env=environment)
    try:
        yield Program(process.pid, f"http://127.0.0.1:{port}", started)
    finally:
        process.terminate()
        process.wait(15)


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
