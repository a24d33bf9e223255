"""The made-up fleet: its churn, its incidents, and what its pages say."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from bench.fleet import CLIENTS_OF_KIND, PARTS, Fleet, GroupTimes, crashed, fleet_host, kind_of
from bench.rules import GPUS
from mps_exporter.snapshot import Snapshot


def pids(snapshot: Snapshot) -> set[tuple[str, int]]:
    return {
        (daemon.pipe_directory, client.pid)
        for daemon in snapshot.daemons
        for server in daemon.servers
        for client in server.clients
    }


def test_the_mix_of_hosts() -> None:
    assert Counter(map(kind_of, range(1000))) == {"full": 100, "shared": 600, "idle": 300}


@pytest.mark.parametrize("kind", ["full", "shared"])
def test_an_eighth_of_the_clients_is_replaced_each_time(kind: str) -> None:
    clients = CLIENTS_OF_KIND[kind]
    seen = [pids(fleet_host(clients, generation)) for generation in range(PARTS + 1)]
    assert {len(one) for one in seen} == {GPUS * clients}
    replaced = [len(after - before) for before, after in pairwise(seen)]
    assert sum(replaced) == GPUS * clients, "each of them once"
    assert max(replaced) <= GPUS * -(-clients // PARTS)


def test_a_crash_is_counted_once_and_dated() -> None:
    before = fleet_host(6, 0)
    after = crashed(before, 1234.0)
    name = "mps_server_exits_total"
    (first, *rest), (first_before, *rest_before) = after.daemons, before.daemons
    assert rest == rest_before
    assert first.counters is not None
    assert first_before.counters is not None
    counted, known = first.counters[name][("crashed",)], first_before.counters[name][("crashed",)]
    assert isinstance(counted, int | float)
    assert isinstance(known, int | float)
    assert counted == known + 1
    assert first.counters["mps_server_last_exit_timestamp_seconds"][("crashed",)] == 1234.0


def test_hosts_have_names_of_their_own() -> None:
    fleet = Fleet()
    first, second = fleet.page(10), fleet.page(20)
    assert b"GPU-000a" in first
    assert first != second
    assert first.replace(b"000a", b"0014") == second


def test_what_rules_take_of_a_core() -> None:
    times = GroupTimes()
    times.seconds = {"often": [9.0, 0.3, 0.3], "seldom": [0.6]}
    times.every = {"often": 30.0, "seldom": 120.0}
    assert [row[0] for row in times.rows()] == ["often", "seldom"]
    assert times.busy == pytest.approx(0.3 / 30 + 0.6 / 120)


def test_vmalert_tells_the_time_of_each_rule_and_prometheus_that_of_a_group() -> None:
    rules = [
        {"name": "a", "health": "ok", "evaluationTime": 0.25},
        {"name": "b", "health": "error", "lastError": "timeout", "evaluationTime": 0.5},
    ]
    group = {"name": "g", "interval": 30, "lastEvaluation": "1", "rules": rules}
    for one, seconds in ((group, 0.75), ({**group, "evaluationTime": 0.8}, 0.8)):
        times = GroupTimes()
        times.note([one])
        times.note([one])
        assert times.seconds == {"g": [seconds]}
        assert times.failed == {"b": "timeout"}
