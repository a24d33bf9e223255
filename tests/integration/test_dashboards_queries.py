"""What dashboards ask, asked of a real Prometheus that has the scrapes of real incidents.

tests/unit/grafana/subjects.md names the recording that fills each panel.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest
import yaml

from testing.dashboards import (
    FILES,
    annotation_targets,
    filled,
    load,
    targets,
    variable_selector,
    variables,
)
from testing.golden import SYNTHETIC, recordings
from testing.page import text_of
from testing.player import RECORDINGS, Player
from testing.prometheus_programs import Series
from testing.prometheus_server import (
    GONE,
    JOB,
    OF_THE_SCRAPE,
    SCRAPE_SECONDS,
    Scraped,
    Scrapes,
    Window,
    backfilled,
    scrapes_of,
)
from testing.rule_files import RULE_FILES
from tests.unit.grafana import hand_made
from tests.unit.grafana.subjects import EVERY, subjects

ENDED = "an exporter that ended"
"""A recording's exporter, some seconds after it was there for the last time."""
V3 = "v3-manual"  # The synthetic host of testing/golden.py.
NEVER = "never reached"
BLIND = "without readable logs"
REMOVED = "a host that was removed"
UNREAD = """mps_exporter_build_info{version="1"} 1
mps_control_up{daemon="/mps"} 1
mps_control_state{daemon="/mps",mps_control_state="answering"} 1
mps_control_log_readable{daemon="/mps",log="control"} 0
mps_server_info{daemon="/mps",server="7",uid="1001"} 1
"""
"""The rest of a daemon whose logs and clients cannot be read."""
SUBJECTS = subjects()
NAMES = sorted({name for _, _, name in SUBJECTS} & {*recordings()} - {V3})

USERS = ("1001", "1002", "1003")

Stage = tuple[Scraped, dict[str, Window]]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    began = float(round(time.time()) - 3600)
    hosts = [asyncio.run(scrapes_of(name, began)) for name in NAMES]
    windows = {host.instance: Window(began - 1, host.seen_until) for host in hosts}
    moments = [began + step * SCRAPE_SECONDS for step in range(240)]
    scrape = OF_THE_SCRAPE.format(cpu=0, since=began)
    made = [(at, hand_made.page(at - began, began) + scrape) for at in moments]
    hosts.append(Scrapes(hand_made.NAME, tuple(made)))
    v3 = text_of(asyncio.run(Player(SYNTHETIC[V3]()).to_end()).snapshot)
    hosts.append(Scrapes(V3, tuple((at, v3) for at in moments)))
    windows[hand_made.NAME] = windows[V3] = Window(began, moments[-1])
    gone = windows["one-client"].end
    windows[ENDED] = Window(gone - 2, gone + 5)
    hosts.append(_alert(windows["server-killed"]))
    hosts.append(Scrapes(NEVER, tuple((at, GONE) for at in moments)))
    hosts.append(Scrapes(BLIND, tuple((at, UNREAD) for at in moments)))
    hosts.append(Scrapes(REMOVED, tuple((at, f"up 1\n{UNREAD}") for at in moments[:20])))
    windows[BLIND] = windows[REMOVED] = Window(began, moments[-1])
    with backfilled(tmp_path_factory.mktemp("dashboards"), hosts) as server:
        yield server, windows


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
    """All began together, and later than the queried range; Grafana aligns ranges."""
    prometheus, windows = stage
    # Without recording rules the second query shows all.
    (_, target) = (t for t in targets() if t.panel == "Worst state of each host")
    middle = (windows["limits"].start + 15) // 5 * 5
    expr = filled(target.expr, __range="10m", __interval="5s", __rate_interval="4s", job=JOB)
    found = prometheus.span(expr, Window(middle - 600, middle), step=5)
    last = {labels["instance"]: values[-1] for labels, values in found}
    assert last[NEVER] == 17
    assert last["limits"] == 1
    gone = filled(target.expr, __range="10m", __interval="5s", instance="removed", job=JOB)
    found = prometheus.span(gone, Window(middle - 600, middle), step=5)
    assert [labels["instance"] for labels, _ in found] == ["no target in this time range"]


def test_what_cannot_be_seen_is_no_zero(stage: Stage) -> None:
    prometheus, windows = stage
    asked = [t for t in targets() if t.panel in {"Waiting", "Longest wait", "Clients", "Contexts"}]
    asked = [t for t in asked if t.dashboard in {"mps-host", "mps-sharing"} and t.ref == "A"]
    assert len(asked) == 4
    for target in asked:
        ((_, values),) = prometheus.target(target, windows[BLIND], instance=BLIND)
        assert all(map(math.isnan, values)), target


def test_a_host_that_was_never_reached_can_be_chosen(stage: Stage) -> None:
    prometheus, windows = stage
    window = windows["limits"]
    for panel, wanted in (("Unreachable", 1), ("Hosts, worst first", 17), ("State", 17)):
        target = next(t for t in targets() if (t.panel, t.ref) == (panel, "A"))
        found = prometheus.at_end(target, window, instance=NEVER)
        assert [value for _, (value,) in found] == [wanted], panel


def test_every_variable_offers_something(stage: Stage) -> None:
    prometheus, windows = stage
    whole = Window(min(w.start for w in windows.values()), max(w.end for w in windows.values()))
    for path in FILES:
        for variable in variables(load(path)):
            selector = filled(variable_selector(variable["query"]))
            if variable["query"].startswith("query_result("):
                assert prometheus.moment(selector, whole.end)
                continue
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


class Truth(NamedTuple):
    """What a panel must show at a moment of a recording."""

    dashboard: str
    panel: str
    ref: str
    recording: str
    at: str
    """Seconds into the recording, amid a time in which nothing changes; or "end"."""
    uid: str  # The user who is chosen.
    labels: str
    value: str
    """A number that is known from the incident itself, or a metric of the recording at the time."""
    off_by: str  # How much of a running total may fall between two scrapes.

    @property
    def wanted(self) -> dict[str, str]:
        return dict(pair.split("=") for pair in self.labels.split(",") if "=" in pair)


TRUTHS = """
mps-fleet|Healthy hosts (no alert)|A|limits|12|1002|-|1|0
mps-fleet|Healthy hosts (no alert)|A|stopped|12|1002|-|0|0
mps-fleet|Unreachable|A|an exporter that ended|end|1002|-|1|0
mps-fleet|Gone|A|a host that was removed|end|1002|-|1|0
mps-exporter|Unreachable|A|an exporter that ended|end|1002|-|1|0
mps-exporter|Gone|A|a host that was removed|end|1002|-|1|0
mps-exporter|Failing sources|A|made by hand|end|1002|-|1|0
mps-fleet|Bad daemons|A|stopped|12|1002|-|1|0
mps-fleet|Bad servers|A|fault-held|8|1002|-|1|0
mps-fleet|Bad GPUs|A|made by hand|end|1002|-|2|0
mps-fleet|Longest wait|A|wait-served|4|1002|uid=1002|3.2|1
mps-fleet|Waiting|A|three-users|5.5|1002|-|mps_uid_waiting_clients|0
mps-fleet|Users in the queue now|A|three-users|5.5|1002|uid=1003|4.6|1
mps-fleet|Hosts, worst first|A|wait-served|4|1002|-|7|0
mps-fleet|Hosts, worst first|A|fault-held|8|1002|-|12|0
mps-fleet|Hosts, worst first|A|draining|8|1002|-|4|0
mps-fleet|Lost in range|A|fault-held|end|1002|-|2|0
mps-fleet|Waits of at most a minute, by day|A|made by hand|end|1002|-|0.75|0
mps-fleet|GPU hours held, by user and day|A|made by hand|end|1002|uid=1001|0.05|0.02
mps-host|State|A|stopped|12|1002|-|16|0
mps-host|State|A|limits|12|1002|-|1|0
mps-host|State|A|an exporter that ended|end|1002|-|17|0
mps-host|Daemon|A|draining|8|1002|-|2|0
mps-host|Server|A|fault-held|8|1002|-|13|0
mps-host|Clients|A|context-limit|15|1002|-|mps_server_clients|0
mps-host|Waiting|A|wait-served|4|1002|-|1|0
mps-host|Contexts|A|context-limit|15|1002|-|1|0
mps-sharing|Holder|A|three-users|5.5|1002|uid=1002|1|0
mps-sharing|Longest wait|A|wait-served|4|1002|-|3.2|1
mps-sharing|Short waits|A|wait-served|end|1002|-|1|0
mps-sharing|Waiters|A|three-users|5.5|1002|uid=1003|1|0
mps-sharing|Time lost|A|wait-served|end|1002|-|mps_uid_handover_idle_seconds_total|0.6
mps-sharing|Time lost|A|three-users|end|1002|-|mps_uid_handover_idle_seconds_total|0.6
mps-user|My state|A|wait-served|4|1002|-|22|0
mps-user|My state|A|wait-served|4|1001|-|23|0
mps-user|Behind|A|wait-served|4|1002|uid=1001|3.2|1
mps-user|Longest wait|A|wait-served|4|1002|-|3.2|1
mps-user|Queue place|A|three-users|5.5|1003|-|1|0
mps-user|Connected|A|three-users|5.5|1002|-|1|0
mps-user|Lost|A|fault|end|1001|-|2|0
mps-incidents|Clients lost|A|server-killed|end|1002|-|2|0
mps-incidents|Crashes|A|server-killed|end|1002|-|1|0
mps-incidents|Start errors|A|crash-loop|end|1002|-|6|0
mps-incidents|Fatal errors|A|fault|end|1002|-|1|0
mps-incidents|Refused|A|context-limit|end|1002|-|4|0
mps-incidents|Most recent|A|made by hand|end|1002|-|100|5
mps-incidents|Who lost programs, and by whom?|A|fault|end|1002|uid=1001|2|0
mps-host|SMs of each user, between|A|made by hand|end|1002|uid=1001|66|0
mps-host|SMs of each user, between|B|made by hand|end|1002|uid=1001|12|0
mps-gpu|Bad GPUs|A|made by hand|end|1002|-|2|0
mps-gpu|Xid errors|A|fault|end|1002|-|mps_gpu_xid_errors_total|0
mps-sharing|Waits by user|A|three-users|end|1002|uid=1002|1|0
mps-sharing|Waits by user|B|wait-served|end|1002|uid=1002|mps_uid_wait_seconds_sum|0.01
mps-sharing|Waits by user|D|wait-abandoned-sigkill|end|1002|uid=1002|1|0
mps-sharing|Waits by user|E|starved|end|1002|uid=1001|mps_uid_overtakes_total|0
"""
"""Every tile of every dashboard, and what else counts."""
TABLE = [Truth(*map(str.strip, line.split("|"))) for line in TRUTHS.split("\n") if line]


def test_every_tile_has_a_truth() -> None:
    tiles = {(t.dashboard, t.panel) for t in targets() if t.kind == "stat"}
    readings = {("mps-gpu", "ECC errors"), ("mps-gpu", "Headroom")}
    assert tiles - {(truth.dashboard, truth.panel) for truth in TABLE} == readings


async def _wanted(truth: Truth) -> float:
    if not truth.value.startswith("mps_"):
        return float(truth.value)
    player = Player(RECORDINGS / f"{truth.recording}.rec.gz")
    if truth.at == "end":
        recorded = await player.to_end()
    else:
        recorded = await player.to(player.recording.header.started_at + float(truth.at))
    value = recorded.value(truth.value, **truth.wanted)
    assert value, f"{truth.value} of {truth.recording}"
    return value


async def test_numbers_are_those_of_the_incident(stage: Stage) -> None:
    prometheus, windows = stage
    wrong = []
    for truth in TABLE:
        window = windows[truth.recording]
        if truth.at != "end":
            window = Window(window.start, window.start + 1 + float(truth.at))
        got, wanted = sum(_asked(prometheus, window, truth)), await _wanted(truth)
        if abs(got - wanted) > float(truth.off_by):
            wrong.append(f"{truth.panel} {truth.ref} of {truth.recording}: {got}, not {wanted}")
    assert not wrong, "\n".join(wrong)


def _asked(prometheus: Scraped, window: Window, truth: Truth) -> Iterator[float]:
    shown = (truth.dashboard, truth.panel, truth.ref)
    target = next(t for t in targets() if (t.dashboard, t.panel, t.ref) == shown)
    choices = {"instance": where(truth.recording), "job": JOB, "uid": truth.uid}
    for labels, values in prometheus.at_end(target, window, **choices):
        if truth.wanted.items() <= labels.items():
            yield values[0]


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
