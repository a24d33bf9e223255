"""The hardware: power, heat, clocks and why they were lowered, memory, ECC, links."""

from __future__ import annotations

from grafana.board import Board, Row, Variable, instance, job, source_tile
from grafana.boards.shared import utilization_with_activity
from grafana.panels import Column, Query, color_of, events, graph, share_graph, table, tile
from grafana.promql import new_in_range, new_in_step
from grafana.style import (
    BAD,
    BYTES,
    BYTES_PER_SECOND,
    CELSIUS,
    GOOD,
    HERTZ,
    PER_SECOND,
    QUIET,
    SHARE,
    WATTS,
    State,
    at_most,
    noticed_from,
)

GPU = "instance, gpu"
KEYS = "job, instance, gpu, uuid"
LEGEND = "GPU {{gpu}}"
NOTHING = "0 * count(mps_gpu_up)"

SLOWED = "hw_thermal_slowdown|sw_thermal_slowdown|hw_power_brake_slowdown|hw_slowdown|sw_power_cap"
UNCORRECTED = 'mps_gpu_ecc_errors_total{kind="uncorrected", scope="volatile"}'

TILES = (
    tile(
        "Silent GPUs",
        "Good: 0. Fallen off the bus, or to be reset.",
        "sum(1 - mps_gpu_up)",
        steps=at_most(1),
        none="no GPU",
    ),
    tile(
        "To be reset",
        "Good: 0. The driver says that something must be done before they can be trusted.",
        'count(max by (instance, uuid) (mps_gpu_recovery_action{mps_gpu_recovery_action!="none"})'
        f" == 1) or {NOTHING}",
        steps=at_most(1),
        none="no GPU",
    ),
    tile(
        "ECC failures",
        "Good: 0. In this time range. Each has cost a program its result.",
        f"{new_in_range(UNCORRECTED, '')} or {NOTHING}",
        steps=at_most(1),
        decimals=0,
        none="no GPU",
    ),
    tile(
        "Rows failed",
        "Good: 0. GPUs whose memory has no spare rows left where one is needed: due for exchange.",
        f"sum(mps_gpu_row_remap_failure) or {NOTHING}",
        steps=at_most(1),
        none="no GPU",
    ),
    tile(
        "Xid errors",
        "Good: 0. Errors that the driver reported in this time range.",
        f"{new_in_range('mps_gpu_xid_errors_total', '')} or {NOTHING}",
        steps=noticed_from(1),
        decimals=0,
        none="no GPU",
    ),
    tile(
        "Heat margin",
        "Good: 10 degrees and more. How far the hottest GPU is from its slowdown temperature; at 0 "
        "the hardware halves the clocks.",
        'min(min by (instance, uuid) (mps_gpu_temperature_limit_celsius{limit="slowdown"})'
        ' - max by (instance, uuid) (mps_gpu_temperature_celsius{sensor="gpu"}))',
        CELSIUS,
        none="unknown",
    ),
    tile(
        "Power of all",
        "No good or bad: what they draw, together.",
        "sum(mps_gpu_power_watts)",
        WATTS,
        none="unknown",
    ),
    source_tile(),
)

HEALTH = table(
    "GPUs",
    "Good: action none, zeros, and PCIe shares of 100 % while the GPU is busy (an idle link may "
    "slow down). At most 100 GPUs.",
    (
        f"topk(100, max by ({KEYS}, name, driver_version) (mps_gpu_info))",
        f"max by ({KEYS}) (mps_gpu_up)",
        f"max by ({KEYS}, mps_gpu_recovery_action) (mps_gpu_recovery_action == 1)",
        f"round({new_in_range(UNCORRECTED, KEYS)})",
        f"max by ({KEYS}) (mps_gpu_row_remap_pending)",
        f"max by ({KEYS}) (mps_gpu_row_remap_failure)",
        f"sum by ({KEYS}) (mps_gpu_remapped_rows)",
        f'max by ({KEYS}) (mps_gpu_pcie_link_width{{of="current"}}'
        ' / ignoring (of) mps_gpu_pcie_link_width{of="max"})',
        f"max by ({KEYS}) (mps_gpu_memory_used_bytes / mps_gpu_memory_total_bytes)",
    ),
    (
        Column("GPU", "gpu", width=75),
        Column("Name", "name", width=170),
        Column("Answers", "B", states=(State(1, "yes", GOOD), State(0, "no", BAD)), width=80),
        Column("To be done", "mps_gpu_recovery_action", width=120),
        Column("ECC failures", "D", steps=at_most(1), width=130),
        Column("Rows pending", "E", steps=noticed_from(1), width=110),
        Column("Rows failed", "F", steps=at_most(1), width=100),
        Column("Rows replaced", "G", width=115),
        Column("PCIe width", "H", unit=SHARE, decimals=0, width=95),
        Column("Memory", "I", unit=SHARE, gauge=True, decimals=0, width=110),
        Column("Driver", "driver_version", width=115),
        Column("Host", "instance"),
        Column("Job", "job", width=110),
        Column("UUID", "uuid", width=340),
    ),
    sort="ECC failures",
    none="No GPU.",
    height=7,
)  # fmt: skip

SPEED = (
    graph(
        "SM clock",
        "Good: at its maximum (dashed) under load; an idle GPU lowers it. Below it under load: see "
        "the reasons at the right.",
        Query(f'max by ({GPU}) (mps_gpu_clock_hertz{{clock="sm"}})', LEGEND),
        Query('max(mps_gpu_clock_max_hertz{clock="sm"})', "maximum"),
        unit=HERTZ,
        overrides=(
            color_of(
                "byFrameRefID", "B", QUIET, custom__fillOpacity=0,
                custom__lineStyle={"fill": "dash", "dash": [10, 10]},
            ),
        ),
        none="No GPU reports its clocks.",
    ),
    share_graph(
        "Why clocks were held down",
        "Good: gpu_idle and applications_clocks_setting, or nothing. Share of the time; reasons "
        "overlap. sw_power_cap is the power limit at work; a thermal or brake reason is a matter "
        "for whoever cools or feeds the machine.",
        Query(
            "clamp_max(max by (instance, gpu, reason)"
            " (rate(mps_gpu_clock_event_seconds_total[$__rate_interval])), 1) > 0"
            " or max by (instance, gpu, reason) (mps_gpu_clock_event_active) > 0",
            "GPU {{gpu}} {{reason}}",
        ),
        none="Nothing held the clocks down.",
    ),
)  # fmt: skip

HEAT = (
    graph(
        "Power",
        "Good: below the limit in force (dashed); at the limit the clocks are lowered.",
        Query(f"max by ({GPU}) (mps_gpu_power_watts)", LEGEND),
        Query('max(mps_gpu_power_limit_watts{limit="enforced"})', "limit"),
        unit=WATTS,
        width=8,
        overrides=(
            color_of(
                "byFrameRefID", "B", BAD, custom__fillOpacity=0,
                custom__lineStyle={"fill": "dash", "dash": [10, 10]},
            ),
        ),
        none="No GPU reports its power.",
    ),
    graph(
        "Temperature",
        "Good: well below the temperature at which the chip slows itself down (dashed).",
        Query(
            "max by (instance, gpu, sensor) (mps_gpu_temperature_celsius)",
            "GPU {{gpu}} {{sensor}}",
        ),
        Query('min(mps_gpu_temperature_limit_celsius{limit="slowdown"})', "slowdown"),
        unit=CELSIUS,
        width=8,
        overrides=(
            color_of(
                "byFrameRefID", "B", BAD, custom__fillOpacity=0,
                custom__lineStyle={"fill": "dash", "dash": [10, 10]},
            ),
        ),
        none="No GPU reports its temperature.",
    ),
    graph(
        "Mean power",
        "Good: as the power at the left, and smoother. From the energy counter, which misses no "
        "peak between two scrapes.",
        Query(f"max by ({GPU}) (rate(mps_gpu_energy_joules_total[$__rate_interval]))", LEGEND),
        unit=WATTS,
        width=8,
        none="No GPU counts its energy.",
    ),
)  # fmt: skip

WORK = (
    utilization_with_activity("instance, gpu", "GPU {{gpu}} ", width=8),
    share_graph(
        "What kind of work",
        "No good or bad: which units are busy, the mean of the GPUs chosen. Much tensor is deep "
        "learning as it should be; dram near 100 % says that memory is the bottleneck. Hopper and "
        "later.",
        Query("avg(mps_gpu_tensor_active_ratio)", "tensor"),
        Query("avg(mps_gpu_fp64_active_ratio)", "fp64"),
        Query("avg(mps_gpu_fp32_active_ratio)", "fp32"),
        Query("avg(mps_gpu_fp16_active_ratio)", "fp16"),
        Query("avg(mps_gpu_integer_active_ratio)", "integer"),
        Query("avg(mps_gpu_dram_active_ratio)", "dram"),
        Query("avg(mps_gpu_sm_occupancy_ratio)", "occupancy"),
        width=8,
        none="These GPUs do not report it.",
    ),
    graph(
        "Memory in use",
        "Good: below the dashed line, all the memory of one GPU.",
        Query(f"max by ({GPU}) (mps_gpu_memory_used_bytes)", LEGEND),
        Query("max(mps_gpu_memory_total_bytes)", "all there is"),
        unit=BYTES,
        width=8,
        overrides=(
            color_of(
                "byFrameRefID", "B", BAD, custom__fillOpacity=0,
                custom__lineStyle={"fill": "dash", "dash": [10, 10]},
            ),
        ),
        none="No GPU reports its memory.",
    ),
)  # fmt: skip

ERRORS = (
    events(
        "Xid errors, by code",
        "Good: empty. 13, 31 and 43 are mostly a program's own mistake; 48, 63, 64, 79, 94, 95 "
        "and 119 are the hardware's or the driver's.",
        Query(new_in_step("mps_gpu_xid_errors_total", "gpu, xid"), "Xid {{xid}}, GPU {{gpu}}"),
        width=12,
        none="None in this time range.",
    ),
    events(
        "Memory errors (ECC)",
        "Good: empty. Corrected ones cost nothing, and many of them say that a row will be "
        "replaced; an uncorrected one ends the programs on the GPU.",
        Query(
            new_in_step('mps_gpu_ecc_errors_total{scope="volatile"}', "gpu, kind"),
            "GPU {{gpu}} {{kind}}",
        ),
        width=12,
        none="None in this time range, or no ECC.",
    ),
)

LINKS = (
    graph(
        "PCIe traffic",
        "No good or bad. Programs that are slow while this is near the link's speed are starved "
        "of data.",
        Query(
            f"max by ({GPU}) (rate(mps_gpu_pcie_receive_bytes_total[$__rate_interval]))",
            "GPU {{gpu}} to the GPU",
        ),
        Query(
            f"max by ({GPU}) (rate(mps_gpu_pcie_transmit_bytes_total[$__rate_interval]))",
            "GPU {{gpu}} from the GPU",
        ),
        unit=BYTES_PER_SECOND,
        width=8,
        none="These GPUs do not count it.",
    ),
    graph(
        "NVLink traffic",
        "No good or bad: what GPUs send each other directly.",
        Query(
            f"max by ({GPU}) (rate(mps_gpu_nvlink_receive_bytes_total[$__rate_interval]))",
            "GPU {{gpu}} received",
        ),
        Query(
            f"max by ({GPU}) (rate(mps_gpu_nvlink_transmit_bytes_total[$__rate_interval]))",
            "GPU {{gpu}} sent",
        ),
        unit=BYTES_PER_SECOND,
        width=8,
        none="No NVLink, or it is not counted.",
    ),
    graph(
        "Errors of the links",
        "Good: 0. Steady replays or errors point at a riser, a cable or a slot.",
        Query(
            f"max by ({GPU}) (rate(mps_gpu_pcie_replays_total[$__rate_interval]))",
            "GPU {{gpu}} PCIe replays",
        ),
        Query(
            "max by (instance, gpu, kind) (rate(mps_gpu_pcie_errors_total[$__rate_interval])) > 0",
            "GPU {{gpu}} PCIe {{kind}}",
        ),
        Query(
            "max by (instance, gpu, kind)"
            " (rate(mps_gpu_nvlink_errors_total[$__rate_interval])) > 0",
            "GPU {{gpu}} NVLink {{kind}}",
        ),
        unit=PER_SECOND,
        width=8,
        none="These GPUs do not count them.",
    ),
)

BOARD = Board(
    uid="mps-gpu",
    name="GPU",
    description="The health of the hardware: power, heat, clocks, memory, errors and links.",
    variables=(job(), instance(everything=False), Variable("gpu", "GPU", "mps_gpu_info")),
    rows=(
        Row("Can these GPUs be trusted?", TILES),
        Row("Which one, and what must be done?", (HEALTH,)),
        Row("Do they run at full speed, and if not, why?", SPEED),
        Row("Are they fed and cooled?", HEAT),
        Row("What do they do?", WORK),
        Row("Which errors did they have?", ERRORS),
        Row("Are the links all right?", LINKS),
    ),
)
