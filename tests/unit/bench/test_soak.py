"""The soak notices what it is there for."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.host import FullHost
from bench.soak import Chaos, Counters, Reading, judge

CALM = Reading(0.0, 50.0, 6, 11, 0)


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    with FullHost(tmp_path, 2, gpus=2, other_processes=0) as full:
        yield Chaos(full, 2)


def test_a_counter_that_goes_down_is_named() -> None:
    seen = Counters()
    assert seen.see('x_total{a="1"} 5.0\ny 9.0') == 1
    seen.see('x_total{a="1"} 4.0\ny 1.0')
    assert seen.fallen == ["x_total {'a': '1'}: 5.0 -> 4.0"]


def hour_of(**change: float) -> list[Reading]:
    """An hour in which something is otherwise in the last half."""
    after = replace(CALM, **change)  # type: ignore[arg-type]
    return [replace(CALM if at < 1800 else after, at=float(at)) for at in range(0, 3600, 10)]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 0),
        ({"megabytes": 51.4}, 0),
        ({"megabytes": 51.8}, 1),
        ({"threads": 8}, 0),
        ({"threads": 11}, 1),
        ({"descriptors": 12}, 1),
        ({"children": 1}, 1),
    ],
)
def test_growth_is_a_failure(chaos: Chaos, change: dict[str, float], status: int) -> None:
    assert judge(hour_of(**change), Counters(), [], chaos) == status


def test_logs_of_a_job_are_no_growth_until_it_ended_long_ago(
    chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = chaos.full.start_job(1001)
    held = ["socket:[4711]", f"{job.logs}/control.log", f"{job.logs}0/control.log"]
    assert chaos.descriptors(held) == 3
    chaos.jobs.append((0.0, job))
    assert chaos.descriptors(held) == 2
    chaos.step(random.Random(1))
    assert chaos.jobs == []
    held[1] += " (deleted)"
    assert chaos.descriptors(held) == 2
    ended_at = time.monotonic()
    monkeypatch.setattr("bench.soak.time.monotonic", lambda: ended_at + 200.0)
    assert chaos.descriptors(held) == 3
