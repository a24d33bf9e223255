"""The exporters' own health, and what they cost."""

from grafana import style
from grafana.board import Board, Row, instance, job
from grafana.boards.shared import GONE, NO_TARGET, NOT_REACHED, TARGETS, host_column
from grafana.panels import Column, Query, color_of, dotted, graph, hidden, strip, table, tile
from grafana.promql import new_in_range

LOG_LARGE = style.alert_threshold("MpsControlLogLarge", "mps_control_log_size_bytes")
UNKNOWN_LINES = style.alert_threshold(
    "MpsLogWordingUnknown", "mps_control_log_unrecognized_lines_total"
)
SOURCES = ("nvml", "control", "logs", "process")
COLLECTORS = tuple(
    color_of("byRegexp", f"/^{name}/", color)
    for name, color in zip(SOURCES, style.BY_LAST_DIGIT, strict=False)
)
_OURS = "and on (job, instance) (up and on (job, instance) mps_exporter_build_info)"
_BUILD = "version, revision, pythonversion"
_HOST = "max by (job, instance)"

UP = (
    style.State(1, "yes", style.GOOD),
    style.State(0, "unreachable", style.QUIET),
    style.State(5, "gone", style.GONE),
)
_UNKNOWN = style.State(99, "-", "transparent")

COMPLETE = strip(
    "Is monitoring complete?",
    NOT_REACHED,
    NO_TARGET,
    tile(
        "Failing sources",
        "Healthy: 0. Sources that exporters cannot read now: NVML, daemons, logs, processes.",
        "sum(1 - mps_scrape_collector_success)",
        steps=style.at_most(1),
    ),
    titleSize=16,
    valueSize=56,
)

WHICH = table(
    "Exporters",
    "Healthy: all reachable, one version, nothing missing, below 2 % of a core and a scrape far "
    "below its timeout (10 s by default). Failing: sources that cannot be read now. Unread limits: "
    "clients whose limits may not be read. Not exported: clients beyond the limit on series. "
    "MPS does not rotate the logs, and only copytruncate works. When unknown lines grow after an "
    "update, the new driver words its log differently, and incidents may be missed. A recording is "
    "replayed where Recording names one: its values are not live. Gone: no longer a target, though "
    "it was in this time range. At most 100 exporters, unreachable and failing ones first.",
    (
        f"topk(100, sum by (job, instance) (1 - mps_scrape_collector_success)"
        f" or {_HOST} ({TARGETS} == 0) + 99 or ({GONE}) + 94)",
        f"{_HOST} {TARGETS} or {GONE}",
        "sum by (job, instance) (1 - mps_control_log_readable) > 0",
        "sum by (job, instance) (mps_exporter_unreadable_environments) > 0",
        "sum by (job, instance) (mps_client_dropped_series) > 0",
        f"{_HOST} (scrape_duration_seconds {_OURS})",
        f"{_HOST} (scrape_samples_scraped {_OURS})",
        f"{_HOST} (rate(process_cpu_seconds_total[$__rate_interval]) {_OURS})",
        f"{_HOST} (process_resident_memory_bytes {_OURS})",
        "max by (job, instance) (mps_control_log_size_bytes)",
        f"{new_in_range('mps_control_log_unrecognized_lines_total', 'job, instance')} > 0",
        "max by (job, instance, version, revision) (mps_exporter_build_info)",
        "max by (job, instance, scenario) (mps_exporter_recording_info)",
    ),
    (
        Column("Up", "B", states=UP, width=100),
        host_column("mps-host", width=None),
        Column("Failing", "A", states=(_UNKNOWN,), steps=style.at_most(1), width=80),
        Column("Unread logs", "C", steps=style.at_most(1), width=80),
        Column("Unread limits", "D", steps=style.noticed_from(1), width=80),
        Column("Not exported", "E", steps=style.noticed_from(1), width=90),
        Column("Scrape", "F", unit=style.SECONDS, steps=style.at_most(5, 10), width=80),
        Column("Samples", "G", width=75),
        Column("CPU", "H", unit=style.SHARE, steps=style.noticed_from(0.02), decimals=1, width=65),
        Column("Memory", "I", unit=style.BYTES, width=80),
        Column("Largest log", "J", unit=style.BYTES, steps=style.noticed_from(LOG_LARGE), width=82),
        Column("Unknown lines", "K", steps=style.noticed_from(UNKNOWN_LINES), width=95, decimals=0),
        Column("Version", "version", width=90),
        Column("Recording", "scenario", width=115),
        *hidden("revision", "job"),
    ),
    sort="Failing",
    none="No exporter is scraped.",
    found=TARGETS,
    height=10,
)

READ = (
    graph(
        "Failing collectors",
        "Healthy: 0. On how many hosts each source could not be read. The metrics of that source "
        "are absent meanwhile.",
        Query("sum by (collector) (1 - mps_scrape_collector_success)", "{{collector}}"),
        Query("sum by (collector) (mps_scrape_collector_timeout) > 0", "{{collector}}: timeout"),
        overrides=(*COLLECTORS, dotted("byFrameRefID", "B")),
        width=8,
        decimals=0,
    ),
    graph(
        "Read time by source",
        "Healthy: milliseconds. The slowest host. Daemon: all queries of one collection; while it "
        "answers the exporter it answers nobody else.",
        Query("max(mps_control_query_duration_seconds)", "daemon"),
        Query("max by (collector) (mps_scrape_collector_duration_seconds)", "{{collector}}"),
        unit=style.SECONDS,
        overrides=(*COLLECTORS, dotted("byFrameRefID", "A")),
        width=8,
    ),
    table(
        "Versions",
        "Healthy: one. How many exporters have which version; the 20 most common.",
        (
            f"topk(20, count by ({_BUILD}) (max by (job, instance, {_BUILD})"
            " (mps_exporter_build_info)))",
        ),
        (
            Column("Version", "version"),
            Column("Revision", "revision", width=110),
            Column("Python", "pythonversion", width=82),
            Column("Exporters", "A", width=105),
        ),
        sort="Exporters",
        none="No exporter is scraped.",
        width=8,
        height=8,
    ),
)

BOARD = Board(
    uid="mps-exporter",
    name="Exporter",
    description="Whether the exporters are healthy and complete, and what they cost.",
    variables=(job(), instance()),
    rows=(
        Row("Which exporters are unhealthy?", (COMPLETE, WHICH)),
        Row("Is everything read, and in time?", READ),
    ),
)
