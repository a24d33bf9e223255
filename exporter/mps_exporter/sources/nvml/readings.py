"""Every value of a GPU that NVML returns directly: one line each.

A line says which quantity, which call, the factor from NVML's unit to the base unit, and how often
it is worth asking. To add a reading, add a line here and the metric of this quantity to
``exporter/mps_exporter/metrics/gpus.py``. What is computed over time (busy seconds, active
seconds, PCIe bytes, Xid errors) is in modules of its own.

A state is carried as one reading: its label ``state`` names the state, the value is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from mps_exporter.nvml_terms import (
    CLOCK_EVENT_REASONS,
    CLOCKS,
    ECC_KINDS,
    ECC_SCOPES,
    FABRIC_STATES,
    NVLINK_STATES,
    RECOVERY_ACTIONS,
    TEMPERATURE_LIMITS,
)
from mps_exporter.observations import Reading
from mps_exporter.sources.nvml.pynvml_api import Argument, Device, NvmlApi, NvmlError

EACH = 0.0
"""Queried at each collection: costs microseconds."""
SLOW = 5.0
"""May change at any time, but costs a good part of a millisecond, or more. This and what is slower
is renewed between collections, so that no collection need wait for it."""
MINUTE = 60.0
"""Changes with a setting, or counts rare events; costs a millisecond or so."""
HOUR = 3600.0
"""Does not change while the driver is loaded, but for a repair or a new board."""

MILLI = 1e-3
NANO = 1e-9
PERCENT = 1e-2
MEGA = 1e6
KIBI = 1024.0

ALL_LINKS = 0xFFFFFFFF
"""The scope that makes NVML add up all NVLink links."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One call and its readings."""

    call: str
    """The NVML function with its arguments: the row's name."""
    read: Callable[[NvmlApi, Device], Iterable[Reading]]
    every: float = EACH
    """Seconds for which the answer is good."""
    unless: str | None = None
    """Queried only where the row of this name is not available."""


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One value of the batched call nvmlDeviceGetFieldValues."""

    quantity: str
    field: int
    """NVML_FI_DEV_..., by number."""
    scale: float = 1.0
    labels: Labels = ()
    scope: int = 0
    states: tuple[str, ...] = ()
    """Of a state set: the names of the values 0, 1, 2 ..."""
    every: float = EACH
    """Seconds for which the answer is good; rows with the same are asked in one call."""

    def reading(self, value: float) -> Reading:
        """The answer in the base unit."""
        if self.states:
            return state(self.quantity, int(value), self.states)
        return Reading(self.quantity, scaled(value, self.scale), self.labels)


def scaled(value: float, scale: float) -> float:
    """In the base unit, without noise in the last digit: 41 % is 0.41."""
    return value / round(1 / scale) if 0 < scale < 1 else value * scale


def state(quantity: str, value: int, names: tuple[str, ...]) -> Reading:
    """A numbered state by its name; a number newer than the names is passed through."""
    name = names[value] if 0 <= value < len(names) else f"unknown_{value}"
    return Reading(quantity, 1.0, (("state", name),))


def number_row(
    quantity: str,
    function: str,
    *arguments: Argument,
    scale: float = 1.0,
    every: float = EACH,
    **labels: str,
) -> Row:
    """A row whose call returns one number."""

    def read(api: NvmlApi, device: Device) -> Iterable[Reading]:
        value = api.number(function, device, *arguments)
        return (Reading(quantity, scaled(value, scale), tuple(labels.items())),)

    return Row(_name(function, *arguments), read, every)


def first_number_row(
    quantity: str, function: str, scale: float = 1.0, every: float = EACH, **labels: str
) -> Row:
    """A row whose call returns several numbers, of which the first counts."""

    def read(api: NvmlApi, device: Device) -> Iterable[Reading]:
        value = api.numbers(function, device)[0]
        return (Reading(quantity, scaled(value, scale), tuple(labels.items())),)

    return Row(function, read, every)


def _name(function: str, *arguments: Argument) -> str:
    return f"{function}({', '.join(str(one) for one in arguments)})" if arguments else function


def _utilization(api: NvmlApi, device: Device) -> Iterable[Reading]:
    gpu, memory = api.numbers("nvmlDeviceGetUtilizationRates", device)
    yield Reading("gpu_utilization", scaled(gpu, PERCENT))
    yield Reading("memory_utilization", scaled(memory, PERCENT))


def _memory(api: NvmlApi, device: Device) -> Iterable[Reading]:
    memory = api.memory(device)
    yield Reading("memory_total", memory.total)
    yield Reading("memory_used", memory.used)
    yield Reading("memory_free", memory.free)
    if memory.reserved is not None:
        yield Reading("memory_reserved", memory.reserved)


def _bar1(api: NvmlApi, device: Device) -> Iterable[Reading]:
    total, _free, used = api.numbers("nvmlDeviceGetBAR1MemoryInfo", device)
    yield Reading("bar1_total", total)
    yield Reading("bar1_used", used)


def _power_limit_range(api: NvmlApi, device: Device) -> Iterable[Reading]:
    low, high = api.numbers("nvmlDeviceGetPowerManagementLimitConstraints", device)
    yield Reading("power_limit", scaled(low, MILLI), (("limit", "min"),))
    yield Reading("power_limit", scaled(high, MILLI), (("limit", "max"),))


def _fans(api: NvmlApi, device: Device) -> Iterable[Reading]:
    for fan in range(api.number("nvmlDeviceGetNumFans", device)):
        speed = api.number("nvmlDeviceGetFanSpeed_v2", device, fan)
        yield Reading("fan_speed", scaled(speed, PERCENT), (("fan", str(fan)),))


def _clock_events(function: str) -> Callable[[NvmlApi, Device], Iterable[Reading]]:
    def read(api: NvmlApi, device: Device) -> Iterable[Reading]:
        mask = api.number(function, device)
        for bit, reason in enumerate(CLOCK_EVENT_REASONS):
            active = float(mask >> bit & 1)
            yield Reading("clock_event", active, (("reason", reason),))

    return read


UNKNOWN_PERFORMANCE_STATE = 32


def _performance_state(api: NvmlApi, device: Device) -> Iterable[Reading]:
    value = api.number("nvmlDeviceGetPerformanceState", device)
    if value != UNKNOWN_PERFORMANCE_STATE:
        yield Reading("performance_state", value)


def _fabric(api: NvmlApi, device: Device) -> Iterable[Reading]:
    value = api.fabric_state(device)
    if value != FABRIC_STATES.index("not_supported"):
        yield state("fabric_state", value, FABRIC_STATES)


def _vgpu_licence(api: NvmlApi, device: Device) -> Iterable[Reading]:
    licensed = api.vgpu_licensed(device)
    if licensed is not None:
        yield Reading("vgpu_licensed", float(licensed))


NVLINK_MAX_LINKS = 18
NVLINK_GET_STATE = 165

NVLINK_LINK_ERRORS = {"replay": 161, "recovery": 162, "crc": 163}
"""Since Hopper: by link, which is the scope."""


def nvlink_rows(errors_answered: dict[str, set[int]]) -> tuple[Row, ...]:
    """What is added up over the links of one GPU.

    Args:
        errors_answered: Kind of error -> links that ever reported a count; updated here.
            It outlives the session: a sum over fewer links would look like a counter reset.
    """
    links: set[int] = set()
    return (
        Row("nvmlDeviceGetFieldValues(NVLINK_GET_STATE)", partial(_nvlinks, links), MINUTE),
        *(
            Row(
                f"nvmlDeviceGetFieldValues(NVLINK_ERROR_DL_{kind.upper()})",
                partial(_nvlink_errors, errors_answered.setdefault(kind, set()), kind),
                MINUTE,
                unless="nvmlDeviceGetFieldValues(52, 0)",
            )
            for kind in NVLINK_LINK_ERRORS
        ),
    )


def _nvlinks(answered: set[int], api: NvmlApi, device: Device) -> Iterable[Reading]:
    up = [bool(value) for value in _of_links(api, device, NVLINK_GET_STATE, answered)]
    if up:
        for name, count in zip(NVLINK_STATES, (up.count(True), up.count(False)), strict=True):
            yield Reading("nvlink_links", count, (("state", name),))


def _nvlink_errors(
    answered: set[int], kind: str, api: NvmlApi, device: Device
) -> Iterable[Reading]:
    counts = _of_links(api, device, NVLINK_LINK_ERRORS[kind], answered)
    if counts:
        yield Reading("nvlink_errors", sum(counts), (("kind", kind),))


def _of_links(api: NvmlApi, device: Device, field: int, answered: set[int]) -> list[float]:
    """Ask each link; those that a GPU does not have are INVALID_ARGUMENT or NOT_SUPPORTED.

    Args:
        api: NVML.
        device: The GPU.
        field: What is queried.
        answered: The links that it has: those that ever answered. Kept up here.

    Returns:
        The values of all links that the GPU has.

    Raises:
        NvmlError: One of these does not answer now.
    """
    answers = api.fields(device, [(field, link) for link in range(NVLINK_MAX_LINKS)])
    for link, answer in enumerate(answers):
        if answer.code == 0:
            answered.add(link)
        elif link in answered:
            raise NvmlError(answer.code, f"nvmlDeviceGetFieldValues({field}, {link})")
    return [answer.value for answer in answers if answer.code == 0]


ECC_LOCATIONS = {"dram": 2, "sram": 7}
"""nvmlMemoryLocation_t of GPUs since Ampere."""
ECC_OLD_LOCATIONS = {
    "l1_cache": 0,
    "l2_cache": 1,
    "register_file": 3,
    "texture_memory": 4,
    "cbu": 6,
}
"""Where SRAM is not one location."""


def _ecc(name: str, location: int, kind: int, scope: int, unless: str | None = None) -> Row:
    row = number_row(
        "ecc_errors",
        "nvmlDeviceGetMemoryErrorCounter",
        kind,
        scope,
        location,
        kind=ECC_KINDS[kind],
        scope=ECC_SCOPES[scope],
        location=name,
    )
    return Row(row.call, row.read, row.every, unless)


_ECC_SRAM = "nvmlDeviceGetMemoryErrorCounter({}, {}, 7)"

ECC_ROWS = (
    *(
        _ecc(name, location, kind, scope)
        for kind in (0, 1)
        for scope in (0, 1)
        for name, location in ECC_LOCATIONS.items()
    ),
    *(
        _ecc(name, location, kind, scope, unless=_ECC_SRAM.format(kind, scope))
        for kind in (0, 1)
        for scope in (0, 1)
        for name, location in ECC_OLD_LOCATIONS.items()
    ),
)

_EVENT_REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
_THROTTLE_REASONS = "nvmlDeviceGetCurrentClocksThrottleReasons"

MEMORY_ROW = Row("nvmlDeviceGetMemoryInfo_v2", _memory)

ROWS: tuple[Row, ...] = (
    number_row("persistence_mode", "nvmlDeviceGetPersistenceMode"),
    Row("nvmlDeviceGetPerformanceState", _performance_state),
    # Use
    Row("nvmlDeviceGetUtilizationRates", _utilization),
    first_number_row(
        "engine_utilization", "nvmlDeviceGetEncoderUtilization", PERCENT, engine="encoder"
    ),
    first_number_row(
        "engine_utilization", "nvmlDeviceGetDecoderUtilization", PERCENT, engine="decoder"
    ),
    first_number_row("engine_utilization", "nvmlDeviceGetJpgUtilization", PERCENT, engine="jpeg"),
    first_number_row("engine_utilization", "nvmlDeviceGetOfaUtilization", PERCENT, engine="ofa"),
    # Memory
    MEMORY_ROW,
    Row("nvmlDeviceGetBAR1MemoryInfo", _bar1, SLOW),
    # Power and heat
    number_row("power", "nvmlDeviceGetPowerUsage", scale=MILLI),
    number_row("power_limit", "nvmlDeviceGetEnforcedPowerLimit", scale=MILLI, limit="enforced"),
    number_row(
        "power_limit",
        "nvmlDeviceGetPowerManagementLimit",
        scale=MILLI,
        every=MINUTE,
        limit="requested",
    ),
    number_row(
        "power_limit",
        "nvmlDeviceGetPowerManagementDefaultLimit",
        scale=MILLI,
        every=MINUTE,
        limit="default",
    ),
    Row("nvmlDeviceGetPowerManagementLimitConstraints", _power_limit_range, MINUTE),
    number_row("energy", "nvmlDeviceGetTotalEnergyConsumption", scale=MILLI, every=SLOW),
    number_row("temperature", "nvmlDeviceGetTemperature", 0, sensor="gpu"),
    *(
        number_row(
            "temperature_limit", "nvmlDeviceGetTemperatureThreshold", which, every=HOUR, limit=name
        )
        for which, name in enumerate(TEMPERATURE_LIMITS)
    ),
    Row("nvmlDeviceGetFanSpeed_v2", _fans),
    # Clocks
    *(
        number_row("clock", "nvmlDeviceGetClockInfo", which, scale=MEGA, clock=name)
        for which, name in enumerate(CLOCKS)
    ),
    *(
        number_row(
            "clock_max", "nvmlDeviceGetMaxClockInfo", which, scale=MEGA, every=HOUR, clock=name
        )
        for which, name in enumerate(CLOCKS)
    ),
    Row(_EVENT_REASONS, _clock_events(_EVENT_REASONS)),
    Row(_THROTTLE_REASONS, _clock_events(_THROTTLE_REASONS), unless=_EVENT_REASONS),
    # Health
    *ECC_ROWS,
    # Links
    number_row("pcie_link_generation", "nvmlDeviceGetCurrPcieLinkGeneration", of="current"),
    number_row("pcie_link_generation", "nvmlDeviceGetMaxPcieLinkGeneration", every=HOUR, of="max"),
    number_row("pcie_link_width", "nvmlDeviceGetCurrPcieLinkWidth", of="current"),
    number_row("pcie_link_width", "nvmlDeviceGetMaxPcieLinkWidth", every=HOUR, of="max"),
    Row("nvmlDeviceGetGpuFabricInfoV", _fabric, MINUTE),
    Row("nvmlDeviceGetGridLicensableFeatures_v4", _vgpu_licence, MINUTE),
)
"""Queried one by one."""


def _error(quantity: str, field: int, kind: str, scope: int = 0) -> FieldRow:
    return FieldRow(quantity, field, labels=(("kind", kind),), scope=scope, every=MINUTE)


def _clock_event(field: int, reason: str, every: float = EACH) -> FieldRow:
    labels = (("reason", reason),)
    return FieldRow("clock_event_time", field, NANO, labels, every=every)


FIELDS: tuple[FieldRow, ...] = (
    FieldRow("temperature", 82, labels=(("sensor", "memory"),)),
    _clock_event(74, "sw_power_cap"),
    _clock_event(75, "thermal", SLOW),
    _clock_event(76, "sync_boost"),
    _clock_event(77, "board_limit"),
    _clock_event(78, "low_utilization"),
    _clock_event(79, "reliability"),
    _clock_event(80, "below_application_clocks"),
    _clock_event(81, "below_base_clocks"),
    _clock_event(269, "sw_thermal_slowdown"),
    _clock_event(270, "hw_thermal_slowdown", SLOW),
    _clock_event(271, "hw_power_brake_slowdown", SLOW),
    # Health
    FieldRow("retired_pages", 29, labels=(("cause", "multiple_single_bit_errors"),), every=MINUTE),
    FieldRow("retired_pages", 30, labels=(("cause", "double_bit_error"),), every=MINUTE),
    FieldRow("retired_pages_pending", 31, every=MINUTE),
    FieldRow("remapped_rows", 142, labels=(("cause", "correctable_error"),), every=MINUTE),
    FieldRow("remapped_rows", 143, labels=(("cause", "uncorrectable_error"),), every=MINUTE),
    FieldRow("row_remap_pending", 144, every=MINUTE),
    FieldRow("row_remap_failure", 145, every=MINUTE),
    FieldRow("recovery_action", 230, states=RECOVERY_ACTIONS, every=SLOW),
    # Links
    FieldRow("pcie_replays", 94, every=MINUTE),
    _error("pcie_errors", 169, "l0_to_recovery"),
    _error("pcie_errors", 173, "correctable"),
    _error("pcie_errors", 174, "nak_received"),
    _error("pcie_errors", 175, "receiver"),
    _error("pcie_errors", 176, "bad_tlp"),
    _error("pcie_errors", 177, "nak_sent"),
    _error("pcie_errors", 178, "bad_dllp"),
    _error("pcie_errors", 179, "non_fatal"),
    _error("pcie_errors", 180, "fatal"),
    _error("pcie_errors", 181, "unsupported_request"),
    _error("pcie_errors", 182, "lcrc"),
    _error("pcie_errors", 183, "lane"),
    FieldRow("nvlink_transmit_bytes", 138, KIBI, scope=ALL_LINKS, every=SLOW),
    FieldRow("nvlink_receive_bytes", 139, KIBI, scope=ALL_LINKS, every=SLOW),
    _error("nvlink_errors", 38, "crc_flit"),
    _error("nvlink_errors", 45, "crc_data"),
    _error("nvlink_errors", 52, "replay"),
    _error("nvlink_errors", 59, "recovery"),
    _error("nvlink_errors", 160, "ecc_data"),
)
"""Queried together, one call for each cadence, and again only those that this GPU has."""

PCIE_TRANSMIT_FIELD = 197
PCIE_RECEIVE_FIELD = 198
"""32-bit byte counters; see ``accumulators.py``."""
