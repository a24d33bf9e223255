"""Worlds of fixed seeds, played through the real collector."""

from __future__ import annotations

import pytest

from testing.world.drive import play

SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_is_violated_in_this_world(seed: int) -> None:
    result = await play(seed, minutes=5.0)
    assert result.violations == ()
    assert result.moments > 5
