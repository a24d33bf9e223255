"""The three process lists of a GPU, with all that is odd about them."""

from __future__ import annotations

import pytest

from mps_exporter.sources.nvml.processes import CALLS, NOT_AVAILABLE, Listed, ProcessReader
from mps_exporter.sources.nvml.pynvml_api import Code, Device, ListedProcess
from mps_exporter.sources.nvml.query_cache import RETRY_REFUSED_SECONDS, QueryCache
from mps_exporter.sources.nvml.readings import SLOW
from testing.fake_nvml import FakeDevice, FakeNvml

MIB = 1 << 20


def read(library: FakeNvml | None = None, **lists: list[ListedProcess]) -> Listed:
    device = FakeDevice("GPU-0", processes=dict(lists))
    library = library or FakeNvml()
    library.gpus = [device]
    if not library.initialized:
        library.init()
    return ProcessReader(library, library.device(0), QueryCache("GPU 0")).read(library.now)


def listed(
    library: FakeNvml | None = None, **lists: list[ListedProcess]
) -> list[tuple[int, str, int | None]] | None:
    found = read(library, **lists).processes
    return None if found is None else [(one.pid, one.kind, one.used_memory_bytes) for one in found]


def test_a_client_is_in_two_lists_and_its_server_in_one() -> None:
    server, client = ListedProcess(100, 28 * MIB), ListedProcess(200, 500 * MIB)
    assert listed(Compute=[server, client], MPSCompute=[client]) == [
        (100, "compute", 28 * MIB),
        (200, "compute", 500 * MIB),
        (200, "mps", 500 * MIB),
    ]


def test_clients_of_another_gpu_are_not_here() -> None:
    """A server on two GPUs lists its clients on both, with 0 bytes where they are not."""
    here, elsewhere = ListedProcess(200, 500 * MIB), ListedProcess(300, 0)
    assert listed(Compute=[here], MPSCompute=[here, elsewhere]) == [
        (200, "compute", 500 * MIB),
        (200, "mps", 500 * MIB),
    ]


def test_without_the_compute_list_the_memory_decides() -> None:
    library = FakeNvml()
    library.fail("nvmlDeviceGetComputeRunningProcesses", Code.NOT_SUPPORTED)
    rows = [ListedProcess(200, 500 * MIB), ListedProcess(300, 0), ListedProcess(400, None)]
    assert listed(library, MPSCompute=rows) == [(200, "mps", 500 * MIB), (400, "mps", None)]


def test_memory_that_is_not_available_is_not_16_exbibytes() -> None:
    rows = [ListedProcess(1, NOT_AVAILABLE), ListedProcess(2, None)]
    assert listed(Graphics=rows) == [(1, "graphics", None), (2, "graphics", None)]


def test_no_processes_is_not_the_same_as_no_answer() -> None:
    assert listed() == []
    library = FakeNvml()
    for kind in ("Compute", "MPSCompute", "Graphics"):
        library.fail(f"nvmlDeviceGet{kind}RunningProcesses", Code.NO_PERMISSION)
    assert listed(library) is None


@pytest.mark.parametrize(
    "code", [Code.UNKNOWN, Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND, Code.NO_PERMISSION]
)
@pytest.mark.parametrize(("call", "kind"), [(call, kind) for kind, call in CALLS.items()])
def test_a_list_that_could_not_be_read_is_named(call: str, kind: str, code: Code) -> None:
    library = FakeNvml()
    library.fail(f"nvmlDeviceGet{call}RunningProcesses", code)
    row = ListedProcess(7, MIB)
    found = read(library, Compute=[row], MPSCompute=[row], Graphics=[row])
    assert found.unread == (kind,)
    assert {one.kind for one in found.processes or ()} == {"compute", "mps", "graphics"} - {kind}


def test_a_list_that_was_forbidden_is_asked_for_again() -> None:
    """Rarely: rights may be given while the exporter runs."""
    library = FakeNvml(device := FakeDevice("GPU-0"))
    library.init()
    reader = ProcessReader(library, Device(device), QueryCache("GPU 0"))
    library.fail("nvmlDeviceGetComputeRunningProcesses", Code.NO_PERMISSION)

    def unread() -> tuple[str, ...]:
        return reader.read(library.now).unread

    assert unread() == ("compute",)
    library.fail("nvmlDeviceGetComputeRunningProcesses", None)
    library.now += RETRY_REFUSED_SECONDS / 2
    assert unread() == ("compute",)
    library.now += RETRY_REFUSED_SECONDS / 2
    assert unread() == ()


MPS, GRAPHICS = (f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("MPSCompute", "Graphics"))


def test_lists_are_read_again_when_other_processes_are_there() -> None:
    rows = [ListedProcess(100, MIB), ListedProcess(200, MIB)]
    device = FakeDevice("GPU-0", processes={"Compute": rows, "MPSCompute": rows[1:]})
    library = FakeNvml(device)
    library.init()
    reader = ProcessReader(library, Device(device), QueryCache("GPU 0"))

    def kinds() -> list[tuple[int, str, int | None]]:
        library.calls.clear()
        found = reader.read(library.now).processes or ()
        return [(one.pid, one.kind, one.used_memory_bytes) for one in found]

    known = [(100, "compute", MIB), (200, "compute", MIB), (200, "mps", MIB)]
    assert kinds() == known
    assert kinds() == known
    assert MPS not in library.calls
    assert GRAPHICS not in library.calls
    device.processes["Compute"] = [rows[0], ListedProcess(200, 2 * MIB)]
    assert kinds() == [known[0], (200, "compute", 2 * MIB), (200, "mps", 2 * MIB)], "its memory"
    assert MPS not in library.calls
    new = ListedProcess(300, MIB)
    device.processes = {"Compute": [*rows, new], "MPSCompute": [rows[1], new]}
    assert kinds() == [*known[:2], (300, "compute", MIB), known[2], (300, "mps", MIB)]
    device.processes = {"Compute": [new], "MPSCompute": [new]}
    assert kinds() == [(300, "compute", MIB), (300, "mps", MIB)]
    library.now += SLOW
    kinds()
    assert library.calls[MPS] == library.calls[GRAPHICS] == 1


def test_a_list_that_failed_is_asked_for_at_the_next_reading() -> None:
    row = ListedProcess(7, MIB)
    device = FakeDevice("GPU-0", processes={"Compute": [row], "MPSCompute": [row]})
    library = FakeNvml(device)
    library.init()
    reader = ProcessReader(library, Device(device), QueryCache("GPU 0"))
    library.fail(MPS, Code.UNKNOWN)
    assert reader.read(library.now).unread == ("mps",)
    library.fail(MPS, None)
    assert reader.read(library.now).unread == ()


def test_lists_are_renewed_between_collections() -> None:
    device = FakeDevice("GPU-0", processes={"Compute": [ListedProcess(7, MIB)]})
    library = FakeNvml(device)
    library.init()
    reader = ProcessReader(library, Device(device), QueryCache("GPU 0"))
    reader.refresh(library.now, 1.0)
    assert not library.calls[MPS], "nobody collects"
    reader.read(library.now)
    for _ in range(20):
        library.now += 1
        reader.refresh(library.now, 1.2)
        library.calls.clear()
        reader.read(library.now)
        assert not library.calls[MPS]
