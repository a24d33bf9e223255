"""Declarations of metrics: names, labels, units, sources."""

import pytest

from mps_exporter.metrics import CATALOGUE, SECTIONS
from mps_exporter.metrics.gpus import BY_QUANTITY
from mps_exporter.metrics.metric_types import MetricSpec
from mps_exporter.sources.nvml.accumulators import GPM_COUNTED, GPM_RATIOS
from testing.each import each

OPEN = {
    *("daemon", "gpu", "uuid", "server", "pid", "uid", "user", "fan", "xid", "server_name"),
    *("namespace", "partition", "cgroup"),
}
"""Labels with names of the host as values."""


@each(CATALOGUE.values())
def test_the_values_of_a_label_are_names_or_documented(spec: MetricSpec) -> None:
    assert spec.values.keys() <= set(spec.labels)
    if spec.kind != "info":
        assert set(spec.labels) - OPEN == spec.values.keys()
    for values in spec.values.values():
        assert values
        assert len(values) == len(set(values))


@pytest.mark.parametrize(("number", "quantity"), GPM_RATIOS.items())
def test_the_documented_source_of_an_activity_is_the_gpm_metric(number: int, quantity: str) -> None:
    assert BY_QUANTITY[quantity].source == f"nvmlGpmMetricsGet {number}"
    name = quantity.removesuffix("_activity")
    if name in GPM_COUNTED:
        source = BY_QUANTITY[f"{name}_active_time"].source
        assert source == f"nvmlGpmMetricsGet {number}, integrated"


def test_names_are_unique() -> None:
    assert len(CATALOGUE) == sum(len(section.metrics) for section in SECTIONS)


@each(CATALOGUE.values())
def test_names_follow_the_rules(spec: MetricSpec) -> None:
    assert spec.name.startswith("mps_")
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert spec.name.endswith("_info") == (spec.kind == "info")
    assert spec.help.endswith(".")
    assert spec.section
    assert not {"percent", "mib", "mhz", "ms", "hostname"} & set(spec.name.split("_"))
    assert "hostname" not in spec.labels


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("mps_uid_wait_seconds", "seconds"),
        ("mps_uid_holding_seconds_total", "seconds"),
        ("mps_client_memory_used_bytes", "bytes"),
        ("mps_client_active_thread_ratio", "ratio"),
        ("mps_server_clients", ""),
        ("mps_control_queries_total", ""),
    ],
)
def test_a_unit_is_the_end_of_a_name(name: str, unit: str) -> None:
    assert CATALOGUE[name].unit == unit
