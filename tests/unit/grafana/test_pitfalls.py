"""No dashboard has a defect of a kind that was once seen in Grafana, and each rule sees its own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from grafana.style import Json
from testing.dashboards import FILES, load, panels
from tests.unit.grafana import pitfalls

DASHBOARDS = {path.stem: load(path) for path in FILES}
Break = Callable[[Json], object]


@pytest.mark.parametrize("rule", pitfalls.RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_dashboard_breaks_a_rule(name: str, rule: pitfalls.Rule) -> None:
    assert list(rule(DASHBOARDS[name])) == []


def first(dashboard: Json, kind: str) -> Json:
    return next(panel for panel in panels(dashboard) if panel["type"] == kind)


def defaults(dashboard: Json, kind: str) -> Json:
    found: Json = first(dashboard, kind)["fieldConfig"]["defaults"]
    return found


def expression(dashboard: Json, kind: str, expr: str) -> None:
    first(dashboard, kind)["targets"] = [{"expr": expr, "refId": "A", "legendFormat": ""}]


def column_shown(dashboard: Json, name: str) -> None:
    for override in first(dashboard, "table")["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == name:
            override["properties"] = []


def as_heatmap(dashboard: Json) -> None:
    first(dashboard, "timeseries")["type"] = "heatmap"


def variable(dashboard: Json, name: str) -> Json:
    return next(each for each in dashboard["templating"]["list"] if each["name"] == name)


BROKEN: tuple[tuple[pitfalls.Rule, str, Break], ...] = (
    (
        pitfalls.states_keep_their_mappings,
        "mps-sharing",
        lambda d: defaults(d, "state-timeline").update(color={"mode": "thresholds"}),
    ),
    (
        pitfalls.states_keep_their_mappings,
        "mps-fleet",
        lambda d: defaults(d, "status-history").update(noValue="nothing"),
    ),
    (
        pitfalls.annotations_are_moments,
        "mps-host",
        lambda d: d["annotations"]["list"][1].update(expr="mps_exporter_recording_info{}"),
    ),
    (
        pitfalls.annotations_are_moments,
        "mps-host",
        lambda d: d["annotations"]["list"][1].update(useValueForTime=False),
    ),
    (
        pitfalls.annotations_are_moments,
        "mps-host",
        lambda d: d["annotations"]["list"][1].update(expr="ALERTS{} * 1000"),
    ),
    (
        pitfalls.annotations_are_moments,
        "mps-fleet",
        lambda d: d["annotations"]["list"][1].update(enable=True),
    ),
    (
        pitfalls.no_at_within_a_subquery,
        "mps-fleet",
        lambda d: expression(
            d, "status-history", "max_over_time((up and on (job) (x @ end()))[3h:2m] @ end())"
        ),
    ),
    (
        pitfalls.no_or_between_equal_aggregates,
        "mps-incidents",
        lambda d: expression(d, "stat", "time() - max(max(a) or max(b))"),
    ),
    (
        pitfalls.no_or_between_equal_aggregates,
        "mps-incidents",
        lambda d: expression(d, "stat", "sum(max by (x) (a) or (max by (x) (b)))"),
    ),
    (
        pitfalls.all_hosts_do_not_travel,
        "mps-fleet",
        lambda d: d["links"][0].update(includeVars=True),
    ),
    (
        pitfalls.all_hosts_do_not_travel,
        "mps-fleet",
        lambda d: defaults(d, "stat").update(links=[{"url": "/d/mps-host?${instance:queryparam}"}]),
    ),
    (
        pitfalls.single_bars_have_names,
        "mps-incidents",
        lambda d: defaults(d, "bargauge").pop("displayName"),
    ),
    (
        pitfalls.titles_of_tiles_fit,
        "mps-host",
        lambda d: first(d, "stat").update(title="Clients that are waiting"),
    ),
    (
        pitfalls.titles_of_tiles_fit,
        "mps-host",
        lambda d: first(d, "stat")["gridPos"].update(w=3),
    ),
    (
        pitfalls.controls_take_one_line,
        "mps-host",
        lambda d: d["links"][0].update(asDropdown=False),
    ),
    (
        pitfalls.controls_take_one_line,
        "mps-host",
        lambda d: variable(d, "job").update(hide=0),
    ),
    (
        pitfalls.nothing_known_is_not_green,
        "mps-sharing",
        lambda d: defaults(d, "stat")["thresholds"]["steps"][0].update(color="green"),
    ),
    (
        pitfalls.there_are_words_for_nothing,
        "mps-sharing",
        lambda d: expression(d, "state-timeline", "mps_client_info{}"),
    ),
    (
        pitfalls.there_are_words_for_nothing,
        "mps-host",
        lambda d: expression(d, "table", "mps_client_info{}"),
    ),
    (
        pitfalls.colours_mean_something,
        "mps-gpu",
        lambda d: defaults(d, "timeseries").update(color={"mode": "palette-classic"}),
    ),
    (
        pitfalls.gpus_have_numbers,
        "mps-gpu",
        lambda d: first(d, "timeseries")["options"]["legend"].update(calcs=[]),
    ),
    (
        pitfalls.unknown_users_have_a_name,
        "mps-sharing",
        lambda d: first(d, "state-timeline")["targets"].append(
            {"expr": "mps_server_info", "legendFormat": "uid {{uid}}"}
        ),
    ),
    (
        pitfalls.labels_of_rows_are_short,
        "mps-sharing",
        lambda d: first(d, "state-timeline")["targets"][0].update(legendFormat="{{instance}}"),
    ),
    (pitfalls.no_heatmap, "mps-sharing", as_heatmap),
    (
        pitfalls.columns_are_worth_their_room,
        "mps-fleet",
        lambda d: column_shown(d, "Job"),
    ),
    (
        pitfalls.default_data_source,
        "mps-fleet",
        lambda d: variable(d, "datasource").update(current={}),
    ),
    (
        pitfalls.counts_are_whole,
        "mps-fleet",
        lambda d: defaults(d, "stat").update(unit="short"),
    ),
    (
        pitfalls.hosts_are_called_hosts,
        "mps-fleet",
        lambda d: variable(d, "instance").update(label="Instance"),
    ),
    (
        pitfalls.red_is_at_the_bottom,
        "mps-sharing",
        lambda d: [
            panel["targets"][0].update(expr="sum(idle)")
            for panel in panels(d)
            if panel["title"] == "Use of the daemon's time"
        ],
    ),
    (
        pitfalls.the_lower_half_is_collapsed,
        "mps-fleet",
        lambda d: d["time"].update({"from": "now-6h"}),
    ),
    (
        pitfalls.the_lower_half_is_collapsed,
        "mps-gpu",
        lambda d: [
            panel.update(collapsed=not panel["collapsed"])
            for panel in d["panels"]
            if panel["type"] == "row"
        ],
    ),
)


@pytest.mark.parametrize(
    ("rule", "name", "break_it"), BROKEN, ids=[rule.__name__ for rule, _, _ in BROKEN]
)
def test_a_rule_sees_its_defect(rule: pitfalls.Rule, name: str, break_it: Break) -> None:
    dashboard = copy.deepcopy(DASHBOARDS[name])
    break_it(dashboard)
    assert list(rule(dashboard))


def test_every_rule_has_been_seen_to_find_something() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(pitfalls.RULES)
