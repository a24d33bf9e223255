"""A host with made-up GPUs: the source over a FakeNvml, and what it says, easy to ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mps_exporter.observations import GpuObservation, NvmlObservation
from mps_exporter.sources.nvml import Clock, NvmlOptions, NvmlSession
from mps_exporter.sources.nvml.policy import TICK_INTERVAL_SECONDS
from testing.fake_nvml import FakeDevice, FakeNvml
from testing.waiting import PATIENCE_SECONDS

GPM = dict.fromkeys((1, 2, 3, 4, 5, 10, 11, 12, 13), 100.0) | {20: 10.0, 21: 20.0}
"""GPM metrics while busy: percentages, and MiB/s."""
OPTIONS = NvmlOptions(driver_directory="/nonexistent", stop_timeout_seconds=PATIENCE_SECONDS)


def gpu(name: str = "GPU-0", share: float = 0.5) -> FakeDevice:
    """A GPU that is busy for this share of the time."""
    return FakeDevice(name, busy=lambda now: now * share, metrics=GPM)


@contextmanager
def opened(library: FakeNvml, options: NvmlOptions = OPTIONS) -> Iterator[NvmlSession]:
    """The source; when it is closed, nothing of it is left in NVML."""
    nvml = NvmlSession(library, Clock(library.wall, lambda: library.now), options)
    try:
        yield nvml
    finally:
        nvml.close()
    assert library.live_samples == 0
    assert library.initialized == 0


def values(seen: GpuObservation) -> dict[str, float]:
    """Readings by quantity and label values: "clock,sm"."""
    return {
        ",".join((one.quantity, *(value for _, value in one.labels))): one.value
        for one in seen.readings
    }


def only(seen: NvmlObservation) -> dict[str, float]:
    """The readings of the only GPU."""
    (one,) = seen.gpus
    return values(one)


def of(seen: NvmlObservation, uuid: str) -> dict[str, float]:
    """The readings of this GPU, which is there once."""
    (one,) = [found for found in seen.gpus if found.uuid == uuid]
    return values(one)


def pass_time(library: FakeNvml, nvml: NvmlSession, seconds: float) -> None:
    """As the service does: a tick every second."""
    for _ in range(round(seconds / TICK_INTERVAL_SECONDS)):
        library.now += TICK_INTERVAL_SECONDS
        nvml.tick()
