"""Every NVML function fails with every code: only its own values become absent."""

from collections.abc import Iterator
from dataclasses import fields

import pytest

from mps_exporter.metrics.gpus import BY_QUANTITY
from mps_exporter.observations import GpuObservation, NvmlObservation, Outcome
from mps_exporter.sources.nvml.pynvml_api import GPU_GONE, SESSION_GONE, Code
from testing.fake_nvml import FakeNvml
from testing.nvml_host import gpu, opened

CODES = [*Code, 77]

OWN = {
    "nvmlDeviceGetUtilizationRates": {"gpu_utilization", "memory_utilization"},
    "nvmlDeviceGetMemoryInfo": {"memory_total", "memory_used", "memory_free", "memory_reserved"},
    "nvmlDeviceGetPowerUsage": {"power"},
    "nvmlDeviceGetSamples": {"busy_time", "unobserved_time"},
    "nvmlDeviceGetTemperature": {"temperature"},
}
"""Function -> quantities that depend on it, of a few functions."""

INIT = {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"}
"""Functions without which nothing can be observed, or not this GPU."""


def fake(gpus: int = 1) -> FakeNvml:
    return FakeNvml(*(gpu(f"GPU-{number}") for number in range(gpus)))


def observe_twice(library: FakeNvml) -> NvmlObservation:
    """Return the second observation, with the values that need two samples."""
    with opened(library, serials=True) as nvml:
        nvml.observe()
        library.now += 5
        nvml.tick()
        library.now += 5
        return nvml.observe()


def functions() -> list[str]:
    library = fake()
    observe_twice(library)
    return sorted(library.calls)


def comparable(seen: GpuObservation) -> dict[tuple[str, object], object]:
    """Return all readings and all other fields."""
    readings: dict[tuple[str, object], object] = {
        (one.quantity, one.labels): one.value for one in seen.readings
    }
    others = {one.name for one in fields(seen)} - {"readings", "unread_lists"}
    return {**readings, **{(name, None): getattr(seen, name) for name in others}}


@pytest.fixture(scope="module")
def healthy() -> NvmlObservation:
    return observe_twice(fake())


@pytest.mark.parametrize("function", functions())
def test_a_function_that_fails_costs_only_its_own_values(
    function: str, healthy: NvmlObservation
) -> None:
    own: set[tuple[str, object]] | None = None
    for code in CODES:
        library = fake()
        library.fail(function, code)
        seen = observe_twice(library)
        if seen.outcome is not Outcome.OK:
            assert function in INIT
            assert seen.error
            assert not seen.gpus
            continue
        if function in INIT or code in GPU_GONE:
            assert function not in INIT or code not in SESSION_GONE, "GPUs of no session"
            continue
        lost = set(_differences(healthy, seen))
        if code in SESSION_GONE:
            # NVML is initialized again each time: no session has two samples.
            lost = {one for one in lost if not _needs_two_samples(one[0])}
        elif own is not None:
            assert lost == own, f"{function}: {code}: the lost values depend on the code"
        else:
            own = lost
        if function in OWN:
            assert {quantity for quantity, _ in lost} <= OWN[function], code


def _needs_two_samples(name: str) -> bool:
    return name.endswith(("_activity", "_occupancy", "_time", "_age_seconds")) or "pcie" in name


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


@pytest.mark.parametrize("code", Code)
def test_the_source_recovers_after_all_functions_failed(code: Code) -> None:
    library = fake(2)
    with opened(library) as nvml:
        nvml.observe()
        library.fail("", code)
        library.now += 60
        seen = nvml.observe()
        nvml.tick()
        assert seen.outcome is not Outcome.OK or all(one.uuid for one in seen.gpus)
        library.fail("", None)
        library.now += 120
        again = nvml.observe()
        assert again.outcome is Outcome.OK
        assert [one.uuid for one in again.gpus] == ["GPU-0", "GPU-1"]
