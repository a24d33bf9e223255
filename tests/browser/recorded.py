"""Moments of recorded hosts."""

from __future__ import annotations

from dataclasses import replace

from mps_exporter.snapshot import RecordingInfo, Snapshot
from tests.support.player import RECORDINGS, Player


async def recorded(name: str, seconds: float) -> Snapshot:
    """The host of a recording, so many seconds after its beginning."""
    player = Player(RECORDINGS / f"{name}.rec.gz")
    header = player.recording.header
    metrics = await player.to(header.started_at + seconds)
    info = RecordingInfo(header.scenario, header.machine, header.driver_version, header.recorded_at)
    return replace(metrics.snapshot, recording=info)
