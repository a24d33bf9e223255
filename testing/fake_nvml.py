"""A simulated NVML with the recorded replies of an H200, which can fail on request.

Replies are by NVML function with its arguments: nvml_h200.json has those of driver 580. Values that
change over time (samples, GPM counters, events) are calculated from a load. Calls that would end a
process in NVML fail an assertion.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from mps_exporter.observations import CgroupMemory
from mps_exporter.sources.nvml.pynvml_api import (
    Code,
    Device,
    FieldReply,
    Listed,
    NvmlApi,
    NvmlError,
    ProcessKind,
)

RECORDED = Path(__file__).with_name("nvml_h200.json")
SAMPLE_PERIOD = 0.2
SAMPLES_KEPT = 71
EPOCH = 1_700_000_000.0

_keys = count(0x7F0000000000, 0x1000)


@cache
def recorded() -> Mapping[str, Any]:
    """Return the recorded replies, which all fakes share."""
    replies: dict[str, Any] = json.loads(RECORDED.read_text())
    return MappingProxyType(replies)


@dataclass(eq=False)
class FakeDevice:
    """A GPU or a MIG instance: its replies and its load."""

    uuid: str
    replies: Mapping[str, Any] = field(default_factory=recorded)
    busy: Callable[[float], float] = lambda _now: 0.0
    """Seconds of work done until a time of the fake's clock; the slope is the utilization."""
    metrics: dict[int, float] = field(default_factory=dict)
    """GPM percentages while busy, and MiB/s, by metric."""
    processes: dict[str, Listed] = field(default_factory=dict)
    instances: dict[int, FakeDevice] = field(default_factory=dict)  # MIG instances by slot.
    gone: Code | None = None  # Code of all calls after the GPU has fallen off the bus.
    key: int = field(default_factory=lambda: next(_keys))

    @property
    def _as_parameter_(self) -> int:
        """The handle's address, for ctypes."""
        return self.key

    def __post_init__(self) -> None:
        self.replies = {**self.replies, "nvmlDeviceGetUUID()": self.uuid}


@dataclass
class _Sample:
    at: float = 0.0
    device: FakeDevice | None = None


class FakeNvml(NvmlApi):
    def __init__(self, *gpus: FakeDevice) -> None:
        super().__init__()
        self.gpus = list(gpus)
        self.now = 1000.0
        self.clock_steps: list[tuple[float, float]] = []
        """Times at which the host's clock, the clock of the samples, was set; and the steps."""
        self.initialized = 0
        self.calls: Counter[str] = Counter()
        self.failing: dict[str, int] = {}
        self.functions: set[str] = set()
        """Functions that the library has in addition to the recorded functions."""
        self.events: list[tuple[int, int]] = []
        self.confidential = 0
        self.live_samples = 0

    def fail(self, function: str, code: int | None) -> None:
        """Make a function fail, or all functions (""); the code None ends the failure."""
        if code is None:
            self.failing.pop(function, None)
        else:
            self.failing[function] = code

    def wall(self, now: float | None = None) -> float:
        """Return the time of the host's clock."""
        at = self.now if now is None else now
        return EPOCH + at + sum(step for since, step in self.clock_steps if at > since)

    def xid(self, gpu: FakeDevice, code: int) -> None:
        self.events.append((gpu.key, code))

    def _enter(self, function: str, device: object = None) -> FakeDevice:
        self.calls[function] += 1
        code = self.failing.get(function, self.failing.get(""))
        if code is not None:
            raise NvmlError(code, function)
        if not self.initialized and function != "nvmlInit":
            raise NvmlError(Code.UNINITIALIZED, function)
        if isinstance(device, FakeDevice) and device.gone is not None:
            raise NvmlError(device.gone, function)
        return cast("FakeDevice", device)

    def call(self, name: str, *arguments: Any) -> Any:
        """Reply to a function without structures."""
        device = arguments[0] if arguments else None
        if name == "nvmlDeviceGetHandleByIndex":
            device = self.gpus[arguments[0]]
        self._before(name)
        try:
            gpu = self._enter(name, device)
        finally:
            if name == "nvmlShutdown":
                self.initialized = max(0, self.initialized - 1)
        self.initialized += name == "nvmlInit"
        match name:
            case "nvmlDeviceGetHandleByIndex":
                return device
            case "nvmlDeviceGetMigDeviceHandleByIndex":
                if arguments[1] not in gpu.instances:
                    raise NvmlError(Code.NOT_FOUND, name)
                return gpu.instances[arguments[1]]
            case "nvmlGpmQueryDeviceSupport":
                return SimpleNamespace(isSupportedDevice=bool(gpu.metrics))
            case "nvmlGpmSampleGet" | "nvmlGpmMigSampleGet":
                *instance, sample = arguments[1:]
                _take(sample, self.now, gpu, *instance)
                return None
            case "nvmlGpmSampleAlloc":
                self.live_samples += 1
                return _Sample()
            case _ if isinstance(device, FakeDevice) and name != "nvmlDeviceRegisterEvents":
                return self._recorded(name, device, *arguments[1:])
        return self._of_the_host().get(name)

    def _before(self, name: str) -> None:
        """Do what NVML does even if the driver refuses."""
        if name == "nvmlEventSetFree":
            assert self.initialized, "freed after the shutdown: the process ends"
            self.events.clear()
        self.live_samples -= name == "nvmlGpmSampleFree"  # memory of the process

    def _of_the_host(self) -> dict[str, object]:
        return {
            "nvmlDeviceGetCount": len(self.gpus),
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlSystemGetDriverVersion": "580.159.04",
            "nvmlSystemGetConfComputeState": SimpleNamespace(ccFeature=self.confidential),
            "nvmlEventSetCreate": object(),
        }

    def _recorded(
        self, function: str, device: FakeDevice, *arguments: object, name: str = ""
    ) -> Any:
        name = name or f"{function}({', '.join(map(str, arguments))})"
        reply = device.replies.get(name, {"code": Code.NOT_SUPPORTED})
        if isinstance(reply, dict) and "code" in reply:
            raise NvmlError(reply["code"], function)
        return reply

    def _method(self, function: str, name: str, device: Device) -> Any:
        return self._recorded(function, self._enter(function, device), name=name)

    def memory(self, device: Device) -> dict[str, int]:
        return dict(self._method("nvmlDeviceGetMemoryInfo", "memory()", device))

    def has(self, function: str) -> bool:
        return function in self.functions

    def cgroup_memory(self, device: Device, root: str, path: str) -> CgroupMemory:
        name = f"cgroup_memory({root}, {path})"
        reply = self._method("nvmlDeviceGetMemoryLimits_v1", name, device)
        return CgroupMemory(path, self.text("nvmlDeviceGetPciInfo", device).lower(), *reply)

    def fabric_state(self, device: Device) -> int:
        return int(self._method("nvmlDeviceGetGpuFabricInfoV", "fabric_state()", device))

    def vgpu_licensed(self, device: Device) -> bool | None:
        function = "nvmlDeviceGetGridLicensableFeatures_v4"
        reply: bool | None = self._method(function, "vgpu_licensed()", device)
        return reply

    def fields(self, device: Device, fields: Sequence[tuple[int, int]]) -> list[FieldReply]:
        gpu = self._enter("nvmlDeviceGetFieldValues", device)
        known = gpu.replies.get("fields", {})
        unknown = {"code": Code.NOT_SUPPORTED}
        return [FieldReply(**known.get(f"{one}:{scope}", unknown)) for one, scope in fields]

    def processes(self, device: Device, kind: ProcessKind) -> Listed:
        gpu = self._enter(f"nvmlDeviceGet{kind}RunningProcesses", device)
        return gpu.processes.get(kind, {})

    def samples(self, device: Device, sampling_type: int, since: int) -> list[tuple[int, float]]:
        gpu = self._enter("nvmlDeviceGetSamples", device)
        assert sampling_type == 1
        last = int(self.now / SAMPLE_PERIOD)
        found = []
        for tick in range(max(1, last - SAMPLES_KEPT + 1), last + 1):
            at = tick * SAMPLE_PERIOD
            percent = (gpu.busy(at) - gpu.busy(at - SAMPLE_PERIOD)) / SAMPLE_PERIOD * 100
            stamp = round(self.wall(at) * 1e6)
            if stamp > since:
                found.append((stamp, percent))
        return found

    def gpm_metrics(
        self, first: object, second: object, metrics: Sequence[int]
    ) -> Mapping[int, float]:
        self._enter("nvmlGpmMetricsGet")
        before, after = cast("_Sample", first), cast("_Sample", second)
        gpu = after.device
        assert gpu is not None
        assert gpu is before.device
        share = (gpu.busy(after.at) - gpu.busy(before.at)) / (after.at - before.at)
        return {one: gpu.metrics[one] * share for one in metrics if one in gpu.metrics}

    def next_xid(self, events: object) -> tuple[int, int] | None:
        assert events is not None
        assert self.initialized, "read after the shutdown: the process ends"
        self._enter("nvmlEventSetWait_v2")
        return self.events.pop(0) if self.events else None


def _take(sample: _Sample, at: float, gpu: FakeDevice, instance: int | None = None) -> None:
    """Fill a GPM sample, of a GPU or of its GPU instance."""
    devices = [gpu] if instance is None else gpu.instances.values()
    for device in devices:
        if instance in (None, device.replies.get("nvmlDeviceGetGpuInstanceId()")):
            sample.at, sample.device = at, device
            return
    raise NvmlError(Code.NOT_FOUND, "nvmlGpmMigSampleGet")
