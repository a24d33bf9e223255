"""NVML as a source: finds the devices, observes them, and comes back after what goes wrong.

NVML is initialized at the first observation. It is initialized anew when the driver was reloaded,
when the set of GPUs that the kernel lists changed, and now and then while a GPU is lost, more and
more rarely and between two collections, since it costs the healthy ones a second of their GPM
counters. What was counted so far is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from mps_exporter.observations import GpuObservation, NvmlObservation, Outcome, Reading
from mps_exporter.sources.nvml.accumulators import CounterTotals
from mps_exporter.sources.nvml.api import (
    GPU_GONE,
    SESSION_GONE,
    Code,
    Device,
    NvmlApi,
    NvmlError,
)
from mps_exporter.sources.nvml.device import DeviceLocation, DeviceReader, MigDeviceReader
from mps_exporter.sources.nvml.pynvml_api import PynvmlApi
from mps_exporter.sources.nvml.query_cache import RETRY_REFUSED_SECONDS
from mps_exporter.sources.nvml.xid import XidCounts, XidWatcher

log = logging.getLogger(__name__)

T = TypeVar("T")

LOST = Reading("up", 0.0)
NEVER = float("inf")

TICK_OVERDUE_SECONDS = 5.0
"""Nobody ticks who has not done so for this long: then a collection does what a tick should."""

TICK_SECONDS = 1.0
"""How often :meth:`NvmlSession.tick` wants to be called.

GPM counts cycles, not time: over an interval in which the clock moves, the busier part weighs more
(6 % too much at 7 s). And the PCIe counters turn over every 70 ms, which is told from GPM's rate
only as long as that is less than 2 GiB off.
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
        "the Xid event thread is blocked inside NVML, so NVML cannot be initialized again; the "
        "driver hangs, or the exporter must be restarted"
    ),
    Code.NO_PERMISSION: "no permission to open /dev/nvidiactl and /dev/nvidia*",
}


class Clock(NamedTuple):
    """Where the time comes from."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class NvmlOptions:
    """What can be set. Durations in seconds."""

    serials: bool = False
    """Read the boards' serial numbers."""
    xid_events: bool = True
    retry_seconds: float = 10.0
    """How often to try again where NVML is missing."""
    lost_retry_seconds: float = 60.0
    """How long after a GPU was lost to initialize NVML anew; then after twice that, and so on."""
    lost_retry_most_seconds: float = 600.0
    """How often at least."""
    mig_refresh_seconds: float = 10.0
    """How often to look for new MIG instances."""
    leave_seconds: float = 3.0
    """How long to wait for the Xid thread to come out of NVML before NVML is shut down."""
    driver_directory: str = "/proc/driver/nvidia/gpus"
    """Lists the GPUs bound to the driver; a change there is a GPU that came or went."""


class NvmlSession:
    """The GPUs of this host. Not for several threads at a time: give it one worker of its own."""

    def __init__(
        self,
        api: NvmlApi | None = None,
        clock: Clock | None = None,
        options: NvmlOptions | None = None,
    ) -> None:
        self._api = api or PynvmlApi()
        self._clock = clock or Clock()
        self._options = options or NvmlOptions()
        self._open = False
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
        self._instances: dict[str, list[MigDeviceReader]] = {}
        self._instances_at: dict[str, float] = {}
        self._missing_gpus: list[GpuObservation] = []
        self._known_gpus: dict[str, GpuObservation] = {}
        self._totals: dict[str, CounterTotals] = {}
        self._xids = XidCounts()
        self._watcher = XidWatcher(self._api, self._xids, self._clock.wall)

    def observe(self) -> NvmlObservation:
        """Read all GPUs. Blocks; never raises for what NVML does."""
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
        """Do what cannot wait for a scrape, or should not make it wait.

        Wanted every TICK_SECONDS.
        """
        if not self._open or self._closing:
            return
        now = self._ticked_at = self._clock.monotonic()
        if now >= self._reopen_at and now - self._observed_at < 2 * TICK_SECONDS:
            # Just after a collection: by the next one the handles have answers and a GPM interval.
            if self._ensure_open(reopen=True):
                self._note_losses(self._observe_gpus())
            return
        for reader in self._readers():
            reader.tick(now)
        if not self._watcher.started and now >= self._watch_at:
            self._watch(now)

    def close(self) -> None:
        """Stop the thread and let go of the driver.

        NVML stays initialized where the Xid thread does not come out of it: the end of the process
        lets go of it without harm, to shut it down under that thread would not.
        """
        self._close_session(self._options.leave_seconds)

    # The session: from nvmlInit to nvmlShutdown

    def _ensure_open(self, *, reopen: bool = False) -> bool:
        """Open NVML where that is needed; gives whether it can be read.

        Args:
            reopen: Open it anew also for a GPU that is lost, where that is due.
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
        self._driver_version = self._optional(
            lambda: self._api.system_text("nvmlSystemGetDriverVersion")
        )
        self._cuda_version = self._optional(self._read_cuda_version)
        count = self._api.system_number("nvmlDeviceGetCount")
        gone = [index for index in range(count) if not self._add_gpu(index)]
        self._missing_gpus = list(self._missing(gone))
        self._watch(self._clock.monotonic())

    def _missing(self, gone: list[int]) -> Iterator[GpuObservation]:
        """The GPUs that were there and are not, and those at an index that never told their UUID.

        An index tells little: it shifts when another GPU is gone. So one whose GPU answers at
        another index now stands for some other GPU that is missing, if there is one.
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
        """Wait for Xids. Where that is refused, it is tried again, rarely."""
        self._watch_at = now + RETRY_REFUSED_SECONDS
        if self._options.xid_events:
            self._watcher.start([(reader.device, reader.location.uuid) for reader in self._gpus])

    def _add_gpu(self, index: int) -> bool:
        """Open one GPU; gives False where NVML says that it is gone."""
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
        reader = DeviceReader(self._api, device, location, totals, serials=self._options.serials)
        self._gpus.append(reader)
        if self._unreadable.pop(index, None):
            log.info("GPU %d can be opened again", index)
        return True

    def _close_session(self, timeout_seconds: float) -> bool:
        """Shut NVML down, unless the Xid thread is still inside; gives whether it is shut down."""
        for reader in self._readers():
            reader.close()
        self._gpus, self._missing_gpus = [], []
        self._instances, self._instances_at = {}, {}
        if not self._open:
            return True
        self._closing = True
        if not self._watcher.stop(timeout_seconds):
            return False
        self._open = self._closing = False
        try:
            self._api.shutdown()
        except NvmlError as error:
            log.debug("%s", error)
        return True

    def _session_gone(self) -> bool:
        return any(reader.queries.session_gone for reader in self._readers())

    def _note_losses(self, gpus: list[GpuObservation]) -> None:
        """Say which GPUs are lost or back, and plan when to look for the lost ones anew."""
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

    # What there is

    def _observe_gpus(self) -> list[GpuObservation]:
        now = self._clock.monotonic()
        found: list[GpuObservation] = []
        for reader in list(self._gpus):
            gpu = reader.observe(now)
            instances = self._mig_instances(reader, now) if not gpu.lost else []
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

    def _mig_instances(self, parent: DeviceReader, now: float) -> list[MigDeviceReader]:
        uuid = parent.location.uuid
        if not parent.mig_enabled:
            for instance in self._instances.pop(uuid, []):
                instance.close()
            return []
        if now >= self._instances_at.get(uuid, 0.0):
            self._instances_at[uuid] = now + self._options.mig_refresh_seconds
            self._refresh_instances(parent)
        return self._instances.get(uuid, [])

    def _refresh_instances(self, parent: DeviceReader) -> None:
        uuid = parent.location.uuid
        before = {one.location.uuid: one for one in self._instances.get(uuid, [])}
        present: list[MigDeviceReader] = []
        for device, location in self._mig_devices(parent):
            instance = before.pop(location.uuid) if location.uuid in before else None
            if instance is None:
                totals = self._totals.setdefault(location.uuid, CounterTotals())
                instance = MigDeviceReader(self._api, device, parent.device, location, totals)
            present.append(instance)
        for gone in before.values():
            gone.close()
        self._instances[uuid] = present

    def _mig_devices(self, parent: DeviceReader) -> Iterator[tuple[Device, DeviceLocation]]:
        """Slots without an instance answer NOT_FOUND."""
        try:
            slots = self._api.number("nvmlDeviceGetMaxMigDeviceCount", parent.device)
        except NvmlError as error:
            parent.queries.session_gone |= error.code in SESSION_GONE
            return
        for slot in range(slots):
            try:
                yield self._mig_place(parent, slot)
            except NvmlError as error:
                parent.queries.session_gone |= error.code in SESSION_GONE

    def _mig_place(self, parent: DeviceReader, slot: int) -> tuple[Device, DeviceLocation]:
        api = self._api
        device = api.mig_device(parent.device, slot)
        return device, DeviceLocation(
            index=parent.location.index,
            uuid=api.text("nvmlDeviceGetUUID", device),
            parent_uuid=parent.location.uuid,
            gpu_instance=api.number("nvmlDeviceGetGpuInstanceId", device),
            compute_instance=api.number("nvmlDeviceGetComputeInstanceId", device),
        )

    def _readers(self) -> list[DeviceReader]:
        instances = [one for some in self._instances.values() for one in some]
        return [*self._gpus, *instances]

    def _bound_gpus(self) -> frozenset[str] | None:
        try:
            return frozenset(one.name for one in Path(self._options.driver_directory).iterdir())
        except OSError:
            return None

    # Small matters

    def _read_cuda_version(self) -> str:
        number = self._api.system_number("nvmlSystemGetCudaDriverVersion_v2")
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
