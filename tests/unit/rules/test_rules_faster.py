"""The end-to-end tests run our rules at another pace: that must change nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from testing.prometheus_programs import durations_of, faster, write_faster_rules
from testing.rule_files import RULE_FILES, Rule, rules


@pytest.mark.parametrize(
    ("expr", "at_thirty"),
    [
        ("rate(a[5m])", "rate(a[10000ms])"),
        ("a - a offset 30m >= 0", "a - a offset 60000ms >= 0"),
        ("time() - b < 5 * 60", "time() - b < 10"),
        ("increase(a[1h]) > 10", "increase(a[120000ms]) > 10"),
        ("gpu:mps_gpu_power_watts:avg5m > 2 ^ 30", "gpu:mps_gpu_power_watts:avg5m > 2 ^ 30"),
    ],
)
def test_expressions(expr: str, at_thirty: str) -> None:
    assert faster(expr, 30) == at_thirty


@pytest.mark.parametrize("rule", rules(), ids=str)
def test_every_time_in_a_rule_is_one_that_can_be_changed(rule: Rule) -> None:
    """A number of seconds beside time() must be written in minutes, as 5 * 60."""
    if "time()" in rule.expr:
        assert any("* 60" in found for found in durations_of(rule.expr))
    expected = len(re.findall(r"\[|offset |\* 60", re.sub(r"\{[^}]*\}", "", rule.expr)))
    assert len(list(durations_of(rule.expr))) == expected


def test_a_factor_of_one_changes_nothing_but_the_spelling(tmp_path: Path) -> None:
    write_faster_rules(tmp_path, 1)
    for file in RULE_FILES:
        ours = yaml.safe_load(file.read_text())
        written = yaml.safe_load((tmp_path / file.name).read_text())
        names = [
            [rule.get("alert", rule.get("record")) for rule in group["rules"]]
            for group in ours["groups"]
        ]
        assert names == [
            [rule.get("alert", rule.get("record")) for rule in group["rules"]]
            for group in written["groups"]
        ]


def test_intervals_and_waits_are_divided(tmp_path: Path) -> None:
    write_faster_rules(tmp_path, 30)
    (group,) = yaml.safe_load((tmp_path / "mps-advice.yml").read_text())["groups"]
    assert group["interval"] == "4000ms"
    assert {rule["for"] for rule in group["rules"]} == {"30000ms", "60000ms"}
