"""Single values: base units, values of old, other and future hardware, labels."""

from typing import Any

import pytest

from mps_exporter.metrics.gpus import BY_QUANTITY, label_values
from mps_exporter.observations import GpuObservation, Reading
from mps_exporter.sources.nvml.pynvml_api import Code
from testing.fake_nvml import FakeDevice, FakeNvml, recorded
from testing.nvml_host import GPM, opened, values

NOT_SUPPORTED = {"code": int(Code.NOT_SUPPORTED)}
VGPU = "vgpu_licensed"


def observed(
    fields: dict[str, Any] | None = None, *, after_seconds: float = 1.0, **replies: Any
) -> GpuObservation:
    """Observe an H200 with other replies, by NVML function with arguments or by method."""
    named = {name if "(" in name else f"{name}()": reply for name, reply in replies.items()}
    merged = {**recorded(), **named, "fields": {**recorded()["fields"], **(fields or {})}}
    library = FakeNvml(FakeDevice("GPU-0", merged, busy=lambda now: now / 2, metrics=GPM))
    with opened(library) as nvml:
        nvml.observe()
        library.now += after_seconds
        (seen,) = nvml.observe().gpus
    return seen


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


LINKS = {f"165:{link}": value(link < 6) for link in range(8)}
TRAFFIC = {"138:4294967295": value(3), "139:4294967295": value(5), "38:0": value(2)}
ERRORS = {f"161:{link}": value(link) for link in range(4)} | {"163:2": value(7)}


def refused_sram(code: Code) -> dict[str, Any]:
    return {
        f"nvmlDeviceGetMemoryErrorCounter({kind}, {scope}, {location})": reply
        for kind in (0, 1)
        for scope in (0, 1)
        for location, reply in ((7, {"code": code}), (1, 4))
    }


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        (
            {
                "nvmlDeviceGetNumFans": 2,
                "nvmlDeviceGetFanSpeed_v2(0)": 30,
                "nvmlDeviceGetFanSpeed_v2(1)": 41,
            },
            {"fan_speed,0": 0.3, "fan_speed,1": 0.41},
        ),
        ({"nvmlDeviceGetNumFans": 2}, {"fan_speed,0": None}),
        ({"fields": LINKS}, {"nvlink_links,active": 6, "nvlink_links,inactive": 2}),
        (
            {"fields": TRAFFIC},
            {
                "nvlink_transmit_bytes": 3 * 1024,
                "nvlink_receive_bytes": 5 * 1024,
                "nvlink_errors,crc_flit": 2,
            },
        ),
        # The driver's sum, or since Hopper the sum over links.
        (
            {"fields": ERRORS},
            {"nvlink_errors,replay": 6, "nvlink_errors,crc": 7, "nvlink_errors,recovery": None},
        ),
        ({"fields": {**ERRORS, "52:0": value(1)}}, {"nvlink_errors,replay": 1}),
        # Numbers newer than their names stay numbers.
        ({"fields": {"230:0": value(99)}}, {"recovery_action,unknown_99": 1}),
        ({"fabric_state": 17, "vgpu_licensed": False}, {"fabric_state,unknown_17": 1, VGPU: 0}),
        ({"fabric_state": 3, "vgpu_licensed": True}, {"fabric_state,completed": 1, VGPU: 1}),
        ({"nvmlDeviceGetPerformanceState": 32}, {"performance_state": None}),
        # An old driver, and memory that is shared with the host.
        (
            {"memory": {"total": 100, "used": 40, "free": 60}},
            {"memory_used": 40, "memory_reserved": None},
        ),
        ({"memory": NOT_SUPPORTED}, {"memory_total": None, "memory_used": None}),
        # Before Ampere, SRAM errors are those of its parts.
        *(
            (
                refused_sram(code),
                {
                    "ecc_errors,corrected,volatile,sram": None,
                    "ecc_errors,corrected,volatile,l2_cache": 4,
                },
            )
            for code in (Code.NOT_SUPPORTED, Code.NO_PERMISSION, Code.INVALID_ARGUMENT)
        ),
    ],
)
def test_replies_of_other_hardware(
    replies: dict[str, Any], expected: dict[str, float | None]
) -> None:
    found = values(observed(**replies))
    assert {name: found.get(name) for name in expected} == expected


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
    with opened(library) as nvml:
        nvml.observe()
        for _ in range(10):
            library.now += 1
            nvml.tick()
        found = values(nvml.observe().gpus[0])
    assert found["busy_time"] == pytest.approx(5, abs=0.7), "as of the last tick"
    assert not {name for name in found if "_activity" in name or "_active_time" in name}
    assert "unobserved_time,active" not in found
