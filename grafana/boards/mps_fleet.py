"""All hosts: which are in trouble, where is GPU time thrown away, who waits."""

from __future__ import annotations

from grafana.board import Board, Row, instance, job, source_tile
from grafana.boards.shared import (
    CONTEXTS_SHARE,
    CONTEXTS_WARN,
    IDLE_WARN,
    LONGEST_WAIT,
    NOT_SCRAPED,
    SM_ACTIVITY,
    TARGETS,
    UTILIZATION,
    WAIT_BAD,
    WAIT_WARN,
    WAITING,
    to_board,
    to_host,
    to_runbook,
    utilization_with_activity,
)
from grafana.panels import (
    Column,
    Query,
    causes_alike,
    color_of,
    events,
    graph,
    ranking,
    table,
    tile,
)
from grafana.promql import new_in_range, new_in_step
from grafana.style import (
    AGO,
    BAD,
    NOTICE,
    SECONDS,
    SHARE,
    USED,
    WARN,
    State,
    at_most,
    noticed_from,
)

HOSTS = "job, instance"
CRASHES = 'mps_server_exits_total{cause=~"crashed|start_failed"}'

GPU_TROUBLE = (
    "max by (job, instance, uuid) ("
    "mps_gpu_up == 0"
    ' or mps_gpu_recovery_action{mps_gpu_recovery_action!="none"} == 1'
    " or mps_gpu_row_remap_failure == 1)"
)
SERVER_TROUBLE = (
    "max by (job, instance, daemon, server) (mps_server_ghost == 1"
    ' or mps_server_state{mps_server_state="FAULT"} == 1)'
)

_SIGNS = {
    "exporter": f"({TARGETS} == 0) + 1",
    "daemon": "count by (job, instance) (mps_control_up == 0) > bool 0",
    "server": f"count by (job, instance) ({SERVER_TROUBLE}) > bool 0",
    "wait": f"sum by (job, instance) {WAITING} > 0",
    "gpu": f"count by (job, instance) ({GPU_TROUBLE}) > bool 0",
}
# One for each sign, and 0 for a host that shows none.
SIGNS = "sum by (job, instance) ({})".format(
    " or ".join(
        f'label_replace(({expr}) > bool 0, "sign", "{sign}", "", "")'
        for sign, expr in _SIGNS.items()
    )
    + " or mps_exporter_build_info * 0"
)

TILES = (
    tile(
        "Silent hosts",
        "Good: 0. Exporters that Prometheus cannot reach: of their hosts nothing is known.",
        NOT_SCRAPED,
        steps=at_most(1),
        links=[to_board("mps-exporter", "The exporters' health")],
    ),
    tile(
        "Sick daemons",
        "Good: 0. Control daemons that are gone, hang, refuse, or were asked to quit and wait for "
        "their clients. While one hangs, CUDA programs that start hang too.",
        "sum(1 - mps_control_up)",
        steps=at_most(1),
        none="no daemon",
        links=[to_board("mps-host", "The host")],
    ),
    tile(
        "Sick servers",
        "Good: 0. Servers that refuse newcomers after a fault, and ghosts: servers for clients "
        "that died in the queue, on which the daemon hangs until they are killed.",
        f"count({SERVER_TROUBLE}) or 0 * count(mps_exporter_build_info)",
        steps=at_most(1),
        links=[to_board("mps-incidents", "Incidents")],
    ),
    tile(
        "Sick GPUs",
        "Good: 0. GPUs that answer no more, that the driver wants reset, or whose memory could "
        "not be repaired.",
        f"count({GPU_TROUBLE}) or 0 * count(mps_exporter_build_info)",
        steps=at_most(1),
        links=[to_board("mps-gpu", "The GPUs' health")],
    ),
    tile(
        "Waiting",
        "Good: 0. Programs that hang in cuInit, because another user's server holds their GPU.",
        f"sum{WAITING} or 0 * count(mps_exporter_build_info)",
        steps=noticed_from(1),
        links=[to_board("mps-sharing", "Who waits for whom")],
    ),
    tile(
        "Longest wait",
        "Good: seconds, the price of a hand-over. Orange and red are where the alerts "
        "MpsUidWaitLong and MpsUidStarved call.",
        f"max({LONGEST_WAIT})",
        SECONDS,
        at_most(WAIT_WARN, WAIT_BAD),
        none="no wait seen",
        links=[to_board("mps-sharing", "Who waits for whom")],
    ),
    tile(
        "Clients lost",
        "Good: 0. Programs that MPS took down in this time range: their server crashed, their "
        "daemon died, or they or a neighbour caused a fatal GPU error.",
        f"{new_in_range('mps_client_losses_total', '')} or 0 * count(mps_exporter_build_info)",
        steps=at_most(1),
        decimals=0,
        links=[to_board("mps-incidents", "Who was hit")],
    ),
    source_tile(),
)

_SEVERITIES = (State(3, "critical", BAD), State(2, "warning", WARN), State(1, "info", NOTICE))
_WHERE = "alertname, job, instance, daemon, server, gpu, uid"
_FIRING = 'ALERTS{alertname=~"Mps.*", alertstate="firing"}'
_RANK = " or ".join(
    f'ALERTS{{alertname=~"Mps.*", alertstate="firing", severity="{severity.text}"}}'
    f" * {severity.code}"
    for severity in _SEVERITIES
)

ALERTS = table(
    "Alerts that fire",
    "Good: empty. What is wrong, where, and since when; at most 50. Needs this project's rules in "
    "Prometheus; without them the tiles above still tell.",
    (
        f"topk(50, max by ({_WHERE}) ({_RANK}))",
        f"max by ({_WHERE}) (ALERTS_FOR_STATE{{alertname=~"
        f'"Mps.*"}} and ignoring (alertstate) {_FIRING}) * 1000',
    ),
    (
        Column("Severity", "A", states=_SEVERITIES, width=110),
        Column("Alert", "alertname", width=260, links=(to_runbook(),)),
        Column("Host", "instance", links=(to_host("mps-host", "The host"),)),
        Column("Since", "B", unit=AGO, width=150),
        Column("Daemon", "daemon"),
        Column("User", "uid", width=90),
        Column("GPU", "gpu", width=80),
        Column("Server", "server", width=100),
        Column("Job", "job", width=140),
    ),
    sort="Severity",
    none="No alert fires.",
    height=8,
)  # fmt: skip

HOST_TABLE = table(
    "Hosts, those in trouble first",
    "Good: nothing but clients and green shares. Signs counts the kinds of trouble that a host "
    "has now: not scraped, a daemon, a server or a GPU in trouble, somebody waiting. At most 100 "
    "hosts, those with the most signs.",
    (
        f"topk(100, {SIGNS})",
        "sum by (job, instance) (1 - mps_control_up) > 0",
        f"sum by (job, instance) {WAITING} > 0",
        f"max by (job, instance) ({LONGEST_WAIT})",
        f"{new_in_range('mps_client_losses_total', HOSTS)} > 0",
        f"{new_in_range(CRASHES, HOSTS)} > 0",
        "max by (job, instance) (increase(mps_uid_handover_idle_seconds_total[$__range]))"
        " / $__range_s",
        "sum by (job, instance) (mps_server_clients)",
        f"max by (job, instance) ({CONTEXTS_SHARE})",
        f"avg by (job, instance) {UTILIZATION}",
        f"avg by (job, instance) {SM_ACTIVITY}",
    ),
    (
        Column("Host", "instance", links=(
            to_host("mps-host", "The host"),
            to_host("mps-sharing", "Who holds it, who waits"),
            to_host("mps-incidents", "Its incidents"),
        )),
        Column("Signs", "A", steps=at_most(1), width=85),
        Column("Sick daemons", "B", steps=at_most(1), width=115),
        Column("Waiting", "C", steps=noticed_from(1), width=85),
        Column("Longest wait", "D", unit=SECONDS, steps=at_most(WAIT_WARN, WAIT_BAD), width=110),
        Column("Lost", "E", steps=at_most(1), width=70, decimals=0),
        Column("Crashes", "F", steps=at_most(1), width=90, decimals=0),
        Column("Hand-over idle", "G", unit=SHARE, steps=noticed_from(IDLE_WARN), width=130,
               decimals=1),
        Column("Clients", "H", width=80),
        Column("Contexts", "I", unit=SHARE, steps=noticed_from(CONTEXTS_WARN), width=90,
               decimals=0),
        Column("Utilization", "J", unit=SHARE, gauge=True, decimals=0, width=115),
        Column("SM activity", "K", unit=SHARE, gauge=True, decimals=0, width=115),
        Column("Job", "job", width=110),
    ),
    sort="Signs",
    none="No exporter is scraped.",
    height=10,
)  # fmt: skip

WASTE = (
    utilization_with_activity("job", "", width=8),
    ranking(
        "Idle in hand-overs, by host",
        "Good: short. GPU time of this time range in which somebody waited and nobody was "
        "connected, because the daemon was backing off before it replaced an idle server. The ten "
        "worst hosts.",
        Query(
            "topk(10, sum by (instance) (increase(mps_uid_handover_idle_seconds_total[$__range]))"
            " > 0)",
            "{{instance}}",
        ),
        unit=SECONDS,
        links=[to_board("mps-sharing", "Hand-overs")],
        none="no time lost",
    ),
    ranking(
        "GPUs that look busy and are not, by host",
        "Good: short. Utilization less SM activity, the mean of the host's GPUs: how much of the "
        "time some kernel ran while the rest of the GPU had nothing to do. The ten widest gaps.",
        Query(
            f"topk(10, avg by (instance) {UTILIZATION} - avg by (instance) {SM_ACTIVITY} > 0)",
            "{{instance}}",
        ),
        unit=SHARE,
        top=1,
        decimals=0,
        links=[to_board("mps-sharing", "Is MPS worth it there?")],
        none="no gap",
    ),
)

WAITS = (
    table(
        "Users that wait now",
        "Good: empty. Whose programs hang in cuInit, where, and for how long; the twenty longest. "
        "Dead: the process is gone, and the daemon will hang when its turn comes.",
        (
            "topk(20, max by (job, instance, daemon, uid)"
            " (time() - mps_uid_waiting_since_timestamp_seconds))",
            "max by (job, instance, daemon, uid) (mps_uid_waiting_clients > 0)",
            "max by (job, instance, daemon, uid) (mps_uid_waiting_dead_clients > 0)",
        ),
        (
            Column("User", "uid", width=80),
            Column("Host", "instance", links=(to_host("mps-sharing", "Who holds it"),)),
            Column("Waits for", "A", unit=SECONDS, steps=at_most(WAIT_WARN, WAIT_BAD), width=110),
            Column("Clients", "B", width=75),
            Column("Dead", "C", steps=at_most(1), width=60),
            Column("Daemon", "daemon"),
            Column("Job", "job", width=110),
        ),
        sort="Waits for",
        none="Nobody waits.",
        width=14,
    ),
    graph(
        "Clients connected and clients that wait",
        "Good: no orange. Connected clients share their GPU; waiting ones hang until another "
        "user's last client has left.",
        Query("sum(mps_server_clients)", "connected"),
        Query("sum(mps_uid_waiting_clients)", "waiting"),
        overrides=(
            color_of("byFrameRefID", "A", USED),
            color_of("byFrameRefID", "B", WARN),
        ),
        width=10,
        decimals=0,
    ),
)  # fmt: skip

BOARD = Board(
    uid="mps-fleet",
    name="Fleet",
    description="Which hosts are in trouble, where GPU time is thrown away, and who waits.",
    variables=(job(), instance()),
    rows=(
        Row("Is anything wrong?", TILES),
        Row("What is wrong, and since when?", (ALERTS,)),
        Row("Which hosts are in trouble?", (HOST_TABLE,)),
        Row("Who waits?", WAITS),
        Row("Who was hit?", (
            events(
                "Clients lost, by cause",
                "Good: empty. Each bar is the programs that MPS took down since the bar before.",
                Query(new_in_step("mps_client_losses_total", "cause"), "{{cause}}"),
                overrides=causes_alike(),
            ),
        )),
        Row("Where is GPU time thrown away?", WASTE),
    ),
)  # fmt: skip
