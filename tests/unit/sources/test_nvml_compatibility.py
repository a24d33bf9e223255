"""docs/compatibility.md and the rules with the old names, held against each other and ours."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from mps_exporter.metrics import CATALOGUE
from mps_exporter.metrics.gpus import BY_QUANTITY
from mps_exporter.sources.nvml.policy import MINUTE, SLOW
from mps_exporter.sources.nvml.readings import FIELDS, ROWS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
RULES = yaml.safe_load((ROOT / "prometheus" / "dcgm-compat.rules.yml").read_text())["groups"]
TESTS = (ROOT / "prometheus" / "tests" / "dcgm-compat.yml").read_text()

# default-counters.csv and dcp-metrics-included.csv, without their prefix; both have the same.
DEVICE = """
    SM_CLOCK MEM_CLOCK MEMORY_TEMP GPU_TEMP POWER_USAGE TOTAL_ENERGY_CONSUMPTION
    PCIE_REPLAY_COUNTER GPU_UTIL MEM_COPY_UTIL ENC_UTIL DEC_UTIL XID_ERRORS POWER_VIOLATION
    THERMAL_VIOLATION SYNC_BOOST_VIOLATION BOARD_LIMIT_VIOLATION LOW_UTIL_VIOLATION
    RELIABILITY_VIOLATION FB_FREE FB_USED FB_RESERVED ECC_SBE_VOL_TOTAL ECC_DBE_VOL_TOTAL
    ECC_SBE_AGG_TOTAL ECC_DBE_AGG_TOTAL RETIRED_SBE RETIRED_DBE RETIRED_PENDING
    NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL NVLINK_CRC_DATA_ERROR_COUNT_TOTAL
    NVLINK_REPLAY_ERROR_COUNT_TOTAL NVLINK_RECOVERY_ERROR_COUNT_TOTAL NVLINK_BANDWIDTH_TOTAL
    NVLINK_BANDWIDTH_L0 VGPU_LICENSE_STATUS UNCORRECTABLE_REMAPPED_ROWS
    CORRECTABLE_REMAPPED_ROWS ROW_REMAP_FAILURE BRAND SERIAL OEM_INFOROM_VER ECC_INFOROM_VER
    POWER_INFOROM_VER INFOROM_IMAGE_VER VBIOS_VERSION
"""
PROFILING = """
    PCIE_TX_BYTES PCIE_RX_BYTES GR_ENGINE_ACTIVE SM_ACTIVE SM_OCCUPANCY PIPE_TENSOR_ACTIVE
    DRAM_ACTIVE PIPE_FP64_ACTIVE PIPE_FP32_ACTIVE PIPE_FP16_ACTIVE
"""
OWN = "CLOCK_EVENTS_COUNT XID_ERRORS_COUNT GPU_HEALTH_STATUS P2P_STATUS"
THEIRS = {
    *(f"DCGM_FI_DEV_{name}" for name in DEVICE.split()),
    *(f"DCGM_FI_PROF_{name}" for name in PROFILING.split()),
    *(f"DCGM_EXP_{name}" for name in OWN.split()),
    "DCGM_FI_DRIVER_VERSION",
    "DCGM_FI_NVML_VERSION",
}


def rows() -> dict[str, list[str]]:
    found = re.findall(r"^\| `(DCGM_\w+)` \|(.*)\|$", PAGE, flags=re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in found}


def left_out() -> set[str]:
    """The metrics that the reasons 4 and 5 list: those that have no row."""
    reasons = re.findall(r"^[45]\. .*\n(?: {3}.*\n)*", PAGE, flags=re.MULTILINE)
    assert len(reasons) == len("45")
    return {*re.findall(r"`(DCGM_\w+)`", "".join(reasons))}


def test_every_metric_of_their_lists_has_a_row_or_a_reason() -> None:
    assert rows().keys() | left_out() == THEIRS
    assert rows().keys() & left_out() == set()


def test_every_row_is_ours() -> None:
    reasons = re.findall(r"^(\d)\. \*\*", PAGE, flags=re.MULTILINE)
    assert reasons == ["1", "2", "3", "4", "5"]
    for name, (ours, absent) in rows().items():
        found = re.findall(r"`(\w+)(?:\{(.*?)\})?`", ours)
        assert found, name
        for metric, labels in found:
            spec = CATALOGUE[metric]
            assert spec.source, name
            assert set(re.findall(r'(\w+)(?==|,|$)(?!")', labels)) <= {*spec.labels}, name
        assert not absent or absent[0] in "1235" or "--" in absent or absent == "4", name


def test_every_row_that_is_ours_is_recorded_under_its_old_name_and_tested() -> None:
    recorded = {rule["record"] for group in RULES for rule in group["rules"]}
    # Their labels are labels of mps_gpu_info.
    series = {name for name, (ours, _) in rows().items() if not ours.startswith("`mps_gpu_info")}
    assert {name for name in recorded if name.startswith("DCGM_")} == series
    for name in series:
        assert f"({name})" in TESTS, name


def test_rules_ask_for_metrics_that_exist() -> None:
    for group in RULES:
        for rule in group["rules"]:
            for metric in re.findall(r"(?<![:\w])(mps_gpu_\w+)(?![:\w])", rule["expr"]):
                assert metric in CATALOGUE, rule["record"]


def test_metrics_that_are_not_read_each_time_say_so() -> None:
    """A rate over a counter that is read once a minute needs to know."""
    words = {SLOW: "read every 5 s", MINUTE: "read once a minute"}
    for row in FIELDS:
        if row.every in words:
            assert words[row.every] in BY_QUANTITY[row.quantity].help.lower(), row.quantity
    named = {row.call: row.every for row in ROWS}
    for call, metric in (
        ("nvmlDeviceGetTotalEnergyConsumption", "mps_gpu_energy_joules_total"),
        ("nvmlDeviceGetBAR1MemoryInfo", "mps_gpu_bar1_used_bytes"),
        ("nvmlDeviceGetPowerManagementLimit", "mps_gpu_power_limit_watts"),
        ("nvmlDeviceGetGpuFabricInfoV", "mps_gpu_fabric_state"),
    ):
        assert words[named[call]] in CATALOGUE[metric].help.lower(), call
