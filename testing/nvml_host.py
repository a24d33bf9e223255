"""The NVML source over a FakeNvml, and short access to its readings."""

from collections.abc import Iterator
from contextlib import contextmanager

from mps_exporter.limits_without_a_flag import TICK_INTERVAL_SECONDS
from mps_exporter.observations import GpuObservation, NvmlObservation
from mps_exporter.sources.nvml import NvmlSession
from testing.fake_nvml import FakeDevice, FakeNvml

GPM = dict.fromkeys((1, 2, 3, 4, 5, 10, 11, 12, 13), 100.0) | {20: 10.0, 21: 20.0}
"""GPM metrics while busy: percentages, and MiB/s."""
COUNTERS = {"busy_time": "unobserved_time,busy", "sm_active_time": "unobserved_time,active"}
"""Counter of seconds -> counter of its gaps."""


def gpu(name: str = "GPU-0", share: float = 0.5) -> FakeDevice:
    """Return a GPU that is busy for this share of the time."""
    return FakeDevice(name, busy=lambda now: now * share, metrics=GPM)


@contextmanager
def opened(
    library: FakeNvml, *, serials: bool = False, driver_directory: str = "/nonexistent"
) -> Iterator[NvmlSession]:
    """Yield the source; check that it leaves nothing behind in NVML."""
    nvml = NvmlSession(
        library,
        serials=serials,
        driver_directory=driver_directory,
        now=library.wall,
        clock=lambda: library.now,
    )
    try:
        yield nvml
    finally:
        nvml.close()
    assert library.live_samples == 0
    assert library.initialized == 0


def values(seen: GpuObservation) -> dict[str, float]:
    """Return the readings by quantity and label values: "clock,sm"."""
    return {
        ",".join((one.quantity, *(value for _, value in one.labels))): one.value
        for one in seen.readings
    }


def only(seen: NvmlObservation) -> dict[str, float]:
    """Return the readings of the only GPU."""
    (one,) = seen.gpus
    return values(one)


def of(seen: NvmlObservation, uuid: str) -> dict[str, float]:
    """Return the readings of a GPU that is observed exactly once."""
    (one,) = [found for found in seen.gpus if found.uuid == uuid]
    return values(one)


def pass_time(library: FakeNvml, nvml: NvmlSession, seconds: float) -> None:
    """Advance the clock with a tick every second, as the exporter does."""
    for _ in range(round(seconds / TICK_INTERVAL_SECONDS)):
        library.now += TICK_INTERVAL_SECONDS
        nvml.tick()
