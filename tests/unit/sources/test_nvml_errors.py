"""Every NVML function fails with every code, and everything that is not its own stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mps_exporter.metrics.gpus import BY_QUANTITY
from mps_exporter.observations import GpuObservation, NvmlObservation, Outcome
from mps_exporter.sources.nvml import Clock, NvmlOptions, NvmlSession
from mps_exporter.sources.nvml.pynvml_api import GPU_GONE, SESSION_GONE, Code
from testing.fake_nvml import FakeDevice, FakeNvml

CODES = [*Code, 77]
METRICS = dict.fromkeys((1, 2, 3, 4, 5, 10, 11, 12, 13, 20, 21), 40.0)

# What goes when a function fails: readings by a part of their name, and fields of the record.
OWN = {
    "nvmlDeviceGetUtilizationRates": {"gpu_utilization", "memory_utilization"},
    "nvmlDeviceGetMemoryInfo": {"memory_total", "memory_used", "memory_free", "memory_reserved"},
    "nvmlDeviceGetPowerUsage": {"power"},
    "nvmlDeviceGetSamples": {"busy_time", "unobserved_time"},
    "nvmlDeviceGetTemperature": {"temperature"},
}
"""A few by hand; for the others, that nothing else changes is what the test says."""

INIT = {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"}
"""Without these there is nothing to observe, or not this GPU."""


def fake(gpus: int = 1) -> FakeNvml:
    return FakeNvml(
        *(FakeDevice(f"GPU-{n}", busy=lambda t: t / 2, metrics=METRICS) for n in range(gpus))
    )


def source(library: FakeNvml, *, events: bool = True) -> NvmlSession:
    clock = Clock(lambda: library.now, lambda: library.now)
    options = NvmlOptions(serials=True, xid_events=events, driver_directory="/nonexistent")
    return NvmlSession(library, clock, options)


def observe_twice(library: FakeNvml, *, events: bool = True) -> NvmlObservation:
    """The second has the values that need two looks."""
    nvml = source(library, events=events)
    try:
        nvml.observe()
        library.now += 5
        nvml.tick()
        library.now += 5
        return nvml.observe()
    finally:
        nvml.close()


def functions() -> list[str]:
    library = fake()
    observe_twice(library)
    return sorted(library.calls)


def names(gpu: GpuObservation) -> set[str]:
    return {reading.quantity for reading in gpu.readings}


def comparable(gpu: GpuObservation) -> dict[tuple[str, object], object]:
    """All that is known, one by one."""
    readings: dict[tuple[str, object], object] = {
        (one.quantity, one.labels): one.value for one in gpu.readings
    }
    fields: dict[tuple[str, object], object] = {
        (name, None): getattr(gpu, name)
        for name in (
            "name",
            "pci_bus_id",
            "architecture",
            "compute_capability",
            "sm_count",
            "vbios_version",
            "serial",
            "compute_mode",
            "processes",
            "lost",
        )
    }
    return {**readings, **fields}


@pytest.fixture(scope="module")
def healthy() -> dict[bool, NvmlObservation]:
    return {events: observe_twice(fake(), events=events) for events in (False, True)}


@pytest.mark.parametrize("function", functions())
def test_a_function_that_fails_costs_only_its_own(
    function: str, healthy: dict[bool, NvmlObservation]
) -> None:
    events = "Event" in function  # a thread for each of a thousand is slow
    own: set[tuple[str, object]] | None = None
    for code in CODES:
        library = fake()
        library.fail(function, code)
        seen = observe_twice(library, events=events)
        if seen.outcome is not Outcome.OK:
            assert function in INIT
            assert seen.error
            assert not seen.gpus
            continue
        if function in INIT or code in GPU_GONE:
            continue
        lost = set(_differences(healthy[events], seen))
        if code in SESSION_GONE:
            # NVML was initialized again and again: no two looks in one session.
            lost = {one for one in lost if not _needs_two_looks(one[0])}
        elif own is not None:
            assert lost == own, f"{function}: {code}: what goes depends on the code"
        else:
            own = lost
        if function in OWN:
            assert {quantity for quantity, _ in lost} <= OWN[function], code


def _needs_two_looks(name: str) -> bool:
    return name.endswith(("_activity", "_occupancy", "_time")) or "pcie" in name


def _differences(one: NvmlObservation, other: NvmlObservation) -> Iterator[tuple[str, object]]:
    assert len(one.gpus) == len(other.gpus)
    for left, right in zip(one.gpus, other.gpus, strict=True):
        assert left.uuid == right.uuid
        known, found = comparable(left), comparable(right)
        assert found.keys() <= known.keys()
        for name, value in known.items():
            if found.get(name) != value:
                metric = BY_QUANTITY.get(name[0])
                counted = name[0] == "processes" if metric is None else metric.kind == "counter"
                assert counted or found.get(name) is None, f"{name}: {found.get(name)}"
                yield name


@pytest.mark.parametrize("code", sorted(GPU_GONE))
def test_a_gpu_that_is_gone_leaves_the_others_alone(code: Code) -> None:
    healthy = observe_twice(fake(2))
    library = fake(2)
    nvml = source(library)
    nvml.observe()
    library.now += 5
    nvml.tick()
    library.now += 5
    library.gpus[0].gone = code
    gone, well = nvml.observe().gpus
    assert gone.lost
    assert gone.uuid == "GPU-0"
    assert gone.name == "NVIDIA H200"
    assert names(gone) == {"up"}
    assert gone.readings[0].value == 0
    assert well == healthy.gpus[1]
    library.gpus[0].gone = None
    library.now += 5
    back, _ = nvml.observe().gpus
    assert not back.lost
    assert names(back) >= {"busy_time", "power"}
    nvml.close()
    assert library.live_samples == 0
    assert library.initialized == 0


def test_everything_failing_in_every_way_is_survived() -> None:
    for code in Code:
        library = fake(2)
        nvml = source(library)
        nvml.observe()
        library.fail("", code)
        library.now += 60
        seen = nvml.observe()
        nvml.tick()
        assert seen.outcome is not Outcome.OK or all(gpu.uuid for gpu in seen.gpus)
        library.fail("", None)
        library.now += 120
        again = nvml.observe()
        assert again.outcome is Outcome.OK
        assert [gpu.uuid for gpu in again.gpus] == ["GPU-0", "GPU-1"]
        nvml.close()
