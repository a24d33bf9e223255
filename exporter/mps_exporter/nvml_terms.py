"""Names for NVML's numbers, as labels of readings and in the documentation of metrics.

The order is that of NVML's numbers from 0 on, if NVML numbers the values.
"""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
RECOVERY_ACTIONS = _names(
    "none gpu_reset node_reboot drain_p2p drain_and_reset recover_imex_domain bus_reset "
    "system_reboot"
)
FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")
ARCHITECTURES = _names("Kepler Maxwell Pascal Volta Turing Ampere Ada Hopper Blackwell Rubin")

CLOCKS = ("graphics", "sm", "memory", "video")
TEMPERATURE_LIMITS = ("shutdown", "slowdown", "memory_max", "gpu_max")
CLOCK_EVENT_REASONS = _names(
    "gpu_idle applications_clocks_setting sw_power_cap hw_slowdown sync_boost sw_thermal_slowdown "
    "hw_thermal_slowdown hw_power_brake_slowdown display_clock_setting"
)
"""Reasons in the order of NVML's bits, from bit 0."""
CLOCK_EVENT_SECONDS_REASONS = _names(
    "sw_power_cap thermal sync_boost board_limit low_utilization reliability "
    "below_application_clocks below_base_clocks sw_thermal_slowdown hw_thermal_slowdown "
    "hw_power_brake_slowdown"
)
ECC_KINDS = ("corrected", "uncorrected")
ECC_SCOPES = ("volatile", "aggregate")
ECC_LOCATIONS = ("dram", "sram", "l1_cache", "l2_cache", "register_file", "texture_memory", "cbu")
PCIE_ERROR_KINDS = _names(
    "l0_to_recovery correctable nak_received receiver bad_tlp nak_sent bad_dllp non_fatal fatal "
    "unsupported_request lcrc lane"
)
NVLINK_STATES = ("active", "inactive")
NVLINK_ERROR_KINDS = ("crc_flit", "crc_data", "crc", "replay", "recovery", "ecc_data")
