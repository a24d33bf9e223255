"""What looks right in a dashboard's JSON and goes wrong in Grafana: a rule for each kind of defect.

Each was seen in Grafana 12.3. A rule gives a line for each place that breaks it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import promql_parser

from grafana.style import Json
from testing.dashboards import filled, panels, variables

Rule = Callable[[Json], Iterator[str]]

ONE_HOST = ("mps-host", "mps-sharing", "mps-gpu")
STATE_PANELS = ("state-timeline", "status-history")
TITLE_LETTERS = 12
"""What a tile of a sixth of 1366 pixels shows of its title, with the menu docked."""


def _defaults(panel: Json) -> Json:
    found: Json = panel["fieldConfig"]["defaults"]
    return found


def _kind(dashboard: Json, *kinds: str) -> Iterator[Json]:
    return (panel for panel in panels(dashboard) if panel["type"] in kinds)


def _exprs(panel: Json) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def states_keep_their_mappings(dashboard: Json) -> Iterator[str]:
    """With `thresholds`, Grafana replaces a state by its threshold before it looks at mappings."""
    for panel in _kind(dashboard, *STATE_PANELS):
        if _defaults(panel)["color"]["mode"] == "thresholds":
            yield f"{panel['title']}: colour by thresholds"
        if "noValue" in _defaults(panel):
            yield f"{panel['title']}: noValue becomes an entry of the legend"


def annotations_are_moments(dashboard: Json) -> Iterator[str]:
    """A series that is always there colours all of each graph."""
    for annotation in dashboard["annotations"]["list"]:
        if annotation.get("builtIn"):
            continue
        if not annotation["useValueForTime"]:
            yield f"{annotation['name']}: a region as long as its series"
        if re.search(r"_info\b", annotation["expr"]):
            yield f"{annotation['name']}: of a series that never ends"
        if (
            "ALERTS" in annotation["expr"]
            and 'severity=~"critical|warning"' not in (annotation["expr"])
        ):
            yield f"{annotation['name']}: alerts that fire for ever on healthy hosts"
        if annotation["enable"] and dashboard["uid"] not in ONE_HOST:
            yield f"{annotation['name']}: of all hosts at once"


def no_at_within_a_subquery(dashboard: Json) -> Iterator[str]:
    """Prometheus evaluates the inner `@ end()` at a time before the range."""
    for panel in panels(dashboard):
        for expr in _exprs(panel):
            for node in _nodes(promql_parser.parse(filled(expr))):
                if isinstance(node, promql_parser.SubqueryExpr) and "@" in str(node.expr):
                    yield f"{panel['title']}: {node}"


_MERGING = {"max", "min", "sum", "avg", "count"}


def no_or_between_equal_aggregates(dashboard: Json) -> Iterator[str]:
    """`max(max(a) or max(b))` never sees b where there is an a."""
    for panel in panels(dashboard):
        for expr in _exprs(panel):
            for node in _nodes(promql_parser.parse(filled(expr))):
                if isinstance(node, promql_parser.AggregateExpr) and str(node.op) in _MERGING:
                    sides = [_grouping(side) for side in _or_sides(node.expr)]
                    known = [side for side in sides if side is not None]
                    if len(known) != len(set(known)):
                        yield f"{panel['title']}: {node}"


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs"):
        child = getattr(node, name, None)
        if child is not None:
            yield from _nodes(child)
    for child in getattr(node, "args", None) or ():
        yield from _nodes(child)


def _bare(node: Any) -> Any:
    while isinstance(node, promql_parser.ParenExpr):
        node = node.expr
    return node


def _or_sides(node: Any) -> Iterator[Any]:
    node = _bare(node)
    if isinstance(node, promql_parser.BinaryExpr) and str(node.op) == "or":
        yield from _or_sides(node.lhs)
        yield from _or_sides(node.rhs)
    else:
        yield node


def _grouping(node: Any) -> str | None:
    if not isinstance(node, promql_parser.AggregateExpr) or "label_replace" in str(node):
        return None
    return str(node.modifier)


def all_hosts_do_not_travel(dashboard: Json) -> Iterator[str]:
    """A dashboard of one host has no All, and obeys `$__all` all the same."""
    if dashboard["uid"] in ONE_HOST:
        return
    for link in dashboard["links"]:
        if link["includeVars"]:
            yield f"link {link['title']}"
    for url in re.findall(r'"url": "(/d/[^"]+)"', json.dumps(dashboard)):
        uid = url.removeprefix("/d/").partition("?")[0]
        if uid in ONE_HOST and "${instance" in url:
            yield url


def single_bars_have_names(dashboard: Json) -> Iterator[str]:
    """Grafana hides the name of the only bar, and cuts those that are at its left."""
    for panel in _kind(dashboard, "bargauge"):
        if not _defaults(panel).get("displayName"):
            yield f"{panel['title']}: no displayName"
        if panel["options"]["namePlacement"] != "top":
            yield f"{panel['title']}: names at the left"
        if panel["options"]["maxVizHeight"] > 40:
            yield f"{panel['title']}: one bar fills the panel"
        most = re.search(r"topk\((\d+)", _exprs(panel)[0])
        if most is None or int(most[1]) > 5:
            yield f"{panel['title']}: the last bars are cut off"


def titles_of_tiles_fit(dashboard: Json) -> Iterator[str]:
    """At 1366 pixels with the menu docked, a sixth of the width is left for a tile."""
    for panel in _kind(dashboard, "stat"):
        width = panel["gridPos"]["w"]
        if width < 4 or len(panel["title"]) > TITLE_LETTERS * width // 4:
            yield panel["title"]


def controls_take_one_line(dashboard: Json) -> Iterator[str]:
    """What is above the panels stays there when one scrolls."""
    by_tag = [link for link in dashboard["links"] if link["type"] == "dashboards"]
    if [link["asDropdown"] for link in by_tag] != [True]:
        yield "a button for each dashboard"
    if len(dashboard["links"]) > 2:
        yield "more than two links"
    named = {each["name"]: each for each in variables(dashboard)}
    if named["job"]["hide"] != 2:
        yield "the job, of which most have one"
    toggles = [a for a in dashboard["annotations"]["list"] if not a["hide"]]
    if len(toggles) > 1:
        yield "more than one toggle"


def nothing_known_is_not_green(dashboard: Json) -> Iterator[str]:
    """Grafana gives a missing value the colour of the lowest step."""
    for panel in _kind(dashboard, "stat"):
        lowest = _defaults(panel)["thresholds"]["steps"][0]
        if lowest["color"] not in {"#8e8e8e", "text", "blue"}:
            yield f"{panel['title']}: {lowest['color']}"


def there_are_words_for_nothing(dashboard: Json) -> Iterator[str]:
    """Without any series, Grafana shows a fault, a bare header, or an empty tile."""
    for panel in panels(dashboard):
        exprs = " ".join(_exprs(panel))
        if panel["type"] in STATE_PANELS:
            if not re.search(r"\b(?:up|mps_exporter_build_info)\{", exprs):
                yield f"{panel['title']}: no query that always answers"
        elif panel["type"] == "table":
            if "vector(NaN) unless on ()" not in exprs:
                yield f"{panel['title']}: no row for nothing"
        elif panel["type"] == "stat" and panel["options"]["textMode"] == "name":
            if "mps_exporter_build_info" not in exprs:
                yield f"{panel['title']}: no name for nothing"
        elif not _defaults(panel).get("noValue"):
            yield f"{panel['title']}: no noValue"


def colours_mean_something(dashboard: Json) -> Iterator[str]:
    """Grafana's palettes have red and green in them."""
    for panel in _kind(dashboard, "timeseries"):
        if "palette" in json.dumps(panel["fieldConfig"]):
            yield panel["title"]


def gpus_have_numbers(dashboard: Json) -> Iterator[str]:
    """Lines of several GPUs are told apart by their colour, and read by their last and maximum."""
    if dashboard["uid"] != "mps-gpu":
        return
    for panel in _kind(dashboard, "timeseries"):
        if panel["fieldConfig"]["defaults"]["custom"]["drawStyle"] == "bars":
            continue
        if panel["options"]["legend"]["calcs"] != ["lastNotNull", "max"]:
            yield f"{panel['title']}: no last and maximum"


def unknown_users_have_a_name(dashboard: Json) -> Iterator[str]:
    """A uid that is not known is an empty label: a row called "uid "."""
    for panel in _kind(dashboard, *STATE_PANELS):
        for target in panel["targets"]:
            if "{{uid}}" in target["legendFormat"] and '"unknown", "uid", ""' not in target["expr"]:
                yield panel["title"]


def labels_of_rows_are_short(dashboard: Json) -> Iterator[str]:
    """Long names take a third of a timeline, and are cut at the left."""
    for panel in _kind(dashboard, *STATE_PANELS):
        for target in panel["targets"]:
            if target["legendFormat"].count("{{") > 2:
                yield f"{panel['title']}: {target['legendFormat']}"
            if dashboard["uid"] in ONE_HOST and "{{instance}}" in target["legendFormat"]:
                yield f"{panel['title']}: names the only host"


def no_heatmap(dashboard: Json) -> Iterator[str]:
    """Labels of 14 buckets overlap, and an empty one has an axis to minus infinity."""
    for panel in _kind(dashboard, "heatmap"):
        yield panel["title"]


def columns_are_worth_their_room(dashboard: Json) -> Iterator[str]:
    """The job has one value nearly everywhere; links need it, people do not."""
    for panel in _kind(dashboard, "table"):
        hidden = {
            each["matcher"]["options"]
            for each in panel["fieldConfig"]["overrides"]
            if any(p["id"] == "custom.hidden" and p["value"] for p in each["properties"])
        }
        organized = next(t for t in panel["transformations"] if t["id"] == "organize")["options"]
        for name in ("job", "uuid"):
            shown = organized["renameByName"].get(name)
            if shown and shown not in hidden:
                yield f"{panel['title']}: {shown}"


def default_data_source(dashboard: Json) -> Iterator[str]:
    """Without one, Grafana takes the first by name."""
    source = next(t for t in dashboard["templating"]["list"] if t["type"] == "datasource")
    if source["current"] != {"text": "default", "value": "default"}:
        yield str(source["current"])


def counts_are_whole(dashboard: Json) -> Iterator[str]:
    """`short` makes 1 K of 1,000 events, and an axis of zeros goes up to 100."""
    if re.search(r'"(?:short|cps)"', json.dumps(dashboard)):
        yield "a unit that abbreviates"
    for panel in _kind(dashboard, "timeseries"):
        if _defaults(panel)["unit"] == "none" and "axisSoftMax" not in _defaults(panel)["custom"]:
            yield f"{panel['title']}: no axisSoftMax"


def hosts_are_called_hosts(dashboard: Json) -> Iterator[str]:
    """The word of all titles."""
    for variable in variables(dashboard):
        if variable["name"] == "instance" and variable["label"] != "Host":
            yield str(variable["label"])


def red_is_at_the_bottom(dashboard: Json) -> Iterator[str]:
    """A zero on top of a stack is a red line along it, and shares may not exceed 100 %."""
    for panel in _kind(dashboard, "timeseries"):
        shown = _defaults(panel)
        if shown["unit"] != "percentunit" or shown["custom"]["stacking"]["mode"] != "normal":
            continue
        red = [
            each["matcher"]["options"]
            for each in panel["fieldConfig"]["overrides"]
            if {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}}
            in each["properties"]
        ]
        for ref in red:
            expr = next(t["expr"] for t in panel["targets"] if t["refId"] == ref)
            if ref != "A" or not expr.endswith("> 0"):
                yield panel["title"]


def the_lower_half_is_collapsed(dashboard: Json) -> Iterator[str]:
    """The first look is at no more than five rows; an hour of them, three of a fleet."""
    rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    opened = [row["collapsed"] for row in rows].count(False)
    if opened > 6 or [row["collapsed"] for row in rows] != sorted(row["collapsed"] for row in rows):
        closed_first = next((r["title"] for r in rows if r["collapsed"]), "")
        if not closed_first.startswith("GPU $gpu"):
            yield f"{opened} open rows"
    wanted = "now-3h" if dashboard["uid"] == "mps-fleet" else "now-1h"
    if dashboard["time"]["from"] != wanted:
        yield dashboard["time"]["from"]


RULES: tuple[Rule, ...] = (
    states_keep_their_mappings,
    annotations_are_moments,
    no_at_within_a_subquery,
    no_or_between_equal_aggregates,
    all_hosts_do_not_travel,
    single_bars_have_names,
    titles_of_tiles_fit,
    controls_take_one_line,
    nothing_known_is_not_green,
    there_are_words_for_nothing,
    colours_mean_something,
    gpus_have_numbers,
    unknown_users_have_a_name,
    labels_of_rows_are_short,
    no_heatmap,
    columns_are_worth_their_room,
    default_data_source,
    counts_are_whole,
    hosts_are_called_hosts,
    red_is_at_the_bottom,
    the_lower_half_is_collapsed,
)
