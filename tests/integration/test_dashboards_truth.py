"""What the boards state of hosts with holes, restarts, alerts, and an older exporter."""

import asyncio
import re
import time
from collections.abc import Iterator

import pytest

from mps_exporter.sources.recording import read_recording
from testing.dashboards import FILES, filled, load, targets, variable_selector, variables
from testing.player import RECORDINGS
from testing.prometheus_server import (
    JOB,
    SCRAPE_SECONDS,
    Scraped,
    Scrapes,
    Window,
    backfilled,
    scrapes_of,
)
from testing.rule_files import alerts

NAMES = ("quiet", "three-users", "fault", "context-limit", "server-killed")
Stage = tuple[Scraped, float]

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
HOLE, REMOVED, HEALTHY = "scraped with a hole", "removed", "healthy"
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


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    began = float(round(time.time()) - 3600)
    hosts = [asyncio.run(scrapes_of(name, began)) for name in NAMES]
    fault = next(host for host in hosts if host.instance == "fault")
    pages = tuple(
        (at, LOSSES.sub(RECORDED, NEWER_METRICS.sub("", page))) for at, page in fault.pages
    )
    hosts += [Scrapes(OLDER, pages), *_made(began)]
    with backfilled(tmp_path_factory.mktemp("truth"), hosts) as server:
        yield server, began


def _made(began: float) -> Iterator[Scrapes]:
    """Yield hosts of four minutes, in which nothing but what is described here happens."""
    every = [step * SCRAPE_SECONDS for step in range(int(MADE_SECONDS / SCRAPE_SECONDS) + 1)]
    yield Scrapes(HEALTHY, tuple((began + at, QUIET) for at in every))
    yield Scrapes(REMOVED, tuple((began + at, QUIET) for at in every if at <= 120))
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


def _shown(
    stage: Stage, panel: str, ref: str, seconds: tuple[float, float], instance: str = ".+"
) -> dict[str, float]:
    """Return host -> what a panel shows of it, of the range from and to these seconds."""
    prometheus, began = stage
    window = Window(began + seconds[0], began + seconds[1])
    target = next(one for one in targets() if (one.panel, one.ref) == (panel, ref))
    found = prometheus.at_end(target, window, instance=instance)
    return {labels.get("instance", ""): value for labels, (value,) in found}


def test_no_host_is_healthy_while_an_alert_about_it_fires(stage: Stage) -> None:
    # Some alerts have two rules: the worse one counts.
    ordered = sorted(alerts(), key=lambda rule: SEVERITIES[rule.severity])
    severities = {rule.alert: rule.severity for rule in ordered}
    table = _shown(stage, "Hosts, worst first", "A", WHOLE)
    assert {host for host, state in table.items() if state == 1} == {HEALTHY, HOLE, NEW, RESTARTED}
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
    prometheus, began = stage
    window = Window(began - 1, began + 60)
    fleet = next(load(path) for path in FILES if path.stem == "mps-fleet")
    (query,) = (one["query"] for one in variables(fleet) if one["name"] == "eventful")
    found = prometheus.moment(filled(variable_selector(query), **window.variables), window.end)
    hosts = {labels["instance"] for labels, _ in found}
    assert hosts >= {"fault", "server-killed", "context-limit", OLDER}
    assert not hosts & {"quiet", "three-users", NEW}


@pytest.mark.parametrize("step", [5, 30])
def test_bars_add_up_to_the_tile_across_a_restart(stage: Stage, step: float) -> None:
    prometheus, began = stage
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
    assert since[REMOVED] / 1000 - stage[1] == pytest.approx(120, abs=1)
    assert HEALTHY not in since


def test_an_older_exporter_is_shown_with_what_it_has(stage: Stage) -> None:
    fault = read_recording(RECORDINGS / "fault.rec.gz")
    for panel in ("Clients lost", "Crashes", "Lost in range", "Waiting", "Bad daemons", "State"):
        both = [
            _shown(stage, panel, "A", (-1, fault.duration_seconds // 1), name)
            for name in ("fault", OLDER)
        ]
        assert [*both[0].values()] == [*both[1].values()] != [], panel
