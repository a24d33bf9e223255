"""What the catalogue says of every metric."""

from __future__ import annotations

import pytest

from mps_exporter.metrics import CATALOGUE
from mps_exporter.metrics.gpus import BY_QUANTITY
from mps_exporter.metrics.spec import MetricSpec
from mps_exporter.sources.nvml.accumulators import GPM_COUNTED, GPM_RATIOS

OPEN = {
    "daemon",
    "gpu",
    "uuid",
    "server",
    "pid",
    "uid",
    "user",
    "fan",
    "xid",
    "server_name",
    "namespace",
    "partition",
    "cgroup",
}
"""Labels that name something of the host, in every metric but info."""


@pytest.mark.parametrize("spec", CATALOGUE.values(), ids=lambda spec: spec.name)
def test_a_label_is_a_name_or_has_its_values_documented(spec: MetricSpec) -> None:
    assert spec.values.keys() <= set(spec.labels)
    if spec.kind != "info":
        assert set(spec.labels) - OPEN == spec.values.keys()
    for values in spec.values.values():
        assert values
        assert len(values) == len(set(values))


@pytest.mark.parametrize(("number", "name"), GPM_RATIOS.items())
def test_the_source_of_an_activity_is_the_gpm_metric_that_is_read(number: int, name: str) -> None:
    assert BY_QUANTITY[f"{name}_activity"].source == f"nvmlGpmMetricsGet {number}"
    if name in GPM_COUNTED:
        source = BY_QUANTITY[f"{name}_active_time"].source
        assert source == f"nvmlGpmMetricsGet {number}, integrated"


def test_advice_has_states_and_no_incidents() -> None:
    names = CATALOGUE["mps_advice"].values["advice"]
    assert "ghost_server" in names
    assert "server_crashed" not in names


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
