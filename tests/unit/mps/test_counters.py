"""Counters are declared once; a counter that is not, or that lacks a label, is refused."""

from collections.abc import Callable
from itertools import product

import pytest

from mps_exporter.limits_without_a_flag import WAIT_BOUNDS_SECONDS
from mps_exporter.mps.incidents_and_counters import Counters, Incidents, Moment
from mps_exporter.mps.metrics_from_logs import LOG_METRICS
from mps_exporter.mps.waits import QueuedClient
from mps_exporter.snapshot import Histogram


@pytest.mark.parametrize(
    "wrong",
    [
        lambda one: one.increment("mps_nobody_knows_this_total"),
        lambda one: one.increment("mps_uid_overtakes_total"),
        lambda one: one.increment("mps_uid_overtakes_total", user=1001),
        lambda one: one.increment("mps_uid_handovers_total", uid=1001),
        lambda one: one.increment("mps_client_losses_total", cause="terminated", uid=1001),
        lambda one: one.increment("mps_client_losses_total", uid=1001, cause="bad_luck"),
        lambda one: one.increment("mps_uid_wait_seconds", uid=1001),
        lambda one: one.observe("mps_uid_overtakes_total", 1.0, uid=1001),
        lambda one: one.counters.set_latest("mps_uid_overtakes_total", 1.0, uid=1001),
    ],
)
@pytest.mark.parametrize("counted", [True, False])
def test_what_is_not_declared_is_refused(wrong: Callable[[Moment], None], counted: bool) -> None:
    counters = Counters()
    before = counters.snapshot()
    with pytest.raises((KeyError, TypeError, ValueError)):
        wrong(Moment(7.0, counted, counters, Incidents()))
    assert counters.snapshot() == before


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    "sight",
    [
        lambda when: when.increment("mps_client_connections_total", uid=1001),
        lambda when: QueuedClient(100, 1001, 7.0).block(1002, when),
    ],
    ids=["connection", "wait"],
)
def test_everything_of_a_user_begins_at_zero_with_the_users_first_client(
    sight: Callable[[Moment], None], counted: bool
) -> None:
    counters = Counters()
    sight(Moment(7.0, counted, counters, Incidents()))
    found = counters.snapshot()
    for name, metric in LOG_METRICS.items():
        if "uid" in metric.labels:
            others = product(*(metric.values[label] for label in metric.labels if label != "uid"))
            assert found[name].keys() >= {(1001, *one) for one in others}, name
    assert {key[0] for key in found["mps_client_losses_total"]} == {1001}
    assert not any(found["mps_client_losses_total"].values())
    waits = found["mps_uid_wait_seconds"][1001,]
    assert isinstance(waits, Histogram)
    assert not any(waits.counts)


def test_durations_are_counted_up_to_and_including_their_bucket_s_bound() -> None:
    """Queries and dashboards name these buckets."""
    named = "0.1 0.25 0.5 1.0 2.5 5.0 10.0 30.0 60.0 120.0 300.0 600.0 1800.0 3600.0 7200.0"
    assert " ".join(map(str, WAIT_BOUNDS_SECONDS)) == named
    counters = Counters()
    # A clock that was set back, the error of a sum of binary numbers, and a wait beyond all bounds.
    for seconds in (-5.0, 0.1 + 1e-12, 0.101, 0.25, 9000.0):
        counters.observe("mps_uid_wait_seconds", seconds, uid=1001)
    found = counters.snapshot()["mps_uid_wait_seconds"][1001,]
    assert isinstance(found, Histogram)
    assert (found.bounds, found.sum_seconds) == (WAIT_BOUNDS_SECONDS, 9000.451)
    assert found.counts == (2, 2, *(0,) * 13, 1)
