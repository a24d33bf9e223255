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

from tests.support.player import RECORDINGS, Player
from tests.unit.grafana import hand_made
from tests.unit.grafana.reading import (
    FILES,
    Target,
    annotation_targets,
    filled,
    load,
    targets,
    variable_selector,
    variables,
)
from tests.unit.grafana.stage import (
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
from tests.unit.grafana.subjects import EVERY, subjects
from tests.unit.rules.rulebook import RULE_FILES

ENDED = "an exporter that ended"
"""A recording's exporter, some seconds after it was there for the last time."""
SUBJECTS = subjects()
NAMES = sorted({name for _, _, name in SUBJECTS} - {EVERY, ENDED, hand_made.NAME})

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
    labels = f'alertname="{rule["alert"]}",severity="{rule["labels"]["severity"]}",daemon="/mps"'
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
        requested = [t for t in targets() if (t.dashboard, t.panel) == (dashboard, panel)]
        assert requested
        if not any(shows(prometheus.target(t, window, instance=where(name))) for t in requested):
            empty.append(f"{dashboard} / {panel} shows nothing of {name}")
    assert empty == []


def test_every_expression_is_answered_for_all_hosts_at_once(stage: Stage) -> None:
    prometheus, windows = stage
    whole = Window(min(w.start for w in windows.values()), max(w.end for w in windows.values()))
    for target in targets():
        prometheus.at_end(target, whole)
    for _, expr in annotation_targets():
        prometheus.span(filled(expr), whole, step=30)


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
    for target in targets():
        if target.panel == "Source":
            for name, says in (("fault", "recording"), (hand_made.NAME, "live")):
                found = prometheus.at_end(target, windows[name], instance=name)
                assert found == ([({}, [1.0])] if target.legend == says else [])


@dataclass(frozen=True)
class Truth:
    """What a panel must say at the end of a recording: by these labels, this much."""

    dashboard: str
    panel: str
    recording: str
    value: float | str
    """A number that is known from the incident itself, or a metric of the recording's own end."""
    ref: str = "A"
    labels: dict[str, str] = field(default_factory=dict)
    off_by: float = 0.0
    """How much of a running total may fall between two scrapes."""


TRUTHS = (
    Truth("mps-incidents", "Clients lost", "server-killed", 2),
    Truth("mps-incidents", "Crashes", "server-killed", 1),
    Truth("mps-incidents", "Failed starts", "crash-loop", 6),
    Truth("mps-incidents", "Fatal errors", "fault", 1),
    Truth("mps-incidents", "Refused", "context-limit", 4),
    Truth("mps-incidents", "Lost by cause", "fault", 1, labels={"cause": "own_fault"}),
    Truth("mps-incidents", "Lost by cause", "fault", 1, labels={"cause": "neighbour_fault"}),
    Truth("mps-incidents", "Lost by cause", "daemon-killed", 1, labels={"cause": "daemon_died"}),
    Truth("mps-incidents", "Lost by cause", "terminate-client", 1, labels={"cause": "terminated"}),
    Truth("mps-fleet", "Clients lost", "fault-held", 2),
    Truth("mps-sharing", "Hand-overs", "three-users", 2),
    Truth("mps-sharing", "Waits of each user", "three-users", 1, labels={"uid": "1002"}),
    Truth("mps-sharing", "Waits of each user", "wait-served",
          "mps_uid_wait_seconds_sum", "B", {"uid": "1002"}, 0.01),
    Truth("mps-sharing", "Waits of each user", "wait-abandoned-sigkill", 1, "D", {"uid": "1002"}),
    Truth("mps-sharing", "Waits of each user", "starved", "mps_uid_overtakes_total", "E",
          {"uid": "1001"}),
    Truth("mps-sharing", "GPU time lost", "wait-served",
          "mps_uid_handover_idle_seconds_total", off_by=0.6),
    Truth("mps-sharing", "GPU time lost", "three-users",
          "mps_uid_handover_idle_seconds_total", off_by=0.6),
    Truth("mps-sharing", "Who overtook most", "starved", "mps_uid_overtakes_total",
          labels={"uid": "1001"}),
)  # fmt: skip


async def test_numbers_are_those_of_the_incident(stage: Stage) -> None:
    prometheus, windows = stage
    wrong = []
    for truth in TRUTHS:
        wanted = truth.value
        if isinstance(wanted, str):
            metrics = await Player(_file(truth.recording)).to_end()
            value = metrics.value(wanted, **truth.labels)
            assert value
            wanted = value
        got = sum(_asked(prometheus, windows[truth.recording], truth))
        if abs(got - wanted) > truth.off_by:
            wrong.append(f"{truth.panel} {truth.ref} of {truth.recording}: {got}, not {wanted}")
    assert wrong == []


def _file(name: str) -> Path:
    return RECORDINGS / f"{name}.rec.gz"


def _asked(prometheus: Prometheus, window: Window, truth: Truth) -> Iterator[float]:
    target = _target(truth)
    for labels, values in prometheus.at_end(target, window, instance=truth.recording, job=JOB):
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
        ("mps-sharing", "Waits that ended, by how long they took", "three-users", 2),
    ):
        target = next(t for t in targets() if (t.dashboard, t.panel) == (dashboard, panel))
        found = prometheus.span(
            filled(target.expr, **windows[recording].variables, instance=recording),
            windows[recording],
        )
        total = sum(sum(values) for labels, values in found if labels.get("le", "+Inf") == "+Inf")
        assert total == wanted, panel
