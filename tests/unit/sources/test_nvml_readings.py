"""Single values: base units, values of old, other and future hardware, labels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mps_exporter.metrics.gpus import BY_QUANTITY, label_values
from mps_exporter.observations import GpuObservation, Reading
from mps_exporter.sources.nvml.pynvml_api import Code
from testing.fake_nvml import FakeDevice, FakeNvml, recorded
from testing.nvml_host import GPM, OPTIONS, opened, values

QUIET = replace(OPTIONS, xid_events=False)
NOT_SUPPORTED = {"code": int(Code.NOT_SUPPORTED)}


def observed(
    fields: dict[str, Any] | None = None, *, after_seconds: float = 1.0, **replies: Any
) -> GpuObservation:
    """Observe an H200 with other replies, by NVML function with arguments or by method."""
    named = {name if "(" in name else f"{name}()": reply for name, reply in replies.items()}
    merged = {**recorded(), **named, "fields": {**recorded()["fields"], **(fields or {})}}
    library = FakeNvml(FakeDevice("GPU-0", merged, busy=lambda now: now / 2, metrics=GPM))
    with opened(library, QUIET) as nvml:
        nvml.observe()
        library.now += after_seconds
        (seen,) = nvml.observe().gpus
    return seen


def test_values_of_an_h200() -> None:
    seen = observed()
    assert (seen.name, seen.architecture, seen.sm_count) == ("NVIDIA H200", "Hopper", 132)
    found = values(seen)
    assert (
        found.items()
        >= {
            "memory_total": 150_754_820_096,
            "power": 110.106,
            "energy": 2112.597,
            "clock,sm": 375e6,
            "clock_max,memory": 3201e6,
            "temperature,memory": 35,
            "power_limit,min": 200,
            "clock_event,gpu_idle": 1,
            "clock_event_time,low_utilization": 14.379639232,
            "pcie_errors,l0_to_recovery": 113,
            "recovery_action,none": 1,
            "sm_activity": 0.5,
        }.items()
    )
    absent = ("fan", "nvlink", "retired", "fabric_state", "vgpu_licensed")
    assert not [name for name in found if name.startswith(absent)]


def test_all_readings_have_a_metric_with_their_labels() -> None:
    xid = (("xid", "31"),)
    xids = (Reading("xid_errors", 1, xid), Reading("last_xid_at", 1.0, xid))
    for one in (*observed().readings, *xids):
        labels = label_values(one.quantity, one.labels)
        assert labels is not None, one
        states = BY_QUANTITY[one.quantity].states
        assert not states or labels[0] in states


def value(number: float) -> dict[str, float]:
    return {"code": 0, "value": number}


def test_fans() -> None:
    speeds: dict[str, Any] = {"nvmlDeviceGetFanSpeed_v2(0)": 30, "nvmlDeviceGetFanSpeed_v2(1)": 41}
    found = values(observed(nvmlDeviceGetNumFans=2, **speeds))
    assert (found["fan_speed,0"], found["fan_speed,1"]) == (0.3, 0.41)
    assert "fan_speed,0" not in values(observed(nvmlDeviceGetNumFans=2))


def test_nvlink() -> None:
    links = {f"165:{link}": value(link < 6) for link in range(8)}
    counters = {"138:4294967295": value(3), "139:4294967295": value(5), "38:0": value(2)}
    assert (
        values(observed({**links, **counters})).items()
        >= {
            "nvlink_links,active": 6,
            "nvlink_links,inactive": 2,
            "nvlink_transmit_bytes": 3 * 1024,
            "nvlink_receive_bytes": 5 * 1024,
            "nvlink_errors,crc_flit": 2,
        }.items()
    )


def test_nvlink_errors_are_the_driver_s_sum_or_since_hopper_the_sum_over_links() -> None:
    errors = {f"161:{link}": value(link) for link in range(4)} | {"163:2": value(7)}
    found = values(observed(errors))
    assert (found["nvlink_errors,replay"], found["nvlink_errors,crc"]) == (6, 7)
    assert "nvlink_errors,recovery" not in found
    assert values(observed({**errors, "52:0": value(1)}))["nvlink_errors,replay"] == 1


def test_numbers_newer_than_their_names_stay_numbers() -> None:
    found = values(observed({"230:0": value(99)}, fabric_state=17))
    assert found["recovery_action,unknown_99"] == found["fabric_state,unknown_17"] == 1


def test_a_vgpu_and_a_fabric() -> None:
    found = values(observed(fabric_state=3, vgpu_licensed=True))
    assert found["fabric_state,completed"] == found["vgpu_licensed"] == 1
    assert values(observed(vgpu_licensed=False))["vgpu_licensed"] == 0


def test_an_unknown_performance_state_is_absent() -> None:
    assert "performance_state" not in values(observed(nvmlDeviceGetPerformanceState=32))


def test_memory_of_an_old_driver_and_memory_shared_with_the_host() -> None:
    old = values(observed(memory={"total": 100, "used": 40, "free": 60}))
    assert old["memory_used"] == 40
    assert "memory_reserved" not in old
    shared = values(observed(memory=NOT_SUPPORTED))
    assert not [f"memory_{one}" for one in ("total", "used", "free") if f"memory_{one}" in shared]


def test_sram_errors_before_ampere_are_those_of_its_parts() -> None:
    replies: dict[str, Any] = {
        f"nvmlDeviceGetMemoryErrorCounter({kind}, {scope}, {location})": reply
        for kind in (0, 1)
        for scope in (0, 1)
        for location, reply in ((7, NOT_SUPPORTED), (1, 4))
    }
    found = values(observed(**replies))
    assert "ecc_errors,corrected,volatile,sram" not in found
    assert found["ecc_errors,corrected,volatile,l2_cache"] == 4


@pytest.mark.parametrize(("mode", "name"), [(3, "exclusive_process"), (9, "unknown_9")])
def test_compute_modes(mode: int, name: str) -> None:
    assert observed(nvmlDeviceGetComputeMode=mode).compute_mode == name


@pytest.mark.parametrize(
    ("capability", "cores", "sms"), [([8, 0], 6912, 108), ([8, 6], 10752, 84), ([99, 0], 1, None)]
)
def test_the_number_of_sms_is_calculated(
    capability: list[int], cores: int, sms: int | None
) -> None:
    seen = observed(nvmlDeviceGetCudaComputeCapability=capability, nvmlDeviceGetNumGpuCores=cores)
    assert seen.sm_count == sms


def test_utilization_without_gpm() -> None:
    library = FakeNvml(FakeDevice("GPU-0", busy=lambda now: now / 2))
    with opened(library, QUIET) as nvml:
        nvml.observe()
        for _ in range(10):
            library.now += 1
            nvml.tick()
        found = values(nvml.observe().gpus[0])
    assert found["busy_time"] == pytest.approx(5, abs=0.7), "as of the last tick"
    assert not {name for name in found if "_activity" in name or "_active_time" in name}
    assert "unobserved_time,active" not in found
