"""The monitor's own health, and what it costs."""

from __future__ import annotations

from grafana.board import Board, Row, instance, job, source_tile
from grafana.boards.shared import NOT_SCRAPED, to_host
from grafana.panels import Column, Query, graph, ranking, share_graph, table, tile
from grafana.style import (
    BYTES,
    GOOD,
    PER_SECOND,
    SECONDS,
    State,
    alert_threshold,
    at_most,
    noticed_from,
)

LOG_LARGE = alert_threshold("MpsControlLogLarge", "mps_control_log_size_bytes")
UNKNOWN_LINES = alert_threshold("MpsLogWordingUnknown", "mps_control_log_unrecognized_lines_total")
SCRAPED = "up and on (job, instance) mps_exporter_build_info"

TILES = (
    tile(
        "Answering",
        "Good: as many as there are hosts with GPUs.",
        "count(mps_exporter_build_info)",
        none="none",
    ),
    tile(
        "Silent hosts",
        "Good: 0. Prometheus cannot reach them; of their hosts nothing is known.",
        NOT_SCRAPED,
        steps=at_most(1),
    ),
    tile(
        "Sick sources",
        "Good: 0. Of NVML, the control tool, the logs and /proc, on all hosts: what could not be "
        "read. The metrics of that source are absent meanwhile.",
        "sum(1 - mps_scrape_collector_success)",
        steps=at_most(1),
    ),
    tile(
        "Unread logs",
        "Good: 0. Where a log is unreadable, crashes and waits cannot be seen, and their counters "
        "stand still.",
        "sum(1 - mps_control_log_readable) or 0 * count(mps_exporter_build_info)",
        steps=at_most(1),
    ),
    tile(
        "Hidden limits",
        "Good: 0. Clients of other users whose environment the exporter may not read: that takes "
        "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH together. Their limits are left out, and their "
        "limit_source says unknown.",
        "sum(mps_exporter_unreadable_environments) or 0 * count(mps_exporter_build_info)",
        steps=noticed_from(1),
    ),
    tile(
        "Left out",
        "Good: 0. Clients without series of their own: beyond --collector.clients.max, or several "
        "that their daemon calls by the PID 0.",
        "sum(mps_client_dropped_series) or 0 * count(mps_exporter_build_info)",
        steps=noticed_from(1),
    ),
    tile(
        "Slowest read",
        "Good: well below the scrape timeout, 10 s by default.",
        "max(mps_scrape_collector_duration_seconds)",
        SECONDS,
        at_most(5, 10),
    ),
    source_tile(),
)

READ = (
    graph(
        "Sources that fail, by source",
        "Good: 0. On how many hosts each source could not be read.",
        Query("sum by (collector) (1 - mps_scrape_collector_success)", "{{collector}}"),
        Query("sum by (collector) (mps_scrape_collector_timeout)", "{{collector}}: no answer"),
        width=8,
        decimals=0,
    ),
    graph(
        "Time that each source takes",
        "Good: milliseconds. The slowest host.",
        Query("max by (collector) (mps_scrape_collector_duration_seconds)", "{{collector}}"),
        unit=SECONDS,
        width=8,
    ),
    graph(
        "Time of a scrape",
        "Good: well below a second. The slowest host, and the mean, as Prometheus measured it.",
        Query(f"max(scrape_duration_seconds and on (job, instance) ({SCRAPED}))", "slowest"),
        Query(f"avg(scrape_duration_seconds and on (job, instance) ({SCRAPED}))", "mean"),
        unit=SECONDS,
        width=8,
    ),
)

UNDERSTOOD = (
    graph(
        "Log lines read",
        "No good or bad: how much the daemons and servers write.",
        Query("sum by (log) (rate(mps_control_log_lines_total[$__rate_interval]))", "{{log}}.log"),
        unit=PER_SECOND,
        width=7,
        none="No log is read.",
    ),
    graph(
        "Lines of an unknown kind, per hour",
        "Good: 0. When it grows after an update, the new driver words its log differently, and "
        "incidents may go unseen. The dashed line is where MpsLogWordingUnknown calls.",
        Query(
            "topk(5, rate(mps_control_log_unrecognized_lines_total[$__rate_interval]) * 3600 > 0)",
            "{{instance}} {{daemon}} {{log}}.log",
        ),
        limit=UNKNOWN_LINES,
        width=7,
        none="No unknown line in this time range.",
    ),
    ranking(
        "Size of the logs",
        "Good: green; red is where MpsControlLogLarge calls. Nothing rotates them by itself, and "
        "only copytruncate works. The ten largest.",
        Query("topk(10, mps_control_log_size_bytes)", "{{instance}} {{log}}.log {{daemon}}"),
        unit=BYTES,
        steps=at_most(LOG_LARGE),
        width=10,
        none="no log",
    ),
)

DAEMON_COST = (
    graph(
        "Time of the daemons' answers",
        "Good: milliseconds. All queries of one collection; the slowest host. While the daemon "
        "answers the exporter it answers nobody else.",
        Query("max(mps_control_query_duration_seconds)", "slowest"),
        Query("avg(mps_control_query_duration_seconds)", "mean"),
        unit=SECONDS,
        width=8,
        none="No daemon.",
    ),
    graph(
        "Queries that failed, by reason",
        "Good: 0. After one retry. timeout: the daemon hangs, or drains. absent: it is gone.",
        Query(
            "sum by (reason) (rate(mps_control_query_failures_total[$__rate_interval]))",
            "{{reason}}",
        ),
        unit=PER_SECOND,
        width=8,
        none="No daemon.",
    ),
    graph(
        "Queries and the log lines that they cost",
        "Good: few. Each query makes the daemon write; the lines are those of all users of the "
        "control tool.",
        Query("sum(rate(mps_control_queries_total[$__rate_interval]))", "queries"),
        Query("sum(rate(mps_control_log_query_lines_total[$__rate_interval]))", "log lines"),
        unit=PER_SECOND,
        width=8,
        none="No daemon.",
    ),
)

HOST_COST = (
    share_graph(
        "Processor time",
        "Good: below 2 % of a core. The hungriest exporter, and the mean.",
        Query(
            "max(rate(process_cpu_seconds_total[$__rate_interval])"
            f" and on (job, instance) ({SCRAPED}))",
            "most",
        ),
        Query(
            "avg(rate(process_cpu_seconds_total[$__rate_interval])"
            f" and on (job, instance) ({SCRAPED}))",
            "mean",
        ),
        top=0.02,
        width=8,
        none="The exporters' own metrics are switched off.",
    ),
    graph(
        "Memory",
        "Good: flat. The largest exporter, and the mean.",
        Query(f"max(process_resident_memory_bytes and on (job, instance) ({SCRAPED}))", "most"),
        Query(f"avg(process_resident_memory_bytes and on (job, instance) ({SCRAPED}))", "mean"),
        unit=BYTES,
        width=8,
        none="The exporters' own metrics are switched off.",
    ),
    graph(
        "Samples of a scrape",
        "Good: hundreds, and about 20 for each client. What one host costs Prometheus; the "
        "largest, and the mean.",
        Query(f"max(scrape_samples_scraped and on (job, instance) ({SCRAPED}))", "most"),
        Query(f"avg(scrape_samples_scraped and on (job, instance) ({SCRAPED}))", "mean"),
        width=8,
    ),
)

WHICH = table(
    "Exporters",
    "Good: one version. At most 100 exporters, those with most failing sources first.",
    (
        "topk(100, sum by (job, instance) (1 - mps_scrape_collector_success))",
        "max by (job, instance, version, revision, pythonversion) (mps_exporter_build_info)",
        f"max by (job, instance) (scrape_duration_seconds and on (job, instance) ({SCRAPED}))",
        f"max by (job, instance) (scrape_samples_scraped and on (job, instance) ({SCRAPED}))",
        "sum by (job, instance) (1 - mps_control_log_readable) > 0",
    ),
    (
        Column("Host", "instance", links=(to_host("mps-host", "The host"),)),
        Column("Failing sources", "A", steps=at_most(1)),
        Column("Unreadable logs", "E", steps=at_most(1)),
        Column("Scrape", "C", unit=SECONDS),
        Column("Samples", "D"),
        Column("Version", "version"),
        Column("Revision", "revision"),
        Column("Python", "pythonversion"),
        Column("Up", "B", states=(State(1, "yes", GOOD),), width=60),
        Column("Job", "job"),
    ),
    sort="Failing sources",
    none="No exporter is scraped.",
    height=8,
)

BOARD = Board(
    uid="mps-exporter",
    name="Exporter",
    description="Whether the monitor itself is well, sees everything, and costs little.",
    variables=(job(), instance()),
    rows=(
        Row("Can these dashboards be believed?", TILES),
        Row("Is everything read, and in time?", READ),
        Row("Are the logs understood?", UNDERSTOOD),
        Row("What does it cost the daemons?", DAEMON_COST),
        Row("What does it cost the host and Prometheus?", HOST_COST),
        Row("Which exporter?", (WHICH,)),
    ),
)
