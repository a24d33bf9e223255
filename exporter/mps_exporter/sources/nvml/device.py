"""Readers of a GPU and of its MIG instances: readings, processes, control groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice

from mps_exporter.nvml_terms import ARCHITECTURES, COMPUTE_MODES
from mps_exporter.observations import CgroupMemory, GpuObservation, GpuProcess, ProcessList, Reading
from mps_exporter.sources.nvml import policy
from mps_exporter.sources.nvml.accumulators import BusyAccumulator, CounterTotals, GpmAccumulator
from mps_exporter.sources.nvml.pynvml_api import (
    DEFECTS,
    FIELD_VALUES,
    NEVER_AGAIN,
    SESSION_GONE,
    UNSUPPORTED,
    Device,
    FieldReply,
    GpuGoneError,
    ListedProcess,
    NvmlApi,
    NvmlError,
    ProcessKind,
    QueryCache,
)
from mps_exporter.sources.nvml.readings import FIELDS, MEMORY_ROW, ROWS, FieldRow, Row, nvlink_rows

ARCHITECTURE_OF = dict(zip((2, 3, 4, 5, 6, 7, 8, 9, 10, 13), ARCHITECTURES, strict=True))
"""NVML's number -> name."""

CORES_PER_SM = {3: 192, 5: 128, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 11: 128, 12: 128}
"""Major compute capability -> cores; 6.0 and 8.0 have 64."""
CORES_PER_SM_EXCEPTIONS = {(6, 0): 64, (8, 0): 64}

LOST = (Reading("up", 0.0),)
"""Readings of a GPU that is gone."""


class DeviceReader:
    """Reads a device for as long as NVML stays initialized."""

    fields: tuple[FieldRow, ...] = FIELDS

    def __init__(
        self,
        api: NvmlApi,
        device: Device,
        position: GpuObservation,
        totals: dict[str, CounterTotals],
        *,
        serials: bool,
        shortest: float = policy.MIN_SAMPLE_INTERVAL_SECONDS,
    ) -> None:
        self.device = device
        self.uuid = position.uuid
        self.lost = replace(position, readings=LOST, lost=True)
        """Observation while the device is gone: its position and, once read, its identity."""
        self._position = position
        self._queries = QueryCache(f"GPU {position.index} ({self.uuid})")
        self._api = api
        self._serials = serials
        self._shortest = shortest
        self._totals = totals
        self._own_totals = totals.setdefault(self.uuid, CounterTotals())
        self._rows = self._own_rows()
        self._processes = ProcessReader(api, device, self._queries)
        self._busy = BusyAccumulator(api, device, self._queries, self._own_totals.busy)
        self._gpm = GpmAccumulator(api, device, self._queries, self._own_totals)
        self._ticked_at = self._observed_at = -math.inf
        self._mig_mode: int | None = None
        self._instances: dict[str, MigDeviceReader] = {}
        self._scan_at = 0.0

    def _own_rows(self) -> tuple[Row, ...]:
        return (*ROWS, *nvlink_rows(self._own_totals.link_errors))

    def tick(self, now: float) -> None:
        """Sample activity that would be lost between two scrapes, and renew slow values."""
        with suppress(GpuGoneError):
            observed = now - self._observed_at < policy.MAX_COLLECTION_INTERVAL_SECONDS
            busy_interval = (
                policy.MIN_SAMPLE_INTERVAL_SECONDS
                if observed
                else policy.BUSY_SAMPLE_INTERVAL_SECONDS
            )
            self._sample(self._busy, now, busy_interval)
            self._sample(self._gpm, now)
            self._ticked_at = now
            for _ in self._values(now, policy.SLOW):
                pass
            self._processes.renew(now)
        for instance in self._instances.values():
            instance.tick(now)

    def _sample(
        self,
        accumulator: BusyAccumulator | GpmAccumulator,
        now: float,
        shortest: float = policy.MIN_SAMPLE_INTERVAL_SECONDS,
    ) -> None:
        """Take a sample. A defect costs the accumulator its readings, and no others."""
        try:
            accumulator.sample(now, shortest)
        except DEFECTS as error:
            self._queries.record_defect(type(accumulator).__name__, error)

    def observe(self, now: float) -> GpuObservation:
        """Return all readings and processes, or `lost` if the device is gone.

        While ticks come, slow values are those of the last tick.
        """
        ticking = now - self._ticked_at < policy.MAX_TICK_AGE_SECONDS
        as_of = self._ticked_at if ticking else now
        try:
            readings = (Reading("up", 1.0), *self._readings(now, as_of, ticking=ticking))
            self._observed_at = now
            processes, unread = self._processes.read(as_of)
            compute_mode = _compute_mode(self._number("nvmlDeviceGetComputeMode", now, policy.EACH))
            identity = self._identity(now)
        except GpuGoneError:
            return self.lost
        self.lost = replace(identity, readings=LOST, lost=True)
        return replace(
            identity,
            compute_mode=compute_mode,
            processes=processes,
            unread_lists=unread,
            readings=readings,
        )

    def mig_instances(self, now: float) -> list[MigDeviceReader]:
        """Return the readers of the MIG instances as of the last observation."""
        if self._mig_mode != 1:
            self._close_instances()
        elif now >= self._scan_at:
            self._scan_at = now + policy.MIG_SCAN_INTERVAL_SECONDS
            self._scan_instances()
        return list(self._instances.values())

    @property
    def is_divided(self) -> bool:
        """Whether the GPU is divided into MIG instances, as of the last observation."""
        return self._mig_mode == 1

    @property
    def session_gone(self) -> bool:
        """Whether a query of the GPU or of an instance showed that NVML must be reinitialized."""
        return self._queries.session_gone or any(
            instance.session_gone for instance in self._instances.values()
        )

    def close(self) -> None:
        """Free the samples that NVML has allocated."""
        self._close_instances()
        self._gpm.close()

    def _close_instances(self) -> None:
        for instance in self._instances.values():
            instance.close()
        self._instances.clear()
        self._scan_at = 0.0

    # Readings

    def _readings(self, now: float, as_of: float, *, ticking: bool) -> Iterator[Reading]:
        yield from self._values(as_of, policy.EACH)
        shortest = policy.MAX_TICK_AGE_SECONDS if ticking else self._shortest
        self._sample(self._busy, now, shortest)
        yield from self._busy.readings()
        self._sample(self._gpm, now, shortest)
        yield from self._gpm.readings()

    def _values(self, now: float, min_interval: float) -> Iterator[Reading]:
        """Yield the values that are queried at this interval or more rarely."""
        yield from self._mig(now)
        for row in self._rows:
            if row.every >= min_interval and (
                row.unless is None or not self._queries.is_supported(row.unless)
            ):
                yield from self._row(row, now)
        yield from self._field_values(now, min_interval)

    def _mig(self, now: float) -> Iterator[Reading]:
        name = "nvmlDeviceGetMigMode"
        mode = self._queries.get(
            name, lambda: self._api.numbers(name, self.device)[0], now, policy.SLOW
        )
        if mode is not None:
            if self._mig_mode not in {None, mode}:
                self._queries.clear()
            self._mig_mode = mode
            yield Reading("mig_mode", mode)

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
        return self._queries.get(
            function, lambda: self._api.number(function, self.device), now, every
        )

    def _text(self, function: str, now: float) -> str | None:
        return self._queries.get(
            function, lambda: self._api.text(function, self.device), now, NEVER_AGAIN
        )

    def _identity(self, now: float) -> GpuObservation:
        architecture = self._number("nvmlDeviceGetArchitecture", now)
        return replace(
            self._position,
            name=self._text("nvmlDeviceGetName", now),
            pci_bus_id=self._text("nvmlDeviceGetPciInfo", now),
            architecture=None if architecture is None else ARCHITECTURE_OF.get(architecture),
            compute_capability=self._compute_capability(now),
            vbios_version=self._text("nvmlDeviceGetVbiosVersion", now),
            serial=self._text("nvmlDeviceGetSerial", now) if self._serials else None,
            sm_count=self._sm_count(now),
        )

    def _compute_capability(self, now: float) -> tuple[int, int] | None:
        name = "nvmlDeviceGetCudaComputeCapability"
        numbers = self._queries.get(
            name, lambda: self._api.numbers(name, self.device), now, NEVER_AGAIN
        )
        return None if numbers is None else (numbers[0], numbers[1])

    def _sm_count(self, now: float) -> int | None:
        capability = self._compute_capability(now)
        cores = self._number("nvmlDeviceGetNumGpuCores", now)
        if capability is None or cores is None:
            return None
        per_sm = CORES_PER_SM_EXCEPTIONS.get(capability, CORES_PER_SM.get(capability[0]))
        return None if per_sm is None else cores // per_sm

    # MIG

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
            self._queries.session_gone |= error.code in SESSION_GONE

    def _instance(self, slot: int, before: Mapping[str, MigDeviceReader]) -> MigDeviceReader:
        api = self._api
        device = Device(api.call("nvmlDeviceGetMigDeviceHandleByIndex", self.device, slot))
        uuid = api.text("nvmlDeviceGetUUID", device)
        if uuid in before:
            return before[uuid]
        gpu_instance = api.number("nvmlDeviceGetGpuInstanceId", device)
        instance = f"{gpu_instance}/{api.number('nvmlDeviceGetComputeInstanceId', device)}"
        position = GpuObservation(self._position.index, uuid, self.uuid, instance)
        return MigDeviceReader(
            api, device, position, self._totals, self._shortest, self.device, gpu_instance
        )


class MigDeviceReader(DeviceReader):
    """Reads a MIG instance: only its own values, so that nothing of the GPU is counted twice."""

    fields = ()

    def __init__(
        self,
        api: NvmlApi,
        device: Device,
        position: GpuObservation,
        totals: dict[str, CounterTotals],
        shortest: float,
        parent: Device,
        gpu_instance: int,
    ) -> None:
        super().__init__(api, device, position, totals, serials=False, shortest=shortest)
        own = self._own_totals
        self._gpm = GpmAccumulator(api, parent, self._queries, own, gpu_instance)

    def _own_rows(self) -> tuple[Row, ...]:
        return (MEMORY_ROW,)

    def tick(self, now: float) -> None:
        """Sample the GPM counters of the instance; an instance has no utilization samples."""
        with suppress(GpuGoneError):
            self._sample(self._gpm, now, policy.INSTANCE_SAMPLE_INTERVAL_SECONDS)

    def _readings(self, now: float, as_of: float, *, ticking: bool) -> Iterator[Reading]:
        del as_of, ticking
        for row in self._rows:
            yield from self._row(row, now)
        self._sample(self._gpm, now, self._shortest)
        yield from self._gpm.readings()

    def _sm_count(self, now: float) -> int | None:
        name = "nvmlDeviceGetAttributes_v2"

        def read() -> int:
            return int(self._api.call(name, self.device).multiprocessorCount)

        return self._queries.get(name, read, now, NEVER_AGAIN)


def _compute_mode(value: int | None) -> str | None:
    if value is None:
        return None
    return COMPUTE_MODES[value] if value < len(COMPUTE_MODES) else f"unknown_{value}"


# Processes and control groups

NOT_AVAILABLE = 0xFFFF_FFFF_FFFF_FFFF
"""NVML's number for unknown memory."""

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

    def __init__(self, api: NvmlApi, device: Device, queries: QueryCache) -> None:
        self._api = api
        self._device = device
        self._queries = queries
        self._pids: set[int] | None = None
        """Processes of the compute list when the others were read."""

    def read(self, now: float) -> tuple[tuple[GpuProcess, ...] | None, tuple[ProcessList, ...]]:
        """Return the processes, and the lists that could not be read.

        An unreadable MPS list must differ from an empty list: without it every client seems to
        bypass MPS. If no list could be read, the processes are None and no list is named.
        """
        compute = self._list("compute", now)
        pids = None if compute is None else {row.pid for row in compute}
        if pids is None or pids != self._pids:
            self._queries.forget(*(_list_name(kind) for kind in RARELY_READ))
        self._pids = pids
        others = {kind: self._list(kind, now, policy.SLOW) for kind in RARELY_READ}
        if others["mps"] is not None:
            others["mps"] = _on_this_gpu(others["mps"], compute)
        lists: dict[ProcessList, list[ListedProcess] | None] = {"compute": compute, **others}
        found = [(kind, rows) for kind, rows in lists.items() if rows is not None]
        if not found:
            return None, ()
        processes = tuple(record for kind, rows in found for record in _records(kind, rows))
        return processes, tuple(kind for kind, rows in lists.items() if rows is None)

    def renew(self, now: float) -> None:
        """Read the lists that are rarely read, if they are no longer fresh."""
        if self._pids is not None:
            for kind in RARELY_READ:
                self._list(kind, now, policy.SLOW)

    def _list(
        self, kind: ProcessList, now: float, every: float = policy.EACH
    ) -> list[ListedProcess] | None:
        def read() -> list[ListedProcess]:
            return self._api.processes(self._device, CALLS[kind])

        return self._queries.get(_list_name(kind), read, now, every)


def _list_name(kind: ProcessList) -> str:
    return f"nvmlDeviceGet{CALLS[kind]}RunningProcesses"


def _on_this_gpu(
    rows: list[ListedProcess], compute: list[ListedProcess] | None
) -> list[ListedProcess]:
    """Return the rows of the MPS list on this GPU, with the memory of the compute list."""
    if compute is None:
        return [row for row in rows if row.used_memory != 0]
    here = {row.pid: row for row in compute}
    return [here[row.pid] for row in rows if row.pid in here]


def _records(kind: ProcessList, rows: list[ListedProcess]) -> Iterator[GpuProcess]:
    for row in rows:
        memory = None if row.used_memory == NOT_AVAILABLE else row.used_memory
        yield GpuProcess(row.pid, kind, memory)


def read_cgroup_memory(
    api: NvmlApi, devices: Iterable[Device], root: str, paths: Iterable[str]
) -> Iterator[CgroupMemory]:
    """Yield the memory of control groups that use some on a GPU, or have a limit there.

    `devices` are GPUs that are not divided, `root` is the mount point of cgroup version 2.
    """
    groups = tuple(islice(paths, policy.MAX_CGROUPS))
    for device in devices:
        for path in groups:
            with suppress(NvmlError):  # the group was removed, or the driver does not account it
                limits = api.memory_limits(device, f"{root}{path}")
                if limits.used or limits.soft or limits.hard is not None:
                    yield CgroupMemory(
                        path=path,
                        pci_bus_id=api.text("nvmlDeviceGetPciInfo", device).lower(),
                        used_bytes=limits.used,
                        soft_limit_bytes=limits.soft,
                        hard_limit_bytes=limits.hard,
                        hard_unlimited=limits.hard is None,
                    )
