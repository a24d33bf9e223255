"""Every expression asks for what the exporter really says, and can be true."""

from collections.abc import Iterator

import promql_parser as parser
import pytest

from mps_exporter.metrics import CATALOGUE
from testing import promql
from testing.each import each
from testing.promql import PromqlError
from testing.rule_files import Rule, alerts, rules
from tests.unit.rules import templates
from tests.unit.rules.templates import schema

RULES = each(rules())
ALERTS = each(alerts())


def everything(rule: Rule) -> list[str]:
    """The rule's expression and those in its annotations."""
    texts = rule.annotations.values()
    return [rule.expr, *(expr for text in texts for expr, _ in templates.queries(text))]


@RULES
def test_metrics_labels_and_joins_exist(rule: Rule) -> None:
    for expr in everything(rule):
        schema().labels(promql.parse(expr))


@ALERTS
def test_alert_keeps_the_labels_of_its_target(rule: Rule) -> None:
    labels = schema().labels(promql.parse(rule.expr))
    assert labels is not None
    if rule.alert == "MpsExporterAbsent":  # there is no target, that is what it says
        assert labels == {"job"}
    else:
        assert labels >= promql.TARGET_LABELS, "an operator with `on (...)` drops all other labels"


@ALERTS
def test_annotations_use_labels_that_the_alert_has(rule: Rule) -> None:
    there = schema().labels(promql.parse(rule.expr)) or frozenset()
    for name, text in rule.annotations.items():
        assert {*templates.LABEL.findall(text)} <= there, name
        answered: set[str] = set()
        for expr, _ in templates.queries(text):
            answered |= schema().labels(promql.parse(expr)) or set()
        assert {*templates.RESULT_LABEL.findall(text)} <= answered, name


@ALERTS
def test_queries_in_annotations_stay_with_the_alert(rule: Rule) -> None:
    """A text that says what happens elsewhere sends an operator to the wrong host."""
    for text in rule.annotations.values():
        for expr, labels in templates.queries(text):
            assert labels[:2] == ["job", "instance"], expr
            for selector in promql.selectors(promql.parse(expr)):
                pinned = {label for label, op, _ in promql.matchers(selector) if op == "="}
                assert {"job", "instance"} <= pinned, expr


@ALERTS
def test_alert_has_a_condition(rule: Rule) -> None:
    """Any result is an alert: without a comparison, a 0 would be one, too."""
    nodes = list(promql.walk(promql.parse(rule.expr)))
    compares = any(
        isinstance(node, parser.BinaryExpr) and str(node.op) in promql.COMPARISONS for node in nodes
    )
    absent = any(isinstance(node, parser.Call) and node.func.name == "absent" for node in nodes)
    assert compares or absent
    assert not any(str(getattr(node, "op", "")) in {"topk", "bottomk"} for node in nodes)


@RULES
def test_values_of_labels_exist(rule: Rule) -> None:
    """States, causes and all other values that the catalogue lists."""
    for expr in everything(rule):
        for selector in promql.selectors(promql.parse(expr)):
            if spec := CATALOGUE.get(selector.name):
                listed = {**spec.values, spec.name: spec.states}
                for label, op, value in promql.matchers(selector):
                    if op in {"=", "!="} and listed.get(label):
                        assert value in listed[label], expr


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("mps_control_upp == 0", "no such metric"),
        ('mps_control_state{state="absent"} == 1', "no label state"),
        ("rate(mps_server_clients[5m])", "no counter"),
        ("avg_over_time(mps_server_starts_total[5m])", "no gauge"),
        ("sum by (gpu) (mps_server_clients)", "not there"),
        ("sum without (gpu) (mps_server_clients)", "not there"),
        ("mps_server_clients and mps_control_up", "can match nothing"),
        ("mps_server_clients and on (gpu) mps_control_up", "one side lacks"),
        ("mps_server_clients / mps_server_client_contexts", "can match nothing"),
        (
            "mps_client_contexts * on (pid) group_left (colour) mps_client_info",
            "group_left or group_right",
        ),
        ("histogram_quantile(0.9, rate(mps_uid_wait_seconds_count[5m]))", "without le"),
        ("rate(mps_uid_wait_seconds[5m])", "no such metric"),
        ("holt_winters(mps_control_up[5m], 0.1, 0.1)", None),
    ],
)
def test_the_checks_find_mistakes(expr: str, complaint: str | None) -> None:
    with pytest.raises((PromqlError, ValueError), match=complaint):
        schema().labels(promql.parse(expr))


SPOILT_BY_ONE = {"sum", "avg", "stddev", "stdvar"}


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


@RULES
def test_no_sum_can_be_spoilt_by_a_divisor_of_zero(rule: Rule) -> None:
    assert list(not_finite(rule.expr)) == []
