"""Time and links that cannot be observed: values are absent, and counters count the gap."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mps_exporter.limits_without_a_flag import (
    LOST_RETRY_INTERVAL_SECONDS,
    REFUSED_RETRY_INTERVAL_SECONDS,
    TICK_INTERVAL_SECONDS,
)
from mps_exporter.sources.nvml import NvmlSession
from mps_exporter.sources.nvml.pynvml_api import Code, NvmlError
from testing.fake_nvml import FakeNvml, recorded
from testing.nvml_host import COUNTERS, GPM, gpu, of, only, opened, pass_time


def measured(names: Mapping[str, float]) -> set[str]:
    """Return the readings of accumulators: seconds, shares of time, PCIe bytes."""
    parts = ("busy", "_active_", "occupancy", "unobserved", "pcie_receive", "pcie_transmit")
    return {name for name in names if any(part in name for part in parts) and "clock" not in name}


def warmed(library: FakeNvml, nvml: NvmlSession) -> dict[str, float]:
    nvml.observe()
    pass_time(library, nvml, 15)
    return {} if len(library.gpus) > 1 else only(nvml.observe())


# A healthy GPU next to a lost GPU


def test_a_lost_gpu_costs_the_others_a_tick_for_each_retry() -> None:
    lost, well = gpu("GPU-lost"), gpu("GPU-well", share=1.0)
    library = FakeNvml(lost, well)
    with opened(library) as nvml:
        warmed(library, nvml)
        before, began = of(nvml.observe(), "GPU-well"), library.now
        lost.gone = Code.GPU_IS_LOST
        seen = before
        while library.now < began + 3600:
            pass_time(library, nvml, 15)
            library.now += 0.3
            seen = of(nvml.observe(), "GPU-well")
            assert seen.keys() == before.keys()
        took, openings = library.now - began, library.calls["nvmlInit"]
        for counter, gap in COUNTERS.items():
            missed = seen[gap] - before[gap]
            assert seen[counter] - before[counter] + missed == pytest.approx(took, abs=0.5)
            assert missed <= 2 * openings
        assert openings <= 3600 / LOST_RETRY_INTERVAL_SECONDS + 1


def test_a_gpu_is_never_both_present_and_lost_when_indexes_shift() -> None:
    first, second, third = gpu("GPU-a"), gpu("GPU-b"), gpu("GPU-c")
    library = FakeNvml(first, second, third)
    with opened(library) as nvml:
        nvml.observe()
        third.gone = Code.GPU_IS_LOST
        library.gpus = [second, third]
        nvml.observe()
        library.now += LOST_RETRY_INTERVAL_SECONDS + 1
        nvml.observe()
        nvml.tick()
        for _ in range(2):
            up = sorted((one.uuid, one.readings[0].value) for one in nvml.observe().gpus)
            assert up == [("GPU-a", 0), ("GPU-b", 1), ("GPU-c", 0)]
            library.now += 5


# Accumulators without samples


@pytest.mark.parametrize("code", [Code.NOT_SUPPORTED, Code.UNKNOWN, Code.NO_PERMISSION])
def test_counters_that_cannot_be_counted_are_absent(code: Code) -> None:
    library = FakeNvml(gpu(share=1.0))
    sampling = ("nvmlDeviceGetSamples", "nvmlGpmSampleGet")
    with opened(library) as nvml:
        before, began = warmed(library, nvml), library.now
        assert measured(before) >= COUNTERS.keys()
        for function in sampling:
            library.fail(function, code)
        pass_time(library, nvml, 60)
        assert not measured(only(nvml.observe()))
        for function in sampling:
            library.fail(function, None)
        pass_time(library, nvml, REFUSED_RETRY_INTERVAL_SECONDS)
        after, took = only(nvml.observe()), library.now - began
        if code == Code.NOT_SUPPORTED:
            assert not measured(after)
            return
        assert measured(after) == measured(before)
        for counter, gap in COUNTERS.items():
            missed = after[gap] - before[gap]
            counted = after[counter] - before[counter]  # as of the last tick
            assert counted + missed == pytest.approx(took, abs=TICK_INTERVAL_SECONDS + 0.5)


def test_an_empty_buffer_is_not_an_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(gpu(share=1.0))
    with opened(library) as nvml:
        warmed(library, nvml)
        monkeypatch.setattr(library, "samples", lambda *_: [])
        pass_time(library, nvml, 20)
        assert "busy_time" not in only(nvml.observe())


# Unexpected replies


@pytest.mark.parametrize("rate", [math.inf, math.nan, -math.inf])
def test_a_gpm_metric_that_is_not_a_number_costs_only_its_readings(rate: float) -> None:
    device = gpu(share=1.0)
    library = FakeNvml(device)
    name = "pcie_transmit_bytes"
    with opened(library) as nvml:
        healthy = warmed(library, nvml)
        device.metrics = {**GPM, 3: rate, 4: 100.02, 20: rate}
        library.now += 5
        seen = only(nvml.observe())
        assert healthy.keys() - seen.keys() == {name, "sm_occupancy"}
        assert seen["integer_activity"] == 1, "a rounding error is cut"
        device.metrics = GPM
        library.now += 5
        assert only(nvml.observe())[name] >= healthy[name]


@pytest.mark.parametrize("method", ["gpm_metrics", "samples", "memory", "fields"])
def test_a_defect_costs_readings_and_not_the_source(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defective(*_: object) -> Any:
        raise OverflowError("unforeseen")

    library = FakeNvml(gpu())
    with opened(library) as nvml:
        warmed(library, nvml)
        with monkeypatch.context() as patch:
            patch.setattr(library, method, defective)
            pass_time(library, nvml, 10)
            assert "power" in only(nvml.observe())
        output = [one.getMessage() for one in caplog.records]
        assert any("a defect" in text and "unforeseen" in text for text in output)
        assert len(output) == len(set(output)), "once each"
        pass_time(library, nvml, 10)
        assert measured(only(nvml.observe())) >= COUNTERS.keys()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_field_that_is_no_number_ends_no_tick_and_no_observation(value: float) -> None:
    device = gpu()
    library = FakeNvml(device)
    with opened(library) as nvml:
        healthy = warmed(library, nvml)
        fields = device.replies["fields"]
        defective = {"code": 0, "value": value}
        device.replies = {**device.replies, "fields": {**fields, "197:0": defective}}
        pass_time(library, nvml, 10)
        assert {"power", "busy_time"} <= only(nvml.observe()).keys() < healthy.keys()
        device.replies = {**device.replies, "fields": fields}
        pass_time(library, nvml, 10)
        assert only(nvml.observe()).keys() == healthy.keys()


# Sums over links


LINKS = {f"161:{link}": {"code": 0, "value": 100} for link in range(4)} | {
    f"165:{link}": {"code": 0, "value": 1} for link in range(4)
}
FAILED = {"code": int(Code.UNKNOWN)}


def test_a_link_without_a_reply_lowers_no_sum() -> None:
    device = gpu()
    library = FakeNvml(device)
    known = {name: one for name, one in recorded()["fields"].items() if name != "52:0"} | LINKS
    known["163:0"] = {"code": 0, "value": 8}

    def reply(seconds: float, **changed: Mapping[str, int]) -> dict[str, float]:
        """Return the readings some time after a change of the links' replies."""
        device.replies = {**device.replies, "fields": known | changed}
        pass_time(library, nvml, seconds)
        return only(nvml.observe())

    errors, links, crc = "nvlink_errors,replay", "nvlink_links,active", "nvlink_errors,crc"
    with opened(library) as nvml:
        nvml.observe()
        for seconds in (61, 2):
            seen = reply(seconds)
            assert (seen[errors], seen[links]) == (400, 4), "without the delay of a minute"
            seen = reply(61, **{"161:3": FAILED, "165:3": FAILED})
            assert not seen.keys() & {errors, links}
            assert seen[crc] == 8, "other errors have other links"
        library.fail("nvmlDeviceGetPowerUsage", Code.UNINITIALIZED)
        reply(61, **{"161:3": FAILED})
        library.fail("nvmlDeviceGetPowerUsage", None)
        assert errors not in reply(61, **{"161:3": FAILED}), "nor in a new session"


# Refusals


def test_a_batch_of_fields_that_is_refused_for_one_field_costs_only_this_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = FakeNvml(gpu())
    healthy, batches = library.fields, list[Sequence[tuple[int, int]]]()

    def choking(device: Any, fields: Sequence[tuple[int, int]]) -> Any:
        batches.append(fields)
        if (82, 0) in fields:
            raise NvmlError(Code.INVALID_ARGUMENT, "nvmlDeviceGetFieldValues")
        return healthy(device, fields)

    monkeypatch.setattr(library, "fields", choking)
    memory, other = "temperature,memory", "clock_event_time,reliability"
    with opened(library) as nvml:
        for _ in range(3):
            seen = only(nvml.observe())
            assert memory not in seen
            assert other in seen
            library.now += REFUSED_RETRY_INTERVAL_SECONDS / 2
            batches.clear()
            nvml.observe()
            assert not any((82, 0) in batch for batch in batches)
            library.now += REFUSED_RETRY_INTERVAL_SECONDS / 2
        monkeypatch.setattr(library, "fields", healthy)
        assert memory in only(nvml.observe())
