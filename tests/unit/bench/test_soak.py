"""The soak notices what it is there for."""

from __future__ import annotations

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
def test_growth_is_a_failure(chaos: Chaos, change: dict[str, float], status: int) -> None:
    readings = [CALM] * 70 + [replace(CALM, **change)] * 30  # type: ignore[arg-type]
    assert judge(readings, Counters(), chaos) == status


def test_a_restart_takes_all_clients_along(chaos: Chaos) -> None:
    daemon = chaos.full.daemons[0]
    before = daemon.server
    chaos.full.restart(daemon)
    assert daemon.server != before
    assert not daemon.clients
    assert "Starting control daemon" in (daemon.logs / "control.log").read_text()
