"""Reads prometheus/ (rule files, comments, promtool's test files, runbooks) and docs/fleet.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tools.rules import usual_severity

ROOT = Path(__file__).parents[1] / "prometheus"
RULE_FILES = tuple(sorted((ROOT / "rules").glob("*.yml")))
TEST_FILES = tuple(sorted((ROOT / "tests").glob("*.yml")))
RUNBOOKS = ROOT / "runbooks"
FLEET_PAGE = ROOT.parent / "docs" / "fleet.md"

RUNBOOK_BASE = "https://github.com/mps-exporter/mps-exporter/blob/main/prometheus/runbooks/"
DASHBOARD_BASE = "http://localhost:3000/d/"


@dataclass(frozen=True)
class Rule:
    """One rule with its group and comment."""

    group: str
    comment: tuple[str, ...]  # The comment lines right above it.
    fields: Mapping[str, Any]
    expr: str
    alert: str = ""
    record: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, group: str, comment: tuple[str, ...], fields: Mapping[str, Any]) -> Rule:
        known = {name: fields[name] for name in cls.__dataclass_fields__.keys() & fields.keys()}
        return cls(group, comment, fields, **known)

    @property
    def severity(self) -> str:
        """The severity of an alert about a daemon that is not an ordinary user's."""
        return usual_severity(self.labels["severity"])

    def __str__(self) -> str:
        return f"{self.alert}-{self.severity}" if self.alert else self.record


def _comments(file: Path) -> list[tuple[str, ...]]:
    """Above each rule of a file, in order: the comment lines."""
    found = []
    above: list[str] = []
    for line in file.read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above.append(stripped.removeprefix("#").strip())
        elif stripped.startswith(("- alert:", "- record:")):
            found.append(tuple(above))
            above = []
        else:
            above = []
    return found


@cache
def rules() -> tuple[Rule, ...]:
    found = []
    for file in RULE_FILES:
        groups = yaml.safe_load(file.read_text())["groups"]
        flat = [(group["name"], fields) for group in groups for fields in group["rules"]]
        for (group, fields), comment in zip(flat, _comments(file), strict=True):
            found.append(Rule.of(group, comment, fields))
    return tuple(found)


def alerts() -> tuple[Rule, ...]:
    return tuple(rule for rule in rules() if rule.alert)


def records() -> tuple[Rule, ...]:
    return tuple(rule for rule in rules() if rule.record)


@dataclass(frozen=True)
class AlertCase:
    """One eval_time of one alert in promtool's test files."""

    file: Path
    test: str
    alert: str
    expected: tuple[Mapping[str, Mapping[str, str]], ...]


@cache
def unit_tests() -> tuple[tuple[Path, Mapping[str, Any]], ...]:
    return tuple(
        (file, test) for file in TEST_FILES for test in yaml.safe_load(file.read_text())["tests"]
    )


@cache
def alert_cases() -> tuple[AlertCase, ...]:
    return tuple(
        AlertCase(file, test["name"], case["alertname"], tuple(case.get("exp_alerts") or ()))
        for file, test in unit_tests()
        for case in test.get("alert_rule_test", ())
    )


@cache
def fleet_settings() -> dict[str, Any]:
    """Return all YAML of docs/fleet.md, as a reader would copy it, in one configuration."""
    merged: dict[str, Any] = {}
    for block in re.findall(r"```yaml\n(.*?)```", FLEET_PAGE.read_text(), flags=re.DOTALL):
        merged |= yaml.safe_load(block)
    return merged


def dropped(name: str) -> bool:
    """Whether its metric_relabel_configs leave out the series of this name."""
    return any(
        rule["action"] == "drop" and re.fullmatch(rule["regex"], name)
        for scrape in fleet_settings()["scrape_configs"]
        for rule in scrape["metric_relabel_configs"]
    )


def kept_for_long(name: str) -> bool:
    """Whether its remote write sends the series of this name on."""
    (target,) = fleet_settings()["remote_write"]
    return all(
        rule["action"] == "keep" and re.fullmatch(rule["regex"], name)
        for rule in target["write_relabel_configs"]
    )
