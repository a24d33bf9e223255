"""Crashes, faults, whom they hit, Xids and rejections, on one time axis."""

from __future__ import annotations

from grafana.board import Board, Row, Variable, instance, job, source_tile
from grafana.boards.shared import SERVER_STATE, to_host
from grafana.panels import (
    Column,
    Query,
    causes_alike,
    color_of,
    events,
    heatmap,
    ranking,
    table,
    tile,
    timeline,
    users_alike,
)
from grafana.promql import new_in_range, new_in_step
from grafana.style import AGO, BAD, SECONDS, SERVER_STATES, WARN, at_most, noticed_from

CRASHED = 'mps_server_exits_total{cause="crashed"}'
START_FAILED = 'mps_server_exits_total{cause="start_failed"}'
DAEMON_DIED = 'mps_server_exits_total{cause="daemon_died"}'
LOSSES = "mps_client_losses_total"
UNFINISHED = "mps_client_unfinished_exits_total"
REJECTIONS = "mps_client_rejections_total"
FAULTS = "mps_server_faults_total"
XIDS = "mps_gpu_xid_errors_total"

NOTHING = "0 * count(mps_exporter_build_info)"
NONE = "Nothing happened in this time range."

TILES = (
    tile(
        "Crashes",
        "Good: 0. Servers that ended without the orderly lines in their log, in this time range. "
        "Each takes all its clients with it.",
        f"{new_in_range(CRASHED, '')} or {NOTHING}",
        steps=at_most(1),
        decimals=0,
    ),
    tile(
        "Failed starts",
        "Good: 0. Servers that ended before they were ready, in this time range. Dozens within a "
        "minute are a crash loop: whoever waits for that server hangs.",
        f"{new_in_range(START_FAILED, '')} or {NOTHING}",
        steps=at_most(1),
        decimals=0,
    ),
    tile(
        "Fatal errors",
        "Good: 0. Errors of a client that its server contained, in this time range. They take all "
        "neighbours on that GPU along, guilty or not.",
        f"{new_in_range(FAULTS, '')} or {NOTHING}",
        steps=at_most(1),
        decimals=0,
    ),
    tile(
        "Clients lost",
        "Good: 0. Programs that MPS took down in this time range.",
        f"{new_in_range(LOSSES, '')} or {NOTHING}",
        steps=at_most(1),
        decimals=0,
    ),
    tile(
        "Refused",
        "Good: 0. Programs that MPS did not let in, in this time range.",
        f"{new_in_range(REJECTIONS, '')} or {NOTHING}",
        steps=noticed_from(1),
        decimals=0,
    ),
    tile(
        "Xid errors",
        "Good: 0. Errors that the GPU driver reported in this time range. A fatal error of a "
        "client comes with one.",
        f"{new_in_range(XIDS, '')} or {NOTHING}",
        steps=noticed_from(1),
        decimals=0,
    ),
    tile(
        "Last incident",
        "Good: never, or long ago. How long ago a server last crashed, failed to start, lost its "
        "daemon, or met a fatal GPU error.",
        "time() - max(max(mps_server_last_fault_timestamp_seconds)"
        ' or max(mps_server_last_exit_timestamp_seconds{cause!~"requested|ghost_ended"}))',
        SECONDS,
        none="never",
    ),
    source_tile(),
)

AXIS = (
    events(
        "Servers: crashes, failed starts, fatal errors",
        "Good: empty. Each bar is what happened since the bar before.",
        Query(new_in_step(CRASHED, "cause"), "crashed"),
        Query(new_in_step(START_FAILED, "cause"), "start failed"),
        Query(new_in_step(DAEMON_DIED, "cause"), "daemon died"),
        Query(new_in_step(FAULTS, "gpu"), "fatal error, GPU {{gpu}}"),
        overrides=(
            color_of("byFrameRefID", "A", BAD),
            color_of("byFrameRefID", "B", WARN),
            color_of("byFrameRefID", "C", "dark-red"),
            color_of("byFrameRefID", "D", "purple"),
        ),
        width=12,
        none=NONE,
    ),
    events(
        "Clients lost, by cause",
        "Good: empty. Programs that went down: their server crashed, their daemon died, by their "
        "own fault, by a neighbour's, by unfinished work of a client that ended, or because an "
        "administrator ended them.",
        Query(new_in_step(LOSSES, "cause"), "{{cause}}"),
        overrides=causes_alike(),
        width=12,
        none=NONE,
    ),
    events(
        "Clients refused, by cause",
        "Good: empty. context_limit: the server was full. server_not_ready: it was recovering from "
        "a fault. invalid_device and credentials: the program asked for what it may not have.",
        Query(new_in_step(REJECTIONS, "cause"), "{{cause}}"),
        overrides=causes_alike(),
        width=12,
        none=NONE,
    ),
    events(
        "Xid errors, by code",
        "Good: empty. 13, 31 and 43 are mostly a program's own mistake; 48, 63, 64, 79, 94, 95 "
        "and 119 are the hardware's or the driver's.",
        Query(new_in_step(XIDS, "gpu, xid"), "Xid {{xid}}, GPU {{gpu}}"),
        width=12,
        none=NONE,
    ),
)

BLAST = (
    ranking(
        "Lost by cause",
        "Good: none. neighbour_fault, unfinished_work and server_crashed are innocent programs: "
        "what sharing costs.",
        Query(f"{new_in_range(LOSSES, 'cause')} > 0", "{{cause}}"),
        overrides=causes_alike(),
        decimals=0,
        width=6,
        height=7,
    ),
    ranking(
        "Lost by user",
        "Good: none. Whom to tell; the ten users with most lost programs.",
        Query(f"topk(10, {new_in_range(LOSSES, 'uid')} > 0)", "uid {{uid}}"),
        overrides=users_alike(),
        decimals=0,
        width=6,
        height=7,
    ),
    ranking(
        "Unfinished work left, by user",
        "Good: none. Clients that ended with GPU work in flight, which then took others down; the "
        "ten users with most. Terminate them through the daemon before they are killed.",
        Query(f"topk(10, {new_in_range(UNFINISHED, 'uid')} > 0)", "uid {{uid}}"),
        overrides=users_alike(),
        decimals=0,
        width=6,
        height=7,
    ),
    ranking(
        "Lost by host",
        "Good: none. Where; the ten hosts with most lost programs.",
        Query(f"topk(10, {new_in_range(LOSSES, 'instance')} > 0)", "{{instance}}"),
        color=BAD,
        decimals=0,
        width=6,
        height=7,
    ),
)

RECOVERY = (
    timeline(
        "Servers",
        "Good: green; a fault lasts milliseconds and is mostly too short to be seen here. A "
        "lasting red is a client that caught the error and stays: end it, and the server recovers. "
        "Only servers that were in trouble in this time range are shown.",
        Query(
            f"{SERVER_STATE} and on (job, instance, daemon, uid)"
            f" max_over_time(({SERVER_STATE})[$__range:$__interval] @ end()) > 12",
            "uid {{uid}} · {{daemon}} · {{instance}}",
        ),
        SERVER_STATES,
        height=6,
        none="No server was in trouble for long enough to be seen.",
    ),
    heatmap(
        "Recoveries from fatal errors, by how long they took",
        "Good: all below a second. From the error to the destruction of the server's context; each "
        "cell is those since the cell before. Meanwhile newcomers are refused.",
        Query(new_in_step("mps_server_fault_recovery_seconds_bucket", "le")),
    ),
    heatmap(
        "Starts of servers, by how long they took",
        "Good: all below a second. Starts that succeeded; each cell is those since the cell "
        "before. A crash loop starts none.",
        Query(new_in_step("mps_server_startup_seconds_bucket", "le")),
    ),
)

_ENDS = "max by (job, instance, daemon, cause)"
LAST = table(
    "The last of each kind",
    "Good: empty, or long ago. When each kind of incident last happened, wherever in time; the 100 "
    "newest. Orderly ends and those of ghost servers are left out.",
    (
        "topk(100, "
        f'{_ENDS} (mps_server_last_exit_timestamp_seconds{{cause!~"requested|ghost_ended"}})'
        f" or {_ENDS} (label_replace(mps_server_last_fault_timestamp_seconds,"
        ' "cause", "fatal GPU error", "", ""))'
        " or max by (job, instance, gpu, cause)"
        ' (label_replace(mps_gpu_last_xid_timestamp_seconds, "cause", "Xid $1", "xid", "(.*)"))'
        ") * 1000",
    ),
    (
        Column("Ago", "A", unit=AGO, width=160),
        Column("What", "cause", width=220),
        Column("Host", "instance", links=(
            to_host("mps-host", "The host"), to_host("mps-gpu", "Its GPUs"),
        )),
        Column("Daemon", "daemon"),
        Column("GPU", "gpu", width=80),
        Column("Job", "job", width=160),
    ),
    sort="Ago",
    none="No incident was ever seen here.",
    height=8,
)  # fmt: skip

BOARD = Board(
    uid="mps-incidents",
    name="Incidents",
    description="Crashes, faults, blast radius, Xids and rejections on one time axis.",
    variables=(job(), instance(), Variable("daemon", "Daemon", "mps_control_state")),
    rows=(
        Row("Did anything happen?", TILES),
        Row("What happened, when?", AXIS),
        Row("Who was hit?", BLAST),
        Row("When was the last of each kind?", (LAST,)),
        Row("Did it recover?", RECOVERY),
    ),
)
