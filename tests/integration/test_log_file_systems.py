"""Logs on a file system that is full, read-only or unmounted while the daemon runs."""

from dataclasses import replace

import pytest

from testing.attacker import LOGS, PIPE
from testing.own_host import Daemon, OwnHost
from testing.waiting import wait_for

KEPT = "/run/kept"
"""A second mount of the logs' file system: it stays, like the daemon's descriptor."""


def run(host: OwnHost, *command: str) -> None:
    assert host.start(*command).wait() == 0


def begin(host: OwnHost) -> Daemon:
    """A daemon whose logs have a file system of 1 MiB, with one crash that is counted."""
    for command in (
        f"mkdir -p {LOGS} {KEPT}",
        f"mount -t tmpfs -o size=1m tmpfs {KEPT}",
        f"mount --bind {KEPT} {LOGS}",
    ):
        run(host, *command.split(" "))
    daemon = replace(host.daemon(), logs=KEPT)
    host.serve()
    wait_for(lambda: daemon.value("mps_control_log_readable", log="control"))
    daemon.crash(7001)
    wait_for(lambda: daemon.crashes == 1)
    return daemon


def is_whole(host: OwnHost) -> bool:
    """Whether a scrape says what it said before."""
    metrics = host.scrape()
    failed = [one for one in metrics["mps_scrape_collector_success"] if one.value != 1]
    return not failed and metrics.value("mps_control_up", daemon=PIPE) == 1


def test_a_full_file_system(host: OwnHost) -> None:
    daemon = begin(host)
    with pytest.raises(OSError, match="No space left on device"):
        host.outside(f"{LOGS}/fill").write_bytes(bytes(2 << 20))
    assert is_whole(host)
    assert daemon.crashes == 1
    host.outside(f"{LOGS}/fill").unlink()
    daemon.crash(7002)
    wait_for(lambda: daemon.crashes == 2)


def test_a_read_only_file_system(host: OwnHost) -> None:
    daemon = begin(host)
    run(host, "mount", "-o", "remount,ro", KEPT)
    assert is_whole(host)
    assert daemon.crashes == 1
    run(host, "mount", "-o", "remount,rw", KEPT)
    daemon.crash(7002)
    wait_for(lambda: daemon.crashes == 2)


def test_a_file_system_that_is_unmounted_and_mounted_again(host: OwnHost) -> None:
    """The daemon continues to write to its open files, and the exporter to read them."""
    daemon = begin(host)
    run(host, "umount", "--lazy", LOGS)
    daemon.crash(7002)
    wait_for(lambda: daemon.crashes == 2)
    assert is_whole(host)
    run(host, "mount", "--bind", KEPT, LOGS)
    daemon.crash(7003)
    wait_for(lambda: daemon.crashes == 3)
    assert is_whole(host)
