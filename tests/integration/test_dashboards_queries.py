"""What dashboards ask, asked of a real Prometheus that has the scrapes of real incidents.

tests/unit/grafana/subjects.md names the recording that fills each panel. Further hosts have holes,
restarts, alerts, and an older exporter.
"""

import asyncio
import math
import re
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

from mps_exporter.sources.recording import read_recording
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
from testing.rule_files import alerts
from tests.unit.grafana import hand_made
from tests.unit.grafana.subjects import EVERY, subjects

ENDED = "an exporter that ended"
"""A recording's exporter, some seconds after it was there for the last time."""
V3 = "v3-manual"  # The synthetic host of testing/golden.py.
NEVER = "never reached"
BLIND = "without readable logs"
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

OLDER = "older-than-its-neighbour"
NEWER_METRICS = re.compile(
    r"(?m)^(?:process_start_time_seconds|mps_server_ghost|mps_gpu_(?:busy|sm_active)_seconds_total"
    r"|mps_client_(?:neighbours|sm_seconds_total|state|last_loss_timestamp_seconds)"
    r"|mps_gpu_served|mps_control_log_lost_bytes_total)\b.*\n"
)
"""What an exporter may lack that is older than the dashboards."""
LOSSES = re.compile(r"mps_client_losses_total(\{.*\} [1-9].*)")
RECORDED = r"\g<0>\ndaemon_uid_cause:mps_client_losses:increase5m\1"
"""What rules record where an exporter does not date losses."""
HOLE, REMOVED, HEALTHY = "scraped with a hole", "a host that was removed", "healthy"
NEW, RESTARTED = "not scraped before", "restarted"
QUIET = """up 1
mps_exporter_build_info{version="1"} 1
process_start_time_seconds 1000
mps_control_up{daemon="/mps"} 1
mps_control_state{daemon="/mps",mps_control_state="answering"} 1
"""
CRASHED = QUIET + 'mps_server_exits_total{daemon="/mps",cause="crashed"} %s\n'
LIFETIME = """mps_client_losses_total{daemon="/mps",uid="1001",cause="own_fault"} 50
mps_client_last_loss_timestamp_seconds{daemon="/mps"} 2000
"""
FIRING = QUIET + 'ALERTS{alertname="%s",alertstate="firing",severity="%s"} 1\n'
SEVERITIES = {"critical": 10, "warning": 6, "info": 2}
"""Severity of an alert -> the state of its host."""
MADE_SECONDS = 240
WHOLE = (0, MADE_SECONDS)


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
    windows[BLIND] = Window(began, moments[-1])
    fault = next(host for host in hosts if host.instance == "fault")
    older = [(at, LOSSES.sub(RECORDED, NEWER_METRICS.sub("", page))) for at, page in fault.pages]
    made_up = [Scrapes(OLDER, tuple(older)), *_made(began)]
    hosts += made_up
    windows |= dict.fromkeys((one.instance for one in made_up), Window(began, began + MADE_SECONDS))
    with backfilled(tmp_path_factory.mktemp("dashboards"), hosts) as server:
        yield server, windows


def _alert(window: Window) -> Scrapes:
    """What Prometheus writes down of an alert that fires in the last second of a window."""
    labels = 'alertname="MpsServerCrashed",severity="critical",daemon="/mps"'
    lines = f'ALERTS{{{labels},alertstate="firing"}} 1\nALERTS_FOR_STATE{{{labels}}} {window.end}\n'
    return Scrapes("server-killed", tuple((window.end - ago, lines) for ago in (1.0, 0.5, 0.0)))


def _made(began: float) -> Iterator[Scrapes]:
    """Yield hosts of four minutes, in which nothing but what is described here happens."""
    every = [step * SCRAPE_SECONDS for step in range(int(MADE_SECONDS / SCRAPE_SECONDS) + 1)]
    yield Scrapes(HEALTHY, tuple((began + at, QUIET) for at in every))
    yield Scrapes(REMOVED, tuple((began + at, QUIET) for at in every if at <= 60))
    # Two crashes before the hole of two minutes, three in it.
    crashes = {at: 2 if at <= 60 else 5 for at in every if not 60 < at < 180}
    yield Scrapes(HOLE, tuple((began + at, CRASHED % number) for at, number in crashes.items()))
    yield Scrapes(NEW, tuple((began + at, CRASHED % 50 + LIFETIME) for at in every))
    # Two crashes, and three after the restart.
    crashes = {at: 2 * (at >= 20) if at < 60.25 else 3 * (at >= 70) for at in every}
    yield Scrapes(
        RESTARTED, tuple((began + at, CRASHED % number) for at, number in crashes.items())
    )
    end = began + MADE_SECONDS
    for rule in alerts():
        page = FIRING % (rule.alert, rule.severity)
        yield Scrapes(rule.alert, ((end - SCRAPE_SECONDS, page), (end, page)))


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
    gone = filled(target.expr, __range="10m", __interval="5s", instance="no host", job=JOB)
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


# -------------------------------------- holes, restarts, alerts, and an older exporter


def _shown(
    stage: Stage, panel: str, ref: str, seconds: tuple[float, float], instance: str = ".+"
) -> dict[str, float]:
    """Return host -> what a panel shows of it, of the range from and to these seconds."""
    prometheus, windows = stage
    began = windows[HEALTHY].start
    window = Window(began + seconds[0], began + seconds[1])
    target = next(one for one in targets() if (one.panel, one.ref) == (panel, ref))
    found = prometheus.at_end(target, window, instance=instance)
    return {labels.get("instance", ""): value for labels, (value,) in found}


def test_no_host_is_healthy_while_an_alert_about_it_fires(stage: Stage) -> None:
    # Some alerts have two rules: the worse one counts.
    ordered = sorted(alerts(), key=lambda rule: SEVERITIES[rule.severity])
    severities = {rule.alert: rule.severity for rule in ordered}
    table = _shown(stage, "Hosts, worst first", "A", WHOLE)
    healthy = {host for host, state in table.items() if state == 1 and host in stage[1]}
    assert healthy == {HEALTHY, HOLE, NEW, RESTARTED}
    assert table.items() >= {name: SEVERITIES[one] for name, one in severities.items()}.items()
    for name in dict(zip(severities.values(), severities, strict=True)).values():
        assert _shown(stage, "State", "A", WHOLE, name) == {"": table[name]}
    rows = _shown(stage, "Firing alerts", "A", WHOLE)
    # This Prometheus has no rules, and a row says so.
    assert rows.keys() - {""} == {name for name, one in severities.items() if one != "info"}


@pytest.mark.parametrize(
    ("start", "end", "crashes"), [(20, 220, 3), (40, 50, 0), (100, 220, 3), (190, 220, 0)]
)
def test_a_hole_in_the_range_hides_and_invents_nothing(
    stage: Stage, start: float, end: float, crashes: int
) -> None:
    assert _shown(stage, "Crashes", "A", (start, end), HOLE) == {"": crashes}


def test_what_an_exporter_counted_before_it_was_known_is_not_of_the_range(stage: Stage) -> None:
    for panel in ("Clients lost", "Crashes"):
        assert _shown(stage, panel, "A", (-600, MADE_SECONDS), NEW) == {"": 0}


def test_counters_of_hosts_without_an_event_are_not_read(stage: Stage) -> None:
    prometheus, windows = stage
    began = windows[HEALTHY].start
    window = Window(began - 1, began + 60)
    fleet = next(load(path) for path in FILES if path.stem == "mps-fleet")
    (query,) = (one["query"] for one in variables(fleet) if one["name"] == "eventful")
    found = prometheus.moment(filled(variable_selector(query), **window.variables), window.end)
    hosts = {labels["instance"] for labels, _ in found}
    assert hosts >= {"fault", "server-killed", "context-limit", OLDER}
    assert not hosts & {"three-users", NEW}


@pytest.mark.parametrize("step", [5, 30])
def test_bars_add_up_to_the_tile_across_a_restart(stage: Stage, step: float) -> None:
    prometheus, windows = stage
    began = windows[HEALTHY].start
    assert _shown(stage, "Crashes", "A", (-1, 120), RESTARTED) == {"": 5}
    # The restart is between the last scrape before the range and the first in it.
    assert _shown(stage, "Crashes", "A", (60.4, 120.4), RESTARTED) == {"": 3}
    (bars,) = (t for t in targets() if t.panel.startswith("Crashes, ") and t.ref == "A")
    expr = filled(bars.expr, __interval=f"{step}s", job=JOB, instance=RESTARTED)
    found = prometheus.span(expr, Window(began, began + 120), step=step)
    assert sum(sum(values) for _, values in found) == 5


def test_a_host_that_was_removed_is_gone_since_then(stage: Stage) -> None:
    assert _shown(stage, "Hosts, worst first", "A", WHOLE)[REMOVED] == 5
    since = _shown(stage, "Hosts, worst first", "J", WHOLE)
    assert set(since) >= {REMOVED}
    assert since[REMOVED] / 1000 - stage[1][HEALTHY].start == pytest.approx(60, abs=1)
    assert HEALTHY not in since


def test_an_older_exporter_is_shown_with_what_it_has(stage: Stage) -> None:
    fault = read_recording(RECORDINGS / "fault.rec.gz")
    for panel in ("Clients lost", "Crashes", "Lost in range", "Waiting", "Bad daemons", "State"):
        both = [
            _shown(stage, panel, "A", (-1, fault.duration_seconds // 1), name)
            for name in ("fault", OLDER)
        ]
        assert [*both[0].values()] == [*both[1].values()] != [], panel
