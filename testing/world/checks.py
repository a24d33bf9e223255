"""What must be true of the exporter's state at any moment of any world."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from mps_exporter.snapshot import ControlDaemon, LogMetricValues, Snapshot
from mps_exporter.web.policy import WebOptions
from mps_exporter.web.status_api import make_status, to_json
from testing.mps_logs import LOGS, numbers, summary
from testing.page import Page, text_of
from testing.world.daemon import Daemon
from testing.world.model import World
from testing.world.truth import Truth

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
    shown = {daemon.pipe_directory: daemon for daemon in moment.snapshot.daemons}
    running = {pipe for pipe, daemon in moment.world.daemons.items() if daemon.exists}
    if not running <= shown.keys() <= moment.world.daemons.keys():
        yield f"daemons: {sorted(shown)} instead of {sorted(running)}"
        return
    for check in (counters, monotony, holders, waits, restart, surfaces, blame):
        for text in check(moment):
            yield f"{check.__name__}: {text}"


def _pairs(moment: Moment) -> Iterator[tuple[Daemon, ControlDaemon]]:
    for daemon in moment.snapshot.daemons:
        yield moment.world.daemons[daemon.pipe_directory], daemon


def _numbers(snapshot: Snapshot) -> dict[str, dict[str, float]]:
    return {one.pipe_directory: numbers(one.counters or {}) for one in snapshot.daemons}


def counters(moment: Moment) -> Iterator[str]:
    """Counters equal the truth; growing times do up to the exporter's settling time."""
    for daemon, shown in _pairs(moment):
        if shown.counters is None or daemon.truth.unknowable:
            continue
        for text in _counter_differences(daemon.truth, shown.counters):
            yield f"{daemon.key}: {text}"


def _counter_differences(truth: Truth, counted: LogMetricValues) -> Iterator[str]:
    seen, true = summary(counted), truth.summary()
    for name in sorted(seen.keys() | true.keys()):
        shown, expected = seen.get(name), true.get(name)
        slack = truth.slack.get(name, 0)
        if name in RUNNING:
            if abs(_total(shown) - _total(expected)) > SETTLING_SECONDS + slack / 1000:
                yield f"{name} is {shown}, not {expected}"
        elif slack:
            if not _nearly(name, shown, expected, slack):
                yield f"{name} is {shown}, not {expected}, give or take {slack}"
        elif not _equal(shown, expected):
            yield f"{name} is {shown}, not {expected}"
    for log in LOGS:
        if counted["mps_control_log_unrecognized_lines_total"].get((log,)):
            yield f"unrecognized lines in {log}"


def _nearly(name: str, shown: object, expected: object, slack: int) -> bool:
    """Compare counts; what is not proved of a loss is its cause, which is never a wrong one."""
    seen, true = _by_label(shown), _by_label(expected)
    if name == "losses":
        wrong = [
            label
            for label, number in seen.items()
            if number > true.get(label, 0) and not label.endswith("unattributed_fault")
        ]
        return not wrong and sum(seen.values()) == sum(true.values())
    labels = seen.keys() | true.keys()
    return all(abs(seen.get(one, 0) - true.get(one, 0)) <= slack for one in labels)


def _by_label(value: object) -> dict[str, float]:
    if isinstance(value, dict):
        return value
    return {"": value} if isinstance(value, int | float) else {}


def _total(value: object) -> float:
    return float(sum(_by_label(value).values()))


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
    for pipe, before in _numbers(moment.previous).items():
        for name, value in before.items():
            if pipe in now and now[pipe].get(name, 0.0) < value:
                yield f"{pipe}: {name} fell from {value} to {now[pipe].get(name)}"


def holders(moment: Moment) -> Iterator[str]:
    """The server and its clients are those that exist."""
    for daemon, shown in _pairs(moment):
        server = daemon.server
        true = [] if server is None else [(server.pid, sorted(one.pid for one in server.clients))]
        if _holders(shown) != true:
            yield f"{daemon.key}: {_holders(shown)}, not {true}"


def _holders(daemon: ControlDaemon) -> list[tuple[int, list[int]]]:
    return [
        (server.pid, sorted(client.pid for client in server.clients)) for server in daemon.servers
    ]


def waits(moment: Moment) -> Iterator[str]:
    """The waits are those of clients behind another user's server, to the millisecond."""
    for daemon, shown in _pairs(moment):
        true = {(one.pid, one.uid, one.since_ms, one.dead) for one in daemon.waits()}
        if _waits(shown) != true:
            yield f"{daemon.key}: {sorted(_waits(shown))}, not {sorted(true)}"


def _waits(daemon: ControlDaemon) -> set[tuple[int, int, int, bool]]:
    return {(one.pid, one.uid, round(one.since * 1000), one.dead) for one in daemon.waits}


def _waiting(daemon: ControlDaemon) -> set[tuple[int, ...]]:
    """Return the waits without deaths, which are confirmed later."""
    return {wait[:3] for wait in _waits(daemon)}


def restart(moment: Moment) -> Iterator[str]:
    """An exporter that has just started shows the same state."""
    if moment.restarted is None:
        return
    later = {one.pipe_directory: one for one in moment.restarted.daemons}
    for daemon, before in _pairs(moment):
        after = later.get(before.pipe_directory)
        if after is None:
            if daemon.exists:
                yield f"{daemon.key} is not there after it"
            continue
        for part in (_holders, _waiting):
            if part(before) != part(after):
                what = part.__name__[1:]
                yield f"{daemon.key}: {what} {part(after)} after it, {part(before)} before it"


def surfaces(moment: Moment) -> Iterator[str]:
    """The metrics page and the API show the same numbers; what was not seen is absent."""
    page = Page(text_of(moment.snapshot))
    status = json.loads(to_json(make_status(moment.snapshot, WebOptions())))
    for shown, listed in zip(moment.snapshot.daemons, status["daemons"], strict=True):
        clients = sum(len(server.clients) for server in shown.servers)
        number = sum(len(one["clients"]) for one in listed["servers"])
        if number != clients:
            yield f"the API has {number} clients of {clients}"
    connections = "mps_client_connections_total"
    counted = sum(
        value
        for counted in _numbers(moment.snapshot).values()
        for name, value in counted.items()
        if connections in name
    )
    if (page.value(connections) or 0.0) != counted:
        yield f"{connections} is {page.value(connections)} on the page, not {counted}"
    for name in page:
        if name.startswith("mps_gpu_utilization"):
            yield f"{name} is shown without a GPU that was read"


def blame(moment: Moment) -> Iterator[str]:
    """Only those that caused a fault are named, and only real ghosts are called so."""
    for daemon, shown in _pairs(moment):
        for server in shown.servers:
            true = daemon.server is not None and daemon.server.ghost
            if bool(server.ghost) != true:
                yield f"{daemon.key}: ghost of server {server.pid} is {server.ghost}, not {true}"
        culprits = {fault.culprit_pid for fault in daemon.truth.faults}
        for incident in shown.incidents:
            if innocent := set(incident.caused_by_pids) - culprits:
                yield f"{daemon.key}: {innocent} named as the cause of {incident.kind}"
