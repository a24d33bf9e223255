"""All hosts: which are in trouble, who waits, what is there, where is GPU time wasted."""

from dataclasses import replace

from grafana import style
from grafana.board import Board, Row, eventful, instance, job
from grafana.boards import shared
from grafana.panels import (
    USERS_ALIKE,
    Column,
    Panel,
    Query,
    color_of,
    graph,
    hidden,
    strip,
    table,
    tile,
    timeline,
)
from grafana.promql import new_in_range

CRASHES = 'mps_server_exits_total{cause=~"crashed|start_failed"}'

_LONGEST = shared.on_host(f"topk(1, max by (instance, uid) ({shared.WAIT}))")
TILES = strip(
    "How many are in trouble?",
    tile(
        "Healthy hosts (no alert)",
        "Healthy: all. Hosts about which no alert fires, not even advice.",
        f"count(({shared.HOST_STATE}) == 1) or {shared.NOTHING}",
        of=f"count({shared.TARGETS})",
    ),
    shared.NOT_REACHED,
    shared.NO_TARGET,
    tile(
        "Bad daemons",
        "Healthy: 0. Unhealthy control daemons: they are absent, hang, refuse, or are draining "
        "after `quit`. While a daemon hangs, CUDA programs that start for it hang too.",
        "sum(1 - mps_control_up)",
        steps=style.at_most(1),
        of="count(mps_control_up)",
    ),
    tile(
        "Bad servers",
        "Healthy: 0. Servers that refuse new clients after a fault, and ghosts: they accept no "
        "client since one died in the queue; the next hangs the daemon until they are killed.",
        f"count({shared.SERVER_TROUBLE}) or {shared.NOTHING}",
        steps=style.at_most(1),
        of="count(mps_server_info)",
        links=[shared.to_board("mps-incidents", "Incidents")],
    ),
    shared.BAD_GPUS,
    tile(
        "Waiting",
        "Healthy: 0. Programs that hang in cuInit while another user's server holds the GPU.",
        shared.NUMBER_WAITING,
        steps=style.noticed_from(1),
    ),
    tile(
        "Longest wait",
        "Healthy: seconds, the price of a hand-over. Who waits longest, and where.",
        f'label_join({_LONGEST}, "who", " · uid ", "host", "uid") or on () {shared.NOBODY_WAITS}',
        style.DURATION,
        shared.WAIT_STEPS,
        name="{{who}}",
    ),
    shared.events_tile(
        "Lost in range",
        "Healthy: 0. Programs that MPS took down in this time range: their server crashed, "
        "their daemon died, or they or another client caused a fatal GPU error.",
        "mps_client_losses_total",
        links=[shared.to_board("mps-incidents", "Who lost clients?")],
    ),
    width=9,
    height=7,
    titleSize=12,
    valueSize=20,
)

HOST_TABLE = table(
    "Hosts, worst first",
    "Healthy: all green. The worst that is known about each host: its state, its firing alerts, "
    "and what it lost in the last 15 minutes; at most 100 hosts, worst first. Idle share: of the "
    "time, in which a user waited and nobody was connected. Grey: "
    "unreachable. Violet: gone from Prometheus's targets.",
    (
        f"topk(100, {shared.HOST_STATE} or {shared.GONE})",
        f"sum by ({shared.HOSTS}) {shared.WAITING} > 0",
        f"max by ({shared.HOSTS}) ({shared.WAIT})",
        f"{new_in_range('mps_client_losses_total', shared.HOSTS)} > 0",
        f"{new_in_range(CRASHES, shared.HOSTS)} > 0",
        f"max by ({shared.HOSTS}) (increase(mps_uid_handover_idle_seconds_total[$__range]))"
        " / $__range_s",
        f"sum by ({shared.HOSTS}) (mps_server_clients)",
        f"avg by ({shared.HOSTS}) {shared.UTILIZATION}",
        f"avg by ({shared.HOSTS}) {shared.SM_ACTIVITY}",
        f"max by ({shared.HOSTS}) (max_over_time(timestamp(mps_exporter_build_info)"
        f"[$__range:$__interval])) * 1000 unless on ({shared.HOSTS}) up",
    ),
    (
        Column("State", "A", states=style.HOST_STATES, width=160),
        shared.host_column(
            "mps-host", "mps-sharing", "mps-incidents", "mps-gpu", "mps-exporter", width=None
        ),
        Column("Waiting", "B", steps=style.noticed_from(1), width=75),
        Column("Longest wait", "C", unit=style.DURATION, steps=shared.WAIT_STEPS, width=110),
        Column("Lost", "D", steps=style.at_most(1), width=60, decimals=0),
        Column("Crashes", "E", steps=style.at_most(1), width=75, decimals=0),
        Column("Idle share", "F", unit=style.SHARE, steps=shared.IDLE_STEPS, width=80, decimals=1),
        Column("Clients", "G", width=70),
        Column("Utilization", "H", unit=style.SHARE, gauge=True, decimals=0, width=90),
        Column("SM activity", "I", unit=style.SHARE, gauge=True, decimals=0, width=90),
        Column("Gone since", "J", unit=style.AGO, width=120),
        *hidden("job"),
    ),
    sort="State",
    none="No exporter is scraped.",
    found=f"{shared.TARGETS} or {shared.SEEN}",
    height=10,
)

_SEVERITIES = (style.State(2, "critical", style.BAD), style.State(1, "warning", style.WARN))
_WHERE = "alertname, job, instance, daemon, server, gpu, uid"
_RULES = "instance:mps_host_state:worst"
_FIRING = 'ALERTS{alertname=~"Mps.*", alertstate="firing", severity=~"critical|warning"}'
_RANK = " or ".join(
    f'ALERTS{{alertname=~"Mps.*", alertstate="firing", severity="{severity.text}"}}'
    f" * {severity.code}"
    for severity in _SEVERITIES
)


def _with_words(expr: str) -> str:
    """Add the labels `action`, for what to do first, and `object`: alert, user, GPU, server."""
    for label in ("uid", "gpu", "server", "daemon"):
        word = "GPU" if label == "gpu" else label
        expr = f'label_replace({expr}, "{label}", "{word} $1", "{label}", "(.+)")'
    # A phone breaks lines between words only.
    words = f'"object", "$1 $2 $3 $4 $5", "alertname", "Mps{"([A-Z][a-z]+)?" * 4}(.*)"'
    expr = f"label_replace({expr}, {words})"
    joined = f'label_join({expr}, "object", " ", "object", "uid", "gpu", "server", "daemon")'
    return f'label_replace({joined}, "action", "$1", "alertname", "(.*)")'


_FIRING_FOR = (
    f"time() - min by ({_WHERE}) (ALERTS_FOR_STATE"
    f'{{alertname=~"Mps.*"}} and ignoring (alertstate) {_FIRING})'
)

ALERTS = table(
    "Firing alerts",
    "Healthy: none. Critical alerts and warnings: where, for how long, and what to do first; at "
    "most 50, the worst first, of these the oldest. What links to the alert's runbook. Needs "
    "this project's rules in Prometheus.",
    (
        f"{_with_words(f'topk(50, max by ({_WHERE}) ({_RANK}))')}"
        f' or label_replace(NaN * absent({_RULES}), "object",'
        ' "No rules are loaded.", "", "")',
        _with_words(_FIRING_FOR),
    ),
    (
        # The first three are what a phone shows.
        Column("Level", "A", states=_SEVERITIES, width=76),
        shared.host_column("mps-host", "mps-sharing", "mps-incidents", width=105),
        Column("What", "object", width=158, links=(shared.to_runbook(),)),
        Column("For", "B", unit=style.DURATION, width=85),
        Column("What to do first", "action", texts=tuple(style.first_steps().items())),
        *hidden("uid", "gpu", "daemon", "server", "job", "alertname"),
    ),
    sort="Level",
    then="For",
    none="No alert is firing.",
    found=f"{_FIRING} or absent({_RULES})",
    width=15,
    two_lines=True,
)

_STEPS = "max_over_time(instance:mps_host_state:worst[$__interval])"
_WORST = "max_over_time(instance:mps_host_state:worst[$__range] @ end())"

_SHOWN = f"topk(60, {_WORST})"
_LOST = next(state.code for state in style.HOST_STATES if state.text == "clients lost")
"""The first state that is red."""

# Without any series, Grafana shows an error.
_NO_HOST = (
    "label_replace(vector(5) unless on () count(last_over_time(up[$__range] @ end())),"
    ' "instance", "no target in this time range", "", "")'
)

HISTORY = timeline(
    "Worst state of each host",
    "Healthy: green throughout. A row for each host, a cell for the worst of each step; the 60 "
    "hosts that were worst in this time range, those that were red or unreachable first. "
    "Grey is unreachable, violet is gone, grey-blue has no MPS. A gap is a time before the "
    "exporter was known. Without this project's recording rules a cell is the state at the step's "
    "end, of any 60 hosts.",
    Query(f"{_STEPS} and on ({shared.HOSTS}) {_SHOWN} >= {_LOST}", "{{instance}}"),
    Query(
        f"({_STEPS} and on ({shared.HOSTS}) {_SHOWN} < {_LOST}"
        f" or topk(60, ({shared.HOST_STATE}) unless on () count({_WORST}))"
        f" or {shared.GONE} or {_NO_HOST})",
        "{{instance}}",
    ),
    states=style.HOST_STATES,
    height=14,
    cells=True,
)

_ENDED = 'job_le:mps_uid_wait_seconds_bucket:increase1h{instance=~".*",le="%s"}'
_WAITS = f"sum(sum_over_time({_ENDED}[1d:1m]))"


def _by_day(title: str, description: str, *queries: Query, **more: object) -> Panel:
    """Draw a bar for each of the last seven days, which ended at midnight."""
    kept: style.Json = {"bars": True, "width": 8, "min_step": "1d", "legend": "list", **more}
    panel = graph(title, description, *queries, none="No whole day is recorded yet.", **kept)
    return replace(panel, period="7d")


def _gpu_hours(title: str, description: str, recorded: str) -> Panel:
    expr = f'topk(10, sum by (uid) (sum_over_time({recorded}{{instance=~".*"}}[1d:1m])) / 60 > 0)'
    return _by_day(title, description, Query(expr, "uid {{uid}}"), overrides=USERS_ALIKE)


DAYS = (
    _gpu_hours(
        "GPU hours held, by user and day",
        "For information: hours in which a user's clients were connected, times the GPUs of their "
        "daemon; the 10 users with most, on all hosts. Needs this project's recording rules.",
        "job_uid:mps_uid_holding_gpus:avg5m",
    ),
    _gpu_hours(
        "GPU hours waited, by user and day",
        "Healthy: much less than was held. Hours in which a user's clients hung in cuInit, times "
        "the GPUs of the daemon; the 10 users with most, on all hosts. Needs this project's "
        "recording rules.",
        "job_uid:mps_uid_waiting_gpus:sum",
    ),
    _by_day(
        "Waits of at most a minute, by day",
        "Healthy: above the dashed line, 95 %. Share of the waits that ended in the user's turn "
        "within a minute, the longest back-off of a hand-over, on all hosts. Needs this project's "
        "recording rules.",
        Query(f"{_WAITS % '60.0'} / ({_WAITS % '+Inf'} > 0)", "within a minute"),
        unit=style.SHARE,
        top=1.0,
        limit=shared.SHORT_WAITS,
        overrides=[color_of("byFrameRefID", "A", style.USED)],
    ),
)

_WAITS = f"topk(20, max by ({shared.USERS}) ({shared.WAIT}))"
_DEAD = f"max by ({shared.USERS}) (mps_uid_waiting_dead_clients > 0)"
WAITS = (
    table(
        "Users in the queue now",
        "Healthy: none. Whose programs hang in cuInit, where and for how long; the 20 longest "
        "waits. Dead: the process is gone; after its turn the next client hangs the daemon.",
        (
            _WAITS,
            f"max by ({shared.USERS}) (mps_uid_waiting_clients > 0)"
            f" and on ({shared.USERS}) ({_WAITS} or {_DEAD})",
            _DEAD,
        ),
        (
            Column("User", "uid", width=60),
            Column("Waits", "A", unit=style.DURATION, steps=shared.WAIT_STEPS, width=96),
            shared.host_column("mps-sharing", width=None),
            Column("Clients", "B", width=75),
            Column("Dead", "C", steps=style.at_most(1), width=65),
            Column("Daemon", "daemon"),
            *hidden("job"),
        ),
        sort="Waits",
        none="No wait is known.",
        found="mps_uid_waiting_clients > 0",
        height=8,
    ),
)

_GPU = "job, instance, gpu, uuid"
_KNOWN = f" and on ({_GPU}) mps_gpu_up"
WASTE = (
    table(
        "All GPUs",
        "For information: every GPU of the fleet, the least active first; at most 200. A busy GPU "
        "with little SM activity has room for more programs; the next one needs free memory and a "
        "free context of the fullest server. MPS v3 and servers whose logs are not readable do "
        "not tell contexts.",
        (
            f"topk(200, max by ({_GPU}) (mps_gpu_up))",
            f"max by ({_GPU}) ({shared.UTILIZATION})",
            f"max by ({_GPU}) ({shared.SM_ACTIVITY})",
            f"max by ({_GPU}) (mps_gpu_memory_used_bytes / mps_gpu_memory_total_bytes)",
            f"max by ({_GPU}) (mps_gpu_memory_total_bytes - mps_gpu_memory_used_bytes)",
            f"sum by ({_GPU}) (mps_server_client_contexts){_KNOWN}",
            f"min by ({_GPU}) (mps_server_client_contexts_limit - mps_server_client_contexts)"
            f"{_KNOWN}",
            f"max by ({_GPU}) (mps_gpu_sm_committed_ratio){_KNOWN}",
            f"max by ({_GPU}, driver_version) (mps_gpu_info)",
        ),
        (
            shared.host_column("mps-host", width=None),
            Column("GPU", "gpu", width=70),
            shared.responding("A"),
            Column("Utilization", "B", unit=style.SHARE, gauge=True, decimals=0, width=110),
            Column("SM activity", "C", unit=style.SHARE, gauge=True, decimals=0, width=125),
            Column("Memory", "D", unit=style.SHARE, gauge=True, decimals=0, width=110),
            Column("Free memory", "E", unit=style.BYTES, width=110),
            Column("Clients", "F", width=75),
            Column("Free contexts", "G", width=115),
            Column("SMs promised", "H", unit=style.SHARE, decimals=0, width=115),
            Column("Driver", "driver_version", width=105),
            *hidden("uuid", "job"),
        ),
        sort="SM activity",
        descending=False,
        none="No GPU is known.",
        found="mps_gpu_up",
        height=10,
    ),
)

BOARD = Board(
    uid="mps-fleet",
    name="Fleet",
    description="Which hosts are in trouble, who waits, and where GPU time is wasted.",
    variables=(job(), instance(), eventful()),
    period="now-3h",
    rows=(
        Row("What is wrong, and what to do?", (TILES, ALERTS)),
        # "Gone since" has the resolution of a hundredth of the range.
        Row("Which hosts are in trouble?", (replace(HOST_TABLE, points=100),)),
        Row("Who is waiting?", WAITS),
        Row("Since when?", (HISTORY,)),
        Row("Where is room, and is the fleet well used?", WASTE, collapsed=True),
        Row("Who had the GPUs, and who waited?", DAYS, collapsed=True),
    ),
)
