"""One GPU, or one MIG instance: everything it tells, in one observation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from exporter.nvml_terms import ARCHITECTURES, COMPUTE_MODES
from exporter.observations import GpuObservation, Reading
from exporter.sources.nvml.answers import DEFECTS, ONCE, Answers, GpuGoneError
from exporter.sources.nvml.library import (
    NEVER_HERE,
    Code,
    Device,
    FieldAnswer,
    Library,
    NvmlError,
)
from exporter.sources.nvml.meters import SHORTEST_LOOK_SECONDS, BusyMeter, GpmMeter, Totals
from exporter.sources.nvml.processes import Listed, read_processes
from exporter.sources.nvml.readings import (
    EACH,
    FIELDS,
    MEMORY_ROW,
    ROWS,
    SLOW,
    FieldRow,
    Row,
    nvlink_rows,
)

BUSY_LOOK_SECONDS = 5.0
"""How often a tick reads the utilization samples: the driver keeps those of the last 14 s."""
INSTANCE_LOOK_SECONDS = 5.0
"""How often a tick looks at a MIG instance, of which a host may have dozens."""

ARCHITECTURE_OF = dict(zip((2, 3, 4, 5, 6, 7, 8, 9, 10, 13), ARCHITECTURES, strict=True))
"""By NVML's number."""

CORES_PER_SM = {3: 192, 5: 128, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 11: 128, 12: 128}
"""By the major compute capability; 6.0 and 8.0 have 64."""
CORES_PER_SM_EXCEPTIONS = {(6, 0): 64, (8, 0): 64}


@dataclass(frozen=True, slots=True)
class Place:
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


class GpuReader:
    """Reads one device for as long as NVML stays initialized."""

    fields: tuple[FieldRow, ...] = FIELDS

    def __init__(
        self, library: Library, device: Device, place: Place, totals: Totals, *, serials: bool
    ) -> None:
        self.device = device
        self.place = place
        self.answers = Answers(place.name)
        self._library = library
        self._serials = serials
        self.rows = self._own_rows(totals)
        self._busy = BusyMeter(library, device, self.answers, totals.busy)
        self._gpm = GpmMeter(library, device, self.answers, totals)
        self._mig_mode: int | None = None
        self._ticked_at: float | None = None
        self._cadences = sorted({row.every for row in self.fields})
        self._probed: set[float] = set()
        self._kept_fields: dict[float, tuple[float, tuple[Reading, ...]]] = {}

    @staticmethod
    def _own_rows(totals: Totals) -> tuple[Row, ...]:
        return (*ROWS, *nvlink_rows(totals.link_errors))

    def tick(self, now: float) -> None:
        """Look at what would be lost between two scrapes, and renew what is slow to ask."""
        try:
            self._look(self._busy, now, BUSY_LOOK_SECONDS)
            self._look(self._gpm, now)
            self._renew(now)
        except GpuGoneError:
            return

    def _look(
        self, meter: BusyMeter | GpmMeter, now: float, shortest: float = SHORTEST_LOOK_SECONDS
    ) -> None:
        """A meter that stumbles over an answer has no readings; it must not cost the others."""
        try:
            meter.look(now, shortest)
        except DEFECTS as error:
            self.answers.stumbled(type(meter).__name__, error)

    def _renew(self, now: float) -> None:
        """Ask anew what will be too old before the next tick: that is as far off as the last."""
        ahead = SLOW if self._ticked_at is None else min(1.2 * (now - self._ticked_at), SLOW)
        self._ticked_at = now
        self._mig(now, ahead)
        for row in self.rows:
            if row.every > EACH and self._wanted(row):
                self._row(row, now, ahead)
        for every in self._cadences:
            if every > EACH:
                self._field_values(every, now, ahead)

    def observe(self, now: float) -> GpuObservation:
        """Everything. A GPU that is gone shows as lost, with what is still known of it."""
        try:
            readings = [Reading("up", 1.0), *self._readings(now)]
            listed = read_processes(self._library, self.device, self.answers, now)
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
            place = self.place
            up = (Reading("up", 0.0),)
            return GpuObservation(place.index, place.uuid, readings=up, lost=True)

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
            if self._wanted(row):
                yield from self._row(row, now)
        for every in self._cadences:
            yield from self._field_values(every, now)
        self._look(self._busy, now)
        yield from self._busy.readings()
        self._look(self._gpm, now)
        yield from self._gpm.readings()

    def _mig(self, now: float, ahead: float = 0.0) -> tuple[Reading, ...]:
        name = "nvmlDeviceGetMigMode"

        def read() -> int:
            return self._library.numbers(name, self.device)[0]

        mode = self.answers.ask(name, read, now, SLOW, ahead)
        if mode is None:
            return ()
        if self._mig_mode not in {None, mode}:
            self.answers.forget()
            self._kept_fields.clear()
        self._mig_mode = mode
        return (Reading("mig_mode", mode),)

    def _wanted(self, row: Row) -> bool:
        return row.unless is None or not self.answers.has(row.unless)

    def _row(self, row: Row, now: float, ahead: float = 0.0) -> tuple[Reading, ...]:
        def read() -> tuple[Reading, ...]:
            return tuple(row.read(self._library, self.device))

        return self.answers.ask(row.call, read, now, row.every, ahead) or ()

    def _field_values(self, every: float, now: float, ahead: float = 0.0) -> tuple[Reading, ...]:
        """All fields of one cadence in one call; kept only when nothing was left out this time."""
        good_until, kept = self._kept_fields.get(every, (now, ()))
        if now + ahead < good_until:
            return kept
        self._kept_fields.pop(every, None)
        wanted = [
            row for row in self.fields
            if row.every == every and self.answers.wanted(_field_name(row), now + ahead)
        ]  # fmt: skip
        if not wanted:
            return ()
        readings: list[Reading] = []
        for row, answer in self._ask_each(wanted, every):
            name = _field_name(row)
            if answer.code != 0:
                self.answers.refused(name, answer.code, now)
            elif math.isfinite(answer.value):
                self.answers.answered(name)
                readings.append(row.reading(answer.value))
        still = sum(self.answers.has(_field_name(row)) for row in wanted)
        if every and len(readings) == still:
            self._kept_fields[every] = now + every, tuple(readings)
        return tuple(readings)

    def _ask_each(
        self, rows: list[FieldRow], every: float
    ) -> Iterator[tuple[FieldRow, FieldAnswer]]:
        """One that some driver chokes on must not cost the others."""
        known: list[FieldRow] = []
        for row in rows:
            if self.answers.has(_field_name(row)):
                known.append(row)
            else:  # refused before: put again, by itself
                yield row, self._ask_field(row)
        if not known:
            return
        try:
            answers = self._ask_fields(known)
        except NvmlError as error:
            if error.code in NEVER_HERE and every not in self._probed:
                self._probed.add(every)
                answers = [self._ask_field(row) for row in known]
            else:
                answers = [FieldAnswer(error.code)] * len(known)
        yield from zip(known, answers, strict=True)

    def _ask_fields(self, rows: list[FieldRow]) -> list[FieldAnswer]:
        name = "nvmlDeviceGetFieldValues"
        try:
            return self._library.fields(self.device, [(row.field, row.scope) for row in rows])
        except DEFECTS as error:
            self.answers.stumbled(name, error)
            raise NvmlError(Code.UNKNOWN, name) from error

    def _ask_field(self, row: FieldRow) -> FieldAnswer:
        try:
            return self._ask_fields([row])[0]
        except NvmlError as error:
            return FieldAnswer(error.code)

    def _number(self, function: str, now: float, every: float = 0.0) -> int | None:
        def read() -> int:
            return self._library.number(function, self.device)

        return self.answers.ask(function, read, now, every)

    def _text(self, function: str, now: float) -> str | None:
        def read() -> str:
            return self._library.text(function, self.device)

        return self.answers.ask(function, read, now, ONCE)

    def _compute_capability(self, now: float) -> tuple[int, int] | None:
        name = "nvmlDeviceGetCudaComputeCapability"
        numbers = self.answers.ask(
            name, lambda: self._library.numbers(name, self.device), now, ONCE
        )
        return None if numbers is None else (numbers[0], numbers[1])

    def _sm_count(self, now: float) -> int | None:
        capability = self._compute_capability(now)
        cores = self._number("nvmlDeviceGetNumGpuCores", now, ONCE)
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
        place = self.place
        instance = None
        if place.gpu_instance is not None:
            instance = f"{place.gpu_instance}/{place.compute_instance}"
        architecture = self._number("nvmlDeviceGetArchitecture", now, ONCE)
        bus_id = self.answers.ask(
            "nvmlDeviceGetPciInfo", lambda: self._library.pci_bus_id(self.device), now, ONCE
        )
        return GpuObservation(
            index=place.index,
            uuid=place.uuid,
            parent_uuid=place.parent_uuid,
            mig_instance=instance,
            name=self._text("nvmlDeviceGetName", now),
            pci_bus_id=bus_id,
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


class MigReader(GpuReader):
    """A MIG instance: only what is its own, so that nothing of the GPU is counted twice."""

    fields = ()

    def __init__(
        self, library: Library, device: Device, parent: Device, place: Place, totals: Totals
    ) -> None:
        super().__init__(library, device, place, totals, serials=False)
        self._gpm = GpmMeter(library, parent, self.answers, totals, place.gpu_instance)

    @staticmethod
    def _own_rows(totals: Totals) -> tuple[Row, ...]:
        del totals
        return (MEMORY_ROW,)

    def tick(self, now: float) -> None:
        """Look at the instance's GPM counters; utilization samples it has none."""
        try:
            self._look(self._gpm, now, INSTANCE_LOOK_SECONDS)
        except GpuGoneError:
            return

    def _readings(self, now: float) -> Iterator[Reading]:
        for row in self.rows:
            yield from self._row(row, now)
        self._look(self._gpm, now)
        yield from self._gpm.readings()

    def _sm_count(self, now: float) -> int | None:
        return self.answers.ask(
            "nvmlDeviceGetAttributes_v2", lambda: self._library.sm_count(self.device), now, ONCE
        )


def _compute_mode(value: int | None) -> str | None:
    if value is None:
        return None
    return COMPUTE_MODES[value] if value < len(COMPUTE_MODES) else f"unknown_{value}"


def _field_name(row: FieldRow) -> str:
    return f"nvmlDeviceGetFieldValues({row.field}, {row.scope})"
