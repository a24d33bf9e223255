"""NVML itself, through pynvml: the only module that imports it.

pynvml's errors become :class:`NvmlError`, its structures become plain Python. A function that the
installed pynvml does not know counts as one that the driver does not have.

NVML is one per process. Its GPM functions end the process with a segmentation fault when two
threads are inside, each with samples of its own (driver 580.159.04), and which others may is not
written down. So one lock for the whole process lets one call in at a time. Only waiting for events
happens outside of it; whoever shuts NVML down must first have seen the waiting thread come out.
"""
# what the methods do is said once, in the Protocol

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pynvml

from mps_exporter.sources.nvml.api import (
    Argument,
    CgroupMemoryLimits,
    Code,
    Device,
    EventSet,
    FieldAnswer,
    GpmSample,
    ListedProcess,
    Memory,
    NvmlError,
    NvmlEvent,
    ProcessKind,
)

PROCESS_INFO_BYTES = 24
"""Of the process structure with which _v2 and _v3 agree; some releases had a larger one."""

SPARE_ROWS = 64
"""Rows of a process list before it is known how many there are, and beyond those there were."""
LIST_ATTEMPTS = 3
"""Processes may start between two attempts."""

BROKEN_V3 = ((535, 43), (535, 98))
"""Drivers from the first up to, without, the second fill _v3 with rows of another size."""

UNLIMITED = 0xFFFF_FFFF_FFFF_FFFF
"""NVML_DEVICE_MEMORY_LIMIT_MAX, as a hard limit."""

LOCK = threading.Lock()
"""Held by whoever is inside NVML."""

_MISMATCH: tuple[type[Exception], ...] = (
    (pynvml.NVMLLibraryMismatchError,) if hasattr(pynvml, "NVMLLibraryMismatchError") else ()
)
"""What newer releases raise for a structure that the driver does not know."""

_FIELD_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Which member of the value union holds, by value type."""


class _ProcessRow(ctypes.Structure):
    """nvmlProcessInfo_t, as versions 2 and 3 of the calls fill it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    )


class PynvmlApi:
    """:class:`mps_exporter.sources.nvml.api.NvmlApi` on the real thing."""

    def __init__(self) -> None:
        self._processes_version = ""
        self._rows = (_ProcessRow * SPARE_ROWS)()

    def _call(self, name: str, *arguments: Any) -> Any:
        with LOCK:
            return self._call_unlocked(name, *arguments)

    def _call_unlocked(self, name: str, *arguments: Any) -> Any:
        function = getattr(pynvml, name, None)
        if function is None:
            raise NvmlError(Code.FUNCTION_NOT_FOUND, name)
        try:
            return function(*arguments)
        except pynvml.NVMLError as error:
            raise NvmlError(error.value, name) from None
        except _MISMATCH:
            raise NvmlError(Code.FUNCTION_NOT_FOUND, name) from None
        except (ctypes.ArgumentError, UnicodeDecodeError) as error:
            raise NvmlError(Code.UNKNOWN, name) from error

    def init(self) -> None:
        self._call("nvmlInit")
        self._processes_version = ""

    def shutdown(self) -> None:
        self._call("nvmlShutdown")

    def system_number(self, function: str) -> int:
        return int(self._call(function))

    def system_text(self, function: str) -> str:
        return _word(self._call(function))

    def device(self, index: int) -> Device:
        return Device(self._call("nvmlDeviceGetHandleByIndex", index))

    def mig_device(self, parent: Device, index: int) -> Device:
        return Device(self._call("nvmlDeviceGetMigDeviceHandleByIndex", parent, index))

    def device_key(self, device: Device) -> int:
        return _address(device)

    def number(self, function: str, device: Device, *arguments: Argument) -> int:
        return int(self._call(function, device, *arguments))

    def numbers(self, function: str, device: Device, *arguments: Argument) -> tuple[int, ...]:
        answer = self._call(function, device, *arguments)
        if isinstance(answer, ctypes.Structure):
            return tuple(int(getattr(answer, name)) for name, *_ in answer._fields_)
        return tuple(int(part) for part in answer)

    def text(self, function: str, device: Device, *arguments: Argument) -> str:
        return _word(self._call(function, device, *arguments))

    def memory(self, device: Device) -> Memory:
        try:
            full = self._call("nvmlDeviceGetMemoryInfo", device, pynvml.nvmlMemory_v2)
        except NvmlError as error:
            if error.code not in {Code.FUNCTION_NOT_FOUND, Code.ARGUMENT_VERSION_MISMATCH}:
                raise
            old = self._call("nvmlDeviceGetMemoryInfo", device)
            return Memory(old.total, old.used, old.free)
        return Memory(full.total, full.used, full.free, full.reserved)

    def has(self, function: str) -> bool:
        try:
            self._call("_nvmlGetFunctionPointer", function)
        except NvmlError:
            return False
        return hasattr(pynvml, function)

    def memory_limits(self, device: Device, cgroup: str) -> CgroupMemoryLimits:
        name = "nvmlDeviceGetMemoryLimits_v1"
        structure = getattr(pynvml, "c_nvmlGetMemoryLimits_v1_t", None)
        if structure is None:
            raise NvmlError(Code.FUNCTION_NOT_FOUND, name)
        limits = structure(nameSpace=os.fsencode(cgroup))
        self._call(name, device, limits)
        hard = None if limits.hardLimit == UNLIMITED else limits.hardLimit
        return CgroupMemoryLimits(limits.softLimit, hard, limits.currentUsed)

    def pci_bus_id(self, device: Device) -> str:
        return _word(self._call("nvmlDeviceGetPciInfo", device).busId)

    def sm_count(self, device: Device) -> int:
        return int(self._call("nvmlDeviceGetAttributes_v2", device).multiprocessorCount)

    def fabric_state(self, device: Device) -> int:
        structure = getattr(pynvml, "c_nvmlGpuFabricInfo_v2_t", None)
        if structure is None:
            raise NvmlError(Code.FUNCTION_NOT_FOUND, "nvmlDeviceGetGpuFabricInfoV")
        info = structure()
        self._call("nvmlDeviceGetGpuFabricInfoV", device, ctypes.byref(info))
        return int(info.state)

    def vgpu_licensed(self, device: Device) -> bool | None:
        features = self._call("nvmlDeviceGetGridLicensableFeatures_v4", device)
        if not features.isGridLicenseSupported:
            return None
        count = features.licensableFeaturesCount
        return any(feature.featureState for feature in features.gridLicensableFeatures[:count])

    def fields(self, device: Device, fields: Sequence[tuple[int, int]]) -> list[FieldAnswer]:
        answers = self._call("nvmlDeviceGetFieldValues", device, list(fields))
        return [_field_answer(answer) for answer in answers]

    def processes(self, device: Device, kind: ProcessKind) -> list[ListedProcess]:
        if not self._processes_version:
            self._processes_version = self._choose_processes_version()
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        try:
            return self._list(f"{name}{self._processes_version}", device)
        except NvmlError as error:
            if error.code != Code.FUNCTION_NOT_FOUND or self._processes_version != "_v3":
                raise
            return self._list(f"{name}_v2", device)

    def _list(self, name: str, device: Device) -> list[ListedProcess]:
        """Fill our own rows: one call into the driver.

        pynvml's function makes two, the first to learn how many rows there are, and an object of
        each row: 2.1 ms with 40 clients on an H200.
        """
        function = self._call("_nvmlGetFunctionPointer", name)
        code = int(Code.INSUFFICIENT_SIZE)
        for _ in range(LIST_ATTEMPTS):
            rows = self._rows
            count = ctypes.c_uint(len(rows))
            with LOCK:
                code = int(function(device, ctypes.byref(count), rows))
            if code == 0:
                return [ListedProcess(row.pid, row.usedGpuMemory) for row in rows[: count.value]]
            if code != Code.INSUFFICIENT_SIZE:
                break
            self._rows = (_ProcessRow * (2 * count.value + SPARE_ROWS))()
        raise NvmlError(code, name)

    def _choose_processes_version(self) -> str:
        """The version of the call whose structure driver and pynvml agree on."""
        structure = getattr(pynvml, "c_nvmlProcessInfo_v3_t", pynvml.c_nvmlProcessInfo_t)
        if ctypes.sizeof(structure) != PROCESS_INFO_BYTES:
            return "_v2"
        words = self.system_text("nvmlSystemGetDriverVersion").split(".")
        driver = tuple(int(word) for word in words[:2] if word.isdecimal())
        return "_v2" if BROKEN_V3[0] <= driver < BROKEN_V3[1] else "_v3"

    def samples(self, device: Device, sampling_type: int, since: int) -> list[tuple[int, float]]:
        try:
            kind, samples = self._call("nvmlDeviceGetSamples", device, sampling_type, since)
        except NvmlError as error:
            if error.code == Code.NOT_FOUND:
                return []
            raise
        if not 0 <= kind < len(_FIELD_VALUES):
            raise NvmlError(Code.UNKNOWN, "nvmlDeviceGetSamples")
        member = _FIELD_VALUES[kind]
        return [(one.timeStamp, float(getattr(one.sampleValue, member))) for one in samples]

    def gpm_supported(self, device: Device) -> bool:
        return bool(self._call("nvmlGpmQueryDeviceSupport", device).isSupportedDevice)

    def gpm_allocate(self) -> GpmSample:
        return GpmSample(self._call("nvmlGpmSampleAlloc"))

    def gpm_free(self, sample: GpmSample) -> None:
        self._call("nvmlGpmSampleFree", sample)

    def gpm_take(self, device: Device, sample: GpmSample, gpu_instance: int | None) -> None:
        if gpu_instance is None:
            self._call("nvmlGpmSampleGet", device, sample)
        else:
            self._call("nvmlGpmMigSampleGet", device, gpu_instance, sample)

    def gpm_metrics(
        self, first: GpmSample, second: GpmSample, metrics: Sequence[int]
    ) -> Mapping[int, float]:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(metrics)
        request.sample1 = first
        request.sample2 = second
        for slot, metric in enumerate(metrics):
            request.metrics[slot].metricId = metric
        self._call("nvmlGpmMetricsGet", request)
        answers = request.metrics[: len(metrics)]
        return {one.metricId: one.value for one in answers if one.nvmlReturn == 0}

    def event_set(self) -> EventSet:
        return EventSet(self._call("nvmlEventSetCreate"))

    def register_events(self, device: Device, types: int, events: EventSet) -> None:
        self._call("nvmlDeviceRegisterEvents", device, types, events)

    def wait_event(self, events: EventSet, timeout_milliseconds: int) -> NvmlEvent | None:
        try:
            event = self._call_unlocked("nvmlEventSetWait_v2", events, timeout_milliseconds)
        except NvmlError as error:
            if error.code == Code.TIMEOUT:
                return None
            raise
        return NvmlEvent(_address(event.device), event.eventType, event.eventData)

    def free_event_set(self, events: EventSet) -> None:
        self._call("nvmlEventSetFree", events)


def _word(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _address(device: Any) -> int:
    return ctypes.cast(device, ctypes.c_void_p).value or 0


def _field_answer(answer: Any) -> FieldAnswer:
    if answer.nvmlReturn != 0:
        return FieldAnswer(int(answer.nvmlReturn))
    if answer.valueType >= len(_FIELD_VALUES):
        return FieldAnswer(Code.UNKNOWN)
    return FieldAnswer(0, getattr(answer.value, _FIELD_VALUES[answer.valueType]))
