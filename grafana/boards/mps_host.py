"""One host: daemons, servers, clients with their limits beside their use, and the queue."""

from __future__ import annotations

from grafana.board import Board, Row, Variable, instance, job, source_tile
from grafana.boards.shared import (
    CONTEXTS_SHARE,
    CONTEXTS_WARN,
    DAEMON_STATE,
    LONGEST_WAIT,
    MEMORY_WARN,
    SERVER_STATE,
    WAIT_BAD,
    WAIT_WARN,
    WAITING,
    to_board,
    to_user,
    utilization_with_activity,
)
from grafana.panels import (
    Column,
    Query,
    color_of,
    graph,
    names_tile,
    share_graph,
    table,
    tile,
    timeline,
    users_alike,
)
from grafana.style import (
    AGO,
    BAD,
    BYTES,
    DAEMON_STATES,
    QUIET,
    SECONDS,
    SERVER_STATES,
    SHARE,
    USED,
    at_most,
    noticed_from,
)

TILES = (
    tile(
        "Daemon",
        "Good: answering. The worst of this host's control daemons. While it is unresponsive, CUDA "
        "programs that start hang; absent, they run beside MPS, without its limits.",
        f"max({DAEMON_STATE})",
        states=DAEMON_STATES,
        none="no daemon",
        links=[to_board("mps-incidents", "Incidents")],
    ),
    tile(
        "Server",
        "Good: ACTIVE, or none while nobody computes. The worst of this host's servers. In FAULT "
        "it refuses newcomers; a ghost must be killed, or the daemon hangs on it.",
        f"max({SERVER_STATE})",
        states=SERVER_STATES,
        none="none",
        links=[to_board("mps-incidents", "Incidents")],
    ),
    names_tile(
        "Holder",
        "Good: one user for each daemon. Those with a server of their own now; uid 0 is also what "
        "a multi-user server shows.",
        ("count by (uid) (mps_server_info)", "uid {{uid}}", USED),
        ("count(mps_control_up) unless on () count(mps_server_info)", "nobody", QUIET),
        none="no daemon",
    ),
    tile(
        "Clients",
        "No good or bad: programs connected to MPS on this host now.",
        "sum(mps_server_clients) or 0 * sum(mps_control_up)",
        none="no daemon",
    ),
    tile(
        "Contexts used",
        "Good: green. The fullest server's share of the client contexts that it admits on a GPU; "
        "when it is full, the next program fails. Orange is where MpsContextsNearLimit calls.",
        f"max({CONTEXTS_SHARE})",
        SHARE,
        noticed_from(CONTEXTS_WARN),
        none="no client",
        decimals=0,
    ),
    tile(
        "Waiting",
        "Good: 0. Programs that hang in cuInit, because another user's server holds the GPU.",
        f"sum{WAITING} or 0 * sum(mps_control_up)",
        steps=noticed_from(1),
        none="no daemon",
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
    source_tile(),
)

KEYS = "job, instance, daemon, server, pid, gpu, uuid"
CLIENTS = table(
    "Clients and their limits",
    "Good: memory well below its limit. Every program that is connected, its limits, and what it "
    "uses; at most 200. A share is a cap, not a reservation. Limits come "
    "from the client's own settings or from its server's; where that is unknown, they may not be "
    "read and are left out. The link leads to the user's history.",
    (
        f"topk(200, max by ({KEYS}, uid, user, command, slurm_job_id, container_id, limit_source) ("
        "mps_client_contexts * on (job, instance, daemon, server, pid)"
        " group_left (uid, user, command, slurm_job_id, container_id, limit_source)"
        " mps_client_info))",
        f"topk(200, max by ({KEYS}) (mps_client_sm_limit"
        " / on (job, instance, uuid) group_left mps_gpu_sms))",
        f"topk(200, max by ({KEYS}) (mps_client_sm_limit))",
        f"topk(200, max by ({KEYS}) (mps_client_memory_used_bytes))",
        f"topk(200, max by ({KEYS}) (mps_client_memory_limit_bytes))",
        f"topk(200, max by ({KEYS}) (mps_client_memory_used_bytes"
        " / mps_client_memory_limit_bytes))",
        f"topk(200, max by ({KEYS}) (mps_client_contexts * 0 + on (job, instance, daemon, server,"
        " pid) group_left mps_client_start_time_seconds)) * 1000",
    ),
    (
        Column("PID", "pid", width=90),
        Column("User", "uid", width=80, links=(to_user("${__data.fields.User}"),)),
        Column("Name", "user", width=100),
        Column("Program", "command"),
        Column("GPU", "gpu", width=75),
        Column("Contexts", "A", width=85),
        Column("SM share", "B", unit=SHARE, decimals=0, width=90),
        Column("SMs", "C", width=60),
        Column("Memory", "D", unit=BYTES, width=100),
        Column("Memory limit", "E", unit=BYTES, width=110),
        Column("Of its limit", "F", unit=SHARE, steps=noticed_from(MEMORY_WARN), decimals=0,
               width=100),
        Column("Connected", "G", unit=AGO, width=120),
        Column("Limits from", "limit_source", width=125),
        Column("Slurm job", "slurm_job_id", width=90),
        Column("Container", "container_id", width=110),
        Column("Server", "server", width=90),
        Column("Host", "instance", width=130),
        Column("Daemon", "daemon"),
        Column("UUID", "uuid", width=120),
        Column("Job", "job", width=120),
    ),
    sort="Memory",
    none="No client is connected.",
    height=9,
)  # fmt: skip

PER_GPU = (
    utilization_with_activity("instance, gpu", "", width=8),
    share_graph(
        "SM limits of all clients, stacked",
        "Good: up to the dashed line, all the SMs of the GPU: everybody can have their share at "
        "once. Above it limits overlap, and each gets less when all are busy; no harm while SM "
        "activity is low. The colour is the user's; pointing at the graph names the PIDs.",
        Query(
            "sum by (instance, uid, pid) (mps_client_sm_limit"
            " / on (job, instance, uuid) group_left mps_gpu_sms"
            " * on (job, instance, daemon, server, pid) group_left (uid) mps_client_info)",
            "uid {{uid}} · PID {{pid}}",
        ),
        stacked=True,
        limit=1.0,
        overrides=users_alike(),
        width=8,
        legend=False,
        none="No client is connected.",
    ),
    graph(
        "Memory of all clients, stacked",
        "Good: the stack stays below the dashed line, all the memory of the GPU. Grey is what is "
        "used beside MPS clients: the servers' own memory, and programs that bypass MPS.",
        Query(
            "sum by (instance, uid, pid) (mps_client_memory_used_bytes"
            " * on (job, instance, daemon, server, pid) group_left (uid) mps_client_info)",
            "uid {{uid}} · PID {{pid}}",
        ),
        Query(
            "clamp_min(sum by (instance, gpu) (mps_gpu_memory_used_bytes)"
            " - (sum by (instance, gpu) (mps_client_memory_used_bytes)"
            " or 0 * sum by (instance, gpu) (mps_gpu_memory_used_bytes)), 0)",
            "beside the clients",
        ),
        Query("sum by (instance, gpu) (mps_gpu_memory_total_bytes)", "all there is"),
        unit=BYTES,
        stacked=True,
        legend=False,
        width=8,
        overrides=(
            *users_alike(),
            color_of("byFrameRefID", "B", QUIET),
            color_of(
                "byFrameRefID", "C", BAD, custom__fillOpacity=0,
                custom__stacking={"mode": "none", "group": "A"},
                custom__lineStyle={"fill": "dash", "dash": [10, 10]},
            ),
        ),
        none="No GPU reports its memory.",
    ),
)  # fmt: skip

BOARD = Board(
    uid="mps-host",
    name="Host",
    description="One host: daemons, servers, clients with their limits beside their use.",
    variables=(
        job(),
        instance(everything=False),
        Variable("daemon", "Daemon", "mps_control_state"),
        Variable("gpu", "GPU", "mps_gpu_info"),
    ),
    rows=(
        Row("Is this host well?", TILES),
        Row("Since when?", (
            timeline(
                "Daemons and servers",
                "Good: green. A row for each control daemon, and one for the server of each user. "
                "A gap is a time without a server, or without news from this host.",
                Query(
                    f'label_replace({DAEMON_STATE}, "who", "daemon", "", "")'
                    f' or label_replace({SERVER_STATE}, "who", "server of uid $1", "uid", "(.*)")',
                    "{{who}} · {{daemon}} · {{instance}}",
                ),
                (*DAEMON_STATES, *SERVER_STATES),
                height=6,
            ),
        )),
        Row("Who uses it, and within what limits?", (CLIENTS,)),
        Row("GPU $gpu: what does it do, and who may use how much?", PER_GPU, repeat="gpu"),
        Row("Is there room, and who is in the queue?", (
            share_graph(
                "Contexts used, of those admitted",
                "Good: below the dashed line, where MpsContextsNearLimit calls. At 100 % the next "
                "program fails with an error that most take for a broken GPU.",
                Query(f"max by (instance, daemon, gpu) ({CONTEXTS_SHARE})",
                      "GPU {{gpu}} · {{daemon}}"),
                limit=CONTEXTS_WARN,
                overrides=(color_of("byFrameRefID", "A", USED),),
                none="No server.",
            ),
            graph(
                "Clients that wait, by user",
                "Good: empty. Programs that hang in cuInit behind another user's server.",
                Query("sum by (uid) (mps_uid_waiting_clients)", "uid {{uid}}"),
                stacked=True,
                overrides=users_alike(),
                decimals=0,
                none="Nobody waited in this time range.",
            ),
        )),
    ),
)  # fmt: skip
