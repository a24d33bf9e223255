"""Queued clients and daemons that exit between two scrapes, on a host of real processes."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from testing.own_host import OwnHost


def next_of(kind: str, incidents: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return next(one for one in incidents if one["kind"] == kind)


def test_exits_are_reported_without_a_scrape(host: OwnHost) -> None:
    daemon = host.daemon()
    host.serve()
    host.scrape()
    with host.incidents() as incidents:
        waiter = host.program(1002)
        daemon.queue(waiter, 1002)
        began = next_of("wait_started", incidents)
        killed = time.time()
        host.signal(waiter, signal.SIGKILL)
        died = next_of("wait_abandoned", incidents)
        assert died["pids"] == [waiter]
        assert killed <= died["at"] <= time.time()
        assert died["seconds"] == pytest.approx(died["at"] - began["at"], abs=0.002)
        killed = time.time()
        daemon.kill()
        assert killed <= next_of("daemon_died", incidents)["at"] <= time.time()
    assert host.scrape().value("mps_uid_waits_abandoned_total", uid="1002") == 1
