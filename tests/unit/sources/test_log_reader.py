"""Log files through rotation, truncation, replacement and errors."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import DaemonFacts, LogsObservation
from mps_exporter.sources import log_tail
from mps_exporter.sources.log_follower import LogFollower
from testing.log_folder import PIPE, LogFolder, own_logs, poll_all, state
from testing.mps_logs import at, script


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LogFolder]:
    made = LogFolder(tmp_path)
    yield made
    poll_all(made.tails)


START = "{} C630 Starting control daemon using socket /tmp/mps/control"


def test_a_first_read_begins_at_the_last_start_of_the_daemon(host: LogFolder) -> None:
    host.write("control", f"{START.format('00:01.000')}\n00:02.000 C630 Exit with status 0")
    host.write("server", "00:01.500 O100 Startup")
    host.write("control", f"{START.format('00:09.000')}\n00:10.000 C630 NEW UI")
    host.write("server", "00:09.500 O110 Startup", mtime=at("00:10"))
    observation = host.poll()
    control, server = observation.chunks
    assert control.data.startswith(b"[2026-11-21 08:00:09.000 Control   630] Starting")
    assert server.data.startswith(b"[2026-11-21 08:00:09.500 Other   110] Startup")
    for chunk in (control, server):
        assert (chunk.history, chunk.complete_until, chunk.lost_bytes) == (True, host.now, 0)
    found = state(observation, "control")
    assert (found.readable, found.path) == (True, f"{host.folder}/control.log")


def test_a_backlog_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_LOG_BACKLOG_BYTES", 100_000)
    monkeypatch.setattr(policy, "MAX_LOG_POLL_BYTES", 40_000)
    host = LogFolder(tmp_path)
    host.write("control", START.format("00:01.000"))
    line = script("00:02.000 C630 Accepting connection...").control
    host.write("control", line * 5_000, mtime=at("00:02"))
    size = len(line) * 5_000 + len(script(START.format("00:01.000")).control)
    found = [chunk for _ in range(4) for chunk in host.chunks("control")]
    assert found[0].lost_bytes == size - sum(len(chunk.data) for chunk in found)
    assert 99_000 < sum(len(chunk.data) for chunk in found) <= 100_000
    assert found[0].data.startswith(b"[")
    assert [chunk.complete_until is not None for chunk in found] == [False, False, True, True]
    assert max(len(chunk.data) for chunk in found) <= 40_000


@pytest.mark.parametrize("before", [0, 1, 65_536, 130_000])
@pytest.mark.parametrize("after", [0, 65_400, 65_536, 200_000])
def test_the_start_is_found_at_any_position(tmp_path: Path, before: int, after: int) -> None:
    host = LogFolder(tmp_path)
    line = script("00:01.000 C630 Accepting connection...").control
    start = script(START.format("00:05.000")).control
    later = line.replace(b"00:01", b"00:09") * (after // len(line))
    host.write("control", line * (before // len(line)) + start + later)
    ended = script("00:06.000 S10 Exiting").server
    server = script("00:05.000 O10 Startup").server + ended * (after // len(ended))
    host.write("server", ended.replace(b"00:06", b"00:01") * (before // len(ended)) + server)
    chunks = {chunk.log: chunk for chunk in host.poll().chunks}
    assert chunks["control"].data.startswith(start)
    assert chunks["server"].data == server


def test_a_line_longer_than_a_poll_is_delivered_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "MAX_LOG_POLL_BYTES", 100)
    host = LogFolder(tmp_path)
    host.poll()
    host.write("control", b"x" * 250 + b"\n")
    assert b"".join(host.data("control") for _ in range(4)) == b"x" * 250 + b"\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.parametrize("name", ["control.log.1", "control.log-20261121"])
def test_the_end_of_a_truncated_log_is_read_from_its_copy(host: LogFolder, name: str) -> None:
    log, other = host.folder / "control.log", host.folder / "control.log.other"
    host.write("control", START.format("00:01.000"))
    host.poll()
    host.write("control", "58:00.000 C630 NEW UI")
    (host.folder / name).write_bytes(log.read_bytes() + b"[2026-11-21 08")  # copied in a write
    other.write_bytes(log.read_bytes() + script("58:30.000 C630 forged").control)
    os.chown(other, 2001, 2001)
    (host.folder / "control.log.2").symlink_to(other.name)
    os.truncate(log, 0)
    host.write("control", "59:00.000 C630 UI closed")
    assert [(one.restarted, one.history, one.data) for one in host.read("control")] == [
        (False, False, script("58:00.000 C630 NEW UI").control),
        (True, False, script("59:00.000 C630 UI closed").control),
    ]


def test_what_a_truncation_loses_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "MAX_LOG_POLL_BYTES", 100)
    host = LogFolder(tmp_path)
    host.write("control", START.format("00:01.000"))
    host.poll()
    line = script("58:00.000 C630 NEW UI").control
    host.write("control", line * 5)
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(host.poll())
    os.truncate(host.folder / "control.log", 0)
    tracker.add_logs(host.poll())
    lost = tracker.state.counters.snapshot()["mps_control_log_lost_bytes_total"]
    read_bytes = 100 // len(line) * len(line)
    assert lost == {("control",): 5 * len(line) - read_bytes, ("server",): 0}


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "dangling link", "socket"])
def test_only_regular_files_are_opened(host: LogFolder, kind: str) -> None:
    path = host.folder / "control.log"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        if kind == "link":
            (host.folder / "real").write_bytes(b"secret\n")
        path.symlink_to(host.folder / "real")
    observation = host.poll()  # and returns
    assert observation.chunks == ()
    found = state(observation, "control")
    assert (found.readable, found.error) == (False, "not a regular file")
    path.rename(host.folder / "elsewhere")
    host.write("control", START.format("00:01.000"))
    assert state(host.poll(), "control").readable


def test_a_fifo_in_the_place_of_a_log_at_its_opening_is_not_waited_for(
    host: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.write("control", START.format("00:01.000"))
    really_open = os.open

    def swap(path: str, flags: int, **more: Any) -> int:
        if path == "control.log":
            (host.folder / path).unlink()
            os.mkfifo(host.folder / path)
        return really_open(path, flags, **more)

    monkeypatch.setattr(os, "open", swap)
    assert state(host.poll(), "control").error == "not a regular file"


def test_a_log_that_is_replaced_while_it_is_opened_is_not_read(
    host: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.write("control", START.format("00:01.000"))
    (host.folder / "secret").write_bytes(b"secret\n")
    real = os.stat

    def then_replaced(name: Any, **how: Any) -> os.stat_result:
        found = real(name, **how)
        if name == "control.log":
            (host.folder / name).unlink()
            (host.folder / name).symlink_to("secret")
        return found

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", then_replaced)
        observation = host.poll()
    found = state(observation, "control")
    assert (found.readable, observation.chunks) == (False, ())
    assert found.error == "a symbolic link, which is not followed"
    assert descriptors() == before


def test_a_file_that_is_mounted_in_the_place_of_a_log_is_none(
    host: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind mount needs rights that tests lack: only the mount number is simulated."""
    host.write("control", START.format("00:01.000"))
    with (host.folder / "control.log").open() as log, Path("/proc/self/status").open() as other:
        mounts = [log_tail._mount_of(one.fileno()) for one in (log, other)]
    assert len({None, *mounts}) == 3
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(log_tail, "_mount_of", str)
        found = state(host.poll(), "control")
    assert (found.readable, descriptors()) == (False, before)
    assert found.error == "another file is mounted in its place"
    assert state(host.poll(), "control").readable


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_of_daemons_that_are_gone_are_closed(host: LogFolder) -> None:
    before = descriptors()
    host.write("control", START.format("00:01.000"))
    host.write("server", "00:01.500 O100 Startup")
    host.poll()
    assert descriptors() == before + 2
    assert poll_all(host.tails) == LogsObservation(at=host.now)
    assert descriptors() == before


def test_an_unknown_directory_is_reported_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The root directory, also of a container, is not searched instead."""
    tails = LogFollower()
    targets = DaemonFacts(PIPE, ""), DaemonFacts("/mps", "", "/proc/5/root")
    poll_all(tails, *targets)
    observation = poll_all(tails, *targets)
    assert observation.chunks == ()
    assert {(one.path, one.readable) for one in observation.states} == {("", False)}
    first, second = [vars(one)["fields"] for one in caplog.records]
    assert (first["daemon"], second["daemon"]) == (PIPE, "/mps")
    assert "--mps.log-directory" in first["err"]


@pytest.mark.parametrize("exists", [True, False])
def test_lines_without_a_stamp_are_history_if_they_are_older_than_the_exporter(
    host: LogFolder, exists: bool
) -> None:
    if not exists:
        host.poll()
    host.write("control", b"no stamp\n")
    (chunk,) = host.read("control")
    assert (chunk.data, chunk.history) == (b"no stamp\n", exists)


def test_a_log_that_cannot_be_read_is_logged_once_and_so_is_its_recovery(
    host: LogFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = host.folder / "control.log"
    path.mkdir()
    for _ in range(2):
        host.poll()
    path.rmdir()
    host.write("control", START.format("00:01.000"))
    for _ in range(2):
        host.poll()
    records = [one for one in caplog.records if vars(one)["fields"]["path"] == str(path)]
    assert [one.message for one in records] == ["cannot read a log", "following a log"]


# ------------------------------------------------------------------------------ named servers


class NamedServers(LogFolder):
    """The logs of an MPS v3 daemon."""

    def poll(self) -> LogsObservation:
        self.now += 6.0
        return poll_all(self.tails, replace(own_logs(PIPE, self.folder), protocol="3"))


def test_each_named_server_has_its_own_log(tmp_path: Path) -> None:
    host = NamedServers(tmp_path)
    for name in ("training", "serving"):
        (tmp_path / name).mkdir()
        host.write(f"{name}/server", script("00:01.000 S110 Startup").server)
    host.write("control", START.format("00:01.000"))
    observation = host.poll()
    named = {chunk.server_name: chunk.log for chunk in observation.chunks}
    assert named == {"": "control", "training": "server", "serving": "server"}
    found, size = state(observation, "server"), len(script("00:01.000 S110 Startup").server)
    assert (found.readable, found.size_bytes) == (True, 2 * size)


def test_without_a_server_there_is_no_log_to_miss(tmp_path: Path) -> None:
    host = NamedServers(tmp_path)
    host.write("control", START.format("00:01.000"))
    assert state(host.poll(), "server").readable
    (tmp_path / "training").mkdir()
    found = state(host.poll(), "server")
    assert (found.readable, found.path) == (False, f"{tmp_path}/training/server.log")


def test_only_directories_with_names_of_servers_are_followed(tmp_path: Path) -> None:
    host = NamedServers(tmp_path)
    host.write("control", START.format("00:01.000"))
    elsewhere = tmp_path / "Elsewhere"
    elsewhere.mkdir()
    (elsewhere / "server.log").write_bytes(script("00:01.000 S110 Startup").server)
    (tmp_path / "linked").symlink_to(elsewhere)
    (tmp_path / "file").write_text("")
    assert {chunk.server_name for chunk in host.poll().chunks} == {""}


def test_the_number_of_servers_that_are_followed_is_bounded(tmp_path: Path) -> None:
    host = NamedServers(tmp_path)
    host.write("control", START.format("00:01.000"))
    for number in range(70):
        (tmp_path / f"s{number}").mkdir()
        host.write(f"s{number}/server", script("00:01.000 S110 Startup").server)
    servers = {chunk.server_name for chunk in host.poll().chunks} - {""}
    assert len(servers) == 64
