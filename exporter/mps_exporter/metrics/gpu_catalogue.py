"""Every metric about a GPU, once, with the quantity whose readings it shows.

Every series carries ``gpu`` (NVML's index, which may change at a reboot) and ``uuid`` (which does
not). A value that this GPU or driver does not have is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from mps_exporter.metrics.spec import Kind, MetricSpec
from mps_exporter.nvml_terms import (
    ARCHITECTURES,
    CLOCK_EVENT_REASONS,
    CLOCK_EVENT_SECONDS_REASONS,
    CLOCKS,
    COMPUTE_MODES,
    ECC_KINDS,
    ECC_LOCATIONS,
    ECC_SCOPES,
    FABRIC_STATES,
    NVLINK_ERROR_KINDS,
    NVLINK_STATES,
    PCIE_ERROR_KINDS,
    RECOVERY_ACTIONS,
    TEMPERATURE_LIMITS,
)

SECTION = "GPUs"
IDENTITY = ("gpu", "uuid")

_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mps_gpu_info": {"architecture": ARCHITECTURES},
    "mps_gpu_engine_utilization_ratio": {"engine": ("encoder", "decoder", "jpeg", "ofa")},
    "mps_gpu_unobserved_seconds_total": {"counter": ("busy", "active")},
    "mps_gpu_power_limit_watts": {"limit": ("enforced", "requested", "default", "min", "max")},
    "mps_gpu_temperature_celsius": {"sensor": ("gpu", "memory")},
    "mps_gpu_temperature_limit_celsius": {"limit": TEMPERATURE_LIMITS},
    "mps_gpu_clock_hertz": {"clock": CLOCKS},
    "mps_gpu_clock_max_hertz": {"clock": CLOCKS},
    "mps_gpu_clock_event_active": {"reason": CLOCK_EVENT_REASONS},
    "mps_gpu_clock_event_seconds_total": {"reason": CLOCK_EVENT_SECONDS_REASONS},
    "mps_gpu_ecc_errors_total": {
        "kind": ECC_KINDS,
        "scope": ECC_SCOPES,
        "location": ECC_LOCATIONS,
    },
    "mps_gpu_remapped_rows": {"cause": ("correctable_error", "uncorrectable_error")},
    "mps_gpu_retired_pages": {"cause": ("multiple_single_bit_errors", "double_bit_error")},
    "mps_gpu_pcie_errors_total": {"kind": PCIE_ERROR_KINDS},
    "mps_gpu_pcie_link_generation": {"of": ("current", "max")},
    "mps_gpu_pcie_link_width": {"of": ("current", "max")},
    "mps_gpu_nvlink_links": {"state": NVLINK_STATES},
    "mps_gpu_nvlink_errors_total": {"kind": NVLINK_ERROR_KINDS},
}
"""Metric -> label -> all its values."""

_NOTES = {
    "mps_gpu_busy_seconds_total": "While scrapes are less than 5 s apart it is brought up to "
    "date once a second, else at each scrape.",
    "mps_gpu_unobserved_seconds_total": "Also grows when NVML had to be initialized again. PCIe "
    "traffic in the unobserved time of active is in no counter.",
    "mps_gpu_xid_errors_total": "Absent while Xid events cannot be received: where the driver "
    "reports none, and from about a minute after the GPU was lost.",
    "mps_gpu_last_xid_timestamp_seconds": "Remains while the GPU is lost.",
    "mps_gpu_nvlink_links": "Absent while a link that answered before does not answer.",
    "mps_gpu_nvlink_errors_total": "A kind is absent while a link that answered before does not "
    "answer.",
}

_STATES = {
    "mps_gpu_compute_mode": COMPUTE_MODES,
    "mps_gpu_recovery_action": RECOVERY_ACTIONS,
    "mps_gpu_fabric_state": FABRIC_STATES,
}

_GPM = "nvmlGpmMetricsGet"
_FIELDS = "nvmlDeviceGetFieldValues"
_HOPPER = "Hopper and later."
_SLOW = "Read every 5 s."
_MINUTE = "Read once a minute."


def _spec(name: str, kind: Kind, quantity: str, labels: str, source: str, words: str) -> MetricSpec:
    return MetricSpec(
        name=name,
        kind=kind,
        quantity=quantity,
        help=words,
        labels=(*IDENTITY, *labels.split()),
        source=source,
        states=_STATES.get(name, ()),
        values=_VALUES.get(name, {}),
        note=_NOTES.get(name, ""),
        section=SECTION,
    )


def _gauge(name: str, quantity: str, labels: str, source: str, words: str) -> MetricSpec:
    return _spec(name, "gauge", quantity, labels, source, words)


def _counter(name: str, quantity: str, labels: str, source: str, words: str) -> MetricSpec:
    return _spec(name, "counter", quantity, labels, source, words)


def _ratio(name: str, quantity: str, metric: int, words: str) -> MetricSpec:
    help_words = f"{words}, 0 to 1, as a mean between two samples, one a second. {_HOPPER}"
    return _gauge(name, quantity, "", f"{_GPM} {metric}", help_words)


def _active_seconds(name: str, quantity: str, metric: int, words: str) -> MetricSpec:
    help_words = f"{words}, integrated without gaps, once a second; its rate is the mean. {_HOPPER}"
    return _counter(name, quantity, "", f"{_GPM} {metric}, integrated", help_words)


IDENTITY_METRICS = (
    _spec(
        "mps_gpu_info",
        "info",
        "",
        "parent_uuid mig_instance name pci_bus_id architecture compute_capability "
        "driver_version cuda_version vbios_version serial",
        "nvmlDeviceGetName, ...",
        "Model and identifiers of the GPU. Of a MIG instance, parent_uuid is its GPU.",
    ),
    _gauge(
        "mps_gpu_up",
        "up",
        "",
        "every call",
        "1 while the GPU answers; 0 when it has fallen off the bus or must be reset, and then "
        "its other metrics are absent.",
    ),
    _gauge(
        "mps_gpu_sms",
        "",
        "",
        "nvmlDeviceGetNumGpuCores, nvmlDeviceGetAttributes_v2",
        "Streaming multiprocessors.",
    ),
    _spec(
        "mps_gpu_compute_mode",
        "stateset",
        "",
        "",
        "nvmlDeviceGetComputeMode",
        "Which processes may use the GPU; exclusive_process prevents processes from bypassing MPS.",
    ),
    _gauge(
        "mps_gpu_persistence_mode",
        "persistence_mode",
        "",
        "nvmlDeviceGetPersistenceMode",
        "1 when the driver stays loaded while no process uses the GPU.",
    ),
    _gauge(
        "mps_gpu_mig_mode",
        "mig_mode",
        "",
        "nvmlDeviceGetMigMode",
        f"1 when the GPU is divided into MIG instances. {_SLOW}",
    ),
    _gauge(
        "mps_gpu_performance_state",
        "performance_state",
        "",
        "nvmlDeviceGetPerformanceState",
        "Performance state, 0 (fastest) to 15 (slowest).",
    ),
    _gauge(
        "mps_gpu_vgpu_licensed",
        "vgpu_licensed",
        "",
        "nvmlDeviceGetGridLicensableFeatures_v4",
        "1 when the vGPU that this virtual machine was given has a licence; absent elsewhere.",
    ),
)

USE_METRICS = (
    _gauge(
        "mps_gpu_utilization_ratio",
        "gpu_utilization",
        "",
        "nvmlDeviceGetUtilizationRates",
        "Share of the driver's last sampling period (at most 1 s) in which any kernel ran, "
        "0 to 1. One tiny kernel gives 1: see mps_gpu_sm_active_ratio.",
    ),
    _gauge(
        "mps_gpu_memory_copy_utilization_ratio",
        "memory_utilization",
        "",
        "nvmlDeviceGetUtilizationRates",
        "Share of the driver's last sampling period in which device memory was read or "
        "written, 0 to 1.",
    ),
    _gauge(
        "mps_gpu_engine_utilization_ratio",
        "engine_utilization",
        "engine",
        "nvmlDeviceGet{Encoder,Decoder,Jpg,Ofa}Utilization",
        "Share of the driver's last sampling period in which the engine (encoder, decoder, "
        "jpeg, ofa) was busy, 0 to 1.",
    ),
    _counter(
        "mps_gpu_busy_seconds_total",
        "busy_time",
        "",
        "nvmlDeviceGetSamples, integrated",
        "Time in which any kernel ran, from all of the driver's samples; its rate is the mean "
        "utilization.",
    ),
    _counter(
        "mps_gpu_unobserved_seconds_total",
        "unobserved_time",
        "counter",
        "nvmlDeviceGetSamples, nvmlGpmSampleGet",
        "Time that the counters of seconds miss, because no sample was taken in time or the "
        "GPU did not answer: counter is busy or active.",
    ),
    _ratio(
        "mps_gpu_graphics_active_ratio",
        "graphics_activity",
        1,
        "Share of the time in which any graphics or compute work was on the GPU",
    ),
    _ratio(
        "mps_gpu_sm_active_ratio",
        "sm_activity",
        2,
        "Mean share of the SMs that had work: the GPU's true utilization",
    ),
    _ratio(
        "mps_gpu_sm_occupancy_ratio",
        "sm_occupancy",
        3,
        "Warps resident on the SMs over the most that fit",
    ),
    _ratio(
        "mps_gpu_integer_active_ratio",
        "integer_activity",
        4,
        "Share of the cycles with integer instructions",
    ),
    _ratio(
        "mps_gpu_tensor_active_ratio",
        "tensor_activity",
        5,
        "Share of the cycles with tensor instructions",
    ),
    _ratio(
        "mps_gpu_dram_active_ratio",
        "dram_activity",
        10,
        "Device memory bandwidth in use over the maximum",
    ),
    _ratio(
        "mps_gpu_fp64_active_ratio",
        "fp64_activity",
        11,
        "Share of the cycles with 64-bit floating point instructions, tensor cores aside",
    ),
    _ratio(
        "mps_gpu_fp32_active_ratio",
        "fp32_activity",
        12,
        "Share of the cycles with 32-bit floating point instructions, tensor cores aside",
    ),
    _ratio(
        "mps_gpu_fp16_active_ratio",
        "fp16_activity",
        13,
        "Share of the cycles with 16-bit floating point instructions, tensor cores aside",
    ),
    _active_seconds(
        "mps_gpu_graphics_active_seconds_total",
        "graphics_active_time",
        1,
        "Time in which any graphics or compute work was on the GPU",
    ),
    _active_seconds(
        "mps_gpu_sm_active_seconds_total",
        "sm_active_time",
        2,
        "Time in which the SMs had work, as a mean over all SMs",
    ),
    _active_seconds(
        "mps_gpu_tensor_active_seconds_total",
        "tensor_active_time",
        5,
        "Time in which the tensor cores had work, as a mean over all SMs",
    ),
    _active_seconds(
        "mps_gpu_dram_active_seconds_total",
        "dram_active_time",
        10,
        "Time that the memory traffic would have taken at full bandwidth",
    ),
)

MEMORY_METRICS = (
    _gauge(
        "mps_gpu_memory_total_bytes",
        "memory_total",
        "",
        "nvmlDeviceGetMemoryInfo_v2",
        "Device memory. Absent where the GPU shares the host's memory.",
    ),
    _gauge(
        "mps_gpu_memory_used_bytes",
        "memory_used",
        "",
        "nvmlDeviceGetMemoryInfo_v2",
        "Device memory allocated, without what the driver reserves.",
    ),
    _gauge(
        "mps_gpu_memory_free_bytes",
        "memory_free",
        "",
        "nvmlDeviceGetMemoryInfo_v2",
        "Device memory that can be allocated.",
    ),
    _gauge(
        "mps_gpu_memory_reserved_bytes",
        "memory_reserved",
        "",
        "nvmlDeviceGetMemoryInfo_v2",
        "Device memory reserved by driver and firmware. Absent with a driver that "
        "counts it as used.",
    ),
    _gauge(
        "mps_gpu_bar1_total_bytes",
        "bar1_total",
        "",
        "nvmlDeviceGetBAR1MemoryInfo",
        f"Size of the window (BAR1) through which other devices access device memory. {_SLOW}",
    ),
    _gauge(
        "mps_gpu_bar1_used_bytes",
        "bar1_used",
        "",
        "nvmlDeviceGetBAR1MemoryInfo",
        f"BAR1 space in use. {_SLOW}",
    ),
)

POWER_METRICS = (
    _gauge(
        "mps_gpu_power_watts",
        "power",
        "",
        "nvmlDeviceGetPowerUsage",
        "Power draw of the board, since Ampere as a mean over the last second.",
    ),
    _gauge(
        "mps_gpu_power_limit_watts",
        "power_limit",
        "limit",
        "nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementLimit, ...",
        "Power limits: enforced (in force), requested (by the administrator), default, min and "
        f"max (what may be requested). All but enforced: {_MINUTE.lower()}",
    ),
    _counter(
        "mps_gpu_energy_joules_total",
        "energy",
        "",
        "nvmlDeviceGetTotalEnergyConsumption",
        f"Energy used since the driver was loaded; its rate is the mean power. {_SLOW}",
    ),
    _gauge(
        "mps_gpu_temperature_celsius",
        "temperature",
        "sensor",
        f"nvmlDeviceGetTemperature, {_FIELDS} 82",
        "Temperature of the chip (gpu) and of its memory.",
    ),
    _gauge(
        "mps_gpu_temperature_limit_celsius",
        "temperature_limit",
        "limit",
        "nvmlDeviceGetTemperatureThreshold",
        "Temperatures at which the GPU shuts down, slows down, or reaches what it (gpu_max) or "
        "its memory (memory_max) is made for.",
    ),
    _gauge(
        "mps_gpu_fan_speed_ratio",
        "fan_speed",
        "fan",
        "nvmlDeviceGetFanSpeed_v2",
        "Intended fan speed over its maximum. Absent without fans.",
    ),
)

CLOCK_METRICS = (
    _gauge(
        "mps_gpu_clock_hertz",
        "clock",
        "clock",
        "nvmlDeviceGetClockInfo",
        "Clock now: graphics, sm, memory, video.",
    ),
    _gauge(
        "mps_gpu_clock_max_hertz",
        "clock_max",
        "clock",
        "nvmlDeviceGetMaxClockInfo",
        "Highest clock: graphics, sm, memory, video.",
    ),
    _gauge(
        "mps_gpu_clock_event_active",
        "clock_event",
        "reason",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "1 for each reason that now keeps the clocks below their maximum.",
    ),
    _counter(
        "mps_gpu_clock_event_seconds_total",
        "clock_event_time",
        "reason",
        f"{_FIELDS} 74-81, 269-271",
        "Time for which the clocks were held down for this reason, since the driver was "
        "loaded. Reasons overlap. thermal, hw_thermal_slowdown and hw_power_brake_slowdown: "
        f"{_SLOW.lower()}",
    ),
)

HEALTH_METRICS = (
    _counter(
        "mps_gpu_xid_errors_total",
        "xid_errors",
        "xid",
        "nvmlEventSetWait_v2",
        "Errors that the driver reported by Xid code, since the exporter started; the usual "
        "codes are present from the start.",
    ),
    _gauge(
        "mps_gpu_last_xid_timestamp_seconds",
        "last_xid_at",
        "xid",
        "nvmlEventSetWait_v2",
        "When this Xid was last reported, as a Unix timestamp.",
    ),
    _counter(
        "mps_gpu_ecc_errors_total",
        "ecc_errors",
        "kind scope location",
        "nvmlDeviceGetMemoryErrorCounter",
        "Memory errors, corrected or uncorrected, since the driver was loaded (scope "
        "volatile) or in the board's life (aggregate). Absent without ECC.",
    ),
    _gauge(
        "mps_gpu_remapped_rows",
        "remapped_rows",
        "cause",
        f"{_FIELDS} 142-143",
        f"Memory rows replaced by spare ones in the board's life. {_MINUTE}",
    ),
    _gauge(
        "mps_gpu_row_remap_pending",
        "row_remap_pending",
        "",
        f"{_FIELDS} 144",
        f"1 when a row will be replaced at the next reset of the GPU. {_MINUTE}",
    ),
    _gauge(
        "mps_gpu_row_remap_failure",
        "row_remap_failure",
        "",
        f"{_FIELDS} 145",
        f"1 when a row could not be replaced: the board needs replacement. {_MINUTE}",
    ),
    _gauge(
        "mps_gpu_retired_pages",
        "retired_pages",
        "cause",
        f"{_FIELDS} 29-30",
        f"Memory pages taken out of use in the board's life. Before Ampere. {_MINUTE}",
    ),
    _gauge(
        "mps_gpu_retired_pages_pending",
        "retired_pages_pending",
        "",
        f"{_FIELDS} 31",
        f"1 when a page will be taken out of use at the next reboot. Before Ampere. {_MINUTE}",
    ),
    _spec(
        "mps_gpu_recovery_action",
        "stateset",
        "recovery_action",
        "",
        f"{_FIELDS} 230",
        f"What the driver requires before the GPU is reliable again. {_SLOW}",
    ),
)

LINK_METRICS = (
    _counter(
        "mps_gpu_pcie_receive_bytes_total",
        "pcie_receive_bytes",
        "",
        f"{_FIELDS} 198, {_GPM} 21",
        f"Bytes to the GPU over PCIe, protocol included, since the exporter started. {_HOPPER}",
    ),
    _counter(
        "mps_gpu_pcie_transmit_bytes_total",
        "pcie_transmit_bytes",
        "",
        f"{_FIELDS} 197, {_GPM} 20",
        f"Bytes from the GPU over PCIe, protocol included, since the exporter started. {_HOPPER}",
    ),
    _counter(
        "mps_gpu_pcie_replays_total",
        "pcie_replays",
        "",
        f"{_FIELDS} 94",
        f"PCIe packets sent again, since the driver was loaded. {_MINUTE}",
    ),
    _counter(
        "mps_gpu_pcie_errors_total",
        "pcie_errors",
        "kind",
        f"{_FIELDS} 169, 173-183",
        f"PCIe errors by kind, since the driver was loaded. Kinds overlap. {_MINUTE}",
    ),
    _gauge(
        "mps_gpu_pcie_link_generation",
        "pcie_link_generation",
        "of",
        "nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration",
        "PCIe generation of the link, current and max. An idle link may slow down.",
    ),
    _gauge(
        "mps_gpu_pcie_link_width",
        "pcie_link_width",
        "of",
        "nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth",
        "PCIe lanes of the link, current and max.",
    ),
    _counter(
        "mps_gpu_nvlink_receive_bytes_total",
        "nvlink_receive_bytes",
        "",
        f"{_FIELDS} 139",
        f"Payload bytes received over all NVLink links, since the driver was loaded. {_SLOW}",
    ),
    _counter(
        "mps_gpu_nvlink_transmit_bytes_total",
        "nvlink_transmit_bytes",
        "",
        f"{_FIELDS} 138",
        f"Payload bytes sent over all NVLink links, since the driver was loaded. {_SLOW}",
    ),
    _gauge(
        "mps_gpu_nvlink_links",
        "nvlink_links",
        "state",
        f"{_FIELDS} 165",
        f"NVLink links that are active or inactive. {_MINUTE}",
    ),
    _counter(
        "mps_gpu_nvlink_errors_total",
        "nvlink_errors",
        "kind",
        f"{_FIELDS} 38, 45, 52, 59, 160-163",
        f"NVLink errors by kind over all links, since the driver was loaded. {_MINUTE}",
    ),
    _spec(
        "mps_gpu_fabric_state",
        "stateset",
        "fabric_state",
        "",
        "nvmlDeviceGetGpuFabricInfoV",
        f"How far the GPU is registered with the NVLink fabric. Absent without a fabric. {_MINUTE}",
    ),
)

GPU_METRICS: tuple[MetricSpec, ...] = (
    *IDENTITY_METRICS,
    *USE_METRICS,
    *MEMORY_METRICS,
    *POWER_METRICS,
    *CLOCK_METRICS,
    *HEALTH_METRICS,
    *LINK_METRICS,
)
