"""What users and operators do in a simulated world: pure data, made from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

USERS = (1001, 1002, 1003)

Kind = Literal["start_client", "end_client", "kill_server"]


@dataclass(frozen=True, slots=True, order=True)
class Action:
    at: float
    """Seconds after the world's start."""
    kind: Kind
    target: str
    """A client, "c" and its number, or "server": the server that runs then."""
    uid: int = 0


def generate(seed: int, minutes: float) -> tuple[Action, ...]:
    """Return the actions of a world; each client's are independent of all others."""
    deaths = Random(f"{seed}/theme").random() < 0.5
    actions: list[Action] = []
    for number in range(round(minutes * Random(f"{seed}/density").uniform(0.5, 6.0))):
        actions += _client(seed, f"c{number}", minutes)
    if deaths:
        random = Random(f"{seed}/server/kill")
        actions += [
            Action(random.uniform(0, minutes * 60), "kill_server", "server")
            for _ in range(random.randrange(3))
        ]
    return tuple(sorted(actions))


def _client(seed: int, name: str, minutes: float) -> Iterator[Action]:
    random = Random(f"{seed}/{name}")
    start = random.uniform(1.0, minutes * 60)
    yield Action(start, "start_client", name, random.choice(USERS))
    yield Action(start + random.uniform(1.0, 60.0), "end_client", name)
