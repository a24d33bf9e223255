"""Panels in Grafana's Classic JSON, as few kinds as the dashboards need."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from grafana.style import (
    BY_LAST_DIGIT,
    CALM,
    COUNT,
    OF_CAUSES,
    PLAIN,
    QUIET,
    SHARE,
    USED,
    WARN,
    WORDS,
    Json,
    State,
    Steps,
    mappings,
)

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, with bare metrics, and the name of what it gives."""

    expr: str
    legend: str = ""
    moment: bool = False
    """Ask for the end of the time range only."""
    form: str = "time_series"
    """Grafana's format: time_series, table or heatmap."""

    def json(self, ref: str, expr: str) -> Json:
        """Give the query under its letter, with its selectors filled in."""
        return {
            "refId": ref,
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expr,
            "format": self.form,
            "instant": self.moment,
            "range": not self.moment,
            "legendFormat": self.legend or "__auto",
        }


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel before it has a place; description says what good looks like."""

    kind: str
    title: str
    description: str
    queries: tuple[Query, ...]
    width: int = 12
    height: int = 8
    defaults: Json = field(default_factory=dict)
    overrides: tuple[Json, ...] = ()
    options: Json = field(default_factory=dict)
    transformations: tuple[Json, ...] = ()
    min_step: str = ""
    """The least distance between points of a graph."""


def override(matcher: str, what: str, **properties: object) -> Json:
    """Properties for fields that a matcher (byName, byRegexp, byFrameRefID) finds.

    A double underscore stands for the dot in Grafana's names: custom__width.
    """
    return {
        "matcher": {"id": matcher, "options": what},
        "properties": [
            {"id": name.replace("__", "."), "value": value} for name, value in properties.items()
        ],
    }


def color_of(matcher: str, what: str, color: str, **properties: object) -> Json:
    """Give the colour of some series, whatever their values."""
    return override(matcher, what, color={"mode": "fixed", "fixedColor": color}, **properties)


def users_alike() -> tuple[Json, ...]:
    """Give series whose names begin with a user the user's colour."""
    return tuple(
        color_of("byRegexp", rf"/^uid \d*{digit}\b/", color)
        for digit, color in enumerate(BY_LAST_DIGIT)
    )


def causes_alike() -> tuple[Json, ...]:
    """Give series whose names are causes, or end with one, the cause's colour."""
    return tuple(color_of("byRegexp", f"/{cause}$/", color) for cause, color in OF_CAUSES.items())


def link(title: str, url: str, *, new_tab: bool = False) -> Json:
    """Give a data link."""
    return {"title": title, "url": url, "targetBlank": new_tab}


_LAST: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}


def tile(
    title: str,
    description: str,
    expr: str,
    unit: str = COUNT,
    steps: Steps = PLAIN,
    *,
    states: tuple[State, ...] = (),
    links: Sequence[Json] = (),
    none: str = "none",
    decimals: int | None = None,
    width: int = 3,
) -> Panel:
    """One number that is read from across the room."""
    defaults: Json = {
        "unit": unit,
        "thresholds": (Steps(((None, QUIET),)) if states else steps).json(),
        "color": {"mode": "thresholds"},
        "noValue": none,
        "links": list(links),
    }
    if decimals is not None:
        defaults["decimals"] = decimals
    if states:
        defaults["mappings"] = mappings(*states)
    return Panel(
        "stat", title, description, (Query(expr, moment=True),), width, 4, defaults,
        options={
            "reduceOptions": _LAST,
            "colorMode": "background" if steps not in (PLAIN, CALM) or states else "value",
            "graphMode": "none",
            "justifyMode": "center",
            "orientation": "auto",
            "textMode": "value",
            "wideLayout": True,
        },
    )  # fmt: skip


def names_tile(
    title: str, description: str, *queries: tuple[str, str, str], none: str, width: int = 3
) -> Panel:
    """Names instead of numbers: (expression, legend that is the name, colour) each."""
    letters = "ABCDEFGH"
    return Panel(
        "stat", title, description,
        tuple(Query(expr, legend, moment=True) for expr, legend, _ in queries), width, 4,
        {"unit": COUNT, "noValue": none, "thresholds": Steps(((None, QUIET),)).json(),
         "color": {"mode": "thresholds"}},
        tuple(
            color_of("byFrameRefID", letters[index], color)
            for index, (_, _, color) in enumerate(queries)
        ),
        {"reduceOptions": _LAST, "colorMode": "background", "graphMode": "none",
         "justifyMode": "center", "orientation": "auto", "textMode": "name", "wideLayout": True},
    )  # fmt: skip


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: str = COUNT,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    bars: bool = False,
    top: float | None = None,
    limit: float | None = None,
    overrides: Sequence[Json] = (),
    links: Sequence[Json] = (),
    decimals: int | None = None,
    none: str = "Nothing to show in this time range.",
    min_step: str = "",
    legend: bool = True,
) -> Panel:
    """Give a graph over time: lines, stacked areas, or bars of events. A limit is a dashed line."""
    custom: Json = {
        "drawStyle": "bars" if bars else "line",
        "lineInterpolation": "linear",
        "lineWidth": 1 if bars or stacked else 2,
        "fillOpacity": 80 if bars else 40 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "barAlignment": -1 if bars else 0,
        "stacking": {"mode": "normal" if stacked or bars else "none", "group": "A"},
        "thresholdsStyle": {"mode": "off" if limit is None else "dashed"},
    }
    if top is not None:
        custom["axisSoftMax"] = top
    defaults: Json = {
        "unit": unit,
        "min": 0,
        # Events are nothing good, whatever they are.
        "color": {"mode": "shades", "fixedColor": WARN} if bars else {"mode": "palette-classic"},
        "custom": custom,
        "noValue": none,
        "links": list(links),
        "thresholds": Steps(((None, "transparent"), (limit, "red"))).json()
        if limit is not None
        else PLAIN.json(),
    }
    if decimals is not None:
        defaults["decimals"] = decimals
    return Panel(
        "timeseries", title, description, queries, width, height, defaults, tuple(overrides),
        {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": legend,
                       "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc", "hideZeros": bars},
        },
        min_step=min_step,
    )  # fmt: skip


def events(title: str, description: str, *queries: Query, **more: object) -> Panel:
    """Bars of whole events: each stands for the time since the bar before it."""
    kept: Json = {"decimals": 0, "min_step": "1m", "width": 24, "height": 6, **more}
    # Without the zeros, the legend names only what happened.
    shown = (replace(query, expr=f"{query.expr} > 0") for query in queries)
    return graph(title, description, *shown, bars=True, **kept)


def ranking(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str = COUNT,
    steps: Steps | None = None,
    color: str = USED,
    width: int = 8,
    height: int = 8,
    top: float | None = None,
    overrides: Sequence[Json] = (),
    links: Sequence[Json] = (),
    none: str = "none",
    decimals: int | None = None,
) -> Panel:
    """Lay out bars beside each other, longest first: who, and how much; steps go before color."""
    defaults: Json = {
        "unit": unit,
        "min": 0,
        # The word for nothing is as quiet as nothing is.
        "thresholds": (steps or Steps(((None, QUIET),))).json(),
        "color": {"mode": "thresholds"},
        "noValue": none,
        "links": list(links),
    }
    if steps is None:
        overrides = (color_of("byFrameRefID", "A", color), *overrides)
    if top is not None:
        defaults["max"] = top
    if decimals is not None:
        defaults["decimals"] = decimals
    asked = Query(f"sort_desc({query.expr})", query.legend, moment=True)
    return Panel(
        "bargauge", title, description, (asked,), width, height, defaults, tuple(overrides),
        {
            "reduceOptions": _LAST,
            "displayMode": "basic",
            "orientation": "horizontal",
            "namePlacement": "left",
            "valueMode": "color",
            "showUnfilled": True,
            # Else few bars have huge letters, and long names are cut.
            "text": {"titleSize": 13, "valueSize": 16},
            "sizing": "auto",
            "minVizHeight": 16,
            "minVizWidth": 8,
            "maxVizHeight": 40,
            "legend": {"showLegend": False},
        },
    )  # fmt: skip


def timeline(
    title: str,
    description: str,
    query: Query,
    states: tuple[State, ...],
    *,
    width: int = 24,
    height: int = 8,
    none: str = "Nothing to show in this time range.",
) -> Panel:
    """Say who was in which state when: a row for each series."""
    return Panel(
        "state-timeline", title, description, (query,), width, height,
        {
            "unit": COUNT,
            "color": {"mode": "thresholds"},
            "thresholds": PLAIN.json(),
            "mappings": mappings(*states),
            "noValue": none,
            "custom": {"fillOpacity": 85, "lineWidth": 0, "spanNulls": False,
                       "insertNulls": False},
        },
        options={
            "mergeValues": True,
            "showValue": "auto",
            "alignValue": "left",
            "rowHeight": 0.85,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "single", "sort": "none"},
        },
    )  # fmt: skip


def heatmap(
    title: str,
    description: str,
    query: Query,
    *,
    width: int = 12,
    height: int = 8,
    none: str = "Nothing to show in this time range.",
) -> Panel:
    """Show how many took how long, when: cells stand out more. Rows are a histogram's buckets."""
    return Panel(
        "heatmap", title, description, (Query(query.expr, "{{le}}", form="heatmap"),),
        width, height,
        {"unit": COUNT, "decimals": 0, "noValue": none,
         "custom": {"scaleDistribution": {"type": "linear"}}},
        options={
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "fill": "dark-orange", "scale":
                      "exponential", "exponent": 0.5, "steps": 32, "reverse": False, "min": 0},
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "showValue": "never",
            "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
            "yAxis": {"axisPlacement": "left", "reverse": False, "unit": "s"},
        },
        min_step="1m",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: what it is called, and how its cells look."""

    name: str
    source: str
    """A label's name, or the letter of a query."""
    unit: str = ""
    steps: Steps | None = None
    states: tuple[State, ...] = ()
    width: int | None = None
    links: tuple[Json, ...] = ()
    gauge: bool = False
    decimals: int | None = None

    def override(self) -> Json:
        """Give what differs from the table's defaults."""
        # The table's own words for "nothing" are for the whole of it.
        wanted: Json = {"noValue": "-"}
        if self.unit:
            wanted["unit"] = self.unit
        elif len(self.source) > 1:
            # A user is 1001, not 1.00 K.
            wanted["unit"] = WORDS
        if len(self.source) > 1:
            # Only names: the button takes the room of two letters of the header.
            wanted["custom__filterable"] = True
        if self.decimals is not None:
            wanted["decimals"] = self.decimals
        if self.steps is not None:
            wanted["thresholds"] = self.steps.json()
            wanted["color"] = {"mode": "thresholds"}
            wanted["custom__cellOptions"] = {"type": "color-text"}
        if self.gauge:
            wanted["min"] = 0
            wanted["max"] = 1
            wanted["custom__cellOptions"] = {
                "type": "gauge", "mode": "basic", "valueDisplayMode": "text",
            }  # fmt: skip
        if self.states:
            wanted["mappings"] = mappings(*self.states)
            wanted["custom__cellOptions"] = {"type": "color-background", "mode": "basic"}
            wanted["custom__align"] = "left"
        if self.width is not None:
            wanted["custom__width"] = self.width
        if self.links:
            wanted["links"] = list(self.links)
        return override("byName", self.name, **wanted)


def table(
    title: str,
    description: str,
    queries: Sequence[str],
    columns: Sequence[Column],
    *,
    sort: str,
    descending: bool = True,
    none: str,
    width: int = 24,
    height: int = 8,
) -> Panel:
    """Rows of labels and numbers, as of now. Queries that share their labels share their rows."""
    names = {}
    for column in columns:
        is_query = len(column.source) == 1
        source = ("Value" if len(queries) == 1 else f"Value #{column.source}") if is_query else ""
        names[source or column.source] = column.name
    # What only says that a row is there.
    letters = string.ascii_uppercase[: len(queries)]
    unused = {f"Value #{letter}": True for letter in letters if f"Value #{letter}" not in names}
    order = {source: position for position, source in enumerate(names)}
    return Panel(
        "table", title, description,
        tuple(Query(query, moment=True, form="table") for query in queries), width, height,
        {
            "unit": COUNT,
            "noValue": none,
            "color": {"mode": "thresholds"},
            "thresholds": PLAIN.json(),
            "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": False,
                       "inspect": False},
        },
        tuple(column.override() for column in columns),
        {
            "showHeader": True,
            "cellHeight": "sm",
            # Pages would take a third of a table's height, and hide the rest behind a click.
            "enablePagination": False,
            "footer": {"show": False, "enablePagination": False, "countRows": False,
                       "reducer": ["sum"], "fields": ""},
            "sortBy": [{"displayName": sort, "desc": descending}],
        },
        (
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {
                "excludeByName": {"Time": True, **unused},
                "indexByName": order,
                "renameByName": names,
            }},
        ),
    )  # fmt: skip


def share_graph(title: str, description: str, *queries: Query, **more: object) -> Panel:
    """Give a graph of shares, up to 100 % at least."""
    kept: Json = {"unit": SHARE, "top": 1.0, **more}
    return graph(title, description, *queries, **kept)
