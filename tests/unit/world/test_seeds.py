"""Worlds of fixed seeds, played through the real collector."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mps_exporter.mps.record import Moment
from mps_exporter.mps.waits import QueuedClient
from testing.world.drive import play
from testing.world.script import Action, generate
from testing.world.shrink import shrink

SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_is_violated_in_this_world(seed: int) -> None:
    result = await play(seed, minutes=5.0)
    assert result.violations == ()
    assert result.moments > 5


async def test_a_wrong_wait_is_found_and_shrunk_to_its_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = QueuedClient.serve

    def late(self: QueuedClient, server_ready_at: float | None, when: Moment) -> bool:
        return serve(self, None if server_ready_at is None else server_ready_at + 0.002, when)

    monkeypatch.setattr(QueuedClient, "serve", late)

    async def fails(actions: Sequence[Action]) -> bool:
        return any("waits is" in text for text in (await play(3, 3.0, actions)).violations)

    actions = generate(3, 3.0)
    shortest = await shrink(actions, fails)
    assert len(shortest) < len(actions)
    starts = [one for one in shortest if one.kind == "start_client"]
    assert len({one.values["uid"] for one in starts}) == len(starts) == 2
