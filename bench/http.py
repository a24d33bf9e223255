"""Compare the cost of a scrape of several exporters, measured from outside.

Exporters are started and scraped as Prometheus does, over a persistent connection if the server
supports it. All are measured alternately in one run, so that other work on the machine slows all of
them alike. CPU is utime + stime of the process and of its descendants.
"""

import http.client
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from bench.host import FullHost
from testing.ports import free_port

ROOT = Path(__file__).parents[1]
HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}
START_SECONDS = 30.0
SCRAPE_SECONDS = 120.0  # Scrape timeout. 10 s ended a run of an hour on an overloaded machine.
WARM_UP = 5  # Scrapes before the measurement.
IDLE_SECONDS = 15.0
MODULES = (
    *("bench.stage", "mps_exporter.commands.serve"),
    *("mps_exporter.web.app", "mps_exporter.web.server"),
)


@dataclass
class Cost:
    """Measurements of one exporter."""

    name: str
    paced_ms: list[float] = field(default_factory=list)  # Scrapes a second apart.
    idle_cpu_percent: float = 0.0  # Percent of a core, without scrapes.
    cpu_percent: float = 0.0  # Percent of a core, with scrapes a second apart.
    rss_megabytes: float = 0.0
    series: int = 0

    @property
    def median_ms(self) -> float:
        return statistics.median(self.paced_ms)

    @property
    def p95_ms(self) -> float:
        ordered = sorted(self.paced_ms)
        return ordered[-(-len(ordered) * 95 // 100) - 1]


class Program:
    """A running exporter, observed from outside, and scraped as Prometheus does."""

    def __init__(self, pid: int, url: str) -> None:
        self.pid = pid
        self.url = url
        self.started = time.monotonic()
        address = urlsplit(url)
        self._path = urlunsplit(("", "", address.path or "/", address.query, ""))
        self.connection = http.client.HTTPConnection(
            address.hostname or "127.0.0.1", address.port, timeout=SCRAPE_SECONDS
        )

    def scrape(self) -> str:
        """Fetch a page. Raise OSError or HTTPException."""
        self.connection.request("GET", self._path, headers=HEADERS)
        answer = self.connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise http.client.HTTPException(f"status {answer.status}")
        gzipped = answer.headers["Content-Encoding"] == "gzip"
        return (zlib.decompress(body, wbits=31) if gzipped else body).decode()

    def until_good(self, words: str = "") -> float:
        """Scrape until the page contains these words; return the seconds since the start."""
        while time.monotonic() < self.started + START_SECONDS:
            with suppress(OSError, http.client.HTTPException):
                if words in self.scrape():
                    return time.monotonic() - self.started
            self.connection.close()
            time.sleep(0.005)
        raise AssertionError(f"no page with {words!r} within {START_SECONDS:.0f} s")

    def cpu_seconds(self) -> float:
        """Return the CPU time (utime + stime) of the program and all its descendants."""
        total = 0.0
        waiting = [self.pid]
        while waiting:
            one = waiting.pop()
            with suppress(OSError):
                fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                waiting += children(one)
        return total

    def status(self, key: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))

    @property
    def megabytes(self) -> float:
        return self.status("VmRSS") / 1024

    @property
    def open_files(self) -> list[str]:
        """Targets of its descriptors, with the kernel's names."""
        found = []
        for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                found.append(str(descriptor.readlink()))
        return found

    @property
    def children(self) -> int:
        """Number of child processes, zombies included."""
        return len(children(self.pid))


def children(pid: int) -> list[int]:
    """Return the PIDs of a process's children; none if it has ended."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                found += map(int, (task / "children").read_text().split())
    return found


@contextmanager
def started(command: Sequence[str], url: str, **options: Any) -> Iterator[Program]:
    """Run a program that serves at this URL; the options are those of Popen."""
    process = subprocess.Popen(command, **options)
    program = Program(process.pid, url)
    try:
        yield program
    finally:
        program.connection.close()
        process.terminate()
        process.wait(15)


def installed(*modules: str) -> dict[str, str]:
    """Return the environment of installed programs: these modules are compiled.

    Compiling pynvml alone leaves 12 MiB in the process that does it.
    """
    environment = {**os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "mps-exporter-bench")
    words = [sys.executable, "-c", f"import {', '.join(modules)}"]
    subprocess.run(words, env=environment, cwd=ROOT, check=True)
    return environment


@contextmanager
def running(full: FullHost, *flags: str) -> Iterator[Program]:
    port = free_port()
    environment = installed(*MODULES)
    command = [
        sys.executable,
        "-m",
        "bench.stage",
        str(full.folder),
        *full.flags,
        *flags,
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        (full.folder / "exporter.log").open("wb") as log,
        started(command, url, stderr=log, cwd=ROOT, env=environment) as program,
    ):
        yield program


def children_cpu_seconds() -> float:
    """Return the CPU time of the child processes of this process that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare(
    commands: Mapping[str, Sequence[str]], rounds: int, environment: Mapping[str, str]
) -> list[Cost]:
    """Start all, measure them, and stop all; each command ends with an option without its port."""
    with ExitStack() as stack:
        programs = {}
        for name, (*words, last) in commands.items():
            port = free_port()
            command = (*words, f"{last}{port}")
            url = f"http://127.0.0.1:{port}/metrics"
            how = {"stdout": subprocess.DEVNULL, "env": environment}
            programs[name] = stack.enter_context(started(command, url, **how))
            programs[name].until_good()
        return measure(programs, rounds)


def measure(by_name: Mapping[str, Program], rounds: int) -> list[Cost]:
    """Measure running programs without scrapes, and with scrapes a second apart."""
    programs = [(program, Cost(name)) for name, program in by_name.items()]
    for program, _ in programs * WARM_UP:
        program.scrape()
    time.sleep(1.0)  # what a scrape has started ends
    seconds = min(float(rounds), IDLE_SECONDS)
    before = [program.cpu_seconds() for program, _ in programs]
    time.sleep(seconds)
    for (program, cost), was in zip(programs, before, strict=True):
        cost.idle_cpu_percent = 100 * (program.cpu_seconds() - was) / seconds
    _paced(programs, rounds)
    for program, cost in programs:
        lines = program.scrape().splitlines()
        cost.series = sum(1 for line in lines if line and not line.startswith("#"))
        cost.rss_megabytes = program.megabytes
    return [cost for _, cost in programs]


def _paced(programs: Sequence[tuple[Program, Cost]], rounds: int) -> None:
    before = [program.cpu_seconds() for program, _ in programs]
    began = due = time.monotonic()
    for _ in range(rounds):
        for program, cost in programs:
            time.sleep(max(0.0, due - time.monotonic()))
            began_at = time.perf_counter()
            program.scrape()
            cost.paced_ms.append(1000 * (time.perf_counter() - began_at))
            due += 1.0 / len(programs)
    time.sleep(max(0.0, due - time.monotonic()))
    seconds = time.monotonic() - began
    for (program, cost), was in zip(programs, before, strict=True):
        cost.cpu_percent = 100 * (program.cpu_seconds() - was) / seconds
