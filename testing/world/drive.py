"""Plays a world through the real collector, and checks it at seeded moments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import get_args

from mps_exporter.collector import Collector
from mps_exporter.flags import Settings
from mps_exporter.observations import DaemonFacts, LogName, LogsObservation, Observation
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources.recording import Header, RecordingWriter
from testing.world.checks import (
    CHECKS,
    EVERYTHING,
    SETTLING_SECONDS,
    Check,
    Moment,
    Sight,
    violations,
)
from testing.world.host import WorldHost
from testing.world.model import START_MS, World
from testing.world.script import Action, generate

SETTLING_MS = round(SETTLING_SECONDS * 1000)
POLL_MS = 500
MAX_SETTLING_MS = 60_000
SCRAPE_MS = (1_000, 30_000)
"""Interval between two moments."""
SECOND, THOROUGH = 0.1, 0.03
"""Share of the moments at which a second exporter starts, and at which all texts are checked."""


@dataclass(frozen=True)
class Result:
    seed: int
    violations: tuple[str, ...]
    """Each begins with the name of its check."""
    lines: int
    moments: int
    actions: tuple[Action, ...]


class HalfBlindHost(WorldHost):
    """A host one of whose logs the exporter may not read."""

    def __init__(self, world: World, hidden: LogName) -> None:
        super().__init__(world, history=True)
        self._hidden = hidden

    async def poll_logs(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float
    ) -> LogsObservation:
        seen = await super().poll_logs(daemons, deadline_seconds)
        states = tuple(
            replace(state, readable=False) if state.log == self._hidden else state
            for state in seen.states
        )
        chunks = tuple(chunk for chunk in seen.chunks if chunk.log != self._hidden)
        return replace(seen, chunks=chunks, states=states)


def _later(world: World, sight: Sight) -> Collector:
    """Return an exporter that starts now."""
    match sight:
        case "without server.log":
            return Collector(HalfBlindHost(world, "server"), Settings())
        case "without control.log":
            return Collector(HalfBlindHost(world, "control"), Settings())
    settings = Settings(
        collector_control=sight != "without the control tool",
        collector_logs=sight != "without logs",
    )
    return Collector(WorldHost(world, history=True), settings)


class Play:
    """A world with an exporter, and a second one that starts later and may see less."""

    def __init__(
        self,
        seed: int,
        actions: Sequence[Action],
        on_observation: Callable[[Observation], None] = lambda _observation: None,
    ) -> None:
        self.world = World(seed, actions)
        self.exporter = Collector(WorldHost(self.world), Settings(), on_observation=on_observation)
        self.second: Collector | None = None

    async def until(self, to_ms: int) -> None:
        """Advance, reading the logs whenever something was written, until the logs are quiet."""
        world, latest_ms = self.world, to_ms + MAX_SETTLING_MS
        while world.now_ms < to_ms or (world.unsettled and world.now_ms < latest_ms):
            limit_ms = to_ms if world.now_ms < to_ms else world.now_ms + SETTLING_MS
            due_ms = world.next_event_ms()
            if world.unsettled:
                due_ms = min(due_ms or world.settled_ms, world.settled_ms) + 1
            next_ms = limit_ms if due_ms is None else max(world.now_ms + POLL_MS, due_ms)
            before = self._happened()
            world.advance(min(next_ms, limit_ms))
            if self._happened() != before:
                await self._poll()

    async def _poll(self) -> None:
        for collector in filter(None, (self.exporter, self.second)):
            await collector.watch_processes()
            await collector.poll_logs()

    def _happened(self) -> tuple[int, ...]:
        return self.world.lines, len(self.world.exits), self.world.unsettled

    async def collect(self, sight: Sight | None) -> tuple[Snapshot, Snapshot | None]:
        """Return what the exporters show now, the second one started now if a sight is given."""
        if sight is not None:
            self.second = _later(self.world, sight)
            await self.second.collect()
        snapshot = await self.exporter.collect()
        return snapshot, None if self.second is None else await self.second.collect()


async def play(
    seed: int,
    minutes: float,
    actions: Sequence[Action] | None = None,
    *,
    checks: Collection[Check] = CHECKS,
    on_observation: Callable[[Observation], None] = lambda _observation: None,
) -> Result:
    """Play a world to the first moment at which something is violated, or to its end."""
    script = tuple(generate(seed, minutes) if actions is None else actions)
    played = Play(seed, script, on_observation)
    world, random = played.world, Random(f"{seed}/scrapes")
    end_ms = START_MS + round(minutes * 60_000)
    previous, _ = await played.collect(None)
    found, moments = tuple[str, ...](), 0
    while world.now_ms < end_ms and not found:
        await played.until(world.now_ms + random.randint(*SCRAPE_MS))
        sight = random.choice(get_args(Sight)) if random.random() < SECOND else None
        thorough = random.random() < THOROUGH
        snapshot, second = await played.collect(sight)
        moment = Moment(
            world, snapshot, previous, second, sight or EVERYTHING, played.exporter, thorough
        )
        found = tuple(violations(moment, checks))
        previous, moments = snapshot, moments + 1
        if sight not in (None, EVERYTHING):
            played.second = None  # later replies of the control tool are up to 15 s old
    return Result(seed, found, world.lines, moments, script)


async def record(
    seed: int, minutes: float, actions: Sequence[Action], scenario: str, path: Path
) -> None:
    """Write what the exporter saw of a world; mps-exporter demo replays it."""
    header = Header(
        scenario=scenario,
        machine="simulated host",
        driver_version="580",
        recorded_at=datetime.fromtimestamp(START_MS / 1000, UTC).isoformat(),
        started_at=START_MS / 1000,
        exporter_version="",
        anonymised=False,
    )
    writer = RecordingWriter(path, header)
    await play(seed, minutes, actions, on_observation=writer.add)
    writer.close()
