"""NvmlApi over a pynvml with replaced functions: structures, versions, errors."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from mps_exporter.observations import CgroupMemory
from mps_exporter.sources.nvml.pynvml_api import Code, Device, NvmlApi, NvmlError, device_key

DEVICE = Device(ctypes.c_void_p(0x1000))


@pytest.fixture
def binding() -> NvmlApi:
    return NvmlApi()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces functions of pynvml: nvml(nvmlInit=...)."""

    def replaces(**functions: Any) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(pynvml, name, function, raising=False)

    return replaces


def fails(code: int) -> Any:
    def function(*_: Any) -> None:
        raise pynvml.NVMLError(code)

    return function


PCI = "00000000:ab:00.0"


def test_memory_of_a_control_group(binding: NvmlApi, nvml: Any) -> None:
    queried: list[str] = []
    hard = 8192 << 20

    def limits(device: object, found: Any) -> None:
        assert device is DEVICE
        queried.append(found.nameSpace)
        found.softLimit, found.hardLimit, found.currentUsed = 4096 << 20, hard, 512 << 20

    pci_info = SimpleNamespace(busId=PCI.upper().encode())
    nvml(nvmlDeviceGetMemoryLimits_v1=limits, nvmlDeviceGetPciInfo=lambda _: pci_info)
    # The manual's example: nvidia-smi memory-limits --get -n /sys/fs/cgroup/mygroup
    found = binding.cgroup_memory(DEVICE, "/sys/fs/cgroup", "/mygroup")
    assert found == CgroupMemory("/mygroup", PCI, 512 << 20, 4096 << 20, 8192 << 20)
    assert queried == ["/sys/fs/cgroup/mygroup"]  # pynvml decodes it
    hard = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
    found = binding.cgroup_memory(DEVICE, "/sys/fs/cgroup", "/mygroup")
    assert (found.hard_limit_bytes, found.hard_unlimited) == (None, True)


def test_a_binding_or_a_driver_without_memory_limits(
    binding: NvmlApi, nvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(_nvmlGetFunctionPointer=lambda _: object())
    assert binding.has("nvmlDeviceGetMemoryLimits_v1")
    nvml(_nvmlGetFunctionPointer=fails(Code.FUNCTION_NOT_FOUND))
    assert not binding.has("nvmlDeviceGetMemoryLimits_v1")
    monkeypatch.delattr(pynvml, "c_nvmlGetMemoryLimits_v1_t")
    with pytest.raises(NvmlError, match=r"FUNCTION_NOT_FOUND$"):
        binding.cgroup_memory(DEVICE, "", "/x")


@pytest.mark.parametrize("code", [Code.NO_PERMISSION, 77])
def test_errors_keep_their_code(binding: NvmlApi, nvml: Any, code: int) -> None:
    nvml(nvmlDeviceGetPowerUsage=fails(code))
    with pytest.raises(NvmlError) as caught:
        binding.number("nvmlDeviceGetPowerUsage", DEVICE)
    assert (caught.value.code, caught.value.function) == (code, "nvmlDeviceGetPowerUsage")


def test_codes_are_those_of_pynvml() -> None:
    known = [code for code in Code if hasattr(pynvml, f"NVML_ERROR_{code.name}")]
    assert len(known) >= 16, "old releases lack a few"
    for code in known:
        assert getattr(pynvml, f"NVML_ERROR_{code.name}") == code


def test_wrong_arguments_are_an_error_of_nvml(binding: NvmlApi, nvml: Any) -> None:
    def odd(*_: Any) -> None:
        raise ctypes.ArgumentError("argument 1: wrong type")

    nvml(nvmlDeviceGetName=odd)
    with pytest.raises(NvmlError, match=r"UNKNOWN$"):
        binding.text("nvmlDeviceGetName", DEVICE)
    with pytest.raises(NvmlError, match=r"FUNCTION_NOT_FOUND$"):
        binding.number("nvmlDeviceGetSomethingOfTheFuture", DEVICE)


class Bar1(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@pytest.mark.parametrize("reply", [Bar1(3, 2, 1), [3, 2, 1], (3, 2, 1), 3])
def test_numbers_alone_in_lists_tuples_and_structures(
    binding: NvmlApi, nvml: Any, reply: object
) -> None:
    nvml(nvmlDeviceGetBAR1MemoryInfo=lambda _: reply)
    found = binding.numbers("nvmlDeviceGetBAR1MemoryInfo", DEVICE)
    assert found == ((3,) if reply == 3 else (3, 2, 1))
    assert binding.number("nvmlDeviceGetBAR1MemoryInfo", DEVICE) == 3


def test_values_out_of_structures(binding: NvmlApi, nvml: Any) -> None:
    class FabricInfo(ctypes.Structure):
        _fields_ = [("state", ctypes.c_ubyte)]

    def fabric(_device: object, info: Any) -> None:
        info._obj.state = 3

    features = SimpleNamespace(
        isGridLicenseSupported=1,
        licensableFeaturesCount=1,
        gridLicensableFeatures=[SimpleNamespace(featureState=0), SimpleNamespace(featureState=1)],
    )
    nvml(
        nvmlDeviceGetPciInfo=lambda _: SimpleNamespace(busId=b"00000000:18:00.0"),
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetGpuFabricInfoV=fabric,
        c_nvmlGpuFabricInfo_v2_t=FabricInfo,
        nvmlDeviceGetGridLicensableFeatures_v4=lambda _: features,
    )
    assert binding.text("nvmlDeviceGetPciInfo", DEVICE) == "00000000:18:00.0"
    assert binding.text("nvmlSystemGetDriverVersion") == "580.1"
    assert binding.fabric_state(DEVICE) == 3
    assert binding.vgpu_licensed(DEVICE) is False, "the second is beyond the count"
    features.isGridLicenseSupported = 0
    assert binding.vgpu_licensed(DEVICE) is None


def test_memory(binding: NvmlApi, nvml: Any) -> None:
    sizes = SimpleNamespace(total=9, used=2, free=6, reserved=1)
    nvml(nvmlDeviceGetMemoryInfo=lambda _device, version: version and sizes)
    assert binding.memory(DEVICE) == vars(sizes)


def field(kind: int, member: str, value: float, code: int = 0) -> Any:
    answer = pynvml.c_nvmlFieldValue_t()
    answer.nvmlReturn, answer.valueType = code, kind
    setattr(answer.value, member, value)
    return answer


def test_fields_by_their_type(binding: NvmlApi, nvml: Any) -> None:
    replies = [
        field(pynvml.NVML_VALUE_TYPE_DOUBLE, "dVal", 0.5),
        field(pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 2**32 - 1),
        field(pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, "ullVal", 2**63),
        field(pynvml.NVML_VALUE_TYPE_SIGNED_INT, "siVal", -8),
        field(0, "dVal", 0.0, Code.NOT_SUPPORTED),
        field(99, "dVal", 0.0),
    ]
    nvml(nvmlDeviceGetFieldValues=lambda _device, requested: replies[: len(requested)])
    found = binding.fields(DEVICE, [(n, 0) for n in range(6)])
    assert [one.value for one in found[:4]] == [0.5, 2**32 - 1, 2**63, -8]
    assert [one.code for one in found] == [0, 0, 0, 0, Code.NOT_SUPPORTED, Code.UNKNOWN]


# Processes


def lists(*rows: tuple[int, int]) -> Any:
    """Return a function of the library that lists these (PID, memory)."""

    def function(_device: object, count: Any, into: Any) -> int:
        room, count._obj.value = count._obj.value, len(rows)
        if room < len(rows):
            return int(Code.INSUFFICIENT_SIZE)
        for place, (pid, memory) in enumerate(rows):
            into[place].pid, into[place].usedGpuMemory = pid, memory
        return 0

    return function


@pytest.mark.parametrize("processes", [0, 64, 65, 1000])
def test_any_number_of_processes(binding: NvmlApi, nvml: Any, processes: int) -> None:
    rows = [(pid, pid << 20) for pid in range(1, processes + 1)]
    nvml(_nvmlGetFunctionPointer=lambda _: lists(*rows))
    for _ in range(2):
        assert binding.processes(DEVICE, "Compute") == dict(rows)
    nvml(_nvmlGetFunctionPointer=lambda _: lists((1, 2**64 - 1)))
    assert binding.processes(DEVICE, "Compute") == {1: None}


@pytest.mark.parametrize("code", [Code.INSUFFICIENT_SIZE, Code.NO_PERMISSION])
def test_a_list_that_keeps_growing_or_is_refused(binding: NvmlApi, nvml: Any, code: Code) -> None:
    def fails(_device: object, count: Any, _into: object) -> int:
        count._obj.value += 1000
        return int(code)

    nvml(_nvmlGetFunctionPointer=lambda _: fails)
    with pytest.raises(NvmlError, match=f"{code.name}$"):
        binding.processes(DEVICE, "Compute")


# Samples, GPM, events


def test_samples(binding: NvmlApi, nvml: Any) -> None:
    def sample(at: int, percent: int) -> Any:
        one = pynvml.c_nvmlSample_t()
        one.timeStamp, one.sampleValue.uiVal = at, percent
        return one

    kind = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    nvml(nvmlDeviceGetSamples=lambda *_: (kind, [sample(1, 40), sample(2, 100)]))
    assert binding.samples(DEVICE, 1, 0) == [(1, 40.0), (2, 100.0)]
    nvml(nvmlDeviceGetSamples=fails(Code.NOT_FOUND))
    assert binding.samples(DEVICE, 1, 0) == [], "no new samples"
    nvml(nvmlDeviceGetSamples=lambda *_: (99, [sample(1, 40)]))
    with pytest.raises(NvmlError):
        binding.samples(DEVICE, 1, 0)


def test_gpm_metrics_without_a_value_are_absent(binding: NvmlApi, nvml: Any) -> None:
    def answer(request: Any) -> None:
        assert request.numMetrics == 2
        request.metrics[0].value, request.metrics[0].nvmlReturn = 15.15, 0
        request.metrics[1].value, request.metrics[1].nvmlReturn = 0.0, Code.NOT_SUPPORTED

    nvml(nvmlGpmMetricsGet=answer)
    first, second = (pynvml.c_nvmlGpmSample_t() for _ in range(2))
    assert binding.gpm_metrics(first, second, (2, 5)) == {2: 15.15}


def test_events(binding: NvmlApi, nvml: Any) -> None:
    device = ctypes.cast(ctypes.c_void_p(0x1000), pynvml.c_nvmlDevice_t)
    event = SimpleNamespace(device=device, eventType=8, eventData=31)
    nvml(nvmlEventSetWait_v2=lambda *_: event)
    assert binding.next_xid(object()) == (0x1000, 31)
    assert device_key(Device(device)) == 0x1000
    nvml(nvmlEventSetWait_v2=fails(Code.TIMEOUT))
    assert binding.next_xid(object()) is None
