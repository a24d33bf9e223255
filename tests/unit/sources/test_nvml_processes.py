"""The three process lists of a GPU, with their peculiarities."""

import pytest

from mps_exporter.limits_without_a_flag import REFUSED_RETRY_INTERVAL_SECONDS, SLOW
from mps_exporter.sources.nvml.device import CALLS, ProcessReader
from mps_exporter.sources.nvml.pynvml_api import Code, Device, DeviceQueries, Listed
from testing.fake_nvml import FakeDevice, FakeNvml

MIB = 1 << 20
Shown = list[tuple[int, str, int | None]]
MPS, GRAPHICS = (f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("MPSCompute", "Graphics"))


class Lists:
    """The process lists of a GPU, and a reader of them."""

    def __init__(self, **lists: Listed) -> None:
        self.device = FakeDevice("GPU-0", processes=dict(lists))
        self.library = FakeNvml(self.device)
        self.library.call("nvmlInit")
        self.reader = ProcessReader(DeviceQueries(self.library, Device(self.device), "GPU 0"))

    def read(self) -> Shown:
        self.library.calls.clear()
        found, _ = self.reader.read(self.library.now)
        assert found is not None
        return [(one.pid, one.kind, one.used_memory_bytes) for one in found]

    def unread(self) -> tuple[str, ...]:
        return self.reader.read(self.library.now)[1]

    def fail(self, kind: str, code: Code | None) -> None:
        self.library.fail(f"nvmlDeviceGet{kind}RunningProcesses", code)


SERVER: Listed = {100: 28 * MIB}
CLIENT: Listed = {200: 500 * MIB}
ELSEWHERE: Listed = {300: 0}


def test_clients_are_in_two_lists_and_clients_of_another_gpu_in_none() -> None:
    lists = Lists(Compute=SERVER | CLIENT, MPSCompute=CLIENT | ELSEWHERE)
    assert lists.read() == [
        (100, "compute", 28 * MIB),
        (200, "compute", 500 * MIB),
        (200, "mps", 500 * MIB),
    ]


def test_without_the_compute_list_the_memory_decides() -> None:
    lists = Lists(MPSCompute=CLIENT | ELSEWHERE | {400: None})
    lists.fail("Compute", Code.NOT_SUPPORTED)
    assert lists.read() == [(200, "mps", 500 * MIB), (400, "mps", None)]


def test_empty_lists_differ_from_unreadable_lists() -> None:
    lists = Lists()
    assert lists.reader.read(lists.library.now) == ((), ())
    for kind in CALLS.values():
        lists.fail(kind, Code.UNKNOWN)
    lists.library.now += SLOW
    assert lists.reader.read(lists.library.now) == (None, ())


@pytest.mark.parametrize("code", [Code.UNKNOWN, Code.NOT_SUPPORTED, Code.NO_PERMISSION])
@pytest.mark.parametrize(("kind", "call"), CALLS.items())
def test_an_unreadable_list_is_named_and_read_again_when_readable(
    call: str, kind: str, code: Code
) -> None:
    lists = Lists(Compute={7: MIB}, MPSCompute={7: MIB}, Graphics={7: MIB})
    lists.fail(call, code)
    found, unread = lists.reader.read(lists.library.now)
    assert unread == (kind,)
    assert {one.kind for one in found or ()} == CALLS.keys() - {kind}
    lists.fail(call, None)
    lists.library.now += REFUSED_RETRY_INTERVAL_SECONDS / 2
    assert lists.unread() == (() if code == Code.UNKNOWN else (kind,))
    lists.library.now += REFUSED_RETRY_INTERVAL_SECONDS / 2
    assert lists.unread() == ((kind,) if code == Code.NOT_SUPPORTED else ())


def test_rarely_read_lists_are_read_again_when_the_compute_list_changes() -> None:
    lists = Lists(Compute=SERVER | CLIENT, MPSCompute=CLIENT)
    lists.read()
    new: Listed = {300: MIB}
    lists.device.processes = {"Compute": SERVER | CLIENT | new, "MPSCompute": CLIENT | new}
    assert lists.read()[2:] == [(300, "compute", MIB), (200, "mps", 500 * MIB), (300, "mps", MIB)]
    lists.library.now += SLOW
    lists.read()
    assert lists.library.calls[MPS] == lists.library.calls[GRAPHICS] == 1
