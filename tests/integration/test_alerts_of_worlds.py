"""Alerts over the scrapes of simulated hosts fire if and only if they are true."""

from pathlib import Path

import pytest

from testing.world.alerts import wrong_alerts
from testing.world.defects import put_back

MINUTES = 20.0


# Together they require each alert that is compared: crashes (8), faults (2, 4), long waits, ghosts.
@pytest.mark.parametrize("seed", [2, 4, 8])
async def test_alerts_fire_if_and_only_if_they_are_true(seed: int, tmp_path: Path) -> None:
    assert await wrong_alerts(seed, MINUTES, tmp_path) == []


async def test_a_wrong_alert_is_found(tmp_path: Path) -> None:
    with put_back("a server for which others wait is a ghost"):
        wrong = await wrong_alerts(1, MINUTES, tmp_path)
    assert any(text.startswith("MpsGhostServer of /tmp/mps") for text in wrong)
