"""What the chart carries follows from the project's files, and every value is documented."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import chart

VALUES = (chart.CHART / "values.yaml").read_text("utf-8")
SCHEMA: dict[str, Any] = json.loads((chart.CHART / "values.schema.json").read_text("utf-8"))


def test_the_chart_carries_copies_of_the_projects_files() -> None:
    assert chart.stale() == [], "run python -m tools.generate_docs"
    for folder, (source, pattern) in chart.COPIES.items():
        copies = {path.name: path.read_bytes() for path in (chart.CHART / folder).iterdir()}
        assert copies == {
            path.name: path.read_bytes() for path in (chart.ROOT / source).glob(pattern)
        }
        assert copies


def test_nothing_in_the_chart_is_a_link() -> None:
    assert [path for path in chart.CHART.rglob("*") if path.is_symlink()] == []


def test_stale_copies_are_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    copy = tree / "chart"
    for name in ("README.md", "values.yaml"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((chart.CHART / name).read_bytes())
    (tree / "rules").mkdir()
    (tree / "rules" / "new.yml").write_text("groups: []")
    (copy / "files").mkdir()
    (copy / "files" / "gone.yml").write_text("groups: []")
    monkeypatch.setattr(chart, "ROOT", tree)
    monkeypatch.setattr(chart, "CHART", copy)
    monkeypatch.setattr(chart, "COPIES", {"files": ("rules", "*.yml")})
    assert chart.stale() == ["chart/files/gone.yml", "chart/files/new.yml"]
    chart.write()
    assert chart.stale() == []
    assert [path.name for path in (copy / "files").iterdir()] == ["new.yml"]


def test_every_value_is_documented_and_in_the_schema() -> None:
    assert chart.undocumented(VALUES) == []
    given = yaml.safe_load(VALUES)
    assert given.keys() <= SCHEMA["properties"].keys()
    for name, value in given.items():
        below = SCHEMA["properties"][name].get("properties")
        if below:
            assert value.keys() == below.keys(), name


def test_a_value_without_a_comment_is_noticed() -> None:
    text = "# Yes.\na: 1\nb: 2\nc:\n  # Yes.\n  d: 1\n  e: 2\n# All.\nf:\n  g: 1\n"
    assert chart.undocumented(text) == ["b", "c.e"]
    assert list(chart.values(text)) == [
        ("a", 1, "Yes."),
        ("c.d", 1, "Yes."),
        ("f", {"g": 1}, "All."),
    ]


def test_the_readme_has_every_value() -> None:
    readme = (chart.CHART / "README.md").read_text("utf-8")
    for path, _, _ in chart.values(VALUES):
        assert f"| `{path}` |" in readme


def test_the_icon_is_the_one_in_the_chart() -> None:
    icon = yaml.safe_load((chart.CHART / "Chart.yaml").read_text("utf-8"))["icon"]
    kind, _, data = icon.partition(";base64,")
    assert kind == "data:image/svg+xml"
    assert base64.b64decode(data) == (chart.CHART / "icon.svg").read_bytes().strip()


def test_artifact_hub_gets_what_it_shows() -> None:
    annotations = yaml.safe_load((chart.CHART / "Chart.yaml").read_text("utf-8"))["annotations"]
    assert annotations["artifacthub.io/license"] == "Apache-2.0"
    for link in yaml.safe_load(annotations["artifacthub.io/links"]):
        path = re.sub(r".*/blob/main/", "", link["url"])
        assert (chart.ROOT / path).exists()
