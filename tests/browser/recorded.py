"""Moments of recorded hosts."""

from __future__ import annotations

from dataclasses import replace

from mps_exporter.snapshot import RecordingInfo, Snapshot
from testing.player import RECORDINGS, Player


async def recorded(name: str, seconds: float) -> Snapshot:
    """The host of a recording, so many seconds after its beginning."""
    return (await played(name, seconds, step_seconds=seconds))[-1]


async def played(name: str, seconds: float, step_seconds: float = 2.0) -> list[Snapshot]:
    """Collections of a recording from its beginning on, the last at this second."""
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
