"""Reads committed dashboards as Grafana would: panels, and expressions with variables filled in."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana.__main__ import DASHBOARDS
from grafana.style import Json

FILES = sorted(DASHBOARDS.glob("*.json"))


@dataclass(frozen=True)
class Target:
    dashboard: str
    panel: str
    kind: str
    ref: str
    expr: str
    instant: bool
    legend: str

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel} / {self.ref}"


def load(path: Path) -> Json:
    found: Json = json.loads(path.read_text("utf-8"))
    return found


def panels(dashboard: Json) -> Iterator[Json]:
    """All panels but rows, those in collapsed rows too."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def targets() -> Iterator[Target]:
    for path in FILES:
        dashboard = load(path)
        for panel in panels(dashboard):
            is_strip = panel["options"].get("textMode") == "value_and_name"
            for target in panel["targets"]:
                # Each tile of a strip counts as a panel. The name precedes the labels.
                name = re.split(r" (?:of\s)?\{\{", target["legendFormat"])[0]
                yield Target(
                    dashboard["uid"],
                    name if is_strip else panel["title"],
                    panel["type"],
                    "A" if is_strip else target["refId"],
                    target["expr"],
                    target["instant"],
                    target["legendFormat"],
                )


def variables(dashboard: Json) -> Iterator[Json]:
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable


def variable_selector(query: str) -> str:
    """Return SELECTOR of label_values(SELECTOR, LABEL), or the expression of query_result()."""
    match = re.fullmatch(r"label_values\((.+), \w+\)|query_result\((.+)\)", query)
    assert match, query
    return match[1] or match[2]


def annotation_targets() -> Iterator[tuple[str, str]]:
    for path in FILES:
        for annotation in load(path)["annotations"]["list"]:
            if "expr" in annotation:
                yield f"{path.stem} / {annotation['name']}", annotation["expr"]


DEFAULTS: Mapping[str, Any] = {
    "__rate_interval": "2m",
    "__interval": "1m",
    "__range_s": "21600",
    "__range": "21600s",
}


def filled(expr: str, **values: str) -> str:
    """The expression with variables as Grafana would fill them; All for those not given."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return str(
            {**DEFAULTS, **values}.get(name, ".*" if not name.startswith("__") else match[0])
        )

    # $1 is a group of label_replace().
    return re.sub(r"\$([A-Za-z_]\w*)", value, expr)
