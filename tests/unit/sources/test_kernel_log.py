"""The kernel log and the memory of clients, read without waiting."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.observations import AddressRanges
from mps_exporter.sources.kernel_log import KernelEvidence, parse_record, reserved_ranges
from testing.waiting import wait_for

XID = b"NVRM: Xid (PCI:0000:00:06): 31, pid=1486, name=train.py, channel 0x0000000e, intr 00000000."
SHOWN = XID.decode().replace("train.py", "-")
MAPS = b"""\
55d0c0000000-55d0c0001000 r--p 00000000 fe:00 123 /usr/bin/python3.12
7f6607600000-7f6607800000 ---p 00000000 00:00 0
7f6600000000-7f6610000000 ---p 00000000 00:00 0 [anon]
7f6604000000-7f6604001000 ---p 00000000 00:00 0
7f6608000000-7f6609000000 rw-s 00000000 00:05 9 /dev/nvidia0
"""


def record(text: bytes, *, priority: int = 4, seconds: float = 8412.5) -> bytes:
    return b"%d,1216,%d,-;%s\n SUBSYSTEM=pci\n" % (priority, seconds * 1e6, text)


@pytest.mark.parametrize(
    "found",
    [
        record(XID, priority=12),  # a program wrote it
        record(b"usb 1-1: NVRM: Xid (PCI:0000:00:06): 31"),
        record(b"NVRM: loading NVIDIA UNIX Open Kernel Module"),
        b"",
        b"garbage",
    ],
)
def test_other_records_are_skipped(found: bytes) -> None:
    assert parse_record(found) is None


@pytest.mark.parametrize("name", [b"a, channel b", b"a, Ch ", b"x=y;z"])
def test_no_part_of_a_name_is_kept(name: bytes) -> None:
    assert parse_record(record(XID.replace(b"train.py", name))) == (8412.5, SHOWN)


@pytest.mark.parametrize("marker", [b"Channel ID 0000000e", b"reason 3", b"ch 12"])
def test_no_name_is_kept_where_the_wording_is_not_known(marker: bytes) -> None:
    found = parse_record(record(b"NVRM: Xid (PCI:0000:00:06): 32, pid=1, name=x, " + marker))
    assert found == (8412.5, "NVRM: Xid (PCI:0000:00:06): 32, pid=1, name=-")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (os.devnull, "/dev/null cannot be read: No data available"),
        ("/nothing", "/nothing cannot be opened: No such file or directory"),
    ],
)
def test_an_unreadable_kernel_log_has_its_reason(path: str, error: str) -> None:
    found = KernelEvidence(path, "/proc").read({})
    assert (found.readable, found.error) == (False, error)


@pytest.fixture
def kmsg(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Stands in for /dev/kmsg: what is written to it in one piece is read in one piece."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    yield str(path), writer
    os.close(writer)


def test_new_lines_have_the_time_at_which_they_came(kmsg: tuple[str, int]) -> None:
    path, writer = kmsg
    log = KernelEvidence(path, "/proc")
    assert log.read({}).readable
    os.write(writer, record(XID, seconds=1.0))
    (line,) = log.read({}).lines
    log.close()
    assert line.text == SHOWN
    assert line.at == pytest.approx(time.time(), abs=60.0)


def test_old_lines_have_the_kernel_s_time_and_older_ones_are_left_out(
    kmsg: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [record(XID, seconds=time.monotonic() - age) for age in (100.0, 601.0)]
    log = KernelEvidence(kmsg[0], "/proc")
    monkeypatch.setattr(policy, "MAX_KERNEL_RECORDS", len(records))
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", lambda *_: records.pop())
        (line,) = log.read({}).lines
    log.close()
    assert line.at == pytest.approx(time.time() - 100.0, abs=5.0)


def process(proc: Path, pid: int, uid: int = 1001, maps: bytes = MAPS) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (proc / str(pid) / "maps").write_bytes(maps)


def evidence_of(proc: Path) -> KernelEvidence:
    return KernelEvidence("/nonexistent", str(proc))


def answers(evidence: KernelEvidence) -> dict[int, AddressRanges]:
    """Wait for the ranges of all requested processes."""
    found: dict[int, AddressRanges] = {}

    def all_read() -> bool:
        found.update({one.pid: one for one in evidence.read({}).ranges})
        return not evidence.requested

    wait_for(all_read)
    return found


def test_reserved_ranges_smallest_first() -> None:
    smallest, other = reserved_ranges(MAPS)
    assert smallest == (0x7F6607600000, 0x7F6607800000)
    assert other == (0x7F6600000000, 0x7F6610000000)


def test_only_processes_of_the_wanted_user_are_read(tmp_path: Path) -> None:
    """Processes that are gone are not waited for."""
    process(tmp_path, 10)
    process(tmp_path, 11, uid=0)
    evidence = evidence_of(tmp_path)
    evidence.read({10: None, 11: 1001, 12: None, 13: 1001})
    assert answers(evidence).keys() == {10}
    evidence.read({11: None})
    assert answers(evidence)[11].uid == 0


def test_clients_of_a_user_that_hang_cost_that_user(tmp_path: Path) -> None:
    """They may be clients of root's daemon, which is not limited."""
    evidence = evidence_of(tmp_path)
    for pid in range(100, 100 + 2 * policy.MAX_HUNG_CALLS):
        process(tmp_path, pid, uid=2001)
        (tmp_path / str(pid) / "maps").unlink()
        os.mkfifo(tmp_path / str(pid) / "maps")
        evidence.read({pid: None})
    process(tmp_path, 10)
    evidence.read({10: None})
    assert wait_for(lambda: evidence.read({}).ranges)[0].pid == 10


def test_the_maps_of_an_ordinary_user_are_read_up_to_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "MAX_USER_MAPS_BYTES", len(MAPS))
    monkeypatch.setattr(policy, "USER_MAPS_BYTES_PER_SECOND", 0.0)
    found = set[int]()
    evidence = evidence_of(tmp_path)
    for pid, uid in ((10, 1001), (11, 1001), (12, 1002), (13, 0), (14, 0)):
        process(tmp_path, pid, uid)
        evidence.read({pid: None})
        found |= answers(evidence).keys()
    assert found == {10, 12, 13, 14}
