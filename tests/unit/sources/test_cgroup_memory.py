"""Memory limits of control groups that only NVML tells: without the kernel's dmem controller."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.flags import Settings
from mps_exporter.limits_without_a_flag import MAX_CGROUPS_PER_GPU
from mps_exporter.observations import CgroupMemory
from mps_exporter.sources import live_host
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.nvml import NvmlSession
from mps_exporter.sources.nvml.pynvml_api import MEMORY_LIMITS, Code
from testing.fake_nvml import FakeDevice, FakeNvml
from testing.fake_proc import FakeProc
from testing.nvml_host import opened
from testing.waiting import PATIENCE_SECONDS

ROOT = "/sys/fs/cgroup"
GIB = 1 << 30
GROUPS: dict[str, Any] = {
    f"cgroup_memory({ROOT}, /limited)": (7, GIB, 2 * GIB),
    f"cgroup_memory({ROOT}, /open)": (7, 0, None, True),
    f"cgroup_memory({ROOT}, /without)": (0, 0, None, True),
    f"cgroup_memory({ROOT}, /gone)": {"code": Code.NOT_FOUND},
    "nvmlDeviceGetPciInfo()": "00000000:AB:00.0",
}


def library() -> FakeNvml:
    device = FakeDevice("GPU-1")
    device.replies = {**device.replies, **GROUPS}
    made = FakeNvml(device)
    made.functions = {MEMORY_LIMITS}
    return made


def test_groups_with_memory_or_a_limit_are_shown() -> None:
    with opened(library()) as nvml:
        nvml.observe()
        assert nvml.has_memory_limits
        found = nvml.memory_limits(ROOT, ["/gone", "/limited", "/open", "/without", "/never"])
    assert found == (
        CgroupMemory("/limited", "00000000:ab:00.0", 7, GIB, 2 * GIB),
        CgroupMemory("/open", "00000000:ab:00.0", 7, 0, hard_unlimited=True),
    )


def test_no_more_groups_are_asked_for_than_a_bound() -> None:
    made = library()
    with opened(made) as nvml:
        nvml.observe()
        nvml.memory_limits(ROOT, [f"/{number}" for number in range(2 * MAX_CGROUPS_PER_GPU)])
    assert made.calls[MEMORY_LIMITS] == MAX_CGROUPS_PER_GPU


Made = tuple[LiveHost, FakeNvml]


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = library()
    session = partial(NvmlSession, made, driver_directory="/nonexistent")
    monkeypatch.setattr(live_host, "NvmlSession", session)
    proc = FakeProc(tmp_path / "proc")
    for pid, cgroup in ((20, "0::/limited\n"), (21, "0::/limited\n"), (22, "4:memory:/other\n")):
        proc.add(pid, argv=["python"], cgroup=cgroup)
    one = LiveHost(Settings(path_procfs=str(proc.root), path_cgroupfs=ROOT))
    yield one, made
    await one.close()


@pytest.mark.parametrize("newer", [True, False])
async def test_a_driver_that_has_them_is_asked_where_the_kernel_shows_none(
    host: Made, newer: bool
) -> None:
    one, made = host
    made.functions = {MEMORY_LIMITS} if newer else set()
    await one.read_gpus(PATIENCE_SECONDS)
    found = await one.identify([20, 21, 22], PATIENCE_SECONDS)
    assert [memory.path for memory in found.cgroup_memory] == ["/limited"] * newer
    # One call for each group and GPU; none at all of a driver before 615.
    assert made.calls[MEMORY_LIMITS] == newer


async def test_processes_are_told_when_nvml_hangs(
    host: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, made = host
    let_go = threading.Event()
    monkeypatch.setattr(made, "cgroup_memory", lambda *_: let_go.wait())
    monkeypatch.setattr(policy, "MEMORY_LIMITS_TIMEOUT_SECONDS", 0.01)
    await one.read_gpus(PATIENCE_SECONDS)
    found = await one.identify([20], PATIENCE_SECONDS)
    assert (set(found.processes), found.cgroup_memory) == ({20}, ())
    let_go.set()
