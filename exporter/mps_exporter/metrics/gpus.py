"""Metrics of GPUs: how MPS shares them, and what NVML reads.

Every series carries `gpu` (NVML's index, which may change at a reboot) and `uuid` (which does
not). A value that this GPU or driver does not have is absent, never 0.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache, partial

from mps_exporter import nvml_terms as nvml
from mps_exporter.metrics.metric_types import (
    MAX_CACHED_LABELS,
    PROC,
    TOOL,
    MetricSpec,
    Page,
    RawLabels,
    Rows,
    Samples,
    Scope,
    Section,
    Texts,
    texts,
)
from mps_exporter.mps.metrics_from_logs import BOTH_LOGS
from mps_exporter.snapshot import PROCESS_KINDS, Gpu

SHARING, GPUS = Section("GPU sharing"), Section("GPUs")

STATE = "state"  # Label of a reading that names a state.
BY_QUANTITY: dict[str, MetricSpec] = {}  # Quantity of readings -> the metric that shows them.

Readings = Mapping[str, Mapping[Texts, float]]  # Quantity -> label values of the reading -> value.


@lru_cache(maxsize=MAX_CACHED_LABELS)
def label_values(quantity: str, labels: tuple[tuple[str, str], ...]) -> Texts | None:
    """Return the label values that a reading has in its metric, after those that name the GPU.

    For a stateset, this is the state. None if no metric shows this quantity with these labels: a
    recording of another version of this program may contain such readings.
    """
    metric = BY_QUANTITY.get(quantity)
    if metric is None:
        return None
    expected = (STATE,) if metric.states else metric.labels[len(READINGS.labels) :]
    values = dict(labels)
    if len(labels) != len(expected) or values.keys() != set(expected):
        return None
    return texts(tuple(values[name] for name in expected))


def _gpu_rows(page: Page) -> Rows[Gpu]:
    for gpu in page.snapshot.gpus:
        yield (gpu.index, gpu.uuid), gpu


def _reading_rows(page: Page) -> Rows[Readings]:
    for gpu in page.snapshot.gpus:
        shown: defaultdict[str, dict[Texts, float]] = defaultdict(dict)
        for reading in gpu.observation.readings:
            labels = label_values(reading.quantity, reading.labels)
            if labels is not None:
                shown[reading.quantity].setdefault(labels, reading.value)
        yield (gpu.index, gpu.uuid), shown


def _identity_rows(page: Page) -> Rows[RawLabels]:
    versions = page.snapshot.driver_version, page.snapshot.cuda_version
    for gpu in page.snapshot.gpus:
        seen, capability = gpu.observation, gpu.observation.compute_capability
        model = seen.parent_uuid, seen.mig_instance, seen.name, seen.pci_bus_id, seen.architecture
        shown = None if capability is None else f"{capability[0]}.{capability[1]}"
        yield (gpu.index, gpu.uuid), (*model, shown, *versions, seen.vbios_version, seen.serial)


SHARED = Scope(SHARING, "gpu uuid", _gpu_rows)
SHARED.each(
    "mps_gpu_processes",
    "NVML",
    lambda g: {(kind,): n for kind, n in (g.processes_by_kind or {}).items()},
    kind=PROCESS_KINDS,
).means(
    "Processes on the GPU; direct: without MPS.",
    note="A kind is absent while its process list cannot be read: old drivers lack that of MPS, "
    "which mps_client and direct need.",
)
SHARED.each(
    "mps_gpu_served",
    f"{TOOL}, {BOTH_LOGS}, NVML",
    lambda g: {(daemon,): 1.0 for daemon in g.served_by},
    daemon=(),
).means("1 for each daemon that serves the GPU; the series ends with the daemon.")
SHARED.number("mps_gpu_stranded_clients", f"NVML, {PROC}", lambda g: g.stranded_clients).means(
    "MPS clients on the GPU whose server is gone: they still hold GPU memory."
)
SHARED.number("mps_gpu_sm_committed_ratio", "calculated", lambda g: g.sm_committed_ratio).means(
    "Sum of all clients' SM limits over the GPU's SMs; above 1 the limits overlap."
)
SHARED.number(
    "mps_gpu_client_memory_committed_bytes", "calculated", lambda g: g.client_memory_committed_bytes
).means("Sum of the memory limits on the GPU of all clients that have one.")


GPU = Scope(GPUS, "gpu uuid", _gpu_rows)
READINGS = Scope(GPUS, "gpu uuid", _reading_rows)

_GPM = "nvmlGpmMetricsGet"
_FIELDS = "nvmlDeviceGetFieldValues"
_HOPPER = "Since Hopper."


def _reading(
    name: str,
    quantity: str,
    source: str,
    *,
    states: tuple[str, ...] = (),
    sparse: bool = False,
    always: frozenset[str] = frozenset(),
    **values: tuple[str, ...],
) -> MetricSpec:
    """Declare the metric of a quantity that sources/nvml reads, with its labels or its states."""
    inactive: dict[Texts, float] = {(state,): 0.0 for state in states}

    def samples(page: Page) -> Samples:
        return {
            gpu + labels: value
            for gpu, readings in page.rows(READINGS)
            if (found := readings.get(quantity))
            for labels, value in {**inactive, **found}.items()
        }

    spec = BY_QUANTITY[quantity] = READINGS.add(name, source, samples, values)
    spec.sparse, spec.always = sparse, always
    return spec.has_states(states) if states else spec


_rare = partial(_reading, sparse=True)


Scope(GPUS, "gpu uuid", _identity_rows).info(
    "mps_gpu_info",
    "nvmlDeviceGetName, ...",
    "parent_uuid mig_instance name pci_bus_id architecture compute_capability driver_version "
    "cuda_version vbios_version serial",
    lambda labels: labels,
    architecture=nvml.ARCHITECTURES,
).means("Model and identifiers of the GPU. Of a MIG instance, parent_uuid is its GPU.")

# Identity

_reading("mps_gpu_up", "up", "each nvmlDeviceGet call").means(
    "1 while the GPU answers; 0 when it has fallen off the bus or must be reset."
)
GPU.number(
    "mps_gpu_sms",
    "nvmlDeviceGetNumGpuCores, nvmlDeviceGetAttributes_v2",
    lambda g: g.observation.sm_count,
).means("Streaming multiprocessors.")
GPU.state(
    "mps_gpu_compute_mode",
    "nvmlDeviceGetComputeMode",
    nvml.COMPUTE_MODES,
    lambda g: g.observation.compute_mode,
).means("Which processes may use the GPU; exclusive_process: only MPS, while a server runs.")
_reading("mps_gpu_persistence_mode", "persistence_mode", "nvmlDeviceGetPersistenceMode").means(
    "1 when the driver stays loaded while no process uses the GPU."
)
_reading("mps_gpu_mig_mode", "mig_mode", "nvmlDeviceGetMigMode").means(
    "1 when MIG is enabled on the GPU."
)
_reading("mps_gpu_performance_state", "performance_state", "nvmlDeviceGetPerformanceState").means(
    "Performance state, 0 (fastest) to 15 (slowest)."
)
_reading("mps_gpu_vgpu_licensed", "vgpu_licensed", "nvmlDeviceGetGridLicensableFeatures_v4").means(
    "1 when the vGPU of this virtual machine has a licence; absent elsewhere."
)

# Use

_reading("mps_gpu_utilization_ratio", "gpu_utilization", "nvmlDeviceGetUtilizationRates").means(
    "Share of the driver's last sample (at most 1 s) in which any kernel ran, however small."
)
_reading(
    "mps_gpu_memory_copy_utilization_ratio", "memory_utilization", "nvmlDeviceGetUtilizationRates"
).means("Share of the driver's last sample in which device memory was read or written.")
_rare(
    "mps_gpu_engine_utilization_ratio",
    "engine_utilization",
    "nvmlDeviceGet{Encoder,Decoder,Jpg,Ofa}Utilization",
    engine=("encoder", "decoder", "jpeg", "ofa"),
).means("Share of the driver's last sample in which the engine was busy.")
_reading("mps_gpu_busy_seconds_total", "busy_time", "nvmlDeviceGetSamples, integrated").means(
    "Time in which any kernel ran, from all of the driver's samples."
)
_rare(
    "mps_gpu_unobserved_seconds_total",
    "unobserved_time",
    "nvmlDeviceGetSamples, nvmlGpmSampleGet",
    counter=("busy", "active"),
).means(
    "Time that the counters of seconds miss: no sample was taken in time, the GPU did not answer, "
    "or NVML was initialized again.",
    note="PCIe traffic in the unobserved time of active is in no counter.",
)
_reading("mps_gpu_graphics_active_ratio", "graphics_activity", f"{_GPM} 1").means(
    f"Share of the time with any graphics or compute work. {_HOPPER}",
    note="Like the ratios below, a mean of 1 s (of a MIG instance, 5 s).",
)
_reading("mps_gpu_sm_active_ratio", "sm_activity", f"{_GPM} 2").means(
    f"Mean share of the SMs that had work. {_HOPPER}"
)
_reading("mps_gpu_sm_occupancy_ratio", "sm_occupancy", f"{_GPM} 3").means(
    f"Warps resident on the SMs over the most that fit. {_HOPPER}"
)
_reading("mps_gpu_integer_active_ratio", "integer_activity", f"{_GPM} 4").means(
    f"Share of the cycles with integer instructions. {_HOPPER}"
)
_reading("mps_gpu_tensor_active_ratio", "tensor_activity", f"{_GPM} 5").means(
    f"Share of the cycles with tensor instructions. {_HOPPER}"
)
_reading("mps_gpu_dram_active_ratio", "dram_activity", f"{_GPM} 10").means(
    f"Device memory bandwidth in use over the maximum. {_HOPPER}"
)
_reading("mps_gpu_fp64_active_ratio", "fp64_activity", f"{_GPM} 11").means(
    f"Share of the cycles with 64-bit float instructions outside tensor cores. {_HOPPER}"
)
_reading("mps_gpu_fp32_active_ratio", "fp32_activity", f"{_GPM} 12").means(
    f"Share of the cycles with 32-bit float instructions outside tensor cores. {_HOPPER}"
)
_reading("mps_gpu_fp16_active_ratio", "fp16_activity", f"{_GPM} 13").means(
    f"Share of the cycles with 16-bit float instructions outside tensor cores. {_HOPPER}"
)
_reading(
    "mps_gpu_graphics_active_seconds_total", "graphics_active_time", f"{_GPM} 1, integrated"
).means(f"Time with any graphics or compute work. {_HOPPER}")
_reading("mps_gpu_sm_active_seconds_total", "sm_active_time", f"{_GPM} 2, integrated").means(
    f"Time in which the SMs had work, as a mean over all SMs. {_HOPPER}"
)
_reading(
    "mps_gpu_tensor_active_seconds_total", "tensor_active_time", f"{_GPM} 5, integrated"
).means(f"Time in which the tensor cores had work, as a mean over all SMs. {_HOPPER}")
_reading("mps_gpu_dram_active_seconds_total", "dram_active_time", f"{_GPM} 10, integrated").means(
    f"Time that the memory traffic would have taken at full bandwidth. {_HOPPER}"
)

# Memory

_reading("mps_gpu_memory_total_bytes", "memory_total", "nvmlDeviceGetMemoryInfo_v2").means(
    "Device memory. Absent where the GPU shares the host's memory."
)
_reading("mps_gpu_memory_used_bytes", "memory_used", "nvmlDeviceGetMemoryInfo_v2").means(
    "Device memory allocated, without what the driver reserves."
)
_reading("mps_gpu_memory_free_bytes", "memory_free", "nvmlDeviceGetMemoryInfo_v2").means(
    "Device memory that can be allocated."
)
_reading("mps_gpu_memory_reserved_bytes", "memory_reserved", "nvmlDeviceGetMemoryInfo_v2").means(
    "Device memory reserved by driver and firmware. Absent with a driver that counts it as used."
)
_reading("mps_gpu_bar1_total_bytes", "bar1_total", "nvmlDeviceGetBAR1MemoryInfo").means(
    "BAR1: the window through which other devices access device memory."
)
_reading("mps_gpu_bar1_used_bytes", "bar1_used", "nvmlDeviceGetBAR1MemoryInfo").means(
    "BAR1 space in use."
)

# Power

_reading("mps_gpu_power_watts", "power", "nvmlDeviceGetPowerUsage").means(
    "Power draw of the board, since Ampere but for A100 as a mean over the last second."
)
_reading(
    "mps_gpu_power_limit_watts",
    "power_limit",
    "nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementLimit, ...",
    limit=("enforced", "requested", "default", "min", "max"),
).means("enforced: in force; requested: by the administrator; min and max: what may be requested.")
_reading("mps_gpu_energy_joules_total", "energy", "nvmlDeviceGetTotalEnergyConsumption").means(
    "Energy used, as the driver counts; its rate is the mean power."
)
_reading(
    "mps_gpu_temperature_celsius",
    "temperature",
    f"nvmlDeviceGetTemperature, {_FIELDS} 82",
    sensor=("gpu", "memory"),
).means("Temperature of the chip (gpu) or its memory.")
_reading(
    "mps_gpu_temperature_limit_celsius",
    "temperature_limit",
    "nvmlDeviceGetTemperatureThreshold",
    limit=nvml.TEMPERATURE_LIMITS,
).means(
    "Temperatures at which the GPU shuts down, slows down, or reaches its or its memory's maximum."
)
_reading("mps_gpu_fan_speed_ratio", "fan_speed", "nvmlDeviceGetFanSpeed_v2", fan=()).means(
    "Intended fan speed over its maximum. Absent without fans."
)

# Clock

_reading("mps_gpu_clock_hertz", "clock", "nvmlDeviceGetClockInfo", clock=nvml.CLOCKS).means(
    "Present clock."
)
_reading(
    "mps_gpu_clock_max_hertz", "clock_max", "nvmlDeviceGetMaxClockInfo", clock=nvml.CLOCKS
).means("Highest clock.")
_rare(
    "mps_gpu_clock_event_active",
    "clock_event",
    "nvmlDeviceGetCurrentClocksEventReasons",
    reason=nvml.CLOCK_EVENT_REASONS,
).means("1 for each reason that keeps the clocks below their maximum.")
_rare(
    "mps_gpu_clock_event_seconds_total",
    "clock_event_time",
    f"{_FIELDS} 74-81, 269-271",
    reason=nvml.CLOCK_EVENT_SECONDS_REASONS,
).means("Time with lowered clocks by reason, as the driver counts; reasons overlap.")

# Health

_rare("mps_gpu_xid_errors_total", "xid_errors", "nvmlEventSetWait_v2", xid=()).means(
    "Errors that the driver reported, by Xid code.",
    note="Absent while Xid events cannot be received, as of a GPU that is lost.",
)
_reading("mps_gpu_last_xid_timestamp_seconds", "last_xid_at", "nvmlEventSetWait_v2", xid=()).means(
    "When this Xid was last reported.", note="Remains while the GPU is lost."
)
_rare(
    "mps_gpu_ecc_errors_total",
    "ecc_errors",
    "nvmlDeviceGetMemoryErrorCounter",
    kind=nvml.ECC_KINDS,
    scope=nvml.ECC_SCOPES,
    location=nvml.ECC_LOCATIONS,
    always=frozenset({"uncorrected", "volatile"}),
).means("Memory errors since the driver was loaded (volatile) or in the board's life (aggregate).")
_rare(
    "mps_gpu_remapped_rows",
    "remapped_rows",
    f"{_FIELDS} 142-143",
    cause=("correctable_error", "uncorrectable_error"),
).means("Memory rows replaced by spare ones in the board's life.")
_reading("mps_gpu_row_remap_pending", "row_remap_pending", f"{_FIELDS} 144").means(
    "1 when a row will be replaced at the next reset of the GPU."
)
_reading("mps_gpu_row_remap_failure", "row_remap_failure", f"{_FIELDS} 145").means(
    "1 when a row could not be replaced."
)
_rare(
    "mps_gpu_retired_pages",
    "retired_pages",
    f"{_FIELDS} 29-30",
    cause=("multiple_single_bit_errors", "double_bit_error"),
).means("Memory pages taken out of use in the board's life. Before Ampere.")
_reading("mps_gpu_retired_pages_pending", "retired_pages_pending", f"{_FIELDS} 31").means(
    "1 when a page will be taken out of use at the next reboot. Before Ampere."
)
_reading(
    "mps_gpu_recovery_action", "recovery_action", f"{_FIELDS} 230", states=nvml.RECOVERY_ACTIONS
).means("What the driver requires before the GPU is reliable again.")

# Link

_reading(
    "mps_gpu_pcie_receive_bytes_total", "pcie_receive_bytes", f"{_FIELDS} 198, {_GPM} 21"
).means(f"Bytes to the GPU over PCIe, protocol included. {_HOPPER}")
_reading(
    "mps_gpu_pcie_transmit_bytes_total", "pcie_transmit_bytes", f"{_FIELDS} 197, {_GPM} 20"
).means(f"Bytes from the GPU over PCIe, protocol included. {_HOPPER}")
_reading("mps_gpu_pcie_replays_total", "pcie_replays", f"{_FIELDS} 94").means(
    "PCIe packets sent again, as the GPU counts."
)
_rare(
    "mps_gpu_pcie_errors_total",
    "pcie_errors",
    f"{_FIELDS} 169, 173-183",
    kind=nvml.PCIE_ERROR_KINDS,
).means("PCIe errors by kind, as the GPU counts. Kinds overlap.")
_reading(
    "mps_gpu_pcie_link_generation",
    "pcie_link_generation",
    "nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration",
    of=("current", "max"),
).means("PCIe generation of the link. An idle link may slow down.")
_reading(
    "mps_gpu_pcie_link_width",
    "pcie_link_width",
    "nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth",
    of=("current", "max"),
).means("PCIe lanes of the link.")
_reading("mps_gpu_nvlink_receive_bytes_total", "nvlink_receive_bytes", f"{_FIELDS} 139").means(
    "Payload bytes received over all NVLink links, as the GPU counts."
)
_reading("mps_gpu_nvlink_transmit_bytes_total", "nvlink_transmit_bytes", f"{_FIELDS} 138").means(
    "Payload bytes sent over all NVLink links, as the GPU counts."
)
_reading("mps_gpu_nvlink_links", "nvlink_links", f"{_FIELDS} 165", state=nvml.NVLINK_STATES).means(
    "NVLink links by state.", note="Absent while a link that answered before does not answer."
)
_rare(
    "mps_gpu_nvlink_errors_total",
    "nvlink_errors",
    f"{_FIELDS} 38, 45, 52, 59, 160-163",
    kind=nvml.NVLINK_ERROR_KINDS,
).means(
    "NVLink errors by kind over all links, as the GPU counts.",
    note="A kind is absent while a link that answered before does not answer.",
)
_reading(
    "mps_gpu_fabric_state", "fabric_state", "nvmlDeviceGetGpuFabricInfoV", states=nvml.FABRIC_STATES
).means("How far the GPU is registered with the NVLink fabric. Absent without a fabric.")
