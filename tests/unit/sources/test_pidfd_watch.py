"""The end of a process, noticed when it happens: by descriptors, or by a look each second."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from mps_exporter.config import Settings
from mps_exporter.observations import ProcessFacts, ProcfsObservation
from mps_exporter.sources import policy
from mps_exporter.sources.host import SourceTimeoutError
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.pidfd_watch import ProcessWatch, at_each_end, opener
from testing.fake_proc import FakeProc


def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "3600"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.001)


class Pipes:
    """Stand-ins for pidfds: pipes, readable when their process ends."""

    def __init__(self) -> None:
        self.writers: dict[int, int] = {}
        self.refuse: dict[int, int] = {}
        self.opened: list[int] = []

    def open(self, pid: int) -> int:
        self.opened.append(pid)
        if pid in self.refuse:
            raise OSError(self.refuse[pid], "refused")
        reader, self.writers[pid] = os.pipe()
        return reader

    def end(self, pid: int) -> None:
        os.close(self.writers.pop(pid))

    def close(self) -> None:
        for pid in list(self.writers):
            self.end(pid)


@pytest.fixture
async def pipes() -> AsyncIterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


async def test_the_end_of_a_process_has_its_own_time() -> None:
    open_process = opener("/proc")
    assert open_process is not None, "these tests need pidfd_open (Linux 5.3)"
    with child() as one, child() as other:
        watch = ProcessWatch(open_process)
        try:
            assert watch.watch_only([one.pid, other.pid]) == ({one.pid, other.pid}, set())
            assert watch.watch_only([one.pid, other.pid]) == (set(), set())
            before = time.time()
            one.kill()
            await until(lambda: bool(watch._news))
            noticed = time.time()
            ended = watch.ended()
            assert ended.keys() == {one.pid}
            assert before <= ended[one.pid] <= noticed
            assert watch.watch_only([one.pid, other.pid]) == (set(), set())  # told once
            assert watch.ended() == {}
        finally:
            watch.close()
            other.kill()


async def test_who_is_not_there_any_more_has_ended() -> None:
    with child() as one:
        one.kill()
    watch = ProcessWatch(opener("/proc"), now=lambda: 7.0)
    assert watch.watch_only([one.pid]) == ({one.pid}, set())
    assert watch.ended() == {one.pid: 7.0}


async def test_descriptors_are_few_and_given_back(pipes: Pipes) -> None:
    watch = ProcessWatch(pipes.open)
    watch._most = 3
    new, without = watch.watch_only([0, 10, 11, 12, 13, 14])
    assert (new, without) == ({10, 11, 12}, {13, 14})
    assert watch.watch_only([12]) == (set(), set())
    assert watch.watch_only([12, 13]) == ({13}, set())  # there is room again
    pipes.end(12)
    await until(lambda: bool(watch._news))
    assert watch.ended().keys() == {12}
    watch.close()
    assert len(pipes.opened) == 4
    for writer in pipes.writers.values():
        with pytest.raises(BrokenPipeError):  # nobody has the other end any more
            os.write(writer, b"x")


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
async def test_who_has_no_descriptor_is_left_to_the_caller(pipes: Pipes, error: int) -> None:
    pipes.refuse[10] = error
    watch = ProcessWatch(pipes.open)
    for _ in range(3):
        assert watch.watch_only([10])[1] == {10}
    assert pipes.opened == [10]
    assert ProcessWatch(None).watch_only([10]) == (set(), {10})


async def test_a_reused_pid_is_watched_again(pipes: Pipes) -> None:
    watch = ProcessWatch(pipes.open)
    watch.watch_only([10])
    pipes.end(10)
    await until(lambda: bool(watch._news))
    assert watch.watch_only([10]) == (set(), set())
    watch.watch_only([])  # it is known to have ended
    assert watch.watch_only([10]) == ({10}, set())
    watch.close()


def test_only_a_procfs_with_our_numbers_will_do(tmp_path: Path) -> None:
    assert opener("/proc") is not None
    assert opener(str(tmp_path)) is None
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))  # the host's, seen from a container
    assert opener(str(tmp_path)) is None


def test_each_exit_is_reported_with_its_own_time() -> None:
    there = {pid: ProcessFacts(pid, 1.0) for pid in (1, 3)}
    seen = ProcfsObservation(9.0, processes=there, gone=(2, 4, 5))
    first, second, last = at_each_end(seen, {2: 5.0, 4: 7.0, 3: 9.5})
    assert (first.at, first.gone, set(first.processes)) == (5.0, (2,), {1})
    assert (second.at, second.gone, set(second.processes)) == (7.0, (2, 4), {1})
    assert last == seen
    assert at_each_end(seen, {}) == [seen]


# ---------------------------------------------------------------- on this host


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveHost]:
    """Where no process can be watched, and looks are not rationed."""
    monkeypatch.setattr(policy, "EXIT_POLL_INTERVAL_SECONDS", 0.0)
    FakeProc(tmp_path)
    one = LiveHost(Settings(collector_nvml=False, path_procfs=str(tmp_path)))
    yield one
    await one.close()


def gone(proc: FakeProc) -> None:
    proc.remove(20)


def zombie(proc: FakeProc) -> None:
    proc.add(20, argv=["train"], started=5.0, state="Z")


def another(proc: FakeProc) -> None:
    proc.add(20, argv=["train"], started=50.0)


@pytest.mark.parametrize("end", [gone, zombie, another])
async def test_without_descriptors_processes_are_looked_at(
    host: LiveHost, tmp_path: Path, end: Callable[[FakeProc], None]
) -> None:
    proc = FakeProc(tmp_path)
    proc.add(20, argv=["train"], started=5.0)
    proc.add(21, argv=["train"], started=5.0)
    (first,) = await host.exit_observations([20], [21], 5.0)
    assert first.processes.keys() == {20, 21}
    assert await host.exit_observations([20], [21], 5.0) == ()
    end(proc)
    before = host.now()
    *_, found = await host.exit_observations([20], [21], 5.0)
    facts = found.processes.get(20)
    assert facts is None or facts.state == "Z" or facts.start_time_seconds > 50.0
    assert before <= found.at
    assert await host.exit_observations([20], [21], 5.0) == ()


async def test_an_end_is_not_lost_when_proc_is_busy(
    host: LiveHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = FakeProc(tmp_path)
    proc.add(20, argv=["train"], started=5.0)
    await host.exit_observations([20], [], 5.0)
    proc.remove(20)
    identify = host.identify

    async def busy(*_arguments: object) -> ProcfsObservation:
        raise SourceTimeoutError("procfs is busy with another question")

    monkeypatch.setattr(host, "identify", busy)
    with pytest.raises(SourceTimeoutError):
        await host.exit_observations([20], [], 5.0)
    monkeypatch.setattr(host, "identify", identify)
    *_, found = await host.exit_observations([20], [], 5.0)
    assert found.gone == (20,)


async def test_on_a_real_host_the_time_is_that_of_the_end_and_not_of_the_look() -> None:
    host = LiveHost(Settings(collector_nvml=False))
    with child() as one:
        try:
            (first,) = await host.exit_observations([one.pid], [os.getpid()], 60.0)
            assert first.processes.keys() == {one.pid, os.getpid()}
            before = time.time()
            one.kill()
            await until(lambda: bool(host._watch._news))
            noticed = time.time()
            await until(lambda: time.time() > noticed)
            at_end, look = await host.exit_observations([one.pid], [os.getpid()], 60.0)
            assert before <= at_end.at <= noticed < look.at
            state = at_end.processes[one.pid].state if one.pid in at_end.processes else "gone"
            assert state in ("Z", "gone")  # a child of ours stays until we have waited for it
        finally:
            one.kill()
            await host.close()
