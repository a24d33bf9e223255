"""Logs of many daemons, some of which are read slowly or never."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from mps_exporter.config import Settings
from mps_exporter.observations import DaemonFacts, LogChunk, LogsObservation
from mps_exporter.sources import log_reader_pool
from mps_exporter.sources.file_changes import FileChanges
from mps_exporter.sources.host import SourceTimeoutError
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.log_reader import SETTLING_SECONDS, LogReader, LogTarget
from mps_exporter.sources.log_reader_pool import LogReaderPool
from testing.log_folder import own_logs
from testing.waiting import PATIENCE_SECONDS, until, until_awaited

ROUND_SECONDS = 0.4
"""How long a look waits for what hangs."""


OWN = (os.geteuid(),)


class Disks(LogReader):
    """Tails whose reading of some daemons' logs takes until a gate opens."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(clock=lambda: self.now)
        self.gates: dict[str, threading.Event] = {}
        self.inside: list[str] = []
        self.looks: Counter[str] = Counter()
        """By threads that follow."""
        self.reads = 0

    def may_have_gained(self, pipe_directory: str) -> bool:
        self.looks[pipe_directory] += 1
        return super().may_have_gained(pipe_directory)

    def read_daemon(
        self, target: LogTarget, at: float, most_bytes: int | None = None
    ) -> LogsObservation:
        self.reads += 1
        found = super().read_daemon(target, at, most_bytes)  # the offsets move on
        if gate := self.gates.get(target[0]):
            self.inside.append(target[0])
            gate.wait()
            self.inside.remove(target[0])
        return found


class Site:
    """Daemons with logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disks = Disks()
        self.pool = LogReaderPool(self.disks)
        self.targets: list[LogTarget] = []

    def add(self, *names: str) -> None:
        for name in names:
            (self.folder / name).mkdir()
            self.targets.append(own_logs(f"/{name}", self.folder / name))
            self.write(name, "first")

    def write(self, name: str, text: str) -> None:
        with (self.folder / name / "control.log").open("a") as log:
            log.write(f"{text}\n")

    def hang(self, *names: str) -> threading.Event:
        gate = threading.Event()
        self.disks.gates |= {f"/{name}": gate for name in names}
        return gate

    async def poll(self, deadline_seconds: float = PATIENCE_SECONDS) -> dict[str, str]:
        """Give what came, by daemon; nothing hangs."""
        found: dict[str, str] = {}
        for chunk in (await self.pool.poll(self.targets, deadline_seconds)).chunks:
            name = chunk.pipe_directory[1:]
            found[name] = found.get(name, "") + chunk.data.decode()
        return {name: text for name, text in found.items() if text}

    async def has_news(self, seconds: float = PATIENCE_SECONDS) -> bool:
        """Wait so long for something new."""
        return await self.pool.wait_for_news(self.targets, seconds)

    async def look(self) -> LogsObservation | None:
        """Poll while something hangs."""
        with suppress(SourceTimeoutError):
            return await self.pool.poll(self.targets, ROUND_SECONDS)
        return None

    async def until_there_is(self, expected: dict[str, str]) -> None:
        """Poll while something hangs, until this has come, and nothing else."""
        came: dict[str, str] = {}

        async def comes() -> bool:
            seen = await self.look()
            for chunk in seen.chunks if seen is not None else ():
                if chunk.data:
                    name = chunk.pipe_directory[1:]
                    came[name] = came.get(name, "") + chunk.data.decode()
            assert came.keys() <= expected.keys()
            return came == expected

        await until_awaited(comes)


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(log_reader_pool, "HUNG_SECONDS", 0.15)
    monkeypatch.setattr(log_reader_pool, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(
        log_reader_pool, "PASS_SECONDS", PATIENCE_SECONDS
    )  # or the deadline of a poll
    made = Site(tmp_path)
    yield made
    for gate in made.disks.gates.values():
        gate.set()
    await made.pool.close()


async def left_inside(site: Site, *names: str) -> None:
    """Wait until exactly these have been read, and hang; what the others read is there."""
    expected = sorted(f"/{name}" for name in names)

    def unfinished() -> list[str]:
        readings = site.pool._readings.items()
        return sorted(pipe for pipe, reading in readings if not reading.task.done())

    await until(lambda: sorted(site.disks.inside) == unfinished() == expected)


async def test_what_a_late_poll_read_comes_with_the_next(site: Site) -> None:
    site.add("a")
    gate = site.hang("a")
    with pytest.raises(SourceTimeoutError, match=r"not read within 0\.01 s"):
        await site.poll(0.01)
    site.write("a", "second")
    await left_inside(site, "a")
    gate.set()
    await left_inside(site)
    assert await site.poll() == {"a": "first\nsecond\n"}
    assert await site.poll() == {}


async def test_what_comes_late_is_complete_only_until_it_was_read(site: Site) -> None:
    """The silence of the other log, too: a line may have come since."""
    site.add("a")
    (site.folder / "a" / "server.log").write_text("")
    await site.poll()
    began = site.disks.now
    gate = site.hang("a")
    with pytest.raises(SourceTimeoutError):
        await site.poll(0.05)
    await left_inside(site, "a")
    site.disks.now += 0.2
    gate.set()
    await left_inside(site)
    site.hang("a")
    found = await site.pool.poll(site.targets, 0.01)
    assert found.at == site.disks.now
    assert {chunk.log: chunk.complete_until for chunk in found.chunks} == {
        "control": began,
        "server": began,
    }


async def test_one_that_hangs_does_not_block_the_others(site: Site) -> None:
    site.add("a", "b", "c")
    await site.poll()
    gate = site.hang("a")
    for name in "abc":
        site.write(name, "news")
    await site.until_there_is({"b": "news\n", "c": "news\n"})
    gate.set()
    await left_inside(site)
    assert await site.poll() == {"a": "news\n"}


async def test_a_daemon_that_hangs_has_one_thread(site: Site) -> None:
    site.add("a", "b", "c")
    await site.poll()
    site.hang("b", "c")
    for _ in range(4):
        site.write("a", "news")
        await site.until_there_is({"a": "news\n"})
    await left_inside(site, "b", "c")


async def test_threads_of_those_that_hang_are_limited(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has none is not said to hang."""
    monkeypatch.setattr(log_reader_pool, "MAX_THREADS", 2)
    monkeypatch.setattr(log_reader_pool, "UNREADABLE_AFTER_SECONDS", 0.3)
    site.pool = LogReaderPool(site.disks)
    names = ["a", "b", "c"]
    site.add(*names)
    gate = site.hang(*names)

    async def errors() -> list[str]:
        seen = await site.look()
        found = [one.error or "" for one in (seen.states if seen is not None else ())]
        return sorted(found[::2]) if len(found) == 2 * len(names) else []

    assert await until_awaited(errors) == [
        "reading it does not return: the file system does not answer",
        "reading it does not return: the file system does not answer",
        "the logs of other daemons hang, and no thread is left to read it",
    ]
    assert len(site.disks.inside) == 2
    gate.set()
    await site.until_there_is(dict.fromkeys(names, "first\n"))


async def test_threads_are_used_again(site: Site) -> None:
    """Threads that nobody uses would stay for as long as the exporter runs."""
    site.add(*"abc")
    for _ in range(3):
        await site.poll()
    assert len(site.pool._idle) <= 3
    threads = list(site.pool._idle)
    await site.poll()
    assert set(site.pool._idle) == set(threads)


async def test_logs_that_hang_are_unreadable_after_a_while(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_reader_pool, "UNREADABLE_AFTER_SECONDS", 0.3)
    caplog.set_level(logging.INFO)
    site.add("a", "b")
    await site.poll()
    gate = site.hang("a")

    async def output() -> list[tuple[bool, str | None]]:
        seen = await site.look()
        return [
            (one.readable, one.error)
            for one in (seen.states if seen is not None else ())
            if one.path.endswith("a/control.log")
        ]

    assert await until_awaited(output) == [
        (False, "reading it does not return: the file system does not answer")
    ]
    gate.set()
    await left_inside(site)
    found = await site.pool.poll(site.targets, PATIENCE_SECONDS)
    assert {one.log: one.readable for one in found.states if one.pipe_directory == "/a"} == {
        "control": True,
        "server": False,
    }
    assert [
        record.message
        for record in caplog.records
        if "reading" in record.message or "again" in record.message
    ] == [
        "reading a daemon's logs does not return",
        "a daemon's logs are read again",
    ]


async def test_a_gone_daemon_is_released_when_no_thread_reads_it(site: Site) -> None:
    site.add("a", "b")
    await site.poll()
    gate = site.hang("a")
    await site.look()
    await left_inside(site, "a")
    targets, site.targets = site.targets, []
    await site.poll()
    assert site.disks.daemons() == {"/a"}
    gate.set()
    await left_inside(site)
    await site.poll()
    assert site.disks.daemons() == set()
    site.targets = targets
    assert (await site.poll()).keys() == {"a", "b"}


async def test_an_error_of_ours_is_raised(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> LogsObservation:
        raise KeyError("x")

    site.add("a")
    monkeypatch.setattr(site.disks, "read_daemon", bug)
    with pytest.raises(KeyError):
        await site.poll()


# ------------------------------------------------------------------------------ this host


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at logs that hang takes as long as it is given."""
    monkeypatch.setattr(log_reader_pool, "PASS_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files hang when they are looked at; created after they were opened once."""
    real, gate = os.fstat, threading.Event()
    flag = tmp_path / "hang"

    def fstat(descriptor: int) -> os.stat_result:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if path.startswith(f"{tmp_path}/a/") and flag.exists():
            gate.wait()
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", fstat)
    yield flag
    gate.set()


async def test_this_host_follows_the_logs_that_can_be_read(
    tmp_path: Path, hanging: Path, patient: None
) -> None:
    daemons = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "control.log").write_text("first\n")
        daemons.append(DaemonFacts(f"/{name}", str(tmp_path / name), log_owners=OWN))
    host = LiveHost(Settings(collector_nvml=False))
    await host.poll_logs(daemons, PATIENCE_SECONDS)
    hanging.touch()
    with (tmp_path / "b" / "control.log").open("a") as log:
        log.write("news\n")

    async def news_of_b() -> bool:
        with suppress(SourceTimeoutError):
            chunks = (await host.poll_logs(daemons, 0.3)).chunks
            return any((one.pipe_directory, one.data) == ("/b", b"news\n") for one in chunks)
        return False

    await until_awaited(news_of_b)
    await host.close()


async def test_logs_next_to_a_foreground_daemon_are_not_read(tmp_path: Path, patient: None) -> None:
    (tmp_path / "control.log").write_text("of an earlier daemon\n")
    host = LiveHost(Settings(collector_nvml=False))
    daemon = DaemonFacts("/a", str(tmp_path), foreground=True)
    found = await host.poll_logs([daemon], PATIENCE_SECONDS)
    await host.close()
    assert found.chunks == ()
    assert {(one.log, one.readable) for one in found.states} == {
        ("control", False),
        ("server", False),
    }
    assert all("foreground" in (one.error or "") for one in found.states)
    assert found.states[0].path == f"{tmp_path}/control.log"


async def test_logs_are_not_counted_again_after_a_foreground_run(
    tmp_path: Path, patient: None
) -> None:
    host = LiveHost(Settings(collector_nvml=False))
    daemon = DaemonFacts("/a", str(tmp_path), log_owners=OWN)
    found: list[LogChunk] = []
    for one, line in ((daemon, "1\n"), (replace(daemon, foreground=True), ""), (daemon, "2\n")):
        with (tmp_path / "control.log").open("a") as log:
            log.write(line)
        found += (await host.poll_logs([one], PATIENCE_SECONDS)).chunks
    await host.close()
    assert [chunk.data for chunk in found] == [b"1\n", b"2\n"]


# ---------------------------------------------------------------- between polls


async def test_what_is_written_between_polls_is_news(site: Site) -> None:
    site.add("a", "b")
    assert await site.has_news()  # they have not been read yet
    await site.poll()
    site.disks.now += 2 * SETTLING_SECONDS
    await site.poll()
    looks = site.disks.looks.copy()
    await until(lambda: all(site.disks.looks[pipe] > looks[pipe] + 1 for pipe in ("/a", "/b")))
    assert not await site.has_news(0.0)
    site.write("b", "second")
    assert await site.has_news()
    assert await site.poll() == {"b": "second\n"}


async def test_a_poll_brings_what_was_written_after_the_news(site: Site) -> None:
    site.add("a")
    await site.poll()
    site.write("a", "second")
    assert await site.has_news()
    site.write("a", "third")
    assert await site.poll() == {"a": "second\nthird\n"}


async def test_a_log_in_the_place_of_another_is_news(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader_pool, "WHOLE_LOOK_SECONDS", 0.0)
    site.add("a")
    await site.poll()
    site.disks.now += 2 * SETTLING_SECONDS
    await site.poll()
    (site.folder / "a" / "control.log").rename(site.folder / "a" / "control.log.1")
    site.write("a", "another")
    assert await site.has_news()
    assert await site.poll() == {"a": "another\n"}


@pytest.fixture
async def told(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A daemon of whose logs the kernel has told a change, and which has been quiet since."""
    monkeypatch.setattr(log_reader_pool, "WATCHED_LOOK_SECONDS", PATIENCE_SECONDS * 10)
    site.add("a")
    (site.folder / "a" / "server.log").write_text("")
    await site.poll()
    await until(lambda: is_watched(site))
    site.write("a", "second")
    assert await site.has_news()
    assert await site.poll() == {"a": "second\n"}
    site.disks.now += 2 * SETTLING_SECONDS
    assert await site.poll() == {}
    await until(lambda: is_watched(site))
    return site


def is_watched(site: Site) -> bool:
    """The kernel tells of the next change."""
    following = site.pool._readings["/a"].following
    return following is not None and following._watched and following.since is None


async def test_logs_of_which_no_change_is_told_are_not_read(told: Site) -> None:
    reads, told.disks.now = told.disks.reads, told.disks.now + 1
    found = await told.pool.poll(told.targets, PATIENCE_SECONDS)
    assert (found.at, found.chunks) == (told.disks.now, ())
    assert {one.log: (one.readable, one.size_bytes) for one in found.states} == {
        "control": (True, len("first\nsecond\n")),
        "server": (True, 0),
    }
    assert told.disks.reads == reads


async def test_a_change_that_is_told_is_read_by_the_same_poll(told: Site) -> None:
    told.write("a", "third")
    assert await told.poll() == {"a": "third\n"}


async def test_a_change_that_is_told_is_news_at_once(told: Site) -> None:
    waiting = asyncio.create_task(told.has_news())
    await asyncio.sleep(0)
    told.write("a", "third")
    assert await waiting
    assert await told.poll() == {"a": "third\n"}


async def test_a_change_that_is_not_told_is_found_and_nothing_told_is_believed_then(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a log that another machine writes to."""
    monkeypatch.setattr(log_reader_pool, "WATCHED_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(FileChanges, "watch", lambda *_: True)
    site.add("a")
    (site.folder / "a" / "server.log").write_text("")
    await site.poll()
    site.disks.now += 2 * SETTLING_SECONDS
    await site.poll()
    site.pool._watches["/a"].proved = True
    site.write("a", "second")
    assert await site.has_news()
    assert await site.poll() == {"a": "second\n"}
    assert not site.pool._watches["/a"].proved


async def test_the_kernel_is_not_asked_of_logs_of_ordinary_users(site: Site) -> None:
    site.add("a")
    site.targets = [site.targets[0]._replace(limited=1001)]
    await site.poll()
    assert site.pool._watches == {}


async def test_the_kernel_is_asked_of_a_few_daemons_only(site: Site) -> None:
    site.add(*(f"daemon-{number}" for number in range(log_reader_pool.MAX_WATCHED + 2)))
    await site.poll()
    assert len(site.pool._watches) == log_reader_pool.MAX_WATCHED


async def test_what_hangs_delays_nobody_elses_news(site: Site) -> None:
    site.add("slow", "quick")
    await site.poll()
    site.disks.now += 2 * SETTLING_SECONDS
    await site.poll()
    site.hang("slow")
    site.write("slow", "second")
    await until(lambda: site.disks.inside == ["/slow"])
    site.write("quick", "second")
    assert await site.has_news()
    await site.until_there_is({"quick": "second\n"})


async def test_logs_of_a_daemon_that_is_gone_are_no_longer_followed(site: Site) -> None:
    site.add("a", "b")
    await site.poll()
    del site.targets[0]
    await site.poll()
    assert site.disks.daemons() == {"/b"}


async def test_of_too_many_daemons_the_last_are_asked_each_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader_pool, "MAX_THREADS", 4)
    site.add("a", "b", "c")
    await site.poll()
    followed = {pipe for pipe, one in site.pool._readings.items() if one.following is not None}
    assert followed == {"/a", "/b"}
    assert await site.has_news(0.0)
    site.write("c", "second")
    assert await site.poll() == {"c": "second\n"}


async def test_threads_that_follow_end_with_the_event_loop(tmp_path: Path) -> None:
    ended: list[LogsObservation | None] = []

    def follow() -> None:
        async def one_poll() -> log_reader_pool._Following:
            site = Site(tmp_path)
            site.add("a")
            await site.poll()
            following = site.pool._readings["/a"].following
            assert following is not None
            return following

        ended.append(asyncio.run(one_poll()).run())

    await asyncio.to_thread(follow)
    assert ended == [None]
