"""Expressions and panels that more than one dashboard has."""

from collections.abc import Sequence

from grafana import style
from grafana.board import REPOSITORY
from grafana.panels import Column, Panel, Query, link, tile
from grafana.promql import new_in_range, state_code

HOSTS = "job, instance"
DAEMONS = "job, instance, daemon"
USERS = "job, instance, daemon, uid"

# Exporters by the jobs that have, or had, at least one: other jobs are not ours. On whatever host,
# because the one that is chosen may never have been reached.
SEEN = 'last_over_time(mps_exporter_build_info{instance=~".+"}[$__range] @ end())'
TARGETS = f"(up and on (job) {SEEN})"
NOT_SCRAPED = f"count({TARGETS} == 0) or 0 * count({TARGETS})"
# A chosen host may have been silent for longer than the time range.
TARGET = f"({TARGETS} or up unless on () count({SEEN}))"

# -1 if no chosen host is reachable.
UNREACHABLE = f"(0 * count({TARGET} == 0) - 1 unless on () count(mps_exporter_build_info))"

NOTHING = "0 * count(mps_exporter_build_info)"

_WAITING_SINCE = "mps_uid_waiting_since_timestamp_seconds"
WAIT_STEPS = style.at_most(
    style.alert_threshold("MpsUidWaitLong", _WAITING_SINCE),
    style.alert_threshold("MpsUidStarved", _WAITING_SINCE),
)
SHORT_WAITS = 0.95  # The share of waits of at most a minute that is the objective.
_IDLE_WARN = style.alert_threshold("MpsHandoverIdle", "mps_uid_handover_idle_seconds_total")
IDLE_STEPS = style.noticed_from(_IDLE_WARN)
CONTEXTS_WARN = style.alert_threshold("MpsContextsNearLimit", "mps_server_client_contexts")
_FULL_WARN = style.alert_threshold("MpsClientMemoryNearLimit", "mps_client_memory_used_bytes")
FULL = style.noticed_from(_FULL_WARN)

# Processes that are gone do not wait, though their places in the queue stay.
WAITING = "(mps_uid_waiting_clients - mps_uid_waiting_dead_clients)"
WAIT = (
    "time() - mps_uid_waiting_since_timestamp_seconds"
    " unless on (job, instance, daemon, uid)"
    " mps_uid_waiting_dead_clients >= mps_uid_waiting_clients"
)
# Daemons of which nothing shows who waits: a tile must not say 0 then.
_WAITS_UNSEEN = (
    "(mps_control_up unless on (job, instance, daemon)"
    ' (mps_control_state{mps_control_state="absent"} == 1'
    ' or (mps_control_log_readable{log="control"} == 1'
    " unless on (job, instance, daemon) mps_named_server_info)))"
)
NOBODY_WAITS = f"(0 * sum(mps_control_up) unless count({_WAITS_UNSEEN}))"
NUMBER_WAITING = f"sum{WAITING} or {NOBODY_WAITS}"
LONGEST_WAIT = f"max({WAIT}) or {NOBODY_WAITS}"

# The counters miss nothing between two scrapes; without them, the last sample has to do.
UTILIZATION = (
    "(clamp_max(rate(mps_gpu_busy_seconds_total[$__rate_interval]), 1)"
    " or mps_gpu_utilization_ratio)"
)
SM_ACTIVITY = (
    "(clamp_max(rate(mps_gpu_sm_active_seconds_total[$__rate_interval]), 1)"
    " or mps_gpu_sm_active_ratio)"
)

DAEMON_STATE = state_code(
    "mps_control_state",
    style.codes(style.DAEMON_STATES, "answering", "draining", "refused", "absent", "unresponsive"),
    DAEMONS,
)

_SERVER = "job, instance, daemon, server"
_STATED = state_code(
    "mps_server_state",
    style.codes(style.SERVER_STATES, "Ready", "ACTIVE", "INITIALIZING", "FAULT"),
    _SERVER,
)
# A ghost says that it is ACTIVE, and a newer driver may have words of its own. By user, not by
# server: where users take turns, servers come and go by the hundred.
SERVER_STATE = (
    f"max by ({USERS}) ((max by ({_SERVER}) (mps_server_ghost == 1) * 14"
    f" or {_STATED} or max by ({_SERVER}) (mps_server_info) * 10)"
    f" * on ({_SERVER}) group_left (uid) mps_server_info)"
)

GPU_TROUBLE = (
    "max by (job, instance, uuid) ("
    "mps_gpu_up == 0"
    ' or mps_gpu_recovery_action{mps_gpu_recovery_action!="none"} == 1'
    " or mps_gpu_row_remap_failure == 1)"
)
SERVER_TROUBLE = (
    f"max by ({_SERVER}) (mps_server_ghost == 1"
    ' or mps_server_state{mps_server_state="FAULT"} == 1)'
)

CONTEXTS_SHARE = "mps_server_client_contexts / mps_server_client_contexts_limit"


def _first_of(states: tuple[style.State, ...], by: str, *cases: tuple[str, str]) -> str:
    """Return the code of the first state with a series: (state, expression) each.

    `or` takes the first because all sides have the same labels, so it must not be in an aggregate.
    """
    code = {state.text: state.code for state in states}
    return " or ".join(f"count by ({by}) ({expr}) * 0 + {code[name]}" for name, expr in cases)


HOST_STATE = style.recorded("instance:mps_host_state:worst")
"""The worst known state of each host, as HOST_STATES number it: also without the recording rule."""
GONE = (
    f"5 * group by ({HOSTS}) (last_over_time(mps_exporter_build_info[$__range]))"
    f" unless on ({HOSTS}) up"
)
"""Hosts that were scraped in the time range and are no longer a target."""


# The state of each user; an unknown user is "unknown".
HOLDERS = 'label_replace({}, "uid", "unknown", "uid", "")'.format(
    _first_of(
        style.HOLDER_STATES,
        USERS,
        ("connected", "mps_client_info"),
        (
            "dead in queue",
            "mps_uid_waiting_dead_clients > 0"
            " and mps_uid_waiting_dead_clients >= mps_uid_waiting_clients",
        ),
        ("waiting", "mps_uid_waiting_clients > 0"),
        ("idle, others wait", f"mps_server_info and on ({DAEMONS}) mps_uid_waiting_clients > 0"),
        ("server idle", "mps_server_info"),
    )
)

# Where there is no daemon: is the exporter there at all?
NO_DAEMON = (
    f"(max by ({HOSTS}) (mps_exporter_build_info) * 0 or max by ({HOSTS}) ({TARGET} == 0) - 1)"
)

PLACE = "${datasource:queryparam}&${__url_time_range}"


_HOST_LINKS = {
    "mps-host": "This host",
    "mps-sharing": "Who holds the GPU and who waits",
    "mps-incidents": "Its incidents",
    "mps-gpu": "Its GPUs",
    "mps-exporter": "Its exporter: what is not monitored",
}


def host_column(*boards: str, width: int | None = 185) -> Column:
    """Return the column of the host, which links to these dashboards about it.

    Without a width the column takes the room that is left. The table needs the column Job.
    """
    chosen = "var-job=${__data.fields.Job}&var-instance=${__data.fields.Host}"
    links = tuple(link(_HOST_LINKS[uid], f"/d/{uid}?{PLACE}&{chosen}") for uid in boards)
    return Column("Host", "instance", width=width, links=links)


def responding(ref: str) -> Column:
    """Return the column that shows which GPUs answer."""
    states = (style.State(1, "yes", style.GOOD), style.State(0, "no", style.BAD))
    return Column("Responding", ref, states=states, width=105)


def to_board(board: str, title: str) -> style.Json:
    """To another dashboard with the same choices, at the same time."""
    return link(title, f"/d/{board}?{PLACE}&${{job:queryparam}}&${{instance:queryparam}}")


def to_user(label: str) -> style.Json:
    """From a client or a user to the user's dashboard."""
    return link("This user", f"/d/mps-user?{PLACE}&${{job:queryparam}}&var-uid={label}")


def to_runbook() -> style.Json:
    """From an alert to what to do."""
    return link(
        "Runbook", f"{REPOSITORY}/prometheus/runbooks/${{__data.fields.Alert}}.md", new_tab=True
    )


def on_host(expr: str) -> str:
    """Add the label `host`: the instance without domain and port."""
    host = r"(\\[.+\\]|[^:.\\[]*[a-zA-Z][^:.\\[]*|[^:]+).*"
    return f'label_replace({expr}, "host", "$1", "instance", "{host}")'


def user_rows(expr: str) -> Query:
    """Name the rows of a timeline by host and user; an unknown user is "unknown".

    The user comes last: Grafana cuts a long name's beginning.
    """
    expr = f'label_replace({expr}, "uid", "unknown", "uid", "")'
    return Query(on_host(expr), "{{host}} · uid {{uid}}")


def events_tile(
    title: str,
    description: str,
    counter: str,
    nothing: str = NOTHING,
    *,
    steps: style.Steps = style.at_most(1),  # noqa: B008 - frozen
    links: Sequence[style.Json] = (),
) -> Panel:
    """Show the events of a counter in the time range; `nothing` is 0 if the source is known."""
    expr = f"{new_in_range(counter, '')} or {nothing}"
    return tile(title, description, expr, steps=steps, decimals=0, links=links)


NOT_REACHED = tile(
    "Unreachable",
    "Healthy: 0. Exporters that Prometheus cannot scrape. Nothing is known about their hosts.",
    NOT_SCRAPED,
    steps=style.at_most(1),
    of=f"count({TARGETS})",
    links=[to_board("mps-exporter", "Exporters")],
)
_ONE_GONE = f'label_replace({on_host(f"({GONE})")}, "host", "e.g. $1", "host", "(.*)")'
NO_TARGET = tile(
    "Gone",
    "For information: hosts that were scraped in this time range and are no longer a target.",
    f"count({GONE}) + on () group_left (host) 0 * topk(1, {_ONE_GONE}) or on () {NOTHING}",
    steps=style.Steps(((None, "transparent"), (1, style.GONE))),
    name="{{host}}",
)
BAD_GPUS = tile(
    "Bad GPUs",
    "Healthy: 0. GPUs that do not respond, that the driver wants reset, or whose memory could not "
    "be repaired.",
    f"count({GPU_TROUBLE}) or {NOTHING}",
    steps=style.at_most(1),
    of="count(mps_gpu_up)",
)
