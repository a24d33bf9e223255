"""All hosts: which are in trouble, who waits, what is there, where is GPU time wasted."""

from __future__ import annotations

from grafana.board import Board, Row, instance, job
from grafana.boards.shared import (
    GPU_TROUBLE,
    HOSTS,
    IDLE_WARN,
    NOT_SCRAPED,
    SEEN,
    SERVER_TROUBLE,
    SM_ACTIVITY,
    TARGETS,
    USERS,
    UTILIZATION,
    WAIT,
    WAIT_BAD,
    WAIT_WARN,
    WAITING,
    events_tile,
    host_state,
    to_board,
    to_host,
    to_host_of_series,
    to_runbook,
    utilization_and_activity,
)
from grafana.panels import Column, Query, hidden, numbers_tile, ranking, status_history, table, tile
from grafana.promql import new_in_range
from grafana.style import (
    AGO,
    BAD,
    COUNT,
    HOST_STATES,
    SECONDS,
    SHARE,
    WARN,
    State,
    at_most,
    first_steps,
    noticed_from,
)

CRASHES = 'mps_server_exits_total{cause=~"crashed|start_failed"}'
NOTHING = "0 * count(mps_exporter_build_info)"
STATE = host_state(f"{TARGETS} == 0")

TILES = (
    tile(
        "Unreachable",
        "Healthy: 0. Exporters that Prometheus cannot scrape. Nothing is known about their hosts.",
        NOT_SCRAPED,
        steps=at_most(1),
        links=[to_board("mps-exporter", "Exporters")],
    ),
    tile(
        "Daemons",
        "Healthy: 0. Unhealthy control daemons: they are absent, hang, refuse, or are draining "
        "after `quit`. While a daemon hangs, CUDA programs that start hang too.",
        "sum(1 - mps_control_up)",
        steps=at_most(1),
    ),
    tile(
        "Servers",
        "Healthy: 0. Unhealthy servers: they refuse new clients after a fault, or are ghosts: "
        "started for a client that died in the queue, and the daemon hangs until they are killed.",
        f"count({SERVER_TROUBLE}) or {NOTHING}",
        steps=at_most(1),
        links=[to_board("mps-incidents", "Incidents")],
    ),
    tile(
        "GPUs",
        "Healthy: 0. Unhealthy GPUs: they do not respond, the driver wants them reset, or their "
        "memory could not be repaired.",
        f"count({GPU_TROUBLE}) or {NOTHING}",
        steps=at_most(1),
    ),
    tile(
        "Waiting",
        "Healthy: 0. Programs that hang in cuInit because another user's server holds their GPU.",
        f"sum{WAITING} or {NOTHING}",
        steps=noticed_from(1),
    ),
    events_tile(
        "Clients lost",
        "Healthy: 0. Programs that MPS took down in this time range: their server crashed, their "
        "daemon died, or they or another client caused a fatal GPU error.",
        "mps_client_losses_total",
        NOTHING,
        links=[to_board("mps-incidents", "Who lost clients?")],
    ),
)

HOST_TABLE = table(
    "Hosts, worst first",
    "Healthy: all green. The worst that is known about each host, and its numbers; at most 100 "
    "hosts, worst first. Idle share: of the time, in which a user waited and nobody was connected, "
    "because of a hand-over. Grey is unreachable: nothing is known.",
    (
        f"topk(100, {STATE})",
        f"sum by ({HOSTS}) {WAITING} > 0",
        f"max by ({HOSTS}) ({WAIT})",
        f"{new_in_range('mps_client_losses_total', HOSTS)} > 0",
        f"{new_in_range(CRASHES, HOSTS)} > 0",
        f"max by ({HOSTS}) (increase(mps_uid_handover_idle_seconds_total[$__range])) / $__range_s",
        f"sum by ({HOSTS}) (mps_server_clients)",
        f"avg by ({HOSTS}) {UTILIZATION}",
        f"avg by ({HOSTS}) {SM_ACTIVITY}",
    ),
    (
        Column("State", "A", states=HOST_STATES, width=165),
        Column(
            "Host",
            "instance",
            links=(
                to_host("mps-host", "This host"),
                to_host("mps-sharing", "Who holds the GPU and who waits"),
                to_host("mps-incidents", "Its incidents"),
                to_host("mps-gpu", "Its GPUs"),
                to_host("mps-exporter", "Its exporter: what is not monitored"),
            ),
        ),
        Column("Waiting", "B", steps=noticed_from(1), width=75),
        Column("Longest wait", "C", unit=SECONDS, steps=at_most(WAIT_WARN, WAIT_BAD), width=110),
        Column("Lost", "D", steps=at_most(1), width=60, decimals=0),
        Column("Crashes", "E", steps=at_most(1), width=75, decimals=0),
        Column("Idle share", "F", unit=SHARE, steps=noticed_from(IDLE_WARN), width=80, decimals=1),
        Column("Clients", "G", width=70),
        Column("Utilization", "H", unit=SHARE, gauge=True, decimals=0, width=90),
        Column("SM activity", "I", unit=SHARE, gauge=True, decimals=0, width=90),
        *hidden("job"),
    ),
    sort="State",
    none="No exporter is scraped.",
    found=TARGETS,
    height=10,
)

_SEVERITIES = (State(2, "critical", BAD), State(1, "warning", WARN))
_WHERE = "alertname, job, instance, daemon, server, gpu, uid"
_FIRING = 'ALERTS{alertname=~"Mps.*", alertstate="firing", severity=~"critical|warning"}'
_RANK = " or ".join(
    f'ALERTS{{alertname=~"Mps.*", alertstate="firing", severity="{severity.text}"}}'
    f" * {severity.code}"
    for severity in _SEVERITIES
)


def _with_action(expr: str) -> str:
    return f'label_replace({expr}, "action", "$1", "alertname", "(.*)")'


_SINCE = (
    f"max by ({_WHERE}) (ALERTS_FOR_STATE"
    f'{{alertname=~"Mps.*"}} and ignoring (alertstate) {_FIRING}) * 1000'
)

ALERTS = table(
    "Firing alerts",
    "Healthy: none. Critical alerts and warnings: where, since when, and what to do first; at most "
    "50. The alert's name links to its runbook. Needs this project's rules in Prometheus; without "
    "them the tiles above still work.",
    (_with_action(f"topk(50, max by ({_WHERE}) ({_RANK}))"), _with_action(_SINCE)),
    (
        Column("Severity", "A", states=_SEVERITIES, width=95),
        Column("Alert", "alertname", width=200, links=(to_runbook(),)),
        Column("Host", "instance", width=170, links=(to_host("mps-host", "This host"),)),
        Column("Since", "B", unit=AGO, width=140),
        Column("What to do first", "action", texts=tuple(first_steps().items())),
        *hidden("uid", "gpu", "daemon", "server", "job"),
    ),
    sort="Severity",
    none="No alert is firing.",
    found=_FIRING,
    height=10,
    two_lines=True,
)

# The worst of the whole range. The expression for unreachable hosts is outside of the subquery: in
# a subquery with @, Prometheus 2.42 evaluates a second @ before the range if the range is aligned
# to the step, and finds no unreachable host of a job that is younger than the range.
_SILENT = (
    f"count by ({HOSTS}) (min_over_time(up[$__range] @ end()) == 0 and on (job) {SEEN}) * 0 + 12"
)
_WORST = f"{_SILENT} or max_over_time(({host_state('')})[$__range:$__interval] @ end())"

HISTORY = status_history(
    "Worst state of each host",
    "Healthy: green throughout. A row for each host, a cell for each step; the 60 hosts that were "
    "worst in this time range. Grey is unreachable, grey-blue has no MPS. A gap is a time before "
    "the exporter was known.",
    Query(f"({STATE}) and on ({HOSTS}) topk(60, {_WORST})", "{{instance}}"),
    states=HOST_STATES,
    height=14,
)

_IN_USE = 'count(sum by (job, instance, uuid) (mps_gpu_processes{kind!~"mps_server|graphics"}) > 0)'
_GPUS = 'sum(mps_gpu_up{uuid!~"MIG-.*"})'

INVENTORY = (
    numbers_tile(
        "Hosts and GPUs",
        "For information: hosts whose exporter responds; GPUs that respond (MIG instances count "
        "as their GPU); and the share of GPUs on which a compute process runs now, with or "
        "without MPS.",
        ("count(mps_exporter_build_info)", "hosts", COUNT),
        (_GPUS, "GPUs", COUNT),
        (f"({_IN_USE} or 0 * {_GPUS}) / {_GPUS}", "of GPUs in use", SHARE),
        none="none",
    ),
    table(
        "Driver versions",
        "Healthy: one. How many hosts and GPUs have which driver; the 20 most common.",
        (
            "topk(20, count by (driver_version) (count by (job, instance, driver_version)"
            " (mps_gpu_info)))",
            "count by (driver_version) (count by (job, instance, uuid, driver_version)"
            ' (mps_gpu_info{uuid!~"MIG-.*"}))',
        ),
        (
            Column("Driver", "driver_version"),
            Column("Hosts", "A", width=90),
            Column("GPUs", "B", width=90),
        ),
        sort="Hosts",
        none="No GPU is known.",
        width=12,
        height=5,
    ),
)

WAITS = (
    table(
        "Users waiting now",
        "Healthy: none. Whose programs hang in cuInit, where and for how long; the 20 longest "
        "waits. Dead: the process is gone, and the daemon will hang when its turn comes.",
        (
            f"topk(20, max by ({USERS}) (time() - mps_uid_waiting_since_timestamp_seconds))",
            f"max by ({USERS}) (mps_uid_waiting_clients > 0)",
            f"max by ({USERS}) (mps_uid_waiting_dead_clients > 0)",
        ),
        (
            Column("User", "uid", width=130),
            Column("Host", "instance", links=(to_host("mps-sharing", "Who holds the GPU"),)),
            Column("Waiting for", "A", unit=SECONDS, steps=at_most(WAIT_WARN, WAIT_BAD), width=110),
            Column("Clients", "B", width=75),
            Column("Dead", "C", steps=at_most(1), width=65),
            Column("Daemon", "daemon"),
            *hidden("job"),
        ),
        sort="Waiting for",
        none="No wait is known.",
        height=6,
    ),
)

WASTE = (
    utilization_and_activity("job"),
    ranking(
        "Busy but underused GPUs",
        "Healthy: short bars. Utilization minus SM activity, the mean of a host's GPUs: a kernel "
        "ran while the rest of the GPU was idle. The five widest gaps.",
        Query(
            f"topk(5, avg by (instance) {UTILIZATION} - avg by (instance) {SM_ACTIVITY} > 0)",
            "{{instance}}",
        ),
        unit=SHARE,
        top=1,
        width=12,
        links=[to_host_of_series("mps-host", "This host")],
        none="no gap is known",
    ),
)

BOARD = Board(
    uid="mps-fleet",
    name="Fleet",
    description="Which hosts are in trouble, who waits, and where GPU time is wasted.",
    variables=(job(), instance()),
    period="now-3h",
    rows=(
        Row("How many are unhealthy?", TILES),
        Row("Which hosts are in trouble?", (HOST_TABLE,)),
        Row("What is wrong, and what to do?", (ALERTS,)),
        Row("Since when?", (HISTORY,)),
        Row("Who is waiting?", WAITS, collapsed=True),
        Row("What is in the fleet, and is it well used?", (*INVENTORY, *WASTE), collapsed=True),
    ),
)
