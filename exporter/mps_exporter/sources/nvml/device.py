"""Readers of the values and processes of GPUs and MIG instances."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.nvml_terms import ARCHITECTURES, COMPUTE_MODES
from mps_exporter.observations import GpuObservation, GpuProcess, ProcessList, Reading
from mps_exporter.sources.nvml.accumulators import Accumulators, Activity, BusyTime
from mps_exporter.sources.nvml.pynvml_api import (
    DEFECTS,
    FIELD_VALUES,
    NEVER_AGAIN,
    SESSION_GONE,
    UNSUPPORTED,
    Device,
    DeviceQueries,
    FieldReply,
    GpuGoneError,
    Listed,
    NvmlApi,
    NvmlError,
    ProcessKind,
)
from mps_exporter.sources.nvml.readings_table import (
    FIELDS,
    MEMORY_ROW,
    ROWS,
    FieldRow,
    Row,
    nvlink_rows,
)

ARCHITECTURE_OF: dict[int | None, str] = dict(
    zip((2, 3, 4, 5, 6, 7, 8, 9, 10, 13), ARCHITECTURES, strict=True)
)
"""NVML's number -> name."""

CORES_PER_SM = {3: 192, 5: 128, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 11: 128, 12: 128}
"""Major compute capability -> cores; 6.0 and 8.0 have 64."""
CORES_PER_SM_EXCEPTIONS = {(6, 0): 64, (8, 0): 64}

LOST = (Reading("up", 0.0),)  # Readings of a GPU that is gone.


class DeviceReader:
    """Reads a MIG instance for as long as NVML stays initialized; the subclass reads a GPU.

    An instance has only its own values, so that nothing of the GPU is counted twice.
    """

    rows: tuple[Row, ...] = (MEMORY_ROW,)
    fields: tuple[FieldRow, ...] = ()
    max_sample_age: float = policy.SLOW + policy.MAX_TICK_AGE_SECONDS
    """Age in seconds after which a collection takes a sample, although ticks take samples."""

    def __init__(self, queries: DeviceQueries, position: GpuObservation, own: Accumulators) -> None:
        self.device = queries.device
        self.uuid = position.uuid
        self.lost = replace(position, readings=LOST, lost=True)
        """Observation while the device is gone: its position and, once read, its identity."""
        self._position = position
        self._queries = queries
        self._api = queries.api
        self._activity = own.activity
        self._accumulators: tuple[BusyTime | Activity, ...] = (own.activity,)
        self._processes = ProcessReader(queries)
        self._ticked_at = -math.inf

    def tick(self, now: float) -> None:
        """Sample activity, at most once in SLOW seconds."""
        with suppress(GpuGoneError):
            self._sample(self._activity, now, policy.SLOW)
            self._ticked_at = now

    def observe(self, now: float) -> GpuObservation:
        """Return readings and processes; `lost` if the device is gone.

        While the device is ticked, slow values are those of its last tick.
        """
        ticking = now - self._ticked_at < policy.MAX_TICK_AGE_SECONDS
        as_of = self._ticked_at if ticking else now
        shortest = self.max_sample_age if ticking else policy.MIN_SAMPLE_INTERVAL_SECONDS
        try:
            readings = [Reading("up", 1.0), *self._values(as_of, policy.EACH)]
            for accumulator in self._accumulators:
                self._sample(accumulator, now, shortest)
                readings += accumulator.readings()
            processes, unread = self._processes.read(as_of)
            compute_mode = self._number("nvmlDeviceGetComputeMode", now, policy.EACH)
            identity = self._identity(now)
        except GpuGoneError:
            return self.lost
        self.lost = replace(identity, readings=LOST, lost=True)
        return replace(
            identity,
            compute_mode=_compute_mode(compute_mode),
            processes=processes,
            unread_lists=unread,
            readings=tuple(readings),
            activity_age_seconds=self._activity.age_seconds(now),
        )

    def close(self) -> None:
        """Free the samples that NVML has allocated."""
        for accumulator in self._accumulators:
            accumulator.close(self._api)

    # Readings

    def _sample(self, accumulator: BusyTime | Activity, now: float, shortest: float) -> None:
        """Take a sample; a defect (a NaN) costs only the readings of this accumulator."""
        try:
            accumulator.sample(self._queries, now, shortest)
        except DEFECTS as error:
            self._queries.record_defect(type(accumulator).__name__, error)

    def _values(self, now: float, min_interval: float) -> Iterator[Reading]:
        """Yield the values that are queried at this interval or more rarely."""
        for row in self.rows:
            if row.every >= min_interval and (
                row.unless is None or not self._queries.is_supported(row.unless)
            ):
                yield from self._row(row, now)
        yield from self._field_values(now, min_interval)

    def _row(self, row: Row, now: float) -> tuple[Reading, ...]:
        def read() -> tuple[Reading, ...]:
            return tuple(row.read(self._api, self.device))

        return self._queries.get(row.call, read, now, row.every) or ()

    def _field_values(self, now: float, min_interval: float) -> Iterator[Reading]:
        due = []
        for row in self.fields:
            if row.every >= min_interval:
                reading = self._queries.cached(row.call, now)
                if reading is not None:
                    yield reading
                elif self._queries.is_due(row.call, now):
                    due.append(row)
        if due:
            yield from self._query_fields(due, now)

    def _query_fields(self, rows: list[FieldRow], now: float) -> Iterator[Reading]:
        try:
            replies = self._api.fields(self.device, [(row.field, row.scope) for row in rows])
        except DEFECTS as error:
            self._queries.record_defect(FIELD_VALUES, error)
            return
        except NvmlError as error:
            if error.code in UNSUPPORTED and len(rows) > 1:
                # Some drivers refuse a whole batch for one field in it.
                for row in rows:
                    yield from self._query_fields([row], now)
                return
            replies = [FieldReply(error.code)] * len(rows)
        for row, reply in zip(rows, replies, strict=True):
            if reply.code != 0:
                self._queries.record_refusal(row.call, reply.code, now)
            elif math.isfinite(reply.value):
                reading = row.reading(reply.value)
                self._queries.record(row.call, reading, now + row.every)
                yield reading

    # Identity: values that never change

    def _number(self, function: str, now: float, every: float = NEVER_AGAIN) -> int | None:
        return self._queries.call(self._api.number, function, now, every)

    def _text(self, function: str, now: float) -> str | None:
        return self._queries.call(self._api.text, function, now)

    def _identity(self, now: float) -> GpuObservation:
        return replace(
            self._position,
            name=self._text("nvmlDeviceGetName", now),
            pci_bus_id=self._text("nvmlDeviceGetPciInfo", now),
            architecture=ARCHITECTURE_OF.get(self._number("nvmlDeviceGetArchitecture", now)),
            compute_capability=self._compute_capability(now),
            vbios_version=self._text("nvmlDeviceGetVbiosVersion", now),
            sm_count=self._sm_count(now),
        )

    def _compute_capability(self, now: float) -> tuple[int, int] | None:
        name = "nvmlDeviceGetCudaComputeCapability"
        numbers = self._queries.call(self._api.numbers, name, now)
        return None if numbers is None else (numbers[0], numbers[1])

    def _sm_count(self, now: float) -> int | None:
        return self._number("nvmlDeviceGetAttributes_v2", now)


class GpuReader(DeviceReader):
    """Reads a GPU, and finds its MIG instances."""

    fields = FIELDS
    max_sample_age = policy.MAX_TICK_AGE_SECONDS

    def __init__(
        self,
        api: NvmlApi,
        device: Device,
        position: GpuObservation,
        accumulators: dict[str, Accumulators],
        *,
        serials: bool,
    ) -> None:
        own = accumulators.setdefault(position.uuid, Accumulators())
        queries = DeviceQueries(api, device, f"GPU {position.index} ({position.uuid})")
        super().__init__(queries, position, own)
        self.rows = (*ROWS, *nvlink_rows(own.link_errors))
        self._busy = own.busy
        self._accumulators = (own.busy, own.activity)
        self._accumulators_of = accumulators
        self._serials = serials
        self._mig_mode: int | None = None
        self._instances: dict[str, DeviceReader] = {}
        self._scan_at = 0.0

    def tick(self, now: float) -> None:
        """Sample activity, and renew slow values."""
        with suppress(GpuGoneError):
            self._sample(self._busy, now, policy.SLOW)
            self._sample(self._activity, now, policy.MIN_SAMPLE_INTERVAL_SECONDS)
            self._ticked_at = now
            for _ in self._values(now, policy.SLOW):
                pass
            self._processes.renew(now)
        for instance in self._instances.values():
            instance.tick(now)

    @property
    def is_divided(self) -> bool:
        """Whether MIG is enabled on the GPU, as of the last read of the mode."""
        return self._mig_mode == 1

    def close(self) -> None:
        self._close_instances()
        super().close()

    def _values(self, now: float, min_interval: float) -> Iterator[Reading]:
        mode = self._number("nvmlDeviceGetMigMode", now, policy.SLOW)
        if mode is not None:
            if self._mig_mode not in {None, mode}:
                self._queries.clear()
            self._mig_mode = mode
            yield Reading("mig_mode", mode)
        yield from super()._values(now, min_interval)

    def _identity(self, now: float) -> GpuObservation:
        serial = self._text("nvmlDeviceGetSerial", now) if self._serials else None
        return replace(super()._identity(now), serial=serial)

    def _sm_count(self, now: float) -> int | None:
        capability = self._compute_capability(now)
        cores = self._number("nvmlDeviceGetNumGpuCores", now)
        if capability is None or cores is None:
            return None
        per_sm = CORES_PER_SM_EXCEPTIONS.get(capability, CORES_PER_SM.get(capability[0]))
        return None if per_sm is None else cores // per_sm

    # MIG

    def mig_instances(self, now: float) -> list[DeviceReader]:
        """Return the readers of the MIG instances, after a scan if a scan is due."""
        if not self.is_divided:
            self._close_instances()
        elif now >= self._scan_at:
            self._scan_at = now + policy.MIG_SCAN_INTERVAL_SECONDS
            self._scan_instances()
        return list(self._instances.values())

    def _close_instances(self) -> None:
        for instance in self._instances.values():
            instance.close()
        self._instances.clear()
        self._scan_at = 0.0

    def _scan_instances(self) -> None:
        before, self._instances = self._instances, {}
        with self._session_checked():
            for slot in range(self._api.number("nvmlDeviceGetMaxMigDeviceCount", self.device)):
                with self._session_checked():  # NOT_FOUND: the slot is empty
                    instance = self._instance(slot, before)
                    self._instances[instance.uuid] = instance
        for uuid in before.keys() - self._instances.keys():
            before[uuid].close()

    @contextmanager
    def _session_checked(self) -> Iterator[None]:
        try:
            yield
        except NvmlError as error:
            self._api.session_gone |= error.code in SESSION_GONE

    def _instance(self, slot: int, before: Mapping[str, DeviceReader]) -> DeviceReader:
        api = self._api
        device = Device(api.call("nvmlDeviceGetMigDeviceHandleByIndex", self.device, slot))
        uuid = api.text("nvmlDeviceGetUUID", device)
        if uuid in before:
            return before[uuid]
        gpu_instance = api.number("nvmlDeviceGetGpuInstanceId", device)
        instance = f"{gpu_instance}/{api.number('nvmlDeviceGetComputeInstanceId', device)}"
        index = self._position.index
        name = f"GPU {index} ({uuid})"
        queries = DeviceQueries(api, device, name, (self.device, gpu_instance))
        own = self._accumulators_of.setdefault(uuid, Accumulators())
        return DeviceReader(queries, GpuObservation(index, uuid, self.uuid, instance), own)


def _compute_mode(value: int | None) -> str | None:
    if value is None:
        return None
    return COMPUTE_MODES[value] if value < len(COMPUTE_MODES) else f"unknown_{value}"


# Processes

CALLS: dict[ProcessList, ProcessKind] = {
    "compute": "Compute",
    "mps": "MPSCompute",
    "graphics": "Graphics",
}
RARELY_READ: tuple[ProcessList, ...] = ("mps", "graphics")


class ProcessReader:
    """Reads the three process lists of one device.

    An MPS client is in the compute list and in the MPS list; an MPS server is an ordinary compute
    process. With a server on two GPUs, the MPS list of one GPU may also contain clients of the
    other, with 0 bytes: only processes in the compute list are on this GPU.

    A list takes the driver about 1 ms with 40 clients. A process keeps its MPS role while it lives,
    so the MPS list is read again only when the compute list changes, and after SLOW seconds, and
    the graphics list, which contains no MPS processes, with it.
    """

    def __init__(self, queries: DeviceQueries) -> None:
        self._queries = queries
        self._pids: set[int] | None = None  # PIDs of the last compute list, if read.

    def read(self, now: float) -> tuple[tuple[GpuProcess, ...] | None, tuple[ProcessList, ...]]:
        """Return the processes, and the lists that could not be read.

        An unreadable MPS list must differ from an empty list: without it every client seems to
        bypass MPS. If no list could be read, the processes are None and no list is named.
        """
        compute = self._list("compute", now)
        pids = None if compute is None else set(compute)
        if pids is None or pids != self._pids:
            self._queries.forget(*(_list_name(kind) for kind in RARELY_READ))
        self._pids = pids
        others = {kind: self._list(kind, now, policy.SLOW) for kind in RARELY_READ}
        if others["mps"] is not None:
            others["mps"] = _on_this_gpu(others["mps"], compute)
        lists: dict[ProcessList, Listed | None] = {"compute": compute, **others}
        found = [(kind, rows) for kind, rows in lists.items() if rows is not None]
        if not found:
            return None, ()
        processes = tuple(
            GpuProcess(pid, kind, used) for kind, rows in found for pid, used in rows.items()
        )
        return processes, tuple(kind for kind, rows in lists.items() if rows is None)

    def renew(self, now: float) -> None:
        """Read the lists that are rarely read, if they are no longer fresh."""
        if self._pids is not None:
            for kind in RARELY_READ:
                self._list(kind, now, policy.SLOW)

    def _list(self, kind: ProcessList, now: float, every: float = policy.EACH) -> Listed | None:
        queries = self._queries

        def read() -> Listed:
            return queries.api.processes(queries.device, CALLS[kind])

        return queries.get(_list_name(kind), read, now, every)


def _list_name(kind: ProcessList) -> str:
    return f"nvmlDeviceGet{CALLS[kind]}RunningProcesses"


def _on_this_gpu(rows: Listed, compute: Listed | None) -> Listed:
    """Return the MPS list's rows on this GPU, with the compute list's memory if known."""
    if compute is None:
        return {pid: used for pid, used in rows.items() if used != 0}
    return {pid: compute[pid] for pid in rows if pid in compute}
