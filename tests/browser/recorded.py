"""Recorded hosts, and pictures of their status pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mps_exporter.snapshot import RecordingInfo, Snapshot
from testing.devtools import browser
from testing.player import RECORDINGS, Player
from tests.unit.web.fakes import FakeBackend
from tests.unit.web.serving import served


async def recorded(name: str, seconds: float) -> Snapshot:
    """Return the host of a recording, this many seconds after its beginning."""
    return (await played(name, seconds, step_seconds=seconds))[-1]


async def played(name: str, seconds: float, step_seconds: float = 2.0) -> list[Snapshot]:
    """Return collections of a recording from its beginning on, the last at this second."""
    player = Player(RECORDINGS / f"{name}.rec.gz")
    header = player.recording.header
    info = RecordingInfo(header.scenario, header.machine, header.driver_version, header.recorded_at)
    snapshots = []
    moment = 0.0
    while moment < seconds:
        moment = min(moment + step_seconds, seconds)
        metrics = await player.to(header.started_at + moment)
        snapshots.append(replace(metrics.snapshot, recording=info))
    return snapshots


async def draw(found: Sequence[Snapshot], files: Mapping[Path, tuple[int, int, bool]]) -> None:
    """Draw the page after these collections into files: (width, height, dark) each."""
    backend = FakeBackend(snapshot=found[-1], earlier=found)
    async with served(backend, version="") as (shown, _), browser() as page:
        for file, (width, height, dark) in files.items():
            await page.look(width, height, dark=dark)
            await page.open(f"http://{shown[0]}/")
            await page.screenshot(file)
            high = await page.evaluate("document.documentElement.scrollHeight")
            print(f"{file}, {high} px high", *page.complaints)
