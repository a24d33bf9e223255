"""Reads a GPU, or a MIG instance, and finds the MIG instances of the GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mps_exporter.nvml_terms import ARCHITECTURES, COMPUTE_MODES
from mps_exporter.observations import GpuObservation, Reading
from mps_exporter.sources.nvml.accumulators import (
    MIN_SAMPLE_INTERVAL_SECONDS,
    BusyAccumulator,
    CounterTotals,
    GpmAccumulator,
)
from mps_exporter.sources.nvml.processes import Listed, ProcessReader
from mps_exporter.sources.nvml.pynvml_api import (
    SESSION_GONE,
    UNSUPPORTED,
    Code,
    Device,
    FieldAnswer,
    NvmlApi,
    NvmlError,
)
from mps_exporter.sources.nvml.query_cache import DEFECTS, NEVER_AGAIN, GpuGoneError, QueryCache
from mps_exporter.sources.nvml.readings import (
    EACH,
    FIELDS,
    MEMORY_ROW,
    ROWS,
    SLOW,
    FieldRow,
    Row,
    nvlink_rows,
)

BUSY_SAMPLE_SECONDS = 5.0
"""How often a tick reads the utilization samples: the driver keeps those of the last 14 s."""
TICKING_SECONDS = 1.5
"""While ticks come, a collection uses what they sampled, which is younger than this. Sampling takes
3 to 4 ms on an H200 (GPM 2, utilization 1.25), as much as all other readings together."""
OBSERVED_SECONDS = 5.0
"""Collections that are not further apart than this make each tick read the utilization samples, so
that the next one need not."""
INSTANCE_SAMPLE_SECONDS = 5.0
"""How often a tick looks at a MIG instance, of which a host may have dozens."""

ARCHITECTURE_OF = dict(zip((2, 3, 4, 5, 6, 7, 8, 9, 10, 13), ARCHITECTURES, strict=True))
"""By NVML's number."""

CORES_PER_SM = {3: 192, 5: 128, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 11: 128, 12: 128}
"""By the major compute capability; 6.0 and 8.0 have 64."""
CORES_PER_SM_EXCEPTIONS = {(6, 0): 64, (8, 0): 64}


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Where a device stands among the others."""

    index: int
    uuid: str
    parent_uuid: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None

    @property
    def name(self) -> str:
        """For the log."""
        return f"GPU {self.index} ({self.uuid})"


class DeviceReader:
    """Reads one device for as long as NVML stays initialized."""

    fields: tuple[FieldRow, ...] = FIELDS

    def __init__(
        self,
        api: NvmlApi,
        device: Device,
        location: DeviceLocation,
        totals: CounterTotals,
        *,
        serials: bool,
        shortest: float = MIN_SAMPLE_INTERVAL_SECONDS,
    ) -> None:
        self.device = device
        self.shortest = shortest
        """Two samples of its activity are at least so far apart."""
        self.location = location
        self.queries = QueryCache(location.name)
        self._api = api
        self._serials = serials
        self.rows = self._own_rows(totals)
        self._processes = ProcessReader(api, device, self.queries)
        self._busy = BusyAccumulator(api, device, self.queries, totals.busy)
        self._gpm = GpmAccumulator(api, device, self.queries, totals)
        self._mig_mode: int | None = None
        self._ticked_at: float | None = None
        self._observed_at = float("-inf")
        self._cadences = sorted({row.every for row in self.fields})
        self._probed: set[float] = set()
        self._cached_fields: dict[float, tuple[float, tuple[Reading, ...]]] = {}

    @staticmethod
    def _own_rows(totals: CounterTotals) -> tuple[Row, ...]:
        return (*ROWS, *nvlink_rows(totals.link_errors))

    def tick(self, now: float) -> None:
        """Look at what would be lost between two scrapes, and renew what is slow to ask."""
        try:
            observed = now - self._observed_at < OBSERVED_SECONDS
            busy_interval = MIN_SAMPLE_INTERVAL_SECONDS if observed else BUSY_SAMPLE_SECONDS
            self._sample(self._busy, now, busy_interval)
            self._sample(self._gpm, now)
            self._refresh_slow_values(now)
        except GpuGoneError:
            return

    def _sample(
        self,
        accumulator: BusyAccumulator | GpmAccumulator,
        now: float,
        shortest: float = MIN_SAMPLE_INTERVAL_SECONDS,
    ) -> None:
        """A meter that stumbles over an answer has no readings; it must not cost the others."""
        try:
            accumulator.sample(now, shortest)
        except DEFECTS as error:
            self.queries.record_defect(type(accumulator).__name__, error)

    def _refresh_slow_values(self, now: float) -> None:
        """Query again what will be too old at the next tick, which is as far off as the last."""
        ahead = SLOW if self._ticked_at is None else min(1.2 * (now - self._ticked_at), SLOW)
        self._ticked_at = now
        self._mig(now, ahead)
        self._processes.refresh(now, ahead)
        for row in self.rows:
            if row.every > EACH and self._is_needed(row):
                self._row(row, now, ahead)
        for every in self._cadences:
            if every > EACH:
                self._field_values(every, now, ahead)

    def observe(self, now: float) -> GpuObservation:
        """Everything. A GPU that is gone shows as lost, with what is still known of it."""
        try:
            readings = [Reading("up", 1.0), *self._readings(now)]
            self._observed_at = now
            listed = self._processes.read(now)
            compute_mode = self._number("nvmlDeviceGetComputeMode", now)
            return self._observation(now, compute_mode, listed, tuple(readings))
        except GpuGoneError:
            return self.lost(now)

    def lost(self, now: float) -> GpuObservation:
        """What there is to say of a GPU that is gone."""
        try:
            up = (Reading("up", 0.0),)
            return self._observation(now, None, Listed(None), up, lost=True)
        except GpuGoneError:
            location = self.location
            up = (Reading("up", 0.0),)
            return GpuObservation(location.index, location.uuid, readings=up, lost=True)

    @property
    def mig_enabled(self) -> bool:
        """Whether the GPU is divided, as of the last observation."""
        return self._mig_mode == 1

    def close(self) -> None:
        """Free what NVML holds for us."""
        self._gpm.close()

    def _readings(self, now: float) -> Iterator[Reading]:
        yield from self._mig(now)
        for row in self.rows:
            if self._is_needed(row):
                yield from self._row(row, now)
        for every in self._cadences:
            yield from self._field_values(every, now)
        ticking = self._ticked_at is not None and now - self._ticked_at < TICKING_SECONDS
        shortest = TICKING_SECONDS if ticking else self.shortest
        self._sample(self._busy, now, shortest)
        yield from self._busy.readings()
        self._sample(self._gpm, now, shortest)
        yield from self._gpm.readings()

    def _mig(self, now: float, ahead: float = 0.0) -> tuple[Reading, ...]:
        name = "nvmlDeviceGetMigMode"

        def read() -> int:
            return self._api.numbers(name, self.device)[0]

        mode = self.queries.get(name, read, now, SLOW, ahead)
        if mode is None:
            return ()
        if self._mig_mode not in {None, mode}:
            self.queries.clear()
            self._cached_fields.clear()
        self._mig_mode = mode
        return (Reading("mig_mode", mode),)

    def _is_needed(self, row: Row) -> bool:
        return row.unless is None or not self.queries.is_supported(row.unless)

    def _row(self, row: Row, now: float, ahead: float = 0.0) -> tuple[Reading, ...]:
        def read() -> tuple[Reading, ...]:
            return tuple(row.read(self._api, self.device))

        return self.queries.get(row.call, read, now, row.every, ahead) or ()

    def _field_values(self, every: float, now: float, ahead: float = 0.0) -> tuple[Reading, ...]:
        """All fields of one cadence in one call; kept only when nothing was left out this time."""
        good_until, kept = self._cached_fields.get(every, (now, ()))
        if now + ahead < good_until:
            return kept
        self._cached_fields.pop(every, None)
        wanted = [
            row
            for row in self.fields
            if row.every == every and self.queries.is_due(_field_name(row), now + ahead)
        ]
        if not wanted:
            return ()
        readings: list[Reading] = []
        for row, answer in self._query_each_field(wanted, every):
            name = _field_name(row)
            if answer.code != 0:
                self.queries.record_refusal(name, answer.code, now)
            elif math.isfinite(answer.value):
                self.queries.record_answer(name)
                readings.append(row.reading(answer.value))
        still = sum(self.queries.is_supported(_field_name(row)) for row in wanted)
        if every and len(readings) == still:
            self._cached_fields[every] = now + every, tuple(readings)
        return tuple(readings)

    def _query_each_field(
        self, rows: list[FieldRow], every: float
    ) -> Iterator[tuple[FieldRow, FieldAnswer]]:
        """One that some driver chokes on must not cost the others."""
        known: list[FieldRow] = []
        for row in rows:
            if self.queries.is_supported(_field_name(row)):
                known.append(row)
            else:  # refused before: put again, by itself
                yield row, self._query_field(row)
        if not known:
            return
        try:
            answers = self._query_fields(known)
        except NvmlError as error:
            if error.code in UNSUPPORTED and every not in self._probed:
                self._probed.add(every)
                answers = [self._query_field(row) for row in known]
            else:
                answers = [FieldAnswer(error.code)] * len(known)
        yield from zip(known, answers, strict=True)

    def _query_fields(self, rows: list[FieldRow]) -> list[FieldAnswer]:
        name = "nvmlDeviceGetFieldValues"
        try:
            return self._api.fields(self.device, [(row.field, row.scope) for row in rows])
        except DEFECTS as error:
            self.queries.record_defect(name, error)
            raise NvmlError(Code.UNKNOWN, name) from error

    def _query_field(self, row: FieldRow) -> FieldAnswer:
        try:
            return self._query_fields([row])[0]
        except NvmlError as error:
            return FieldAnswer(error.code)

    def _number(self, function: str, now: float, every: float = 0.0) -> int | None:
        def read() -> int:
            return self._api.number(function, self.device)

        return self.queries.get(function, read, now, every)

    def _text(self, function: str, now: float) -> str | None:
        def read() -> str:
            return self._api.text(function, self.device)

        return self.queries.get(function, read, now, NEVER_AGAIN)

    def _compute_capability(self, now: float) -> tuple[int, int] | None:
        name = "nvmlDeviceGetCudaComputeCapability"
        numbers = self.queries.get(
            name, lambda: self._api.numbers(name, self.device), now, NEVER_AGAIN
        )
        return None if numbers is None else (numbers[0], numbers[1])

    def _sm_count(self, now: float) -> int | None:
        capability = self._compute_capability(now)
        cores = self._number("nvmlDeviceGetNumGpuCores", now, NEVER_AGAIN)
        if capability is None or cores is None:
            return None
        per_sm = CORES_PER_SM_EXCEPTIONS.get(capability, CORES_PER_SM.get(capability[0]))
        return None if per_sm is None else cores // per_sm

    def _observation(
        self,
        now: float,
        compute_mode: int | None,
        listed: Listed,
        readings: tuple[Reading, ...],
        *,
        lost: bool = False,
    ) -> GpuObservation:
        location = self.location
        instance = None
        if location.gpu_instance is not None:
            instance = f"{location.gpu_instance}/{location.compute_instance}"
        architecture = self._number("nvmlDeviceGetArchitecture", now, NEVER_AGAIN)
        return GpuObservation(
            index=location.index,
            uuid=location.uuid,
            parent_uuid=location.parent_uuid,
            mig_instance=instance,
            name=self._text("nvmlDeviceGetName", now),
            pci_bus_id=self._text("nvmlDeviceGetPciInfo", now),
            architecture=None if architecture is None else ARCHITECTURE_OF.get(architecture),
            compute_capability=self._compute_capability(now),
            vbios_version=self._text("nvmlDeviceGetVbiosVersion", now),
            serial=self._text("nvmlDeviceGetSerial", now) if self._serials else None,
            sm_count=self._sm_count(now),
            compute_mode=_compute_mode(compute_mode),
            processes=listed.processes,
            unread_lists=listed.unread,
            readings=readings,
            lost=lost,
        )


class MigDeviceReader(DeviceReader):
    """A MIG instance: only what is its own, so that nothing of the GPU is counted twice."""

    fields = ()

    def __init__(
        self,
        api: NvmlApi,
        device: Device,
        parent: Device,
        location: DeviceLocation,
        totals: CounterTotals,
        shortest: float,
    ) -> None:
        super().__init__(api, device, location, totals, serials=False, shortest=shortest)
        self._gpm = GpmAccumulator(api, parent, self.queries, totals, location.gpu_instance)

    @staticmethod
    def _own_rows(totals: CounterTotals) -> tuple[Row, ...]:
        del totals
        return (MEMORY_ROW,)

    def tick(self, now: float) -> None:
        """Look at the instance's GPM counters; utilization samples it has none."""
        try:
            self._sample(self._gpm, now, INSTANCE_SAMPLE_SECONDS)
        except GpuGoneError:
            return

    def _readings(self, now: float) -> Iterator[Reading]:
        for row in self.rows:
            yield from self._row(row, now)
        self._sample(self._gpm, now, self.shortest)
        yield from self._gpm.readings()

    def _sm_count(self, now: float) -> int | None:
        name = "nvmlDeviceGetAttributes_v2"

        def read() -> int:
            return int(self._api.call(name, self.device).multiprocessorCount)

        return self.queries.get(name, read, now, NEVER_AGAIN)


def _compute_mode(value: int | None) -> str | None:
    if value is None:
        return None
    return COMPUTE_MODES[value] if value < len(COMPUTE_MODES) else f"unknown_{value}"


def _field_name(row: FieldRow) -> str:
    return f"nvmlDeviceGetFieldValues({row.field}, {row.scope})"


class MigInstances:
    """The compute instances of each GPU, looked for again every `refresh_seconds`."""

    def __init__(self, api: NvmlApi, refresh_seconds: float) -> None:
        self._api = api
        self._refresh_seconds = refresh_seconds
        self._readers: dict[str, list[MigDeviceReader]] = {}
        """By the UUID of the GPU."""
        self._refresh_at: dict[str, float] = {}

    def __iter__(self) -> Iterator[MigDeviceReader]:
        return (reader for readers in self._readers.values() for reader in readers)

    def clear(self) -> None:
        """The NVML session is over. The readers are closed already."""
        self._readers, self._refresh_at = {}, {}

    def of(
        self, gpu: DeviceReader, now: float, totals: dict[str, CounterTotals]
    ) -> list[MigDeviceReader]:
        """Return the instances of a GPU.

        Args:
            gpu: The GPU.
            now: Monotonic time in seconds.
            totals: By UUID; an instance that is new is added.
        """
        uuid = gpu.location.uuid
        if not gpu.mig_enabled:
            for reader in self._readers.pop(uuid, []):
                reader.close()
            return []
        if now >= self._refresh_at.get(uuid, 0.0):
            self._refresh_at[uuid] = now + self._refresh_seconds
            self._refresh(gpu, totals)
        return self._readers.get(uuid, [])

    def _refresh(self, gpu: DeviceReader, totals: dict[str, CounterTotals]) -> None:
        before = {one.location.uuid: one for one in self._readers.get(gpu.location.uuid, [])}
        present: list[MigDeviceReader] = []
        for device, location in self._found(gpu):
            reader = before.pop(location.uuid, None)
            if reader is None:
                own_totals = totals.setdefault(location.uuid, CounterTotals())
                reader = MigDeviceReader(
                    self._api, device, gpu.device, location, own_totals, gpu.shortest
                )
            present.append(reader)
        for gone in before.values():
            gone.close()
        self._readers[gpu.location.uuid] = present

    def _found(self, gpu: DeviceReader) -> Iterator[tuple[Device, DeviceLocation]]:
        """Slots without an instance answer NOT_FOUND."""
        try:
            slots = self._api.number("nvmlDeviceGetMaxMigDeviceCount", gpu.device)
        except NvmlError as error:
            gpu.queries.session_gone |= error.code in SESSION_GONE
            return
        for slot in range(slots):
            try:
                yield self._in_slot(gpu, slot)
            except NvmlError as error:
                gpu.queries.session_gone |= error.code in SESSION_GONE

    def _in_slot(self, gpu: DeviceReader, slot: int) -> tuple[Device, DeviceLocation]:
        api = self._api
        device = Device(api.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu.device, slot))
        return device, DeviceLocation(
            index=gpu.location.index,
            uuid=api.text("nvmlDeviceGetUUID", device),
            parent_uuid=gpu.location.uuid,
            gpu_instance=api.number("nvmlDeviceGetGpuInstanceId", device),
            compute_instance=api.number("nvmlDeviceGetComputeInstanceId", device),
        )
