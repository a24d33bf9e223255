"""What dashboards ask, asked of a real Prometheus that has the scrapes of real incidents.

docs/dashboards.md says in which recording each panel has its subject; there it must not be empty.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from testing.dashboards import (
    FILES,
    Target,
    annotation_targets,
    filled,
    load,
    targets,
    variable_selector,
    variables,
)
from testing.player import RECORDINGS, Metrics, Player
from testing.prometheus_server import (
    GONE,
    JOB,
    OF_THE_SCRAPE,
    SCRAPE_SECONDS,
    Prometheus,
    Scrapes,
    Series,
    Window,
    backfilled,
    programs,
    scrapes_of,
)
from testing.rule_files import RULE_FILES
from tests.unit.grafana import hand_made
from tests.unit.grafana.subjects import EVERY, subjects

ENDED = "an exporter that ended"
"""A recording's exporter, some seconds after it was there for the last time."""
NEVER = "never reached"
BLIND = "without readable logs"
UNREAD = """mps_exporter_build_info{version="1"} 1
mps_control_up{daemon="/mps"} 1
mps_control_state{daemon="/mps",mps_control_state="answering"} 1
mps_control_log_readable{daemon="/mps",log="control"} 0
mps_server_info{daemon="/mps",server="7",uid="1001"} 1
"""
"""What is left of a daemon where neither its logs nor its clients can be read."""
SUBJECTS = subjects()
NAMES = sorted({name for _, _, name in SUBJECTS} - {EVERY, ENDED, hand_made.NAME})

USERS = ("1001", "1002", "1003")

Stage = tuple[Prometheus, dict[str, Window]]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    began = float(round(time.time()) - 3600)
    hosts = [asyncio.run(scrapes_of(name, began)) for name in NAMES]
    windows = {host.instance: Window(began - 1, host.seen_until) for host in hosts}
    moments = [began + step * SCRAPE_SECONDS for step in range(240)]
    made = [(at, hand_made.page(at - began, began) + OF_THE_SCRAPE.format(cpu=0)) for at in moments]
    hosts.append(Scrapes(hand_made.NAME, tuple(made)))
    windows[hand_made.NAME] = Window(began, moments[-1])
    gone = windows["one-client"].end
    windows[ENDED] = Window(gone - 2, gone + 5)
    hosts.append(_alert(windows["server-killed"]))
    hosts.append(Scrapes(NEVER, tuple((at, GONE) for at in moments)))
    hosts.append(Scrapes(BLIND, tuple((at, UNREAD) for at in moments)))
    windows[BLIND] = Window(began, moments[-1])
    with programs() as started:
        yield backfilled(tmp_path_factory.mktemp("dashboards"), started, hosts), windows


def _alert(window: Window) -> Scrapes:
    """What Prometheus writes down of an alert that fires in the last second of a window."""
    rules = [
        rule
        for file in RULE_FILES
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    ]
    (rule,) = [rule for rule in rules if rule.get("alert") == "MpsServerCrashed"]
    labels = f'alertname="{rule["alert"]}",severity="critical",daemon="/mps"'
    lines = f'ALERTS{{{labels},alertstate="firing"}} 1\nALERTS_FOR_STATE{{{labels}}} {window.end}\n'
    return Scrapes("server-killed", tuple((window.end - ago, lines) for ago in (1.0, 0.5, 0.0)))


def where(name: str) -> str:
    """The label instance of what the document calls so."""
    return "one-client" if name in {EVERY, ENDED} else name


def shows(found: Iterable[Series]) -> bool:
    """Something else than nothing and zeros."""
    return any(value and not math.isnan(value) for _, values in found for value in values)


def test_panels_show_what_was_recorded(stage: Stage) -> None:
    prometheus, windows = stage
    empty = []
    for dashboard, panel, name in SUBJECTS:
        window = windows[name if name != EVERY else "one-client"]
        asked = [t for t in targets() if (t.dashboard, t.panel) == (dashboard, panel)]
        assert asked
        users = USERS if dashboard == "mps-user" else ("",)
        if not any(
            shows(prometheus.target(t, window, instance=where(name), uid=uid))
            for t in asked
            for uid in users
        ):
            empty.append(f"{dashboard} / {panel} shows nothing of {name}")
    assert empty == []


def test_every_expression_is_answered_for_all_hosts_at_once(stage: Stage) -> None:
    prometheus, windows = stage
    whole = Window(min(w.start for w in windows.values()), max(w.end for w in windows.values()))
    for target in targets():
        prometheus.at_end(target, whole)
    for _, expr in annotation_targets():
        prometheus.span(filled(expr), whole, step=30)


def test_history_has_hosts_that_were_never_reached_and_hosts_that_are_young(stage: Stage) -> None:
    """All began together, and later than the range that is looked at; Grafana aligns ranges."""
    prometheus, windows = stage
    (target,) = (t for t in targets() if t.panel == "Worst state of each host")
    middle = (windows["limits"].start + 15) // 5 * 5
    expr = filled(target.expr, __range="10m", __interval="5s", __rate_interval="4s", job=JOB)
    found = prometheus.span(expr, Window(middle - 600, middle), step=5)
    last = {labels["instance"]: values[-1] for labels, values in found}
    assert last[NEVER] == 12
    assert last["limits"] == 1


def test_what_cannot_be_seen_is_no_zero(stage: Stage) -> None:
    prometheus, windows = stage
    asked = [t for t in targets() if t.panel in {"Waiting", "Longest wait", "Clients"}]
    asked = [t for t in asked if t.dashboard in {"mps-host", "mps-sharing"} and t.ref == "A"]
    assert len(asked) >= 4
    for target in asked:
        assert prometheus.target(target, windows[BLIND], instance=BLIND) == [], target


def test_a_host_that_was_never_reached_can_be_chosen(stage: Stage) -> None:
    prometheus, windows = stage
    window = windows["limits"]
    for panel, wanted in (("Unreachable", 1), ("Hosts, worst first", 12), ("State", 12)):
        target = next(t for t in targets() if (t.panel, t.ref) == (panel, "A"))
        found = prometheus.at_end(target, window, instance=NEVER)
        assert [value for _, (value,) in found] == [wanted], panel


def test_every_variable_offers_something(stage: Stage) -> None:
    prometheus, windows = stage
    whole = Window(min(w.start for w in windows.values()), max(w.end for w in windows.values()))
    for path in FILES:
        for variable in variables(load(path)):
            selector = filled(variable_selector(variable["query"]))
            found = prometheus.api(
                "series", **{"match[]": selector, "start": whole.start, "end": whole.end}
            )
            offered = {series[variable["name"]] for series in found if variable["name"] in series}
            assert offered, f"{path.stem} ${variable['name']}"
            assert len(offered) <= len(windows) + 5


def test_a_recording_is_called_one(stage: Stage) -> None:
    prometheus, windows = stage
    (target,) = (
        t for t in targets() if t.panel == "Exporters" and "mps_exporter_recording_info" in t.expr
    )
    for name, is_recording in (("fault", True), (hand_made.NAME, False)):
        found = prometheus.at_end(target, windows[name], instance=name)
        assert [bool(labels["scenario"]) for labels, _ in found] == [True] * is_recording


@dataclass(frozen=True)
class Truth:
    """What a panel must say at a moment of a recording: by these labels, this much."""

    dashboard: str
    panel: str
    recording: str
    value: float | str
    """A number that is known from the incident itself, or a metric of the recording at the time."""
    ref: str = "A"
    labels: dict[str, str] = field(default_factory=dict)
    off_by: float = 0.0
    """How much of a running total may fall between two scrapes."""
    at: float | None = None
    """Seconds into the recording, in the midst of a time in which nothing changes; else its end."""
    direct: str = ""
    """The same asked of Prometheus by hand, with HERE for the host."""
    uid: str = "1002"


_WAITED = "time() - min(mps_uid_waiting_since_timestamp_seconds{HERE})"
_LOST = "sum(mps_client_losses_total{HERE})"

# Every tile of every dashboard, and what else counts.
TRUTHS = (
    Truth("mps-fleet", "Unreachable", ENDED, 1, direct="count(up{HERE} == 0)"),
    Truth(
        "mps-fleet",
        "Daemons",
        "stopped",
        1,
        at=12,
        direct='count(mps_control_state{HERE, mps_control_state="unresponsive"} == 1)',
    ),
    Truth(
        "mps-fleet",
        "Servers",
        "fault-held",
        1,
        at=8,
        direct='count(mps_server_state{HERE, mps_server_state="FAULT"} == 1)',
    ),
    Truth(
        "mps-fleet",
        "GPUs",
        hand_made.NAME,
        2,
        direct="count(mps_gpu_up{HERE} == 0) + count(mps_gpu_recovery_action{HERE,"
        ' mps_gpu_recovery_action="gpu_reset"} == 1)',
    ),
    Truth(
        "mps-fleet",
        "Waiting",
        "three-users",
        "mps_uid_waiting_clients",
        at=5.5,
        direct="sum(mps_uid_waiting_clients{HERE})",
    ),
    Truth("mps-fleet", "Clients lost", "fault-held", 2, direct=_LOST),
    Truth("mps-fleet", "Hosts and GPUs", "limits", 1, at=12, direct="count(up{HERE} == 1)"),
    Truth(
        "mps-fleet",
        "Hosts and GPUs",
        "limits",
        "mps_gpu_up",
        "B",
        at=12,
        direct="count(mps_gpu_info{HERE})",
    ),
    Truth(
        "mps-fleet",
        "Hosts and GPUs",
        "limits",
        1,
        "C",
        at=12,
        direct='min(max by (uuid) (mps_gpu_processes{HERE, kind="mps_client"}) > bool 0)',
    ),
    Truth(
        "mps-host",
        "State",
        "stopped",
        11,
        at=12,
        direct='11 * max(mps_control_state{HERE, mps_control_state="unresponsive"})',
    ),
    Truth("mps-host", "State", "limits", 1, at=12, direct="min(mps_control_up{HERE})"),
    Truth("mps-host", "State", ENDED, 12, direct="12 * count(up{HERE} == 0)"),
    Truth(
        "mps-host",
        "Daemon",
        "draining",
        2,
        at=8,
        direct='2 * max(mps_control_state{HERE, mps_control_state="draining"})',
    ),
    Truth(
        "mps-host",
        "Server",
        "fault-held",
        13,
        at=8,
        direct='13 * max(mps_server_state{HERE, mps_server_state="FAULT"})',
    ),
    Truth(
        "mps-host",
        "Clients",
        "context-limit",
        "mps_server_clients",
        at=15,
        direct="count(mps_client_info{HERE})",
    ),
    Truth(
        "mps-host", "Waiting", "wait-served", 1, at=4, direct="sum(mps_uid_waiting_clients{HERE})"
    ),
    Truth(
        "mps-host",
        "Contexts",
        "context-limit",
        1,
        at=15,
        direct="max(mps_server_client_contexts{HERE}) / 48",
    ),
    Truth(
        "mps-sharing",
        "Holder",
        "three-users",
        1,
        labels={"uid": "1002"},
        at=5.5,
        direct='count(mps_client_info{HERE, uid="1002"})',
    ),
    Truth(
        "mps-sharing",
        "Waiting",
        "three-users",
        1,
        at=5.5,
        direct="sum(mps_uid_waiting_clients{HERE})",
    ),
    Truth("mps-sharing", "Longest wait", "wait-served", 3.2, off_by=1.0, at=4, direct=_WAITED),
    Truth(
        "mps-sharing",
        "Waits, p95",
        "wait-served",
        9.5,
        off_by=0.5,
        direct="histogram_quantile(0.95, sum by (le) (mps_uid_wait_seconds_bucket{HERE}))",
    ),
    Truth(
        "mps-sharing", "Hand-overs", "three-users", 2, direct="sum(mps_uid_handovers_total{HERE})"
    ),
    Truth(
        "mps-sharing",
        "Time lost",
        "wait-served",
        "mps_uid_handover_idle_seconds_total",
        off_by=0.6,
        direct="sum(mps_uid_handover_idle_seconds_total{HERE})",
    ),
    Truth(
        "mps-sharing", "Time lost", "three-users", "mps_uid_handover_idle_seconds_total", off_by=0.6
    ),
    Truth(
        "mps-user",
        "My state",
        "wait-served",
        22,
        at=4,
        direct="22 * max(mps_uid_waiting_clients{HERE})",
    ),
    Truth(
        "mps-user",
        "My state",
        "wait-served",
        23,
        at=4,
        uid="1001",
        direct='23 * count(mps_client_info{HERE, uid="1001"})',
    ),
    Truth(
        "mps-user",
        "Behind",
        "wait-served",
        1,
        labels={"uid": "1001"},
        at=4,
        direct='count(mps_client_info{HERE, uid="1001"})',
    ),
    Truth("mps-user", "Waiting for", "wait-served", 3.2, off_by=1.0, at=4, direct=_WAITED),
    Truth(
        "mps-user",
        "Queue place",
        "three-users",
        1,
        at=5.5,
        uid="1003",
        direct='sum(mps_uid_waiting_clients{HERE, uid="1003"})',
    ),
    Truth(
        "mps-user",
        "Connected",
        "three-users",
        1,
        at=5.5,
        direct='count(mps_client_info{HERE, uid="1002"})',
    ),
    Truth("mps-user", "Lost", "fault", 2, uid="1001", direct=_LOST),
    Truth("mps-incidents", "Clients lost", "server-killed", 2, direct=_LOST),
    Truth(
        "mps-incidents",
        "Crashes",
        "server-killed",
        1,
        direct='sum(mps_server_exits_total{HERE, cause="crashed"})',
    ),
    Truth(
        "mps-incidents",
        "Start errors",
        "crash-loop",
        6,
        direct='sum(mps_server_exits_total{HERE, cause="start_failed"})',
    ),
    Truth("mps-incidents", "Fatal errors", "fault", 1, direct="sum(mps_server_faults_total{HERE})"),
    Truth(
        "mps-incidents",
        "Refused",
        "context-limit",
        4,
        direct="sum(mps_client_rejections_total{HERE})",
    ),
    Truth(
        "mps-incidents",
        "Most recent",
        hand_made.NAME,
        100,
        off_by=5,
        direct="time() - max(mps_server_last_exit_timestamp_seconds{HERE})",
    ),
    Truth(
        "mps-incidents",
        "Lost clients by user",
        "fault",
        2,
        labels={"uid": "1001"},
        direct='sum(mps_client_losses_total{HERE, uid="1001"})',
    ),
    Truth("mps-gpu", "Lost GPUs", hand_made.NAME, 1, direct="count(mps_gpu_up{HERE} == 0)"),
    Truth(
        "mps-gpu",
        "Needs reset",
        hand_made.NAME,
        1,
        direct='count(mps_gpu_recovery_action{HERE, mps_gpu_recovery_action="gpu_reset"} == 1)',
    ),
    Truth(
        "mps-gpu",
        "ECC errors",
        hand_made.NAME,
        "",
        off_by=2,
        direct="sum(mps_gpu_ecc_errors_total{HERE})",
    ),
    Truth(
        "mps-gpu", "Row failures", hand_made.NAME, 1, direct="sum(mps_gpu_row_remap_failure{HERE})"
    ),
    Truth(
        "mps-gpu",
        "Xid errors",
        "fault",
        "mps_gpu_xid_errors_total",
        direct="sum(mps_gpu_xid_errors_total{HERE})",
    ),
    Truth(
        "mps-gpu",
        "Headroom",
        "limits",
        "",
        at=12,
        direct='max(mps_gpu_temperature_limit_celsius{HERE, limit="slowdown"})'
        ' - max(mps_gpu_temperature_celsius{HERE, sensor="gpu"})',
    ),
    Truth("mps-sharing", "Waits by user", "three-users", 1, labels={"uid": "1002"}),
    Truth(
        "mps-sharing",
        "Waits by user",
        "wait-served",
        "mps_uid_wait_seconds_sum",
        "B",
        {"uid": "1002"},
        0.01,
    ),
    Truth("mps-sharing", "Waits by user", "wait-abandoned-sigkill", 1, "D", {"uid": "1002"}),
    Truth(
        "mps-sharing", "Waits by user", "starved", "mps_uid_overtakes_total", "E", {"uid": "1001"}
    ),
)


def test_every_tile_has_a_truth() -> None:
    tiles = {(t.dashboard, t.panel) for t in targets() if t.kind == "stat"}
    assert tiles <= {(truth.dashboard, truth.panel) for truth in TRUTHS}


async def _recorded(truth: Truth) -> Metrics | None:
    """What the recording itself says at that time; nothing of a host that is made by hand."""
    if truth.recording in {hand_made.NAME, ENDED}:
        return None
    player = Player(_file(truth.recording))
    if truth.at is None:
        return await player.to_end()
    return await player.to(player.recording.header.started_at + truth.at)


def _window(truth: Truth, whole: Window) -> Window:
    return whole if truth.at is None else Window(whole.start, whole.start + 1 + truth.at)


def _wanted(truth: Truth, recorded: Metrics | None) -> float | None:
    if not isinstance(truth.value, str):
        return truth.value
    if not truth.value:
        return None
    assert recorded is not None
    value = recorded.value(truth.value, **truth.labels)
    assert value, f"{truth.value} of {truth.recording}"
    return value


async def test_numbers_are_those_of_the_incident(stage: Stage) -> None:
    prometheus, windows = stage
    wrong = []
    for truth in TRUTHS:
        recorded = await _recorded(truth)
        window = _window(truth, windows[truth.recording])
        got = sum(_asked(prometheus, window, truth))
        wanted = _wanted(truth, recorded)
        if wanted is not None and abs(got - wanted) > truth.off_by:
            wrong.append(f"{truth.panel} {truth.ref} of {truth.recording}: {got}, not {wanted}")
        if truth.direct:
            here = f'instance="{where(truth.recording)}"'
            found = prometheus.moment(truth.direct.replace("HERE", here), window.end)
            direct = sum(value for _, (value,) in found)
            if abs(got - direct) > max(truth.off_by, 0.01):
                wrong.append(f"{truth.panel} of {truth.recording}: {got}, but {direct} by hand")
    assert not wrong, "\n".join(wrong)


def _file(name: str) -> Path:
    return RECORDINGS / f"{name}.rec.gz"


def _asked(prometheus: Prometheus, window: Window, truth: Truth) -> Iterator[float]:
    target = _target(truth)
    choices = {"instance": where(truth.recording), "job": JOB, "uid": truth.uid}
    for labels, values in prometheus.at_end(target, window, **choices):
        if truth.labels.items() <= labels.items():
            yield values[0]


def _target(truth: Truth) -> Target:
    wanted = (truth.dashboard, truth.panel, truth.ref)
    return next(t for t in targets() if (t.dashboard, t.panel, t.ref) == wanted)


def test_bars_of_events_add_up_to_the_events(stage: Stage) -> None:
    prometheus, windows = stage
    for dashboard, panel, recording, wanted in (
        ("mps-incidents", "Clients lost, by cause", "server-killed", 2),
        ("mps-incidents", "Clients refused, by cause", "fault-held", 1),
        ("mps-sharing", "Waits that ended, by length", "three-users", 2),
    ):
        total = sum(
            sum(values)
            for target in targets()
            if (target.dashboard, target.panel) == (dashboard, panel)
            for _, values in prometheus.target(target, windows[recording], instance=recording)
        )
        assert total == wanted, panel
