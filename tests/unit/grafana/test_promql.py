from __future__ import annotations

import pytest

from grafana.promql import metrics_in, scoped, state_code
from grafana.style import State, alert_threshold, codes, mappings


def test_metrics_get_the_matchers_of_variables_whose_labels_they_have() -> None:
    expr = "sum by (uid) (mps_uid_waiting_clients) / on () mps_gpu_up"
    assert scoped(expr, ("job", "instance", "daemon")) == (
        'sum by (uid) (mps_uid_waiting_clients{job=~"$job", instance=~"$instance",'
        ' daemon=~"$daemon"}) / on () mps_gpu_up{job=~"$job", instance=~"$instance"}'
    )


def test_a_matcher_that_is_written_out_goes_before() -> None:
    assert scoped('mps_uid_waiting_clients{uid="0"}', ("job", "uid")) == (
        'mps_uid_waiting_clients{job=~"$job", uid="0"}'
    )


def test_names_in_groupings_and_strings_are_no_metrics() -> None:
    expr = 'count by (mps_server_state) (mps_server_state{mps_server_state="FAULT"})'
    assert metrics_in(expr) == ["mps_server_state"]
    assert metrics_in('label_replace(up, "mps_x", "mps_y", "", "")') == ["up"]


def test_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(KeyError, match="mps_nonsense"):
        scoped("mps_nonsense", ("job",))


def test_states_become_numbers_and_numbers_words() -> None:
    assert state_code("mps_server_state", {"ACTIVE": 1}, "server") == (
        'max by (server) ((mps_server_state{mps_server_state="ACTIVE"} == 1) * 1)'
    )
    states = (State(1, "ACTIVE", "green"), State(4, "ghost", "red"))
    assert codes(states, "ACTIVE") == {"ACTIVE": 1}
    assert mappings(*states)[0]["options"]["4"] == {"text": "ghost", "color": "red", "index": 1}


@pytest.mark.parametrize(
    ("alert", "metric", "limit"),
    [
        ("MpsUidWaitLong", "mps_uid_waiting_since_timestamp_seconds", 5 * 60),
        ("MpsContextsNearLimit", "mps_server_client_contexts_limit", 0.9),
        ("MpsControlLogLarge", "mps_control_log_size_bytes", 2**30),
        ("MpsWouldHelp", "mps_gpu_sm_active_ratio", 0.3),
    ],
)
def test_thresholds_come_from_the_alerts(alert: str, metric: str, limit: float) -> None:
    assert alert_threshold(alert, metric) == limit
