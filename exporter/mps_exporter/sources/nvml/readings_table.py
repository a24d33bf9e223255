"""The values of a GPU that NVML returns directly, as rows.

A row contains the quantity, the call, the factor from NVML's unit to the base unit, and the
interval of the query. To add a reading, add a row here and the metric of the quantity to
``exporter/mps_exporter/metrics/gpus.py``. Values computed over time (busy seconds, active seconds,
PCIe bytes, Xid errors) are in ``accumulators.py`` and ``session.py``.

A state is one reading: its label ``state`` names the state, its value is 1.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

from mps_exporter import nvml_terms as nvml
from mps_exporter.limits_without_a_flag import EACH, HOUR, MINUTE, SLOW
from mps_exporter.observations import Reading
from mps_exporter.sources.nvml.pynvml_api import Argument, Device, NvmlApi, NvmlError

MILLI = 1e-3
NANO = 1e-9
PERCENT = 1e-2
MEGA = 1e6
KIBI = 1024.0

ALL_LINKS = 0xFFFFFFFF  # Scope of the sum over all NVLink links.

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One call and its readings."""

    call: str  # Name of the row: the NVML function with its arguments.
    read: Callable[[NvmlApi, Device], Iterable[Reading]]
    every: float = EACH  # Interval in seconds of the query.
    unless: str | None = None  # Read this row only if the row of this name is refused.


@dataclass(frozen=True)
class FieldRow:
    """One value of the batched call nvmlDeviceGetFieldValues."""

    quantity: str
    field: int  # NVML_FI_DEV_..., by number.
    scale: float = 1.0
    labels: Labels = ()
    scope: int = 0
    states: tuple[str, ...] = ()  # Names of the values 0, 1, 2 ... of a state.
    every: float = EACH  # Interval in seconds of the query.

    @cached_property
    def call(self) -> str:
        return f"nvmlDeviceGetFieldValues({self.field}, {self.scope})"

    def reading(self, value: float) -> Reading:
        if self.states:
            return state(self.quantity, int(value), self.states)
        return Reading(self.quantity, scaled(value, self.scale), self.labels)


def scaled(value: float, scale: float) -> float:
    """Return a value in the base unit, without noise in the last digit: 41 % is 0.41."""
    return value / round(1 / scale) if 0 < scale < 1 else value * scale


def state(quantity: str, value: int, names: tuple[str, ...]) -> Reading:
    """Return a numbered state as a reading; a number without a name is unknown_N."""
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
    """Return a row for the first number of a reply."""

    def read(api: NvmlApi, device: Device) -> Iterable[Reading]:
        value = api.number(function, device, *arguments)
        return (Reading(quantity, scaled(value, scale), tuple(labels.items())),)

    name = f"{function}({', '.join(map(str, arguments))})" if arguments else function
    return Row(name, read, every)


def _utilization(api: NvmlApi, device: Device) -> Iterable[Reading]:
    gpu, memory = api.numbers("nvmlDeviceGetUtilizationRates", device)
    yield Reading("gpu_utilization", scaled(gpu, PERCENT))
    yield Reading("memory_utilization", scaled(memory, PERCENT))


def _memory(api: NvmlApi, device: Device) -> Iterable[Reading]:
    for name, size in api.memory(device).items():
        yield Reading(f"memory_{name}", size)


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


def _clock_events(function: str, api: NvmlApi, device: Device) -> Iterable[Reading]:
    mask = api.number(function, device)
    for bit, reason in enumerate(nvml.CLOCK_EVENT_REASONS):
        yield Reading("clock_event", float(mask >> bit & 1), (("reason", reason),))


UNKNOWN_PERFORMANCE_STATE = 32


def _performance_state(api: NvmlApi, device: Device) -> Iterable[Reading]:
    value = api.number("nvmlDeviceGetPerformanceState", device)
    if value != UNKNOWN_PERFORMANCE_STATE:
        yield Reading("performance_state", value)


def _fabric(api: NvmlApi, device: Device) -> Iterable[Reading]:
    value = api.fabric_state(device)
    if value != nvml.FABRIC_STATES.index("not_supported"):
        yield state("fabric_state", value, nvml.FABRIC_STATES)


def _vgpu_licence(api: NvmlApi, device: Device) -> Iterable[Reading]:
    licensed = api.vgpu_licensed(device)
    if licensed is not None:
        yield Reading("vgpu_licensed", float(licensed))


NVLINK_MAX_LINKS = 18
NVLINK_GET_STATE = 165

NVLINK_LINK_ERRORS = {"replay": 161, "recovery": 162, "crc": 163}
"""Kind of error -> field, since Hopper; the scope is the link."""


def nvlink_rows(counting_links: dict[str, set[int]]) -> tuple[Row, ...]:
    """Return the rows that add up the links of one GPU.

    `counting_links` outlives the session: a sum over fewer links would look like a counter reset.
    """
    links: set[int] = set()
    return (
        Row("nvmlDeviceGetFieldValues(NVLINK_GET_STATE)", partial(_nvlinks, links), MINUTE),
        *(
            Row(
                f"nvmlDeviceGetFieldValues(NVLINK_ERROR_DL_{kind.upper()})",
                partial(_nvlink_errors, counting_links.setdefault(kind, set()), kind),
                MINUTE,
                unless="nvmlDeviceGetFieldValues(52, 0)",
            )
            for kind in NVLINK_LINK_ERRORS
        ),
    )


def _nvlinks(known: set[int], api: NvmlApi, device: Device) -> Iterable[Reading]:
    up = [bool(value) for value in _query_links(api, device, NVLINK_GET_STATE, known)]
    if up:
        for name, count in zip(nvml.NVLINK_STATES, (up.count(True), up.count(False)), strict=True):
            yield Reading("nvlink_links", count, (("state", name),))


def _nvlink_errors(known: set[int], kind: str, api: NvmlApi, device: Device) -> Iterable[Reading]:
    counts = _query_links(api, device, NVLINK_LINK_ERRORS[kind], known)
    if counts:
        yield Reading("nvlink_errors", sum(counts), (("kind", kind),))


def _query_links(api: NvmlApi, device: Device, field: int, known: set[int]) -> list[float]:
    """Return the values of all links that the GPU has, and add these links to `known`.

    Raises:
        NvmlError: A known link returns no value now.
    """
    replies = api.fields(device, [(field, link) for link in range(NVLINK_MAX_LINKS)])
    for link, reply in enumerate(replies):
        if reply.code == 0:
            known.add(link)
        elif link in known:
            raise NvmlError(reply.code, f"nvmlDeviceGetFieldValues({field}, {link})")
    return [reply.value for reply in replies if reply.code == 0]


ECC_LOCATIONS = {"dram": 2, "sram": 7}  # nvmlMemoryLocation_t of GPUs since Ampere.
ECC_OLD_LOCATIONS = {
    "l1_cache": 0,
    "l2_cache": 1,
    "register_file": 3,
    "texture_memory": 4,
    "cbu": 6,
}
"""nvmlMemoryLocation_t of GPUs that do not count SRAM as one location."""


def _ecc_rows(locations: dict[str, int], unless: str = "") -> Iterable[Row]:
    kinds, scopes = enumerate(nvml.ECC_KINDS), enumerate(nvml.ECC_SCOPES)
    for (kind, kind_name), (scope, scope_name), name in product(kinds, scopes, locations):
        numbers = kind, scope, locations[name]
        row = number_row(
            "ecc_errors", _ECC, *numbers, kind=kind_name, scope=scope_name, location=name
        )
        yield replace(row, unless=unless.format(kind, scope) or None)


_ECC = "nvmlDeviceGetMemoryErrorCounter"
_ECC_SRAM = f"{_ECC}({{}}, {{}}, 7)"
_EVENT_REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
_THROTTLE_REASONS = "nvmlDeviceGetCurrentClocksThrottleReasons"

MEMORY_ROW = Row("nvmlDeviceGetMemoryInfo_v2", _memory)

_MINUTE_WATTS = partial(number_row, "power_limit", scale=MILLI, every=MINUTE)
_ENGINE = partial(number_row, "engine_utilization", scale=PERCENT)

ROWS: tuple[Row, ...] = (
    number_row("persistence_mode", "nvmlDeviceGetPersistenceMode"),
    Row("nvmlDeviceGetPerformanceState", _performance_state),
    # Use
    Row("nvmlDeviceGetUtilizationRates", _utilization),
    _ENGINE("nvmlDeviceGetEncoderUtilization", engine="encoder"),
    _ENGINE("nvmlDeviceGetDecoderUtilization", engine="decoder"),
    _ENGINE("nvmlDeviceGetJpgUtilization", engine="jpeg"),
    _ENGINE("nvmlDeviceGetOfaUtilization", engine="ofa"),
    # Memory
    MEMORY_ROW,
    Row("nvmlDeviceGetBAR1MemoryInfo", _bar1, SLOW),
    # Power and heat
    number_row("power", "nvmlDeviceGetPowerUsage", scale=MILLI),
    number_row("power_limit", "nvmlDeviceGetEnforcedPowerLimit", scale=MILLI, limit="enforced"),
    _MINUTE_WATTS("nvmlDeviceGetPowerManagementLimit", limit="requested"),
    _MINUTE_WATTS("nvmlDeviceGetPowerManagementDefaultLimit", limit="default"),
    Row("nvmlDeviceGetPowerManagementLimitConstraints", _power_limit_range, MINUTE),
    number_row("energy", "nvmlDeviceGetTotalEnergyConsumption", scale=MILLI, every=SLOW),
    number_row("temperature", "nvmlDeviceGetTemperature", 0, sensor="gpu"),
    *(
        number_row(
            "temperature_limit", "nvmlDeviceGetTemperatureThreshold", which, every=HOUR, limit=name
        )
        for which, name in enumerate(nvml.TEMPERATURE_LIMITS)
    ),
    Row("nvmlDeviceGetFanSpeed_v2", _fans),
    # Clocks
    *(
        number_row("clock", "nvmlDeviceGetClockInfo", which, scale=MEGA, clock=name)
        for which, name in enumerate(nvml.CLOCKS)
    ),
    *(
        number_row(
            "clock_max", "nvmlDeviceGetMaxClockInfo", which, scale=MEGA, every=HOUR, clock=name
        )
        for which, name in enumerate(nvml.CLOCKS)
    ),
    Row(_EVENT_REASONS, partial(_clock_events, _EVENT_REASONS)),
    Row(_THROTTLE_REASONS, partial(_clock_events, _THROTTLE_REASONS), unless=_EVENT_REASONS),
    # Health
    *_ecc_rows(ECC_LOCATIONS),
    *_ecc_rows(ECC_OLD_LOCATIONS, unless=_ECC_SRAM),
    # Links
    number_row("pcie_link_generation", "nvmlDeviceGetCurrPcieLinkGeneration", of="current"),
    number_row("pcie_link_generation", "nvmlDeviceGetMaxPcieLinkGeneration", every=HOUR, of="max"),
    number_row("pcie_link_width", "nvmlDeviceGetCurrPcieLinkWidth", of="current"),
    number_row("pcie_link_width", "nvmlDeviceGetMaxPcieLinkWidth", every=HOUR, of="max"),
    Row("nvmlDeviceGetGpuFabricInfoV", _fabric, MINUTE),
    Row("nvmlDeviceGetGridLicensableFeatures_v4", _vgpu_licence, MINUTE),
)
"""Values with separate queries."""

_MINUTE_FIELD = partial(FieldRow, every=MINUTE)

FIELDS: tuple[FieldRow, ...] = (
    FieldRow("temperature", 82, labels=(("sensor", "memory"),)),
    *(
        FieldRow("clock_event_time", field, NANO, (("reason", reason),), every=every)
        for field, reason, every in zip(
            (*range(74, 82), 269, 270, 271),
            nvml.CLOCK_EVENT_SECONDS_REASONS,
            (EACH, SLOW, *[EACH] * 7, SLOW, SLOW),
            strict=True,
        )
    ),
    # Health
    _MINUTE_FIELD("retired_pages", 29, labels=(("cause", "multiple_single_bit_errors"),)),
    _MINUTE_FIELD("retired_pages", 30, labels=(("cause", "double_bit_error"),)),
    _MINUTE_FIELD("retired_pages_pending", 31),
    _MINUTE_FIELD("remapped_rows", 142, labels=(("cause", "correctable_error"),)),
    _MINUTE_FIELD("remapped_rows", 143, labels=(("cause", "uncorrectable_error"),)),
    _MINUTE_FIELD("row_remap_pending", 144),
    _MINUTE_FIELD("row_remap_failure", 145),
    FieldRow("recovery_action", 230, states=nvml.RECOVERY_ACTIONS, every=SLOW),
    # Links
    _MINUTE_FIELD("pcie_replays", 94),
    *(
        _MINUTE_FIELD("pcie_errors", field, labels=(("kind", kind),))
        for field, kind in zip((169, *range(173, 184)), nvml.PCIE_ERROR_KINDS, strict=True)
    ),
    FieldRow("nvlink_transmit_bytes", 138, KIBI, scope=ALL_LINKS, every=SLOW),
    FieldRow("nvlink_receive_bytes", 139, KIBI, scope=ALL_LINKS, every=SLOW),
    _MINUTE_FIELD("nvlink_errors", 38, labels=(("kind", "crc_flit"),)),
    _MINUTE_FIELD("nvlink_errors", 45, labels=(("kind", "crc_data"),)),
    _MINUTE_FIELD("nvlink_errors", 52, labels=(("kind", "replay"),)),
    _MINUTE_FIELD("nvlink_errors", 59, labels=(("kind", "recovery"),)),
    _MINUTE_FIELD("nvlink_errors", 160, labels=(("kind", "ecc_data"),)),
)
"""Values of the batched query nvmlDeviceGetFieldValues, by field number NVML_FI_DEV_..."""
