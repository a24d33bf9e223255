"""Play simulated MPS hosts, and print what is violated with its shortest history.

python -m testing.world [--seed N] [--seeds K] [--minutes M] [--pace P] [--jobs J] [--defects]
                        [--against REVISION]
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from testing.world.against import comparing, outputs_of, writing
from testing.world.checks import CHECKS, Check
from testing.world.defects import DEFECTS, put_back
from testing.world.drive import Result, play, record
from testing.world.script import Action, shrink


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m testing.world", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds (20)")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of each world (10)")
    parser.add_argument("--pace", type=float, default=1.0, help="how dense the actions are (1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="of recordings")
    parser.add_argument(
        "--defects", action="store_true", help="put known defects back, and search for each"
    )
    parser.add_argument("--against", help="compare with the exporter of this git revision")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser.parse_args()


def _play(
    seed: int, minutes: float, pace: float, make: Callable[[Path], Check] | None, folder: Path
) -> Result:
    checks = CHECKS if make is None else (make(folder / f"{seed}.jsonl"),)
    return asyncio.run(play(seed, minutes, checks=checks, pace=pace))


def _results(
    options: argparse.Namespace, minutes: float, make: Callable[[Path], Check] | None = None
) -> Generator[Result]:
    """Play the worlds, in this many processes."""
    seeds = range(options.seed, options.seed + options.seeds)
    folder = options.write or options.folder
    one = partial(_play, minutes=minutes, pace=options.pace, make=make, folder=folder)
    if options.jobs == 1:
        yield from map(one, seeds)
        return
    pool = ProcessPoolExecutor(options.jobs)
    try:
        yield from pool.map(one, seeds, chunksize=4)
    finally:
        pool.shutdown(cancel_futures=True)


async def _explain(result: Result, minutes: float, folder: Path) -> None:
    """Print the violations, and the fewest actions that lead to one of the same check."""
    check = result.violations[0].partition(":")[0]

    async def fails(actions: Sequence[Action]) -> bool:
        played = await play(result.seed, minutes, actions)
        return any(text.startswith(f"{check}:") for text in played.violations)

    print(f"seed {result.seed}:", *result.violations, sep="\n  ")
    print("  shortest history:")
    actions = await shrink(result.actions, fails)
    for action in actions:
        print(f"    {action}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"world-{result.seed}.rec.gz"
    scenario = f"simulated world {result.seed}: {result.violations[0]}"[:200]
    await record(result.seed, minutes, actions, scenario, path)
    print(f"  mps-exporter demo {path}")


def _search_worlds(options: argparse.Namespace) -> int:
    began, lines, violated = time.monotonic(), 0, 0
    for result in _results(options, options.minutes):
        lines += result.lines
        if result.violations:
            violated += 1
            asyncio.run(_explain(result, options.minutes, options.folder))
    print(
        f"{options.seeds} worlds, {options.seeds * options.minutes:g} host-minutes, "
        f"{lines} log lines in {time.monotonic() - began:.1f} s: {violated} with violations"
    )
    return 1 if violated else 0


def _compare(options: argparse.Namespace) -> int:
    """Print the first difference of each world from another revision's; or write one's outputs."""
    if options.write:
        return sum(bool(one.violations) for one in _results(options, options.minutes, writing))
    differ = 0
    with outputs_of(options.against) as options.write:
        for one in _results(options, options.minutes, comparing):
            differ += bool(one.violations)
            for text in one.violations:
                print(f"seed {one.seed}: {text.partition(': ')[2]}")
    print(f"{differ} of {options.seeds} worlds differ from {options.against}")
    return 1 if differ else 0


def _search_defects(options: argparse.Namespace) -> int:
    """Print the first seed that finds each defect."""
    missed = 0
    for name, defect in DEFECTS.items():
        minutes = max(options.minutes, defect.minutes)
        with put_back(name), closing(_results(options, minutes)) as results:
            found = next((one for one in results if one.violations), None)
        missed += found is None
        print(
            f"{name}:",
            "not found" if found is None else f"seed {found.seed}, {found.violations[0]}",
        )
    return 1 if missed else 0


if __name__ == "__main__":
    logging.disable()
    chosen = _arguments()
    search = _search_defects if chosen.defects else _search_worlds
    sys.exit(_compare(chosen) if chosen.against else search(chosen))
