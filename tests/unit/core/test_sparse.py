"""Series that begin with their first event."""

import re
from collections.abc import Mapping
from typing import Any

from grafana.promql import metrics_in
from mps_exporter.metrics import CATALOGUE, SparseSeries
from mps_exporter.metrics.metric_types import Family
from testing.each import each
from testing.rule_files import Rule, rules

PCIE, ECC = "mps_gpu_pcie_errors_total", "mps_gpu_ecc_errors_total"
SPARSE = {name for name, spec in CATALOGUE.items() if spec.sparse}

Labels = tuple[str, ...]


def family(name: str, samples: Mapping[Any, Any]) -> Family:
    return Family(CATALOGUE[name], tuple(samples.items()))


def shown(series: SparseSeries, one: Family) -> dict[Labels, object]:
    return {labels: value for found in series.shown([one]) for labels, value in found.samples}


def test_a_series_begins_with_its_first_event_and_remains() -> None:
    series = SparseSeries()
    replay, lane = ("0", "GPU-a", "replay"), ("0", "GPU-a", "lane")
    assert shown(series, family(PCIE, {replay: 0, lane: 0})) == {}
    assert shown(series, family(PCIE, {replay: 2, lane: 0})) == {replay: 2}
    assert shown(series, family(PCIE, {replay: 0, lane: 0})) == {replay: 0}, "the driver restarted"


def test_a_state_begins_when_it_is_first_active_and_remains() -> None:
    series = SparseSeries()

    def states(active: str) -> dict[Labels, object]:
        known = ("answering", "absent", "draining")
        samples = {("/p", state): state == active for state in known}
        return shown(series, family("mps_control_state", samples))

    answering, absent = ("/p", "answering"), ("/p", "absent")
    assert states("answering") == {answering: True}
    assert states("absent") == {answering: False, absent: True}
    assert states("answering") == {answering: True, absent: False}


def test_series_that_rules_query_with_increase_begin_at_0() -> None:
    samples = {
        ("0", "GPU-a", kind, scope, "dram"): 0
        for kind in ("corrected", "uncorrected")
        for scope in ("volatile", "aggregate")
    }
    assert shown(SparseSeries(), family(ECC, samples)) == {
        ("0", "GPU-a", "uncorrected", "volatile", "dram"): 0
    }


def test_metrics_that_are_not_sparse_keep_their_zeros() -> None:
    one = family("mps_server_exits_total", {("/p", "crashed"): 0})
    assert SparseSeries().shown([one]) == [one]


def test_series_that_end_are_not_retained() -> None:
    series = SparseSeries()
    for number in range(100):
        shown(series, family("mps_control_state", {(f"/job{number}", "answering"): 1}))
    assert sum(len(one) for one in series._begun.values()) == 1


def test_a_page_of_other_collectors_ends_no_series() -> None:
    series = SparseSeries()
    lane = ("0", "GPU-a", "lane")
    shown(series, family(PCIE, {lane: 1}))
    assert series.shown([]) == []
    assert shown(series, family(PCIE, {lane: 0})) == {lane: 0}


@each(rules())
def test_no_rule_needs_a_series_that_has_not_begun(rule: Rule) -> None:
    """increase() misses a first value above 0, and a state without an occurrence has no series."""
    begin_late = {name for name in SPARSE if not CATALOGUE[name].always}
    assert "increase(" not in rule.expr or not begin_late & set(metrics_in(rule.expr))
    for name in SPARSE:
        assert not re.search(rf"\b{name}\b({{[^}}]*}})? == 0", rule.expr)
