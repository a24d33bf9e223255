"""Play simulated MPS hosts, and print what is violated with its shortest history.

python -m testing.world [--seed N] [--seeds K] [--minutes M]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from testing.world.drive import Result, play
from testing.world.script import Action
from testing.world.shrink import shrink


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m testing.world", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds (20)")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of each world (10)")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser.parse_args()


async def _explain(result: Result, minutes: float) -> None:
    """Print the violations, and the fewest actions that lead to one of the same checker."""
    checker = result.violations[0].partition(":")[0]

    async def fails(actions: Sequence[Action]) -> bool:
        played = await play(result.seed, minutes, actions)
        return any(text.startswith(f"{checker}:") for text in played.violations)

    print(f"seed {result.seed}:", *result.violations, sep="\n  ")
    print("  shortest history:")
    for action in await shrink(result.actions, fails):
        print(f"    {action}")


async def _main() -> int:
    options = _arguments()
    began, lines, violated = time.monotonic(), 0, 0
    for seed in range(options.seed, options.seed + options.seeds):
        result = await play(seed, options.minutes)
        lines += result.lines
        if result.violations:
            violated += 1
            await _explain(result, options.minutes)
    print(
        f"{options.seeds} worlds, {options.seeds * options.minutes:g} host-minutes, "
        f"{lines} log lines in {time.monotonic() - began:.1f} s: {violated} with violations"
    )
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
