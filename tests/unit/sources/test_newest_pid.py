"""Processes are found by the PIDs given out since the last look, where /proc tells the newest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.sources import processes
from mps_exporter.sources.processes import Processes
from testing.fake_proc import FakeProc

COMM = b"nvidia-cuda-mps"


class Counted(Processes):
    """Counts how often /proc is listed; the clock stands still between turns."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), clock=lambda: self.at)
        self.at = 100.0
        self.listed = 0

    def all(self) -> Iterator[int]:
        self.listed += 1
        return super().all()

    def found(self) -> list[int]:
        return self.running(COMM)

    def wait_for_turn(self) -> None:
        self.at += processes._TURN_SECONDS


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    made = FakeProc(tmp_path / "proc")
    made.add(10, comm="sh")
    made.add(11, comm=COMM)
    made.tell_newest(11)
    return made


@pytest.fixture
def source(proc: FakeProc) -> Counted:
    made = Counted(proc.root)
    assert made.found() == [11]
    assert made.listed == 1
    return made


def test_a_new_process_is_found_without_a_listing(proc: FakeProc, source: Counted) -> None:
    assert source.found() == [11]
    proc.add(13, comm="sh")
    proc.add(14, comm=COMM)
    proc.tell_newest(15)
    assert source.found() == [11, 14]
    assert source.found() == [11, 14]
    assert source.listed == 1
    source.wait_for_turn()
    assert source.found() == [11, 14]
    assert source.listed == 2


def test_one_that_ended_or_runs_another_program_is_left_out(
    proc: FakeProc, source: Counted
) -> None:
    proc.add(12, comm=COMM)
    proc.tell_newest(12)
    assert source.found() == [11, 12]
    proc.remove(11)
    (proc.root / "12" / "comm").write_bytes(b"sh\n")
    assert source.found() == []
    assert source.listed == 1


def test_between_fork_and_exec_it_is_looked_at_twice(proc: FakeProc, source: Counted) -> None:
    proc.add(12, comm="sh")
    proc.tell_newest(13)  # of which nothing is to be seen yet
    assert source.found() == [11]
    proc.add(12, comm=COMM)
    proc.add(13, comm=COMM)
    assert source.found() == [11, 12, 13]
    assert source.listed == 1


@pytest.mark.parametrize(("started", "listings"), [(4, 0), (1 + processes._MAX_NEW_PIDS, 1)])
def test_one_that_has_the_pid_of_another_is_new(
    proc: FakeProc, source: Counted, started: int, listings: int
) -> None:
    for pid in range(21, 25):
        proc.add(pid, comm="sh")
    for _ in range(processes._MAX_NEW_READS):
        source.wait_for_turn()
        assert source.found() == [11]
    proc.tell_newest(20)
    assert source.found() == [11]
    listed = source.listed
    for pid in range(21, 25):
        proc.add(pid, comm=COMM)
    proc.tell_newest(20 + started)
    assert source.found() == [11, 21, 22, 23, 24]
    assert source.listed == listed + listings


def test_one_that_has_the_pid_of_another_is_new_after_the_last_pid(
    proc: FakeProc, source: Counted
) -> None:
    for pid in (4, 5, 6, 7, 31, 32, 33, 34):
        proc.add(pid, comm="sh")
    proc.tell_newest(30)
    for _ in range(processes._MAX_NEW_READS):
        source.wait_for_turn()
        assert source.found() == [11]
    for pid in (4, 5, 6, 7, 31, 32, 33, 34):
        proc.add(pid, comm=COMM)
    proc.tell_newest(6)
    # (7 was not given out: it is another program now, and its turn comes.)
    assert set(source.found()) >= {4, 5, 6, 11, 31, 32, 33, 34}


def test_who_has_the_pid_of_one_that_ended_is_found_by_the_next_listing(
    proc: FakeProc, source: Counted
) -> None:
    """Whoever restores processes gives them their PIDs (clone3), and others none the newest."""
    for pid in range(2, 6):
        proc.add(pid, comm=COMM)
    for _ in range(2 * processes._TURNS):
        source.wait_for_turn()
        assert source.found() == [2, 3, 4, 5, 11]
    for pid in range(2, 6):
        proc.remove(pid)
    assert source.found() == [11]
    for pid in range(2, 6):
        proc.add(pid, comm=COMM)
    source.wait_for_turn()
    assert source.found() == [2, 3, 4, 5, 11]


def test_a_thread_with_the_pid_of_one_that_ended_is_no_process(
    proc: FakeProc, source: Counted
) -> None:
    proc.tell_newest(10)
    assert source.found() == [11]
    status = proc.root / "11" / "status"
    status.write_text(status.read_text().replace("Tgid:\t11", "Tgid:\t10"))
    proc.tell_newest(11)
    assert source.found() == []


def test_those_that_start_during_a_listing_are_found_by_the_next_look(
    proc: FakeProc, source: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = Counted.all

    def slow(of: Counted) -> Iterator[int]:
        yield from list(listing(of))
        proc.add(12, comm=COMM)
        proc.tell_newest(12)

    monkeypatch.setattr(Counted, "all", slow)
    source.wait_for_turn()
    assert source.found() == [11]
    assert source.found() == [11, 12]
    assert source.listed == 2


def test_where_the_newest_is_told_again_nothing_is_missed(proc: FakeProc, source: Counted) -> None:
    told = (proc.root / "loadavg").read_text()
    (proc.root / "loadavg").unlink()
    assert source.found() == [11]
    (proc.root / "loadavg").write_text(told)
    proc.add(12, comm=COMM)
    assert source.found() == [11, 12]
    assert source.listed == 3


def test_a_listing_between_turns_is_no_turn(proc: FakeProc, source: Counted) -> None:
    source.at += processes._TURN_SECONDS / 2
    proc.tell_newest(12 + processes._MAX_NEW_PIDS)
    assert source.found() == [11]
    assert source.listed == 2
    source.at += processes._TURN_SECONDS / 2
    assert source.found() == [11]
    assert source.listed == 3


def test_a_process_of_the_first_listing_is_looked_at_twice(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.add(10, comm="sh")
    proc.tell_newest(10)
    source = Counted(proc.root)
    assert source.found() == []
    proc.add(10, comm=COMM)
    assert source.found() == [10]
    assert source.listed == 1


@pytest.mark.parametrize("newest", [12 + processes._MAX_NEW_PIDS, 5])
def test_after_many_or_from_the_beginning_again_all_are_listed(
    proc: FakeProc, source: Counted, newest: int
) -> None:
    proc.add(4, comm=COMM)
    proc.add(70, comm=COMM)
    proc.tell_newest(newest)
    assert source.found() == [4, 11, 70]
    assert source.listed == 2


@pytest.mark.parametrize("told", ["0.00 0.00 0.00 0/0 0\n", "", "1 2 3 1/2 x\n", None])
def test_where_the_newest_is_not_told_all_are_listed(
    proc: FakeProc, source: Counted, told: str | None
) -> None:
    file = proc.root / "loadavg"
    file.unlink() if told is None else file.write_text(told)
    proc.add(12, comm=COMM)
    assert source.found() == [11, 12]
    assert source.found() == [11, 12]
    assert source.listed == 3


def test_where_the_newest_is_not_told_a_new_one_is_looked_at_in_two_listings(
    proc: FakeProc, source: Counted
) -> None:
    (proc.root / "loadavg").unlink()
    for pid in range(20, 24):
        proc.add(pid, comm="sh")
    assert source.found() == [11]
    for pid in range(20, 24):
        proc.add(pid, comm=COMM)
    assert source.found() == [11, 20, 21, 22, 23]


def test_facts_of_those_that_ended_are_forgotten(proc: FakeProc, source: Counted) -> None:
    proc.add(12, argv=["job"])
    facts = source.facts(12)
    assert facts is not None
    proc.remove(12)
    source.wait_for_turn()
    source.found()
    assert 12 not in source._known


@pytest.mark.parametrize("own", ["none", "the first", "the next"])
def test_where_processes_have_other_numbers_all_are_listed(proc: FakeProc, own: str) -> None:
    (proc.root / "self").unlink()
    if own != "none":
        (proc.root / "self").symlink_to("1" if own == "the first" else str(os.getpid() + 1))
    source = Counted(proc.root)
    assert source.found() == [11]
    proc.add(5, comm=COMM)
    assert source.found() == [5, 11]
    assert source.listed == 2


def test_threads_are_no_processes() -> None:
    """Of real ones: a program and its threads all have the name that it gives itself."""
    code = (
        "import threading\n"
        "open('/proc/self/comm', 'w').write('mps-exp-threads')\n"
        "for _ in range(3): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print(flush=True)\n"
        "input()\n"
    )
    source = Processes(clock=lambda: 100.0)
    assert source.running(b"mps-exp-threads") == []
    with subprocess.Popen(
        [sys.executable, "-SE", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        threads = list(Path(f"/proc/{child.pid}/task").iterdir())
        found = source.running(b"mps-exp-threads")
        child.kill()
    assert len(threads) == 4
    assert found == [child.pid]
    assert source.running(b"mps-exp-threads") == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from([b"sh", COMM]), st.integers(1, 90)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("look"), st.sampled_from([0, 1, 3])),
    ),
    max_size=25,
)
LAST_PID = 30_000


@given(STEPS)
@settings(max_examples=60)
def test_whatever_starts_and_ends_is_found_as_in_a_listing(
    history: list[tuple[str, Any] | tuple[str, Any, int]],
) -> None:
    """PIDs are given out in order, some of them to threads, and begin again after the last."""
    with TemporaryDirectory() as folder:
        newest = LAST_PID - 200
        proc = FakeProc(Path(folder))
        proc.tell_newest(newest)
        source, there = Counted(proc.root), dict[int, bytes]()
        for kind, value, *skipped in history:
            if kind == "start":
                newest += sum(skipped)
                newest = newest if newest <= LAST_PID else 300
                there[newest] = value
                proc.add(newest, comm=value)
                proc.tell_newest(newest)
            elif kind == "look":
                source.at += value
                assert source.found() == sorted(pid for pid in there if there[pid] == COMM)
            elif value < len(there):
                gone = list(there)[value]
                del there[gone]
                proc.remove(gone)
