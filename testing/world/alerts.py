"""Compares the alerts that the rules give over a world's scrapes with what is true."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testing.outputs import ended_among
from testing.page import text_of
from testing.promtool import Page, fired, page_of
from testing.world.daemon import Daemon
from testing.world.drive import Play
from testing.world.model import START_MS, World
from testing.world.script import generate

INTERVAL = 15.0  # Seconds between two scrapes, and between two evaluations.
MARGIN = 30.0  # Seconds by which an alert may be early or late.
WINDOW = 300.0
GHOST_FOR, GHOST_KEPT = 30.0, 120.0
"""The alert's `for` and `keep_firing_for`."""

Alert = tuple[str, str]  # Name of an alert, and pipe directory of the daemon.


@dataclass
class Seen:
    """When something was true of a daemon, in seconds from the world's start."""

    crashes: list[float] = field(default_factory=list)
    ghost: list[float] = field(default_factory=list)  # Scrapes at which its server was a ghost.
    oldest_wait: dict[float, float] = field(default_factory=dict)
    """Scrape -> since when the first of those has waited that live."""
    dead_waits: list[float] = field(default_factory=list)
    """Scrapes at which a dead client was queued."""
    exists: list[float] = field(default_factory=list)


def _look(daemon: Daemon, seen: Seen, at: float) -> None:
    crashes = daemon.truth.numbers.get("server_exits", {}).get("crashed", 0)
    seen.crashes += [at] * (crashes - len(seen.crashes))
    if daemon.exists:
        seen.exists.append(at)
    if daemon.server is not None and daemon.server.ghost and not daemon.server.used:
        seen.ghost.append(at)
    waits = daemon.waits()
    if living := [one.since_ms for one in waits if not one.dead]:
        seen.oldest_wait[at] = (min(living) - START_MS) / 1000
    if any(one.dead for one in waits):
        seen.dead_waits.append(at)


def _possible(daemon: Daemon, seen: Seen, at: float) -> Mapping[str, tuple[bool, bool]]:
    """Return for each alert whether it must fire now, and whether it may."""
    faults = [
        ((one.at_ms - START_MS) / 1000, one.left_work)
        for one in daemon.truth.faults
        if one.at_ms <= START_MS + at * 1000
    ]
    lately, surely = at - WINDOW - MARGIN, at - WINDOW + MARGIN
    stays = [one for one in seen.exists if at - MARGIN <= one <= at] and at in seen.exists
    waited = at - seen.oldest_wait.get(at, at)
    ghost = [at - back * INTERVAL in seen.ghost for back in range(int(2 * MARGIN / INTERVAL) + 3)]
    left_work = any(left for when, left in faults if when >= lately)
    return {
        "MpsServerCrashed": (
            bool(stays) and any(surely <= one <= at - MARGIN for one in seen.crashes),
            any(lately <= one for one in seen.crashes),
        ),
        "MpsServerFault": (
            bool(stays)
            and not left_work
            and any(surely <= when <= at - MARGIN for when, _ in faults),
            any(lately <= when for when, _ in faults),
        ),
        "MpsUidWaitLong": (
            waited > WINDOW + MARGIN and at not in seen.dead_waits,
            waited > WINDOW - MARGIN,
        ),
        "MpsGhostServer": (
            all(ghost),
            any(at - GHOST_KEPT - MARGIN <= one <= at for one in seen.ghost),
        ),
    }


async def wrong_alerts(seed: int, minutes: float, folder: Path) -> list[str]:
    """Return alerts that fire without a reason, that are missing, or that end a healthy process."""
    played = Play(seed, generate(seed, minutes))
    pages: list[Page] = []
    expected: dict[float, dict[Alert, tuple[bool, bool]]] = {}
    healthy: dict[float, set[int]] = {}
    seen: dict[str, Seen] = {}
    for number in range(1, int(minutes * 60 / INTERVAL)):
        at = number * INTERVAL
        await played.until(START_MS + round(at * 1000), settle=False)
        snapshot, _ = await played.collect()
        pages.append(page_of(text_of(snapshot, wall=lambda at: at - START_MS / 1000)))
        expected[at] = _expected(played.world, seen, at)
        healthy[at] = played.world.healthy_pids()
    wrong: list[str] = []
    fires: dict[float, set[Alert]] = {at: set() for at in expected}
    for one in fired(folder, "gpu01", pages, INTERVAL):
        fires[one.seconds].add((one.name, one.labels.get("daemon", "")))
        for pid, sentence in ended_among(healthy[one.seconds], one.annotations["description"]):
            wrong.append(f"{one.name} ends {pid}: {sentence}")
    return [*wrong, *_differences(expected, fires)]


def _expected(world: World, seen: dict[str, Seen], at: float) -> dict[Alert, tuple[bool, bool]]:
    found = {}
    for pipe, daemon in world.daemons.items():
        known = seen.setdefault(pipe, Seen())
        _look(daemon, known, at)
        # After lost, hidden or forged lines, or a step of the clock, an alert may be wrong.
        unknown = world.stepped_ms or daemon.truth.unknowable or any(daemon.truncations.values())
        for name, possible in _possible(daemon, known, at).items():
            found[name, pipe] = (False, True) if unknown else possible
    return found


def _differences(
    expected: Mapping[float, Mapping[Alert, tuple[bool, bool]]], fires: Mapping[float, set[Alert]]
) -> Iterator[str]:
    for at, alerts in expected.items():
        for (name, daemon), (must, may) in alerts.items():
            if must and (name, daemon) not in fires[at]:
                yield f"{name} of {daemon} does not fire after {at:g} s"
            if not may and (name, daemon) in fires[at]:
                yield f"{name} of {daemon} fires after {at:g} s"
