"""What the recordings show stays as it is, but for what a change says that it changes."""

from __future__ import annotations

from difflib import unified_diff

import pytest

from testing.golden import GOLDEN, golden_text, recordings


@pytest.mark.parametrize("name", recordings())
async def test_a_recording_shows_what_it_showed(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    before = path.read_text().splitlines() if path.exists() else []
    now = (await golden_text(name)).splitlines()
    difference = list(unified_diff(before, now, "before", "now", n=0, lineterm=""))
    assert not difference, (
        "\n".join(difference[:60]) + f"\n{len(difference)} lines; to accept: make golden"
    )


def test_no_text_is_left_of_a_recording_that_is_gone() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == recordings()
