"""What this package asks of NVML, as a small Protocol: the one seam that tests replace.

Most NVML functions take a device and give a number or a word; those go through ``number``,
``numbers`` and ``text`` under their own NVML name. The few that take or give structures have a
method each. Every method raises :class:`NvmlError` with NVML's code, and nothing else.

Numbers are in NVML's own units: mW, MHz, MiB, percent. Turning them into base units is the
business of the table in ``readings.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NewType, Protocol

Device = NewType("Device", object)
"""An NVML device handle: a GPU or a MIG instance. Opaque."""

EventSet = NewType("EventSet", object)
GpmSample = NewType("GpmSample", object)


class Code(IntEnum):
    """NVML's return codes, as nvml.h numbers them."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    ALREADY_INITIALIZED = 5
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    CORRUPTED_INFOROM = 14
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    MEMORY = 20
    NO_DATA = 21
    VGPU_ECC_NOT_SUPPORTED = 22
    INSUFFICIENT_RESOURCES = 23
    FREQ_NOT_SUPPORTED = 24
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    NOT_READY = 27
    GPU_NOT_FOUND = 28
    INVALID_STATE = 29
    RESET_TYPE_NOT_SUPPORTED = 30
    UNKNOWN = 999


UNSUPPORTED = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.NOT_SUPPORTED,
        Code.NO_PERMISSION,
        Code.FUNCTION_NOT_FOUND,
        Code.VGPU_ECC_NOT_SUPPORTED,
        Code.FREQ_NOT_SUPPORTED,
        Code.ARGUMENT_VERSION_MISMATCH,
        Code.DEPRECATED,
        Code.RESET_TYPE_NOT_SUPPORTED,
    }
)
"""This driver or this GPU does not have it: no use in asking again."""

MAY_CHANGE = frozenset({Code.INVALID_ARGUMENT, Code.NO_PERMISSION})
"""Those of them that may be lifted while NVML stays initialized: rights are given, and an argument
that means nothing now (a sample, a timestamp, an instance) may mean something later. Such a
question is put again, rarely."""

GPU_GONE = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.GPU_NOT_FOUND})
"""This GPU has fallen off the bus or needs a reset; the others may be well."""

SESSION_GONE = frozenset(
    {
        Code.UNINITIALIZED,
        Code.DRIVER_NOT_LOADED,
        Code.LIBRARY_NOT_FOUND,
        Code.LIB_RM_VERSION_MISMATCH,
    }
)
"""NVML as a whole must be initialized again: the driver was unloaded or replaced."""


def code_name(code: int) -> str:
    """``3`` -> ``"NOT_SUPPORTED"``; a code newer than this list -> ``"code 77"``."""
    try:
        return Code(code).name
    except ValueError:
        return f"code {code}"


class NvmlError(Exception):
    """NVML refused: ``code`` says why, ``function`` says which call."""

    def __init__(self, code: int, function: str) -> None:
        super().__init__(f"{function}: {code_name(code)}")
        self.code = code
        self.function = function


@dataclass(frozen=True, slots=True)
class Memory:
    """Framebuffer memory in bytes.

    ``reserved`` is None where only the old call answers, which counts what the driver reserves as
    used.
    """

    total: int
    used: int
    free: int
    reserved: int | None = None


@dataclass(frozen=True, slots=True)
class CgroupMemoryLimits:
    """Device memory of a control group in bytes; hard is None where it is unlimited."""

    soft: int
    hard: int | None
    used: int


@dataclass(frozen=True, slots=True)
class ListedProcess:
    """A row of a process list; memory in bytes, None where the driver does not report it."""

    pid: int
    used_memory: int | None


@dataclass(frozen=True, slots=True)
class FieldAnswer:
    """One answer of nvmlDeviceGetFieldValues: a value, or the code that says why not."""

    code: int
    value: float = 0


@dataclass(frozen=True, slots=True)
class NvmlEvent:
    """Something NVML reports by itself: for an Xid, ``data`` is its code."""

    device_key: int
    type: int
    data: int


ProcessKind = Literal["Compute", "MPSCompute", "Graphics"]
Argument = int | str


class NvmlApi(Protocol):
    """NVML, as far as it is used here. All methods block.

    They may be called from any thread; all but ``wait_event`` let one caller in at a time. Before
    ``shutdown``, no thread may be in ``wait_event``.
    """

    def init(self) -> None:
        """Load the library and call nvmlInit."""

    def shutdown(self) -> None:
        """Call nvmlShutdown; handles are void afterwards."""

    def system_number(self, function: str) -> int:
        """A function without a device that returns one number."""

    def system_text(self, function: str) -> str:
        """A function without a device that returns text."""

    def device(self, index: int) -> Device:
        """Call nvmlDeviceGetHandleByIndex_v2."""

    def mig_device(self, parent: Device, index: int) -> Device:
        """Call nvmlDeviceGetMigDeviceHandleByIndex; NOT_FOUND where the slot is empty."""

    def device_key(self, device: Device) -> int:
        """A number that is the same for the same device as long as NVML stays initialized."""

    def number(self, function: str, device: Device, *arguments: Argument) -> int:
        """A function that returns one number."""

    def numbers(self, function: str, device: Device, *arguments: Argument) -> tuple[int, ...]:
        """A function that returns several numbers, or a structure of numbers in its own order."""

    def text(self, function: str, device: Device, *arguments: Argument) -> str:
        """A function that returns text."""

    def memory(self, device: Device) -> Memory:
        """Call nvmlDeviceGetMemoryInfo_v2, or the older nvmlDeviceGetMemoryInfo."""

    def has(self, function: str) -> bool:
        """Whether the driver's library and the binding have a function."""

    def memory_limits(self, device: Device, cgroup: str) -> CgroupMemoryLimits:
        """Call nvmlDeviceGetMemoryLimits_v1 (driver 615) for the directory of a control group."""

    def pci_bus_id(self, device: Device) -> str:
        """The bus id out of nvmlDeviceGetPciInfo_v3, "00000000:18:00.0"."""

    def sm_count(self, device: Device) -> int:
        """The SMs of a MIG instance, by nvmlDeviceGetAttributes_v2."""

    def fabric_state(self, device: Device) -> int:
        """The state out of nvmlDeviceGetGpuFabricInfoV: 0 to 3."""

    def vgpu_licensed(self, device: Device) -> bool | None:
        """Whether a vGPU guest holds a licence; None where none is needed.

        Out of nvmlDeviceGetGridLicensableFeatures_v4.
        """

    def fields(self, device: Device, fields: Sequence[tuple[int, int]]) -> list[FieldAnswer]:
        """Call nvmlDeviceGetFieldValues for (field id, scope) pairs; answers in their order."""

    def processes(self, device: Device, kind: ProcessKind) -> list[ListedProcess]:
        """Call nvmlDeviceGet{kind}RunningProcesses, in the version whose structure is known."""

    def samples(self, device: Device, sampling_type: int, since: int) -> list[tuple[int, float]]:
        """Call nvmlDeviceGetSamples: (timestamp in µs, value) of each sample after ``since``.

        Empty when there is none.
        """

    def gpm_supported(self, device: Device) -> bool:
        """Call nvmlGpmQueryDeviceSupport."""

    def gpm_allocate(self) -> GpmSample:
        """Call nvmlGpmSampleAlloc."""

    def gpm_free(self, sample: GpmSample) -> None:
        """Call nvmlGpmSampleFree."""

    def gpm_take(self, device: Device, sample: GpmSample, gpu_instance: int | None) -> None:
        """Fill a sample: nvmlGpmSampleGet, or nvmlGpmMigSampleGet for a GPU instance."""

    def gpm_metrics(
        self, first: GpmSample, second: GpmSample, metrics: Sequence[int]
    ) -> Mapping[int, float]:
        """Call nvmlGpmMetricsGet; only the metrics that have a value are in the result."""

    def event_set(self) -> EventSet:
        """Call nvmlEventSetCreate."""

    def register_events(self, device: Device, types: int, events: EventSet) -> None:
        """Call nvmlDeviceRegisterEvents."""

    def wait_event(self, events: EventSet, timeout_milliseconds: int) -> NvmlEvent | None:
        """Call nvmlEventSetWait_v2; None when the time is up."""

    def free_event_set(self, events: EventSet) -> None:
        """Call nvmlEventSetFree."""
