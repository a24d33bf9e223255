"""Plays a recording through the exporter's own collector, with a clock that the test turns."""

import asyncio
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

from mps_exporter.collector import Collector
from mps_exporter.flags import Settings
from mps_exporter.metrics import Build, render
from mps_exporter.snapshot import Histogram, Snapshot
from mps_exporter.sources.recording import Recording, read_recording
from mps_exporter.sources.replay_host import ReplayHost

Value = float | Histogram
RECORDINGS = Path(__file__).parents[1] / "tests" / "recordings"
STEP_SECONDS = 0.5


class Metrics:
    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    @cached_property
    def samples(self) -> list[tuple[str, dict[str, str], Value]]:
        return list(_flat(self.snapshot))

    def all(self, name: str, **labels: object) -> list[tuple[dict[str, str], Value]]:
        """Samples of this metric that have these labels."""
        wanted = {key: str(value) for key, value in labels.items()}
        return [
            (found, value)
            for metric, found, value in self.samples
            if metric == name and wanted.items() <= found.items()
        ]

    def value(self, name: str, **labels: object) -> float | None:
        """The sum over the samples that match (of histograms: their counts, or with _sum their
        sums); None where there are none."""
        if name.endswith("_sum"):
            histograms = self.all(name.removesuffix("_sum"), **labels)
            sums = [value.sum_seconds for _, value in histograms if isinstance(value, Histogram)]
            return sum(sums) if sums else None
        found = [
            sum(value.counts) if isinstance(value, Histogram) else value
            for _, value in self.all(name, **labels)
        ]
        return float(sum(found)) if found else None


def _flat(snapshot: Snapshot) -> Iterator[tuple[str, dict[str, str], Value]]:
    for family in render(snapshot, Build("test", "", "")):
        for values, value in family.samples:
            labels = dict(zip(family.spec.sample_labels, values, strict=True))
            if value or family.spec.kind != "stateset":  # of the states, the active ones
                yield family.spec.name, labels, value


class Player:
    def __init__(self, recording: Recording | Path, settings: Settings | None = None) -> None:
        if isinstance(recording, Path):
            recording = read_recording(recording)
        self.recording = recording
        self.clock = 0.0
        host = ReplayHost(recording, clock=lambda: self.clock)
        self.collector = Collector(host, settings or Settings())

    async def to(self, moment: float) -> Metrics:
        """Play up to this moment of the recording (Unix time), and collect."""
        target = moment - self.recording.header.started_at
        while self.clock < target:
            self.clock = min(self.clock + STEP_SECONDS, target)
            await self.collector.poll_logs()
            await self.collector.watch_processes()
            await self.collector.collect()
        # The last step's collection applies exits by /proc to the state; this one shows them.
        return Metrics(await self.collector.collect())

    async def to_end(self) -> Metrics:
        return await self.to(self.recording.ended_at)


@cache
def snapshot_at(recording: str, *seconds: float) -> Snapshot:
    """The snapshot at the last of these moments (s of the recording), after those before."""
    player = Player(RECORDINGS / f"{recording}.rec.gz")

    async def played() -> list[Metrics]:
        started = player.recording.header.started_at
        return [await player.to(started + one) for one in seconds]

    return asyncio.run(played())[-1].snapshot
