"""Recordings of real hosts give, in replay, the numbers that were checked on the hardware."""

import gzip
import json
from pathlib import Path

import pytest

from mps_exporter.commands.serve import built_in_playlist
from testing.player import RECORDINGS, Player

TRUTHS = sorted(RECORDINGS.glob("*.json"))

PATIENCE_SECONDS = 2.0
"""Tolerance in seconds: the exporter may collect at other times than it did on the hardware."""

RUNNING = {"mps_uid_holding_seconds_total", "mps_uid_handover_idle_seconds_total"}
"""Totals that grow between two collections."""


def _agrees(metric: str, got: float | None, want: float | None) -> bool:
    if got is None or want is None:
        return got is want
    tolerance = PATIENCE_SECONDS if metric in RUNNING else 0.005
    return abs(got - want) <= max(tolerance, 1e-9 * abs(want))


@pytest.mark.parametrize("truth", TRUTHS, ids=lambda path: path.stem)
async def test_the_replay_says_what_was_checked_on_the_hardware(truth: Path) -> None:
    checks = json.loads(truth.read_text("utf-8"))["checks"]
    player = Player(truth.with_suffix("").with_suffix(".rec.gz"))
    wrong = []
    for check in checks:
        metrics = await player.to(check["at"])
        metric, labels, want = check["metric"], check["labels"], check["value"]
        moment = check["at"]
        while not _agrees(metric, metrics.value(metric, **labels), want):
            moment += 0.25
            if moment > check["at"] + PATIENCE_SECONDS:
                wrong.append(f"{metric}{labels} is {metrics.value(metric, **labels)}, was {want}")
                break
            metrics = await player.to(moment)
    assert wrong == []


async def test_an_unknown_reading_is_skipped(tmp_path: Path) -> None:
    lines = gzip.decompress((RECORDINGS / "one-client.rec.gz").read_bytes())
    path = tmp_path / "renamed.rec.gz"
    renamed = lines.replace(b'"quantity":"power"', b'"quantity":"watts"')
    path.write_bytes(gzip.compress(renamed))
    metrics = await Player(path).to_end()
    assert metrics.value("mps_gpu_power_watts") is None
    assert metrics.value("mps_gpu_temperature_celsius", sensor="gpu") is not None


def test_the_demo_plays_recordings_that_are_tested() -> None:
    paths = {scene.path for scene in built_in_playlist().scenes}
    assert {path.name for path in paths} >= {"tour.rec.gz"}
    for path in paths:
        assert path.read_bytes() == (RECORDINGS / path.name).read_bytes()


async def test_killed_clients_are_not_taken_for_stranded_ones() -> None:
    # For two seconds the GPUs were not read, while the logs showed that ten clients left.
    recording = Player(RECORDINGS / "data-parallel.rec.gz")
    begin = recording.recording.header.started_at
    stranded = []
    for half_seconds in range(52, 64):
        metrics = await recording.to(begin + half_seconds / 2)
        stranded += [gpu.stranded_clients for gpu in metrics.snapshot.gpus if gpu.stranded_clients]
    assert stranded == []
