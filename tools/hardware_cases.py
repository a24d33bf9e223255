"""The table of the cases that were acted out on a GPU, in docs/symptoms/reported.md.

Made from the truth file that ``python3 -m tests.hardware hangs`` wrote beside its recording: what
the doctor said first, what was carried out, and what it said afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRUTH = Path(__file__).parents[1] / "tests" / "recordings" / "hangs.json"
LAB = re.compile(r"/\w+/lab-[a-z]+")
"""Where the lab had its directories."""
HEADS = ("case", "first answer", "what was carried out", "doctor took", "afterwards")


def cases() -> dict[str, dict[str, Any]]:
    """Case -> what happened in it."""
    facts: dict[str, dict[str, Any]] = json.loads(TRUTH.read_text("utf-8"))["facts"]
    return facts


def answers(facts: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """What the doctor said in a case: ``answer`` before, ``afterwards`` after the remedy."""
    return [fact for name, fact in facts.items() if name.partition(" ")[0] == kind]


def table() -> Iterator[str]:
    """The rows, with the machine and the sums above them."""
    truth = json.loads(TRUTH.read_text("utf-8"))
    found = cases()
    asked = {name: facts for name, facts in found.items() if answers(facts, "answer")}
    healed = sum(answers(facts, "afterwards")[-1]["outcome"] == "ok" for facts in found.values())
    slowest = max(one["seconds"] for facts in asked.values() for one in answers(facts, "answer"))
    yield ""
    yield (
        f"On {truth['machine'].partition(',')[0]}, driver {truth['driver_version']}: "
        f"{len(found)} cases, {len(asked)} of them with something wrong. In {healed} the process "
        f"ran afterwards and nothing was found wrong with it. The doctor took {slowest:.1f} s at "
        "most."
    )
    yield ""
    yield f"| {' | '.join(HEADS)} |"
    yield f"|{' --- |' * len(HEADS)}"
    for name, facts in found.items():
        before, after = answers(facts, "answer"), answers(facts, "afterwards")
        first = (before or after)[0]
        seconds = ", ".join(f"{one['seconds']:.1f} s" for one in before or after)
        cells = (name, first["conclusion"], _done(before), seconds, after[-1]["outcome"])
        shown = (LAB.sub("", cell).replace("|", "\\|") for cell in cells)
        yield f"| {' | '.join(shown)} |"
    yield ""


def _done(before: list[dict[str, Any]]) -> str:
    if not before:
        return "nothing"
    done = [f"`{one['command']}`" if one["command"] else one["remedy"] for one in before]
    return ", then ".join(done)
