"""Values by themselves: base units, what is left out, hardware that lacks or has more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mps_exporter.metrics.gpus import BY_QUANTITY, label_values
from mps_exporter.metrics.spec import MetricSpec
from mps_exporter.observations import GpuObservation, Reading
from mps_exporter.sources.nvml import Clock, NvmlOptions, NvmlSession
from mps_exporter.sources.nvml.pynvml_api import Code, Device, FieldReply
from mps_exporter.sources.nvml.readings import FIELDS, ROWS, nvlink_rows
from testing.fake_nvml import FakeDevice, FakeNvml, recorded

METRICS = dict.fromkeys((1, 2, 3, 4, 5, 10, 11, 12, 13), 50.0) | {20: 10.0, 21: 20.0}


def observed(fields: dict[str, Any] | None = None, **answers: Any) -> GpuObservation:
    """Of an H200 that answers differently: names are NVML functions, or methods of the library."""
    merged = {**recorded(), **{f"{name}()": value for name, value in answers.items()}}
    merged["fields"] = {**recorded()["fields"], **(fields or {})}
    device = FakeDevice("GPU-0", merged, busy=lambda now: now, metrics=METRICS)
    library = FakeNvml(device)
    options = NvmlOptions(xid_events=False, driver_directory="/nonexistent")
    nvml = NvmlSession(library, Clock(library.wall, lambda: library.now), options)
    nvml.observe()
    library.now += 1
    (seen,) = nvml.observe().gpus
    nvml.close()
    return seen


def values(seen: GpuObservation) -> dict[str, float]:
    return {
        ",".join((one.quantity, *(value for _, value in one.labels))): one.value
        for one in seen.readings
    }


@pytest.mark.parametrize(("shortest", "shown"), [(0.1, True), (0.5, False)])
def test_the_activity_of_a_short_interval(shortest: float, shown: bool) -> None:
    device = FakeDevice("GPU-0", recorded(), busy=lambda now: now, metrics=METRICS)
    library = FakeNvml(device)
    options = NvmlOptions(
        xid_events=False, driver_directory="/nonexistent", shortest_seconds=shortest
    )
    nvml = NvmlSession(library, Clock(library.wall, lambda: library.now), options)
    nvml.observe()
    library.now += 0.2
    (seen,) = nvml.observe().gpus
    nvml.close()
    assert ("sm_activity" in values(seen)) is shown


NOT_SUPPORTED = {"code": int(Code.NOT_SUPPORTED)}


def test_the_h200_as_it_was() -> None:
    seen = observed()
    assert (seen.name, seen.architecture, seen.sm_count) == ("NVIDIA H200", "Hopper", 132)
    found = values(seen)
    assert found["memory_total"] == 150_754_820_096
    assert found["power"] == 110.106
    assert found["energy"] == 2112.597
    assert found["clock,sm"] == 375e6
    assert found["clock_max,memory"] == 3201e6
    assert found["temperature,memory"] == 35
    assert found["power_limit,min"] == 200
    assert found["clock_event,gpu_idle"] == 1
    assert found["clock_event_time,low_utilization"] == 14.379639232
    assert found["pcie_errors,l0_to_recovery"] == 113
    assert found["recovery_action,none"] == 1
    assert found["sm_activity"] == 0.5


def test_all_readings_are_in_the_catalogue_with_their_labels() -> None:
    xid = (("xid", "31"),)
    xids = (Reading("xid_errors", 1, xid), Reading("last_xid_at", 1.0, xid))
    for one in (*observed().readings, *xids):
        labels = label_values(one.quantity, one.labels)
        assert labels is not None, one
        states = BY_QUANTITY[one.quantity].states
        assert not states or labels[0] in states


class Talkative(FakeNvml):
    """Answers every question about every GPU that there ever was."""

    def number(self, function: str, *arguments: object) -> int:
        return 1

    def numbers(self, function: str, *arguments: object) -> tuple[int, ...]:
        return {"nvmlDeviceGetBAR1MemoryInfo": (1, 1, 1)}.get(function, (1, 1))

    def fields(self, device: Device, fields: Sequence[tuple[int, int]]) -> list[FieldReply]:
        return [FieldReply(0, 1) for _ in fields]


def test_the_catalogue_has_the_values_of_the_labels_and_no_others() -> None:
    library = Talkative(device := FakeDevice("GPU-0"))
    library.init()
    given: dict[tuple[MetricSpec, str], set[str]] = {}
    rows = (*ROWS, *nvlink_rows({}))
    readings = [reading for row in rows for reading in row.read(library, Device(device))]
    for one in (*readings, *(row.reading(1) for row in FIELDS)):
        labels = label_values(one.quantity, one.labels)
        assert labels is not None, one
        metric = BY_QUANTITY[one.quantity]
        names = () if metric.states else metric.labels[2:]
        for label, value in zip(names, labels, strict=False):
            given.setdefault((metric, label), set()).add(value)
    for (metric, label), values_given in given.items():
        if label != "fan":
            assert values_given == set(metric.values[label]), (metric.name, label)


def test_an_h200_has_no_fans_no_nvlink_here_and_no_retired_pages() -> None:
    found = {one.quantity for one in observed().readings}
    assert not {name for name in found if "fan" in name or "nvlink" in name or "retired" in name}
    assert "fabric_state" not in found
    assert "vgpu_licensed" not in found


def test_fans() -> None:
    device = {"nvmlDeviceGetFanSpeed_v2(0)": 30, "nvmlDeviceGetFanSpeed_v2(1)": 41}
    seen = observed(nvmlDeviceGetNumFans=2)
    assert "fan_speed,0" not in values(seen), "none of them answers"
    merged = {**recorded(), **device, "nvmlDeviceGetNumFans()": 2}
    library = FakeNvml(FakeDevice("GPU-0", merged))
    options = NvmlOptions(xid_events=False)
    nvml = NvmlSession(library, Clock(library.wall, lambda: library.now), options)
    found = values(nvml.observe().gpus[0])
    nvml.close()
    assert found["fan_speed,0"] == 0.30
    assert found["fan_speed,1"] == 0.41


def test_nvlink() -> None:
    links = {f"165:{link}": {"code": 0, "value": int(link < 6)} for link in range(8)}
    counters = {
        "138:4294967295": {"code": 0, "value": 3},
        "139:4294967295": {"code": 0, "value": 5},
        "38:0": {"code": 0, "value": 2},
    }
    found = values(observed({**links, **counters}))
    assert found["nvlink_links,active"] == 6
    assert found["nvlink_links,inactive"] == 2
    assert found["nvlink_transmit_bytes"] == 3 * 1024
    assert found["nvlink_receive_bytes"] == 5 * 1024
    assert found["nvlink_errors,crc_flit"] == 2


def test_nvlink_errors_since_hopper_are_added_up_over_the_links() -> None:
    errors = {f"161:{link}": {"code": 0, "value": link} for link in range(4)}
    found = values(observed({**errors, "163:2": {"code": 0, "value": 7}}))
    assert found["nvlink_errors,replay"] == 6
    assert found["nvlink_errors,crc"] == 7
    assert "nvlink_errors,recovery" not in found
    before = {"52:0": {"code": 0, "value": 1}}
    found = values(observed({**errors, **before}))
    assert found["nvlink_errors,replay"] == 1, "the sum that the driver gives"


def test_numbers_newer_than_their_names_are_passed_through() -> None:
    found = values(
        observed({"230:0": {"code": 0, "value": 99}}, fabric_state=17, nvmlDeviceGetComputeMode=9)
    )
    assert found["recovery_action,unknown_99"] == 1
    assert found["fabric_state,unknown_17"] == 1


def test_a_vgpu_and_a_fabric() -> None:
    found = values(observed(fabric_state=3, vgpu_licensed=True))
    assert found["fabric_state,completed"] == 1
    assert found["vgpu_licensed"] == 1
    assert values(observed(vgpu_licensed=False))["vgpu_licensed"] == 0


def test_an_unknown_performance_state_is_left_out() -> None:
    assert "performance_state" not in values(observed(nvmlDeviceGetPerformanceState=32))


def test_memory_of_an_old_driver_and_of_a_shared_one() -> None:
    old = values(observed(memory={"total": 100, "used": 40, "free": 60}))
    assert old["memory_used"] == 40
    assert "memory_reserved" not in old
    shared = values(observed(memory=NOT_SUPPORTED))
    assert not {
        name for name in shared if name.startswith("memory_") and name != "memory_utilization"
    }
    assert "power" in shared


def test_sram_by_its_parts_before_ampere() -> None:
    merged = dict(recorded())
    for kind in (0, 1):
        for scope in (0, 1):
            merged[f"nvmlDeviceGetMemoryErrorCounter({kind}, {scope}, 7)"] = NOT_SUPPORTED
            merged[f"nvmlDeviceGetMemoryErrorCounter({kind}, {scope}, 1)"] = 4
    library = FakeNvml(FakeDevice("GPU-0", merged))
    nvml = NvmlSession(
        library, Clock(library.wall, lambda: library.now), NvmlOptions(xid_events=False)
    )
    found = values(nvml.observe().gpus[0])
    nvml.close()
    assert "ecc_errors,corrected,volatile,sram" not in found
    assert found["ecc_errors,corrected,volatile,l2_cache"] == 4


def test_without_gpm_there_is_still_utilization() -> None:
    library = FakeNvml(FakeDevice("GPU-0", busy=lambda now: now / 2))
    options = NvmlOptions(xid_events=False, driver_directory="/nonexistent")
    nvml = NvmlSession(library, Clock(library.wall, lambda: library.now), options)
    nvml.observe()
    for _ in range(10):
        library.now += 1
        nvml.tick()
    found = values(nvml.observe().gpus[0])
    nvml.close()
    assert found["busy_time"] == pytest.approx(5, abs=0.7), "as of the last tick"
    assert not {name for name in found if "_activity" in name or "_active_time" in name}
    assert "unobserved_time,active" not in found
    assert library.live_samples == 0
