"""What must be true of the exporter's state at any moment of any world."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from mps_exporter.snapshot import ControlDaemon, Snapshot
from mps_exporter.web.policy import WebOptions
from mps_exporter.web.status_api import make_status, to_json
from testing.mps_logs import LOGS, numbers, summary
from testing.page import Page, text_of
from testing.world.model import World

RUNNING = ("holding_seconds", "handover_idle_seconds")
"""Times that grow: the exporter counts them up to the last complete reading of the logs."""
SETTLING_SECONDS = 0.3


@dataclass(frozen=True)
class Moment:
    """A collection at which the logs had been quiet for SETTLING_SECONDS."""

    world: World
    snapshot: Snapshot
    restarted: Snapshot | None = None
    """The same moment as an exporter shows it that has just started."""
    previous: Snapshot | None = None


def violations(moment: Moment) -> Iterator[str]:
    """Return each difference between the exporter's state and the truth."""
    if len(moment.snapshot.daemons) != 1:
        yield f"daemons: {len(moment.snapshot.daemons)} instead of 1"
        return
    for check in (counters, monotony, holders, waits, restart, surfaces, blame):
        for text in check(moment):
            yield f"{check.__name__}: {text}"


def _daemon(snapshot: Snapshot) -> ControlDaemon:
    (daemon,) = snapshot.daemons
    return daemon


def _numbers(snapshot: Snapshot) -> dict[str, float]:
    counted = _daemon(snapshot).counters
    assert counted is not None
    return numbers(counted)


def counters(moment: Moment) -> Iterator[str]:
    """Counters equal the truth; growing times do up to the exporter's settling time."""
    counted = _daemon(moment.snapshot).counters
    assert counted is not None
    seen, true = summary(counted), moment.world.truth.summary()
    for name in sorted(seen.keys() | true.keys()):
        shown, expected = seen.get(name), true.get(name)
        if name in RUNNING:
            if abs(_total(shown) - _total(expected)) > SETTLING_SECONDS:
                yield f"{name} is {shown}, not {expected}"
        elif not _equal(shown, expected):
            yield f"{name} is {shown}, not {expected}"
    for log in LOGS:
        if counted["mps_control_log_unrecognized_lines_total"].get((log,)):
            yield f"unrecognized lines in {log}"


def _total(value: object) -> float:
    if isinstance(value, dict):
        return float(sum(value.values()))
    return float(value) if isinstance(value, int | float) else 0.0


def _equal(shown: object, expected: object) -> bool:
    """Compare to the millisecond."""
    if isinstance(shown, dict) and isinstance(expected, dict):
        return shown.keys() == expected.keys() and all(
            _equal(shown[key], expected[key]) for key in shown
        )
    if isinstance(shown, list) and isinstance(expected, list):
        return len(shown) == len(expected) and all(map(_equal, shown, expected))
    if isinstance(shown, int | float) and isinstance(expected, int | float):
        return abs(shown - expected) < 0.0005
    return shown == expected


def monotony(moment: Moment) -> Iterator[str]:
    """No counter falls."""
    if moment.previous is None:
        return
    now = _numbers(moment.snapshot)
    for name, value in _numbers(moment.previous).items():
        if now.get(name, 0.0) < value:
            yield f"{name} fell from {value} to {now.get(name)}"


def holders(moment: Moment) -> Iterator[str]:
    """The server and its clients are those that exist."""
    server = moment.world.server
    true = [] if server is None else [(server.pid, sorted(one.pid for one in server.clients))]
    shown = _holders(moment.snapshot)
    if shown != true:
        yield f"{shown}, not {true}"


def _holders(snapshot: Snapshot) -> list[tuple[int, list[int]]]:
    return [
        (server.pid, sorted(client.pid for client in server.clients))
        for server in _daemon(snapshot).servers
    ]


def waits(moment: Moment) -> Iterator[str]:
    """The waits are those of clients behind another user's server, to the millisecond."""
    true = {(one.pid, one.uid, one.queued_ms) for one in moment.world.queue if one.blocked}
    shown = _waits(moment.snapshot)
    if shown != true:
        yield f"{sorted(shown)}, not {sorted(true, key=str)}"
    if any(one.dead for one in _daemon(moment.snapshot).waits):
        yield "a living client is shown as dead"


def _waits(snapshot: Snapshot) -> set[tuple[int, int, int]]:
    return {(one.pid, one.uid, round(one.since * 1000)) for one in _daemon(snapshot).waits}


def restart(moment: Moment) -> Iterator[str]:
    """An exporter that has just started shows the same state."""
    if moment.restarted is None:
        return
    for part in (_holders, _waits):
        before, after = part(moment.snapshot), part(moment.restarted)
        if before != after:
            yield f"{part.__name__[1:]} {after} after it, {before} before it"


def surfaces(moment: Moment) -> Iterator[str]:
    """The metrics page and the API show the same numbers; what was not seen is absent."""
    page = Page(text_of(moment.snapshot))
    status = json.loads(to_json(make_status(moment.snapshot, WebOptions())))
    daemon = _daemon(moment.snapshot)
    clients = sum(len(server.clients) for server in daemon.servers)
    listed = sum(len(one["clients"]) for one in status["daemons"][0]["servers"])
    if listed != clients:
        yield f"the API has {listed} clients of {clients}"
    connections = "mps_client_connections_total"
    counted = sum(value for name, value in _numbers(moment.snapshot).items() if connections in name)
    if (page.value(connections) or 0.0) != counted:
        yield f"{connections} is {page.value(connections)} on the page, not {counted}"
    for name in page:
        if name.startswith("mps_gpu_utilization"):
            yield f"{name} is shown without a GPU that was read"


def blame(moment: Moment) -> Iterator[str]:
    """No client caused anything here, and no server is a ghost."""
    for server in _daemon(moment.snapshot).servers:
        if server.ghost:
            yield f"server {server.pid} is called a ghost"
    for name in _numbers(moment.snapshot):
        if "fault" in name or "unfinished" in name:
            yield f"{name} is counted without a fault"
