"""Expressions that are valid, and still give alerts that flap or sums that are no numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as parser
import pytest

from testing import promql
from testing.rule_files import Rule, alerts, rules

ARITHMETIC = {"+", "-", "*", "/", "%", "^"}
SPOILT_BY_ONE = {"sum", "avg", "stddev", "stdvar"}


def names(node: Any) -> set[str]:
    return {selector.name for selector in promql.selectors(node)}


def aggregates(node: Any) -> bool:
    return any(isinstance(found, parser.AggregateExpr) for found in promql.walk(node))


def fragile(expr: str) -> Iterator[str]:
    """Arithmetic between sums of different metrics.

    After Prometheus's start one of them can be over all targets and the other over a few.
    """
    for node in promql.walk(promql.parse(expr)):
        if isinstance(node, parser.BinaryExpr) and str(node.op) in ARITHMETIC:
            both = aggregates(node.lhs) and aggregates(node.rhs)
            if both and names(node.lhs) != names(node.rhs):
                yield node.prettify()


def not_finite(expr: str) -> Iterator[str]:
    """Divisions within a sum: one divisor of 0 makes the whole sum NaN."""
    for node in promql.walk(promql.parse(expr)):
        if isinstance(node, parser.AggregateExpr) and str(node.op) in SPOILT_BY_ONE:
            for inner in promql.walk(node.expr):
                if isinstance(inner, parser.BinaryExpr) and str(inner.op) in {"/", "%"}:
                    guarded = any(
                        isinstance(found, parser.NumberLiteral)
                        or (isinstance(found, parser.BinaryExpr) and str(found.op) == ">")
                        or (isinstance(found, parser.Call) and "clamp" in str(found.func.name))
                        for found in promql.walk(inner.rhs)
                    )
                    if not guarded:
                        yield inner.prettify()


@pytest.mark.parametrize("rule", alerts(), ids=str)
def test_alert_that_does_not_wait_compares_no_sums_of_different_metrics(rule: Rule) -> None:
    assert "for" in rule.fields or list(fragile(rule.expr)) == []


@pytest.mark.parametrize("rule", rules(), ids=str)
def test_no_sum_can_be_spoilt_by_a_divisor_of_zero(rule: Rule) -> None:
    assert list(not_finite(rule.expr)) == []


@pytest.mark.parametrize("rule", alerts(), ids=str)
def test_values_in_texts_are_rounded(rule: Rule) -> None:
    """Of alerts and of queries: 0.12733333333 is no text."""
    for text in rule.annotations.values():
        shown = re.sub(r"if eq (\.Value|\$value)", "", text)
        assert not re.search(r"(\.Value|\$value)\b(?!\s*\|)", shown)


def test_the_checks_find_mistakes() -> None:
    assert list(fragile("sum(mps_server_clients) / sum(mps_gpu_up) > 3"))
    assert not list(fragile("sum(mps_gpu_up) - sum(mps_gpu_up offset 5m) > 3"))
    assert list(not_finite("sum by (job) (mps_gpu_memory_used_bytes / mps_gpu_memory_total_bytes)"))
    assert not list(not_finite("sum(mps_server_clients / (mps_gpu_up > 0))"))
