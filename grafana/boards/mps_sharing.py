"""Who holds the GPU, who waits and how long, what hand-overs cost, and whether MPS is worth it."""

from __future__ import annotations

from grafana.board import Board, Row, Variable, instance, job, source_tile
from grafana.boards.shared import (
    COMMITTED_NOTICE,
    IDLE_WARN,
    LONGEST_WAIT,
    WAIT_BAD,
    WAIT_WARN,
    WAITING,
    to_user,
    utilization_with_activity,
)
from grafana.panels import (
    Column,
    Query,
    causes_alike,
    color_of,
    events,
    graph,
    heatmap,
    names_tile,
    override,
    ranking,
    share_graph,
    table,
    tile,
    timeline,
    users_alike,
)
from grafana.promql import grown_in_range, new_in_range, new_in_step
from grafana.style import (
    AGO,
    BAD,
    HOLDER_STATES,
    QUIET,
    SECONDS,
    USED,
    at_most,
    noticed_from,
)

USERS = "job, instance, daemon, uid"
DAEMONS = "job, instance, daemon"

# What each user does, as HOLDER_STATES number it; the first that fits counts.
HOLDERS = (
    f"max by ({USERS}) ("
    f"(count by ({USERS}) (mps_client_info) > 0) * 0 + 3"
    f" or (sum by ({USERS}) (mps_uid_waiting_clients) > 0) * 0 + 2"
    f" or count by ({USERS}) (mps_server_info) * 0 + 4"
    f" and on ({DAEMONS}) sum by ({DAEMONS}) (mps_uid_waiting_clients) > 0"
    f" or count by ({USERS}) (mps_server_info) * 0 + 1)"
)

IDLE_TIME = grown_in_range("mps_uid_handover_idle_seconds_total", "")

TILES = (
    names_tile(
        "Who holds it",
        "No good or bad: users who have clients connected now, one at a time for each daemon.",
        ("count by (uid) (mps_client_info)", "uid {{uid}}", USED),
        ("count(mps_control_up) unless on () count(mps_client_info)", "nobody", QUIET),
        none="no daemon",
    ),
    tile(
        "Waiting",
        "Good: 0. Programs that hang in cuInit until the holder's last client has left.",
        f"sum{WAITING} or 0 * sum(mps_control_up)",
        steps=noticed_from(1),
        none="no daemon",
    ),
    tile(
        "Longest wait",
        "Good: seconds, the price of a hand-over. Orange and red are where the alerts "
        "MpsUidWaitLong and MpsUidStarved call.",
        f"max({LONGEST_WAIT})",
        SECONDS,
        at_most(WAIT_WARN, WAIT_BAD),
        none="no wait seen",
    ),
    tile(
        "Waits, p95",
        "Good: below a minute, the longest back-off of a hand-over. 95 of 100 waits that ended in "
        "this time range took at most so long, estimated from a histogram's buckets.",
        f"histogram_quantile(0.95, {new_in_range('mps_uid_wait_seconds_bucket', 'le')}) >= 0",
        SECONDS,
        at_most(WAIT_WARN, WAIT_BAD),
        none="no wait",
    ),
    tile(
        "Hand-overs",
        "Good: few. How often the GPU went to a user who had waited, in this time range.",
        new_in_range("mps_uid_handovers_total", ""),
        decimals=0,
        none="no daemon",
    ),
    tile(
        "GPU time lost",
        "Good: 0 s. Time in this range in which somebody waited and nobody was connected, because "
        "the daemon was backing off before it replaced an idle server.",
        IDLE_TIME,
        SECONDS,
        noticed_from(1),
        none="no daemon",
    ),
    tile(
        "Dead in queue",
        "Good: 0. Queued clients whose process is gone: when their turn comes the daemon starts "
        "a server for nobody, and hangs on it until that server is killed.",
        "sum(mps_uid_waiting_dead_clients) or 0 * sum(mps_control_up)",
        steps=at_most(1),
        none="no daemon",
    ),
    source_tile(),
)

WAIT_LENGTHS = (
    heatmap(
        "Waits that ended, by how long they took",
        "Good: all in the lowest rows. Each cell is waits that ended since the cell before; the "
        "more it stands out, the more. Cells high up are users who stood still for minutes "
        "or hours.",
        Query(new_in_step("mps_uid_wait_seconds_bucket", "le")),
        none="No wait ended in this time range.",
    ),
    table(
        "Waits of each user",
        "Good: short means. Waits that ended in this time range, those that were given up, and how "
        "often this user's clients were let in while others waited. The 50 users with most waits.",
        (
            f"topk(50, {new_in_range('mps_uid_wait_seconds_count', 'uid')})",
            f"{grown_in_range('mps_uid_wait_seconds_sum', 'uid')}"
            f" / ({new_in_range('mps_uid_wait_seconds_count', 'uid')} > 0)",
            "histogram_quantile(0.95,"
            f" {new_in_range('mps_uid_wait_seconds_bucket', 'uid, le')}) >= 0",
            f"{new_in_range('mps_uid_waits_abandoned_total', 'uid')} > 0",
            f"{new_in_range('mps_uid_overtakes_total', 'uid')} > 0",
            grown_in_range("mps_uid_holding_seconds_total", "uid"),
        ),
        (
            Column("User", "uid", width=80, links=(to_user("${__data.fields.User}"),)),
            Column("Waits", "A", width=70),
            Column("Mean", "B", unit=SECONDS, steps=at_most(WAIT_WARN, WAIT_BAD), width=90),
            Column("95 of 100", "C", unit=SECONDS, steps=at_most(WAIT_WARN, WAIT_BAD), width=95),
            Column("Given up", "D", steps=noticed_from(1), width=90),
            Column("Overtook", "E", steps=noticed_from(1), width=90),
            Column("Held it", "F", unit=SECONDS),
        ),
        sort="Mean",
        none="No user was seen in this time range.",
        width=12,
    ),
)  # fmt: skip

COSTS = (
    share_graph(
        "What the daemon's time was used for",
        "Good: no red. Coloured: a user's clients were connected. Red: somebody waited and nobody "
        "was connected. The rest up to 100 %: nobody wanted it. With several daemons, their mean.",
        Query(
            "sum by (uid) (rate(mps_uid_holding_seconds_total[$__rate_interval]))"
            " / scalar(count(mps_control_up))",
            "uid {{uid}}",
        ),
        Query(
            "sum(rate(mps_uid_handover_idle_seconds_total[$__rate_interval]))"
            " / scalar(count(mps_control_up))",
            "idle, somebody waits",
        ),
        stacked=True,
        overrides=(*users_alike(), color_of("byFrameRefID", "B", BAD, custom__fillOpacity=80)),
        none="No user was seen in this time range.",
    ),
    share_graph(
        "Share of the time lost in hand-overs",
        "Good: 0. The dashed line is where MpsHandoverIdle calls.",
        Query(
            "rate(mps_uid_handover_idle_seconds_total[$__rate_interval])",
            "{{instance}} {{daemon}}",
        ),
        limit=IDLE_WARN,
        top=2 * IDLE_WARN,
        width=6,
        overrides=(color_of("byFrameRefID", "A", BAD, custom__fillOpacity=20),),
        none="No daemon.",
    ),
    graph(
        "The daemon's back-off",
        "Good: low, or nothing. How long the daemon now waits between attempts to replace the "
        "running server; it doubles while clients are connected, and its rest is lost when they "
        "have gone.",
        Query("mps_uid_handover_backoff_seconds", "{{instance}} {{daemon}}"),
        unit=SECONDS,
        width=6,
        overrides=(color_of("byFrameRefID", "A", USED),),
        none="No hand-over was under way.",
    ),
)  # fmt: skip

WORTH = (
    utilization_with_activity("instance, gpu", "GPU {{gpu}} "),
    graph(
        "Processes on the GPUs",
        "Good: clients of MPS, and no direct process beside them: such a process takes turns with "
        "all clients together. Several direct processes and a wide gap at the left: MPS would "
        "let them run at once.",
        Query('sum by (kind) (mps_gpu_processes{kind!="mps_server"})', "{{kind}}"),
        width=6,
        stacked=True,
        overrides=(
            color_of("byName", "mps_client", USED),
            color_of("byName", "direct", BAD),
            color_of("byName", "graphics", QUIET),
        ),
        decimals=0,
        none="No GPU reports its processes.",
    ),
    graph(
        "SM limits, over all SMs",
        "Good: up to 1, where every client can have its share at once. Above, limits overlap, "
        "which is fine while SM activity is low. Dashed: where MpsSmOvercommitted tells.",
        Query("mps_gpu_sm_committed_ratio", "{{instance}} GPU {{gpu}}"),
        unit="none",
        limit=COMMITTED_NOTICE,
        top=COMMITTED_NOTICE,
        width=6,
        overrides=(color_of("byFrameRefID", "A", USED),),
        none="No client is connected.",
    ),
)  # fmt: skip

# The same colour as the connected ones.
WAITS_DASHED = override("byFrameRefID", "B", custom__lineStyle={"fill": "dash", "dash": [6, 6]})
_MINE = '{uid=~"$uid"}'

BOARD = Board(
    uid="mps-sharing",
    name="Sharing",
    description="Who holds the GPU, who waits, how long, what hand-overs cost, and who overtakes.",
    variables=(
        job(),
        instance(everything=False),
        Variable("daemon", "Daemon", "mps_control_state"),
        Variable("uid", "User", "mps_client_connections_total", filters=False),
    ),
    rows=(
        Row("Who has it, and who wants it?", TILES),
        Row("Who held the GPU when, and who waited under it?", (
            timeline(
                "Holders and waiters",
                "A row for each user. Blue: clients are connected. Orange: clients hang in cuInit, "
                "behind whoever is blue above or below. Red: the user's server is idle and others "
                "wait for it to be replaced: time thrown away. Good: no long orange, no red.",
                Query(HOLDERS, "uid {{uid}} · {{daemon}} · {{instance}}"),
                HOLDER_STATES,
                height=9,
            ),
            graph(
                "The queue",
                "Good: empty. Clients that wait, by user.",
                Query("sum by (uid) (mps_uid_waiting_clients)", "uid {{uid}}"),
                stacked=True,
                overrides=users_alike(),
                width=24,
                height=5,
                decimals=0,
                none="Nobody waited in this time range.",
            ),
        )),
        Row("How long are the waits?", WAIT_LENGTHS),
        Row("What do hand-overs cost?", COSTS),
        Row("Who overtakes?", (
            events(
                "Clients let in while others waited, by user",
                "Good: empty. Each is a new client of the holder that went past the queue: as long "
                "as they keep coming, the wait has no end. Each bar is those since the bar before.",
                Query(new_in_step("mps_uid_overtakes_total", "uid"), "uid {{uid}}"),
                overrides=users_alike(),
                width=16,
                none="Nobody overtook in this time range.",
            ),
            ranking(
                "Who overtook most",
                "Good: short. Clients that went past the queue in this time range; ten users.",
                Query(
                    f"topk(10, {new_in_range('mps_uid_overtakes_total', 'uid')} > 0)",
                    "uid {{uid}}",
                ),
                overrides=users_alike(),
                decimals=0,
                height=6,
                none="nobody",
            ),
        )),
        Row("Is MPS worth it here?", WORTH),
        Row("What happened to one user? (choose one above)", (
            graph(
                "Clients of this user",
                "Good: none waiting. Connected and waiting clients of the users chosen above.",
                Query(f"count by (uid) (mps_client_info{_MINE})", "uid {{uid}} connected"),
                Query(f"sum by (uid) (mps_uid_waiting_clients{_MINE})", "uid {{uid}} waiting"),
                overrides=(*users_alike(), WAITS_DASHED),
                width=8,
                decimals=0,
                none="No client of this user in this time range.",
            ),
            events(
                "Clients of this user that were lost or refused",
                "Good: empty. Programs that MPS took down or refused, by cause.",
                Query(new_in_step(f"mps_client_losses_total{_MINE}", "uid, cause"),
                      "uid {{uid}} lost: {{cause}}"),
                Query(new_in_step(f"mps_client_rejections_total{_MINE}", "uid, cause"),
                      "uid {{uid}} refused: {{cause}}"),
                overrides=causes_alike(),
                width=8,
                height=8,
                none="None was lost or refused in this time range.",
            ),
            heatmap(
                "How long this user's sessions last",
                "Good: minutes and more. Sessions that ended, by how long they lasted; each cell "
                "is those since the cell before. Many of seconds mean many hand-overs, or programs "
                "that fail at once.",
                Query(new_in_step(f"mps_client_session_seconds_bucket{_MINE}", "le")),
                width=8,
                none="No session of this user ended in this time range.",
            ),
            table(
                "Programs of this user now",
                "No good or bad: what the users chosen above have connected now; at most 100.",
                (
                    "topk(100, max by (job, instance, daemon, pid, uid, user, command)"
                    " (mps_client_start_time_seconds * on (job, instance, daemon, server, pid)"
                    f" group_left (uid, user, command) mps_client_info{_MINE})) * 1000",
                ),
                (
                    Column("PID", "pid", width=100),
                    Column("User", "uid", width=90),
                    Column("Name", "user", width=140),
                    Column("Program", "command"),
                    Column("Connected", "A", unit=AGO, width=160),
                    Column("Host", "instance"),
                    Column("Daemon", "daemon"),
                    Column("Job", "job", width=140),
                ),
                sort="Connected",
                descending=False,
                none="No program of this user is connected now.",
                height=6,
            ),
        )),
    ),
)  # fmt: skip
