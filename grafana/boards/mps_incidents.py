"""Crashes, faults, lost clients, Xid errors and rejections, on one time axis."""

from grafana import style
from grafana.board import Board, Row, Variable, eventful, instance, job
from grafana.boards import shared
from grafana.panels import (
    CAUSES_ALIKE,
    GPUS_ALIKE,
    Column,
    Query,
    colors_by_query,
    events,
    hidden,
    strip,
    table,
    tile,
    timeline,
)
from grafana.promql import grown_in_range, new_in_range, new_in_step

CRASHED = 'mps_server_exits_total{cause="crashed"}'
START_FAILED = 'mps_server_exits_total{cause="start_failed"}'
DAEMON_DIED = 'mps_server_exits_total{cause="daemon_died"}'
LOSSES = "mps_client_losses_total"
UNFINISHED = "mps_client_unfinished_exits_total"
LOST_BY_IT = 'mps_client_losses_total{cause="unfinished_work"}'
REJECTIONS = "mps_client_rejections_total"
FAULTS = "mps_server_faults_total"
XIDS = "mps_gpu_xid_errors_total"

# A daemon that is no longer there keeps its last events in the time range, as its counters do.
LAST_EXIT = (
    'last_over_time(mps_server_last_exit_timestamp_seconds{cause!~"requested|ghost_ended"}'
    "[$__range])"
)
LAST_FAULT = "last_over_time(mps_server_last_fault_timestamp_seconds[$__range])"
LAST_XID = "last_over_time(mps_gpu_last_xid_timestamp_seconds[$__range])"
LAST_LOSS = "last_over_time(mps_client_last_loss_timestamp_seconds[$__range])"

TILES = strip(
    "In this time range, and the last ever",
    shared.events_tile(
        "Crashes",
        "Healthy: 0. Servers that ended without the orderly lines in their log, in this time "
        "range. Each takes all its clients with it.",
        CRASHED,
    ),
    shared.events_tile(
        "Start errors",
        "Healthy: 0. Servers that ended before they were ready, in this time range. Dozens within "
        "a minute are a crash loop.",
        START_FAILED,
    ),
    shared.events_tile(
        "Fatal errors",
        "Healthy: 0. Errors of a client that its server contained, in this time range. They take "
        "down all other clients on that GPU, too.",
        FAULTS,
    ),
    shared.events_tile(
        "Clients lost", "Healthy: 0. Programs that MPS took down in this time range.", LOSSES
    ),
    shared.events_tile(
        "Refused",
        "Healthy: 0. Programs that MPS did not accept in this time range.",
        REJECTIONS,
        steps=style.noticed_from(1),
    ),
    tile(
        "Most recent",
        "Healthy: none, or long ago. Time since a server last crashed, failed to start, lost its "
        "daemon, or had a fatal GPU error, or a GPU an Xid error.",
        f"time() - max({LAST_FAULT} or {LAST_EXIT} or {LAST_XID})",
        style.DURATION,
        none="none seen",
    ),
)

AXIS = (
    events(
        "Crashes, failed starts, fatal errors",
        "Healthy: empty. Each bar is what happened since the bar before.",
        Query(new_in_step(CRASHED, "instance"), "crashed · {{instance}}"),
        Query(new_in_step(START_FAILED, "instance"), "start failed · {{instance}}"),
        Query(new_in_step(DAEMON_DIED, "instance"), "daemon died · {{instance}}"),
        Query(new_in_step(FAULTS, "instance"), "fatal error · {{instance}}"),
        overrides=colors_by_query(style.BAD, style.WARN, "dark-red", "purple"),
    ),
    events(
        "Clients lost, by cause",
        "Healthy: empty. Programs that were lost: their server crashed, their daemon died, by "
        "their own fault, by another client's, by unfinished work of a client that ended, by a "
        "fault whose cause is not proved, or terminated through the daemon.",
        Query(new_in_step(LOSSES, "instance, cause"), "{{instance}} · {{cause}}"),
        overrides=CAUSES_ALIKE,
    ),
    events(
        "Clients refused, by cause",
        "Healthy: empty. context_limit: the server was full. server_not_ready: mostly, after a "
        "fault. invalid_device, credentials: the program asked for what it may not have.",
        Query(new_in_step(REJECTIONS, "instance, cause"), "{{instance}} · {{cause}}"),
        overrides=CAUSES_ALIKE,
    ),
    events(
        "Xid errors, by code",
        "Healthy: empty. 13, 31 and 43 are mostly a program's own mistake; 48, 63, 64, 79, 94, 95 "
        "and 119 are the hardware's or the driver's.",
        Query(new_in_step(XIDS, "instance, gpu, xid"), "GPU {{gpu}} Xid {{xid}} · {{instance}}"),
        overrides=GPUS_ALIKE,
    ),
)

_CAUSES = (
    ("crashed", "server crashed"),
    ("start_failed", "server start failed"),
    ("daemon_died", "daemon died"),
)
_ENDS = "max by (job, instance, daemon, cause)"
LAST = table(
    "Most recent incidents",
    "Healthy: empty, or long ago. When each kind of incident last happened, also before this time "
    "range; the 100 most recent. Orderly ends and those of ghost servers are left out.",
    (
        "topk(100, "
        f"{_ENDS} ({LAST_EXIT})"
        f' or {_ENDS} (label_replace({LAST_FAULT}, "cause", "fatal GPU error", "", ""))'
        " or max by (job, instance, gpu, cause)"
        f' (label_replace({LAST_XID}, "cause", "Xid $1", "xid", "(.*)"))'
        ") * 1000",
    ),
    (
        Column("When", "A", unit=style.AGO, width=104),
        shared.host_column("mps-host", "mps-gpu", width=122),
        Column("What", "cause", texts=_CAUSES),
        Column("GPU", "gpu", width=80),
        Column("Daemon", "daemon", width=180),
        *hidden("job"),
    ),
    sort="When",
    none="No incident was ever seen here.",
    two_lines=True,
    width=12,
)

# On a phone the first four columns are seen.
_HOST = shared.host_column("mps-host", width=112)
_USER = Column("User", "uid", width=60, links=(shared.to_user("${__data.fields.User}"),))
_LOST = f"{new_in_range(LOSSES, shared.USERS)} > 0"
_BY_WHOM = (
    ("server_crashed", "not known: a crash"),
    ("daemon_died", "not known: daemon died"),
    ("own_fault", "proved: own bad pointer"),
    ("neighbour_fault", "proved: a neighbour"),
    ("unfinished_work", "proved: an ended client"),
    ("unattributed_fault", "not known: a fault"),
    ("terminated", "an administrator"),
)
BLAST = (
    table(
        "Who lost programs, and by whom?",
        "Healthy: none. Users whose programs were lost in this time range, where, how many, and "
        "what is proved about the cause of most of them; at most 50. Last loss there: on that "
        "daemon; of an older exporter its last crash or fault.",
        (
            f"topk(50, {_LOST})",
            f"({_LOST}) * 0 + on ({shared.DAEMONS}) group_left ()"
            f" (max by ({shared.DAEMONS}) ({LAST_LOSS})"
            f" or max by ({shared.DAEMONS}) ({LAST_EXIT} or {LAST_FAULT})) * 1000",
            f"topk by ({shared.USERS}) (1, {new_in_range(LOSSES, f'{shared.USERS}, cause')} > 0)",
        ),
        (
            _HOST,
            _USER,
            Column("Lost in range", "A", steps=style.at_most(1), width=60, decimals=0),
            Column("Mostly by", "cause", texts=_BY_WHOM, least=108),
            Column("Last loss there", "B", unit=style.AGO, width=104),
            Column("Daemon", "daemon", width=180),
            *hidden("job"),
        ),
        sort="Last loss there",
        none="None is known.",
        two_lines=True,
        width=12,
    ),
    table(
        "Losses by unfinished work",
        "Healthy: empty. Users whose clients ended with GPU work in flight in this time range, "
        "where, and how many clients of all users went down with it on that daemon; at most 20. "
        "Terminate clients through the daemon before killing them.",
        (
            f"topk(20, {new_in_range(UNFINISHED, shared.USERS)} > 0)",
            f"sum by ({shared.USERS}) (({new_in_range(UNFINISHED, shared.USERS)} > 0) * 0"
            f" + on ({shared.DAEMONS}) group_left ()"
            f" round({grown_in_range(LOST_BY_IT, shared.DAEMONS)}))",
        ),
        (
            _HOST,
            _USER,
            Column("Exits", "A", width=70, decimals=0),
            Column("Lost in range", "B", steps=style.at_most(1), width=84, decimals=0),
            Column("Daemon", "daemon"),
            *hidden("job"),
        ),
        sort="Lost in range",
        none="None is known.",
        two_lines=True,
        height=5,
    ),
)

# Once for the range, and of single metrics: a subquery of all states takes seconds.
_TROUBLED = (
    f"max by ({shared.USERS}) (last_over_time(mps_server_info[$__range] @ end())"
    " and on (job, instance, daemon, server)"
    " (max_over_time(mps_server_ghost[$__range] @ end()) == 1"
    ' or max_over_time(mps_server_state{mps_server_state="FAULT"}[$__range] @ end()) == 1))'
)

RECOVERY = (
    timeline(
        "Servers in trouble",
        "Healthy: empty or green. A fault lasts milliseconds and is mostly too short to be seen "
        "here. A lasting red is a client that caught the error and stays: end only clients in "
        "state torn_down, and the server recovers. Only servers that were in trouble in this time "
        "range are shown.",
        shared.user_rows(f"{shared.SERVER_STATE} and on ({shared.USERS}) {_TROUBLED}"),
        Query(
            f"count(mps_exporter_build_info) * 0 + 1 unless on () count({_TROUBLED})"
            f" or {shared.UNREACHABLE}",
            "all servers",
        ),
        states=(
            *style.DAEMON_STATES[:1],
            style.State(1, "none in trouble", style.GOOD),
            *style.SERVER_STATES,
        ),
        height=7,
    ),
)

BOARD = Board(
    uid="mps-incidents",
    name="Incidents",
    description="Crashes, faults, lost clients, Xid errors and rejections on one time axis.",
    variables=(job(), instance(), eventful(), Variable("daemon", "Daemon", "mps_control_state")),
    rows=(
        Row("Did anything happen?", (TILES,)),
        Row("What, where, and who lost programs?", (LAST, *BLAST)),
        Row("When?", AXIS),
        Row("Did servers recover?", RECOVERY, collapsed=True),
    ),
)
