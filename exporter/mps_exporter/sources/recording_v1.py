"""Recordings of version 1 of the format: their readings carry the names of metrics.

Nothing here changes any more, whatever becomes of the metrics: it says what version 1 meant.
"""

from __future__ import annotations

from typing import Any

QUANTITIES = {
    "mps_gpu_up": "up",
    "mps_gpu_persistence_mode": "persistence_mode",
    "mps_gpu_mig_mode": "mig_mode",
    "mps_gpu_performance_state": "performance_state",
    "mps_gpu_vgpu_licensed": "vgpu_licensed",
    "mps_gpu_utilization_ratio": "gpu_utilization",
    "mps_gpu_memory_copy_utilization_ratio": "memory_utilization",
    "mps_gpu_engine_utilization_ratio": "engine_utilization",
    "mps_gpu_busy_seconds_total": "busy_time",
    "mps_gpu_unobserved_seconds_total": "unobserved_time",
    "mps_gpu_graphics_active_ratio": "graphics_activity",
    "mps_gpu_sm_active_ratio": "sm_activity",
    "mps_gpu_sm_occupancy_ratio": "sm_occupancy",
    "mps_gpu_integer_active_ratio": "integer_activity",
    "mps_gpu_tensor_active_ratio": "tensor_activity",
    "mps_gpu_dram_active_ratio": "dram_activity",
    "mps_gpu_fp64_active_ratio": "fp64_activity",
    "mps_gpu_fp32_active_ratio": "fp32_activity",
    "mps_gpu_fp16_active_ratio": "fp16_activity",
    "mps_gpu_graphics_active_seconds_total": "graphics_active_time",
    "mps_gpu_sm_active_seconds_total": "sm_active_time",
    "mps_gpu_tensor_active_seconds_total": "tensor_active_time",
    "mps_gpu_dram_active_seconds_total": "dram_active_time",
    "mps_gpu_memory_total_bytes": "memory_total",
    "mps_gpu_memory_used_bytes": "memory_used",
    "mps_gpu_memory_free_bytes": "memory_free",
    "mps_gpu_memory_reserved_bytes": "memory_reserved",
    "mps_gpu_bar1_total_bytes": "bar1_total",
    "mps_gpu_bar1_used_bytes": "bar1_used",
    "mps_gpu_power_watts": "power",
    "mps_gpu_power_limit_watts": "power_limit",
    "mps_gpu_energy_joules_total": "energy",
    "mps_gpu_temperature_celsius": "temperature",
    "mps_gpu_temperature_limit_celsius": "temperature_limit",
    "mps_gpu_fan_speed_ratio": "fan_speed",
    "mps_gpu_clock_hertz": "clock",
    "mps_gpu_clock_max_hertz": "clock_max",
    "mps_gpu_clock_event_active": "clock_event",
    "mps_gpu_clock_event_seconds_total": "clock_event_time",
    "mps_gpu_xid_errors_total": "xid_errors",
    "mps_gpu_last_xid_timestamp_seconds": "last_xid_at",
    "mps_gpu_ecc_errors_total": "ecc_errors",
    "mps_gpu_remapped_rows": "remapped_rows",
    "mps_gpu_row_remap_pending": "row_remap_pending",
    "mps_gpu_row_remap_failure": "row_remap_failure",
    "mps_gpu_retired_pages": "retired_pages",
    "mps_gpu_retired_pages_pending": "retired_pages_pending",
    "mps_gpu_recovery_action": "recovery_action",
    "mps_gpu_pcie_receive_bytes_total": "pcie_receive_bytes",
    "mps_gpu_pcie_transmit_bytes_total": "pcie_transmit_bytes",
    "mps_gpu_pcie_replays_total": "pcie_replays",
    "mps_gpu_pcie_errors_total": "pcie_errors",
    "mps_gpu_pcie_link_generation": "pcie_link_generation",
    "mps_gpu_pcie_link_width": "pcie_link_width",
    "mps_gpu_nvlink_receive_bytes_total": "nvlink_receive_bytes",
    "mps_gpu_nvlink_transmit_bytes_total": "nvlink_transmit_bytes",
    "mps_gpu_nvlink_links": "nvlink_links",
    "mps_gpu_nvlink_errors_total": "nvlink_errors",
    "mps_gpu_fabric_state": "fabric_state",
}
"""Metric of mps-exporter 0.1 -> quantity."""

STATES = ("mps_gpu_recovery_action", "mps_gpu_fabric_state")
"""Metrics whose readings have the state in a label that is named as the metric."""


def upgrade_gpus(observation: dict[str, Any]) -> dict[str, Any]:
    """Return an observation of kind "nvml", as JSON, with the readings of version 2.

    A metric that is not in the table gives a quantity of the same name, which nobody knows: it
    costs itself, not the recording.
    """
    gpus = [
        gpu | {"readings": [_upgrade_reading(one) for one in gpu.get("readings", ())]}
        for gpu in observation.get("gpus", ())
    ]
    return observation | {"gpus": gpus}


def _upgrade_reading(reading: dict[str, Any]) -> dict[str, Any]:
    metric = reading["metric"]
    labels = [
        ("state" if metric in STATES and name == metric else name, value)
        for name, value in reading.get("labels", ())
    ]
    quantity = QUANTITIES.get(metric, metric)
    return {"quantity": quantity, "value": reading["value"], "labels": labels}
