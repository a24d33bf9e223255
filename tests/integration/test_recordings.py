"""Recordings of real hosts give, in replay, the numbers that were checked on the hardware."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.player import RECORDINGS, Player

TRUTHS = sorted(RECORDINGS.glob("*.json"))

# What a replay may differ by: a process's death is noticed at the next look at /proc, and the
# replay looks at other moments than the recorder did.
TOLERANCES = {
    "mps_uid_holding_seconds_total": 0.25,
    "mps_uid_handover_idle_seconds_total": 0.25,
}


@pytest.mark.parametrize("truth", TRUTHS, ids=lambda path: path.stem)
async def test_the_replay_says_what_was_checked_on_the_hardware(truth: Path) -> None:
    checks = json.loads(truth.read_text("utf-8"))["checks"]
    player = Player(truth.with_suffix("").with_suffix(".rec.gz"))
    wrong = []
    for check in checks:
        metrics = await player.to(check["at"])
        got = metrics.value(check["metric"], **check["labels"])
        want = check["value"]
        tolerance = TOLERANCES.get(check["metric"], 0.005)
        if (got is None) != (want is None) or (
            got is not None and abs(got - want) > max(tolerance, 1e-9 * abs(want))
        ):
            wrong.append(f"{check['metric']}{check['labels']} is {got}, was {want}")
    assert wrong == []


def test_there_are_recordings() -> None:
    assert TRUTHS
