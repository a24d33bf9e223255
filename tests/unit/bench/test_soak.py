"""The soak notices what it is there for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.host import FullHost
from bench.soak import Chaos, Counters, Reading, judge

CALM = Reading(0.0, 50.0, 6, 11, 0)


def chaos(folder: Path) -> Chaos:
    return Chaos(FullHost(folder, 2, gpus=2, strangers=0), 2)


def test_a_counter_that_goes_down_is_named() -> None:
    seen = Counters()
    assert seen.see('x_total{a="1"} 5.0\ny 9.0') == 1
    seen.see('x_total{a="1"} 4.0\ny 1.0')
    assert seen.fallen == ['x_total{a="1"}: 5.0 -> 4.0']


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 0),
        ({"megabytes": 51.9}, 0),
        ({"megabytes": 52.1}, 1),
        ({"threads": 7}, 1),
        ({"descriptors": 12}, 1),
        ({"children": 1}, 1),
    ],
)
def test_growth_is_a_failure(tmp_path: Path, change: dict[str, float], status: int) -> None:
    readings = [CALM] * 70 + [replace(CALM, **change)] * 30  # type: ignore[arg-type]
    assert judge(readings, Counters(), chaos(tmp_path)) == status


def test_a_restart_takes_all_clients_along(tmp_path: Path) -> None:
    happening = chaos(tmp_path)
    daemon = happening.full.daemons[0]
    before = daemon.server
    happening.full.restart(daemon)
    assert daemon.server != before
    assert not daemon.clients
    assert "Starting control daemon" in (daemon.logs / "control.log").read_text()
