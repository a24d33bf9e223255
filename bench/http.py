"""What a scrape costs, seen from outside, for several exporters side by side.

    python -m bench.http [--base NAME] [--rounds N] 'NAME=COMMAND=URL' ...

COMMAND is started, and URL is scraped as Prometheus does, over a connection that is kept where the
server keeps it. An entry without URL (NAME=COMMAND) is a tool that is run once for each scrape,
such as nvidia-smi. All are measured in one run and in turns, so that other work on the machine
slows all of them alike.

CPU is utime + stime of the process, of its descendants, and of those that they have waited for.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
HEADERS = {
    "Accept": ACCEPT,
    "Accept-Encoding": "gzip",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}
START_SECONDS = 30.0
WARM_UP = 5
BURST = 5
"""So many scrapes follow each other without a pause."""


@dataclass(frozen=True)
class Exporter:
    """One entry of the command line."""

    name: str
    command: tuple[str, ...]
    url: str = ""
    """Empty for a tool that prints and ends."""

    @classmethod
    def parse(cls, text: str) -> Exporter:
        """Read ``NAME=COMMAND`` or ``NAME=COMMAND=URL``; COMMAND may hold further ``=``.

        Raises:
            ValueError: It is neither.
        """
        name, _, rest = text.partition("=")
        command, separator, url = rest.rpartition("=http")
        if not separator:
            command, url = rest, ""
        else:
            url = f"http{url}"
        words = tuple(shlex.split(command))
        if not name or not words or (url and urlsplit(url).scheme != "http"):
            raise ValueError(f"neither NAME=COMMAND nor NAME=COMMAND=http://...: {text!r}")
        return cls(name, words, url)


@dataclass
class Cost:
    """What was measured of one exporter."""

    name: str
    paced_ms: list[float] = field(default_factory=list)
    """Scrapes a second apart."""
    burst_ms: list[float] = field(default_factory=list)
    """Scrapes without a pause."""
    idle_cpu_percent: float | None = None
    """Of a core, without scrapes. None: a tool, which is not there between its runs."""
    cpu_percent: float = 0.0
    """Of a core, with scrapes a second apart."""
    cpu_ms_per_scrape: float = 0.0
    """All CPU of the seconds with scrapes, by scrape: what runs between scrapes included."""
    rss_megabytes: float = 0.0
    page_bytes: int = 0
    sent_bytes: int = 0
    series: int = 0

    @property
    def median_ms(self) -> float:
        """Of the scrapes a second apart."""
        return statistics.median(self.paced_ms)

    @property
    def p95_ms(self) -> float:
        """Of the scrapes a second apart."""
        return percentile(self.paced_ms, 95)

    @property
    def burst_median_ms(self) -> float:
        """Of the scrapes without a pause."""
        return statistics.median(self.burst_ms)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def cpu_seconds(pid: int) -> float:
    """CPU of a process (utime + stime), of its descendants, and of those that were waited for."""
    total = 0.0
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        with suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total


def rss_megabytes(pid: int) -> float:
    """Resident memory of one process, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


class _Server:
    """An exporter that runs and is scraped."""

    def __init__(self, exporter: Exporter, log: Path) -> None:
        address = urlsplit(exporter.url)
        self._path = urlunsplit(("", "", address.path or "/", address.query, ""))
        self._connection = http.client.HTTPConnection(
            address.hostname or "127.0.0.1", address.port, timeout=10
        )
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                exporter.command, stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Scrape until there is a page.

        Raises:
            RuntimeError: There is none; what the program printed is in the message.
        """
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError, http.client.HTTPException):
                if self.scrape()[1]:
                    return
            self._connection.close()
            time.sleep(0.1)
        raise RuntimeError(f"no page: {self._log.read_text(errors='replace')[-2000:]}")

    def scrape(self) -> tuple[bytes, int]:
        """Fetch a page, and how many bytes of it were sent.

        Raises:
            OSError, HTTPException: The server is not there, or says something else than 200.
        """
        self._connection.request("GET", self._path, headers=HEADERS)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise http.client.HTTPException(f"status {answer.status}")
        if answer.headers["Content-Encoding"] != "gzip":
            return body, len(body)
        page = zlib.decompress(body, wbits=31)
        return page, len(body)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def rss_megabytes(self) -> float:
        return rss_megabytes(self._process.pid)

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


class _Tool:
    """A program that is run for each scrape."""

    def __init__(self, exporter: Exporter) -> None:
        self._command = exporter.command
        self._cpu = 0.0
        self._rss = 0.0

    def wait(self) -> None:
        self.scrape()

    def scrape(self) -> tuple[bytes, int]:
        """Run it and take what it prints.

        Raises:
            CalledProcessError: It failed.
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(self._command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._cpu += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return done.stdout, len(done.stdout)

    def cpu_seconds(self) -> float:
        return self._cpu

    def rss_megabytes(self) -> float:
        """Not measured: it is there for milliseconds."""
        return 0.0

    def close(self) -> None:
        """Nothing is left of it."""


class Comparison:
    """Several exporters under measurement."""

    def __init__(self, exporters: Sequence[Exporter], stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-http-")))
        self._subjects: list[tuple[_Server | _Tool, Cost]] = []
        for exporter in exporters:
            subject: _Server | _Tool
            if exporter.url:
                subject = _Server(exporter, folder / f"{len(self._subjects)}.log")
            else:
                subject = _Tool(exporter)
            stack.callback(subject.close)
            self._subjects.append((subject, Cost(exporter.name)))

    def measure(self, rounds: int, interval: float) -> list[Cost]:
        """All of it: nobody is scraped, each is scraped once an interval, then in bursts."""
        for subject, _ in self._subjects:
            subject.wait()
        for _ in range(WARM_UP):
            for subject, _ in self._subjects:
                subject.scrape()
        self._idle(min(rounds * interval, 15.0))
        self._paced(rounds, interval)
        self._bursts(max(rounds // BURST, 3))
        for subject, cost in self._subjects:
            page, cost.sent_bytes = subject.scrape()
            cost.page_bytes = len(page)
            lines = page.splitlines()
            cost.series = sum(1 for line in lines if line and not line.startswith(b"#"))
            cost.rss_megabytes = subject.rss_megabytes()
        return [cost for _, cost in self._subjects]

    def _idle(self, seconds: float) -> None:
        before = [subject.cpu_seconds() for subject, _ in self._subjects]
        time.sleep(seconds)
        for (subject, cost), was in zip(self._subjects, before, strict=True):
            if isinstance(subject, _Server):
                cost.idle_cpu_percent = 100 * (subject.cpu_seconds() - was) / seconds

    def _paced(self, rounds: int, interval: float) -> None:
        """Each once in each interval, one after another with equal pauses between them."""
        before = [subject.cpu_seconds() for subject, _ in self._subjects]
        began = due = time.monotonic()
        step = interval / len(self._subjects)
        for _ in range(rounds):
            for subject, cost in self._subjects:
                time.sleep(max(0.0, due - time.monotonic()))
                cost.paced_ms.append(_timed(subject))
                due += step
        time.sleep(max(0.0, due - time.monotonic()))
        seconds = time.monotonic() - began
        for (subject, cost), was in zip(self._subjects, before, strict=True):
            used = subject.cpu_seconds() - was
            cost.cpu_percent = 100 * used / seconds
            cost.cpu_ms_per_scrape = 1000 * used / rounds

    def _bursts(self, rounds: int) -> None:
        for _ in range(rounds):
            turns = list(self._subjects)
            random.shuffle(turns)
            for subject, cost in turns:
                cost.burst_ms += [_timed(subject) for _ in range(BURST)]


def _timed(subject: _Server | _Tool) -> float:
    """Milliseconds of one scrape, with the page unpacked."""
    began = time.perf_counter()
    subject.scrape()
    return 1000 * (time.perf_counter() - began)


def compare(exporters: Sequence[Exporter], rounds: int = 30, interval: float = 1.0) -> list[Cost]:
    """Start all, measure all, end all."""
    with ExitStack() as stack:
        return Comparison(exporters, stack).measure(rounds, interval)


def report(costs: Sequence[Cost], base: str) -> list[str]:
    """Give a table, and the ratios to the exporter of this name."""
    lines = [
        f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "",
        f"{'':22s}{'median':>9s}{'p95':>9s}{'burst':>9s}{'CPU':>9s}{'CPU':>9s}{'idle':>9s}"
        f"{'RSS':>8s}{'page':>8s}{'sent':>8s}{'series':>8s}",
        f"{'':22s}{'ms':>9s}{'ms':>9s}{'ms':>9s}{'ms/scr.':>9s}{'% core':>9s}{'% core':>9s}"
        f"{'MiB':>8s}{'kB':>8s}{'kB':>8s}{'':>8s}",
    ]
    for cost in costs:
        idle = "" if cost.idle_cpu_percent is None else f"{cost.idle_cpu_percent:.2f}"
        lines.append(
            f"{cost.name:22s}{cost.median_ms:9.2f}{cost.p95_ms:9.2f}{cost.burst_median_ms:9.2f}"
            f"{cost.cpu_ms_per_scrape:9.2f}{cost.cpu_percent:9.2f}{idle:>9s}"
            f"{cost.rss_megabytes:8.1f}{cost.page_bytes / 1000:8.1f}{cost.sent_bytes / 1000:8.1f}"
            f"{cost.series:8d}"
        )
    reference = next(cost for cost in costs if cost.name == base)
    lines += ["", f"ratios to {base}:"]
    for cost in costs:
        if cost is reference:
            continue
        cpu = cost.cpu_percent / reference.cpu_percent if reference.cpu_percent else float("nan")
        lines.append(
            f"{cost.name:22s}{cost.median_ms / reference.median_ms:9.2f}"
            f"{cost.p95_ms / reference.p95_ms:9.2f}"
            f"{cost.burst_median_ms / reference.burst_median_ms:9.2f}{cpu:9.2f}"
        )
    return lines


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("exporters", nargs="+", type=Exporter.parse, metavar="NAME=COMMAND=URL")
    parser.add_argument("--base", help="whom the others are compared with (default: the last)")
    parser.add_argument("--rounds", type=int, default=30, help="scrapes of each (default: 30)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds (default: 1)")
    parser.add_argument("--json", type=Path, help="write every time that was taken here")
    chosen = parser.parse_args(arguments)
    base = chosen.base or chosen.exporters[-1].name
    if base not in {exporter.name for exporter in chosen.exporters}:
        parser.error(f"--base: no exporter {base!r}")
    costs = compare(chosen.exporters, chosen.rounds, chosen.interval)
    print("\n".join(report(costs, base)))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
