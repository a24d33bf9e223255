"""No dashboard has a defect of a kind that was once seen in Grafana 12.3, in what a board says.

A rule gives a line for each place that breaks it.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import promql_parser
import pytest

from grafana.style import Json
from testing.dashboards import FILES, filled, load, panels
from testing.promql import parse, walk

Rule = Callable[[Json], Iterator[str]]

DASHBOARDS = {path.stem: load(path) for path in FILES}
ONE_HOST = ("mps-host", "mps-sharing", "mps-gpu", "mps-v3")
COLORLESS = {"#8e8e8e", "text", "transparent"}
STATE_PANELS = ("state-timeline", "status-history")


def _defaults(panel: Json) -> Json:
    found: Json = panel["fieldConfig"]["defaults"]
    return found


def _kind(dashboard: Json, *kinds: str) -> Iterator[Json]:
    return (panel for panel in panels(dashboard) if panel["type"] in kinds)


def _exprs(panel: Json) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def _nodes(dashboard: Json) -> Iterator[tuple[str, Any]]:
    """Yield the nodes of all expressions, with the titles of their panels."""
    for panel in panels(dashboard):
        for expr in _exprs(panel):
            yield from ((panel["title"], node) for node in walk(parse(filled(expr))))


def no_at_within_a_subquery(dashboard: Json) -> Iterator[str]:
    """Prometheus evaluates the inner `@ end()` at a time before the range."""
    for title, node in _nodes(dashboard):
        if isinstance(node, promql_parser.SubqueryExpr) and "@" in str(node.expr):
            yield f"{title}: {node}"


_MERGING = {"max", "min", "sum", "avg", "count"}


def no_or_between_equal_aggregates(dashboard: Json) -> Iterator[str]:
    """`max(max(a) or max(b))` never sees b where there is an a."""
    for title, node in _nodes(dashboard):
        if isinstance(node, promql_parser.AggregateExpr) and str(node.op) in _MERGING:
            sides = [_grouping(side) for side in _or_sides(node.expr)]
            known = [side for side in sides if side is not None]
            if len(known) != len(set(known)):
                yield f"{title}: {node}"


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
    for link in dashboard["links"]:
        one_host = link["tags"] == ["mps-one-host"]
        if link["includeVars"] != (one_host == (dashboard["uid"] in ONE_HOST)):
            yield f"link {link['title']}"
    if dashboard["uid"] in ONE_HOST:
        return
    for url in re.findall(r'"url": "(/d/[^"]+)"', json.dumps(dashboard)):
        uid = url.removeprefix("/d/").partition("?")[0]
        if uid in ONE_HOST and "${instance" in url:
            yield url


def nothing_known_is_not_green(dashboard: Json) -> Iterator[str]:
    """Grafana gives a missing value the colour of the lowest step."""
    for panel in _kind(dashboard, "stat"):
        given = re.findall(r'"steps": \[\{"value": null, "color": "(.*?)"', json.dumps(panel))
        yield from (f"{panel['title']}: {lowest}" for lowest in set(given) - COLORLESS)


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


def unknown_users_have_a_name(dashboard: Json) -> Iterator[str]:
    """A uid that is not known is an empty label: a row called "uid "."""
    for panel in _kind(dashboard, *STATE_PANELS):
        for target in panel["targets"]:
            if "{{uid}}" in target["legendFormat"] and '"unknown", "uid", ""' not in target["expr"]:
                yield panel["title"]


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


RULES: tuple[Rule, ...] = (
    no_at_within_a_subquery,
    no_or_between_equal_aggregates,
    all_hosts_do_not_travel,
    nothing_known_is_not_green,
    there_are_words_for_nothing,
    unknown_users_have_a_name,
    red_is_at_the_bottom,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_dashboard_breaks_a_rule(name: str, rule: Rule) -> None:
    assert list(rule(DASHBOARDS[name])) == []
