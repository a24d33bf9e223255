"""Panels in Grafana's Classic JSON, as few kinds as the dashboards need."""

import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from grafana import style

DATASOURCE: style.Json = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, with bare metrics, and the legend of its series."""

    expr: str
    legend: str = ""
    moment: bool = False  # Query the end of the time range only.
    form: str = "time_series"  # Grafana's format: time_series or table.

    def json(self, ref: str, expr: str) -> style.Json:
        """Return the query under its letter, with `expr`, in which the selectors are filled in."""
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
    """A panel without a position; the description defines the healthy state."""

    kind: str
    title: str
    description: str
    queries: tuple[Query, ...]
    width: int = 12
    height: int = 8
    defaults: style.Json = field(default_factory=dict)
    overrides: tuple[style.Json, ...] = ()
    options: style.Json = field(default_factory=dict)
    transformations: tuple[style.Json, ...] = ()
    min_step: str = ""  # Minimum distance between points of a graph.
    points: int | None = None  # Maximum number of points of a graph; None: derived from its width.
    period: str = ""
    """Time until now that the panel shows, such as 7d; empty: the dashboard's time range."""
    tiles: tuple[str, ...] = ()  # Names of the tiles of a strip, in the order of the queries.


def override(matcher: str, what: object, **properties: object) -> style.Json:
    """Return properties for fields that a matcher (byName, byRegexp, byFrameRefID) finds.

    A double underscore represents the dot in Grafana's names: custom__width.
    """
    return {
        "matcher": {"id": matcher, "options": what},
        "properties": [
            {"id": name.replace("__", "."), "value": value} for name, value in properties.items()
        ],
    }


def color_of(matcher: str, what: str, color: str, **properties: object) -> style.Json:
    """Set the colour of some series, whatever their values."""
    return override(matcher, what, color={"mode": "fixed", "fixedColor": color}, **properties)


def colors_by_query(*colors: str) -> tuple[style.Json, ...]:
    """Set the colour of each query, in the order of the queries."""
    return tuple(
        color_of("byFrameRefID", letter, color)
        for letter, color in zip(string.ascii_uppercase, colors, strict=False)
    )


def _by_last_digit(name: str) -> tuple[style.Json, ...]:
    return tuple(
        color_of("byRegexp", rf"/^{name} \d*{digit}\b/", color)
        for digit, color in enumerate(style.BY_LAST_DIGIT)
    )


USERS_ALIKE = _by_last_digit("uid")  # The user's colour for series whose names begin with a user.
GPUS_ALIKE = _by_last_digit("GPU")  # The GPU's colour for series whose names begin with a GPU.
CAUSES_ALIKE = tuple(
    color_of("byRegexp", f"/{cause}$/", color) for cause, color in style.OF_CAUSES.items()
)
"""The cause's colour for series whose names are causes, or end with one."""


def dashed(query: str, color: str = style.QUIET) -> style.Json:
    """Draw a query as a dashed line that does not stack: a limit, or a total."""
    return color_of(
        "byFrameRefID",
        query,
        color,
        custom__fillOpacity=0,
        custom__stacking={"mode": "none", "group": "A"},
        custom__lineStyle={"fill": "dash", "dash": [10, 10]},
    )


def dotted(matcher: str, what: str) -> style.Json:
    """Draw some series as dotted lines, to distinguish them from others in the same colours."""
    return override(matcher, what, custom__lineStyle={"fill": "dot", "dash": [2, 6]})


def link(title: str, url: str, *, new_tab: bool = False) -> style.Json:
    """Return a data link."""
    return {"title": title, "url": url, "targetBlank": new_tab}


_BY_STEPS: style.Json = {"color": {"mode": "thresholds"}}
_LAST: style.Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_NO_MPS = (
    f"({style.NO_MPS.code} + 0 * count(mps_exporter_build_info) unless on () count(mps_control_up))"
)


def _stat_options(text: str) -> style.Json:
    return {
        "reduceOptions": _LAST,
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "center",
        # Several names are one below the other, each as wide as the tile.
        "orientation": "horizontal" if text == "name" else "auto",
        "textMode": text,
        # Beside each other on a phone, "of 32" and 1 read as 321.
        "wideLayout": False,
    }


def tile(
    title: str,
    description: str,
    expr: str,
    unit: str = style.COUNT,
    steps: style.Steps = style.PLAIN,
    *,
    states: tuple[style.State, ...] = (),
    links: Sequence[style.Json] = (),
    none: str = "not reported",
    decimals: int | None = None,
    no_mps: bool = False,
    words: tuple[style.State, ...] = (),
    of: str = "",
    name: str = "",
) -> Panel:
    """Return a number, or its text, for a strip; with no_mps also for a host without a daemon.

    States have texts and colours for all numbers, words for some. `none` is the text if there is
    no series, `of` PromQL with the number of all that are counted, which is shown as "of 43", and
    `name` a legend that is shown, too, such as "{{host}}".
    """
    if of:
        # Only labels can be shown as text.
        expr = f'({expr}) + on () group_left (of) 0 * count_values("of", {of})'
        name = "of\N{NO-BREAK SPACE}{{of}}"
    if no_mps:
        expr, words = f"{expr} or {_NO_MPS}", (style.NO_MPS, *words)
    defaults: style.Json = {
        "unit": unit,
        "thresholds": (style.UNCOLORED if states else steps).json(),
        **_BY_STEPS,
        "noValue": none,
        "links": list(links),
        "decimals": decimals,
        "mappings": style.mappings(*words, *states),
    }
    return Panel("stat", title, description, (Query(expr, name, moment=True),), defaults=defaults)


def strip(title: str, *tiles: Panel, width: int = 24, height: int = 5, **sizes: int) -> Panel:
    """Show tiles in one panel: Grafana gives each panel the whole width of a phone.

    Without `sizes` (titleSize, valueSize) Grafana chooses the letters; it reckons with one line.
    """
    letters = string.ascii_uppercase[: len(tiles)]
    queries, overrides = [], []
    for letter, one in zip(letters, tiles, strict=True):
        (query,) = one.queries
        kept = {name: value for name, value in one.defaults.items() if name != "noValue"}
        if kept["thresholds"] == style.PLAIN.json():
            kept["thresholds"] = style.CLEAR.json()
        # Grafana shows a tile only where its query has a result.
        absent = f"({query.expr}) or on () vector(NaN)"
        none = style.not_known(one.defaults["noValue"], style.QUIET)
        kept["mappings"] = [*kept["mappings"], none]
        overrides.append(override("byFrameRefID", letter, **kept))
        name = " ".join(filter(None, (one.title, query.legend)))
        queries.append(replace(query, expr=absent, legend=name))
    return Panel(
        "stat",
        title,
        "\n\n".join(f"**{one.title}**: {one.description}" for one in tiles),
        tuple(queries),
        width,
        height,
        {"noValue": "not reported", "thresholds": style.UNCOLORED.json(), **_BY_STEPS},
        tuple(overrides),
        _stat_options("value_and_name") | {"text": sizes},
        tiles=tuple(one.title for one in tiles),
    )


def names_tile(title: str, description: str, *queries: tuple[str, str, str], none: str) -> Panel:
    """Show names instead of numbers: (expression, legend that is the name, colour) each."""
    shown = tuple(Query(expr, legend, moment=True) for expr, legend, _ in queries)
    steps = style.UNCOLORED.json()
    defaults = {"unit": style.COUNT, "noValue": none, "thresholds": steps, **_BY_STEPS}
    colors = colors_by_query(*(color for _, _, color in queries))
    options = _stat_options("name")
    return Panel("stat", title, description, shown, 8, 5, defaults, colors, options)


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: str = style.COUNT,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    bars: bool = False,
    top: float | None = None,
    limit: float | None = None,
    overrides: Sequence[style.Json] = (),
    decimals: int | None = None,
    none: str = "No data in this time range.",
    min_step: str = "",
    legend: str = "table",
) -> Panel:
    """Draw lines, stacked areas, or bars of events over time. A limit is a dashed line.

    The legend is a table of the last value and the maximum, a list of names, or "".
    """
    custom: style.Json = {
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
    # If all values are 0, Grafana draws an axis up to 100.
    if top is not None or unit == style.COUNT:
        custom["axisSoftMax"] = 1 if top is None else top
    steps = style.PLAIN if limit is None else style.Steps(((None, "transparent"), (limit, "red")))
    defaults: style.Json = {
        "unit": unit,
        "min": 0,
        # Grafana's palettes contain red and green, which have a meaning here.
        "color": {"mode": "shades", "fixedColor": style.WARN if bars else style.USED},
        "custom": custom,
        "noValue": none,
        "links": [],
        "thresholds": steps.json(),
        "decimals": decimals,
    }
    options = {
        "legend": {
            "displayMode": legend or "list",
            # Below a graph there is room for three names.
            "placement": "right" if legend == "table" and width >= 12 else "bottom",
            "showLegend": bool(legend),
            "calcs": ["lastNotNull", "max"] if legend == "table" else [],
        },
        "tooltip": {"mode": "multi", "sort": "desc", "hideZeros": bars},
    }
    return Panel(
        "timeseries",
        title,
        description,
        queries,
        width,
        height,
        defaults,
        tuple(overrides),
        options,
        min_step=min_step,
    )


def events(title: str, description: str, *queries: Query, **more: object) -> Panel:
    """Draw bars of whole events: each bar covers the time since the bar before it."""
    kept: style.Json = {"decimals": 0, "min_step": "1m", "height": 6, "legend": "list"}
    kept |= {"none": "None is known in this time range.", **more}
    # Without the zeros, the legend contains only series with events.
    shown = (replace(query, expr=f"{query.expr} > 0") for query in queries)
    # More bars are thinner than can be seen.
    return replace(graph(title, description, *shown, bars=True, **kept), points=100)


def share_graph(title: str, description: str, *queries: Query, **more: object) -> Panel:
    """Draw shares over time, up to 100 % at least."""
    kept: style.Json = {"unit": style.SHARE, "top": 1.0, **more}
    return graph(title, description, *queries, **kept)


def timeline(
    title: str,
    description: str,
    *queries: Query,
    states: tuple[style.State, ...],
    height: int = 8,
    width: int = 24,
    cells: bool = False,
) -> Panel:
    """Draw states over time: a row for each series; with `cells`, a cell for each step.

    Grafana shows an error if there is no series at all, so one query always needs a result. With
    `thresholds` as the colour's mode, it replaces values by their thresholds before it applies the
    mappings, and shows neither texts nor colours.
    """
    gaps = {} if cells else {"spanNulls": False, "insertNulls": False}
    defaults: style.Json = {
        "unit": style.COUNT,
        "color": {"mode": "fixed", "fixedColor": "text"},
        "thresholds": style.PLAIN.json(),
        "mappings": style.mappings(*states),
        "custom": {"fillOpacity": 85, "lineWidth": 0, **gaps},
    }
    spans = {"mergeValues": True, "showValue": "auto", "alignValue": "left", "rowHeight": 0.85}
    steps = {"showValue": "never", "rowHeight": 0.9, "colWidth": 0.95}
    options = {
        **(steps if cells else spans),
        "perPage": 20 if cells else 0,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return Panel(
        "status-history" if cells else "state-timeline",
        title,
        description,
        queries,
        width,
        height,
        defaults,
        options=options,
        points=80 if cells else None,
    )


_NOT_KNOWN = style.not_known("-", "transparent")
# An empty bar next to "not known" reads as 0 %.
_NO_BARS = override("byValue", {"reducer": "allIsNull"}, custom__cellOptions={"type": "auto"})


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: its name, and how its cells look."""

    name: str
    source: str  # A label's name, or the letter of a query.
    unit: str = ""
    steps: style.Steps | None = None
    states: tuple[style.State, ...] = ()
    width: int | None = None
    least: int = 0  # Minimum width of a column that takes the room that is left.
    links: tuple[style.Json, ...] = ()
    gauge: bool = False
    decimals: int | None = None
    texts: tuple[tuple[str, str], ...] = ()
    """What to show for a label's values; long texts are wrapped."""
    none: str = ""  # Text of a value that is absent.
    hidden: bool = False  # Only there for links to name.

    def override(self) -> style.Json:
        """Return the differences from the table's defaults."""
        if self.hidden:
            # The first is the name in Grafana 10 to 12.1, the second that of later versions.
            return override(
                "byName", self.name, custom__hidden=True, custom__hideFrom={"viz": True}
            )
        wanted: style.Json = {"noValue": "-"}
        if self.unit:
            wanted["unit"] = self.unit
        elif self.is_label:
            # A user is 1001, not 1.00 K.
            wanted["unit"] = style.WORDS
        letters = len(self.name)
        if self.is_label and (self.width is None or self.width >= 65):
            # Only names: the button takes the room of two letters of the header.
            wanted["custom__filterable"] = True
            letters += 2
        if self.decimals is not None:
            wanted["decimals"] = self.decimals
        if self.width is not None:
            wanted["custom__width"] = self.width
            if self.width < 8 * letters:
                wanted["custom__wrapHeaderText"] = True
        elif self.links or self.least:
            wanted["custom__minWidth"] = self.least or 180  # A host's name on a phone.
        if self.links:
            wanted["links"] = list(self.links)
        return override("byName", self.name, **wanted, **self._cells())

    @property
    def is_label(self) -> bool:
        """Whether its cells are a label's values, not a query's."""
        return len(self.source) > 1

    def _cells(self) -> style.Json:
        if self.gauge:
            shown = {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}
            cells: style.Json = {"min": 0, "max": 1, "custom__cellOptions": shown}
            if self.none:
                cells["mappings"] = [style.not_known(self.none, "text")]
            return cells
        if self.texts:
            texts = {
                value: {"text": text, "index": index}
                for index, (value, text) in enumerate(self.texts)
            }
            return {
                "mappings": [{"type": "value", "options": texts}],
                "custom__cellOptions": {"type": "auto", "wrapText": True},
            }
        cells = {}
        if self.steps is not None:
            cells["thresholds"] = self.steps.only_bad().json()
            cells |= _BY_STEPS
        if self.states:
            # An unknown value has no colour; otherwise it would have that of the text.
            cells["mappings"] = [*style.mappings(*self.states), _NOT_KNOWN]
            cells.setdefault("thresholds", style.CLEAR.json())
            cells["custom__align"] = "left"
        if cells:
            cells["custom__cellOptions"] = {"type": "color-background", "mode": "basic"}
        return cells


_NAMES = {
    "A": "Known",
    "alertname": "Alert",
    "B": "In namespace",
    "C": "In partition",
    "E": "Server",
    "daemon": "Daemon",
    "gpu": "GPU",
    "instance": "Host",
    "job": "Job",
    "revision": "Revision",
    "server": "Server",
    "uid": "User",
    "uuid": "UUID",
}


def hidden(*sources: str) -> tuple[Column, ...]:
    """Return columns that are only there for links to name, or to join rows."""
    return tuple(Column(_NAMES[source], source, hidden=True) for source in sources)


def table(
    title: str,
    description: str,
    queries: Sequence[str],
    columns: Sequence[Column],
    *,
    sort: str,
    then: str = "",
    descending: bool = True,
    none: str,
    found: str = "",
    two_lines: bool = False,
    width: int = 24,
    height: int = 7,
) -> Panel:
    """Show rows of labels and numbers, as of now. Queries with the same labels share their rows.

    If the first query finds nothing, a row shows `none` in a column that is wide enough: Grafana
    shows its own text for "no value" only in tables of one query. `found` is a cheaper expression
    than the first query for whether there is a series.
    """
    labels = [column for column in columns if column.is_label and not column.hidden]
    # Columns of two lines are wide enough; a phone shows the first column.
    words = min(labels, key=lambda one: (not two_lines and one.width is not None, bool(one.links)))
    queries = [
        f"({queries[0]}) or label_replace(vector(NaN) unless on () count({found or queries[0]}),"
        f' "{words.source}", "{none}", "", "")',
        *queries[1:],
    ]
    values = {
        letter: "Value" if len(queries) == 1 else f"Value #{letter}"
        for letter in string.ascii_uppercase[: len(queries)]
    }
    names = {values.get(column.source, column.source): column.name for column in columns}
    excluded = {f"Value #{letter}" for letter in values} - names.keys()
    cells: style.Json = {
        "unit": style.COUNT,
        "noValue": none,
        **_BY_STEPS,
        "thresholds": style.PLAIN.json(),
        "mappings": [_NOT_KNOWN],
        "custom": {"align": "auto", "cellOptions": {"type": "auto", "wrapText": two_lines}},
    }
    organized: style.Json = {
        "excludeByName": dict.fromkeys(["Time", *sorted(excluded)], True),
        "indexByName": {source: position for position, source in enumerate(names)},
        "renameByName": names,
    }
    bars = (_NO_BARS,) if any(column.gauge for column in columns) else ()
    # No pages: they would take a third of a table's height, and hide the rest behind a click.
    options = {
        "cellHeight": "lg" if two_lines else "sm",
        "sortBy": [{"displayName": name, "desc": descending} for name in (sort, then) if name],
    }
    return Panel(
        "table",
        title,
        description,
        tuple(Query(query, moment=True, form="table") for query in queries),
        width,
        height,
        cells,
        (*(one.override() for one in columns), *bars),
        options,
        ({"id": "merge", "options": {}}, {"id": "organize", "options": organized}),
    )
