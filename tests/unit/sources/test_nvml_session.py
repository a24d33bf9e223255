"""The NVML source over time: cost of a collection, reloads, lost GPUs, MIG, clocks, Xids."""

import logging
from pathlib import Path

import pytest

from mps_exporter.limits_without_a_flag import (
    LOST_RETRY_INTERVAL_SECONDS,
    REFUSED_RETRY_INTERVAL_SECONDS,
    TICK_INTERVAL_SECONDS,
)
from mps_exporter.observations import Outcome
from mps_exporter.sources.nvml import NvmlSession
from mps_exporter.sources.nvml.pynvml_api import Code
from testing.fake_nvml import FakeDevice, FakeNvml, recorded
from testing.nvml_host import COUNTERS, GPM, gpu, only, opened, pass_time, values

# Counters


@pytest.mark.parametrize("step", [3600.0, -3600.0, 20.0, -3.0])
def test_setting_the_host_s_clock_neither_repeats_nor_invents_busy_time(step: float) -> None:
    """The driver's samples have timestamps of the host's clock."""
    library = FakeNvml(gpu(share=1.0))
    with opened(library) as nvml:
        nvml.observe()
        started = library.now
        pass_time(library, nvml, 20)
        library.clock_steps.append((library.now, step))
        pass_time(library, nvml, 60)
        seen = only(nvml.observe())
        took = library.now - started
        counted, gap = seen["busy_time"], seen["unobserved_time,busy"]
        # Timestamps that repeat: all of a small step, or those before the next sampling.
        unnoticed = {-3.0: 3.0, -3600.0: 4.0}.get(step, 0.0)
        assert took - TICK_INTERVAL_SECONDS - 0.5 - unnoticed <= counted + gap <= took + 0.5
        assert gap <= 22, "the driver's buffer, and the time until the step is detected"


def test_pcie_counters_of_32_bits_are_unwrapped() -> None:
    device = gpu(share=1.0)
    device.metrics = device.metrics | {21: 50_000.0}
    replies = dict(device.replies)
    library = FakeNvml(device)
    with opened(library) as nvml:
        seen: dict[str, float] = {}
        for second in range(5):
            moved = second * 52_500_000_000  # 0.14 % more than GPM measures
            fields = {**replies["fields"], "198:0": {"code": 0, "value": moved % 2**32}}
            device.replies = {**replies, "fields": fields}
            seen = only(nvml.observe())
            library.now += 1.0
        assert seen["pcie_receive_bytes"] == 4 * 52_500_000_000


# Reload, loss, hot-plug


@pytest.mark.parametrize("code", [Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH])
def test_counters_outlive_a_reload(code: Code) -> None:
    library = FakeNvml(gpu(share=1.0))
    with opened(library) as nvml:
        nvml.observe()
        pass_time(library, nvml, 30)
        before, began = only(nvml.observe()), library.now
        library.fail("", code)
        errors = set[str]()
        for _ in range(20):
            library.now += 5
            nvml.tick()
            absent = nvml.observe()
            assert (absent.outcome, absent.gpus) == (Outcome.ABSENT, ())
            errors.add(absent.error or "")
        library.fail("", None)
        for seconds in (5, 11):
            library.now += seconds
            nvml.observe()
        pass_time(library, nvml, 30)
        after, took = only(nvml.observe()), library.now - began
    assert len(errors) == 1
    assert "" not in errors
    for name, gap in COUNTERS.items():
        missed = after[gap] - before[gap]
        assert 80 <= missed <= 106, "while NVML could not be read, less the driver's buffer"
        assert after[name] - before[name] + missed == pytest.approx(took, abs=0.5)


def test_a_driver_that_is_loaded_later(tmp_path: Path) -> None:
    library = FakeNvml(gpu())
    library.fail("nvmlInit", Code.LIBRARY_NOT_FOUND)
    with opened(library, driver_directory=str(tmp_path / "gpus")) as nvml:
        absent = nvml.observe()
        assert absent.outcome is Outcome.ABSENT
        assert "libnvidia-ml.so.1" in (absent.error or "")
        library.now += 1
        nvml.observe()
        assert library.calls["nvmlInit"] == 1, "the next attempt is later"
        library.fail("nvmlInit", None)
        (tmp_path / "gpus" / "0000:18:00.0").mkdir(parents=True)
        library.now += 1
        assert nvml.observe().outcome is Outcome.OK, "immediately, when the kernel lists a GPU"


def test_gpus_are_added_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mps_exporter")
    (tmp_path / "0").touch()
    library = FakeNvml(gpu("GPU-0"))
    with opened(library, driver_directory=str(tmp_path)) as nvml:
        nvml.observe()
        pass_time(library, nvml, 10)
        library.gpus.append(gpu("GPU-1"))
        (tmp_path / "1").touch()
        first, second = nvml.observe().gpus
        assert (first.uuid, second.uuid) == ("GPU-0", "GPU-1")
        del library.gpus[0]
        (tmp_path / "0").unlink()
        left, lost = nvml.observe().gpus
        assert (left.uuid, left.lost) == ("GPU-1", False)
        assert (lost.uuid, lost.lost, lost.name) == ("GPU-0", True, "NVIDIA H200")
        assert values(lost) == {"up": 0}
        library.gpus.insert(0, gpu("GPU-0"))
        (tmp_path / "0").touch()
        library.now += 5
        back, _ = nvml.observe().gpus
        assert not back.lost
        assert values(back)["busy_time"] >= values(first)["busy_time"]
    output = [(one.message.split(":")[0], vars(one)["fields"]) for one in caplog.records]
    assert output == [("a GPU is lost", {"gpu": "GPU-0"}), ("a GPU is back", {"gpu": "GPU-0"})]


# MIG


def instance(uuid: str, gpu_instance: int) -> FakeDevice:
    replies = {
        "nvmlDeviceGetUUID()": uuid,
        "nvmlDeviceGetGpuInstanceId()": gpu_instance,
        "nvmlDeviceGetComputeInstanceId()": 0,
        "nvmlDeviceGetName()": "NVIDIA H200 MIG 1g.18gb",
        "memory()": {"total": 2**34, "used": 2**30, "free": 2**34 - 2**30, "reserved": 0},
        "nvmlDeviceGetAttributes_v2()": 16,
    }
    return FakeDevice(uuid, replies, busy=lambda now: now * 0.25, metrics=GPM)


def divided() -> FakeDevice:
    """Return a GPU with the instances MIG-a and MIG-b."""
    replies = {
        **recorded(),
        "nvmlDeviceGetMigMode()": [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount()": 7,
        "nvmlDeviceGetUtilizationRates()": {"code": Code.NOT_SUPPORTED},
    }
    device = FakeDevice("GPU-0", replies, metrics=GPM)
    device.instances = {0: instance("MIG-a", 7), 3: instance("MIG-b", 9)}
    return device


def test_mig_instances_are_sampled_every_5_s_whatever_the_scrapes() -> None:
    library = FakeNvml(divided())
    with opened(library) as nvml:
        nvml.observe()
        before = library.calls["nvmlGpmMigSampleGet"]
        for _ in range(60):
            pass_time(library, nvml, 1)
            nvml.observe()
        assert library.calls["nvmlGpmMigSampleGet"] - before == 2 * 60 / 5


def test_mig_instances_are_added_and_removed() -> None:
    device = divided()
    library = FakeNvml(device)
    with opened(library) as nvml:
        nvml.observe()
        del device.instances[3]
        device.instances[5] = instance("MIG-c", 11)
        pass_time(library, nvml, 12)
        assert [one.uuid for one in nvml.observe().gpus] == ["GPU-0", "MIG-a", "MIG-c"]
        undivided = {"nvmlDeviceGetMigMode()": [0, 0], "nvmlDeviceGetUtilizationRates()": [40, 10]}
        device.replies, device.instances = {**device.replies, **undivided}, {}
        pass_time(library, nvml, 12)
        seen = only(nvml.observe())
        assert seen["mig_mode"] == 0
        assert seen["gpu_utilization"] == 0.4, "queried again after the change"


# Xid errors


def xids(nvml: NvmlSession, xid: int) -> float | None:
    return only(nvml.observe()).get(f"xid_errors,{xid}")


def test_xids_are_counted_by_code_and_outlive_a_reload() -> None:
    device = gpu()
    library = FakeNvml(device)
    with opened(library) as nvml:
        nvml.observe()
        for xid in (31, 31, 143):
            library.xid(device, xid)
        library.events.append((0xDEAD, 13))  # an unknown device
        seen = only(nvml.observe())
        assert (seen["xid_errors,31"], seen["xid_errors,143"]) == (2, 1)
        assert seen["last_xid_at,31"] == library.wall()
        assert not {"xid_errors,13", "last_xid_at,13"} & seen.keys()
        library.fail("nvmlDeviceGetPowerUsage", Code.UNINITIALIZED)
        library.now += 5
        nvml.observe()
        library.fail("nvmlDeviceGetPowerUsage", None)
        library.now += 5
        assert xids(nvml, 31) == 2
        library.xid(device, 31)
        nvml.tick()
        assert not library.events, "between two collections"
        library.xid(device, 31)
        nvml.close()  # as before each new session: NVML drops the events of the old one
        assert xids(nvml, 31) == 4


def test_xid_counters_are_absent_while_no_events_are_awaited() -> None:
    device = gpu()
    library = FakeNvml(device)
    with opened(library) as nvml:
        nvml.observe()
        library.xid(device, 31)
        assert xids(nvml, 31) == 1
        library.fail("nvmlEventSetCreate", Code.UNKNOWN)
        library.fail("nvmlDeviceGetPowerUsage", Code.UNINITIALIZED)
        nvml.observe()
        library.fail("nvmlDeviceGetPowerUsage", None)
        pass_time(library, nvml, 30)
        seen = only(nvml.observe())
        assert "xid_errors,31" not in seen
        assert "last_xid_at,31" in seen
        library.fail("nvmlEventSetCreate", None)
        assert xids(nvml, 31) == 1


def test_the_last_xid_of_a_lost_gpu_is_known() -> None:
    device = gpu("GPU-lost")
    library = FakeNvml(device)
    with opened(library) as nvml:
        nvml.observe()
        library.xid(device, 79)
        assert xids(nvml, 79) == 1
        device.gone = Code.GPU_IS_LOST
        assert xids(nvml, 79) == 1
        library.now += LOST_RETRY_INTERVAL_SECONDS + 1
        nvml.observe()
        nvml.tick()
        seen = only(nvml.observe())
        assert seen["up"] == 0
        assert "xid_errors,79" not in seen
        assert "last_xid_at,79" in seen


def test_a_failed_read_of_events_is_repeated() -> None:
    library = FakeNvml(device := gpu())
    with opened(library) as nvml:
        nvml.observe()
        library.fail("nvmlEventSetWait_v2", Code.GPU_IS_LOST)
        library.xid(device, 45)
        assert xids(nvml, 45) is None
        library.fail("nvmlEventSetWait_v2", None)
        assert xids(nvml, 45) == 1


def test_a_gpu_that_refuses_xids_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """A virtual GPU always refuses, which is worth no warning."""
    caplog.set_level(logging.INFO, "mps_exporter")
    library = FakeNvml(device := gpu())
    library.fail("nvmlDeviceRegisterEvents", Code.UNKNOWN)
    with opened(library) as nvml:
        pass_time(library, nvml, REFUSED_RETRY_INTERVAL_SECONDS / 2)
        nvml.observe()
        pass_time(library, nvml, REFUSED_RETRY_INTERVAL_SECONDS / 2)
        assert library.calls["nvmlDeviceRegisterEvents"] == 1
        library.fail("nvmlDeviceRegisterEvents", Code.NOT_SUPPORTED)
        pass_time(library, nvml, REFUSED_RETRY_INTERVAL_SECONDS)
        assert [(one.levelno, one.message.rpartition(" ")[2]) for one in caplog.records] == [
            (logging.INFO, "UNKNOWN"),
            (logging.INFO, "NOT_SUPPORTED"),
        ]
        library.fail("nvmlDeviceRegisterEvents", None)
        pass_time(library, nvml, REFUSED_RETRY_INTERVAL_SECONDS)
        library.xid(device, 31)
        assert xids(nvml, 31) == 1


def test_each_reason_why_a_gpu_cannot_be_opened_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    library = FakeNvml(gpu())
    with opened(library) as nvml:
        for code in (Code.NO_PERMISSION, Code.NO_PERMISSION, Code.UNKNOWN):
            library.fail("nvmlDeviceGetUUID", code)
            nvml.observe()
            nvml.close()
        library.fail("nvmlDeviceGetUUID", None)
        caplog.set_level(logging.INFO, "mps_exporter")
        nvml.observe()
    reported = [one.message for one in caplog.records]
    assert (len(reported), reported[2]) == (3, "a GPU can be opened again")
