"""Expressions and panels that more than one dashboard has."""

from __future__ import annotations

from grafana.board import REPOSITORY
from grafana.panels import Panel, Query, color_of, link, share_graph
from grafana.promql import state_code
from grafana.style import DAEMON_STATES, QUIET, REAL, SERVER_STATES, Json, alert_threshold, codes

# Exporters by the jobs that have, or had, at least one: other jobs are none of our business.
TARGETS = "(up and on (job) last_over_time(mps_exporter_build_info[$__range]))"
NOT_SCRAPED = f"count({TARGETS} == 0) or 0 * count({TARGETS})"

WAIT_WARN = alert_threshold("MpsUidWaitLong", "mps_uid_waiting_since_timestamp_seconds")
WAIT_BAD = alert_threshold("MpsUidStarved", "mps_uid_waiting_since_timestamp_seconds")
IDLE_WARN = alert_threshold("MpsHandoverIdle", "mps_uid_handover_idle_seconds_total")
CONTEXTS_WARN = alert_threshold("MpsContextsNearLimit", "mps_server_client_contexts")
MEMORY_WARN = alert_threshold("MpsClientMemoryNearLimit", "mps_client_memory_used_bytes")
COMMITTED_NOTICE = alert_threshold("MpsSmOvercommitted", "mps_gpu_sm_committed_ratio")

# Processes that are gone do not wait, though their places in the queue stay.
WAITING = "(mps_uid_waiting_clients - mps_uid_waiting_dead_clients)"
LONGEST_WAIT = (
    "time() - mps_uid_waiting_since_timestamp_seconds"
    " unless on (job, instance, daemon, uid)"
    " mps_uid_waiting_dead_clients >= mps_uid_waiting_clients"
)

# The counters miss nothing between two scrapes; without them, the last sample has to do.
UTILIZATION = (
    "(clamp_max(rate(mps_gpu_busy_seconds_total[$__rate_interval]), 1)"
    " or mps_gpu_utilization_ratio)"
)
SM_ACTIVITY = (
    "(clamp_max(rate(mps_gpu_sm_active_seconds_total[$__rate_interval]), 1)"
    " or mps_gpu_sm_active_ratio)"
)

DAEMON_STATE = state_code("mps_control_state", codes(DAEMON_STATES), "job, instance, daemon")

_SERVER = "job, instance, daemon, server"
_STATED = state_code(
    "mps_server_state", codes(SERVER_STATES, "ACTIVE", "INITIALIZING", "FAULT"), _SERVER
)
# A ghost says that it is ACTIVE, and a newer driver may have words of its own. By user, not by
# server: where users take turns, servers come and go by the hundred.
SERVER_STATE = (
    f"max by (job, instance, daemon, uid) ((max by ({_SERVER}) (mps_server_ghost == 1) * 14"
    f" or {_STATED} or max by ({_SERVER}) (mps_server_info) * 10)"
    f" * on ({_SERVER}) group_left (uid) mps_server_info)"
)

CONTEXTS_SHARE = "mps_server_client_contexts / mps_server_client_contexts_limit"

PLACE = "${datasource:queryparam}&${__url_time_range}"


def to_host(board: str, title: str, *, job: str = "Job", instance: str = "Host") -> Json:
    """From a row of a table to a dashboard about its host, at the same time."""
    return link(
        title,
        f"/d/{board}?{PLACE}"
        f"&var-job=${{__data.fields.{job}}}&var-instance=${{__data.fields.{instance}}}",
    )


def to_board(board: str, title: str) -> Json:
    """To another dashboard with the same choices, at the same time."""
    return link(title, f"/d/{board}?{PLACE}&${{job:queryparam}}&${{instance:queryparam}}")


def to_user(label: str) -> Json:
    """From a client or a user to the user's history."""
    return link(
        "This user's history",
        f"/d/mps-sharing?{PLACE}&${{job:queryparam}}&${{instance:queryparam}}&var-uid={label}",
    )


def to_runbook() -> Json:
    """From an alert to what to do."""
    return link(
        "Runbook", f"{REPOSITORY}/prometheus/runbooks/${{__data.fields.Alert}}.md", new_tab=True
    )


def utilization_with_activity(by: str, legend: str, *, width: int = 12, height: int = 8) -> Panel:
    """Show the two numbers that only tell the truth together."""
    return share_graph(
        "Utilization beside SM activity",
        "Grey says how much of the time any kernel ran; green, how much of the GPU worked. Good: "
        "green is near grey. A wide gap with several processes is what MPS is for; a wide gap "
        "with one says that the program leaves most of the GPU unused. SM activity needs Hopper "
        "or later.",
        Query(f"avg by ({by}) {UTILIZATION}", f"{legend}utilization"),
        Query(f"avg by ({by}) {SM_ACTIVITY}", f"{legend}SM activity"),
        width=width,
        height=height,
        overrides=(
            color_of("byFrameRefID", "A", QUIET, custom__fillOpacity=0),
            color_of("byFrameRefID", "B", REAL, custom__fillOpacity=30),
        ),
        none="No GPU reports its utilization.",
    )
