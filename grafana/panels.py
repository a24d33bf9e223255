"""Panels in Grafana's Classic JSON, as few kinds as the dashboards need."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from grafana.style import (
    BY_LAST_DIGIT,
    CALM,
    COUNT,
    NO_MPS,
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
    points: int | None = None
    """The most points of a graph; by its width without."""


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


def gpus_alike() -> tuple[Json, ...]:
    """Give series whose names begin with a GPU the GPU's colour."""
    return tuple(
        color_of("byRegexp", rf"/^GPU \d*{digit}\b/", color)
        for digit, color in enumerate(BY_LAST_DIGIT)
    )


def dashed(query: str, color: str = QUIET) -> Json:
    """Draw a query as a dashed line that does not stack: a limit, or all there is."""
    return color_of(
        "byFrameRefID",
        query,
        color,
        custom__fillOpacity=0,
        custom__stacking={"mode": "none", "group": "A"},
        custom__lineStyle={"fill": "dash", "dash": [10, 10]},
    )


def dotted(matcher: str, what: str) -> Json:
    """Draw some series as dotted lines, to tell them from others in the same colours."""
    return override(matcher, what, custom__lineStyle={"fill": "dot", "dash": [2, 6]})


def causes_alike() -> tuple[Json, ...]:
    """Give series whose names are causes, or end with one, the cause's colour."""
    return tuple(color_of("byRegexp", f"/{cause}$/", color) for cause, color in OF_CAUSES.items())


def link(title: str, url: str, *, new_tab: bool = False) -> Json:
    """Give a data link."""
    return {"title": title, "url": url, "targetBlank": new_tab}


_LAST: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}


_NO_MPS = f"({NO_MPS.code} + 0 * count(mps_exporter_build_info) unless on () count(mps_control_up))"


def tile(
    title: str,
    description: str,
    expr: str,
    unit: str = COUNT,
    steps: Steps = PLAIN,
    *,
    states: tuple[State, ...] = (),
    links: Sequence[Json] = (),
    none: str = "no data",
    decimals: int | None = None,
    no_mps: bool = False,
    words: tuple[State, ...] = (),
    width: int = 4,
    height: int = 4,
) -> Panel:
    """One large number, or the word for it; with no_mps, the words for a host without a daemon.

    States are all that there is to say; words stand for some numbers of many.
    """
    if no_mps:
        expr, words = f"{expr} or {_NO_MPS}", (NO_MPS, *words)
    defaults: Json = {
        "unit": unit,
        "thresholds": (Steps(((None, QUIET),)) if states else steps).json(),
        "color": {"mode": "thresholds"},
        "noValue": none,
        "links": list(links),
    }
    if decimals is not None:
        defaults["decimals"] = decimals
    if states or words:
        defaults["mappings"] = mappings(*words, *states)
    return Panel(
        "stat",
        title,
        description,
        (Query(expr, moment=True),),
        width,
        height,
        defaults,
        options={
            "reduceOptions": _LAST,
            "colorMode": "background" if steps not in (PLAIN, CALM) or states else "value",
            "graphMode": "none",
            "justifyMode": "center",
            "orientation": "auto",
            "textMode": "value",
            "wideLayout": True,
        },
    )


def names_tile(
    title: str, description: str, *queries: tuple[str, str, str], none: str, width: int = 4
) -> Panel:
    """Names instead of numbers: (expression, legend that is the name, colour) each."""
    letters = "ABCDEFGH"
    return Panel(
        "stat",
        title,
        description,
        tuple(Query(expr, legend, moment=True) for expr, legend, _ in queries),
        width,
        4,
        {
            "unit": COUNT,
            "noValue": none,
            "thresholds": Steps(((None, QUIET),)).json(),
            "color": {"mode": "thresholds"},
        },
        tuple(
            color_of("byFrameRefID", letters[index], color)
            for index, (_, _, color) in enumerate(queries)
        ),
        {
            "reduceOptions": _LAST,
            "colorMode": "background",
            "graphMode": "none",
            "justifyMode": "center",
            "orientation": "auto",
            "textMode": "name",
            "wideLayout": True,
        },
    )


def numbers_tile(
    title: str,
    description: str,
    *queries: tuple[str, str, str],
    none: str,
    width: int = 12,
    height: int = 5,
) -> Panel:
    """Several numbers with their names beside each other: (expression, name, unit) each."""
    letters = "ABCDEFGH"
    return Panel(
        "stat",
        title,
        description,
        tuple(Query(expr, legend, moment=True) for expr, legend, _ in queries),
        width,
        height,
        {
            "unit": COUNT,
            "noValue": none,
            "thresholds": PLAIN.json(),
            "decimals": 0,
            "color": {"mode": "thresholds"},
        },
        tuple(
            override("byFrameRefID", letters[index], unit=unit)
            for index, (_, _, unit) in enumerate(queries)
            if unit != COUNT
        ),
        {
            "reduceOptions": _LAST,
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "center",
            "orientation": "auto",
            "textMode": "value_and_name",
            "wideLayout": True,
        },
    )


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
    none: str = "No data in this time range.",
    min_step: str = "",
    legend: bool = True,
    numbers: bool = False,
) -> Panel:
    """Give a graph over time: lines, stacked areas, or bars of events. A limit is a dashed line.

    With numbers, the legend is a table of the last value and the maximum.
    """
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
    # Where all values are 0, Grafana draws an axis up to 100.
    if top is not None or unit == COUNT:
        custom["axisSoftMax"] = 1 if top is None else top
    defaults: Json = {
        "unit": unit,
        "min": 0,
        # Grafana's palettes have red and green in them, which mean something here.
        "color": {"mode": "shades", "fixedColor": WARN if bars else USED},
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
        "timeseries",
        title,
        description,
        queries,
        width,
        height,
        defaults,
        tuple(overrides),
        {
            "legend": {
                "displayMode": "table" if numbers else "list",
                "placement": "bottom",
                "showLegend": legend,
                "calcs": ["lastNotNull", "max"] if numbers else [],
            },
            "tooltip": {"mode": "multi", "sort": "desc", "hideZeros": bars},
        },
        min_step=min_step,
    )


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
    """Give a bar for each of few, longest first: who, and how much; steps go before color."""
    defaults: Json = {
        "unit": unit,
        "min": 0,
        # Grafana names a single bar only where it is told to.
        "displayName": "${__series.name}",
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
        "bargauge",
        title,
        description,
        (asked,),
        width,
        height,
        defaults,
        tuple(overrides),
        {
            "reduceOptions": _LAST,
            "displayMode": "basic",
            "orientation": "horizontal",
            # At the left, Grafana cuts names of hosts however wide the panel is.
            "namePlacement": "top",
            "valueMode": "color",
            "showUnfilled": True,
            # Else few bars have huge letters and fill the panel.
            "text": {"titleSize": 13, "valueSize": 16},
            "sizing": "manual",
            "minVizHeight": 36,
            "minVizWidth": 8,
            "maxVizHeight": 36,
            "legend": {"showLegend": False},
        },
    )


def _states(states: tuple[State, ...]) -> Json:
    """Field defaults of a panel that shows states over time.

    With `thresholds` as the colour's mode, Grafana replaces values by their thresholds before it
    looks at the mappings, and neither words nor colours are seen.
    """
    return {
        "unit": COUNT,
        "color": {"mode": "fixed", "fixedColor": "text"},
        "thresholds": PLAIN.json(),
        "mappings": mappings(*states),
        "custom": {"fillOpacity": 85, "lineWidth": 0, "spanNulls": False, "insertNulls": False},
    }


_STATES_LEGEND: Json = {"displayMode": "list", "placement": "bottom", "showLegend": True}


def timeline(
    title: str,
    description: str,
    *queries: Query,
    states: tuple[State, ...],
    width: int = 24,
    height: int = 8,
) -> Panel:
    """Say who was in which state when: a row for each series.

    Grafana calls it an error where there is no series at all, so one query has to answer always.
    """
    return Panel(
        "state-timeline",
        title,
        description,
        queries,
        width,
        height,
        _states(states),
        options={
            "mergeValues": True,
            "showValue": "auto",
            "alignValue": "left",
            "rowHeight": 0.85,
            "perPage": 0,
            "legend": _STATES_LEGEND,
            "tooltip": {"mode": "single", "sort": "none"},
        },
    )


def status_history(
    title: str,
    description: str,
    *queries: Query,
    states: tuple[State, ...],
    width: int = 24,
    height: int = 12,
) -> Panel:
    """Say how many fared over time: a row for each, a cell for each step."""
    defaults = _states(states)
    defaults["custom"] = {"fillOpacity": 85, "lineWidth": 0}
    return Panel(
        "status-history",
        title,
        description,
        queries,
        width,
        height,
        defaults,
        options={
            "showValue": "never",
            "rowHeight": 0.9,
            "colWidth": 0.95,
            "perPage": 20,
            "legend": _STATES_LEGEND,
            "tooltip": {"mode": "single", "sort": "none"},
        },
        points=80,
    )


_NOT_KNOWN: Json = {
    "type": "special",
    "options": {"match": "nan", "result": {"text": "-", "color": "transparent"}},
}


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
    texts: tuple[tuple[str, str], ...] = ()
    """What to show for a label's values; long ones are wrapped."""
    hidden: bool = False
    """Only there for links to name."""

    def override(self) -> Json:
        """Give what differs from the table's defaults."""
        if self.hidden:
            # The first is the name in Grafana 10 to 12.1, the second that of later ones.
            return override(
                "byName", self.name, custom__hidden=True, custom__hideFrom={"viz": True}
            )
        wanted: Json = {"noValue": "-"}
        if self.unit:
            wanted["unit"] = self.unit
        elif self.is_label:
            # A user is 1001, not 1.00 K.
            wanted["unit"] = WORDS
        if self.is_label:
            # Only names: the button takes the room of two letters of the header.
            wanted["custom__filterable"] = True
        if self.decimals is not None:
            wanted["decimals"] = self.decimals
        if self.width is not None:
            wanted["custom__width"] = self.width
        if self.links:
            wanted["links"] = list(self.links)
        return override("byName", self.name, **wanted, **self._cells())

    @property
    def is_label(self) -> bool:
        """Its cells are a label's values, not a query's."""
        return len(self.source) > 1

    def _cells(self) -> Json:
        if self.gauge:
            shown = {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}
            return {"min": 0, "max": 1, "custom__cellOptions": shown}
        if self.texts:
            texts = {
                value: {"text": text, "index": index}
                for index, (value, text) in enumerate(self.texts)
            }
            return {
                "mappings": [{"type": "value", "options": texts}],
                "custom__cellOptions": {"type": "auto", "wrapText": True},
            }
        cells: Json = {}
        if self.steps is not None:
            cells["thresholds"] = self.steps.only_bad().json()
            cells["color"] = {"mode": "thresholds"}
        if self.states:
            # What is not known has no colour; it had that of the text.
            cells["mappings"] = [*mappings(*self.states), _NOT_KNOWN]
            cells["custom__align"] = "left"
        if cells:
            cells["custom__cellOptions"] = {"type": "color-background", "mode": "basic"}
        return cells


def table(
    title: str,
    description: str,
    queries: Sequence[str],
    columns: Sequence[Column],
    *,
    sort: str,
    descending: bool = True,
    none: str,
    found: str = "",
    two_lines: bool = False,
    width: int = 24,
    height: int = 8,
) -> Panel:
    """Rows of labels and numbers, as of now. Queries that share their labels share their rows.

    Where the first finds nothing, a row says so in a column that is wide enough: Grafana shows its
    own text for "no value" only in tables of one query. Whether there is something may be a
    cheaper question than the first query: that is found.
    """
    labels = [column for column in columns if column.is_label and not column.hidden]
    words = min(labels, key=lambda column: (column.width is not None, bool(column.links))).source
    queries = [
        f"({queries[0]}) or label_replace(vector(NaN) unless on () count({found or queries[0]}),"
        f' "{words}", "{none}", "", "")',
        *queries[1:],
    ]
    names = {}
    for column in columns:
        source = ""
        if not column.is_label:
            source = "Value" if len(queries) == 1 else f"Value #{column.source}"
        names[source or column.source] = column.name
    # What only says that a row is there.
    letters = string.ascii_uppercase[: len(queries)]
    unused = {f"Value #{letter}": True for letter in letters if f"Value #{letter}" not in names}
    order = {source: position for position, source in enumerate(names)}
    return Panel(
        "table",
        title,
        description,
        tuple(Query(query, moment=True, form="table") for query in queries),
        width,
        height,
        {
            "unit": COUNT,
            "noValue": none,
            "color": {"mode": "thresholds"},
            "thresholds": PLAIN.json(),
            "mappings": [_NOT_KNOWN],
            "custom": {
                "align": "auto",
                "cellOptions": {"type": "auto"},
                "filterable": False,
                "inspect": False,
            },
        },
        tuple(column.override() for column in columns),
        {
            "showHeader": True,
            "cellHeight": "lg" if two_lines else "sm",
            # Pages would take a third of a table's height, and hide the rest behind a click.
            "enablePagination": False,
            "footer": {
                "show": False,
                "enablePagination": False,
                "countRows": False,
                "reducer": ["sum"],
                "fields": "",
            },
            "sortBy": [{"displayName": sort, "desc": descending}],
        },
        (
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True, **unused},
                    "indexByName": order,
                    "renameByName": names,
                },
            },
        ),
    )


def share_graph(title: str, description: str, *queries: Query, **more: object) -> Panel:
    """Give a graph of shares, up to 100 % at least."""
    kept: Json = {"unit": SHARE, "top": 1.0, **more}
    return graph(title, description, *queries, **kept)
