"""Every value of a GPU that NVML gives as it is: one line each.

A line says which metric of the catalogue, which call, the factor from NVML's unit to the base unit,
and how often it is worth asking. To add a reading, add a line here and its MetricSpec to
``exporter/metrics/gpu_catalogue.py``. What is computed over time (busy seconds, active seconds,
PCIe bytes, Xid errors) is in modules of its own.

A state set is carried as one reading: the label named as the metric holds the state that is
active, the value is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from exporter.metrics.gpu_catalogue import (
    CLOCK_EVENT_REASONS,
    CLOCKS,
    ECC_KINDS,
    ECC_SCOPES,
    FABRIC_STATES,
    NVLINK_STATES,
    RECOVERY_ACTIONS,
    TEMPERATURE_LIMITS,
)
from exporter.observations import Reading
from exporter.sources.nvml.library import Argument, Device, Library, NvmlError

EACH = 0.0
"""Asked at each collection: costs microseconds."""
SLOW = 5.0
"""May change at any time, but costs a good part of a millisecond, or more. This and what is slower
is renewed between collections, so that no collection need wait for it."""
MINUTE = 60.0
"""Changes when somebody changes a setting, or counts what is rare; costs a millisecond or so."""
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
    """One call and the readings it gives."""

    call: str
    """The NVML function with its arguments: the row's name."""
    read: Callable[[Library, Device], Iterable[Reading]]
    every: float = EACH
    """Seconds for which the answer is good."""
    unless: str | None = None
    """Asked only where the row of this name is not available."""


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One value of the batched call nvmlDeviceGetFieldValues."""

    metric: str
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
            return state(self.metric, int(value), self.states)
        return Reading(self.metric, scaled(value, self.scale), self.labels)


def scaled(value: float, scale: float) -> float:
    """In the base unit, without noise in the last digit: 41 % is 0.41."""
    return value / round(1 / scale) if 0 < scale < 1 else value * scale


def state(metric: str, value: int, names: tuple[str, ...]) -> Reading:
    """A numbered state by its name; a number newer than the names is passed through."""
    name = names[value] if 0 <= value < len(names) else f"unknown_{value}"
    return Reading(metric, 1.0, ((metric, name),))


def number(
    metric: str,
    function: str,
    *arguments: Argument,
    scale: float = 1.0,
    every: float = EACH,
    **labels: str,
) -> Row:
    """A row whose call gives one number."""

    def read(library: Library, device: Device) -> Iterable[Reading]:
        value = library.number(function, device, *arguments)
        return (Reading(metric, scaled(value, scale), tuple(labels.items())),)

    return Row(_name(function, *arguments), read, every)


def first(
    metric: str, function: str, scale: float = 1.0, every: float = EACH, **labels: str
) -> Row:
    """A row whose call gives several numbers, of which the first counts."""

    def read(library: Library, device: Device) -> Iterable[Reading]:
        value = library.numbers(function, device)[0]
        return (Reading(metric, scaled(value, scale), tuple(labels.items())),)

    return Row(function, read, every)


def _name(function: str, *arguments: Argument) -> str:
    return f"{function}({', '.join(str(one) for one in arguments)})" if arguments else function


def _utilization(library: Library, device: Device) -> Iterable[Reading]:
    gpu, memory = library.numbers("nvmlDeviceGetUtilizationRates", device)
    yield Reading("mps_gpu_utilization_ratio", scaled(gpu, PERCENT))
    yield Reading("mps_gpu_memory_copy_utilization_ratio", scaled(memory, PERCENT))


def _memory(library: Library, device: Device) -> Iterable[Reading]:
    memory = library.memory(device)
    yield Reading("mps_gpu_memory_total_bytes", memory.total)
    yield Reading("mps_gpu_memory_used_bytes", memory.used)
    yield Reading("mps_gpu_memory_free_bytes", memory.free)
    if memory.reserved is not None:
        yield Reading("mps_gpu_memory_reserved_bytes", memory.reserved)


def _bar1(library: Library, device: Device) -> Iterable[Reading]:
    total, _free, used = library.numbers("nvmlDeviceGetBAR1MemoryInfo", device)
    yield Reading("mps_gpu_bar1_total_bytes", total)
    yield Reading("mps_gpu_bar1_used_bytes", used)


def _power_limit_range(library: Library, device: Device) -> Iterable[Reading]:
    low, high = library.numbers("nvmlDeviceGetPowerManagementLimitConstraints", device)
    yield Reading("mps_gpu_power_limit_watts", scaled(low, MILLI), (("limit", "min"),))
    yield Reading("mps_gpu_power_limit_watts", scaled(high, MILLI), (("limit", "max"),))


def _fans(library: Library, device: Device) -> Iterable[Reading]:
    for fan in range(library.number("nvmlDeviceGetNumFans", device)):
        speed = library.number("nvmlDeviceGetFanSpeed_v2", device, fan)
        yield Reading("mps_gpu_fan_speed_ratio", scaled(speed, PERCENT), (("fan", str(fan)),))


def _clock_events(function: str) -> Callable[[Library, Device], Iterable[Reading]]:
    def read(library: Library, device: Device) -> Iterable[Reading]:
        mask = library.number(function, device)
        for bit, reason in enumerate(CLOCK_EVENT_REASONS):
            active = float(mask >> bit & 1)
            yield Reading("mps_gpu_clock_event_active", active, (("reason", reason),))

    return read


UNKNOWN_PERFORMANCE_STATE = 32


def _performance_state(library: Library, device: Device) -> Iterable[Reading]:
    value = library.number("nvmlDeviceGetPerformanceState", device)
    if value != UNKNOWN_PERFORMANCE_STATE:
        yield Reading("mps_gpu_performance_state", value)


def _fabric(library: Library, device: Device) -> Iterable[Reading]:
    value = library.fabric_state(device)
    if value != FABRIC_STATES.index("not_supported"):
        yield state("mps_gpu_fabric_state", value, FABRIC_STATES)


def _vgpu_licence(library: Library, device: Device) -> Iterable[Reading]:
    licensed = library.vgpu_licensed(device)
    if licensed is not None:
        yield Reading("mps_gpu_vgpu_licensed", float(licensed))


NVLINK_MAX_LINKS = 18
NVLINK_GET_STATE = 165

NVLINK_LINK_ERRORS = {"replay": 161, "recovery": 162, "crc": 163}
"""Since Hopper: by link, which is the scope."""


def nvlink_rows(errors_answered: dict[str, set[int]]) -> tuple[Row, ...]:
    """What is added up over the links of one GPU.

    Args:
        errors_answered: Kind of error -> links that ever told how many; kept up here. Outlives the
            session: a sum over fewer links than before would look like a counter that was reset.
    """
    links: set[int] = set()
    return (
        Row("nvmlDeviceGetFieldValues(NVLINK_GET_STATE)", partial(_nvlinks, links), MINUTE),
        *(
            Row(f"nvmlDeviceGetFieldValues(NVLINK_ERROR_DL_{kind.upper()})",
                partial(_nvlink_errors, errors_answered.setdefault(kind, set()), kind), MINUTE,
                unless="nvmlDeviceGetFieldValues(52, 0)")
            for kind in NVLINK_LINK_ERRORS
        ),
    )  # fmt: skip


def _nvlinks(answered: set[int], library: Library, device: Device) -> Iterable[Reading]:
    up = [bool(value) for value in _of_links(library, device, NVLINK_GET_STATE, answered)]
    if up:
        for name, count in zip(NVLINK_STATES, (up.count(True), up.count(False)), strict=True):
            yield Reading("mps_gpu_nvlink_links", count, (("state", name),))


def _nvlink_errors(
    answered: set[int], kind: str, library: Library, device: Device
) -> Iterable[Reading]:
    counts = _of_links(library, device, NVLINK_LINK_ERRORS[kind], answered)
    if counts:
        yield Reading("mps_gpu_nvlink_errors_total", sum(counts), (("kind", kind),))


def _of_links(library: Library, device: Device, field: int, answered: set[int]) -> list[float]:
    """Ask each link; those that a GPU does not have are INVALID_ARGUMENT or NOT_SUPPORTED.

    Args:
        library: NVML.
        device: The GPU.
        field: What is asked.
        answered: The links that it has: those that ever answered. Kept up here.

    Returns:
        The values of all links that the GPU has.

    Raises:
        NvmlError: One of these does not answer now.
    """
    answers = library.fields(device, [(field, link) for link in range(NVLINK_MAX_LINKS)])
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
    row = number(
        "mps_gpu_ecc_errors_total",
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
    number("mps_gpu_persistence_mode", "nvmlDeviceGetPersistenceMode"),
    Row("nvmlDeviceGetPerformanceState", _performance_state),
    # Use
    Row("nvmlDeviceGetUtilizationRates", _utilization),
    first("mps_gpu_engine_utilization_ratio", "nvmlDeviceGetEncoderUtilization", PERCENT,
          engine="encoder"),
    first("mps_gpu_engine_utilization_ratio", "nvmlDeviceGetDecoderUtilization", PERCENT,
          engine="decoder"),
    first("mps_gpu_engine_utilization_ratio", "nvmlDeviceGetJpgUtilization", PERCENT,
          engine="jpeg"),
    first("mps_gpu_engine_utilization_ratio", "nvmlDeviceGetOfaUtilization", PERCENT,
          engine="ofa"),
    # Memory
    MEMORY_ROW,
    Row("nvmlDeviceGetBAR1MemoryInfo", _bar1, SLOW),
    # Power and heat
    number("mps_gpu_power_watts", "nvmlDeviceGetPowerUsage", scale=MILLI),
    number("mps_gpu_power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", scale=MILLI,
           limit="enforced"),
    number("mps_gpu_power_limit_watts", "nvmlDeviceGetPowerManagementLimit", scale=MILLI,
           every=MINUTE, limit="requested"),
    number("mps_gpu_power_limit_watts", "nvmlDeviceGetPowerManagementDefaultLimit", scale=MILLI,
           every=MINUTE, limit="default"),
    Row("nvmlDeviceGetPowerManagementLimitConstraints", _power_limit_range, MINUTE),
    number("mps_gpu_energy_joules_total", "nvmlDeviceGetTotalEnergyConsumption", scale=MILLI,
           every=SLOW),
    number("mps_gpu_temperature_celsius", "nvmlDeviceGetTemperature", 0, sensor="gpu"),
    *(
        number("mps_gpu_temperature_limit_celsius", "nvmlDeviceGetTemperatureThreshold", which,
               every=HOUR, limit=name)
        for which, name in enumerate(TEMPERATURE_LIMITS)
    ),
    Row("nvmlDeviceGetFanSpeed_v2", _fans),
    # Clocks
    *(
        number("mps_gpu_clock_hertz", "nvmlDeviceGetClockInfo", which, scale=MEGA, clock=name)
        for which, name in enumerate(CLOCKS)
    ),
    *(
        number("mps_gpu_clock_max_hertz", "nvmlDeviceGetMaxClockInfo", which, scale=MEGA,
               every=HOUR, clock=name)
        for which, name in enumerate(CLOCKS)
    ),
    Row(_EVENT_REASONS, _clock_events(_EVENT_REASONS)),
    Row(_THROTTLE_REASONS, _clock_events(_THROTTLE_REASONS), unless=_EVENT_REASONS),
    # Health
    *ECC_ROWS,
    # Links
    number("mps_gpu_pcie_link_generation", "nvmlDeviceGetCurrPcieLinkGeneration", of="current"),
    number("mps_gpu_pcie_link_generation", "nvmlDeviceGetMaxPcieLinkGeneration", every=HOUR,
           of="max"),
    number("mps_gpu_pcie_link_width", "nvmlDeviceGetCurrPcieLinkWidth", of="current"),
    number("mps_gpu_pcie_link_width", "nvmlDeviceGetMaxPcieLinkWidth", every=HOUR, of="max"),
    Row("nvmlDeviceGetGpuFabricInfoV", _fabric, MINUTE),
    Row("nvmlDeviceGetGridLicensableFeatures_v4", _vgpu_licence, MINUTE),
)  # fmt: skip
"""Asked one by one."""


def _error(metric: str, field: int, kind: str, scope: int = 0) -> FieldRow:
    return FieldRow(metric, field, labels=(("kind", kind),), scope=scope, every=MINUTE)


def _clock_event(field: int, reason: str, every: float = EACH) -> FieldRow:
    labels = (("reason", reason),)
    return FieldRow("mps_gpu_clock_event_seconds_total", field, NANO, labels, every=every)


FIELDS: tuple[FieldRow, ...] = (
    FieldRow("mps_gpu_temperature_celsius", 82, labels=(("sensor", "memory"),)),
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
    FieldRow("mps_gpu_retired_pages", 29, labels=(("cause", "multiple_single_bit_errors"),),
             every=MINUTE),
    FieldRow("mps_gpu_retired_pages", 30, labels=(("cause", "double_bit_error"),),
             every=MINUTE),
    FieldRow("mps_gpu_retired_pages_pending", 31, every=MINUTE),
    FieldRow("mps_gpu_remapped_rows", 142, labels=(("cause", "correctable_error"),),
             every=MINUTE),
    FieldRow("mps_gpu_remapped_rows", 143, labels=(("cause", "uncorrectable_error"),),
             every=MINUTE),
    FieldRow("mps_gpu_row_remap_pending", 144, every=MINUTE),
    FieldRow("mps_gpu_row_remap_failure", 145, every=MINUTE),
    FieldRow("mps_gpu_recovery_action", 230, states=RECOVERY_ACTIONS, every=SLOW),
    # Links
    FieldRow("mps_gpu_pcie_replays_total", 94, every=MINUTE),
    _error("mps_gpu_pcie_errors_total", 169, "l0_to_recovery"),
    _error("mps_gpu_pcie_errors_total", 173, "correctable"),
    _error("mps_gpu_pcie_errors_total", 174, "nak_received"),
    _error("mps_gpu_pcie_errors_total", 175, "receiver"),
    _error("mps_gpu_pcie_errors_total", 176, "bad_tlp"),
    _error("mps_gpu_pcie_errors_total", 177, "nak_sent"),
    _error("mps_gpu_pcie_errors_total", 178, "bad_dllp"),
    _error("mps_gpu_pcie_errors_total", 179, "non_fatal"),
    _error("mps_gpu_pcie_errors_total", 180, "fatal"),
    _error("mps_gpu_pcie_errors_total", 181, "unsupported_request"),
    _error("mps_gpu_pcie_errors_total", 182, "lcrc"),
    _error("mps_gpu_pcie_errors_total", 183, "lane"),
    FieldRow("mps_gpu_nvlink_transmit_bytes_total", 138, KIBI, scope=ALL_LINKS,
             every=SLOW),
    FieldRow("mps_gpu_nvlink_receive_bytes_total", 139, KIBI, scope=ALL_LINKS,
             every=SLOW),
    _error("mps_gpu_nvlink_errors_total", 38, "crc_flit"),
    _error("mps_gpu_nvlink_errors_total", 45, "crc_data"),
    _error("mps_gpu_nvlink_errors_total", 52, "replay"),
    _error("mps_gpu_nvlink_errors_total", 59, "recovery"),
    _error("mps_gpu_nvlink_errors_total", 160, "ecc_data"),
)  # fmt: skip
"""Asked together, one call for each cadence, and again only those that this GPU has."""

PCIE_TRANSMIT_FIELD = 197
PCIE_RECEIVE_FIELD = 198
"""32-bit byte counters; see ``meters.py``."""
