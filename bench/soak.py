"""A day of a busy host in minutes: does the exporter stay as small as it was?

    python -m bench.soak [--minutes N] [--clients N]

Clients come and go by the hundred, users take turns, daemons restart, logs are rotated in both
ways, NVML fails now and then, and a scraper asks all the time. Ends with status 1 when something
grew, or when a counter went down without a restart of its daemon.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.host import Daemon, FullHost
from bench.program import Program, running

WARM_UP_SHARE = 0.3
DRIFT_MEGABYTES = 2.0
STEP_SECONDS = 0.25
NVML_GPU_IS_LOST = 15

_SAMPLE = re.compile(r"^(\w+)(\{.*\})? (\S+)$")
_COUNTER = re.compile(r"_total$|_count$|_sum$|_bucket$")


@dataclass(frozen=True)
class Reading:
    """What the program held at one moment."""

    at: float
    megabytes: float
    threads: int
    descriptors: int
    children: int


@dataclass
class Counters:
    """Watches that no counter goes down."""

    last: dict[str, float] = field(default_factory=dict)
    fallen: list[str] = field(default_factory=list)

    def see(self, page: str) -> int:
        """Take in a page; gives how many counters it has."""
        now = dict(counters(page.splitlines()))
        self.fallen += [
            f"{name}: {self.last[name]} -> {value}"
            for name, value in now.items()
            if value < self.last.get(name, value)
        ]
        self.last.update(now)
        return len(now)


def counters(lines: Iterable[str]) -> Iterable[tuple[str, float]]:
    """Give all counters of a page: names with labels, and values."""
    for line in lines:
        match = _SAMPLE.match(line)
        if match and _COUNTER.search(match[1]):
            yield f"{match[1]}{match[2] or ''}", float(match[3])


@dataclass
class Chaos:
    """Lets things happen to a host."""

    full: FullHost
    size: int
    happened: dict[str, int] = field(default_factory=dict)

    def step(self, chance: random.Random) -> None:
        """A little of everything."""
        daemon = chance.choice(self.full.daemons)
        self.turn_over(daemon, chance)
        full = self.full
        events: tuple[tuple[str, float, Callable[[], object]], ...] = (
            ("restart", 0.01, lambda: full.restart(daemon)),
            ("copytruncate", 0.03, lambda: full.rotate(daemon)),
            ("rename", 0.005, lambda: full.rename(daemon)),
            ("queue", 0.03, lambda: full.queue(daemon, daemon.gpus)),
            ("hand-over", 0.1 if daemon.waiting else 0.0, lambda: full.hand_over(daemon)),
            ("nvml", 0.02, lambda: full.fail(NVML_GPU_IS_LOST)),
        )
        for name, odds, happen in events:
            if chance.random() < odds:
                self.happened[name] = self.happened.get(name, 0) + 1
                happen()
        if self.full.nvml.failing and chance.random() < 0.3:
            self.full.fail(None)
        self.full.tell()

    def turn_over(self, daemon: Daemon, chance: random.Random) -> None:
        """Some clients leave, others come."""
        wanted = self.size // len(self.full.daemons)
        pids = list(daemon.clients)
        leaving = chance.sample(pids, min(len(pids), chance.randint(0, wanted // 6)))
        coming = max(0, wanted - len(pids) + len(leaving) - chance.randint(0, 5))
        self.full.leave(daemon, leaving)
        self.full.connect(daemon, [chance.choice(daemon.gpus) for _ in range(coming)])
        self.happened["clients"] = self.happened.get("clients", 0) + coming


def soak(seconds: float, clients: int) -> int:
    """Run it; gives the exit status."""
    chance = random.Random(10)
    with (
        tempfile.TemporaryDirectory() as folder,
        FullHost(Path(folder), clients) as full,
        running(full) as program,
    ):
        program.until_good("mps_client_contexts")
        return judge(*watch(full, program, seconds, clients, chance))


def watch(
    full: FullHost, program: Program, seconds: float, clients: int, chance: random.Random
) -> tuple[list[Reading], Counters, Chaos]:
    """Let things happen and look on."""
    began = time.monotonic()
    seen, chaos, readings = Counters(), Chaos(full, clients), list[Reading]()
    while (now := time.monotonic() - began) < seconds:
        chaos.step(chance)
        seen.see(program.scrape())
        readings.append(
            Reading(now, program.megabytes, program.threads, program.descriptors, program.children)
        )
        if len(readings) % 100 == 1:
            last = readings[-1]
            print(
                f"{now:6.0f} s  {last.megabytes:6.1f} MB  {last.threads} threads  "
                f"{last.descriptors} descriptors  {last.children} children  {chaos.happened}",
                flush=True,
            )
        time.sleep(STEP_SECONDS)
    full.fail(None)
    return readings, seen, chaos


def judge(readings: Sequence[Reading], seen: Counters, chaos: Chaos) -> int:
    """Say whether something grew."""
    warm = readings[int(len(readings) * WARM_UP_SHARE) :]
    part = max(1, len(warm) // 4)
    first, last = warm[:part], warm[-part:]
    transitions = [f"a counter went down: {one}" for one in seen.fallen[:10]]
    drift = mean(row.megabytes for row in last) - mean(row.megabytes for row in first)
    print(f"memory after warm-up: {mean(row.megabytes for row in first):.1f} MB, then "
          f"{drift:+.2f} MB; highest {max(row.megabytes for row in readings):.1f} MB")  # fmt: skip
    if drift > DRIFT_MEGABYTES:
        transitions.append(f"memory grew by {drift:.2f} MB")
    for name in ("threads", "descriptors", "children"):
        before = min(getattr(row, name) for row in first)
        after = min(getattr(row, name) for row in last)
        print(f"{name}: {before}, then {after}")
        if after > before:
            transitions.append(f"{name} grew from {before} to {after}")
    print(f"{len(readings)} scrapes, {len(seen.last)} counters watched, {chaos.happened}")
    print("\n".join(transitions) or "steady")
    return 1 if transitions else 0


def mean(numbers: Iterable[float]) -> float:
    """Give the mean."""
    found = list(numbers)
    return sum(found) / len(found)


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=384)
    given = parser.parse_args(arguments)
    return soak(given.minutes * 60, given.clients)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
