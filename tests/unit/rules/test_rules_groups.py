"""Groups are evaluated side by side and in no order; within one, rule follows rule."""

import re
from collections.abc import Iterator

import yaml

from testing import promql
from testing.each import each
from testing.rule_files import RULE_FILES, Rule, alerts, records, rules
from tests.unit.rules import templates

SLOW = {
    "mps-advice",
    "mps-clients-memory",
    "mps-gpus-count",
    "mps-kubernetes",
    "mps-recording",
    "mps-recording-quantiles",
}
"""Elsewhere the interval is the site's to choose."""


def needs(expr: str) -> set[str]:
    """The recorded series that an expression asks for."""
    recorded = {rule.record for rule in records()}
    return {selector.name for selector in promql.selectors(promql.parse(expr))} & recorded


def late(ordered: tuple[Rule, ...]) -> Iterator[str]:
    """Rules that meet a series before it is recorded, or in another group."""
    made: dict[str, set[str]] = {}
    for rule in ordered:
        above = made.setdefault(rule.group, set())
        yield from (
            f"{rule} of {rule.group} asks for {name}" for name in sorted(needs(rule.expr) - above)
        )
        above.add(rule.record)


def test_no_rule_waits_for_another_group() -> None:
    """What another group records can be one evaluation old, or not be there yet."""
    assert list(late(rules())) == []


@each(alerts())
def test_texts_know_what_they_speak_of(rule: Rule) -> None:
    """A text may ask another group only when the alert has waited for more than an evaluation."""
    here = {other.record for other in records() if other.group == rule.group}
    requested = {
        name
        for text in rule.annotations.values()
        for expr, _ in templates.queries(text)
        for name in needs(expr)
    }
    assert requested <= here or re.fullmatch(r"[1-9]\d*[mh]", rule.fields.get("for", ""))


def test_groups_have_unique_names_and_short_intervals() -> None:
    """Five minutes after a sample Prometheus forgets it: a slower group would have holes."""
    names = []
    for file in RULE_FILES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            slow = group["name"] in SLOW
            assert group.keys() == {"name", "rules"} | ({"interval"} if slow else set())
            assert group.get("interval", "1m") in {"1m", "2m", "3m", "4m"}
            assert re.fullmatch(r"mps(-[a-z]+)+", group["name"])
            names.append(group["name"])
    assert len(names) == len(set(names))
    assert set(names) >= SLOW
