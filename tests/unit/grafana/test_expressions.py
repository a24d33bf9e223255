"""Every expression of the dashboards uses metrics and labels that exist, as their types allow."""

from __future__ import annotations

import re

import pytest

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
from testing.promql import Schema, parse

TARGETS = [pytest.param(target, id=str(target)) for target in targets()]
NAMED = [
    pytest.param(expr, id=name)
    for name, expr in (
        *((str(target), target.expr) for target in targets()),
        *annotation_targets(),
        *(
            (f"{path.stem} / ${variable['name']}", variable_selector(variable["query"]))
            for path in FILES
            for variable in variables(load(path))
        ),
    )
]
SCHEMA = Schema({})
OF_A_CHOICE = {"mps_exporter_build_info{}", 'mps_exporter_build_info{job=~"$job"}'}
"""What the variables job and instance offer."""
OF_THE_JOB = 'job=~"$job", instance=~".+"'
"""Whether a job is one of exporters does not depend on the chosen host."""


@pytest.mark.parametrize("expr", NAMED)
def test_metrics_labels_and_joins_exist(expr: str) -> None:
    assert not re.search(r"\$[A-Za-z_{]", filled(expr))
    SCHEMA.labels(parse(filled(expr)))


@pytest.mark.parametrize("expr", NAMED)
def test_every_selector_obeys_job_and_instance(expr: str) -> None:
    for matchers in re.findall(r"\b(?:mps_\w+|up|ALERTS\w*|process_\w+|scrape_\w+)\{(.*?)\}", expr):
        if expr not in OF_A_CHOICE and matchers != OF_THE_JOB:
            assert 'job=~"$job"' in matchers
            assert 'instance=~"$instance"' in matchers


@pytest.mark.parametrize("target", TARGETS)
def test_rates_span_what_grafana_chooses(target: Target) -> None:
    for call, window in re.findall(r"\b(rate|increase)\([^\[]*\[([^\]]*)\]", target.expr):
        assert window == {"rate": "$__rate_interval", "increase": "$__range"}[call]


@pytest.mark.parametrize("target", TARGETS)
def test_legends_name_labels_that_the_result_has(target: Target) -> None:
    labels = SCHEMA.labels(parse(filled(target.expr))) or frozenset[str]()
    assert set(re.findall(r"\{\{(\w+)\}\}", target.legend)) <= labels
