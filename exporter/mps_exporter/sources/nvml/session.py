"""NVML as a source: opens the devices, reads them, counts Xid errors, recovers after errors.

NVML is initialized at the first observation. It is initialized again when the driver was reloaded,
when the set of GPUs that the kernel lists changed, and while a GPU is lost: every two minutes,
just after a collection, since it costs the healthy GPUs a second of their GPM counters. All
counters continue.

An Xid is the driver's number for an error on a GPU (13: a program's exception, 31: its illegal
memory access, 48: double-bit ECC error, 79: the GPU has fallen off the bus). NVML reports each Xid
once, as an event, to the programs that registered for events, and keeps it until it is read.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import (
    CgroupMemory,
    GpuObservation,
    NvmlObservation,
    Outcome,
    Reading,
)
from mps_exporter.sources.nvml.accumulators import Accumulators
from mps_exporter.sources.nvml.device import LOST, GpuReader
from mps_exporter.sources.nvml.pynvml_api import (
    GPU_GONE,
    MEMORY_LIMITS,
    SESSION_GONE,
    Code,
    Device,
    NvmlApi,
    NvmlError,
    code_name,
    device_key,
)

log = logging.getLogger(__name__)

NEVER = float("inf")

XID_CRITICAL_ERROR = 0x8  # nvmlEventTypeXidCriticalError.

REMEDIES: dict[int, str] = {
    Code.LIBRARY_NOT_FOUND: (
        "libnvidia-ml.so.1 was not found: no NVIDIA driver (a login node? run this where the GPUs "
        "are), or a container without the NVIDIA runtime (NVIDIA_DRIVER_CAPABILITIES=utility)"
    ),
    Code.DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded: modprobe nvidia",
    Code.LIB_RM_VERSION_MISMATCH: (
        "NVML and the loaded kernel driver are of different versions: the driver was updated "
        "while it was in use; reload it or reboot"
    ),
    Code.NO_PERMISSION: "no permission to open /dev/nvidiactl and /dev/nvidia*",
}


class NvmlSession:
    """The GPUs of this host. Not thread-safe: one method at a time may run."""

    def __init__(
        self,
        api: NvmlApi | None = None,
        *,
        serials: bool = False,
        driver_directory: str = "/proc/driver/nvidia/gpus",
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`serials`: whether serial numbers are read.

        `driver_directory` lists the GPUs bound to the driver.
        """
        self._api = api or NvmlApi()
        self._serials = serials
        self._driver_directory = driver_directory
        self._now, self._clock = now, clock
        self._open = False
        self.has_memory_limits = False  # Whether NVML reads control groups' memory.
        self._state = NvmlObservation(0.0, Outcome.OK)
        """Versions, or why no GPU can be read: the next observation, without time and GPUs."""
        self._transitions = TransitionLogger(log)
        self._lost: frozenset[str] = frozenset()
        self._retry_at = 0.0  # Time of the next attempt after an error.
        self._reopen_at = NEVER
        self._observed_at = 0.0
        self._bound: frozenset[str] | None = None
        self._gpus: list[GpuReader] = []
        self._missing_gpus: list[GpuObservation] = []
        self._known_gpus: dict[str, GpuObservation] = {}
        """UUID -> observation while the GPU is gone, of each GPU that was ever read."""
        self._accumulators: dict[str, Accumulators] = {}
        self._xids = XidCounter(self._api, now)

    def observe(self) -> NvmlObservation:
        """Read all GPUs. Blocks; errors of NVML are part of the observation, not raised."""
        at, self._observed_at = self._now(), self._clock()
        self._ensure_open()
        gpus = self._observe_gpus()
        if self._api.session_gone:
            gpus = self._reopen()
        if self._open:
            self._record_losses(gpus)
        return replace(self._state, at=at, gpus=tuple(gpus))

    def tick(self) -> None:
        """Sample activity, renew slow values, count Xids, and open lost GPUs again if due."""
        if not self._open:
            return
        now = self._clock()
        if now >= self._reopen_at and now - self._observed_at < 2 * policy.TICK_INTERVAL_SECONDS:
            # Just after a collection: by the next collection the new handles have a GPM interval.
            gpus = self._reopen()
            if self._open:
                self._record_losses(gpus)
            return
        for reader in self._gpus:
            reader.tick(now)
        self._xids.read(self._gpus, now)

    def memory_limits(self, root: str, paths: Sequence[str]) -> tuple[CgroupMemory, ...]:
        """Return the memory of control groups that use GPU memory or have a limit.

        `root`: mount of cgroup version 2. MIG GPUs, and groups over a maximum, are omitted.
        """
        found: list[CgroupMemory] = []
        for device in [reader.device for reader in self._gpus if not reader.is_divided]:
            for path in paths[: policy.MAX_CGROUPS_PER_GPU]:
                with suppress(NvmlError):  # the group was removed, or is not accounted
                    found.append(self._api.cgroup_memory(device, root, path))
        return tuple(one for one in found if one.used_bytes or one.limited)

    # The session: from nvmlInit to nvmlShutdown

    def _reopen(self) -> list[GpuObservation]:
        """Initialize NVML again, and read all GPUs."""
        self.close()
        self._ensure_open()
        return self._observe_gpus()

    def _ensure_open(self) -> None:
        """Open NVML if it is closed, and again if GPUs changed."""
        now = self._clock()
        bound: frozenset[str] | None = None
        with suppress(OSError):
            bound = frozenset(os.listdir(self._driver_directory))  # noqa: PTH208
        if bound == self._bound and (self._open or now < self._retry_at):
            return
        self._bound, self._retry_at = bound, 0.0
        self.close()
        try:
            self._open_session()
        except NvmlError as error:
            self.close()
            self._retry_at = now + policy.INIT_RETRY_INTERVAL_SECONDS
            text = REMEDIES.get(error.code, str(error))
            outcome = Outcome.ABSENT if error.code in SESSION_GONE else Outcome.REFUSED
            self._state = NvmlObservation(0.0, outcome, text)
            return
        self._reopen_at = NEVER

    def _open_session(self) -> None:
        self._api.call("nvmlInit")
        self._open = True
        driver = cuda = None
        with suppress(NvmlError):
            driver = self._api.text("nvmlSystemGetDriverVersion")
        with suppress(NvmlError):
            number = self._api.number("nvmlSystemGetCudaDriverVersion_v2")
            cuda = f"{number // 1000}.{number % 1000 // 10}"
        confidential = False
        with suppress(NvmlError):
            confidential = bool(self._api.call("nvmlSystemGetConfComputeState").ccFeature)
        self.has_memory_limits = self._api.has(MEMORY_LIMITS)
        count = self._api.number("nvmlDeviceGetCount")
        gone = [index for index in range(count) if not self._add_gpu(index)]
        self._missing_gpus = list(self._missing(gone))
        self._state = NvmlObservation(0.0, Outcome.OK, None, driver, cuda, confidential)

    def _missing(self, gone: list[int]) -> Iterator[GpuObservation]:
        """Yield the known GPUs that are missing, and the missing GPUs whose UUID was never read.

        Each known missing GPU explains one unreadable index: its own, or another, since indexes
        shift when a GPU is missing. Each other unreadable index is an unknown GPU.
        """
        here = {reader.uuid for reader in self._gpus}
        missing = [gpu for uuid, gpu in self._known_gpus.items() if uuid not in here]
        yield from missing
        own = {gpu.index for gpu in missing}
        for index in sorted(gone, key=lambda index: index not in own)[len(missing) :]:
            yield GpuObservation(index, "", readings=LOST, lost=True)

    def _add_gpu(self, index: int) -> bool:
        """Open a GPU. Return False if NVML reports that the GPU is gone."""
        try:
            device = Device(self._api.call("nvmlDeviceGetHandleByIndex", index))
            uuid = self._api.text("nvmlDeviceGetUUID", device)
        except NvmlError as error:
            if error.code in SESSION_GONE:
                raise
            message, why = "a GPU cannot be opened", str(error)
            self._transitions.failed(str(index), message=message, reason=why, gpu=index, err=why)
            return error.code not in GPU_GONE
        position = GpuObservation(index, uuid)
        reader = GpuReader(self._api, device, position, self._accumulators, serials=self._serials)
        self._gpus.append(reader)
        self._transitions.recovered(str(index), message="a GPU can be opened again", gpu=index)
        return True

    def close(self) -> None:
        """Shut NVML down, if it is open."""
        self._xids.read(self._gpus, self._clock())  # NVML drops unread events
        for reader in self._gpus:
            reader.close()
        self._gpus, self._missing_gpus = [], []
        self._api.session_gone = False
        self._xids.close()
        if self._open:
            self._open = False
            try:
                self._api.call("nvmlShutdown")
            except NvmlError as error:
                log.debug("%s", error)

    def _record_losses(self, gpus: list[GpuObservation]) -> None:
        """Log which GPUs are lost or back, and plan when to open the lost GPUs again."""
        lost = frozenset(gpu.uuid for gpu in gpus if gpu.lost)
        if not lost:
            self._reopen_at = NEVER
        elif lost != self._lost or self._reopen_at == NEVER:
            self._reopen_at = self._clock() + policy.LOST_RETRY_INTERVAL_SECONDS
        for uuid in sorted(lost):
            message = "a GPU is lost: it has fallen off the bus or must be reset"
            self._transitions.failed(uuid, message=message, gpu=uuid)
        for uuid in sorted(self._lost - lost):
            self._transitions.recovered(uuid, message="a GPU is back", gpu=uuid)
        self._lost = lost

    # Observations

    def _observe_gpus(self) -> list[GpuObservation]:
        now = self._clock()
        self._xids.read(self._gpus, now)
        found: list[GpuObservation] = []
        for reader in self._gpus:
            gpu = reader.observe(now)
            instances = [] if gpu.lost else reader.mig_instances(now)
            if instances:
                # A process of a divided GPU is listed with its instance, and only there.
                gpu = replace(gpu, processes=(), unread_lists=())
            if not gpu.lost:
                self._known_gpus[gpu.uuid] = reader.lost
            found.append(self._with_xids(gpu))
            found += [instance.observe(now) for instance in instances]
        return [*found, *map(self._with_xids, self._missing_gpus)]

    def _with_xids(self, gpu: GpuObservation) -> GpuObservation:
        return replace(gpu, readings=(*gpu.readings, *self._xids.readings(gpu.uuid)))


class XidCounter:
    """Counts Xid events over all sessions.

    Measured: a read takes 2 us without an event, and NVML kept all of 20 events for 15 s.
    """

    def __init__(self, api: NvmlApi, now: Callable[[], float]) -> None:
        self._api = api
        self._now = now
        self._logged: set[str] = set()
        self._events: object | None = None  # NVML's set of events; None while there is none.
        self._watched: dict[int, str] = {}  # Key of a device that reports events -> UUID.
        self._register_at = 0.0  # Time of the next attempt to register.
        self._seen: dict[str, dict[int, tuple[int, float]]] = defaultdict(dict)
        """UUID -> Xid -> count, and time when the last was read."""

    def readings(self, uuid: str) -> Iterator[Reading]:
        """Yield a GPU's readings; counters are absent while the GPU's events are not read.

        A constant counter would mean no errors. The time of the last Xid stays true.
        """
        for xid, (count, at) in sorted(self._seen[uuid].items()):
            labels = (("xid", str(xid)),)
            if uuid in self._watched.values():
                yield Reading("xid_errors", count, labels)
            yield Reading("last_xid_at", at, labels)

    def read(self, gpus: Sequence[GpuReader], now: float) -> None:
        """Count new events; register for the events of these GPUs, rarely again if refused."""
        if not gpus:
            return
        try:
            if self._events is None:
                self._events = self._api.call("nvmlEventSetCreate")
            if now >= self._register_at:
                self._register_at = now + policy.REFUSED_RETRY_INTERVAL_SECONDS
                for gpu in gpus:
                    self._register(gpu)
            for _ in range(policy.MAX_XIDS):
                if not self._watched or (found := self._api.next_xid(self._events)) is None:
                    return
                key, xid = found
                if uuid := self._watched.get(key):
                    log.warning("GPU %s: Xid %d", uuid, xid)
                    count, _ = self._seen[uuid].get(xid, (0, 0.0))
                    self._seen[uuid][xid] = count + 1, self._now()
        except NvmlError as error:
            if error.code in SESSION_GONE:
                self._api.session_gone = True
            else:
                self._log_once(f"Xid errors cannot be read: {error}")

    def _register(self, gpu: GpuReader) -> None:
        if gpu.uuid in self._watched.values():
            return
        arguments = gpu.device, XID_CRITICAL_ERROR, self._events
        try:
            self._api.call("nvmlDeviceRegisterEvents", *arguments)
            self._watched[device_key(gpu.device)] = gpu.uuid
        except NvmlError as error:
            self._log_once(f"GPU {gpu.uuid}: Xid errors cannot be read: {code_name(error.code)}")

    def close(self) -> None:
        """Free NVML's set of events, before NVML is shut down."""
        events, self._events, self._watched, self._register_at = self._events, None, {}, 0.0
        if events is not None:
            try:
                self._api.call("nvmlEventSetFree", events)
            except NvmlError as error:
                log.debug("%s", error)

    def _log_once(self, text: str) -> None:
        """Log at INFO: virtual GPUs report no events."""
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s", text)
