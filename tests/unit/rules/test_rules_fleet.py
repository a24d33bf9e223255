"""docs/fleet.md: what it leaves out and what it keeps are series that there are."""

import re

from mps_exporter.metrics import CATALOGUE
from testing import promql
from testing.each import each
from testing.rule_files import Rule, dropped, kept_for_long, records, rules
from tests.unit.rules import templates

NOT_KEPT = re.compile(r"daemon_uid_cause:.+|client:.+")


@each(rules())
def test_no_rule_needs_what_is_dropped(rule: Rule) -> None:
    texts = rule.annotations.values()
    requested = [rule.expr, *(expr for text in texts for expr, _ in templates.queries(text))]
    names = {found.name for expr in requested for found in promql.selectors(promql.parse(expr))}
    assert {name for name in names if dropped(name)} == set()


def test_what_is_dropped_is_there() -> None:
    all_names = set(CATALOGUE) | {f"{name}_bucket" for name in CATALOGUE}
    assert {name for name in all_names if dropped(name)} == {
        "mps_client_start_time_seconds",
        "mps_client_priority",
        "mps_client_contexts",
        "mps_client_active_thread_ratio",
    }


@each(records())
def test_recorded_series_are_kept_or_named_as_not_worth_it(rule: Rule) -> None:
    assert kept_for_long(rule.record) != bool(NOT_KEPT.fullmatch(rule.record))


def test_what_is_kept_unrecorded_is_there() -> None:
    assert {name for name in CATALOGUE if kept_for_long(name)} == {
        "mps_gpu_info",
        "mps_control_info",
        "mps_server_exits_total",
        "mps_server_faults_total",
        "mps_gpu_xid_errors_total",
        "mps_gpu_ecc_errors_total",
    }
    assert kept_for_long("ALERTS")
