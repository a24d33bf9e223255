"""How much control.log grows by our own questions in a day.

    python -m bench.control_log

The exporter's own tool runner asks a stand-in for the daemon that writes the lines which driver 580
writes, about a server with 48 clients. Beside it stands what the real daemon wrote for the same
questions in a recording.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mps_exporter.config import Settings
from mps_exporter.daemon_queries import PROBE_CACHE_FACTOR
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    LogsObservation,
    Outcome,
    ProcessFacts,
)
from mps_exporter.sources.control_tool import ControlTool
from mps_exporter.sources.recording import read_recording
from testing import fake_mps_control

CLIENTS = 48
SERVER = 457
SCRAPE_SECONDS = 15.0
DAY = 86_400.0
BAR_MEGABYTES = 2.0
RECORDING = Path(__file__).parents[1] / "tests" / "recordings" / "context-limit.rec.gz"
"""Its server has 48 clients, too."""

_RUN = re.compile(rb"(?ms)^\[[^\n]*Accepting connection\.\.\.\n\[[^\n]*NEW UI\n.*?UI closed\n")


@dataclass(frozen=True)
class Growth:
    """Bytes in control.log."""

    probe: int
    first: int
    """Of the first questions about a server."""
    again: int
    """Of those that come in every --mps.reconcile-interval."""

    def megabytes_a_day(self, probe_seconds: float, reconcile_seconds: float) -> float:
        """What it comes to, with one server that stays."""
        probes = DAY / probe_seconds * self.probe
        return (probes + DAY / reconcile_seconds * self.again + self.first) / 1e6


def between(interval: float, scrape: float = SCRAPE_SECONDS) -> float:
    """Seconds from one question to the next: the first scrape that is late enough asks."""
    return scrape * max(1, -(-interval // scrape))


async def measure(folder: Path) -> Growth:
    """Ask the stand-in."""
    tool = folder / fake_mps_control.NAME
    source = Path(fake_mps_control.__file__)
    tool.write_text(f"#!/bin/sh\nexec {sys.executable} -S -E {source}\n")
    tool.chmod(0o755)
    state = {
        "pid": 445,
        "log_directory": str(folder),
        "devices": [
            {
                "ordinal": 0,
                "pci": "0000:00.06.00",
                "name": "NVIDIA H200",
                "uuid": "GPU-00000000-1111-2222-3333-444444444444",
            }
        ],
        "servers": [
            {
                "pid": SERVER,
                "clients": [{"pid": 100_000 + n, "contexts": {"0": [1]}} for n in range(CLIENTS)],
            }
        ],
    }
    (folder / fake_mps_control.STATE_FILE).write_text(json.dumps(state))
    daemon = DaemonFacts(
        pipe_directory=str(folder), log_directory=str(folder), process=ProcessFacts(445, 0.0)
    )
    control = ControlTool(str(tool), min_interval_seconds=0.0)
    log = folder / "control.log"

    async def grown(ask: Callable[[], object]) -> int:
        before = log.stat().st_size if log.exists() else 0
        answer = await ask()  # type: ignore[misc]
        if not isinstance(answer, ControlObservation) or answer.outcome is not Outcome.OK:
            raise AssertionError(answer)
        return log.stat().st_size - before

    return Growth(
        probe=await grown(lambda: control.probe(daemon, 5)),
        first=await grown(lambda: control.reconcile(daemon, [SERVER], 5)),
        again=await grown(lambda: control.reconcile(daemon, [SERVER], 5)),
    )


def recorded() -> Iterator[tuple[int, int]]:
    """Give (commands, bytes) of each run of the tool that a real daemon logged."""
    data = b"".join(
        chunk.data
        for one in read_recording(RECORDING).observations
        if isinstance(one, LogsObservation)
        for chunk in one.chunks
        if chunk.log == "control"
    )
    for run in _RUN.findall(data):
        yield run.count(b"] Cmd:"), len(run)


def report() -> tuple[list[str], float]:
    """Measure and tell it in words; also megabytes a day with the default settings."""
    with tempfile.TemporaryDirectory() as folder:
        growth = asyncio.run(measure(Path(folder)))
    settings = Settings()
    probe_seconds = between(settings.mps_min_query_interval * PROBE_CACHE_FACTOR)
    reconcile_seconds = between(settings.mps_reconcile_interval)
    total = growth.megabytes_a_day(probe_seconds, reconcile_seconds)
    real = dict(sorted(recorded()))
    return [
        f"control.log, one server with {CLIENTS} clients, scrapes every {SCRAPE_SECONDS:.0f} s:",
        f"  a probe                {growth.probe:6d} bytes, every {probe_seconds:.0f} s",
        f"  a reconciliation       {growth.again:6d} bytes, every {reconcile_seconds:.0f} s",
        f"  the first of a server  {growth.first:6d} bytes",
        f"  a day                  {total:6.2f} MB",
        "  the real daemon wrote  "
        + ", ".join(f"{size} bytes for {commands} commands" for commands, size in real.items()),
    ], total


def main() -> None:
    """Measure and print."""
    print("\n".join(report()[0]))


if __name__ == "__main__":
    main()
