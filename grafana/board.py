"""A dashboard: its variables, links and annotations, and panels laid out in rows."""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grafana.panels import DATASOURCE, Panel
from grafana.promql import EVENTFUL, metrics_in, scoped
from grafana.style import Json
from mps_exporter.metrics import CATALOGUE

REPOSITORY = "https://github.com/mps-exporter/mps-exporter/blob/main"
TAGS = ("nvidia-mps", "mps-mixin")
ONE_HOST, ALL_HOSTS = "mps-one-host", "mps-all-hosts"
"""Tags by which the menu knows where a chosen host may travel."""
SCHEMA_VERSION = 39  # Grafana 10 writes 39; later versions migrate it when they load it.


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of the dashboard. Every metric with its label obeys it."""

    name: str
    title: str
    metric: str  # The metric whose label values are offered, or an expression whose series are.
    everything: bool = True  # Offer All, and begin with it; else begin with the first.
    any_value: str = ".*"  # What All stands for; of some labels the empty value counts as well.
    filters: bool = True  # False: only where an expression names it.
    hidden: bool = False
    several: bool = True

    def json(self, earlier: Sequence[str]) -> Json:
        """Return Grafana's form; the offered values obey the variables before it."""
        expr = scoped(self.metric, earlier)
        found = self.name == EVENTFUL
        query = f"query_result({expr})" if found else f"label_values({expr}, {self.name})"
        chosen: Json = {"current": {"selected": True, "text": ["All"], "value": ["$__all"]}}
        return {
            "name": self.name,
            "label": self.title,
            "type": "query",
            "datasource": DATASOURCE,
            "query": query,
            "definition": query,
            "multi": self.several,
            "includeAll": self.everything,
            # Without a text of its own, All stands for the values that are offered.
            "allValue": None if found else self.any_value,
            **(chosen if self.everything else {"current": {}}),
            "options": [],
            "refresh": 2,
            "regex": '/instance="([^"]+)"/' if found else "",
            "sort": 3 if self.name in {"gpu", "uid"} else 1,
            "hide": 2 if self.hidden else 0,
            "skipUrlSync": found,
        }


def job() -> Variable:
    """Which scrape job: all, unless a link or an alert says which. Most have only one."""
    return Variable("job", "Job", "mps_exporter_build_info", any_value=".+", hidden=True)


def instance(*, everything: bool = True) -> Variable:
    """Which hosts."""
    return Variable(
        "instance",
        "Host",
        "mps_exporter_build_info",
        everything=everything,
        any_value=".+",
        several=everything,
    )


def eventful() -> Variable:
    """Which hosts lost or refused a client, from an hour before the range on.

    The counters of these hosts alone are read: 1,000 hosts have 180,000, which takes seconds.
    Exporters too old to know how much of a log was lost do not date the events.
    """
    moments = (
        f"max_over_time(mps_client_last_{event}_timestamp_seconds[$__range])"
        " > time() - $__range_s - 3600"
        for event in ("loss", "rejection")
    )
    undated = (
        '(last_over_time(mps_control_log_readable{log="control"}[$__range])'
        " unless on (job, instance, daemon)"
        " last_over_time(mps_control_log_lost_bytes_total[$__range]))"
    )
    expr = f"count by (instance) ({' or '.join((*moments, undated))})"
    return Variable(EVENTFUL, "Hosts with losses", expr, hidden=True)


@dataclass(frozen=True, slots=True)
class Row:
    """A heading that is a question, and the panels below it."""

    question: str
    panels: tuple[Panel, ...]
    collapsed: bool = False
    repeat: str = ""  # A variable: the row is there once for each of its values.


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard."""

    uid: str
    name: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    period: str = "now-1h"

    @property
    def of_one_host(self) -> bool:
        """It offers no All for the host."""
        return any(each.name == "instance" and not each.everything for each in self.variables)

    def json(self) -> Json:
        """Return the dashboard in Classic JSON."""
        return {
            "uid": self.uid,
            "title": f"NVIDIA MPS / {self.name}",
            "description": self.description,
            "tags": [*TAGS, ONE_HOST if self.of_one_host else ALL_HOSTS],
            "schemaVersion": SCHEMA_VERSION,
            "editable": False,
            "graphTooltip": 1,
            "timezone": "browser",
            "refresh": "30s",
            "time": {"from": self.period, "to": "now"},
            "timepicker": {},
            "fiscalYearStartMonth": 0,
            "liveNow": False,
            "weekStart": "",
            "links": _links(of_one_host=self.of_one_host),
            "annotations": {"list": _annotations(shown=self.of_one_host)},
            "templating": {"list": list(self._templates())},
            "panels": list(self._laid_out()),
        }

    def _templates(self) -> Iterator[Json]:
        yield {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            # Grafana's default one, where it has one; else it takes the first by name.
            "current": {"text": "default", "value": "default"},
            "options": [],
            "refresh": 1,
            "regex": "",
            "multi": False,
            "includeAll": False,
            # Without its title, the controls fit in a line of a small screen.
            "hide": 1,
            "skipUrlSync": False,
        }
        earlier: list[str] = []
        for variable in self.variables:
            yield variable.json(earlier)
            if variable.filters:
                earlier.append(variable.name)

    def _laid_out(self) -> Iterator[Json]:
        numbers = iter(range(1, 1000))
        y = 0
        for row in self.rows:
            head: Json = {
                "id": next(numbers),
                "type": "row",
                "title": row.question,
                "collapsed": row.collapsed,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
            if row.repeat:
                head["repeat"] = row.repeat
            y += 1
            placed = []
            x = height = 0
            for panel in row.panels:
                if x + panel.width > 24:
                    x, y, height = 0, y + height, 0
                position = {"x": x, "y": y, "w": panel.width, "h": panel.height}
                placed.append(self._panel(panel, next(numbers), position))
                x, height = x + panel.width, max(height, panel.height)
            y += height
            if row.collapsed:
                yield {**head, "panels": placed}
            else:
                yield head
                yield from placed

    def _panel(self, panel: Panel, number: int, position: Json) -> Json:
        filters = [variable.name for variable in self.variables if variable.filters]
        targets = [
            query.json(letter, scoped(query.expr, filters))
            for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False)
        ]
        body: Json = {
            "id": number,
            "type": panel.kind,
            "title": panel.title,
            "description": described(panel),
            "datasource": DATASOURCE,
            "gridPos": position,
            "targets": targets,
            "fieldConfig": {"defaults": panel.defaults, "overrides": list(panel.overrides)},
            "options": panel.options,
        }
        if panel.transformations:
            body["transformations"] = list(panel.transformations)
        if panel.min_step:
            body["interval"] = panel.min_step
        if panel.points:
            body["maxDataPoints"] = panel.points
        if panel.period:
            # Grafana's own words for it leave no room for the title.
            body |= {"timeFrom": panel.period, "hideTimeOverride": True}
        return body


def described(panel: Panel) -> str:
    """Our words, then the catalogue's on each metric that the panel uses."""
    used = dict.fromkeys(name for query in panel.queries for name in metrics_in(query.expr))
    lines = [f"- `{name}`: {CATALOGUE[name].help}" for name in used if name in _EXPLAINED]
    return "\n\n".join([panel.description, *(["\n".join(lines)] if lines else [])])


# Metrics that only provide a label, or show presence, need no explanation.
_EXPLAINED = {
    name for name, spec in CATALOGUE.items() if spec.kind != "info" and name != "mps_gpu_served"
}


def _links(*, of_one_host: bool) -> list[Json]:
    # The chosen hosts are kept only between dashboards of the same kind: a dashboard of one host
    # would obey All, and the fleet would show only one host.
    return [
        {
            "type": "dashboards",
            "title": title,
            "tags": [tag],
            "asDropdown": True,
            "includeVars": of_one_host == (tag == ONE_HOST),
            "keepTime": True,
            "targetBlank": False,
            "icon": "external link",
            "tooltip": "",
            "url": "",
        }
        for title, tag in (("One host", ONE_HOST), ("Fleet", ALL_HOSTS))
    ]


def _annotations(*, shown: bool) -> list[Json]:
    builtin = {
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)",
        "name": "Annotations & Alerts",
        "type": "dashboard",
    }
    # Times, not regions: an alert that fires for an hour would cover an hour of each graph.
    firing = (
        'ALERTS_FOR_STATE{alertname=~"Mps.*", severity=~"critical|warning"} * 1000'
        ' and ignoring (alertstate) ALERTS{alertname=~"Mps.*", alertstate="firing"}'
    )
    alerts = {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": shown,
        # The switch needs the width of a choice, and Fleet has a table of alerts.
        "hide": not shown,
        "iconColor": "red",
        "expr": scoped(firing, ("job", "instance")),
        "step": "30s",
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{daemon}}",
        "tagKeys": "severity",
        "useValueForTime": True,
    }
    return [builtin, alerts]
