"""Does watching slow the watched? python3 -m tests.hardware.interference --out FILE [--rounds N].

A CUDA client under MPS launches short kernels without a pause and counts them. The exporter runs
beside it and is scraped every second, in turns with being stopped (SIGSTOP). The medians of the
client's rate with and without it are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from tests.hardware.lab import CONTROL, build_client, machine
from tests.hardware.program import exporter_program, scrape

TURN_SECONDS = 3.0
SETTLING_SECONDS = 0.5


def turns(process: subprocess.Popen[bytes], rounds: int) -> list[tuple[bool, float, float]]:
    """Let the exporter run and stop in turns; gives (whether it ran, from, to)."""
    spans = []
    for turn in range(2 * rounds):
        # ABBA: a drift of the clock rate touches both alike.
        runs = turn % 4 in {0, 3}
        process.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
        time.sleep(SETTLING_SECONDS)
        begin = time.monotonic()
        while (now := time.monotonic()) < begin + TURN_SECONDS:
            if runs:
                scrape()
            time.sleep(max(0.0, min(1.0, begin + TURN_SECONDS - now)))
        spans.append((runs, begin, begin + TURN_SECONDS))
    process.send_signal(signal.SIGCONT)
    return spans


def rates(lines: list[str], spans: list[tuple[bool, float, float]]) -> dict[bool, list[float]]:
    """The client's kernels a second in the windows that lie within a turn."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for line in lines:
        if not (line.startswith("{") and line.endswith("}")):
            continue
        event = json.loads(line)
        if event["event"] != "rate":
            continue
        for runs, begin, end in spans:
            if begin <= event["from"] and event["to"] <= end:
                found[runs].append(event["kernels"] / (event["to"] - event["from"]))
    return found


def measure(rounds: int) -> dict[str, object]:
    """One comparison."""
    with tempfile.TemporaryDirectory(prefix="interference-") as name:
        folder = Path(name)
        client = build_client(folder)
        pipe, log = folder / "pipe", folder / "log"
        pipe.mkdir()
        log.mkdir()
        env = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(log),
        }
        subprocess.run([CONTROL, "-d"], env=env, check=True, timeout=30)
        seconds = 2 * rounds * (TURN_SECONDS + SETTLING_SECONDS) + 8
        output = folder / "client.out"
        with output.open("wb") as file:
            spinning = subprocess.Popen(
                [str(client), "rate", str(seconds), "64", "8"], env=env, stdout=file
            )
        try:
            time.sleep(4)
            with exporter_program() as process:
                time.sleep(1)
                spans = turns(process, rounds)
        finally:
            spinning.kill()
            spinning.wait(10)
            subprocess.run([CONTROL], input="quit\n", text=True, env=env, timeout=60, check=False)
        found = rates(output.read_text().splitlines(), spans)
    with_it, without = (statistics.median(found[runs]) for runs in (True, False))
    return {
        "machine": machine(),
        "turns_each": rounds,
        "windows": {"with": len(found[True]), "without": len(found[False])},
        "kernels_per_second": {"with": round(with_it, 1), "without": round(without, 1)},
        "difference": round(with_it / without - 1, 5),
        "quartiles_without": [round(one, 1) for one in statistics.quantiles(found[False])],
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    figures = measure(arguments.rounds)
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
