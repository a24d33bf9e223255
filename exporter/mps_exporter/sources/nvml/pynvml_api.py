"""NVML through pynvml. Only this module imports pynvml; tests replace `NvmlApi.call`.

Most functions are called by their NVML name; functions with structures have methods. Errors of
pynvml become NvmlError, structures plain Python, and a function that the installed pynvml lacks
counts as a function that the driver lacks. Numbers stay in NVML's units: mW, MHz, MiB.

NVML's GPM functions end the process with a segmentation fault if two threads are inside, each with
its own samples (driver 580.159.04); other limits are not documented. So callers must let one call
in at a time, as BlockingCalls does.

A device's values are read through its `DeviceQueries`, so that one rule decides what a refusal
means: never available, not available now, the GPU is gone, or the NVML session is gone.
"""

import ctypes
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, NewType, TypeVar

import pynvml

from mps_exporter.limits_without_a_flag import REFUSED_RETRY_INTERVAL_SECONDS
from mps_exporter.observations import CgroupMemory

log = logging.getLogger(__name__)

T = TypeVar("T")

Device = NewType("Device", object)  # An NVML handle of a GPU or a MIG instance.
ProcessKind = Literal["Compute", "MPSCompute", "Graphics"]
Argument = int | str
Listed = dict[int, int | None]  # PID -> memory in bytes; None if the driver does not report it.


class Code(IntEnum):
    """The return codes of NVML that have a meaning here, as nvml.h numbers them."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


MAY_CHANGE = frozenset({Code.INVALID_ARGUMENT, Code.NO_PERMISSION})
"""Codes of UNSUPPORTED that may end while NVML stays initialized: permissions are granted, or an
argument (a sample, a timestamp, an instance) becomes valid. Such a query is repeated, rarely."""

UNSUPPORTED = MAY_CHANGE | {
    Code.NOT_SUPPORTED,
    Code.FUNCTION_NOT_FOUND,
    Code.ARGUMENT_VERSION_MISMATCH,
    Code.DEPRECATED,
}
"""Codes of lasting refusals by this driver or GPU; only those in MAY_CHANGE may end."""

GPU_GONE = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.GPU_NOT_FOUND})
"""Codes of a GPU that has fallen off the bus or needs a reset; other GPUs may be healthy."""

SESSION_GONE = frozenset(
    {
        Code.UNINITIALIZED,
        Code.DRIVER_NOT_LOADED,
        Code.LIBRARY_NOT_FOUND,
        Code.LIB_RM_VERSION_MISMATCH,
    }
)
"""Codes after which NVML must be initialized again: the driver was unloaded or replaced."""


_CODE_NAMES: dict[int, str] = {
    number: name.removeprefix("NVML_ERROR_")
    for name, number in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}


def code_name(code: int) -> str:
    """``3`` -> ``"NOT_SUPPORTED"``; a code that pynvml does not know -> ``"code 77"``."""
    return _CODE_NAMES.get(code, f"code {code}")


class NvmlError(Exception):
    """NVML refused a call of `function` with `code`."""

    def __init__(self, code: int, function: str) -> None:
        super().__init__(f"{function}: {code_name(code)}")
        self.code = code
        self.function = function


class FieldReply(NamedTuple):
    """One reply of nvmlDeviceGetFieldValues: a value, or the code of the refusal."""

    code: int
    value: float = 0


SPARE_ROWS = 64  # Initial rows for a process list; later, rows over twice its size.
LIST_ATTEMPTS = 3  # Attempts to read a process list: processes may start in between.

FIELD_VALUES = "nvmlDeviceGetFieldValues"
MEMORY_LIMITS = "nvmlDeviceGetMemoryLimits_v1"
UNLIMITED = 0xFFFF_FFFF_FFFF_FFFF  # NVML_DEVICE_MEMORY_LIMIT_MAX, as a hard limit.
NOT_AVAILABLE = 0xFFFF_FFFF_FFFF_FFFF  # NVML's number for unknown memory of a process.

_FIELD_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of the value union, by value type."""


class NvmlApi:
    """NVML. Methods block; one at a time may run."""

    def __init__(self) -> None:
        self.session_gone = False  # Whether a query showed that NVML must be initialized again.
        self._rows = (pynvml.c_nvmlProcessInfo_v2_t * SPARE_ROWS)()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of pynvml; tests replace this method.

        Raises:
            NvmlError: NVML or pynvml refused, with NVML's code.
        """
        function = getattr(pynvml, name, None)
        if function is None:
            raise NvmlError(Code.FUNCTION_NOT_FOUND, name)
        try:
            return function(*arguments)
        except pynvml.NVMLError as error:
            raise NvmlError(error.value, name) from None
        except (ctypes.ArgumentError, UnicodeDecodeError) as error:
            raise NvmlError(Code.UNKNOWN, name) from error

    def numbers(self, function: str, *arguments: object) -> tuple[int, ...]:
        """Call a function; return the numbers of its reply: a number, a list or a structure."""
        reply = self.call(function, *arguments)
        if isinstance(reply, ctypes.Structure):
            reply = [getattr(reply, name) for name, *_ in reply._fields_]
        several = reply if isinstance(reply, (list, tuple)) else (reply,)  # pynvml returns both
        return tuple(int(part) for part in several)

    def number(self, function: str, *arguments: object) -> int:
        """Call a function, and return the first number of its reply."""
        return self.numbers(function, *arguments)[0]

    def text(self, function: str, *arguments: object) -> str:
        """Call a function; return its text, or the bus ID if it returns the PCI structure."""
        reply = self.call(function, *arguments)
        value = getattr(reply, "busId", reply)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def memory(self, device: Device) -> dict[str, int]:
        """Return sizes in bytes by name, with drivers from 510."""
        found = self.call("nvmlDeviceGetMemoryInfo", device, pynvml.nvmlMemory_v2)
        return {name: getattr(found, name) for name in ("total", "used", "free", "reserved")}

    def has(self, function: str) -> bool:
        """Return whether the driver's library and pynvml have a function."""
        try:
            self.call("_nvmlGetFunctionPointer", function)
        except NvmlError:
            return False
        return hasattr(pynvml, function)

    def cgroup_memory(self, device: Device, root: str, path: str) -> CgroupMemory:
        """Return a control group's memory on this GPU; `root`: the mount of cgroup version 2."""
        structure = _structure("c_nvmlGetMemoryLimits_v1_t", MEMORY_LIMITS)
        limits = structure(nameSpace=os.fsencode(f"{root}{path}"))
        self.call(MEMORY_LIMITS, device, limits)
        unlimited = limits.hardLimit == UNLIMITED
        return CgroupMemory(
            path=path,
            pci_bus_id=self.text("nvmlDeviceGetPciInfo", device).lower(),
            used_bytes=limits.currentUsed,
            soft_limit_bytes=limits.softLimit,
            hard_limit_bytes=None if unlimited else limits.hardLimit,
            hard_unlimited=unlimited,
        )

    def fabric_state(self, device: Device) -> int:
        function = "nvmlDeviceGetGpuFabricInfoV"
        info = _structure("c_nvmlGpuFabricInfo_v2_t", function)()
        self.call(function, device, ctypes.byref(info))
        return int(info.state)

    def vgpu_licensed(self, device: Device) -> bool | None:
        """Return whether a vGPU guest holds a licence; None if the guest needs none."""
        features = self.call("nvmlDeviceGetGridLicensableFeatures_v4", device)
        if not features.isGridLicenseSupported:
            return None
        count = features.licensableFeaturesCount
        return any(feature.featureState for feature in features.gridLicensableFeatures[:count])

    def fields(self, device: Device, fields: Sequence[tuple[int, int]]) -> list[FieldReply]:
        """Return the replies to (field ID, scope) pairs, in order."""
        replies = self.call(FIELD_VALUES, device, list(fields))
        return [_field_reply(reply) for reply in replies]

    def processes(self, device: Device, kind: ProcessKind) -> Listed:
        """Read a process list with one driver call, more if rows are too few.

        pynvml makes two calls and an object of each row: 2.1 ms for 40 clients on an H200. Version
        3 of the function returns the same, except with drivers 535.43 to 535.97: rows of another
        size.
        """
        name = f"nvmlDeviceGet{kind}RunningProcesses_v2"
        function = self.call("_nvmlGetFunctionPointer", name)
        code = int(Code.INSUFFICIENT_SIZE)
        for _ in range(LIST_ATTEMPTS):
            rows = self._rows
            count = ctypes.c_uint(len(rows))
            code = int(function(device, ctypes.byref(count), rows))
            if code == 0:
                found = {row.pid: row.usedGpuMemory for row in rows[: count.value]}
                return {pid: None if used == NOT_AVAILABLE else used for pid, used in found.items()}
            if code != Code.INSUFFICIENT_SIZE:
                break
            self._rows = (pynvml.c_nvmlProcessInfo_v2_t * (2 * count.value + SPARE_ROWS))()
        raise NvmlError(code, name)

    def samples(self, device: Device, sampling_type: int, since: int) -> list[tuple[int, float]]:
        """Return (timestamp in µs, value) of each sample after `since`."""
        try:
            kind, samples = self.call("nvmlDeviceGetSamples", device, sampling_type, since)
        except NvmlError as error:
            if error.code == Code.NOT_FOUND:
                return []
            raise
        if not 0 <= kind < len(_FIELD_MEMBERS):
            raise NvmlError(Code.UNKNOWN, "nvmlDeviceGetSamples")
        member = _FIELD_MEMBERS[kind]
        return [(one.timeStamp, float(getattr(one.sampleValue, member))) for one in samples]

    def gpm_metrics(
        self, first: object, second: object, metrics: Sequence[int]
    ) -> Mapping[int, float]:
        """Return the metrics that have a value between two GPM samples."""
        request = pynvml.c_nvmlGpmMetricsGet_t(
            pynvml.NVML_GPM_METRICS_GET_VERSION, len(metrics), first, second
        )
        for slot, metric in enumerate(metrics):
            request.metrics[slot].metricId = metric
        self.call("nvmlGpmMetricsGet", request)
        replies = request.metrics[: len(metrics)]
        return {one.metricId: one.value for one in replies if one.nvmlReturn == 0}

    def next_xid(self, events: object) -> tuple[int, int] | None:
        """Return the key of the device and the code of the next new Xid; None if there is none."""
        try:
            event = self.call("nvmlEventSetWait_v2", events, 0)
        except NvmlError as error:
            if error.code == Code.TIMEOUT:
                return None
            raise
        return device_key(event.device), event.eventData


def _structure(name: str, function: str) -> Any:
    """Return a structure of pynvml, or raise NvmlError: old releases lack it."""
    structure = getattr(pynvml, name, None)
    if structure is None:
        raise NvmlError(Code.FUNCTION_NOT_FOUND, function)
    return structure


def device_key(device: Any) -> int:
    return ctypes.cast(device, ctypes.c_void_p).value or 0


def _field_reply(reply: Any) -> FieldReply:
    if reply.nvmlReturn != 0:
        return FieldReply(int(reply.nvmlReturn))
    if reply.valueType >= len(_FIELD_MEMBERS):
        return FieldReply(Code.UNKNOWN)
    return FieldReply(0, getattr(reply.value, _FIELD_MEMBERS[reply.valueType]))


NEVER_AGAIN = math.inf  # Interval of a value that never changes; delay after a final refusal.

DEFECTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of interpreting an unexpected reply: infinity, a list too short. They cost the reading,
never the source."""
DEFECT = -1  # Code of a defect; none of NVML's.


class GpuGoneError(Exception):
    """The GPU has fallen off the bus or must be reset."""


class DeviceQueries:
    """Queries of one device: values that it has returned, and queries that it has refused."""

    def __init__(
        self,
        api: NvmlApi,
        device: Device,
        device_name: str,
        instance: tuple[Device, int] | None = None,
    ) -> None:
        """`instance`: the GPU of a MIG instance, and the ID of the GPU instance."""
        self.api = api
        self.device = device
        self.instance = instance
        self._device_name = device_name
        self._refused: dict[str, float] = {}  # Query -> time from which it may be repeated.
        self._logged: set[tuple[str, int]] = set()
        self._cached: dict[str, tuple[float, Any]] = {}
        """Query -> time until which the value is fresh, value."""

    def get(
        self, name: str, read: Callable[[], T], now: float = 0.0, every: float = 0.0
    ) -> T | None:
        """Return the value: cached if fresh (for `every` seconds), else queried unless refused.

        Return None if there is no value now; raise GpuGoneError if the GPU is gone.
        """
        if not self.is_due(name, now):
            return None
        cached: T | None = self.cached(name, now)
        if cached is not None:
            return cached
        try:
            value = read()
        except NvmlError as error:
            self.record_refusal(name, error.code, now)
            return None
        except DEFECTS as error:
            self.record_defect(name, error)
            return None
        self.record(name, value, now + every)
        return value

    def call(
        self, method: Callable[..., T], function: str, now: float, every: float = NEVER_AGAIN
    ) -> T | None:
        """Query a function of the device by a method of the API, like get()."""
        return self.get(function, lambda: method(function, self.device), now, every)

    def cached(self, name: str, now: float) -> Any:
        fresh_until, value = self._cached.get(name, (now, None))
        return value if now < fresh_until else None

    def record(self, name: str, value: object, fresh_until: float) -> None:
        """Record a reply, which ends an earlier refusal of the query."""
        self._refused.pop(name, None)
        self._cached[name] = fresh_until, value

    def forget(self, *names: str) -> None:
        """Discard cached values: they are queried again."""
        for name in names:
            self._cached.pop(name, None)

    def record_refusal(self, name: str, code: int, now: float) -> None:
        self.forget(name)
        if code in GPU_GONE:
            raise GpuGoneError(f"{name}: {code_name(code)}")
        if code in SESSION_GONE:
            self.api.session_gone = True
        elif code in UNSUPPORTED:
            delay = REFUSED_RETRY_INTERVAL_SECONDS if code in MAY_CHANGE else NEVER_AGAIN
            self._refused[name] = now + delay
            level = logging.INFO if code == Code.NO_PERMISSION else logging.DEBUG
            self._log_once(name, code, level, "not available here", code_name(code))
        else:
            self._log_once(name, code, logging.DEBUG, "left out this time", code_name(code))

    def record_defect(self, name: str, error: Exception) -> None:
        """Log, once, that a reply cannot be interpreted."""
        self.forget(name)
        self._log_once(name, DEFECT, logging.WARNING, "left out: a defect", repr(error))

    def _log_once(self, name: str, code: int, level: int, what: str, why: str) -> None:
        if (name, code) not in self._logged:
            self._logged.add((name, code))
            log.log(level, "%s: %s: %s: %s", self._device_name, what, name, why)

    def is_supported(self, name: str) -> bool:
        """Return whether the query is not refused as unsupported."""
        return name not in self._refused

    def is_due(self, name: str, now: float) -> bool:
        """Return whether to send a query: it is not refused, or a retry is due."""
        return now >= self._refused.get(name, 0.0)

    def clear(self) -> None:
        """Drop replies and refusals: the device has changed."""
        self._refused.clear()
        self._logged.clear()
        self._cached.clear()
