"""NVML as a source: opens the devices, reads them, and recovers after errors.

NVML is initialized at the first observation. It is initialized again when the driver was reloaded,
when the set of GPUs that the kernel lists changed, and while a GPU is lost: at growing intervals
and between two collections, since it costs the healthy GPUs a second of their GPM counters. What
was counted so far is kept.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from mps_exporter.observations import (
    CgroupMemory,
    GpuObservation,
    NvmlObservation,
    Outcome,
    Reading,
)
from mps_exporter.sources.nvml.accumulators import MIN_SAMPLE_INTERVAL_SECONDS, CounterTotals
from mps_exporter.sources.nvml.device import DeviceLocation, DeviceReader, MigInstances
from mps_exporter.sources.nvml.processes import FUNCTION as MEMORY_LIMITS
from mps_exporter.sources.nvml.processes import read_cgroup_memory
from mps_exporter.sources.nvml.pynvml_api import GPU_GONE, SESSION_GONE, Code, NvmlApi, NvmlError
from mps_exporter.sources.nvml.query_cache import RETRY_REFUSED_SECONDS
from mps_exporter.sources.nvml.xid import XidCounts, XidWatcher

log = logging.getLogger(__name__)

T = TypeVar("T")

LOST = Reading("up", 0.0)
NEVER = float("inf")

TICK_OVERDUE_SECONDS = 5.0
"""If no tick has come for this long, a collection does its work."""

TICK_SECONDS = 1.0
"""Interval of :meth:`NvmlSession.tick`.

GPM counts cycles: over 7 s with a changing clock rate the busier part weighs 6 % too much. PCIe
counters wrap every 70 ms; GPM's rate corrects an error below 2 GiB.
"""

REMEDIES = {
    Code.LIBRARY_NOT_FOUND: (
        "libnvidia-ml.so.1 was not found: install the NVIDIA driver; in a container, let the "
        "NVIDIA runtime mount it (NVIDIA_DRIVER_CAPABILITIES=utility)"
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
    """Where the time comes from."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class NvmlOptions:
    """Options. Durations in seconds."""

    serials: bool = False
    """Read the boards' serial numbers."""
    xid_events: bool = True
    shortest_seconds: float = MIN_SAMPLE_INTERVAL_SECONDS
    """Two samples of a GPU's activity are at least so far apart."""
    retry_seconds: float = 10.0
    """How often to try again where NVML is missing."""
    lost_retry_seconds: float = 60.0
    """How long after a GPU was lost to initialize NVML again; then after twice that, and so on."""
    lost_retry_most_seconds: float = 600.0
    """The longest such interval."""
    mig_refresh_seconds: float = 10.0
    """How often to look for new MIG instances."""
    leave_seconds: float = 3.0
    """How long to wait for the Xid thread to return from NVML before NVML is shut down."""
    driver_directory: str = "/proc/driver/nvidia/gpus"
    """Lists the GPUs bound to the driver; it changes when a GPU is added or removed."""


class NvmlSession:
    """The GPUs of this host. Not thread-safe: it needs a worker thread of its own."""

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
        self._has_limits = False
        self._closing = False
        self._error: NvmlError | None = None
        self._logged = ""
        self._unreadable: dict[int, str] = {}
        self._lost: frozenset[str] = frozenset()
        self._retry_at = 0.0
        """When to try again after an error."""
        self._reopen_at = NEVER
        self._reopen_after = self._options.lost_retry_seconds
        self._watch_at = 0.0
        self._observed_at = self._ticked_at = -TICK_OVERDUE_SECONDS
        self._bound: frozenset[str] | None = None
        self._driver_version: str | None = None
        self._cuda_version: str | None = None
        self._gpus: list[DeviceReader] = []
        self._instances = MigInstances(self._api, self._options.mig_refresh_seconds)
        self._missing_gpus: list[GpuObservation] = []
        self._known_gpus: dict[str, GpuObservation] = {}
        self._totals: dict[str, CounterTotals] = {}
        self._xids = XidCounts()
        self._watcher = XidWatcher(self._api, self._xids, self._clock.wall)

    def observe(self) -> NvmlObservation:
        """Read all GPUs. Blocks; errors of NVML are part of the observation, not raised."""
        at = self._clock.wall()
        self._observed_at = self._clock.monotonic()
        if not self._ensure_open(reopen=self._observed_at - self._ticked_at > TICK_OVERDUE_SECONDS):
            return self._absent(at)
        gpus = self._observe_gpus()
        if self._session_gone():
            self._closing = True
            if not self._ensure_open():
                return self._absent(at)
            gpus = self._observe_gpus()
        self._note_losses(gpus)
        return NvmlObservation(
            at=at,
            outcome=Outcome.OK,
            driver_version=self._driver_version,
            cuda_version=self._cuda_version,
            gpus=tuple(gpus),
        )

    def tick(self) -> None:
        """Do what cannot wait for a scrape, or should not delay it; every TICK_SECONDS."""
        if not self._open or self._closing:
            return
        now = self._ticked_at = self._clock.monotonic()
        if now >= self._reopen_at and now - self._observed_at < 2 * TICK_SECONDS:
            # Just after a collection: by the next one the new handles have a GPM interval.
            if self._ensure_open(reopen=True):
                self._note_losses(self._observe_gpus())
            return
        for reader in self._readers():
            reader.tick(now)
        if not self._watcher.started and now >= self._watch_at:
            self._watch(now)

    @property
    def has_memory_limits(self) -> bool:
        """Whether the driver can be asked for memory limits of control groups. Does not block."""
        return self._has_limits

    def memory_limits(self, root: str, paths: Sequence[str]) -> tuple[CgroupMemory, ...]:
        """Ask the driver for the memory of control groups below a mount of cgroup version 2."""
        if not self._open or self._closing:
            return ()
        devices = [reader.device for reader in self._gpus if not reader.mig_enabled]
        return tuple(read_cgroup_memory(self._api, devices, root, paths))

    def close(self) -> None:
        """Stop the thread and shut NVML down.

        NVML stays initialized if the Xid thread is blocked inside: shutting it down under that
        thread could crash, and the end of the process releases it safely.
        """
        self._close_session(self._options.leave_seconds)

    # The session: from nvmlInit to nvmlShutdown

    def _ensure_open(self, *, reopen: bool = False) -> bool:
        """Open NVML if needed; returns whether it can be read.

        Args:
            reopen: Open it again also for a GPU that is lost, if that is due.
        """
        now = self._clock.monotonic()
        bound = self._bound_gpus()
        lost = reopen and now >= self._reopen_at
        if self._open and not self._closing and bound == self._bound and not lost:
            return True
        if self._error is not None and now < self._retry_at and bound == self._bound:
            return False
        self._bound = bound
        try:
            if not self._close_session(self._options.leave_seconds):
                raise NvmlError(Code.IN_USE, "nvmlShutdown")  # noqa: TRY301 - handled as NVML's own
            self._open_session()
        except NvmlError as error:
            self._close_session(0.0)
            self._error = error
            self._retry_at = now + self._options.retry_seconds
            self._log_absence(error)
            return False
        if self._logged:
            log.info("the GPUs can be read again")
        self._error, self._logged, self._reopen_at = None, "", NEVER
        return True

    def _open_session(self) -> None:
        self._api.init()
        self._open = True
        self._driver_version = self._optional(lambda: self._api.text("nvmlSystemGetDriverVersion"))
        self._cuda_version = self._optional(self._read_cuda_version)
        self._has_limits = self._api.has(MEMORY_LIMITS)
        count = self._api.number("nvmlDeviceGetCount")
        gone = [index for index in range(count) if not self._add_gpu(index)]
        self._missing_gpus = list(self._missing(gone))
        self._watch(self._clock.monotonic())

    def _missing(self, gone: list[int]) -> Iterator[GpuObservation]:
        """Yield the GPUs that were there and are not, and those whose UUID was never read.

        An index shifts when another GPU is gone. So an index whose GPU now answers at another index
        is that of some other missing GPU, if there is one.
        """
        here = {reader.location.uuid for reader in self._gpus}
        missing = [gpu for uuid, gpu in self._known_gpus.items() if uuid not in here]
        for gpu in missing:
            yield replace(gpu, processes=None, unread_lists=(), readings=(), lost=True)
        own = {gpu.index for gpu in missing}
        nameless = [index for index in gone if index not in own]
        others = sum(index not in gone for index in own)
        for index in nameless[others:]:
            yield GpuObservation(index, "", lost=True)

    def _watch(self, now: float) -> None:
        """Wait for Xids. If that is refused, it is tried again after RETRY_REFUSED_SECONDS."""
        self._watch_at = now + RETRY_REFUSED_SECONDS
        if self._options.xid_events:
            self._watcher.start([(reader.device, reader.location.uuid) for reader in self._gpus])

    def _add_gpu(self, index: int) -> bool:
        """Open one GPU. False: NVML reports that it is gone."""
        try:
            device = self._api.device(index)
            uuid = self._api.text("nvmlDeviceGetUUID", device)
        except NvmlError as error:
            if error.code in SESSION_GONE:
                raise
            if self._unreadable.get(index) != str(error):
                self._unreadable[index] = str(error)
                log.warning("GPU %d cannot be opened: %s", index, error)
            return error.code not in GPU_GONE
        location = DeviceLocation(index, uuid)
        totals = self._totals.setdefault(uuid, CounterTotals())
        reader = DeviceReader(
            self._api,
            device,
            location,
            totals,
            serials=self._options.serials,
            shortest=self._options.shortest_seconds,
        )
        self._gpus.append(reader)
        if self._unreadable.pop(index, None):
            log.info("GPU %d can be opened again", index)
        return True

    def _close_session(self, timeout_seconds: float) -> bool:
        """Shut NVML down, unless the Xid thread is inside; returns whether it is shut down."""
        for reader in self._readers():
            reader.close()
        self._gpus, self._missing_gpus = [], []
        self._instances.clear()
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

    def _session_gone(self) -> bool:
        return any(reader.queries.session_gone for reader in self._readers())

    def _note_losses(self, gpus: list[GpuObservation]) -> None:
        """Log which GPUs are lost or back, and plan when to open the lost ones again."""
        lost = frozenset(gpu.uuid for gpu in gpus if gpu.lost)
        options = self._options
        if not lost:
            self._reopen_at = NEVER
        elif lost != self._lost or self._reopen_at == NEVER:
            again = lost == self._lost
            doubled = min(2 * self._reopen_after, options.lost_retry_most_seconds)
            self._reopen_after = doubled if again else options.lost_retry_seconds
            self._reopen_at = self._clock.monotonic() + self._reopen_after
        self._log_losses(lost)
        self._lost = lost

    # Observations

    def _observe_gpus(self) -> list[GpuObservation]:
        now = self._clock.monotonic()
        found: list[GpuObservation] = []
        for reader in list(self._gpus):
            gpu = reader.observe(now)
            instances = [] if gpu.lost else self._instances.of(reader, now, self._totals)
            if instances:
                # A process of a divided GPU is listed with its instance, and only there.
                gpu = replace(gpu, processes=(), unread_lists=())
            found.append(self._with_xids(gpu))
            found += [instance.observe(now) for instance in instances]
        found += [self._with_xids(gpu) for gpu in self._missing_gpus]
        for gpu in found:
            if not gpu.lost and gpu.parent_uuid is None:
                self._known_gpus[gpu.uuid] = replace(
                    gpu, processes=None, unread_lists=(), readings=()
                )
        return found

    def _with_xids(self, gpu: GpuObservation) -> GpuObservation:
        readings = gpu.readings
        if gpu.lost and not readings:
            readings = (LOST,)
        return replace(gpu, readings=(*readings, *self._xids.readings(gpu.uuid)))

    def _readers(self) -> list[DeviceReader]:
        return [*self._gpus, *self._instances]

    def _bound_gpus(self) -> frozenset[str] | None:
        try:
            return frozenset(os.listdir(self._options.driver_directory))  # noqa: PTH208
        except OSError:
            return None

    # Helpers

    def _read_cuda_version(self) -> str:
        number = self._api.number("nvmlSystemGetCudaDriverVersion_v2")
        return f"{number // 1000}.{number % 1000 // 10}"

    def _optional(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except NvmlError:
            return None

    def _absent(self, at: float) -> NvmlObservation:
        code = None if self._error is None else self._error.code
        outcome = Outcome.ABSENT if code in SESSION_GONE else Outcome.REFUSED
        return NvmlObservation(at=at, outcome=outcome, error=_explain(self._error))

    def _log_losses(self, lost: frozenset[str]) -> None:
        for uuid in sorted(lost - self._lost):
            log.warning("GPU %s is lost: it has fallen off the bus or must be reset", uuid)
        for uuid in sorted(self._lost - lost):
            log.info("GPU %s is back", uuid)

    def _log_absence(self, error: NvmlError) -> None:
        text = _explain(error)
        if text != self._logged:
            self._logged = text
            log.warning("no GPU can be read: %s", text)


def _explain(error: NvmlError | None) -> str:
    if error is None:
        return "NVML is not initialized"
    known = {int(code): text for code, text in REMEDIES.items()}
    return known.get(error.code, str(error))
