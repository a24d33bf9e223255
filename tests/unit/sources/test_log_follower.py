"""Logs of many daemons; reads of some are slow or hang."""

import logging
import math
import os
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.flags import Settings
from mps_exporter.observations import DaemonFacts, LogsObservation
from mps_exporter.sources import SourceTimeoutError
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.log_follower import LogFollower
from testing.log_folder import own_logs
from testing.threads import is_under_way
from testing.waiting import PATIENCE_SECONDS, until

OWN = (os.geteuid(),)


class Disks(LogFollower):
    """Logs of which some daemons' are read only when a gate opens."""

    def __init__(self) -> None:
        self.now, self.seconds = 1000.0, 0.0
        super().__init__(clock=lambda: self.now, monotonic=lambda: self.seconds)
        self.gates: dict[str, threading.Event] = {}

    def read_daemon(self, daemon: DaemonFacts, max_bytes: int | None = None) -> LogsObservation:
        found = super().read_daemon(daemon, max_bytes)  # the offsets move on
        if gate := self.gates.get(daemon.pipe_directory):
            gate.wait()
        return found


class Site:
    """Daemons with logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = Disks()
        self.targets: list[DaemonFacts] = []

    def add(self, *names: str, user: int | None = None) -> None:
        for name in names:
            (self.folder / name).mkdir()
            target = own_logs(f"/{name}", self.folder / name)
            self.targets.append(replace(target, owner_uid=user, limited=user is not None))
            self.write(name, "first")

    def write(self, name: str, text: str) -> None:
        with (self.folder / name / "control.log").open("a") as log:
            log.write(f"{text}\n")

    def hang(self, *names: str) -> threading.Event:
        gate = threading.Event()
        self.logs.gates |= {f"/{name}": gate for name in names}
        return gate

    async def poll(self, deadline_seconds: float = PATIENCE_SECONDS) -> dict[str, str]:
        """Return the new data by daemon."""
        found: dict[str, str] = {}
        for chunk in (await self.logs.poll(self.targets, deadline_seconds)).chunks:
            name = chunk.pipe_directory[1:]
            found[name] = found.get(name, "") + chunk.data.decode()
        return {name: text for name, text in found.items() if text}

    async def returned(self, name: str, gate: threading.Event) -> None:
        """Open a gate, and wait until the read of this daemon is done."""
        gate.set()
        await until(lambda: not is_under_way(self.logs._calls, f"/{name}"))

    async def lose(self, name: str, deadline_seconds: float = 0.05) -> threading.Event:
        """Begin a read of this daemon that hangs."""
        gate = self.hang(name)
        with suppress(SourceTimeoutError):
            await self.poll(deadline_seconds)
        assert is_under_way(self.logs._calls, f"/{name}")
        return gate


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(policy, "LOG_POLL_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(policy, "USERS_LOG_POLL_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    made = Site(tmp_path)
    yield made
    for gate in made.logs.gates.values():
        gate.set()
    await made.logs.close()


async def test_a_later_poll_returns_late_data(site: Site) -> None:
    site.add("a")
    gate = site.hang("a")
    with pytest.raises(SourceTimeoutError, match=r"not read within 0\.01 s"):
        await site.poll(0.01)
    site.write("a", "second")
    await site.returned("a", gate)
    found = await site.poll() | {"then": ""}
    found["then"] = "".join((await site.poll()).values())
    assert found["a"] + found["then"] == "first\nsecond\n"


async def test_logs_of_ordinary_users_are_read_once_in_an_interval(site: Site) -> None:
    site.add("a", user=2001)
    site.add("b")
    assert await site.poll() == {"a": "first\n", "b": "first\n"}
    for name in "ab":
        site.write(name, "news")
    assert await site.poll() == {"b": "news\n"}
    site.logs.seconds += policy.LOG_POLL_INTERVAL_SECONDS
    gate = await site.lose("a", 0.01)  # what is late is in the next poll
    await site.returned("a", gate)
    assert await site.poll() == {"a": "news\n"}


async def test_a_late_result_is_complete_only_until_it_was_read(site: Site) -> None:
    """This holds for the other log, too, which had no new line."""
    site.add("a")
    (site.folder / "a" / "server.log").write_text("")
    await site.poll()
    began = site.logs.now
    gate = await site.lose("a")
    site.logs.now += 0.2
    await site.returned("a", gate)
    found = await site.logs.poll(site.targets, PATIENCE_SECONDS)
    assert found.at == site.logs.now
    until_by_log = {chunk.log: chunk.complete_until for chunk in found.chunks}
    assert until_by_log == {"control": began, "server": began}


async def test_a_hanging_read_delays_the_others_once(site: Site) -> None:
    site.add("a", "b", "c")
    await site.poll()
    gate = await site.lose("a")
    for name in "abc":
        site.write(name, "news")
    for _ in range(2):  # a wait for it would never end
        assert "a" not in await site.poll(PATIENCE_SECONDS * 10)
    await site.returned("a", gate)
    found = (await site.poll()).get("a", "") + (await site.poll()).get("a", "")
    assert found == "news\n"


async def test_logs_of_ordinary_users_do_not_delay_others(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "USERS_LOG_POLL_TIMEOUT_SECONDS", 0.01)
    site.add("hers", user=2001)
    site.add("roots")
    gate = site.hang("hers")
    assert await site.poll(PATIENCE_SECONDS * 10) == {"roots": "first\n"}
    await site.returned("hers", gate)
    assert await site.poll() == {"hers": "first\n"}


async def test_logs_that_hang_are_unreadable_after_a_while(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async def states() -> dict[str, str | None]:
        seen = (await site.logs.poll(site.targets, PATIENCE_SECONDS)).states
        return {one.log: one.error for one in seen if one.pipe_directory == "/a"}

    caplog.set_level(logging.INFO)
    site.add("a", "b")
    await site.poll()
    gate = await site.lose("a")
    assert await states() == {}
    site.logs.seconds += policy.LOG_UNREADABLE_AFTER_SECONDS
    error = "its file system does not answer, or no thread is left to read it"
    for _ in range(2):
        assert await states() == {"control": error, "server": error}
    await site.returned("a", gate)
    assert await states() == {"control": None, "server": "no such file"}
    told = [one.message for one in caplog.records if "daemon's logs" in one.message]
    assert told == ["reading a daemon's logs does not return", "a daemon's logs are read again"]


# ------------------------------------------------------------------------------ this host


async def test_a_host_waits_for_new_lines_maps_and_the_next_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "LOG_POLL_INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr(policy, "LOG_POLL_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    host = LiveHost(Settings(collector_nvml=False))
    monkeypatch.setattr(policy, "TICK_INTERVAL_SECONDS", 0.0)
    await host.wait_for_next_poll()  # the tick is due
    monkeypatch.setattr(policy, "TICK_INTERVAL_SECONDS", math.inf)
    daemon = DaemonFacts("/a", str(tmp_path), log_owners=OWN)
    for text in ("line\n", "line\nnext\n"):
        (tmp_path / "control.log").write_text(text)
        await host.poll_logs([daemon], PATIENCE_SECONDS)
        for _ in range(2):  # the log has changed, and its lines may wait for the other log
            await host.wait_for_next_poll()
        await host.poll_logs([daemon], PATIENCE_SECONDS)
    due = [True, False, False]
    host._logs.wait_for_change(due.pop, math.inf)
    assert not due
    host._kernel.requested[1] = None, lambda: None
    await host.wait_for_next_poll()
    host._kernel.requested.clear()
    monkeypatch.setattr(policy, "LOG_POLL_TIMEOUT_SECONDS", 0.0)
    await host.wait_for_next_poll()  # the check hangs
    await host.close()


async def test_a_foreground_run_reads_no_logs_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "LOG_POLL_TIMEOUT_SECONDS", PATIENCE_SECONDS)
    host = LiveHost(Settings(collector_nvml=False))
    daemon = DaemonFacts("/a", str(tmp_path), log_owners=OWN)
    found: list[LogsObservation] = []
    for one, line in ((daemon, "1\n"), (replace(daemon, foreground=True), ""), (daemon, "2\n")):
        with (tmp_path / "control.log").open("a") as log:
            log.write(line)
        found.append(await host.poll_logs([one], PATIENCE_SECONDS))
    await host.close()
    assert [chunk.data for one in found for chunk in one.chunks] == [b"1\n", b"2\n"]
    for state in found[1].states:
        assert (state.readable, state.path) == (False, f"{tmp_path}/{state.log}.log")
        assert "foreground" in (state.error or "")
