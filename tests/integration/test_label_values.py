"""Labels whose values docs/metrics.md names have no others, whatever happens on a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from mps_exporter.metrics import CATALOGUE
from testing.player import RECORDINGS, Metrics, Player

LOOKS = 8
"""How often to look in the course of a recording: some series last no longer than a client."""


def strays(metrics: Metrics) -> set[tuple[str, str, str]]:
    return {
        (spec.name, label, labels[label])
        for spec in CATALOGUE.values()
        for labels, _ in metrics.all(spec.name)
        for label, allowed in spec.values.items()
        if labels[label] not in allowed and not (spec.kind == "info" and not labels[label])
    }


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.rec.gz")), ids=lambda path: path.stem)
async def test_no_label_has_a_value_that_is_not_documented(path: Path) -> None:
    player = Player(path)
    begin, end = player.recording.header.started_at, player.recording.ended_at
    found: set[tuple[str, str, str]] = set()
    for look in range(1, LOOKS + 1):
        found |= strays(await player.to(begin + (end - begin) * look / LOOKS))
    assert found == set()
