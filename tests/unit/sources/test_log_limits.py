"""Logs that grow faster than they are read, and their owners."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import DaemonFacts
from mps_exporter.sources.log_follower import LogFollower, _byte_limits
from testing.log_folder import PIPE, LogFolder, own_logs, poll_all, state
from testing.mps_logs import script
from testing.waiting import PATIENCE_SECONDS

LINE = "59:00.000 C630 UI closed"


def test_a_log_of_another_user_is_not_read(tmp_path: Path) -> None:
    host = LogFolder(tmp_path)
    host.write("control", LINE)
    other = DaemonFacts(PIPE, str(tmp_path), log_owners=(os.geteuid() + 1,))
    found = poll_all(host.tails, other)
    assert not state(found, "control").readable
    assert f"belongs to user {os.geteuid()}" in (state(found, "control").error or "")
    assert found.chunks == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_log_that_another_user_replaces_is_not_read(tmp_path: Path) -> None:
    host = LogFolder(tmp_path)
    host.write("control", LINE)
    assert state(host.poll(), "control").readable
    (tmp_path / "new").write_bytes(b"forged\n")
    os.chown(tmp_path / "new", 2001, 2001)
    (tmp_path / "new").rename(tmp_path / "control.log")
    assert host.data("control") == b""
    poll_all(host.tails)
    assert not state(host.poll(), "control").readable


def test_a_log_that_is_far_behind_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """truncate -s makes a file of any size at once."""
    monkeypatch.setattr(policy, "MAX_LOG_BACKLOG_BYTES", 4096)
    host = LogFolder(tmp_path)
    host.write("control", LINE)
    host.poll()
    log = tmp_path / "control.log"
    os.truncate(log, 1 << 36)
    host.write("control", f"{LINE}\n{LINE}")
    (chunk, *_) = [one for one in host.poll().chunks if one.log == "control"]
    assert chunk.restarted
    assert chunk.lost_bytes > (1 << 36) - 8192
    assert chunk.data == script(LINE).control
    assert chunk.complete_until is not None


def test_users_share_a_poll() -> None:
    def target(name: str, user: int | None) -> DaemonFacts:
        return DaemonFacts(name, "/l", owner_uid=user, limited=user is not None)

    assert _byte_limits([target("/a", None)]) == {}
    assert _byte_limits([target("/a", None), target("/b", 1)]) == {
        (1, None): policy.MAX_USER_LOG_POLL_BYTES // 2
    }
    four = [target(f"/{number}", number) for number in range(1, 5)]
    assert set(_byte_limits(four).values()) == {policy.MAX_USERS_LOG_POLL_BYTES // 8}
    crowd = [target(f"/{number}", 1) for number in range(1000)]
    assert _byte_limits([*crowd, target("/b", 2)]) == {
        (1, None): policy.MIN_USER_LOG_POLL_BYTES,
        (2, None): policy.MAX_USER_LOG_POLL_BYTES // 2,
    }


async def test_one_poll_reads_a_users_share_and_all_of_the_others(tmp_path: Path) -> None:
    pool = LogFollower()
    data = script(LINE).control
    data *= 2 * policy.MAX_USER_LOG_POLL_BYTES // len(data)
    targets = []
    for name, user in (("root", None), ("alice", 2001)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "control.log").write_bytes(b"")
        logs = own_logs(f"/{name}", tmp_path / name)
        targets.append(replace(logs, owner_uid=user, limited=user is not None))
    await pool.poll(targets, PATIENCE_SECONDS)
    for name in ("root", "alice"):
        with (tmp_path / name / "control.log").open("ab") as file:
            file.write(data)
    read = {"/root": 0, "/alice": 0}
    while not all(read.values()):  # hers may be late
        for one in (await pool.poll(targets, PATIENCE_SECONDS)).chunks:
            read[one.pipe_directory] += len(one.data)
    await pool.close()
    share = policy.MAX_USER_LOG_POLL_BYTES // 2
    assert read == {"/root": len(data), "/alice": share - share % len(script(LINE).control)}
