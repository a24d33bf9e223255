"""One host: daemons, servers, clients with their limits and their use."""

from grafana import style
from grafana.board import Board, Row, Variable, instance, job
from grafana.boards import shared
from grafana.panels import (
    USERS_ALIKE,
    Column,
    Query,
    color_of,
    dashed,
    dotted,
    graph,
    hidden,
    share_graph,
    strip,
    table,
    tile,
    timeline,
)

NO_SERVER = style.State(9, "no server", style.QUIET)

TILES = strip(
    "Now",
    tile(
        "State",
        "Healthy: healthy. The worst that is known about this host. Grey: unreachable means that "
        "Prometheus cannot scrape the exporter, and nothing below is known.",
        f"max({shared.HOST_STATE}) or 17 * group({shared.TARGET} == 0)",
        states=style.HOST_STATES,
        none="unreachable",
        links=[shared.to_board("mps-incidents", "Its incidents")],
    ),
    tile(
        "Daemon",
        "Healthy: answering. The worst of this host's control daemons. While it is unresponsive, "
        "CUDA programs that start hang; while it is absent, they run without MPS and its limits.",
        f"max({shared.DAEMON_STATE}) or 0 * count(mps_exporter_build_info)",
        states=style.DAEMON_STATES,
    ),
    tile(
        "Server",
        "Healthy: ACTIVE (with MPS v3 Ready), or none while nobody computes. The worst of this "
        "host's servers. In FAULT it refuses new clients; a ghost serves none, and the daemon "
        "hangs on it until it is killed.",
        f"max({shared.SERVER_STATE}) or 0 * sum(mps_control_up) + {NO_SERVER.code}",
        states=(NO_SERVER, *style.SERVER_STATES),
        no_mps=True,
    ),
    tile(
        "Clients",
        "For information: programs connected to MPS on this host.",
        "sum(mps_server_clients) or (0 * sum(mps_control_up) unless count(mps_server_info))",
        no_mps=True,
    ),
    tile(
        "Waiting",
        "Healthy: 0. Programs that hang in cuInit because another user's server holds the GPU. "
        "Not reported where control.log cannot be read, and by MPS v3.",
        shared.NUMBER_WAITING,
        steps=style.noticed_from(1),
        no_mps=True,
        links=[shared.to_board("mps-sharing", "Who holds the GPU and who waits")],
    ),
    tile(
        "Contexts",
        "Healthy: green. The fullest server's share of the client contexts that it accepts on a "
        "GPU; when it is full, the next program fails. Orange is where MpsContextsNearLimit fires. "
        "Not reported by MPS v3, or where the limit is not known.",
        f"max({shared.CONTEXTS_SHARE}) or (0 * sum(mps_control_up"
        " unless on (job, instance, daemon) mps_named_server_info) unless count(mps_server_info))",
        style.SHARE,
        style.noticed_from(shared.CONTEXTS_WARN),
        decimals=0,
        no_mps=True,
    ),
)

_GPU = "job, instance, gpu, uuid"
GPUS = table(
    "How busy and how full is each GPU?",
    "Healthy: long bars while programs compute, memory below 100 %. Busy: the SM activity, how "
    "much of the GPU worked; of a GPU that does not report it (before Hopper), the share of time "
    "in which any kernel ran. Memory: in use, of clients of MPS and of all others; a GPU that uses "
    "the host's memory does not report it. Programs: client contexts, and programs without MPS.",
    (
        f"topk(100, max by ({_GPU}) (mps_gpu_info))",
        f"max by ({_GPU}) ({shared.SM_ACTIVITY}) or max by ({_GPU}) ({shared.UTILIZATION})",
        f"max by ({_GPU}) (mps_gpu_memory_used_bytes / mps_gpu_memory_total_bytes)",
        f'sum by ({_GPU}) (mps_gpu_processes{{kind!~"mps_server|graphics"}})',
    ),
    (
        Column("GPU", "gpu", width=54),
        Column("Busy", "B", unit=style.SHARE, gauge=True, decimals=0, least=98, none="not known"),
        Column("Memory", "C", unit=style.SHARE, gauge=True, decimals=0, least=98, none="not known"),
        Column("Programs", "D", width=81),
        *hidden("uuid", "instance", "job", "A"),
    ),
    sort="Busy",
    none="-",
    found="mps_gpu_info",
    width=10,
    height=10,
)

DAEMONS = timeline(
    "Daemons and servers",
    "Healthy: green. A row for each control daemon, and one for the server of each user. A gap "
    "is a time without a server. Grey: no MPS, or unreachable.",
    Query(shared.DAEMON_STATE, "{{daemon}}"),
    Query(
        f'label_replace({shared.SERVER_STATE}, "uid", "unknown", "uid", "")',
        "server of uid {{uid}}",
    ),
    Query(f"{shared.NO_DAEMON} unless on () count({shared.DAEMON_STATE})", "this host"),
    states=(*style.DAEMON_STATES, *style.SERVER_STATES),
    height=10,
    width=14,
)

KEYS = "job, instance, daemon, server, pid, gpu, uuid"
_ON_GPUS = "(mps_client_contexts or %s * mps_client_namespace_info)"
"""The GPUs of each client; a v3 daemon does not report the number of contexts."""
CLIENTS = table(
    "Clients and their limits",
    "Healthy: memory well below its limit. Every connected program, its limits and its use; at "
    "most 500. A limit is a cap, not a reservation. The rounded share is what MPS makes of the one "
    "that was set: whole SMs. Where limits may not be read they are left out. The user links to "
    "the user's dashboard.",
    (
        f"topk(500, max by ({KEYS}, uid, user, command, slurm_job_id, container_id, limit_source) ("
        f"{_ON_GPUS % 'NaN'} * on (job, instance, daemon, server, pid)"
        " group_left (uid, user, command, slurm_job_id, container_id, limit_source)"
        " mps_client_info))",
        f"topk(500, max by ({KEYS}) (mps_client_sm_limit"
        " / on (job, instance, uuid) group_left mps_gpu_sms"
        f" or max by ({KEYS}) (0 * {_ON_GPUS % 1})"
        " + on (job, instance, daemon, server, pid)"
        " group_left mps_client_active_thread_ratio))",
        f"topk(500, max by ({KEYS}) (mps_client_sm_limit))",
        f"topk(500, max by ({KEYS}) (mps_client_memory_used_bytes))",
        f"topk(500, max by ({KEYS}) (mps_client_memory_limit_bytes))",
        f"topk(500, max by ({KEYS}) (mps_client_memory_used_bytes"
        " / mps_client_memory_limit_bytes))",
        f"topk(500, max by ({KEYS}) (mps_client_contexts * 0 + on (job, instance, daemon, server,"
        " pid) group_left mps_client_start_time_seconds)) * 1000",
        f"topk(500, max by ({KEYS}, state) (mps_client_contexts * 0 + on (job, instance, daemon,"
        " server, pid) group_left (state) (mps_client_state == 1) or label_replace("
        "mps_client_contexts * 0 unless on (job, instance, daemon, server, pid) mps_client_state"
        ' and on (job, instance, daemon) mps_control_log_readable{log="server"} == 1,'
        ' "state", "active", "", "")))',
    ),
    (
        # Width of a screen of 1366 pixels. With Grafana's menu, the columns up to the job are seen.
        Column("User", "uid", width=72, links=(shared.to_user("${__data.fields.User}"),)),
        Column("Name", "user", width=80),
        Column("Program", "command", least=120),
        Column("State", "state", width=78),
        Column("PID", "pid", width=69),
        Column("GPU", "gpu", width=50),
        Column("Rounded share", "B", unit=style.SHARE, decimals=0, width=74),
        Column("SMs", "C", width=50),
        Column("Memory", "D", unit=style.BYTES, width=95),
        Column("Memory limit", "E", unit=style.BYTES, width=80),
        Column("Limit used", "F", unit=style.SHARE, steps=shared.FULL, decimals=0, width=60),
        Column("Connected", "G", unit=style.AGO, width=116),
        Column("Slurm job", "slurm_job_id", width=78),
        Column("Daemon", "daemon", width=96),
        Column("Limits from", "limit_source", width=85),
        Column("Container", "container_id", width=105),
        *hidden("A", "server", "instance", "uuid", "job"),
    ),
    sort="Memory",
    none="No client with a context is known.",
    found="mps_client_contexts or mps_client_namespace_info",
    height=9,
)

_SHARE_OF_SMS = "mps_client_sm_limit / on (job, instance, uuid) group_left mps_gpu_sms"
_SMS = 'sum by (instance, uid) (gpu_uid:mps_client_sms:avg5m{bound="%s"})'
PER_GPU = (
    graph(
        "SMs of each user, between",
        "For information: each user's clients use at most as many SMs as the solid line says, and "
        "at least as many as the dotted one; MPS does not report the use of one client. "
        "Equal while the user is alone. Mean of 5 minutes, from a recording rule of this project; "
        "Hopper and later.",
        Query(_SMS % "high", "uid {{uid}}, at most"),
        Query(_SMS % "low", "uid {{uid}}, at least"),
        Query("max by (instance) (mps_gpu_sms)", "SMs of the GPU"),
        overrides=(*USERS_ALIKE, dotted("byFrameRefID", "B"), dashed("C", style.BAD)),
        legend="list",
        width=8,
        decimals=0,
        none="No bounds are known.",
    ),
    share_graph(
        "SM limits of clients, stacked",
        "Healthy: up to the dashed line, where all limited clients can have their share at once. "
        "Above it the limits overlap, and each gets less when all are busy. Clients without a "
        "limit are not drawn. Hover for the PIDs.",
        Query(
            f"sum by (instance, uid, pid) (({_SHARE_OF_SMS} < 1)"
            " * on (job, instance, daemon, server, pid) group_left (uid) mps_client_info)",
            "uid {{uid}} · PID {{pid}}",
        ),
        stacked=True,
        limit=1.0,
        overrides=USERS_ALIKE,
        width=8,
        legend="",
        none="No SM limit is known.",
    ),
    graph(
        "Memory of clients, stacked",
        "Healthy: below the dashed line, the memory of the GPU. Grey is memory outside MPS "
        "clients: the servers' own, and programs that bypass MPS.",
        Query(
            "sum by (instance, uid, pid) (mps_client_memory_used_bytes"
            " * on (job, instance, daemon, server, pid) group_left (uid) mps_client_info)",
            "uid {{uid}} · PID {{pid}}",
        ),
        Query(
            "clamp_min(sum by (instance, gpu) (mps_gpu_memory_used_bytes)"
            " - (sum by (instance, gpu) (mps_client_memory_used_bytes)"
            " or 0 * sum by (instance, gpu) (mps_gpu_memory_used_bytes)), 0)",
            "outside MPS clients",
        ),
        Query("sum by (instance, gpu) (mps_gpu_memory_total_bytes)", "total"),
        unit=style.BYTES,
        stacked=True,
        legend="",
        width=8,
        overrides=(
            *USERS_ALIKE,
            color_of("byFrameRefID", "B", style.QUIET),
            dashed("C", style.BAD),
        ),
        none="No GPU reports its memory.",
    ),
)

BOARD = Board(
    uid="mps-host",
    name="Host",
    description="One host: daemons, servers, clients with their limits and their use.",
    variables=(job(), instance(everything=False), Variable("gpu", "GPU", "mps_gpu_info")),
    rows=(
        Row("Is this host healthy?", (TILES,)),
        Row("Busy, and since when?", (GPUS, DAEMONS)),
        Row("Who uses it, and with what limits?", (CLIENTS,)),
        Row("GPU $gpu: how is it used?", PER_GPU, repeat="gpu", collapsed=True),
        Row(
            "Is MPS worth it here?",
            (
                graph(
                    "Processes on the GPUs",
                    "Healthy: clients of MPS, and no direct process with them: a direct process "
                    "takes turns with all clients together. Several direct processes and a wide "
                    "gap between utilization and SM activity (dashboard GPU): MPS could let them "
                    "run at once.",
                    Query(
                        'sum by (kind) (mps_gpu_processes{kind!~"mps_server|graphics"}) > 0',
                        "{{kind}}",
                    ),
                    stacked=True,
                    overrides=(
                        color_of("byName", "mps_client", style.USED),
                        color_of("byName", "direct", "purple"),
                    ),
                    decimals=0,
                    width=24,
                    none="No compute process is known in this time range.",
                ),
            ),
            collapsed=True,
        ),
    ),
)
