"""All measurements, one after another, with the bars that they are held to.

    python -m bench [--quick] [--plot FILE] [--markdown FILE]

On a host with a GPU it also times this host's own NVML beside nvidia-smi.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import control_log, exposition, gpu, logs, plot, program
from bench.collection import Result, by_turns, collection, report
from bench.host import CLIENTS_PER_GPU, GPUS
from mps_exporter.metrics.content_format import OPENMETRICS_1_0_0, TEXT_0_0_4

FULL = GPUS * CLIENTS_PER_GPU
STEPS = (1, 50, 100, 200, 300, 400)
LOG_LINES = 200_000

WALL_MS, CPU_MS, OF_SLOWEST, FASTER = 60.0, 50.0, 1.5, 10.0
MEGABYTES, START_SECONDS, LINEAR = 60.0, 1.0, 0.95


def against(name: str, value: float, bar: float, unit: str, *, least: bool = False) -> str:
    """Say whether a bar is met."""
    met = value >= bar if least else value <= bar
    word = "at least" if least else "at most"
    return f"{'met   ' if met else 'NOT MET'} {name}: {value:.2f}{unit} ({word} {bar:g}{unit})"


def curve(runs: int) -> tuple[list[Result], list[str]]:
    """Measure hosts of different sizes, by turns: a slow moment of the machine hits them all."""
    results = asyncio.run(by_turns(STEPS, runs))
    rows = ["clients  samples    wall ms  CPU ms"]
    rows += [
        f"{one.clients:7d}  {one.samples:7d}  {one.whole.wall:9.1f} {one.whole.cpu:7.1f}"
        for one in results
    ]
    return results, rows


def everything(quick: bool, picture: Path | None) -> Iterator[str]:
    """Measure and tell, as it comes."""
    runs = 7 if quick else 15
    yield f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, "
    yield f"load {os.getloadavg()[0]:.1f} (other work on the machine makes all times longer)"
    full = asyncio.run(collection(FULL, runs))
    yield from ["", *report(full)]
    compared = [exposition.compare(form) for form in (TEXT_0_0_4, OPENMETRICS_1_0_0)]
    yield from ["", *exposition.report(compared)]
    results, rows = curve(runs)
    yield from ["", *rows]
    cpu = [(float(one.clients), one.whole.cpu) for one in results]
    slope, start, straight = plot.fit(cpu)
    yield f"CPU: {start:.1f} ms and {1000 * slope:.0f} µs for each client, R² {straight:.3f}"
    if picture is not None:
        wall = [(float(one.clients), one.whole.wall) for one in results]
        lines = [plot.Line("wall clock, ms", "#1f6fb2", wall), plot.Line("CPU, ms", "#2a8a3e", cpu)]
        picture.write_text(plot.svg("One collection on a host of 8 GPUs", lines, WALL_MS))
    yield from ["", *logs.speed(LOG_LINES)]
    seen = program.life(FULL, 5 if quick else 15)
    yield from ["", *program.report(FULL, seen)]
    reported, grown = control_log.report()
    yield from ["", *reported]
    yield from ["", *gpu.report()]
    over = full.whole.wall / full.sources[full.slowest].wall
    of_sum = full.whole.wall / full.floor.wall
    yield from [
        "",
        against("one collection with its page", full.whole.wall, WALL_MS, " ms"),
        against("its CPU", full.whole.cpu, CPU_MS, " ms"),
        against(f"its time / that of {full.slowest}", over, OF_SLOWEST, ""),
        against("its time / that of all sources and the page one by one", of_sum, OF_SLOWEST, ""),
        *(
            against(
                f"exposition {one.form.version}, times faster", one.ratio, FASTER, "", least=True
            )
            for one in compared
        ),
        against("straightness of cost (R²)", straight, LINEAR, "", least=True),
        against("resident memory", seen.megabytes, MEGABYTES, " MB"),
        against("start to first good scrape", seen.first_scrape_seconds, START_SECONDS, " s"),
        against("control.log in a day", grown, control_log.BAR_MEGABYTES, " MB"),
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve as SVG")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report there, too")
    given = parser.parse_args(arguments)
    output = []
    for line in everything(given.quick, given.plot):
        print(line, flush=True)
        output.append(line.rstrip())
    if given.markdown is not None:
        words = " ".join(["python -m bench", *arguments])
        given.markdown.write_text("\n".join(["```text", f"$ {words}", *output, "```", ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
