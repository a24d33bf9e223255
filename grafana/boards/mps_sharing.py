"""Who holds the GPU, who waits and how long, what hand-overs cost, and who overtakes."""

from grafana import style
from grafana.board import Board, Row, Variable, instance, job
from grafana.boards import shared
from grafana.panels import (
    USERS_ALIKE,
    Column,
    Query,
    color_of,
    colors_by_query,
    events,
    names_tile,
    share_graph,
    strip,
    table,
    tile,
    timeline,
)
from grafana.promql import grown_in_range, new_in_range, new_in_step

_WAITS_ENDED = 'mps_uid_wait_seconds_bucket{le="%s"}'
_DEAD = "mps_uid_waiting_dead_clients > 0"


def _by_daemon(clients: str) -> str:
    """Count clients by user, and by daemon if there are several."""
    several = "count(mps_control_up) > 1"
    at = f'label_replace({clients} and on () {several}, "at", " · $1", "daemon", "(.*)")'
    return f"count by (uid, at) ({at} or {clients} unless on () {several})"


TILES = (
    names_tile(
        "Holder",
        "For information: users whose clients are connected now, one at a time for each daemon.",
        (
            _by_daemon('label_replace(mps_client_info, "uid", "unknown", "uid", "")'),
            "uid {{uid}}{{at}}",
            style.USED,
        ),
        ("count(mps_control_up) unless on () count(mps_client_info)", "nobody", style.QUIET),
        (
            "count(mps_exporter_build_info) unless on () count(mps_control_up)",
            "no MPS",
            style.UNUSED,
        ),
        (f"count({shared.TARGET} == 0)", "unreachable", style.QUIET),
        none="unreachable",
    ),
    names_tile(
        "Waiters",
        "Healthy: nobody. Users whose programs hang in cuInit until the last client of the holder "
        "exits. Not known where control.log cannot be read, and of MPS v3: nothing else shows who "
        "waits.",
        (_by_daemon(f"({shared.WAITING} > 0)"), "uid {{uid}}{{at}}", style.WARN),
        (_by_daemon(f"({_DEAD})"), "uid {{uid}}{{at}} · dead in queue", style.BAD),
        (f"({shared.NUMBER_WAITING}) == 0 unless on () count({_DEAD})", "nobody", style.QUIET),
        (
            f"count(mps_exporter_build_info) unless on () ({shared.NUMBER_WAITING})",
            "not known",
            style.QUIET,
        ),
        (f"count({shared.TARGET} == 0)", "unreachable", style.QUIET),
        none="not known",
    ),
    strip(
        "How long",
        tile(
            "Longest wait",
            "Healthy: seconds, the price of a hand-over. Orange and red are where the alerts "
            "MpsUidWaitLong and MpsUidStarved fire.",
            shared.LONGEST_WAIT,
            style.DURATION,
            shared.WAIT_STEPS,
            no_mps=True,
        ),
        tile(
            "Short waits",
            "Healthy: 95 % and more. Share of the waits that ended in this time range within a "
            "minute, the longest back-off of a hand-over. The dashboard Fleet shows it by day.",
            f"round({grown_in_range(_WAITS_ENDED % '60.0', '')})"
            f" / ({new_in_range(_WAITS_ENDED % '+Inf', '')} > 0)",
            style.SHARE,
            style.Steps(((None, style.QUIET), (0, style.WARN), (shared.SHORT_WAITS, style.GOOD))),
            none="none ended",
            decimals=0,
        ),
        tile(
            "Time lost",
            "Healthy: 0 s. GPU time in this range in which a user waited and nobody was connected.",
            grown_in_range("mps_uid_handover_idle_seconds_total", ""),
            style.DURATION,
            style.noticed_from(1),
            no_mps=True,
        ),
        width=8,
    ),
)


def _up_to(le: str) -> str:
    return f"({new_in_step(_WAITS_ENDED % le, '')} or vector(0))"


WAIT_LENGTHS = (
    events(
        "Waits that ended, by length",
        "Healthy: short ones only. Each bar is the waits that ended since the bar before.",
        Query(_up_to("10.0"), "up to 10 s"),
        Query(f"{_up_to('60.0')} - {_up_to('10.0')}", "10 s to 1 min"),
        Query(f"{_up_to('600.0')} - {_up_to('60.0')}", "1 to 10 min"),
        Query(f"{_up_to('+Inf')} - {_up_to('600.0')}", "longer"),
        overrides=colors_by_query(style.USED, style.NOTICE, style.WARN, style.BAD),
        width=8,
        height=8,
        none="No wait is known to have ended.",
    ),
    table(
        "Waits by user",
        "Healthy: short means. Waits that ended in this time range, those that were abandoned, and "
        "how often this user's clients overtook the queue, and how long they held the GPU. The 50 "
        "users with most waits.",
        (
            f"topk(50, round({grown_in_range('mps_uid_wait_seconds_count', 'uid')}))",
            f"{grown_in_range('mps_uid_wait_seconds_sum', 'uid')}"
            f" / ({new_in_range('mps_uid_wait_seconds_count', 'uid')} > 0)",
            "histogram_quantile(0.95,"
            f" round({grown_in_range('mps_uid_wait_seconds_bucket', 'uid, le')})) >= 0",
            f"{new_in_range('mps_uid_waits_abandoned_total', 'uid')} > 0",
            f"{new_in_range('mps_uid_overtakes_total', 'uid')} > 0",
            grown_in_range("mps_uid_holding_seconds_total", "uid"),
        ),
        (
            Column("User", "uid", links=(shared.to_user("${__data.fields.User}"),)),
            Column("Waits", "A", width=65),
            Column("Mean", "B", unit=style.DURATION, steps=shared.WAIT_STEPS, width=90),
            Column("p95", "C", unit=style.DURATION, steps=shared.WAIT_STEPS, width=90),
            Column("Abandoned", "D", steps=style.noticed_from(1), width=100),
            Column("Overtook", "E", steps=style.noticed_from(1), width=90),
            Column("Held", "F", unit=style.DURATION, width=110),
        ),
        sort="Mean",
        none="No wait has ended.",
        found="last_over_time(mps_uid_wait_seconds_count[$__range])",
        width=16,
        height=8,
    ),
)

COSTS = (
    share_graph(
        "Use of the daemon's time",
        "Healthy: no red. Coloured: a user's clients were connected. Red: a user waited and nobody "
        "was connected. The rest up to 100 %: nobody asked for it. With several daemons, their "
        "mean.",
        Query(
            "sum(rate(mps_uid_handover_idle_seconds_total[$__rate_interval]))"
            " / scalar(count(mps_control_up)) > 0",
            "idle, others wait",
        ),
        Query(
            "clamp_max(sum by (uid) (rate(mps_uid_holding_seconds_total[$__rate_interval]))"
            " / scalar(count(mps_control_up)), 1) > 0",
            "uid {{uid}}",
        ),
        stacked=True,
        overrides=(*USERS_ALIKE, color_of("byFrameRefID", "A", style.BAD, custom__fillOpacity=80)),
        none="No user was seen in this time range.",
    ),
    events(
        "Queue jumpers",
        "Healthy: empty. New clients of the holder that were accepted while others waited: "
        "as long as they keep coming, the wait does not end. Each bar is those since the "
        "bar before.",
        Query(new_in_step("mps_uid_overtakes_total", "uid"), "uid {{uid}}"),
        overrides=USERS_ALIKE,
        height=8,
        none="No overtaking is known in this time range.",
    ),
)

BOARD = Board(
    uid="mps-sharing",
    name="Sharing",
    description="Who holds the GPU, who waits, how long, what hand-overs cost, and who overtakes.",
    variables=(
        job(),
        instance(everything=False),
        Variable("daemon", "Daemon", "mps_control_state"),
    ),
    rows=(
        Row("Who holds the GPU, and who waits for it?", TILES),
        Row(
            "When? Daemon $daemon",
            (
                timeline(
                    "Holders and waiters",
                    "Healthy: no long orange, no red. A row for each user. Blue: clients are "
                    "connected. Orange: clients hang in cuInit behind the user whose row is blue. "
                    "Red: the user's server is idle and others wait for it to be replaced, or a "
                    "process died in the queue. The first row is the daemon.",
                    Query(
                        f"max by ({shared.HOSTS}) ({shared.DAEMON_STATE}) or {shared.NO_DAEMON}",
                        "daemon",
                    ),
                    Query(shared.HOLDERS, "uid {{uid}}"),
                    states=(*style.DAEMON_STATES, *style.HOLDER_STATES),
                ),
            ),
            repeat="daemon",
        ),
        Row("How long are the waits?", WAIT_LENGTHS),
        Row("What do hand-overs cost, and who overtakes the queue?", COSTS, collapsed=True),
    ),
)
