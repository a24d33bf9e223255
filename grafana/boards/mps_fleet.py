"""All hosts: which are in trouble, who waits, what is there, where is GPU time wasted."""

from __future__ import annotations

from grafana import style
from grafana.board import Board, Row, instance, job
from grafana.boards import shared
from grafana.panels import Column, Query, hidden, numbers_tile, ranking, status_history, table, tile
from grafana.promql import new_in_range

CRASHES = 'mps_server_exits_total{cause=~"crashed|start_failed"}'
NOTHING = "0 * count(mps_exporter_build_info)"
STATE = shared.host_state(f"{shared.TARGETS} == 0")

TILES = (
    tile(
        "Unreachable",
        "Healthy: 0. Exporters that Prometheus cannot scrape. Nothing is known about their hosts.",
        shared.NOT_SCRAPED,
        steps=style.at_most(1),
        links=[shared.to_board("mps-exporter", "Exporters")],
    ),
    tile(
        "Daemons",
        "Healthy: 0. Unhealthy control daemons: they are absent, hang, refuse, or are draining "
        "after `quit`. While a daemon hangs, CUDA programs that start hang too.",
        "sum(1 - mps_control_up)",
        steps=style.at_most(1),
    ),
    tile(
        "Servers",
        "Healthy: 0. Unhealthy servers: they refuse new clients after a fault, or are ghosts: "
        "started for a client that died in the queue, and the daemon hangs until they are killed.",
        f"count({shared.SERVER_TROUBLE}) or {NOTHING}",
        steps=style.at_most(1),
        links=[shared.to_board("mps-incidents", "Incidents")],
    ),
    tile(
        "GPUs",
        "Healthy: 0. Unhealthy GPUs: they do not respond, the driver wants them reset, or their "
        "memory could not be repaired.",
        f"count({shared.GPU_TROUBLE}) or {NOTHING}",
        steps=style.at_most(1),
    ),
    tile(
        "Waiting",
        "Healthy: 0. Programs that hang in cuInit because another user's server holds their GPU.",
        f"sum{shared.WAITING} or {NOTHING}",
        steps=style.noticed_from(1),
    ),
    shared.events_tile(
        "Clients lost",
        "Healthy: 0. Programs that MPS took down in this time range: their server crashed, their "
        "daemon died, or they or another client caused a fatal GPU error.",
        "mps_client_losses_total",
        NOTHING,
        links=[shared.to_board("mps-incidents", "Who lost clients?")],
    ),
)

HOST_TABLE = table(
    "Hosts, worst first",
    "Healthy: all green. The worst that is known about each host, and its numbers; at most 100 "
    "hosts, worst first. Idle share: of the time, in which a user waited and nobody was connected, "
    "because of a hand-over. Grey is unreachable: nothing is known.",
    (
        f"topk(100, {STATE})",
        f"sum by ({shared.HOSTS}) {shared.WAITING} > 0",
        f"max by ({shared.HOSTS}) ({shared.WAIT})",
        f"{new_in_range('mps_client_losses_total', shared.HOSTS)} > 0",
        f"{new_in_range(CRASHES, shared.HOSTS)} > 0",
        f"max by ({shared.HOSTS}) (increase(mps_uid_handover_idle_seconds_total[$__range]))"
        " / $__range_s",
        f"sum by ({shared.HOSTS}) (mps_server_clients)",
        f"avg by ({shared.HOSTS}) {shared.UTILIZATION}",
        f"avg by ({shared.HOSTS}) {shared.SM_ACTIVITY}",
    ),
    (
        Column("State", "A", states=style.HOST_STATES, width=165),
        Column(
            "Host",
            "instance",
            links=(
                shared.to_host("mps-host", "This host"),
                shared.to_host("mps-sharing", "Who holds the GPU and who waits"),
                shared.to_host("mps-incidents", "Its incidents"),
                shared.to_host("mps-gpu", "Its GPUs"),
                shared.to_host("mps-exporter", "Its exporter: what is not monitored"),
            ),
        ),
        Column("Waiting", "B", steps=style.noticed_from(1), width=75),
        Column("Longest wait", "C", unit=style.SECONDS, steps=shared.WAIT_STEPS, width=110),
        Column("Lost", "D", steps=style.at_most(1), width=60, decimals=0),
        Column("Crashes", "E", steps=style.at_most(1), width=75, decimals=0),
        Column(
            "Idle share",
            "F",
            unit=style.SHARE,
            steps=style.noticed_from(shared.IDLE_WARN),
            width=80,
            decimals=1,
        ),
        Column("Clients", "G", width=70),
        Column("Utilization", "H", unit=style.SHARE, gauge=True, decimals=0, width=90),
        Column("SM activity", "I", unit=style.SHARE, gauge=True, decimals=0, width=90),
        *hidden("job"),
    ),
    sort="State",
    none="No exporter is scraped.",
    found=shared.TARGETS,
    height=10,
)

_SEVERITIES = (style.State(2, "critical", style.BAD), style.State(1, "warning", style.WARN))
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
        Column("Alert", "alertname", width=200, links=(shared.to_runbook(),)),
        Column("Host", "instance", width=170, links=(shared.to_host("mps-host", "This host"),)),
        Column("Since", "B", unit=style.AGO, width=140),
        Column("What to do first", "action", texts=tuple(style.first_steps().items())),
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
_DOWN = f"min_over_time(up[$__range] @ end()) == 0 and on (job) {shared.SEEN}"
_SILENT = f"count by ({shared.HOSTS}) ({_DOWN}) * 0 + 12"
_WORST = f"{_SILENT} or max_over_time(({shared.host_state('')})[$__range:$__interval] @ end())"

HISTORY = status_history(
    "Worst state of each host",
    "Healthy: green throughout. A row for each host, a cell for each step; the 60 hosts that were "
    "worst in this time range. Grey is unreachable, grey-blue has no MPS. A gap is a time before "
    "the exporter was known.",
    Query(f"({STATE}) and on ({shared.HOSTS}) topk(60, {_WORST})", "{{instance}}"),
    states=style.HOST_STATES,
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
        ("count(mps_exporter_build_info)", "hosts", style.COUNT),
        (_GPUS, "GPUs", style.COUNT),
        (f"({_IN_USE} or 0 * {_GPUS}) / {_GPUS}", "of GPUs in use", style.SHARE),
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
            f"topk(20, max by ({shared.USERS}) (time() - mps_uid_waiting_since_timestamp_seconds))",
            f"max by ({shared.USERS}) (mps_uid_waiting_clients > 0)",
            f"max by ({shared.USERS}) (mps_uid_waiting_dead_clients > 0)",
        ),
        (
            Column("User", "uid", width=130),
            Column("Host", "instance", links=(shared.to_host("mps-sharing", "Who holds the GPU"),)),
            Column("Waiting for", "A", unit=style.SECONDS, steps=shared.WAIT_STEPS, width=110),
            Column("Clients", "B", width=75),
            Column("Dead", "C", steps=style.at_most(1), width=65),
            Column("Daemon", "daemon"),
            *hidden("job"),
        ),
        sort="Waiting for",
        none="No wait is known.",
        height=6,
    ),
)

WASTE = (
    shared.utilization_and_activity("job"),
    ranking(
        "Busy but underused GPUs",
        "Healthy: short bars. Utilization minus SM activity, the mean of a host's GPUs: a kernel "
        "ran while the rest of the GPU was idle. The five widest gaps.",
        Query(
            f"topk(5, avg by (instance) {shared.UTILIZATION}"
            f" - avg by (instance) {shared.SM_ACTIVITY} > 0)",
            "{{instance}}",
        ),
        unit=style.SHARE,
        top=1,
        width=12,
        links=[shared.to_host_of_series("mps-host", "This host")],
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
