"""What the chart carries follows from the project's files, and every value is documented."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import yaml

from tools import chart

VALUES = (chart.CHART / "values.yaml").read_text("utf-8")
SCHEMA: dict[str, Any] = json.loads((chart.CHART / "values.schema.json").read_text("utf-8"))


def test_the_chart_carries_copies_of_the_projects_files() -> None:
    for folder, (source, pattern) in chart.COPIES.items():
        copies = {path.name: path.read_bytes() for path in (chart.CHART / folder).iterdir()}
        assert copies == {
            path.name: path.read_bytes() for path in (chart.ROOT / source).glob(pattern)
        }
        assert copies


def test_every_value_is_in_the_schema() -> None:
    given = yaml.safe_load(VALUES)
    assert given.keys() <= SCHEMA["properties"].keys()
    for name, value in given.items():
        below = SCHEMA["properties"][name].get("properties")
        if below:
            assert value.keys() == below.keys(), name


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
