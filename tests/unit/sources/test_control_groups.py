"""Control groups: GPU memory and names of containers, in a tree of files like the kernel's."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mps_exporter.mps.cgroups import parse_dmem, unified_path
from mps_exporter.observations import CgroupMemory, ContainerName, ProcfsObservation
from mps_exporter.sources.anonymiser import Anonymiser
from mps_exporter.sources.control_groups import container_names, group_file, memory_partitions
from mps_exporter.sources.recording import make_converter

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


BARE, LIMITED = (2, 0, "max"), (2, 0, 8 << 30)
BARE_LEAF = CgroupMemory(LEAF, PCI, 2, 0, None, hard_unlimited=True)
LIMITED_LEAF = CgroupMemory(LEAF, PCI, 2, 0, 8 << 30)
PARENT = str(Path(LEAF).parent)
BARE_PARENT = CgroupMemory(PARENT, PCI, 2, 0, None, hard_unlimited=True)
LIMITED_PARENT = CgroupMemory(PARENT, PCI, 2, 0, 8 << 30)


@pytest.mark.parametrize(
    ("groups", "paths", "expected"),
    [
        # A limit above a group without a limit is shown with the group.
        ({LEAF: BARE, PARENT: LIMITED}, [LEAF, LEAF], {BARE_LEAF, LIMITED_PARENT}),
        # Groups above without a limit are left out, unless they are the nearest of a process.
        ({LEAF: LIMITED, PARENT: BARE}, [LEAF], {LIMITED_LEAF}),
        ({LEAF: LIMITED, PARENT: BARE}, [LEAF, f"{PARENT}/x"], {LIMITED_LEAF, BARE_PARENT}),
        # A group without files has the memory of the nearest group above.
        ({PARENT: LIMITED}, [LEAF], {LIMITED_PARENT}),
    ],
)
def test_groups_with_limits_are_shown(
    root: Path,
    groups: dict[str, tuple[int, int, int | str]],
    paths: list[str],
    expected: set[CgroupMemory],
) -> None:
    for path, values in groups.items():
        group(root, path, *values)
    open_before = set(Path("/proc/self/fd").iterdir())
    found = read(root, *paths)
    assert set(Path("/proc/self/fd").iterdir()) <= open_before
    assert (len(found), set(found)) == (len(expected), expected)


def test_without_the_controller_nothing_is_shown(root: Path) -> None:
    group(root, LEAF, 1, 2, 3)
    (root / "dmem.capacity").unlink()
    assert read(root, LEAF) == ()


def test_nothing_outside_the_mount_is_read(root: Path) -> None:
    (root / "elsewhere").mkdir()
    for cgroup in ("0::/../../kubepods/pod1\n", "4:memory:/docker/1\n", None):
        assert unified_path(cgroup) is None
    group(root, "/outside", 1, 2, 3)
    assert memory_partitions(str(root / "elsewhere"), ["0::/../outside\n"]) == ()
    (root / "secret").write_text("frozen 1\n")
    (root / "outside" / "cgroup.events").symlink_to(root / "secret")
    assert group_file("0::/outside\n", "cgroup.events", str(root)) == b""


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


# ------------------------------------------------------------------------------ containers

ID, OTHER = "6" * 64, "7" * 64
NAMED = ContainerName(f"containerd://{ID}", "batch", "train", "worker", (4711,))


def link(folder: Path, name: str) -> None:
    """Make a link like the kubelet's, to a log that is not mounted here."""
    folder.mkdir(exist_ok=True)
    (folder / name).symlink_to(f"/var/log/pods/nowhere/{name}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"anna-notebook-0_research_lab-{ID}.log", ("research", "anna-notebook-0", "lab")),
        (f"a.b_n_c-{ID}.log", ("n", "a.b", "c")),
        (f"a_b_c-{OTHER}.log", None),
        (f"a_b-{ID}.log", None),
        (f"A_b_c-{ID}.log", None),
        (f"a_b_c-{ID}.log.gz", None),
        (f'a"_b_c-{ID}.log', None),
    ],
)
def test_a_container_is_named_by_its_link(
    tmp_path: Path, name: str, expected: tuple[str, str, str] | None
) -> None:
    folder, container = str(tmp_path / "containers"), f"cri-o://{ID}"
    assert container_names(folder, {container: [7]}) == ()
    link(tmp_path / "containers", name)
    found = () if expected is None else (ContainerName(container, *expected, (7,)),)
    assert container_names(folder, {container: [7]}) == found


def test_an_anonymised_recording_names_no_pod() -> None:
    observation = ProcfsObservation(at=0.0, containers=(NAMED,))
    assert Anonymiser(make_converter()).unstructure(observation) == {"at": 0.0}
