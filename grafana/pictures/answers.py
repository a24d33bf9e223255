"""What a dashboard's page needs to know: its panels, and what Prometheus answers to each."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grafana.style import Json
from tests.unit.grafana.reading import filled, variable_selector, variables
from tests.unit.grafana.stage import JOB, SCRAPE_SECONDS, Prometheus, Window

ALL_HOSTS = ("mps-fleet", "mps-exporter")
"""Dashboards that are looked at with all hosts chosen; of the others, one is."""
POINTS, EVENT_POINTS = 400, 60
"""Points of a graph, at most: recordings last seconds, so panels' own least steps are too wide."""


RATES_OVER = "10s"
"""Sources are read once a second in recordings: over less, a rate goes up and down by itself."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A dashboard's questions, with a host and a time chosen."""

    prometheus: Prometheus
    dashboard: Json
    recording: str
    window: Window

    @property
    def choices(self) -> dict[str, str]:
        """Values of the variables at the top; those that are missing stand at All."""
        here = {} if self.dashboard["uid"] in ALL_HOSTS else {"instance": self.recording}
        return {"job": JOB, **here}

    def step(self, panel: Json) -> float:
        """Seconds between two points."""
        points = EVENT_POINTS if "interval" in panel else POINTS
        length = self.window.end - self.window.start
        return max(1, math.ceil(length / points / SCRAPE_SECONDS)) * SCRAPE_SECONDS

    def filled(self, expr: str, step: float, choices: Mapping[str, str]) -> str:
        """Give an expression with variables as Grafana would fill them."""
        pace = {"__interval": f"{round(step * 1000)}ms", "__rate_interval": RATES_OVER}
        return filled(expr, **{**self.window.variables, **pace, **self.choices, **choices})

    def grid(self, step: float) -> Json:
        """A graph's points, from a multiple of the step on as Grafana asks for them."""
        start = math.floor(self.window.start / step) * step
        return {"start": start, "end": self.window.end, "step": step}

    def range(self, expr: str, step: float) -> list[Json]:
        """Ask for a graph."""
        found: list[Json] = self.prometheus.api("query_range", query=expr, **self.grid(step))[
            "result"
        ]
        return found

    def answered(self, panel: Json, choices: Mapping[str, str]) -> Json:
        """Give a panel with what Prometheus says."""
        step = self.step(panel)
        answers = []
        for target in panel["targets"]:
            expr = self.filled(target["expr"], step, choices)
            result = (
                self.prometheus.api("query", query=expr, time=self.window.end)["result"]
                if target["instant"]
                else self.range(expr, step)
            )
            answers.append(
                {"refId": target["refId"], "legend": target["legendFormat"],
                 "grid": self.grid(step), "result": result}
            )  # fmt: skip
        return {**panel, "answers": answers}

    def values_of(self, name: str) -> list[str]:
        """What a variable offers here."""
        variable = next(each for each in variables(self.dashboard) if each["name"] == name)
        selector = self.filled(variable_selector(variable["query"]), SCRAPE_SECONDS, {})
        found = self.prometheus.api(
            "series", **{"match[]": selector}, start=self.window.start, end=self.window.end
        )
        return sorted({series[name] for series in found})

    def panels(self) -> Iterator[Json]:
        """All panels; rows that repeat, once for each value of their variable."""
        shift = 0
        for row, members in _rows(self.dashboard):
            repeat = row.get("repeat")
            height = max(_bottom(panel) for panel in [row, *members]) - row["gridPos"]["y"]
            for number, value in enumerate(self.values_of(repeat) if repeat else [""]):
                chosen = {repeat: value} if repeat else {}
                shift += height if number else 0
                yield _moved({**row, "title": _with(row["title"], chosen)}, shift, number)
                for panel in members:
                    answered = self.answered(panel, chosen)
                    answered["title"] = _with(panel["title"], chosen)
                    yield _moved(answered, shift, number)

    def marks(self) -> Iterator[Json]:
        """Annotations, as the moments at which they begin."""
        for annotation in self.dashboard["annotations"]["list"]:
            if "expr" not in annotation:
                continue
            expr = self.filled(annotation["expr"], 1, {})
            for series in self.range(expr, SCRAPE_SECONDS):
                at, value = series["values"][0]
                when = float(value) / 1000 if annotation["useValueForTime"] else at
                yield {"at": when, "color": annotation["iconColor"]}

    def page(self) -> Json:
        """Give what page.jsx draws."""
        named = {each["name"]: each["label"] for each in variables(self.dashboard)}
        return {
            "dashboard": {"title": self.dashboard["title"], "panels": list(self.panels())},
            "choices": {
                label: self.choices.get(name, "All" if name != "uid" else "All users")
                for name, label in named.items()
            },
            "range": {"from": self.window.start, "to": self.window.end},
            "marks": list(self.marks()),
        }


def _rows(dashboard: Json) -> Iterator[tuple[Json, list[Json]]]:
    found: list[tuple[Json, list[Json]]] = []
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            found.append((panel, list(panel["panels"])))
        else:
            found[-1][1].append(panel)
    yield from found


def _bottom(panel: Json) -> int:
    place = panel["gridPos"]
    return int(place["y"] + place["h"])


def _moved(panel: Json, by: int, number: int) -> Json:
    moved = copy.deepcopy(panel)
    moved["gridPos"]["y"] += by
    moved["id"] = f"{panel['id']}-{number}"
    return moved


def _with(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda match: values.get(match[1], match[0]), text)
