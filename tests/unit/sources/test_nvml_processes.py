"""The three process lists of a GPU, with all that is odd about them."""

from __future__ import annotations

from exporter.sources.nvml.answers import Answers
from exporter.sources.nvml.library import Code, ListedProcess
from exporter.sources.nvml.processes import NOT_AVAILABLE, read_processes
from tests.support.fake_nvml import FakeDevice, FakeNvml

MIB = 1 << 20


def listed(
    library: FakeNvml | None = None, **lists: list[ListedProcess]
) -> list[tuple[int, str, int | None]] | None:
    device = FakeDevice("GPU-0", processes=dict(lists))
    library = library or FakeNvml()
    library.gpus = [device]
    if not library.initialized:
        library.init()
    found = read_processes(library, library.device(0), Answers("GPU 0"))
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


def test_without_the_compute_list_the_memory_tells() -> None:
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
