"""How long the doctor takes: with a daemon that answers, and with one that hangs.

python -m bench.doctor [runs]

Daemon and control tool are stand-ins, and there is no GPU: on a host with GPUs, NVML's own time is
added. The shortest possible time is that in which the GPUs' activity can be measured, and the
results are also given as its multiples. Other work on the machine makes all of it longer.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mps_exporter.commands.once import MEASURING_SECONDS
from testing.fake_host import install_tool, set_daemon

ROOT = Path(__file__).parents[1]
BARS = {"answer": 1.0, "hang": 3.0}
"""What the daemon does -> seconds that the doctor may take."""


def report(runs: int) -> Iterator[str]:
    """Run it again and again, and tell."""
    for mode, bar in BARS.items():
        with tempfile.TemporaryDirectory() as folder:
            tool, pipes = install_tool(Path(folder)), Path(folder) / "mps"
            set_daemon(pipes, mode=mode)
            flags = [
                "--no-mps.discovery",
                "--no-collector.nvml",
                f"--mps.control-binary={tool}",
                f"--mps.pipe-directory={pipes}",
                f"--mps.log-directory={folder}",
            ]
            wall, cpu = measure([sys.executable, "-m", "mps_exporter", "doctor", *flags], runs)
        met = "met   " if wall <= bar else "NOT MET"
        yield (
            f"{met} doctor, the daemon: {mode}: {wall:.2f} s (at most {bar:g} s), median of "
            f"{runs}; {wall / MEASURING_SECONDS:.1f} times the shortest; CPU {cpu:.2f} s"
        )
    yield f"load {os.getloadavg()[0]:.1f}"


def measure(command: list[str], runs: int) -> tuple[float, float]:
    """Return the medians of wall clock and CPU, in seconds."""
    wall, cpu = [], []
    for _ in range(runs):
        began, before = time.monotonic(), os.times()
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        wall.append(time.monotonic() - began)
        after = os.times()
        cpu.append(sum(after[2:4]) - sum(before[2:4]))
    return statistics.median(wall), statistics.median(cpu)


if __name__ == "__main__":
    print("\n".join(report(int(sys.argv[1]) if len(sys.argv) > 1 else 11)))
