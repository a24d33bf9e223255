"""Metrics of single clients, and of users whose clients wait for another user's server."""

from collections.abc import Sequence

from mps_exporter.metrics.metric_types import (
    PROC,
    TOOL,
    Page,
    Rows,
    Samples,
    Scope,
    Section,
    daemon_rows,
    texts,
)
from mps_exporter.mps.metrics_from_logs import BOTH_LOGS, CONTROL_LOG, SERVER_LOG
from mps_exporter.snapshot import CLIENT_STATES, LIMIT_SOURCES, Client, Server, Wait

_STATES_SHOWN = tuple(state for state in CLIENT_STATES if state != "active")
"""States with series. Nearly all clients are active."""


def _with_series(page: Page, server: Server) -> tuple[Client, ...]:
    """Return the clients of a server that have series.

    A daemon in a PID namespace of its own logs all clients outside with PID 0: several of these
    cannot be distinguished.
    """
    if page.clients == "off":
        return ()
    if sum(client.pid == 0 for client in server.clients) > 1:
        return tuple(client for client in server.clients if client.pid)
    return server.clients


def client_rows(page: Page) -> Rows[Client]:
    for daemon in page.snapshot.daemons:
        for server in daemon.servers:
            for client in _with_series(page, server):
                yield (daemon.pipe_directory, client.server_pid, client.pid), client


def _detail_rows(page: Page) -> Rows[Client]:
    return client_rows(page) if page.clients == "full" else iter(())


def _sm_seconds(page: Page) -> Samples:
    return {
        texts((*key, *page.gpu(uuid), bound)): value
        for key, one in _detail_rows(page)
        for uuid, use in page.snapshot.sm_use.get(
            (str(key[0]), one.server_pid, one.pid), {}
        ).items()
        for bound, value in (("high", use.high), ("low", use.low))
    }


def _inactive_rows(page: Page) -> Rows[float | None]:
    for daemon in page.snapshot.daemons if page.clients != "off" else ():
        pipe = daemon.pipe_directory
        for server in daemon.servers:
            for one in _with_series(page, server):
                if one.state not in (None, "active"):
                    yield (pipe, one.server_pid, one.pid, one.uid, one.state), one.state_since
        connected = {client.pid for server in daemon.servers for client in server.clients}
        for wait in daemon.waits:
            if wait.pid and not wait.dead and wait.pid not in connected:
                yield (pipe, None, wait.pid, wait.uid, "waiting"), wait.since


def _dropped_rows(page: Page) -> Rows[int]:
    for daemon in page.snapshot.daemons:
        omitted = [len(one.clients) - len(_with_series(page, one)) for one in daemon.servers]
        yield (daemon.pipe_directory,), daemon.dropped_clients + sum(omitted)


def _container_rows(page: Page) -> Rows[float]:
    for one in page.snapshot.containers if page.clients != "off" else ():
        yield (one.container_id, one.namespace, one.pod, one.container), 1.0


def _ratio_unless_in_sms(client: Client) -> float | None:
    """Return the SM share; None if mps_client_sm_limit shows it in SMs, rounded."""
    in_sms = client.contexts and not client.contexts.keys() - client.sm_limit.keys()
    return None if in_sms else client.active_thread_ratio


def _user_rows(page: Page) -> Rows[Sequence[Wait]]:
    """Yield each user's queued clients: an empty list after a wait, so that graphs fall to 0."""
    for daemon in page.snapshot.daemons:
        uids: set[int | None] = {wait.uid for wait in daemon.waits}
        known = (daemon.counters or {}).get("mps_uid_wait_seconds", {})
        uids |= {uid for (uid,) in known if not isinstance(uid, str)}
        for uid in sorted(uids, key=lambda uid: -1 if uid is None else uid):
            queued = [wait for wait in daemon.waits if wait.uid == uid]
            yield (daemon.pipe_directory, uid), queued


SECTION = Section("Clients")
CLIENT = Scope(SECTION, "daemon server pid", client_rows)
DETAIL = Scope(SECTION, "daemon server pid", _detail_rows)
INACTIVE = Scope(SECTION, "daemon server pid uid state", _inactive_rows)
CONTAINER = Scope(SECTION, "container_id pod_namespace pod_name container_name", _container_rows)
DROPPED = Scope(SECTION, "daemon", _dropped_rows)

CLIENT.info(
    "mps_client_info",
    f"{PROC}, {CONTROL_LOG}",
    "uid user command container_id pod_uid slurm_job_id systemd_unit pid_namespace limit_source",
    limit_source=LIMIT_SOURCES,
).means(
    "The client's process and what it belongs to. limit_source: which SM share is the lower one."
)
CONTAINER.number("mps_container_info", "/var/log/containers", lambda one: one).means(
    "The Kubernetes names of a container_id, where the kubelet's log directory is mounted."
)
DETAIL.number("mps_client_start_time_seconds", SERVER_LOG, lambda c: c.connected_at).means(
    "When the client connected."
)
INACTIVE.number("mps_client_state", BOTH_LOGS, lambda _since: 1.0, state=_STATES_SHOWN).means(
    "1 for the state of a client that is not active (active: it has or had a context).",
    note="waiting: in the queue behind another user's server (`server` is empty). connecting: "
    "without a context, which may last long. creating_context: its context cannot be used yet. "
    "torn_down: a fatal GPU error hit it, and it cannot use the GPU any more. All but waiting are "
    "absent where server.log cannot be read or does not name clients (drivers before 580), waiting "
    "for clients with PID 0.",
)
INACTIVE.number(
    "mps_client_state_since_timestamp_seconds", BOTH_LOGS, lambda since: since, state=_STATES_SHOWN
).means("When a client that is not active entered its state.")
CLIENT.by_gpu("mps_client_contexts", f"{SERVER_LOG}, {TOOL}", lambda c: c.contexts).means(
    "CUDA contexts of the client on the GPU."
)
CLIENT.by_gpu("mps_client_memory_used_bytes", "NVML", lambda c: c.memory_used_bytes).means(
    "Device memory of the client on the GPU."
)
DETAIL.by_gpu(
    "mps_client_memory_limit_bytes", f"{PROC}/PID/environ, {TOOL}", lambda c: c.memory_limit_bytes
).means(
    "Device memory that MPS allows the client: the lower of its own limit and the server's. Absent "
    "without a known limit."
)
DETAIL.number(
    "mps_client_active_thread_ratio", f"{PROC}/PID/environ, {TOOL}", _ratio_unless_in_sms
).means(
    "Share of the SMs that MPS allows the client: the lower of its own limit (in its environment) "
    "and the server's when it connected. Absent where mps_client_sm_limit shows it."
)
DETAIL.by_gpu(
    "mps_client_sm_limit", "calculated, with the hardware's rounding", lambda c: c.sm_limit
).means("SMs that the client's share allows on this GPU: a maximum, not a reservation.")
DETAIL.add(
    "mps_client_sm_seconds_total",
    "nvmlGpmMetricsGet 2 and mps_client_sm_limit",
    _sm_seconds,
    {"gpu": (), "uuid": (), "bound": ("high", "low")},
).means(
    "SM-seconds of the client: at least low, at most high. They rise equally while it is alone on "
    "the GPU. Since Hopper.",
    note="high: its limit, or the GPU's use if that is less. low: the GPU's use less the limits of "
    "all others; it does not rise while processes come and go, or without server.log. Not seen: a "
    "process without MPS between two collections, a limit that a program changes at its start.",
)
DETAIL.number("mps_client_priority", f"{PROC}/PID/environ", lambda c: c.priority or None).means(
    "1 where the client requested a priority below normal; else absent."
)
SECTION.counted("mps_client_")
DROPPED.number("mps_client_dropped_series", "this exporter", lambda count: count).means(
    "Clients without metrics of their own, by --collector.clients[.max] or with a PID of 0."
)


USERS = Section("Waits caused by UID serialisation")
USER = Scope(USERS, "daemon uid", _user_rows)
WAITED_FOR = Scope(USERS, "daemon", daemon_rows)

USER.number("mps_uid_waiting_clients", CONTROL_LOG, len).means(
    "Clients (also dead) behind another user's server, and those that a ghost does not serve."
)
USER.number(
    "mps_uid_waiting_since_timestamp_seconds",
    CONTROL_LOG,
    lambda waits: min((wait.since for wait in waits), default=None),
).means("When the user's oldest queued client began to wait.")
USER.number(
    "mps_uid_waiting_dead_clients",
    f"{CONTROL_LOG}, {PROC}",
    lambda waits: sum(wait.dead for wait in waits),
).means("Queued clients whose process is gone: after their turn the next client hangs the daemon.")
USERS.counted("mps_uid_wait", "mps_uid_overtake", "mps_uid_handover")
WAITED_FOR.number(
    "mps_uid_handover_backoff_seconds", CONTROL_LOG, lambda d: d.handover_backoff_seconds
).means("The daemon's current interval between attempts to stop the running user's server.")
USERS.counted("mps_uid_")
