"""The hardware: power, heat, clocks and why they were lowered, memory, ECC, links."""

from grafana import style
from grafana.board import Board, Row, Variable, instance, job
from grafana.boards.shared import BAD_GPUS, SM_ACTIVITY, UTILIZATION, events_tile, responding
from grafana.panels import (
    GPUS_ALIKE,
    Column,
    Query,
    color_of,
    colors_by_query,
    dashed,
    dotted,
    events,
    graph,
    hidden,
    share_graph,
    strip,
    table,
    tile,
)
from grafana.promql import grown_in_range, new_in_step

GPU = "instance, gpu"
KEYS = "job, instance, gpu, uuid"
LEGEND = "GPU {{gpu}}"

UNCORRECTED = 'mps_gpu_ecc_errors_total{kind="uncorrected", scope="volatile"}'
HEADROOM = style.Steps(((None, style.QUIET), (-50, style.BAD), (0, style.WARN), (10, style.GOOD)))

TILES = strip(
    "Hardware",
    BAD_GPUS,
    events_tile(
        "ECC errors",
        "Healthy: 0. Uncorrected memory errors in this time range.",
        UNCORRECTED,
        f"0 * count({UNCORRECTED})",
    ),
    events_tile(
        "Xid errors",
        "Healthy: 0. Errors that the driver reported in this time range.",
        "mps_gpu_xid_errors_total",
        "0 * count(mps_gpu_up)",
        steps=style.noticed_from(1),
    ),
    tile(
        "Headroom",
        "Healthy: 10 degrees and more. How far the hottest GPU is from its slowdown temperature; "
        "at 0 the hardware slows down.",
        'min(min by (instance, uuid) (mps_gpu_temperature_limit_celsius{limit="slowdown"})'
        ' - max by (instance, uuid) (mps_gpu_temperature_celsius{sensor="gpu"}))',
        style.CELSIUS,
        HEADROOM,
    ),
    height=6,  # On a phone: two rows.
)

HEALTH = table(
    "GPUs",
    "Healthy: action none, zeros, and a PCIe width of 100 % while the GPU is busy (an idle link "
    "may slow down). At most 100 GPUs.",
    (
        f"topk(100, max by ({KEYS}, name, driver_version) (mps_gpu_info))",
        f"max by ({KEYS}) (mps_gpu_up)",
        f"max by ({KEYS}, mps_gpu_recovery_action) (mps_gpu_recovery_action == 1)",
        f"round({grown_in_range(UNCORRECTED, KEYS)})",
        f"max by ({KEYS}) (mps_gpu_row_remap_pending)",
        f"max by ({KEYS}) (mps_gpu_row_remap_failure)",
        f'max by ({KEYS}) (mps_gpu_pcie_link_width{{of="current"}}'
        ' / ignoring (of) mps_gpu_pcie_link_width{of="max"})',
        f"max by ({KEYS}) (mps_gpu_memory_used_bytes / mps_gpu_memory_total_bytes)",
        f"max by ({KEYS}) (mps_gpu_power_watts)",
        f'max by ({KEYS}) (mps_gpu_temperature_celsius{{sensor="gpu"}})',
    ),
    (
        Column("GPU", "gpu", width=65),
        Column("Model", "name", least=120),
        responding("B"),
        Column("Action", "mps_gpu_recovery_action", width=110),
        Column("ECC errors", "D", steps=style.at_most(1), width=79),
        Column("Rows pending", "E", steps=style.noticed_from(1), width=80),
        Column("Rows failed", "F", steps=style.at_most(1), width=70),
        Column("PCIe width", "G", unit=style.SHARE, decimals=0, width=70),
        Column("Memory", "H", unit=style.SHARE, gauge=True, decimals=0, width=90),
        Column("Power", "I", unit=style.WATTS, decimals=0, width=70),
        Column("Temperature", "J", unit=style.CELSIUS, decimals=0, width=100),
        Column("Driver", "driver_version", width=100),
        *hidden("uuid", "instance", "job", "A"),
    ),
    sort="ECC errors",
    none="No GPU is known.",
    found="mps_gpu_info",
    height=10,
)

WORK = (
    share_graph(
        "Utilization",
        "For information: the share of time in which any kernel ran, on however few SMs.",
        Query(f"avg by ({GPU}) {UTILIZATION}", LEGEND),
        overrides=GPUS_ALIKE,
        none="No GPU reports its utilization.",
    ),
    share_graph(
        "SM activity",
        "Healthy: near the utilization beside it. The share of SMs that were working. Hopper or "
        "later.",
        Query(f"avg by ({GPU}) {SM_ACTIVITY}", LEGEND),
        overrides=GPUS_ALIKE,
        none="No GPU reports its SM activity.",
    ),
    share_graph(
        "Activity by unit",
        "For information: which units are busy, the mean of the GPUs chosen. Much tensor is "
        "typical of deep learning; dram near 100 % means that memory is the bottleneck. Hopper or "
        "later.",
        *(
            Query(f"avg(mps_gpu_{unit}_active_ratio)", unit)
            for unit in ("tensor", "fp64", "fp32", "fp16", "integer", "dram")
        ),
        Query("avg(mps_gpu_sm_occupancy_ratio)", "occupancy"),
        overrides=colors_by_query(
            "#5794f2", "#b877d9", "#c2841a", "#2f9fb8", "#7890ab", "#d65db1", "#9c9328"
        ),
        none="These GPUs do not report it.",
    ),
    graph(
        "Memory used",
        "Healthy: below the dashed line, the memory of one GPU.",
        Query(f"max by ({GPU}) (mps_gpu_memory_used_bytes)", LEGEND),
        Query("max(mps_gpu_memory_total_bytes)", "total"),
        unit=style.BYTES,
        overrides=(*GPUS_ALIKE, dashed("B", style.BAD)),
        none="No GPU reports its memory.",
    ),
)

SPEED = (
    graph(
        "SM clock",
        "Healthy: at its maximum (dashed) under load; an idle GPU lowers it. Below it under load: "
        "see the reasons in the next panel.",
        Query(f'max by ({GPU}) (mps_gpu_clock_hertz{{clock="sm"}})', LEGEND),
        Query('max(mps_gpu_clock_max_hertz{clock="sm"})', "maximum"),
        unit=style.HERTZ,
        overrides=(*GPUS_ALIKE, dashed("B")),
        none="No GPU reports its clocks.",
    ),
    share_graph(
        "Why clocks were lowered",
        "Healthy: gpu_idle and applications_clocks_setting, or nothing. Share of the time; reasons "
        "overlap. sw_power_cap is the power limit; a thermal or brake reason concerns cooling or "
        "power supply.",
        Query(
            "clamp_max(max by (instance, gpu, reason)"
            " (rate(mps_gpu_clock_event_seconds_total[$__rate_interval])), 1) > 0"
            " or max by (instance, gpu, reason) (mps_gpu_clock_event_active) > 0",
            "GPU {{gpu}} {{reason}}",
        ),
        overrides=(
            color_of("byRegexp", "/gpu_idle$/", style.QUIET),
            color_of("byRegexp", "/sw_power_cap$/", style.WARN),
            color_of("byRegexp", "/(thermal|brake|hw)_.*slowdown$/", style.BAD),
        ),
        none="No reason is known.",
    ),
)

HEAT = (
    graph(
        "Power",
        "Healthy: below the enforced limit (dashed); at the limit the clocks are lowered.",
        Query(f"max by ({GPU}) (mps_gpu_power_watts)", LEGEND),
        Query('max(mps_gpu_power_limit_watts{limit="enforced"})', "limit"),
        unit=style.WATTS,
        overrides=(*GPUS_ALIKE, dashed("B", style.BAD)),
        none="No GPU reports its power.",
    ),
    graph(
        "Temperature",
        "Healthy: well below the temperature at which the GPU slows down (dashed).",
        Query(
            "max by (instance, gpu, sensor) (mps_gpu_temperature_celsius)", "GPU {{gpu}} {{sensor}}"
        ),
        Query('min(mps_gpu_temperature_limit_celsius{limit="slowdown"})', "slowdown"),
        unit=style.CELSIUS,
        overrides=(*GPUS_ALIKE, dotted("byRegexp", "/ memory$/"), dashed("B", style.BAD)),
        none="No GPU reports its temperature.",
    ),
)

LINKS_AND_ERRORS = (
    graph(
        "PCIe and NVLink traffic",
        "For information: both directions together. Programs that are slow while PCIe is near the "
        "link's speed may wait for data; NVLink is what GPUs send each other directly.",
        Query(
            f"max by ({GPU}) (rate(mps_gpu_pcie_receive_bytes_total[$__rate_interval]))"
            f" + max by ({GPU}) (rate(mps_gpu_pcie_transmit_bytes_total[$__rate_interval]))",
            "GPU {{gpu}} PCIe",
        ),
        Query(
            f"max by ({GPU}) (rate(mps_gpu_nvlink_receive_bytes_total[$__rate_interval]))"
            f" + max by ({GPU}) (rate(mps_gpu_nvlink_transmit_bytes_total[$__rate_interval]))",
            "GPU {{gpu}} NVLink",
        ),
        unit=style.BYTES_PER_SECOND,
        overrides=(*GPUS_ALIKE, dotted("byFrameRefID", "B")),
        none="These GPUs do not count it.",
    ),
    events(
        "Memory and link errors",
        "Healthy: empty. Corrected memory errors (ECC) cost nothing, but many of them announce a "
        "row remap; an uncorrected one can end programs on the GPU. Steady replays or link errors "
        "point at a riser, a cable or a slot. Each bar is those since the bar before.",
        Query(
            new_in_step('mps_gpu_ecc_errors_total{scope="volatile"}', "gpu, kind"),
            "GPU {{gpu}} ECC {{kind}}",
        ),
        Query(new_in_step("mps_gpu_pcie_replays_total", "gpu"), "GPU {{gpu}} PCIe replays"),
        Query(new_in_step("mps_gpu_pcie_errors_total", "gpu, kind"), "GPU {{gpu}} PCIe {{kind}}"),
        Query(
            new_in_step("mps_gpu_nvlink_errors_total", "gpu, kind"), "GPU {{gpu}} NVLink {{kind}}"
        ),
        width=12,
        height=8,
    ),
)

BOARD = Board(
    uid="mps-gpu",
    name="GPU",
    description="The health of the hardware: power, heat, clocks, memory, errors and links.",
    variables=(job(), instance(everything=False), Variable("gpu", "GPU", "mps_gpu_info")),
    rows=(
        Row("Are the GPUs healthy?", (TILES,)),
        Row("Which GPU needs action?", (HEALTH,)),
        Row("What are they doing?", WORK),
        Row("Do they run at full speed, and if not, why?", (*SPEED, *HEAT), collapsed=True),
        Row("Are memory and links healthy?", LINKS_AND_ERRORS, collapsed=True),
    ),
)
