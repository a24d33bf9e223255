"""Every expression parses, and uses metrics and labels that exist as their types allow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from grafana.promql import FOREIGN, TARGET_LABELS, base_name, labels_of
from mps_exporter.metrics.catalogue import CATALOGUE
from testing.dashboards import (
    FILES,
    Target,
    annotation_targets,
    filled,
    load,
    targets,
    variable_selector,
    variables,
)

TARGETS = [pytest.param(target, id=str(target)) for target in targets()]
EVERYTHING = [
    *((str(target), target.expr) for target in targets()),
    *annotation_targets(),
    *(
        (f"{path.stem} / ${variable['name']}", variable_selector(variable["query"]))
        for path in FILES
        for variable in variables(load(path))
    ),
]
NAMED = [pytest.param(expr, id=name) for name, expr in EVERYTHING]

COUNTING = {"rate", "increase", "resets", "last_over_time"}
"""What may be done to a counter. Beside rate and increase: the parts of grown_in_range."""


def selectors(node: Any, parents: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Give each vector selector, with what stands around it, innermost last."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node, parents
        return
    inner = (*parents, node)
    for name in ("expr", "param", "lhs", "rhs", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None:
            yield from selectors(child, inner)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child, inner)


def parsed(expr: str) -> Any:
    return promql_parser.parse(filled(expr))


def function_around(parents: tuple[Any, ...]) -> str | None:
    return next(
        (node.func.name for node in reversed(parents) if isinstance(node, promql_parser.Call)),
        None,
    )


@pytest.mark.parametrize("expr", NAMED)
def test_it_parses_once_variables_are_filled_in(expr: str) -> None:
    assert not re.search(r"\$[A-Za-z_{]", filled(expr))
    assert parsed(expr)


@pytest.mark.parametrize("expr", NAMED)
def test_metrics_and_labels_exist_and_every_selector_obeys_job_and_instance(expr: str) -> None:
    found = list(selectors(parsed(expr)))
    # None is overlooked by this test's own walk.
    names = re.findall(r"\b(?:mps_\w+|up|ALERTS\w*|process_\w+|scrape_\w+)(?=\{)", expr)
    assert sorted(selector.name for selector, _ in found) == sorted(names)
    for selector, _ in found:
        assert base_name(selector.name) in CATALOGUE or selector.name in FOREIGN
        known = {*TARGET_LABELS, *labels_of(selector.name)}
        used = {matcher.name for matcher in selector.matchers.matchers}
        assert used <= known, selector.name
    for matchers in re.findall(
        r"\b(?:mps_\w+|up|ALERTS\w*|process_\w+|scrape_\w+)\{([^}]*)\}", expr
    ):
        # The jobs are what the first variable offers, the hosts of these the second.
        assert 'job=~"$job"' in matchers or (name_of_variable(expr) == "job")
        # Whether a job is one of exporters does not depend on the host that is chosen.
        of_the_job = matchers == 'job=~"$job", instance=~".+"'
        exempt = of_the_job or name_of_variable(expr) in {"job", "instance"}
        assert 'instance=~"$instance"' in matchers or exempt


def name_of_variable(expr: str) -> str | None:
    bare = {"mps_exporter_build_info{}": "job", 'mps_exporter_build_info{job=~"$job"}': "instance"}
    return bare.get(expr)


@pytest.mark.parametrize("expr", NAMED)
def test_labels_that_expressions_group_by_exist(expr: str) -> None:
    made = set(re.findall(r'label_replace\(.*?, "(\w+)", "', expr))
    carried = {
        label for selector, _ in selectors(parsed(expr)) for label in labels_of(selector.name)
    }
    # ALERTS carries the labels of whatever fired.
    if "ALERTS" in expr:
        carried |= {"daemon", "server", "gpu", "uid"}
    for group in re.findall(r"\b(?:by|on|ignoring|group_left)\s*\(([^)]*)\)", expr):
        for label in filter(None, (part.strip() for part in group.split(","))):
            assert label in carried | made | set(TARGET_LABELS), label


@pytest.mark.parametrize("target", TARGETS)
def test_rates_are_of_counters_and_counters_are_never_shown_raw(target: Target) -> None:
    step_by_step = "offset $__interval" in target.expr
    for selector, parents in selectors(parsed(target.expr)):
        function = function_around(parents)
        spec = CATALOGUE.get(base_name(selector.name))
        counts = selector.name.endswith("_total") or (spec is not None and spec.kind == "histogram")
        if function in {"rate", "increase"}:
            assert counts, selector.name
        elif counts:
            assert function in COUNTING or step_by_step, selector.name


@pytest.mark.parametrize("target", TARGETS)
def test_rates_span_what_grafana_chooses(target: Target) -> None:
    for call, window in re.findall(r"\b(rate|increase)\([^\[]*\[([^\]]*)\]", target.expr):
        assert window == {"rate": "$__rate_interval", "increase": "$__range"}[call]


@pytest.mark.parametrize("target", TARGETS)
def test_legends_name_labels_that_the_result_has(target: Target) -> None:
    node = parsed(target.expr)
    for label in re.findall(r"\{\{(\w+)\}\}", target.legend):
        assert re.search(rf"\b{label}\b", target.expr) or label in _plain_labels(node), label


def _plain_labels(node: Any) -> set[str]:
    return {
        label
        for selector, _ in selectors(node)
        for label in (*TARGET_LABELS, *labels_of(selector.name))
    }
