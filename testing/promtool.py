"""Alerts that promtool's evaluation of our rules gives over pages of the exporter."""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from testing.commands import output_of
from testing.prometheus_programs import program
from testing.rule_files import ROOT, RULE_FILES

Page = dict[str, str]  # Series -> value.

_FIRED = re.compile(r"^ +Labels:\{(.*)\}\n +Annotations:\{(.*)\},?$", re.MULTILINE)
_AT = re.compile(r"^ +alertname: \w+, time: (\S+), $", re.MULTILINE)
_UNITS = {"s": 1, "m": 60, "h": 3600}
_NAME = re.compile(r"[\w:]+")  # The name of a metric, among other words.
_TEXTS = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')


class Fired(NamedTuple):
    seconds: float
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def name(self) -> str:
        return self.labels["alertname"]

    @property
    def receiver(self) -> str:
        """The receiver to which our Alertmanager routes it."""
        return receiver_of(f"alertname={self.name}", f"severity={self.labels['severity']}")


def page_of(text: str) -> Page:
    """The samples of a page. Prometheus starts at 0, with the process."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {
        **dict(line.rsplit(" ", 1) for line in lines),
        "process_start_time_seconds": "0",
        "up": "1",
    }


def _series(instance: str, pages: Sequence[Page], needed: set[str]) -> Iterator[dict[str, str]]:
    """What a page does not have any more is stale from then on. Only metrics that are needed."""
    target = f'job="mps-exporter",instance="{instance}"'
    for name in sorted({name for page in pages for name in page}):
        metric, _, labels = name.partition("{")
        if metric not in needed:
            continue
        values = ["_"]
        for page in pages:
            gone = "_" if values[-1] in ("_", "stale") else "stale"
            values.append(page.get(name, gone))
        yield {"series": f"{metric}{{{target},{labels or '}'}", "values": " ".join(values)}


def _groups(*, waiting: bool) -> list[dict[str, Any]]:
    """Return all groups with alerts and what these need; without `waiting` alerts fire at once."""
    groups = [group for file in RULE_FILES for group in yaml.safe_load(file.read_text())["groups"]]
    # What a text asks for is recorded first: Alertmanager waits longer than that.
    groups.sort(key=lambda group: "alert" in group["rules"][0])
    needed: set[str] = set()
    for group in reversed(groups):
        for rule in reversed(group["rules"]):
            if "alert" in rule or rule["record"] in needed:
                needed.update(_NAME.findall(str(rule)))
        group["rules"] = [one for one in group["rules"] if one.get("record", "") in {"", *needed}]
    for group in groups if not waiting else ():
        group.pop("interval", None)
        for rule in group["rules"]:
            rule.pop("for", None)
            rule.pop("keep_firing_for", None)
    return [group for group in groups if group["rules"]]


def fired(
    folder: Path, instance: str, pages: Sequence[Page], interval: float, *, waiting: bool = True
) -> Iterator[Fired]:
    """Yield every alert at every page; `interval`: seconds between two pages."""
    groups = _groups(waiting=waiting)
    rules = folder / "rules.yml"
    rules.write_text(text := json.dumps({"groups": groups}))
    needed = set(_NAME.findall(text))
    names = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    every = f"{interval:g}s"
    cases = [
        {"eval_time": f"{number * interval:g}s", "alertname": name, "exp_alerts": []}
        for number in range(1, len(pages) + 1)
        for name in sorted(names)
    ]
    test = {
        "rule_files": [str(rules)],
        "evaluation_interval": every,
        "group_eval_order": [group["name"] for group in groups],
        "tests": [
            {
                "interval": every,
                "input_series": list(_series(instance, pages, needed)),
                "alert_rule_test": cases,
            }
        ],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps(test))
    done = output_of(program("promtool"), "test", "rules", file)
    output = done.stdout + done.stderr
    assert re.match(r"Unit Testing: .*\s+(SUCCESS|FAILED:\s+alertname: )", output), output[:2000]
    # No alert is expected, so the complaints name each one that fires.
    parts = _AT.split(output)
    for at, text in zip(parts[1::2], parts[2::2], strict=True):
        seconds = sum(float(n) * _UNITS[unit] for n, unit in re.findall(r"([\d.]+)([hms])", at))
        for labels, texts in _FIRED.findall(text):
            yield Fired(seconds, _words(labels), _words(texts))


@cache
def receiver_of(*labels: str) -> str:
    """Return the receiver to which our Alertmanager routes an alert with these labels."""
    routes = ["config", "routes", "test", "--config.file=alertmanager.yml"]
    command = [program("amtool"), *routes, *labels]
    done = output_of(*command, check=True, cwd=ROOT)
    return done.stdout.strip()


def _words(text: str) -> dict[str, str]:
    return {name: ast.literal_eval(value) for name, value in _TEXTS.findall(text)}
