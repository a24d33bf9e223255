"""Run the lab on a machine with GPUs: python3 -m tests.hardware --out DIR [SCENARIO ...]."""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import tests.hardware.cost
import tests.hardware.hangs
import tests.hardware.jobs
import tests.hardware.rights
import tests.hardware.sharing  # noqa: F401 - they put their scenarios on the list
from mps_exporter.logging import configure
from tests.hardware.lab import lab, machine
from tests.hardware.scenarios import DOUBLE, SCENARIOS


async def run(names: list[str], out: Path, limit_seconds: float) -> int:
    """Act the scenarios out one after another; return the number of failed checks."""
    failed: list[str] = []
    began = time.monotonic()
    for name in names:
        if time.monotonic() - began > limit_seconds:
            failed.append(f"{name}: no time left")
            continue
        words, scenario = SCENARIOS[name]
        async with lab(name, words, out) as one:
            await asyncio.wait_for(scenario(one), 300)
        failed += [f"{name}: {check.name}" for check in one.checks if not check.ok]
    print(
        f"\n{len(names)} scenarios, {len(failed)} failed checks, {time.monotonic() - began:.0f} s"
    )
    for line in failed:
        print(f"  FAIL {line}")
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-seconds", type=float, default=560)
    parser.add_argument("scenarios", nargs="*")
    arguments = parser.parse_args()
    configure("warn", "logfmt")
    arguments.out.mkdir(parents=True, exist_ok=True)
    one_gpu = machine()[0].startswith("1 ")
    names = arguments.scenarios or [name for name in SCENARIOS if (name not in DOUBLE) == one_gpu]
    unknown = sorted(set(names) - SCENARIOS.keys())
    if unknown:
        parser.error(f"no such scenario: {', '.join(unknown)}")
    return int(asyncio.run(run(names, arguments.out, arguments.limit_seconds)) > 0)


if __name__ == "__main__":
    sys.exit(main())
