"""Exits of processes: by descriptors when they happen, or by a poll each second."""

import errno
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mps_exporter import limits_timeouts_intervals as policy
from mps_exporter.flags import Settings
from mps_exporter.observations import ProcessFacts, ProcfsObservation
from mps_exporter.sources.host import SourceTimeoutError
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.processes import ProcessWatch, observations_by_exit, pidfd_opener
from testing.fake_proc import FakeProc
from testing.waiting import until


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


@pytest.fixture
async def pipes() -> AsyncIterator[Pipes]:
    made = Pipes()
    yield made
    for pid in list(made.writers):
        made.end(pid)


async def test_a_missing_process_has_ended() -> None:
    with subprocess.Popen(["sleep", "3600"]) as one:
        one.kill()
    watch = ProcessWatch(pidfd_opener("/proc"), now=lambda: 7.0)
    assert watch.watch_only([one.pid]) == ({one.pid}, set())
    assert watch.take_exited() == {one.pid: 7.0}


async def test_descriptors_are_limited_and_closed(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ProcessWatch(pipes.open)
    monkeypatch.setattr(policy, "MAX_PIDFDS", 3)
    new, without = watch.watch_only([0, 10, 11, 12, 13, 14])
    assert (new, without) == ({10, 11, 12}, {13, 14})
    assert watch.watch_only([12]) == (set(), set())
    assert watch.watch_only([12, 13]) == ({13}, set())
    pipes.end(12)
    await until(lambda: bool(watch.new_exits))
    assert watch.take_exited().keys() == {12}
    assert watch.take_exited() == {}
    watch.close()
    assert len(pipes.opened) == 4
    for writer in pipes.writers.values():
        with pytest.raises(BrokenPipeError):  # the other end is closed
            os.write(writer, b"x")


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
async def test_a_process_without_descriptor_is_left_to_the_caller(pipes: Pipes, error: int) -> None:
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
    await until(lambda: bool(watch.new_exits))
    assert watch.watch_only([10]) == (set(), set())
    watch.watch_only([])  # its exit is known
    assert watch.watch_only([10]) == ({10}, set())
    watch.close()


def test_a_procfs_of_another_pid_namespace_has_no_descriptors(tmp_path: Path) -> None:
    assert pidfd_opener("/proc") is not None
    assert pidfd_opener(str(tmp_path)) is None
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))  # the host's, in a container
    assert pidfd_opener(str(tmp_path)) is None


def test_each_exit_is_reported_with_its_own_time() -> None:
    there = {pid: ProcessFacts(pid, 1.0) for pid in (1, 3)}
    seen = ProcfsObservation(9.0, processes=there, gone=(2, 4, 5))
    first, second, last = observations_by_exit(seen, {2: 5.0, 4: 7.0, 3: 9.5})
    assert (first.at, first.gone, set(first.processes)) == (5.0, (2,), {1})
    assert (second.at, second.gone, set(second.processes)) == (7.0, (2, 4), {1})
    assert last == seen
    assert observations_by_exit(seen, {}) == [seen]


# ---------------------------------------------------------------- on this host


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveHost]:
    """Give a host without pidfds and without a limit on polls."""
    monkeypatch.setattr(policy, "EXIT_POLL_INTERVAL_SECONDS", 0.0)
    FakeProc(tmp_path)
    one = LiveHost(Settings(collector_nvml=False, path_procfs=str(tmp_path)))
    yield one
    await one.close()


@pytest.mark.parametrize("after", [None, {"started": 5.0, "state": "Z"}, {"started": 50.0}])
async def test_processes_without_descriptors_are_polled(
    host: LiveHost, tmp_path: Path, after: dict[str, Any] | None
) -> None:
    proc = FakeProc(tmp_path)
    proc.add(20, argv=["train"], started=5.0)
    proc.add(21, argv=["train"], started=5.0)
    (first,) = await host.exit_observations([20], [21], 5.0)
    assert first.processes.keys() == {20, 21}
    assert await host.exit_observations([20], [21], 5.0) == ()
    proc.remove(20)
    if after is not None:  # a zombie, or another process
        proc.add(20, argv=["train"], **after)
    before = host.now()
    *_, found = await host.exit_observations([20], [21], 5.0)
    facts = found.processes.get(20)
    assert facts is None or facts.state == "Z" or facts.start_time_seconds > 50.0
    assert before <= found.at
    assert await host.exit_observations([20], [21], 5.0) == ()


async def test_an_exit_is_not_lost_while_proc_is_busy(
    host: LiveHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = FakeProc(tmp_path)
    proc.add(20, argv=["train"], started=5.0)
    await host.exit_observations([20], [], 5.0)
    proc.remove(20)

    async def busy(*_arguments: object) -> ProcfsObservation:
        raise SourceTimeoutError("procfs is busy")

    with monkeypatch.context() as patch:
        patch.setattr(host, "identify", busy)
        with pytest.raises(SourceTimeoutError):
            await host.exit_observations([20], [], 5.0)
    *_, found = await host.exit_observations([20], [], 5.0)
    assert found.gone == (20,)
