"""Plays a world through the real collector, and checks it at seeded moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from mps_exporter.collector import Collector
from mps_exporter.flags import Settings
from mps_exporter.snapshot import Snapshot
from testing.world.checks import SETTLING_SECONDS, Moment, violations
from testing.world.host import WorldHost
from testing.world.model import START_MS, World
from testing.world.script import Action, generate

SETTLING_MS = round(SETTLING_SECONDS * 1000)
POLL_MS = 500


@dataclass(frozen=True)
class Result:
    seed: int
    violations: tuple[str, ...]
    lines: int
    moments: int
    actions: tuple[Action, ...]


async def play(seed: int, minutes: float, actions: Sequence[Action] | None = None) -> Result:
    """Play a world to the first moment at which something is violated, or to its end."""
    script = tuple(generate(seed, minutes) if actions is None else actions)
    world = World(seed, script)
    collector = Collector(WorldHost(world), Settings())
    random = Random(f"{seed}/scrapes")
    end_ms = START_MS + round(minutes * 60_000)
    previous, found, moments = None, tuple[str, ...](), 0
    await collector.collect()
    while world.now_ms < end_ms and not found:
        await _pass(world, collector, world.now_ms + random.randint(1_000, 30_000))
        snapshot = await collector.collect()
        again = await _restarted(world) if random.random() < 0.2 else None
        found = tuple(violations(Moment(world, snapshot, again, previous)))
        previous, moments = snapshot, moments + 1
    return Result(seed, found, world.lines, moments, script)


async def _pass(world: World, collector: Collector, to_ms: int) -> None:
    """Advance, reading the logs whenever something was written, until the logs are quiet."""
    while world.now_ms < to_ms or world.unsettled:
        due = world.next_event_ms()
        if world.unsettled:
            due = min(due or world.settled_ms, world.settled_ms) + 1
        step = max(world.now_ms + POLL_MS, due or 0)
        limit = to_ms if world.now_ms < to_ms else world.now_ms + SETTLING_MS
        world.advance(min(step, limit))
        await collector.watch_processes()
        await collector.poll_logs()


async def _restarted(world: World) -> Snapshot:
    """Return what an exporter shows that starts now."""
    collector = Collector(WorldHost(world, history=True), Settings())
    await collector.collect()
    return await collector.collect()
