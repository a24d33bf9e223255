import itertools
import json
import re
from pathlib import Path

import pytest

from grafana import __main__ as generator
from grafana.boards import BOARDS
from grafana.style import Json
from testing.dashboards import FILES, load, panels
from testing.rule_files import alerts
from tests.unit.grafana.subjects import subjects

DASHBOARDS = [pytest.param(load(path), id=path.stem) for path in FILES]


def test_committed_files_are_what_the_generator_writes() -> None:
    made = {board.uid: generator.text_of(board.json()) for board in BOARDS}
    found = {path.stem: path.read_text("utf-8") for path in FILES}
    assert found == made, "run: python -m grafana"


def test_exports_ask_for_the_data_source_and_name_what_they_need(tmp_path: Path) -> None:
    generator.main(["--export", str(tmp_path)])
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


def test_every_panel_is_in_the_document_in_its_place() -> None:
    shown = [(board.uid, panel) for board in BOARDS for row in board.rows for panel in row.panels]
    wanted = [(uid, name) for uid, panel in shown for name in panel.tiles or (panel.title,)]
    assert [(dashboard, panel) for dashboard, panel, _ in subjects()] == wanted
    assert len(shown) <= 90, "more are not read"


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
def test_links_lead_to_dashboards_that_exist_and_keep_the_time(dashboard: Json) -> None:
    for url in re.findall(r'"url": "(/d/[^"]+)"', json.dumps(dashboard)):
        uid, _, parameters = url.removeprefix("/d/").partition("?")
        assert uid in {board.uid for board in BOARDS}
        assert "${__url_time_range}" in parameters
        assert "${datasource:queryparam}" in parameters
        assert "job" in parameters
        assert ("uid" if uid == "mps-user" else "instance") in parameters


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
