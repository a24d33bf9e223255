import pytest

from grafana.promql import scoped
from grafana.style import alert_threshold


def test_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(KeyError, match="mps_nonsense"):
        scoped("mps_nonsense", ("job",))


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
