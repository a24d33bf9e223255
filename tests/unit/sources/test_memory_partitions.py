"""GPU memory of control groups, in a tree of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.mps.cgroups import parse_dmem, unified_path
from mps_exporter.observations import CgroupMemory
from mps_exporter.sources.control_groups import memory_partitions

# ai-dynamo, "Per-GPU Compute and Memory Limits with MPS": dmem.capacity, and dmem.max of two GPUs
CAPACITY = "nvidia/00000000:02:00.0/vidmem 102641958912\n"
TWO_GPUS = """\
nvidia/00000000:1b:00.0/vidmem 42949672960
nvidia/00000000:43:00.0/vidmem 60129542144
"""
PCI = "00000000:02:00.0"
LEAF = "/bert0.slice/docker-0123.scope"


def line(value: int | str) -> str:
    return f"nvidia/{PCI}/vidmem {value}\n"


def group(root: Path, path: str, current: int | str, soft: int | str, hard: int | str) -> None:
    directory = root / path.lstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in (("current", current), ("min", soft), ("max", hard)):
        (directory / f"dmem.{name}").write_text(line(value))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "dmem.capacity").write_text(CAPACITY)
    return tmp_path


def read(root: Path, *paths: str) -> tuple[CgroupMemory, ...]:
    return memory_partitions(str(root), [f"0::{path}\n" for path in paths])


def test_the_published_files() -> None:
    assert parse_dmem(CAPACITY) == {PCI: 102641958912}
    assert parse_dmem(TWO_GPUS) == {
        "00000000:1b:00.0": 42949672960,
        "00000000:43:00.0": 60129542144,
    }
    assert parse_dmem(line("max")) == {PCI: None}
    # From the kernel's documentation: regions of other drivers.
    assert parse_dmem(f"drm/{PCI}/vram0 max\n{line(5)}drm/{PCI}/stolen 1073741824\n") == {PCI: 5}


def test_a_group_with_limits(root: Path) -> None:
    group(root, LEAF, 512 << 20, 4 << 30, 8 << 30)
    assert read(root, LEAF, LEAF) == (CgroupMemory(LEAF, PCI, 512 << 20, 4 << 30, 8 << 30),)


def test_a_limit_above_a_group_without_one_is_shown_with_it(root: Path) -> None:
    group(root, LEAF, 1, 0, "max")
    group(root, "/bert0.slice", 2, 0, 8 << 30)
    assert read(root, LEAF) == (
        CgroupMemory(LEAF, PCI, 1, 0, None, hard_unlimited=True),
        CgroupMemory("/bert0.slice", PCI, 2, 0, 8 << 30),
    )


def test_groups_above_without_limits_are_left_out(root: Path) -> None:
    group(root, LEAF, 1, 0, 5)
    group(root, "/bert0.slice", 2, 0, "max")
    assert [one.path for one in read(root, LEAF)] == [LEAF]
    # It is the nearest one of a process that is in it.
    assert {one.path for one in read(root, LEAF, "/bert0.slice/other")} == {LEAF, "/bert0.slice"}


def test_a_group_without_files_has_those_of_the_nearest_above(root: Path) -> None:
    group(root, "/bert0.slice", 2, 0, "max")
    assert [one.path for one in read(root, LEAF)] == ["/bert0.slice"]


def test_a_host_without_the_controller_costs_one_look(tmp_path: Path) -> None:
    group(tmp_path, LEAF, 1, 2, 3)
    assert read(tmp_path, LEAF) == ()


def test_nothing_outside_the_mount_is_read(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert unified_path("0::/../../kubepods/pod1\n") is None
    assert unified_path("4:memory:/docker/1\n") is None
    assert unified_path(None) is None
    group(root, "/outside", 1, 2, 3)
    assert memory_partitions(str(root / "elsewhere"), ["0::/../outside\n"]) == ()


@given(
    st.text()
    | st.lists(
        st.sampled_from(
            [*TWO_GPUS.splitlines(), "nvidia/x/vidmem 1", "\n", "max", line(-1), line("1e9")]
        )
    ).map("\n".join)
)
def test_no_file_raises_or_gives_a_value_that_is_not_in_it(text: str) -> None:
    for pci, value in parse_dmem(text).items():
        assert pci in text.lower()
        assert ("max" if value is None else str(value)) in text
