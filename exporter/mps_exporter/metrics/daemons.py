"""Metrics of control daemons and of their servers."""

from typing import get_args

from mps_exporter.metrics.metric_types import (
    PROC,
    TOOL,
    Scope,
    Section,
    daemon_rows,
    rows_of_daemons,
)
from mps_exporter.mps.metrics_from_logs import BOTH_LOGS, CONTROL_LOG, SERVER_LOG
from mps_exporter.observations import LogName
from mps_exporter.snapshot import CONTROL_STATES, QUERY_FAILURE_REASONS, SERVER_STATES

_LOGS = get_args(LogName)


SECTION = Section("Control daemon")
DAEMON = Scope(SECTION, "daemon", daemon_rows)
PROCESS = Scope(SECTION, "daemon", rows_of_daemons(lambda d: () if d.pid is None else (d,)))
LOG = Scope(SECTION, "daemon log", rows_of_daemons(lambda d: d.logs, lambda log, _: (log.log,)))

DAEMON.number(
    "mps_control_up", TOOL, lambda d: None if d.state is None else d.state == "answering"
).means("1 when the daemon answered its last probe within the deadline, after one retry at most.")
DAEMON.state(
    "mps_control_state", f"{TOOL}, {PROC}, {CONTROL_LOG}", CONTROL_STATES, lambda d: d.state
).means(
    "State of the daemon. draining: it received quit and waits for its clients. unresponsive: it "
    "hangs. refused: it refuses queries. absent: it was configured or seen before, and is gone."
)
PROCESS.info(
    "mps_control_info",
    f"{PROC}, {CONTROL_LOG}",
    "pid uid user log_directory binary_version protocol multiuser visible_devices",
    multiuser=("true", "false"),
).means("The control daemon's process and settings.")
DAEMON.info(
    "mps_control_unprivileged_info",
    PROC,
    "uid",
    lambda d: (d.facts.user,) if d.facts.limited else None,
).means("An ordinary user's daemon, not configured: the user can forge its logs and answers.")
DAEMON.number("mps_control_start_time_seconds", PROC, lambda d: d.start_time_seconds).means(
    "When the control daemon's process started."
)
SECTION.counted("mps_control_starts")
DAEMON.number("mps_control_query_duration_seconds", TOOL, lambda d: d.query_duration_seconds).means(
    "Duration of the last round of queries to this daemon."
)
DAEMON.number("mps_control_queries_total", TOOL, lambda d: d.queries).means(
    "Runs of the control tool by this exporter."
)
DAEMON.each(
    "mps_control_query_failures_total",
    TOOL,
    lambda d: {(reason,): d.query_failures.get(reason, 0) for reason in QUERY_FAILURE_REASONS},
    reason=QUERY_FAILURE_REASONS,
).means("Failed runs of the control tool by reason.")
DAEMON.number(
    "mps_control_default_active_thread_ratio", TOOL, lambda d: d.default_active_thread_ratio
).means("Share of the SMs that new servers allow each client.")
DAEMON.by_gpu(
    "mps_control_default_pinned_memory_limit_bytes",
    TOOL,
    lambda d: d.default_pinned_memory_limit_bytes,
).means("Device memory that new servers allow each client.")
DAEMON.number(
    "mps_control_default_client_priority", TOOL, lambda d: d.default_client_priority
).means("Priority of clients of new servers: 0 normal, 1 below normal.")
DAEMON.number("mps_control_servers", f"{TOOL}, {CONTROL_LOG}", lambda d: d.servers_count).means(
    "Servers that this daemon currently runs."
)
LOG.number("mps_control_log_size_bytes", "stat", lambda log: log.size_bytes, log=_LOGS).means(
    "Size of the daemon's log file; MPS does not rotate it."
)
SECTION.counted("mps_control_")
LOG.number("mps_control_log_readable", "open", lambda log: log.readable, log=_LOGS).means(
    "1 when the log can be followed; at 0 incidents may go undetected."
)


SERVERS = Section("Servers")
_SERVER_ROWS = rows_of_daemons(lambda d: d.servers, lambda server, _: (server.pid,))
SERVER = Scope(SERVERS, "daemon server", _SERVER_ROWS)

SERVER.info("mps_server_info", f"{PROC}, {CONTROL_LOG}", "uid user").means(
    "The server's process; uid and user: the user that it serves (0 for a multi-user server)."
)
SERVER.state("mps_server_state", f"{BOTH_LOGS}, {TOOL}", SERVER_STATES, lambda s: s.state).means(
    "The state as MPS reports it, also a state unknown to this exporter."
)
SERVER.number(
    "mps_server_start_time_seconds", f"{PROC}, {CONTROL_LOG}", lambda s: s.start_time_seconds
).means("When the server started.")
SERVER.number("mps_server_clients", f"{SERVER_LOG}, {TOOL}", lambda s: s.clients_connected).means(
    "Client processes connected to the server."
)
SERVER.by_gpu("mps_server_client_contexts", f"{SERVER_LOG}, {TOOL}", lambda s: s.contexts).means(
    "CUDA contexts of clients on the GPU, as counted against the server's limit."
)
SERVER.by_gpu(
    "mps_server_client_contexts_limit",
    "GPU architecture, driver, server.log",
    lambda s: s.contexts_limit,
).means("How many client contexts the server admits on the GPU.")
SERVER.number(
    "mps_server_active_thread_ratio", f"{TOOL}, {SERVER_LOG}", lambda s: s.active_thread_ratio
).means("Share of the SMs for each new client.")
SERVER.by_gpu(
    "mps_server_pinned_memory_limit_bytes",
    f"{TOOL}, {SERVER_LOG}",
    lambda s: s.pinned_memory_limit_bytes,
).means("Device memory for each new client.")
SERVER.by_gpu("mps_server_memory_used_bytes", "NVML", lambda s: s.memory_used_bytes).means(
    "Device memory of the server process itself."
)
SERVER.number("mps_server_ghost", f"{BOTH_LOGS}, {PROC}", lambda s: s.ghost).means(
    "1 when it accepts no client since it was sent a dead one: the next hangs the daemon."
)
SERVERS.counted("mps_server_")
