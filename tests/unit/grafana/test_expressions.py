"""Every expression of the dashboards uses metrics and labels that exist, as their types allow."""

import re

from testing.dashboards import (
    FILES,
    annotation_targets,
    filled,
    load,
    targets,
    variable_selector,
    variables,
)
from testing.each import each
from testing.promql import Schema, parse

TARGETS = tuple(targets())
NAMED = dict(
    (
        *((str(target), target.expr) for target in TARGETS),
        *annotation_targets(),
        *(
            (f"{path.stem} / ${variable['name']}", variable_selector(variable["query"]))
            for path in FILES
            for variable in variables(load(path))
        ),
    )
)
SCHEMA = Schema({})
OF_A_CHOICE = {"mps_exporter_build_info{}", 'mps_exporter_build_info{job=~"$job"}'}
"""What the variables job and instance offer."""
OF_THE_JOB = 'job=~"$job", instance=~".+"'
"""Whether a job is one of exporters does not depend on the chosen host."""
SELECTOR = re.compile(r"\b(?:mps_\w+|up|ALERTS\w*|process_\w+|scrape_\w+)\{(.*?)\}")
RANGES = {"rate": {"$__rate_interval"}, "increase": {"$__range", "$__interval"}}


@each(NAMED)
def test_metrics_labels_joins_and_selectors(name: str) -> None:
    expr = NAMED[name]
    assert not re.search(r"\$[A-Za-z_{]", filled(expr))
    SCHEMA.labels(parse(filled(expr)))
    for matchers in SELECTOR.findall(expr):
        if expr not in OF_A_CHOICE and matchers != OF_THE_JOB:
            assert 'job=~"$job"' in matchers
            assert 'instance=~"$instance"' in matchers
    for call, window in re.findall(r"\b(rate|increase)\([^\[]*\[([^\]]*)\]", expr):
        assert window in RANGES[call]


def test_legends_name_labels_that_the_result_has() -> None:
    for target in TARGETS:
        labels = SCHEMA.labels(parse(filled(target.expr))) or frozenset[str]()
        assert set(re.findall(r"\{\{(\w+)\}\}", target.legend)) <= labels, str(target)
