"""Logs on a file system that is full, read-only or unmounted while the daemon runs."""

from dataclasses import replace

import pytest

from testing.attacker import LOGS, PIPE
from testing.own_host import OwnHost
from testing.waiting import wait_for

KEPT = "/run/kept"
"""A second mount of the logs' file system: it stays, like the daemon's descriptor."""


@pytest.mark.parametrize(
    ("breaks", "mends", "daemon_writes"),
    [
        (f"! head -c 2M /dev/zero >{LOGS}/fill", f"rm {LOGS}/fill", False),
        (f"mount -o remount,ro {KEPT}", f"mount -o remount,rw {KEPT}", False),
        # The daemon continues to write to its open files, and the exporter to read them.
        (f"umount --lazy {LOGS}", f"mount --bind {KEPT} {LOGS}", True),
    ],
    ids=["full", "read-only", "unmounted"],
)
def test_nothing_is_lost_and_nothing_fails(
    host: OwnHost, breaks: str, mends: str, daemon_writes: bool
) -> None:
    def run(script: str) -> None:
        assert host.start("sh", "-c", script).wait() == 0

    def crashes(count: int) -> None:
        daemon.crash(7000 + count)
        wait_for(lambda: daemon.crashes == count)

    def is_whole(count: int) -> None:
        metrics = host.scrape()
        assert {one.value for one in metrics["mps_scrape_collector_success"]} == {1}
        assert metrics.value("mps_control_up", daemon=PIPE) == 1
        assert daemon.crashes == count

    run(f"mkdir -p {LOGS} {KEPT}; mount -t tmpfs -o size=1m tmpfs {KEPT}")
    run(f"mount --bind {KEPT} {LOGS}")
    daemon = replace(host.daemon(), logs=KEPT)
    host.serve()
    wait_for(lambda: daemon.value("mps_control_log_readable", log="control"))
    crashes(1)
    run(breaks)
    if daemon_writes:
        crashes(2)
    is_whole(1 + daemon_writes)
    run(mends)
    crashes(2 + daemon_writes)
    is_whole(2 + daemon_writes)
