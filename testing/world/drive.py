"""Plays a world through the real collector, and checks it at seeded moments."""

import gzip
import re
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import get_args
from unittest import mock

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.collector import Collector
from mps_exporter.flags import Settings
from mps_exporter.observations import Observation
from mps_exporter.snapshot import ControlDaemon, RecordingHeader, Snapshot
from mps_exporter.sources import SourceError, SourceTimeoutError
from mps_exporter.sources.recording import RecordingWriter
from testing.mps_logs import LOGS, summary
from testing.player import Player
from testing.world.checks import (
    CHECKS,
    EVERYTHING,
    RUNNING,
    SETTLING_SECONDS,
    Check,
    Moment,
    Sight,
    violations,
)
from testing.world.files import temporary_folder
from testing.world.host import WorldHost
from testing.world.model import START_MS, World
from testing.world.script import Action, generate

SETTLING_MS = round(SETTLING_SECONDS * 1000)
POLL_MS = 500
QUIET_MS = 2_500
CONFIRMING_MS = 1_500  # Longer than limits_without_a_flag.py's EXIT_CONFIRM_SECONDS.
EVENTS = ("connections", "disconnections", "server_starts", "faults")
MAX_SETTLING_MS = 60_000
SCRAPE_MS = (1_000, 30_000)  # Interval between two moments.
REPLAYED = 0.15  # Share of the worlds that are recorded and replayed.
NAMES_OF_USERS = ("python3", "anna", "bert", "GPU-00000000", "log/d0", "train-0")
_UUID = re.compile(r"GPU-[0-9a-f-]{36}")
SECOND, THOROUGH, LOOKS = 0.1, 0.03, 0.3
"""Share of the moments at which a second exporter starts, at which all texts are checked, and at
which the page of metrics is."""
TIMEOUTS = ("USERS_QUERY_WAIT", "PROCESS_TIMEOUT", "USERS_PROCESS_TIMEOUT", "EXIT_DETAILS_TIMEOUT")
"""Timeouts of real time, which has no meaning in a world: a loaded machine is slow."""


@dataclass(frozen=True)
class Result:
    seed: int
    violations: tuple[str, ...]  # Each begins with the name of its check.
    lines: int
    moments: int
    actions: tuple[Action, ...]


def _later(world: World, sight: Sight) -> Collector:
    """Return an exporter that starts now."""
    hidden = [log for log in LOGS if sight == f"without {log}.log"]
    settings = Settings(
        collector_control=sight != "without the control tool",
        collector_logs=sight != "without logs",
    )
    return Collector(WorldHost(world, history=True, hidden=hidden), settings)


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
        self.sight: Sight = EVERYTHING
        self._happened = (0, 0, 0)
        self._quiet_ms = 0
        self._was_due = False
        self._seen: object = None

    async def until(self, to_ms: int, *, settle: bool = True) -> None:
        """Advance, reading the logs whenever something was written, until the logs are quiet."""
        world = self.world
        latest_ms = to_ms - world.stepped_ms + settle * MAX_SETTLING_MS
        while world.now_ms < to_ms or (
            (world.unsettled or self._behind) and world.now_ms - world.stepped_ms < latest_ms
        ):
            limit_ms = to_ms if world.now_ms < to_ms else world.now_ms + POLL_MS
            due_ms = world.next_event_ms()
            if world.unsettled:
                due_ms = min(due_ms or world.settled_ms, world.settled_ms) + 1
            next_ms = limit_ms if due_ms is None else max(world.now_ms + POLL_MS, due_ms)
            if world.now_ms < self._quiet_ms:
                next_ms = world.now_ms + POLL_MS  # as the exporter does
            world.advance(min(next_ms, limit_ms))
            if self._is_due():
                await self._poll()

    async def _poll(self) -> None:
        for collector in filter(None, (self.exporter, self.second)):
            with suppress(SourceError, SourceTimeoutError):  # of an obstructed world
                await collector.watch_processes()
                await collector.poll_logs()

    def _is_due(self) -> bool:
        """Return whether there was a recent event, or none since a poll after one."""
        happened = self.world.lines, len(self.world.exits), len(self.world.kernel_lines)
        if happened != self._happened:
            self._happened, self._quiet_ms = happened, self.world.now_ms + QUIET_MS
        due, self._was_due = self._was_due, self.world.now_ms <= self._quiet_ms
        return due or self._was_due or self._behind

    @property
    def _behind(self) -> bool:
        """Whether an exporter has not read all of a log."""
        hosts = (one._host for one in (self.exporter, self.second) if one is not None)
        return any(isinstance(one, WorldHost) and one.logs.behind for one in hosts)

    async def settle(self) -> None:
        """Find new daemons, and confirm what died in their queues before they were found."""
        running = {pipe for pipe, daemon in self.world.daemons.items() if daemon.exists}
        if not running <= self.exporter._daemons.keys():
            await self.collect()
            await self.until(self.world.now_ms + CONFIRMING_MS)

    async def start_second(self, sight: Sight) -> None:
        """Start an exporter, and wait until it has confirmed what is dead."""
        self.second, self.sight = _later(self.world, sight), sight
        await self.collect()
        self._seen = self._changes()
        await self.until(self.world.now_ms + CONFIRMING_MS)

    def _changes(self) -> object:
        """Return what changes a server: replies of the control tool are older then."""
        return [
            (
                one.exists,
                one.server,
                {name: dict(one.truth.numbers.get(name, {})) for name in EVENTS},
                one.server and [len(client.contexts) for client in one.server.clients],
            )
            for one in self.world.daemons.values()
        ]

    async def collect(self) -> tuple[Snapshot, Snapshot | None]:
        """Return what the exporters show now; the second one only if no query hangs."""
        for one in self.world.daemons.values():
            one.truth.lines = {log: one.logs[log].count(b"\n") for log in LOGS}
        snapshot = await self.exporter.collect()
        if self.second is None:
            return snapshot, None
        later = await self.second.collect()
        stuck = any(one.stuck or one.quitting for one in self.world.daemons.values())
        late = self.sight != EVERYTHING and self._seen != self._changes()
        return snapshot, None if stuck or late else later


async def play(
    seed: int,
    minutes: float,
    actions: Sequence[Action] | None = None,
    *,
    checks: Collection[Check] = CHECKS,
    on_observation: Callable[[Observation], None] = lambda _observation: None,
    pace: float = 1.0,
) -> Result:
    """Play a world to the first moment at which something is violated, or to its end."""
    script = tuple(generate(seed, minutes, pace) if actions is None else actions)
    recorder = None
    if checks is CHECKS and Random(f"{seed}/replay").random() < REPLAYED:
        recorder = Recorder(anonymised=seed % 2 == 0)

    def observe(observation: Observation) -> None:
        on_observation(observation)
        if recorder is not None:
            recorder.add(observation)

    played = Play(seed, script, observe)
    world, random = played.world, Random(f"{seed}/scrapes")
    end_ms = START_MS + round(minutes * 60_000)
    with mock.patch.dict(vars(policy), {f"{name}_SECONDS": 60.0 for name in TIMEOUTS}):
        previous = snapshot = (await played.collect())[0]
        found, moments = tuple[str, ...](), 0
        while world.now_ms - world.stepped_ms < end_ms and not found:
            await played.until(world.now_ms + random.randint(*SCRAPE_MS))
            await played.settle()
            sight = random.choice(get_args(Sight)) if random.random() < SECOND else None
            if sight is not None:
                await played.start_second(sight)
            thorough, looks = random.random() < THOROUGH, random.random() < LOOKS
            snapshot, second = await played.collect()
            moment = Moment(
                *(world, snapshot, previous, second, played.sight),
                *(played.exporter, played.second, thorough, looks),
            )
            found = tuple(violations(moment, checks))
            previous, moments = snapshot, moments + 1
            if played.sight != EVERYTHING:
                played.second = None  # later replies of the control tool are up to 15 s old
    if recorder is not None:
        found += tuple([text async for text in recorder.differences(world, snapshot)])
    return Result(seed, found, world.lines, moments, script)


class Recorder:
    """A recording of a world, which is compared with its replay."""

    def __init__(self, *, anonymised: bool) -> None:
        self._anonymised = anonymised
        self._path = temporary_folder() / "world.rec.gz"
        self._writer = RecordingWriter(self._path, _header("", anonymised=anonymised))
        self.add = self._writer.add

    async def differences(self, world: World, shown: Snapshot) -> AsyncIterator[str]:
        """Yield what a replay shows differently, and names in an anonymised recording."""
        self._writer.close()
        replayed = (await Player(self._path).to_end()).snapshot
        text = gzip.decompress(self._path.read_bytes()).decode()
        shutil.rmtree(self._path.parent)
        known = {one.pid for one in world.daemons.values() if not one.truth.unknowable}
        first, second = (
            sorted(_parts(daemon) for daemon in one.daemons if daemon.pid in known)
            for one in (shown, replayed)
        )
        for daemons in zip_longest(first, second, fillvalue=()):
            for one, other in zip_longest(*daemons):
                if one != other:
                    yield f"replay: {other}, not {one}"
        for name in NAMES_OF_USERS if self._anonymised else ():
            if name in text:
                yield f"replay: an anonymised recording has {name}"


def _parts(daemon: ControlDaemon) -> tuple[str, ...]:
    """Return what does not depend on the moments of the queries and of the polls."""
    counted = summary(daemon.counters or {})
    return (
        str(daemon.pid),
        *(_UUID.sub("", f"{one} {counted[one]}") for one in sorted(counted.keys() - {*RUNNING})),
        str([(one.pid, [client.pid for client in one.clients]) for one in daemon.servers]),
        str(daemon.waits),
        *(_UUID.sub("", str(one)) for one in daemon.incidents),
    )


async def record(
    seed: int, minutes: float, actions: Sequence[Action], scenario: str, path: Path
) -> None:
    """Write what the exporter saw of a world; mps-exporter demo replays it."""
    writer = RecordingWriter(path, _header(scenario))
    await play(seed, minutes, actions, on_observation=writer.add)
    writer.close()


def _header(scenario: str, *, anonymised: bool = False) -> RecordingHeader:
    return RecordingHeader(
        scenario=scenario,
        machine="simulated host",
        driver_version="580",
        recorded_at=datetime.fromtimestamp(START_MS / 1000, UTC).isoformat(),
        started_at=START_MS / 1000,
        exporter_version="",
        anonymised=anonymised,
    )
