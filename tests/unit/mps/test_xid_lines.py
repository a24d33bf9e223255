"""The kernel log proves which client caused a fault; weaker evidence names no client."""

import json
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.limits_without_a_flag import (
    MAX_EVIDENCE_RANGES,
    RANGES_LIFETIME_SECONDS,
    SAME_FAULT_SECONDS,
)
from mps_exporter.mps.xid_lines import FaultEvidence, Verdict, parse_fault, pci_address
from mps_exporter.observations import AddressRanges, KernelLine
from testing.each import each
from testing.mps_logs import EIGHT, read, sample

FAULTS = json.loads((Path(__file__).parents[2] / "recordings" / "xid" / "faults.json").read_text())
FAULT_AT = 1000.0
GPU = "GPU-00000000-1111-2222-3333-444444444444"
OTHER_GPU = "GPU-55555555-6666-7777-8888-999999999999"
OWN = (0x7F6607600000, 0x7F6607800000)


def xid(unit: str, address: int, *, name: str = "w", pci: str = "0000:00:06") -> str:
    return (
        f"NVRM: Xid (PCI:{pci}): 31, pid=1486, name={name}, channel 0x0000000e, intr 00000000. "
        f"MMU Fault: ENGINE GRAPHICS GPC5 GPCCLIENT_{unit} faulted @ "
        f"0x{address >> 32:x}_{address & 0xFFFFFFFF:08x}. "
        "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"
    )


def evidence_of(*lines: str, at: float = FAULT_AT) -> FaultEvidence:
    evidence = FaultEvidence()
    evidence.readable = True
    gpus = {"0000:00:06": GPU, "0000:00:07": OTHER_GPU}
    faults = [parse_fault(KernelLine(at, line), gpus) for line in lines]
    evidence.faults = [fault for fault in faults if fault is not None]
    assert len(evidence.faults) == len(lines)
    return evidence


def lives(evidence: FaultEvidence, pid: int, *ranges: tuple[int, int], at: float = 990.0) -> None:
    evidence.client_active(pid)
    evidence.add_ranges(AddressRanges(at, pid, 1001, ranges))


def ends(evidence: FaultEvidence, pid: int, at: float = FAULT_AT - 0.16) -> None:
    evidence.client_ending(pid, at)
    evidence.client_ended(pid, at + 0.2)


def judged(evidence: FaultEvidence) -> tuple[str, list[int], bool]:
    verdict = evidence.judge(FAULT_AT, (GPU,))
    return verdict.cause, [owner.pid for owner in verdict.owners], verdict.running


@each(FAULTS)
def test_measured_faults(one: dict[str, Any]) -> None:
    """167 faults on H200 and H100, driver 580.159.04; of some the maps had not been read."""
    evidence = evidence_of(
        *(line.replace("0000:00:07", "0000:00:06") for line in one["kernel_log"] if "MMU" in line)
    )
    for pid, start, kib in one["reserved"]:
        lives(evidence, pid, (start, start + kib * 1024))
    for pid in (*one["left_work"], one["innocent"]):
        ends(evidence, pid)
    cause, pids, _ = judged(evidence)
    if one["left_work"] and one["maps_read"]:
        assert cause == "unfinished_work"
        assert set(pids) <= set(one["left_work"])
    elif one["own_fault"] and pids:
        assert (cause, pids) == ("own_fault", [one["own_fault"]])
        assert "over" in one["what"]
    else:
        assert (cause, pids) == ("unknown", [])
        assert "over" not in one["what"] or not one["maps_read"]


@pytest.mark.parametrize("client", [True, False])
def test_processes_with_many_ranges_drive_out_none_of_a_running_client(client: bool) -> None:
    """They are clients of this daemon that end, or of a daemon of their user."""
    evidence = evidence_of(xid("T1_1", OWN[0]))
    lives(evidence, 1486, OWN)
    many = tuple((number << 22, (number << 22) + 1) for number in range(512))
    for pid in range(2000, 2000 + 1100):
        if client:
            lives(evidence, pid, *many)
            ends(evidence, pid, 995.0)
        else:
            evidence.add_ranges(AddressRanges(990.0, pid, 2001, many))
    assert judged(evidence) == ("own_fault", [1486], True)
    assert sum(len(one.ranges) for one in evidence._owners) <= MAX_EVIDENCE_RANGES


def test_a_process_name_that_forges_a_fault_changes_nothing() -> None:
    evidence = evidence_of(xid("GCC", OWN[0] + 0x154000, name="GPCCLIENT_T1_1 "))
    lives(evidence, 477, OWN)
    lives(evidence, 472, (0x7F0000000000, 0x7F0000200000))
    ends(evidence, 477)
    assert judged(evidence) == ("unfinished_work", [477], False)


@pytest.mark.parametrize(
    ("unit", "address", "ended", "expected"),
    [
        ("GCC", OWN[0], None, ("unknown", [], False)),
        ("GCC", OWN[1], 999.8, ("unknown", [], False)),
        ("GCC", OWN[0] - 1, 999.8, ("unknown", [], False)),
        ("GCC", OWN[0], 1000.2, ("unknown", [], False)),
        ("T1_11", OWN[0], None, ("own_fault", [477], True)),
        ("T1_11", OWN[0], 1000.1, ("own_fault", [477], True)),
        ("T1_11", OWN[0], 990.5, ("unknown", [], True)),
        ("T1_11", 0, 999.8, ("unknown", [], True)),
        ("PE_0", OWN[0], 999.8, ("unknown", [], False)),
    ],
)
def test_unit_address_and_end_must_agree(
    unit: str, address: int, ended: float | None, expected: tuple[str, list[int], bool]
) -> None:
    evidence = evidence_of(xid(unit, address))
    lives(evidence, 477, OWN)
    if ended is not None:
        ends(evidence, 477, ended)
    assert judged(evidence) == expected


def test_a_client_that_destroyed_a_context_and_runs_on_is_not_named() -> None:
    evidence = evidence_of(xid("GCC", OWN[0]))
    lives(evidence, 477, OWN)
    evidence.client_ending(477, 999.8)
    assert judged(evidence)[0] == "unknown"
    evidence.client_continues(477, 999.9)
    evidence.client_ended(477, 1000.5)
    assert judged(evidence)[0] == "unknown"


def test_memory_that_was_read_after_the_end_of_the_context_is_the_clients() -> None:
    evidence = evidence_of(xid("GCC", OWN[0]))
    lives(evidence, 477, OWN, at=FAULT_AT - 0.1)
    ends(evidence, 477)
    assert judged(evidence) == ("unfinished_work", [477], False)


def test_the_smallest_range_is_right_and_a_range_of_all_names_no_client() -> None:
    evidence = evidence_of(xid("T1_1", OWN[0]))
    lives(evidence, 400, (0x7F6600000000, 0x7F6800000000))
    lives(evidence, 477, OWN)
    assert judged(evidence) == ("own_fault", [477], True)
    lives(evidence, 478, OWN)
    assert judged(evidence) == ("unknown", [], True)


@pytest.mark.parametrize("shift", [-SAME_FAULT_SECONDS - 0.01, SAME_FAULT_SECONDS + 0.01])
def test_a_line_of_another_fault_proves_nothing(shift: float) -> None:
    evidence = evidence_of(xid("GCC", OWN[0]), at=FAULT_AT + shift)
    lives(evidence, 477, OWN)
    ends(evidence, 477, 990.5)
    assert judged(evidence) == ("unknown", [], False)


def test_a_line_of_another_gpu_proves_nothing() -> None:
    evidence = evidence_of(xid("GCC", OWN[0], pci="0000:00:07"))
    lives(evidence, 477, OWN)
    ends(evidence, 477)
    assert judged(evidence) == ("unknown", [], False)
    assert evidence.judge(FAULT_AT, ("MIG-1",)).cause == "unfinished_work"
    assert evidence.judge(FAULT_AT, ()).cause == "unfinished_work"


def test_several_clients_that_left_work_are_all_named() -> None:
    evidence = evidence_of(xid("GCC", OWN[0]), xid("GCC", 0x7F1100000000))
    lives(evidence, 477, OWN)
    lives(evidence, 478, (0x7F1100000000, 0x7F1100200000))
    ends(evidence, 477)
    ends(evidence, 478)
    assert judged(evidence) == ("unfinished_work", [477, 478], False)


def test_ranges_are_forgotten_and_a_pid_may_be_used_again() -> None:
    evidence = evidence_of(xid("GCC", OWN[0]))
    lives(evidence, 477, OWN, at=10.0)
    ends(evidence, 477, 20.0)
    lives(evidence, 477, (0x1000, 0x2000), at=25.0)
    assert judged(evidence) == ("unfinished_work", [477], False)
    lives(evidence, 479, at=20.0 + RANGES_LIFETIME_SECONDS + 1.0)
    assert judged(evidence) == ("unknown", [], False)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:00:06): 43, pid=1486, name=w, channel 0x0000000e",
        "NVRM: Xid (PCI:0000:00:06): 79, GPU has fallen off the bus.",
        xid("GCC", OWN[0]) + " and more",
        "x" + xid("GCC", OWN[0]),
    ],
)
def test_other_lines_are_no_fault(line: str) -> None:
    assert parse_fault(KernelLine(FAULT_AT, line), {}) is None


def test_older_wording() -> None:
    line = xid("T1_11", 0).replace("channel 0x0000000e", "Ch 0000000e").replace("GPC5 ", "")
    fault = parse_fault(KernelLine(1.0, line), {})
    assert fault is not None
    assert (fault.unit, fault.address, fault.gpu) == ("T1", 0, "")


def test_nvml_and_the_kernel_name_one_gpu() -> None:
    assert pci_address("00000000:3B:00.0") == pci_address("0000:3b:00") == "0000:3b:00"
    assert pci_address("00000001:00:06.0") != pci_address("0000:00:06")


def test_a_range_that_each_process_has_at_a_fixed_address_names_no_process() -> None:
    evidence = evidence_of(xid("T1_1", 0x280000000))
    lives(evidence, 477, (0x203200000, 0x300200000))
    lives(evidence, 478, (0x211E00000, 0x300200000))
    assert judged(evidence) == ("unknown", [], True)


def test_the_line_of_an_earlier_fault_does_not_decide_a_later_one() -> None:
    evidence = evidence_of(xid("GCC", OWN[0]))
    null = parse_fault(KernelLine(FAULT_AT + 0.4, xid("T1_1", 0)), {})
    assert null is not None
    evidence.faults = [*evidence.faults, null]
    lives(evidence, 477, OWN)
    ends(evidence, 477)
    assert evidence.judge(FAULT_AT + 0.4, (GPU,)) == Verdict(running=True)
    assert judged(evidence) == ("unfinished_work", [477], False)


@pytest.mark.parametrize(
    ("unit", "end", "other_ends"),
    [
        ("GCC", FAULT_AT - 0.16, 999.0),
        ("GCC", 750.0, 990.0),  # its work may have waited for the next client
        *(("T1_1", None, None), ("T1_1", None, FAULT_AT + 0.07)),
    ],
)
def test_while_another_client_s_memory_is_not_known_no_client_is_named(
    unit: str, end: float | None, other_ends: float | None
) -> None:
    """Processes that were forked from one parent have the same addresses."""
    evidence = evidence_of(xid(unit, OWN[0]))
    lives(evidence, 477, OWN, at=700.0)
    if end is not None:
        ends(evidence, 477, end)
    assert judged(evidence)[1] == [477]
    evidence.client_active(478)
    if other_ends is not None:
        evidence.client_ended(478, other_ends)
    assert judged(evidence)[1] == []
    lives(evidence, 478, OWN)
    assert judged(evidence)[1] == []


def test_while_a_client_whose_memory_is_not_known_is_ending_no_client_is_named() -> None:
    """Another client's range contains its address by chance."""
    evidence = evidence_of(xid("GCC", OWN[0]))
    lives(evidence, 477, OWN, at=700.0)
    ends(evidence, 477, at=750.0)
    evidence.client_active(478)
    assert judged(evidence)[1] == [477]
    evidence.client_ending(478, FAULT_AT - 0.15)
    assert judged(evidence)[1] == []
    evidence.client_continues(478, FAULT_AT - 0.1)
    assert judged(evidence)[1] == [477]
    evidence.client_ending(478, FAULT_AT + 0.02)
    assert judged(evidence)[1] == [477]


def test_a_client_that_was_lost_with_its_server_has_ended() -> None:
    """Else its memory, which was never read, would prevent each later proof."""
    evidence, later = read(sample("server-killed")).evidence, EIGHT + 7200.0
    evidence.faults = evidence_of(xid("T1_1", OWN[0]), at=later).faults
    lives(evidence, 477, OWN)
    assert evidence.judge(later, (GPU,)).cause == "own_fault"


def test_a_client_that_ended_one_of_its_contexts_is_named_for_its_own_pointer() -> None:
    evidence = evidence_of(xid("T1_1", OWN[0]))
    lives(evidence, 477, OWN)
    evidence.client_ending(477, 991.0)
    lives(evidence, 477, OWN, at=995.0)
    assert judged(evidence) == ("own_fault", [477], True)


def test_a_running_client_is_kept_despite_many_short_ones() -> None:
    evidence = evidence_of(xid("T1_1", OWN[0]))
    lives(evidence, 477, OWN)
    for pid in range(1000, 4000):
        evidence.client_active(pid)
        evidence.client_ended(pid, 995.0)
    assert judged(evidence) == ("own_fault", [477], True)
