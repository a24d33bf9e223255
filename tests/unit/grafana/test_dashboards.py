from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from grafana import __main__ as generator
from grafana import style
from grafana.boards import BOARDS
from grafana.style import Json
from testing.dashboards import FILES, load, panels, variables
from testing.rule_files import alerts

DASHBOARDS = [pytest.param(load(path), id=path.stem) for path in FILES]
PANELS = [
    pytest.param(panel, id=f"{path.stem}: {panel['title']}")
    for path in FILES
    for panel in panels(load(path))
]


def test_committed_files_are_what_the_generator_writes() -> None:
    assert generator.stale() == []
    assert generator.main(["--check"]) == 0


def test_check_names_stale_files_and_writing_mends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generator, "DASHBOARDS", tmp_path)
    monkeypatch.setattr(generator, "IN_CHART", tmp_path)
    (tmp_path / "left-behind.json").write_text("{}")
    assert generator.main(["--check"]) == 1
    assert "mps-fleet.json is not current" in capsys.readouterr().err
    assert generator.main([]) == 0
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(b.uid for b in BOARDS)
    assert generator.main(["--check"]) == 0


def test_exports_ask_for_the_data_source_and_name_what_they_need(tmp_path: Path) -> None:
    assert generator.main(["--export", str(tmp_path)]) == 0
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(b.uid for b in BOARDS)
    for path in FILES:
        exported = load(tmp_path / path.name)
        (asked,) = exported["__inputs"]
        source = next(t for t in exported["templating"]["list"] if t["type"] == "datasource")
        assert source["current"]["value"] == f"${{{asked['name']}}}"
        assert asked["pluginId"] == "prometheus"
        kinds = {each["id"] for each in exported["__requires"] if each["type"] == "panel"}
        assert kinds == {panel["type"] for panel in panels(exported)}
        assert {"grafana", "prometheus"} <= {each["id"] for each in exported["__requires"]}
        assert exported["editable"]
        assert exported["panels"] == load(path)["panels"]


def test_there_are_the_seven() -> None:
    assert [path.stem for path in FILES] == [
        "mps-exporter",
        "mps-fleet",
        "mps-gpu",
        "mps-host",
        "mps-incidents",
        "mps-sharing",
        "mps-user",
    ]


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_dashboard_has_what_all_have(dashboard: Json) -> None:
    assert 39 <= dashboard["schemaVersion"] <= 42
    assert dashboard["title"].startswith("NVIDIA MPS / ")
    assert not dashboard["editable"]
    assert dashboard["description"].endswith((".", "?"))
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names[:3] == ["datasource", "job", "instance"]
    assert "pid" not in names
    assert "Alerts" in {annotation["name"] for annotation in dashboard["annotations"]["list"]}
    first_link = dashboard["links"][0]
    assert first_link["keepTime"]


def test_the_user_dashboard_asks_only_for_the_user() -> None:
    (board,) = (load(path) for path in FILES if path.stem == "mps-user")
    assert [each["name"] for each in variables(board) if each["hide"] == 0] == ["uid"]


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_variables_are_as_grafanas_linter_wants_them(dashboard: Json) -> None:
    named = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert named["datasource"]["type"] == "datasource"
    assert named["datasource"]["query"] == "prometheus"
    assert named["datasource"]["label"] == "Data source"
    for name in ("job", "instance"):
        assert named[name]["multi"]
        assert named[name]["allValue"] == ".+"


def test_units_are_grafanas() -> None:
    known = {
        style.COUNT,
        style.SHARE,
        style.SECONDS,
        style.BYTES,
        style.BYTES_PER_SECOND,
        style.WATTS,
        style.CELSIUS,
        style.HERTZ,
        style.AGO,
        style.WORDS,
    }
    for path in FILES:
        for panel in panels(load(path)):
            shown = panel["fieldConfig"]
            units = {shown["defaults"]["unit"]}
            for each in shown["overrides"]:
                units |= {p["value"] for p in each["properties"] if p["id"] == "unit"}
            assert units <= known, panel["title"]


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_rows_ask_and_the_first_says_whether_all_is_well(dashboard: Json) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert all("?" in row or row in {"Power and cooling", "When? Daemon $daemon"} for row in rows)
    first = [panel["type"] for panel in panels(dashboard) if panel["gridPos"]["y"] == 1]
    assert first == (["table"] if dashboard["uid"] == "mps-exporter" else ["stat"] * 6)


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_panels_fill_the_width_without_overlap(dashboard: Json) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(dashboard):
        at = panel["gridPos"]
        cells = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for y in {panel["gridPos"]["y"] for panel in panels(dashboard)}:
        assert {x for x, line in taken if line == y} == set(range(24)), f"a hole in line {y}"


@pytest.mark.parametrize("dashboard", DASHBOARDS)
@pytest.mark.parametrize("name", ["id", "title"])
def test_panels_are_distinguishable(dashboard: Json, name: str) -> None:
    named = [panel[name] for panel in dashboard["panels"]]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_variables_are_reloaded_and_obey_those_before(dashboard: Json) -> None:
    earlier: list[str] = []
    for variable in variables(dashboard):
        assert variable["refresh"] == 2
        assert variable["datasource"]["uid"] == "${datasource}"
        for name in earlier[:2]:
            assert f'{name}=~"${name}"' in variable["query"]
        earlier.append(variable["name"])


@pytest.mark.parametrize("panel", PANELS)
def test_panel_is_described_and_has_a_unit(panel: Json) -> None:
    assert len(panel["description"]) > 30
    assert panel["description"].split("\n")[0].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]


@pytest.mark.parametrize("panel", PANELS)
def test_words_say_what_good_looks_like(panel: Json) -> None:
    own_words = panel["description"].split("\n\n")[0]
    assert own_words.startswith(("Healthy: ", "For information"))


def panel_links(dashboard: Json) -> list[str]:
    return re.findall(r'"url": "(/d/[^"]+)"', json.dumps(dashboard))


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_links_lead_to_dashboards_that_exist_and_keep_the_time(dashboard: Json) -> None:
    for url in panel_links(dashboard):
        uid, _, parameters = url.removeprefix("/d/").partition("?")
        assert uid in {board.uid for board in BOARDS}
        assert "${__url_time_range}" in parameters
        assert "${datasource:queryparam}" in parameters
        assert "job" in parameters
        assert ("uid" if uid == "mps-user" else "instance") in parameters


def test_fleet_leads_to_host_and_client_to_its_user() -> None:
    urls = {path.stem: panel_links(load(path)) for path in FILES}
    assert any(url.startswith("/d/mps-host?") for url in urls["mps-fleet"])
    assert any(url.startswith("/d/mps-sharing?") for url in urls["mps-host"])
    to_user = [url for url in urls["mps-host"] if "var-uid=${__data.fields.User}" in url]
    assert to_user
    assert all(url.startswith("/d/mps-user?") for url in to_user)


def test_firing_alerts_say_what_to_do_first() -> None:
    """Each alert of the rules has its sentence in the table of the fleet."""
    (fleet,) = (load(path) for path in FILES if path.stem == "mps-fleet")
    table = next(panel for panel in panels(fleet) if panel["title"] == "Firing alerts")
    texts = next(
        each["value"][0]["options"]
        for override in table["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == "What to do first"
        for each in override["properties"]
        if each["id"] == "mappings"
    )
    assert texts.keys() == {rule.alert for rule in alerts()}
    assert all(each["text"].endswith(".") for each in texts.values())
    assert not [each for each in texts.values() if "{{" in each["text"]]


@pytest.mark.parametrize("panel", PANELS)
def test_tables_are_capped(panel: Json) -> None:
    if panel["type"] == "table":
        assert "topk(" in panel["targets"][0]["expr"]


@pytest.mark.parametrize("panel", PANELS)
def test_tables_show_no_column_without_a_name(panel: Json) -> None:
    if panel["type"] == "table":
        organized = next(t for t in panel["transformations"] if t["id"] == "organize")["options"]
        letters = [target["refId"] for target in panel["targets"]]
        values = {f"Value #{letter}" if len(letters) > 1 else "Value" for letter in letters}
        assert values <= {*organized["renameByName"], *organized["excludeByName"]}


@pytest.mark.parametrize("panel", PANELS)
def test_shares_have_an_axis_with_more_than_its_ends(panel: Json) -> None:
    shown = panel["fieldConfig"]["defaults"]
    if panel["type"] == "timeseries" and shown["unit"] == style.SHARE:
        assert "decimals" not in shown, "0 would leave 0 %, 100 %, 200 %"


@pytest.mark.parametrize("panel", PANELS)
def test_links_in_cells_name_columns_that_exist(panel: Json) -> None:
    named = set(re.findall(r"__data\.fields\.(\w+)", str(panel["fieldConfig"])))
    if named:
        renamed = next(t for t in panel["transformations"] if t["id"] == "organize")
        assert named <= set(renamed["options"]["renameByName"].values())


def luminance(color: str) -> float:
    """As WCAG 2 defines it."""
    shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (s / 12.92 if s <= 0.03928 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("color", style.BY_LAST_DIGIT)
@pytest.mark.parametrize("panel", ["#ffffff", "#181b1f"])
def test_colours_of_users_are_seen_in_light_and_in_the_dark(color: str, panel: str) -> None:
    darker, lighter = sorted((luminance(color), luminance(panel)))
    assert (lighter + 0.05) / (darker + 0.05) >= 3.0
