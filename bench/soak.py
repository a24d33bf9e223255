"""A day of a busy host in minutes: correct counters, and constant memory.

    python -m bench.soak [--minutes N] [--clients N]

Clients come and go, users take turns, daemons restart, logs are rotated in both ways, NVML fails, a
scraper runs. Exits with status 1 if a counter differs from the host's events, if memory grew by
more than the limit per hour, or if threads, descriptors or children increased. (Logs of jobs may
stay open for two minutes after a job's end, and memory is judged after a warm-up of 15 minutes: run
it for 30 minutes or more.)
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from bench.host import Daemon, FullHost
from bench.http import Program, running
from mps_exporter.limits_without_a_flag import SHOWN_AFTER_QUIT_SECONDS
from testing.page import Page

WARM_UP_SECONDS = 900.0
"""The exporter keeps ten minutes for a recording, and bounded tables fill up. Memory is not judged
in a run of less than twice this time."""
MEGABYTES_PER_HOUR = 2.0
NOISE_MEGABYTES = 0.5  # What the mean of some minutes varies by on a host on which nothing changes.
SPARE_THREADS = 4
"""Threads that read logs: as many are kept as there ever were daemons at the same time."""
STEP_SECONDS = 0.25
CHECK_SECONDS = 15.0
SETTLE_SECONDS = 30.0  # Time in which the exporter must have counted all events, on a busy machine.
JOB_SECONDS = 3.0
JOB_LOGS_SECONDS = SHOWN_AFTER_QUIT_SECONDS + 30.0
"""Time after its end for which the logs of a job's daemon may be open: it is still shown."""
FIRST_JOB = 1000
NVML_GPU_IS_LOST = 15

Sample = tuple[str, str, str]
"""Daemon, metric, value of the label next to the daemon's ("" if there is none)."""


@dataclass(frozen=True)
class Reading:
    """What the program held at one moment."""

    at: float
    megabytes: float
    threads: int
    descriptors: int
    """Without the logs of jobs that run or ended lately: these follow how many jobs there were."""
    children: int


def samples(page: str) -> dict[Sample, float]:
    """Return the samples of daemons that have at most one further label."""
    found: dict[Sample, float] = {}
    for name, samples_of_name in Page(page).items():
        for labels, value in samples_of_name:
            daemon = labels.pop("daemon", None)
            if daemon is not None and len(labels) <= 1:
                found[daemon, name, next(iter(labels.values()), "")] = value
    return found


class Truth:
    """Events on the host since the exporter started to count, and its counters."""

    def __init__(self, daemons: Sequence[Daemon], page: str) -> None:
        self._daemons = daemons
        self._counted = samples(page)
        self._caused = {daemon.number: daemon.caused.copy() for daemon in daemons}

    def events(self) -> int:
        return sum(
            (daemon.caused - self._caused[daemon.number]).total() for daemon in self._daemons
        )

    def differences(self, page: str) -> list[str]:
        counted = samples(page)
        found = []
        for daemon in self._daemons:
            for key, value in self._expected(daemon).items():
                sample = (str(daemon.pipe), *key)
                got = counted.get(sample, 0.0)
                if got != value:
                    found.append(f"{daemon.pipe.name} {' '.join(key)}: {got:g}, not {value:g}")
        return found

    def _expected(self, daemon: Daemon) -> Mapping[tuple[str, str], float]:
        before = self._caused[daemon.number]
        return {
            key: self._counted.get((str(daemon.pipe), *key), 0.0) + events - before[key]
            for key, events in daemon.caused.items()
        } | {
            ("mps_control_log_size_bytes", log): path.stat().st_size
            for log in ("control", "server")
            # Until a new file has a line the exporter holds the one that was renamed.
            if (path := daemon.logs / f"{log}.log").exists() and path.stat().st_size
        }

    def settle(self, scrape: Callable[[], str]) -> list[str]:
        """Wait until the exporter has counted all events; return the differences."""
        end = time.monotonic() + SETTLE_SECONDS
        while (missing := self.differences(scrape())) and time.monotonic() < end:
            time.sleep(STEP_SECONDS)
        return missing


@dataclass
class Chaos:
    """Lets things happen to a host."""

    full: FullHost
    size: int
    settle: Callable[[], object] = lambda: None
    """Waits until the exporter has read what was written."""
    happened: dict[str, int] = field(default_factory=dict)
    jobs: list[tuple[float, Daemon]] = field(default_factory=list)
    """Daemons of jobs, with when they end."""
    ended_jobs: dict[Path, float] = field(default_factory=dict)
    """Folders of their logs, and their ends (monotonic time)."""

    def step(self, chance: random.Random) -> None:
        """A little of everything."""
        daemon = chance.choice(self.full.daemons)
        self.turn_over(daemon, chance)
        full = self.full
        events: tuple[tuple[str, float, Callable[[], object]], ...] = (
            ("restart", 0.01, lambda: full.restart(daemon)),
            ("copytruncate", 0.01, lambda: self.rotate(full.rotate, daemon)),
            ("rename", 0.005, lambda: self.rotate(full.rename, daemon)),
            ("queue", 0.03, lambda: full.queue(daemon, daemon.gpus)),
            ("hand-over", 0.1 if daemon.waiting else 0.0, lambda: full.hand_over(daemon)),
            ("nvml", 0.02, lambda: full.fail(NVML_GPU_IS_LOST)),
            ("job", 0.03, self.start_job),
        )
        for name, odds, happen in events:
            if chance.random() < odds:
                self.happened[name] = self.happened.get(name, 0) + 1
                happen()
        if self.full.failing and chance.random() < 0.3:
            self.full.fail(None)
        while self.jobs and time.monotonic() > self.jobs[0][0]:
            _, job = self.jobs.pop(0)
            full.end_job(job)
            self.ended_jobs[job.logs] = time.monotonic()
        self.full.tell()

    def rotate(self, how: Callable[[Daemon], None], daemon: Daemon) -> None:
        """Rotate the logs once the exporter has read them: any reader loses unread lines."""
        self.settle()
        how(daemon)
        self.settle()

    def start_job(self) -> None:
        """A job with a daemon of its own comes, for some seconds."""
        job = self.full.start_job(FIRST_JOB + self.happened["job"])
        self.jobs.append((time.monotonic() + JOB_SECONDS, job))

    def descriptors(self, open_files: Iterable[str]) -> int:
        """How many files are open, without the logs of jobs that run or ended lately."""
        since = time.monotonic() - JOB_LOGS_SECONDS
        recent = {job.logs for _, job in self.jobs}
        recent |= {logs for logs, ended_at in self.ended_jobs.items() if ended_at >= since}
        return sum(recent.isdisjoint(Path(path).parents) for path in open_files)

    def turn_over(self, daemon: Daemon, chance: random.Random) -> None:
        wanted = self.size // len(self.full.daemons)
        pids = list(daemon.clients)
        leaving = chance.sample(pids, min(len(pids), chance.randint(0, wanted // 6)))
        coming = max(0, wanted - len(pids) + len(leaving) - chance.randint(0, 5))
        self.full.leave(daemon, leaving)
        self.full.connect(daemon, [chance.choice(daemon.gpus) for _ in range(coming)])
        self.happened["clients"] = self.happened.get("clients", 0) + coming


def soak(seconds: float, clients: int) -> int:
    with (
        tempfile.TemporaryDirectory() as folder,
        FullHost(Path(folder), clients) as full,
        running(full) as program,
    ):
        program.until_good("mps_client_contexts")
        return judge(*watch(full, program, seconds, clients))


def watch(
    full: FullHost, program: Program, seconds: float, clients: int
) -> tuple[list[Reading], list[str], Chaos]:
    """Cause events and observe the exporter; stop early if an event was not counted."""
    began = checked_at = time.monotonic()
    chance = random.Random(10)
    readings = list[Reading]()
    truth = Truth(full.daemons, program.scrape())
    missing: list[str] = []

    def settle() -> None:
        missing[:] = missing or truth.settle(program.scrape)

    chaos = Chaos(full, clients, settle)
    while (now := time.monotonic() - began) < seconds and not missing:
        chaos.step(chance)
        program.scrape()
        descriptors = chaos.descriptors(program.open_files)
        readings.append(
            Reading(
                now, program.megabytes, program.status("Threads"), descriptors, program.children
            )
        )
        if len(readings) % 100 == 1:
            print(f"{readings[-1]}, {truth.events()} events, {chaos.happened}", flush=True)
        if time.monotonic() - checked_at > CHECK_SECONDS:
            settle()
            checked_at = time.monotonic()
        time.sleep(STEP_SECONDS)
    full.fail(None)
    settle()
    print(f"{truth.events()} events, {len(missing)} counters differ")
    return readings, missing, chaos


def judge(readings: Sequence[Reading], missing: Sequence[str], chaos: Chaos) -> int:
    """Print the result; return 1 if an event was not counted, or if something grew."""
    end = readings[-1].at
    warm = [row for row in readings if row.at >= min(WARM_UP_SECONDS, end / 2)]
    part = max(1, len(warm) // 4)
    first, last = warm[:part], warm[-part:]
    found = [f"a counter is not what happened: {one}" for one in missing[:10]]
    hours = (mean(row.at for row in last) - mean(row.at for row in first)) / 3600
    growth = mean(row.megabytes for row in last) - mean(row.megabytes for row in first)
    highest = max(row.megabytes for row in readings)
    print(f"{growth:+.2f} MB in {hours * 60:.1f} minutes after warm-up, at most {highest:.1f} MB")
    if end >= 2 * WARM_UP_SECONDS and growth > NOISE_MEGABYTES + MEGABYTES_PER_HOUR * hours:
        found.append(f"memory grew by {growth:.2f} MB in {hours * 60:.1f} minutes")
    for name in ("threads", "descriptors", "children"):
        before = min(getattr(row, name) for row in first)
        after = min(getattr(row, name) for row in last)
        print(f"{name}: {before}, then {after}")
        if after > before + (SPARE_THREADS if name == "threads" else 0):
            found.append(f"{name} grew from {before} to {after}")
    print(f"{len(readings)} scrapes, {chaos.happened}")
    print("\n".join(found) or "steady")
    return 1 if found else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=384)
    given = parser.parse_args(arguments)
    return soak(given.minutes * 60, given.clients)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
