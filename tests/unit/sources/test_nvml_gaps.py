"""What is not observed is not shown, and never looks like what was: counters over holes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mps_exporter.sources.nvml import NvmlSession
from mps_exporter.sources.nvml.policy import (
    MAX_LOST_RETRY_SECONDS,
    MIN_LOST_RETRY_SECONDS,
    REFUSED_RETRY_INTERVAL_SECONDS,
    TICK_INTERVAL_SECONDS,
)
from mps_exporter.sources.nvml.pynvml_api import Code, QueryCache
from testing.fake_nvml import FakeDevice, FakeNvml, recorded
from testing.nvml_host import GPM, OPTIONS, gpu, of, only, opened, pass_time
from testing.waiting import wait_for

QUIET = replace(OPTIONS, xid_events=False)
LAG = TICK_INTERVAL_SECONDS + 0.5
"""A collection shows what the last tick sampled."""
COUNTERS = {"busy_time": "busy", "sm_active_time": "active"}
"""Counter of seconds -> counter of its holes."""


def hole(values: Mapping[str, float], counter: str) -> float:
    return values[f"unobserved_time,{COUNTERS[counter]}"]


def openings(library: FakeNvml) -> int:
    return library.calls["nvmlInit"]


def measured(names: Mapping[str, float]) -> set[str]:
    """What meters measure: seconds, shares of them, and PCIe bytes."""
    parts = ("busy", "_active_", "occupancy", "unobserved", "pcie_receive", "pcie_transmit")
    return {name for name in names if any(part in name for part in parts) and "clock" not in name}


def warmed(library: FakeNvml, nvml: NvmlSession) -> None:
    nvml.observe()
    pass_time(library, nvml, 15)


# A healthy GPU beside a lost one


@pytest.mark.parametrize("scrape", [15.3, 60.0])
def test_a_lost_gpu_costs_its_neighbour_nothing(scrape: float) -> None:
    lost, well = gpu("GPU-lost"), gpu("GPU-well", share=1.0)
    library = FakeNvml(lost, well)
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        before, began = of(nvml.observe(), "GPU-well"), library.now
        lost.gone = Code.GPU_IS_LOST
        seen = before
        while library.now < began + 3600:
            pass_time(library, nvml, scrape - scrape % 1)
            library.now += scrape % 1
            seen = of(nvml.observe(), "GPU-well")
            assert seen.keys() == before.keys()
        took = library.now - began
        for counter in COUNTERS:
            missed = hole(seen, counter) - hole(before, counter)
            assert seen[counter] - before[counter] + missed == pytest.approx(took, abs=0.5)
            assert missed <= 2 * openings(library), "a tick or two each time"
        assert openings(library) <= 10, "more and more rarely"


def test_nvml_is_reopened_between_collections() -> None:
    lost, well = gpu("GPU-lost"), gpu("GPU-well")
    library = FakeNvml(lost, well)
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        lost.gone = Code.GPU_IS_LOST
        nvml.observe()
        for _ in range(10):
            pass_time(library, nvml, 60)
            library.calls.clear()
            seen = of(nvml.observe(), "GPU-well")
            assert "sm_activity" in seen
            assert openings(library) == 0
        nvml.tick()
        library.calls.clear()
        for _ in range(2):
            pass_time(library, nvml, MAX_LOST_RETRY_SECONDS)
            nvml.observe()
            assert openings(library) == 0, "not while the next collection may be near"
            pass_time(library, nvml, 1)
            assert openings(library) == 1
            library.calls.clear()


def test_nvml_is_reopened_without_ticks() -> None:
    lost = gpu("GPU-lost")
    library = FakeNvml(lost)
    with opened(library, QUIET) as nvml:
        nvml.observe()
        lost.gone = Code.GPU_IS_LOST
        nvml.observe()
        library.now += MIN_LOST_RETRY_SECONDS
        nvml.observe()
        assert openings(library) == 2


def test_mig_instances_of_a_neighbour_are_there_at_once() -> None:
    lost, divided = gpu("GPU-lost"), gpu("GPU-divided")
    divided.answers = {
        **divided.answers,
        "nvmlDeviceGetMigMode()": [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount()": 7,
    }
    answers = {"nvmlDeviceGetGpuInstanceId()": 7, "nvmlDeviceGetComputeInstanceId()": 0}
    divided.instances = {0: FakeDevice("MIG-a", answers, busy=lambda now: now, metrics=GPM)}
    library = FakeNvml(lost, divided)
    name = "sm_active_time"
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        before = of(nvml.observe(), "MIG-a")
        began = library.now
        lost.gone = Code.GPU_IS_LOST
        nvml.observe()
        for _ in range(8):
            pass_time(library, nvml, 15)
            nvml.observe()
        assert openings(library) == 2
        after = of(nvml.observe(), "MIG-a")
        assert after.keys() == before.keys()
        missed = hole(after, name) - hole(before, name)
        assert missed <= 6
        assert after[name] - before[name] + missed == pytest.approx(library.now - began)


def test_a_gpu_is_never_both_there_and_lost() -> None:
    """Indexes shift when a GPU is gone: one that cannot be opened now was another one before."""
    first, second, third = gpu("GPU-a"), gpu("GPU-b"), gpu("GPU-c")
    library = FakeNvml(first, second, third)
    with opened(library, QUIET) as nvml:
        nvml.observe()
        third.gone = Code.GPU_IS_LOST
        library.gpus = [second, third]
        nvml.observe()
        library.now += MIN_LOST_RETRY_SECONDS + 1
        for _ in range(2):
            up = {one.uuid: one.readings[0].value for one in nvml.observe().gpus}
            seen = [one.uuid for one in nvml.observe().gpus]
            assert sorted(seen) == ["GPU-a", "GPU-b", "GPU-c"]
            assert up == {"GPU-a": 0, "GPU-b": 1, "GPU-c": 0}
            library.now += 5


def test_a_gpu_without_a_known_uuid_is_lost_without_one() -> None:
    library = FakeNvml(gpu("GPU-a"), gpu("GPU-b"))
    library.gpus[1].gone = Code.RESET_REQUIRED
    with opened(library, QUIET) as nvml:
        seen = nvml.observe().gpus
        assert [(one.index, one.uuid, one.lost) for one in seen] == [
            (0, "GPU-a", False),
            (1, "", True),
        ]


# What can no longer be read


@pytest.mark.parametrize("code", [Code.NOT_SUPPORTED, Code.UNKNOWN, Code.NO_PERMISSION])
def test_counters_that_are_not_counted_are_absent(code: Code) -> None:
    device = gpu(share=1.0)
    library = FakeNvml(device)
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        before, began = only(nvml.observe()), library.now
        assert measured(before) >= COUNTERS.keys()
        library.fail("nvmlDeviceGetSamples", code)
        library.fail("nvmlGpmSampleGet", code)
        pass_time(library, nvml, 60)
        assert not measured(only(nvml.observe()))
        library.fail("nvmlDeviceGetSamples", None)
        library.fail("nvmlGpmSampleGet", None)
        pass_time(library, nvml, REFUSED_RETRY_INTERVAL_SECONDS)
        after, took = only(nvml.observe()), library.now - began
        if code == Code.NOT_SUPPORTED:
            assert not measured(after)
            return
        assert measured(after) == measured(before)
        for counter in COUNTERS:
            missed = hole(after, counter) - hole(before, counter)
            assert after[counter] - before[counter] + missed == pytest.approx(took, abs=LAG)


def test_a_gpu_that_is_divided_has_no_ratios_of_before() -> None:
    device = gpu(share=1.0)
    library = FakeNvml(device)
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        before, began = only(nvml.observe()), library.now
        assert before["sm_activity"] == 1
        whole = device.answers
        device.answers = {
            **whole,
            "nvmlDeviceGetMigMode()": [1, 1],
            "nvmlDeviceGetMaxMigDeviceCount()": 0,
        }
        library.fail("nvmlGpmQueryDeviceSupport", Code.NOT_SUPPORTED)
        library.fail("nvmlDeviceGetSamples", Code.NOT_SUPPORTED)
        pass_time(library, nvml, 120)
        assert not measured(only(nvml.observe()))
        device.answers = whole
        library.fail("nvmlGpmQueryDeviceSupport", None)
        library.fail("nvmlDeviceGetSamples", None)
        pass_time(library, nvml, 60)
        after, took = only(nvml.observe()), library.now - began
        for counter in COUNTERS:
            missed = hole(after, counter) - hole(before, counter)
            assert missed >= 100
            assert after[counter] - before[counter] + missed == pytest.approx(took, abs=0.5)


def test_one_failed_look_loses_nothing() -> None:
    library = FakeNvml(gpu(share=1.0))
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        before, began = only(nvml.observe()), library.now
        library.fail("", Code.UNKNOWN)
        pass_time(library, nvml, 3)
        library.fail("", None)
        pass_time(library, nvml, 3)
        after, took = only(nvml.observe()), library.now - began
        for counter in COUNTERS:
            assert after[counter] - before[counter] == pytest.approx(took, abs=LAG)
            assert hole(after, counter) == hole(before, counter)


def test_an_empty_buffer_is_no_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(gpu(share=1.0))
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        monkeypatch.setattr(library, "samples", lambda *_: [])
        pass_time(library, nvml, 20)
        assert "busy_time" not in only(nvml.observe())


# Answers that nobody foresaw


@pytest.mark.parametrize("rate", [math.inf, math.nan, -math.inf])
def test_a_pcie_rate_that_is_no_number_costs_only_itself(rate: float) -> None:
    device = gpu(share=1.0)
    library = FakeNvml(device)
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        healthy = only(nvml.observe())
        device.metrics = {**GPM, 20: rate}
        library.now += 5
        seen = only(nvml.observe())
        assert healthy.keys() - seen.keys() == {"pcie_transmit_bytes"}
        device.metrics = GPM
        library.now += 5
        after = only(nvml.observe())
        name = "pcie_transmit_bytes"
        assert after[name] >= healthy[name]


@pytest.mark.parametrize("method", ["gpm_metrics", "samples", "gpm_take", "numbers", "fields"])
@pytest.mark.parametrize("error", [OverflowError, TypeError, IndexError])
def test_a_defect_costs_readings_and_not_the_source(
    method: str,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def defective(*_: object) -> Any:
        raise error("unforeseen")

    library = FakeNvml(gpu())
    with opened(library, QUIET) as nvml:
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


def test_a_defect_is_logged_also_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    answers = QueryCache("GPU 0")
    answers.record_refusal("asked", Code.UNKNOWN, 0.0)
    for now in (1.0, 2.0):
        assert answers.get("asked", lambda: int(math.inf), now) is None
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert answers.get("asked", lambda: 7, 3.0) == 7


# Sums over links


def with_links(device: FakeDevice, **fields: Mapping[str, int]) -> None:
    known = {name: one for name, one in recorded()["fields"].items() if name != "52:0"}
    given = {name.replace("_", ":").strip(":"): one for name, one in fields.items()}
    device.answers = {**device.answers, "fields": {**known, **given}}


LINKS = {f"_161_{link}": {"code": 0, "value": 100} for link in range(4)} | {
    f"_165_{link}": {"code": 0, "value": 1} for link in range(4)
}
FAILED = {"code": int(Code.UNKNOWN)}


def test_a_link_that_does_not_answer_lowers_no_sum() -> None:
    device = gpu()
    library = FakeNvml(device)
    with_links(device, **LINKS)
    errors, links = "nvlink_errors,replay", "nvlink_links,active"
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        seen = only(nvml.observe())
        assert (seen[errors], seen[links]) == (400, 4)
        with_links(device, **LINKS, _163_0={"code": 0, "value": 7})
        pass_time(library, nvml, 61)
        with_links(
            device, **{**LINKS, "_161_3": FAILED, "_165_3": FAILED}, _163_0={"code": 0, "value": 8}
        )
        pass_time(library, nvml, 61)
        seen = only(nvml.observe())
        assert errors not in seen
        assert links not in seen
        assert seen["nvlink_errors,crc"] == 8, "another kind has its own links"
        with_links(device, **LINKS)
        pass_time(library, nvml, 2)
        seen = only(nvml.observe())
        assert (seen[errors], seen[links]) == (400, 4), "asked again at once, not a minute later"


def test_a_new_session_lowers_no_sum_either() -> None:
    device = gpu()
    library = FakeNvml(device)
    with_links(device, **LINKS)
    errors = "nvlink_errors,replay"
    with opened(library, QUIET) as nvml:
        warmed(library, nvml)
        assert only(nvml.observe())[errors] == 400
        with_links(device, **{**LINKS, "_161_3": FAILED})
        library.fail("nvmlDeviceGetPowerUsage", Code.UNINITIALIZED)
        nvml.observe()
        library.fail("nvmlDeviceGetPowerUsage", None)
        pass_time(library, nvml, 5)
        assert errors not in only(nvml.observe())


# Xids that nobody watches


def test_xid_counters_exist_only_while_watched() -> None:
    device = gpu()
    library = FakeNvml(device)
    with opened(library) as nvml:
        nvml.observe()
        library.xid(device, 31)
        wait_for(lambda: only(nvml.observe()).get("xid_errors,31") == 1)
        library.fail("nvmlEventSetCreate", Code.UNKNOWN)
        library.fail("nvmlDeviceGetPowerUsage", Code.UNINITIALIZED)
        nvml.observe()
        library.fail("nvmlDeviceGetPowerUsage", None)
        pass_time(library, nvml, 30)
        seen = only(nvml.observe())
        assert not [name for name in seen if "xid_errors" in name]
        assert "last_xid_at,31" in seen, "that it came stays true"
        library.fail("nvmlEventSetCreate", None)
        pass_time(library, nvml, REFUSED_RETRY_INTERVAL_SECONDS)
        assert only(nvml.observe()).get("xid_errors,31") == 1
        library.xid(device, 31)
        wait_for(lambda: only(nvml.observe()).get("xid_errors,31") == 2)


def test_of_a_lost_gpu_the_last_xid_is_known() -> None:
    device = gpu("GPU-lost")
    library = FakeNvml(device)
    with opened(library) as nvml:
        nvml.observe()
        library.xid(device, 79)
        wait_for(lambda: only(nvml.observe()).get("xid_errors,79") == 1)
        device.gone = Code.GPU_IS_LOST
        assert only(nvml.observe()).get("xid_errors,79") == 1
        library.now += MIN_LOST_RETRY_SECONDS + 1
        assert only(nvml.observe()).keys() == {"up", "last_xid_at,79"}


# What was refused


@pytest.mark.parametrize(
    ("code", "again"),
    [(Code.NOT_SUPPORTED, False), (Code.NO_PERMISSION, True), (Code.INVALID_ARGUMENT, True)],
)
def test_what_may_change_is_asked_again_rarely(code: Code, again: bool) -> None:
    library = FakeNvml(gpu())
    with opened(library, QUIET) as nvml:
        library.fail("nvmlDeviceGetPowerUsage", code)
        nvml.observe()
        library.fail("nvmlDeviceGetPowerUsage", None)
        library.now += REFUSED_RETRY_INTERVAL_SECONDS - 1
        assert "power" not in only(nvml.observe())
        assert library.calls["nvmlDeviceGetPowerUsage"] == 1
        library.now += 1
        assert ("power" in only(nvml.observe())) == again


def test_a_field_that_is_asked_again_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some drivers refuse a whole batch for one field in it."""
    library = FakeNvml(gpu())
    healthy = library.fields
    batches: list[int] = []

    def choking(device: Any, fields: Sequence[tuple[int, int]]) -> Any:
        batches.append(len(fields))
        if (82, 0) in fields:
            library.fail("nvmlDeviceGetFieldValues", Code.INVALID_ARGUMENT)
        try:
            return healthy(device, fields)
        finally:
            library.fail("nvmlDeviceGetFieldValues", None)

    monkeypatch.setattr(library, "fields", choking)
    memory, other = "temperature,memory", "clock_event_time"
    with opened(library, QUIET) as nvml:
        nvml.observe()
        for _ in range(3):
            library.now += REFUSED_RETRY_INTERVAL_SECONDS
            seen = only(nvml.observe())
            assert memory not in seen
            assert f"{other},reliability" in seen
        batches.clear()
        monkeypatch.setattr(library, "fields", healthy)
        library.now += REFUSED_RETRY_INTERVAL_SECONDS
        assert memory in only(nvml.observe())


def test_a_refusal_holds_until_there_is_an_answer() -> None:
    answers = QueryCache("GPU 0")
    answers.record_refusal("asked", Code.NO_PERMISSION, 0.0)
    assert not answers.is_due("asked", REFUSED_RETRY_INTERVAL_SECONDS - 1)
    assert answers.is_due("asked", REFUSED_RETRY_INTERVAL_SECONDS)
    assert not answers.is_supported("asked"), "what stands in for it stays until then"
    assert answers.get("asked", lambda: 7, REFUSED_RETRY_INTERVAL_SECONDS) == 7
    assert answers.is_supported("asked")
