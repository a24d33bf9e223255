"""NVML as a source: opens the devices, reads them, waits for Xid errors, recovers after errors.

NVML is initialized at the first observation. It is initialized again when the driver was reloaded,
when the set of GPUs that the kernel lists changed, and while a GPU is lost: every two minutes,
just after a collection, since it costs the healthy GPUs a second of their GPM counters. All
counters continue.

An Xid is the driver's number for an error on a GPU (13: a program's exception, 31: its illegal
memory access, 48: double-bit ECC error, 79: the GPU has fallen off the bus). NVML reports each Xid
once, as an event, to the programs that wait for events.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from mps_exporter import limits_timeouts_intervals as policy
from mps_exporter.observations import (
    CgroupMemory,
    GpuObservation,
    NvmlObservation,
    Outcome,
    Reading,
)
from mps_exporter.sources.nvml.accumulators import CounterTotals
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
    Code.IN_USE: (
        "the thread that waits for Xid errors is blocked inside NVML, so NVML cannot be "
        "initialized again: the driver hangs, or the exporter must be restarted"
    ),
    Code.NO_PERMISSION: "no permission to open /dev/nvidiactl and /dev/nvidia*",
}


class Clock(NamedTuple):
    """Source of the time."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class NvmlOptions:
    """Options of an NvmlSession."""

    serials: bool = False  # Whether to read the boards' serial numbers.
    xid_events: bool = True  # Whether to wait for Xid events.
    stop_timeout_seconds: float = policy.XID_STOP_TIMEOUT_SECONDS
    """Timeout for the Xid thread to return from NVML before NVML is shut down."""
    driver_directory: str = "/proc/driver/nvidia/gpus"
    """Lists the GPUs bound to the driver; it changes when a GPU is added or removed."""


class NvmlSession:
    """The GPUs of this host. Not thread-safe: needs its own worker thread."""

    def __init__(
        self,
        api: NvmlApi | None = None,
        clock: Clock | None = None,
        options: NvmlOptions | None = None,
    ) -> None:
        self._api = api or NvmlApi()
        self._clock = clock or Clock()
        self._options = options or NvmlOptions()
        self._open = False
        self.has_memory_limits = False  # Whether NVML reads control groups' memory.
        self._closing = False
        self._state = NvmlObservation(0.0, Outcome.OK)
        """Versions, or why no GPU can be read: the next observation, without time and GPUs."""
        self._unreadable: dict[int, str] = {}
        self._lost: frozenset[str] = frozenset()
        self._retry_at = 0.0  # Time of the next attempt after an error.
        self._reopen_at = NEVER
        self._watch_at = 0.0
        self._observed_at = 0.0
        self._bound: frozenset[str] | None = None
        self._gpus: list[GpuReader] = []
        self._missing_gpus: list[GpuObservation] = []
        self._known_gpus: dict[str, GpuObservation] = {}
        """UUID -> observation while the GPU is gone, of each GPU that was ever read."""
        self._totals: dict[str, CounterTotals] = {}
        self._watcher = XidWatcher(self._api, self._clock.wall)

    def observe(self) -> NvmlObservation:
        """Read all GPUs. Blocks; errors of NVML are part of the observation, not raised."""
        at = self._clock.wall()
        self._observed_at = self._clock.monotonic()
        is_open, gpus = self._ensure_open(), self._observe_gpus()
        if self._api.session_gone:
            self._closing = True
            is_open, gpus = self._ensure_open(), self._observe_gpus()
        if is_open:
            self._record_losses(gpus)
        return replace(self._state, at=at, gpus=tuple(gpus))

    def tick(self) -> None:
        """Sample activity, renew slow values, and open lost GPUs again if due."""
        if not self._open or self._closing:
            return
        now = self._clock.monotonic()
        if now >= self._reopen_at and now - self._observed_at < 2 * policy.TICK_INTERVAL_SECONDS:
            # Just after a collection: by the next collection the new handles have a GPM interval.
            self._closing = True
            if self._ensure_open():
                self._record_losses(self._observe_gpus())
            return
        for reader in self._gpus:
            reader.tick(now)
        if not self._watcher.started and now >= self._watch_at:
            self._watch(now)

    def memory_limits(self, root: str, paths: Sequence[str]) -> tuple[CgroupMemory, ...]:
        """Return the memory of control groups that use GPU memory or have a limit.

        `root`: mount of cgroup version 2. MIG GPUs, and groups over a maximum, are omitted.
        """
        found: list[CgroupMemory] = []
        readers = self._gpus if self._open and not self._closing else []
        for device in [reader.device for reader in readers if not reader.is_divided]:
            for path in paths[: policy.MAX_CGROUPS_PER_GPU]:
                with suppress(NvmlError):  # the group was removed, or is not accounted
                    found.append(self._api.cgroup_memory(device, root, path))
        return tuple(one for one in found if one.used_bytes or one.limited)

    def close(self) -> None:
        """Stop the Xid thread and shut NVML down.

        NVML stays initialized if the thread is blocked inside: shutting NVML down then could crash,
        and the end of the process releases NVML safely.
        """
        self._close_session(self._options.stop_timeout_seconds)

    # The session: from nvmlInit to nvmlShutdown

    def _ensure_open(self) -> bool:
        """Open NVML, again if it is closing or GPUs changed; return whether it is open."""
        now = self._clock.monotonic()
        bound: frozenset[str] | None = None
        with suppress(OSError):
            bound = frozenset(os.listdir(self._options.driver_directory))  # noqa: PTH208
        absent = self._state.outcome is not Outcome.OK
        if self._open and not self._closing and bound == self._bound:
            return True
        if absent and now < self._retry_at and bound == self._bound:
            return False
        self._bound = bound
        try:
            if not self._close_session(self._options.stop_timeout_seconds):
                raise NvmlError(Code.IN_USE, "nvmlShutdown")  # noqa: TRY301 - handled as NVML's own
            self._open_session()
        except NvmlError as error:
            self._close_session(0.0)
            self._retry_at = now + policy.INIT_RETRY_INTERVAL_SECONDS
            text = REMEDIES.get(error.code, str(error))
            if text != self._state.error:
                log.warning("no GPU can be read: %s", text)
            outcome = Outcome.ABSENT if error.code in SESSION_GONE else Outcome.REFUSED
            self._state = NvmlObservation(0.0, outcome, text)
            return False
        if absent:
            log.info("the GPUs can be read again")
        self._reopen_at = NEVER
        return True

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
        self._watch(self._clock.monotonic())
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

    def _watch(self, now: float) -> None:
        """Watch Xids, if enabled; tick() retries a refusal."""
        self._watch_at = now + policy.REFUSED_RETRY_INTERVAL_SECONDS
        if self._options.xid_events:
            self._watcher.start([(reader.device, reader.uuid) for reader in self._gpus])

    def _add_gpu(self, index: int) -> bool:
        """Open a GPU. Return False if NVML reports that the GPU is gone."""
        try:
            device = Device(self._api.call("nvmlDeviceGetHandleByIndex", index))
            uuid = self._api.text("nvmlDeviceGetUUID", device)
        except NvmlError as error:
            if error.code in SESSION_GONE:
                raise
            if self._unreadable.get(index) != str(error):
                self._unreadable[index] = str(error)
                log.warning("GPU %d cannot be opened: %s", index, error)
            return error.code not in GPU_GONE
        reader = GpuReader(
            self._api,
            device,
            GpuObservation(index, uuid),
            self._totals,
            serials=self._options.serials,
        )
        self._gpus.append(reader)
        if self._unreadable.pop(index, None):
            log.info("GPU %d can be opened again", index)
        return True

    def _close_session(self, timeout_seconds: float) -> bool:
        """Shut NVML down, unless the Xid thread is inside. Return whether NVML is shut down."""
        for reader in self._gpus:
            reader.close()
        self._gpus, self._missing_gpus = [], []
        self._api.session_gone = False
        if not self._open:
            return True
        self._closing = True
        if not self._watcher.stop(timeout_seconds):
            return False
        self._open = self._closing = False
        try:
            self._api.call("nvmlShutdown")
        except NvmlError as error:
            log.debug("%s", error)
        return True

    def _record_losses(self, gpus: list[GpuObservation]) -> None:
        """Log which GPUs are lost or back, and plan when to open the lost GPUs again."""
        lost = frozenset(gpu.uuid for gpu in gpus if gpu.lost)
        if not lost:
            self._reopen_at = NEVER
        elif lost != self._lost or self._reopen_at == NEVER:
            self._reopen_at = self._clock.monotonic() + policy.LOST_RETRY_INTERVAL_SECONDS
        for uuid in sorted(lost - self._lost):
            log.warning("GPU %s is lost: it has fallen off the bus or must be reset", uuid)
        for uuid in sorted(self._lost - lost):
            log.info("GPU %s is back", uuid)
        self._lost = lost

    # Observations

    def _observe_gpus(self) -> list[GpuObservation]:
        now = self._clock.monotonic()
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
        return replace(gpu, readings=(*gpu.readings, *self._watcher.readings(gpu.uuid)))


class XidWatcher:
    """Waits for Xid events while NVML is initialized, and counts them over all sessions."""

    def __init__(self, api: NvmlApi, wall_clock: Callable[[], float]) -> None:
        self._api = api
        self._wall_clock = wall_clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._logged: set[str] = set()
        self._watched: frozenset[str] = frozenset()
        self._seen: dict[str, Mapping[int, tuple[int, float]]] = {}
        """UUID -> Xid -> count and time of the last; the thread replaces a GPU's mapping whole."""

    @property
    def started(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def readings(self, uuid: str) -> list[Reading]:
        """Return a GPU's readings; counters are absent while no events are awaited.

        A constant counter would mean no errors. The time of the last Xid stays true.
        """
        readings = []
        watched = uuid in self._watched
        for xid, (count, at) in sorted(self._seen.get(uuid, {}).items()):
            labels = (("xid", str(xid)),)
            if watched:
                readings.append(Reading("xid_errors", count, labels))
            readings.append(Reading("last_xid_at", at, labels))
        return readings

    def start(self, devices: Sequence[tuple[Device, str]]) -> None:
        """Watch these (device, UUID) pairs, except devices that report no events."""
        try:
            events = self._api.call("nvmlEventSetCreate")
        except NvmlError as error:
            self._log_once(f"Xid errors cannot be watched: {error}")
            return
        watched: dict[int, str] = {}
        for device, uuid in devices:
            try:
                self._api.call("nvmlDeviceRegisterEvents", device, XID_CRITICAL_ERROR, events)
                watched[device_key(device)] = uuid
            except NvmlError as error:
                why = code_name(error.code)
                self._log_once(f"GPU {uuid}: Xid errors cannot be watched: {why}")
        self._watched = frozenset(watched.values())
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(events, watched, self._stop), name="nvml-xid", daemon=True
        )
        self._thread.start()

    def _run(self, events: object, watched: dict[int, str], stop: threading.Event) -> None:
        while watched and not stop.is_set():
            try:
                found = self._api.wait_xid(events, policy.XID_TIMEOUT_MILLISECONDS)
            except NvmlError as error:
                if error.code in SESSION_GONE:
                    self._watched = frozenset()
                    break
                stop.wait(policy.XID_RETRY_SECONDS)
                continue
            key, xid = found or (0, 0)
            if uuid := watched.get(key):
                log.warning("GPU %s: Xid %d", uuid, xid)
                before = self._seen.get(uuid, {})
                count, _ = before.get(xid, (0, 0.0))
                self._seen[uuid] = {**before, xid: (count + 1, self._wall_clock())}
        try:
            self._api.call("nvmlEventSetFree", events)
        except NvmlError as error:
            log.debug("%s", error)

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the thread, before NVML may be shut down; return whether the thread ended."""
        self._stop.set()
        self._watched = frozenset()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s", text)
