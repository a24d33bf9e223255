"""A daemon and its servers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mps_exporter.limits_without_a_flag import CLOCK_TOLERANCE_SECONDS
from mps_exporter.merge.clients import (
    by_uuid,
    in_partition,
    merge_clients,
    merge_listed_client,
    server_limits,
)
from mps_exporter.merge.inputs import DaemonInputs, MergeContext, is_server
from mps_exporter.mps import client_limits
from mps_exporter.mps.metrics_from_logs import LOG_METRICS, SERVER_LOG
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.tool_commands import CANNOT_SEND, ServerReply
from mps_exporter.observations import ControlObservation, Outcome, ProcessFacts
from mps_exporter.snapshot import (
    Client,
    ControlDaemon,
    ControlState,
    Handover,
    LogMetricValues,
    NamedServer,
    Namespace,
    NamespaceClient,
    Partitioning,
    Server,
    ServerDevice,
    SmPartition,
)


def merge_daemon(
    context: MergeContext, inputs: DaemonInputs, clients_max: int, now: float
) -> ControlDaemon:
    facts, logged, probe = inputs.facts, inputs.state, inputs.answers.probe
    process = facts.process
    own: dict[str, Any] = {}
    if process is not None:
        own = {one: getattr(process, one) for one in ("pid", "uid", "user", "start_time_seconds")}
        own |= {"binary_version": logged.daemon.binary_version, "multiuser": facts.multiuser}
    partitioning = _merge_partitioning(context, inputs)
    servers, servers_known = _merge_servers(context, inputs, partitioning)
    kept, dropped = _limit_clients(servers, clients_max)
    state = control_state(inputs)
    timeline_since, timeline = logged.timeline.snapshot(now)
    exchanges = inputs.probe.exchanges if inputs.probe is not None else ()
    durations = [exchange.duration_seconds for exchange in exchanges]
    return ControlDaemon(
        pipe_directory=facts.pipe_directory,
        log_directory=facts.log_directory,
        state=state,
        last=inputs.last,
        resumed=inputs.resumed,
        **own,
        protocol="3" if inputs.speaks_v3 else "2" if probe is not None else None,
        visible_devices=inputs.visible_devices(),
        query_duration_seconds=sum(durations) or None,
        query_failures=inputs.query_failures,
        queries=inputs.queries,
        **_default_limits(inputs),
        servers_count=len(servers) if servers_known else None,
        servers=kept,
        waits=logged.waits,
        handover_backoff_seconds=logged.handover_backoff_seconds,
        gpu_uuids=_served_gpus(context, inputs, servers, partitioning),
        logs=inputs.logs,
        counters=_counters(inputs),
        incidents=logged.incidents.snapshot(),
        timeline=timeline,
        timeline_since=timeline_since,
        dropped_clients=dropped,
        error=inputs.probe.error if inputs.probe is not None else None,
        facts=facts,
        partitioning=_count_clients(partitioning, servers, known=servers_known),
        handover=_handover_in_progress(context, inputs) if state == "unresponsive" else None,
    )


def _counters(inputs: DaemonInputs) -> LogMetricValues | None:
    """Return the counters of the logs that were ever readable; None if control.log never was."""
    if not inputs.was_readable:
        return None
    found = inputs.state.counters.snapshot()
    if inputs.server_log_was_readable:
        return found
    return {
        name: values
        for name, values in found.items()
        if not LOG_METRICS[name].source.startswith(SERVER_LOG)
    }


def _handover_in_progress(context: MergeContext, inputs: DaemonInputs) -> Handover | None:
    """Return the last handover, if its client is proved and its server is silent or ended."""
    last = inputs.state.handover
    if last is None or not inputs.log_readable("control") or inputs.facts.has_own_pid_namespace:
        return None
    client = context.process(inputs.facts, last.pid)
    if client is None or client.ended or client.uid != last.uid or last.pid <= 2:
        return None
    if client.start_time_seconds > last.at + CLOCK_TOLERANCE_SECONDS:
        return None  # the PID was reused
    servers = [context.processes.get(one.pid, one) for one in inputs.facts.servers]
    ended = bool(servers) and all(one.ended for one in servers)
    if last.answered and not ended:
        return None
    return replace(last, server_pid=servers[-1].pid if ended else None)


def _served_gpus(
    context: MergeContext, inputs: DaemonInputs, servers: Iterable[Server], found: Partitioning
) -> tuple[str, ...]:
    served = set(inputs.device_uuids().values())
    served.update(one.uuid for one in found.rows(ServerDevice))
    for named in found.rows(NamedServer):
        served.update(uuid for uuid in named.allowed_devices if uuid in context.gpus)
    for server in servers:
        served.update(server.contexts, server.memory_used_bytes)
    return tuple(sorted(served - {""}))


def _default_limits(inputs: DaemonInputs) -> dict[str, Any]:
    """Return the fields of ControlDaemon about the limits of new servers."""
    uuids, probe = inputs.device_uuids(), inputs.answers.probe
    replies = inputs.answers.servers.values()
    priorities = (reply.default_client_priority for reply in replies)
    return {
        "default_active_thread_ratio": probe.default_active_thread_ratio if probe else None,
        "default_client_priority": next((one for one in priorities if one is not None), None),
        "default_pinned_memory_limit_bytes": {
            uuid: limit
            for reply in replies
            for uuid, limit in by_uuid(uuids, reply.default_pinned_memory_limit_bytes).items()
        },
    }


def _limit_clients(servers: Sequence[Server], clients_max: int) -> tuple[tuple[Server, ...], int]:
    """Keep the first `clients_max` clients; return the servers and the number dropped."""
    kept, left, dropped = [], clients_max, 0
    for server in servers:
        clients = server.clients[:left]
        left -= len(clients)
        rest = server.clients[len(clients) :]
        dropped += len(rest)
        # A ghost may be ended if its clients are seen to have no context.
        unseen = server.ghost and any(one.may_work for one in rest)
        kept.append(replace(server, clients=clients, ghost=None if unseen else server.ghost))
    return tuple(kept), dropped


# ---------------------------------------------------------------------------------- state


def control_state(inputs: DaemonInputs) -> ControlState | None:
    """Return the state of a daemon; None if queries and /proc do not show it."""
    probe = inputs.probe
    alive = inputs.facts.process is not None or inputs.facts.lock_holder_pid is not None
    without_query: ControlState | None = None
    if inputs.facts.lock_tested and not alive:
        without_query = "absent"
    if probe is None:
        return without_query
    if probe.outcome is Outcome.OK:
        return "answering"
    if inputs.state.daemon.quit_requested_at is not None and alive:
        # While it drains, the tool is refused, or gets an empty reply, or waits (driver 580).
        return "draining"
    if probe.outcome is Outcome.ABSENT:
        # Without a return code no query was sent: the tool itself is missing.
        if all(exchange.return_code is None for exchange in probe.exchanges):
            return without_query
        return "refused" if alive else "absent"
    if inputs.hung:
        return "unresponsive"
    if probe.outcome in (Outcome.SKIPPED, Outcome.TIMEOUT):
        return None  # no query was sent, or the daemon has served since
    if alive and _may_drain(inputs, probe):
        return None
    return "refused"


def _may_drain(inputs: DaemonInputs, probe: ControlObservation) -> bool:
    """Return whether this daemon may be quitting, which only control.log proves.

    While it drains, the tool prints that it cannot send the command, or nothing (driver 580).
    """
    if inputs.log_readable("control"):
        return False
    return all(
        exchange.outcome is Outcome.OK
        or CANNOT_SEND in exchange.stderr + exchange.stdout
        or not (exchange.stderr + exchange.stdout).strip()
        for exchange in probe.exchanges
    )


# ---------------------------------------------------------------------------------- servers


def _merge_servers(
    context: MergeContext, inputs: DaemonInputs, found: Partitioning
) -> tuple[Sequence[Server], bool]:
    """Return the servers of a daemon, and whether these are all of them."""
    if found.protocol == "3":
        servers = [
            _merge_named_server(context, inputs, found, named, named.pid)
            for named in found.rows(NamedServer)
            if named.pid
        ]
        known = found.is_whole(NamedServer, "server_list")
    else:
        servers = [_merge_server(context, inputs, pid) for pid in _server_pids(inputs)]
        known = inputs.log_names_servers() or inputs.answers.probe is not None
        known = known or (inputs.speaks_v3 and control_state(inputs) == "absent")
    if found.protocol is not None:
        servers = [
            replace(one, clients=tuple(in_partition(context, found, c) for c in one.clients))
            for one in servers
        ]
    return servers, known


def _server_pids(inputs: DaemonInputs) -> list[int]:
    """Return the PIDs of living servers in the daemon's namespace, from the best source."""
    if inputs.log_names_servers():
        return [server.pid for server in inputs.state.servers]
    if inputs.answers.probe is not None:
        return list(inputs.answers.probe.server_pids)
    return [process.own_pid for process in inputs.facts.servers]


def _process_of(context: MergeContext, inputs: DaemonInputs, pid: int) -> ProcessFacts | None:
    """Return the process of a server, by its PID in the daemon's namespace."""
    for process in inputs.facts.servers:
        if pid == process.own_pid:
            return context.processes.get(process.pid, process)
    found = context.process(inputs.facts, pid)
    return found if found is not None and is_server(found) else None


def _merge_server(context: MergeContext, daemon: DaemonInputs, server_pid: int) -> Server:
    process = _process_of(context, daemon, server_pid)
    pid = process.pid if process is not None else server_pid
    logged = daemon.state.servers.get(server_pid) if daemon.log_names_servers() else None
    reply = daemon.answers.servers.get(server_pid, ServerReply(server_pid))
    uid = logged.uid if logged is not None else None
    if uid is None and process is not None:
        uid = process.uid
    started = logged.started_at if logged is not None else None
    allowed = server_limits(context, daemon, logged, reply)
    clients = merge_clients(context, daemon, pid, logged, reply, allowed)
    uuids = daemon.device_uuids().values()
    contexts = _contexts(uuids, clients) if clients is not None else {}
    confirmed = process is not None and is_server(process)
    # The log of an ordinary user's daemon may call any process its server.
    unproved = not confirmed and daemon.facts.limited
    count = len(clients) if clients is not None else None
    state = reply.state
    if logged is not None and daemon.log_readable("server"):
        count, state = len(logged.clients), logged.state
    elif logged is not None:
        state = state or logged.state
    return Server(
        pid=pid,
        uid=uid,
        user=context.user(uid),
        start_time_seconds=process.start_time_seconds if process is not None else started,
        state=state,
        ghost=logged.is_ghost if logged is not None and not unproved else None,
        clients_connected=count,
        contexts=contexts,
        contexts_limit=_contexts_limits(
            context,
            logged,
            (*uuids, *contexts),
            raised=_connections_raised(context, daemon, clients),
        ),
        active_thread_ratio=allowed.ratio,
        pinned_memory_limit_bytes=allowed.memory,
        memory_used_bytes=context.memory_used(pid),
        possible_unfinished_work=logged.possible_unfinished_work if logged is not None else None,
        clients=clients or (),
        confirmed=confirmed,
        shares_by_file=logged is not None and logged.shares_by_file,
    )


def _contexts(uuids: Iterable[str], clients: Iterable[Client]) -> dict[str, int]:
    """Return GPU UUID -> CUDA contexts of all clients; 0 for a GPU that no client uses."""
    contexts = Counter(dict.fromkeys(uuids, 0))
    for client in clients:
        contexts.update(client.contexts)
    return dict(contexts)


def _contexts_limits(
    context: MergeContext, logged: TrackedServer | None, uuids: Iterable[str], *, raised: bool
) -> dict[str, int]:
    """Return GPU UUID -> the log's limit at the last rejection, else the documented limit.

    A MIG instance has a part of the limit, which is not read; with raised connections the limit is
    not documented. In confidential computing it is lower.
    """
    found = {}
    raised = raised or context.nvml.confidential
    for uuid in uuids:
        gpu = context.gpus.get(uuid)
        limit = logged.client_limit if logged is not None else None
        if limit is None and gpu is not None and gpu.parent_uuid is None and not raised:
            version = context.nvml.driver_version
            limit = client_limits.context_limit(gpu.compute_capability, version)
        if limit is not None:
            found[uuid] = limit
    return found


def _connections_raised(
    context: MergeContext, daemon: DaemonInputs, clients: Iterable[Client] | None
) -> bool:
    """Return whether a client has a CUDA_DEVICE_MAX_CONNECTIONS above the default of 2."""
    found = (context.process(daemon.facts, client.pid) for client in clients or ())
    environments = (one.mps_environment or {} for one in found if one is not None)
    numbers = (one.get("CUDA_DEVICE_MAX_CONNECTIONS", "") for one in environments)
    return any(number.isdecimal() and int(number) > 2 for number in numbers)


# ---------------------------------------------------------------------------------- partitions


def _merge_partitioning(context: MergeContext, inputs: DaemonInputs) -> Partitioning:
    """Return a daemon's lists with PIDs of this host, and with GPU UUIDs where they are known."""
    found = inputs.answers.partitioning

    def on_host(row: Any) -> Any:
        if isinstance(row, NamedServer):
            return replace(row, pid=context.host_pid(inputs, row.pid or 0) or None)
        if isinstance(row, NamespaceClient):
            uuids = (_uuid(context, found, row.server_name, device) for device in row.devices)
            pid = context.host_pid(inputs, row.pid)
            return replace(row, pid=pid, devices=tuple(filter(None, uuids)))
        if isinstance(row, SmPartition):
            uuid = _uuid(context, found, row.server_name, row.device)
            return replace(row, device=uuid or row.device)
        return row

    return found.changed(on_host)


def _uuid(context: MergeContext, found: Partitioning, server_name: str, device: str) -> str | None:
    """Return the GPU's UUID for an ordinal, a UUID or its beginning; None if unknown or several."""
    if device.isdigit():
        named = {one.uuid for one in found.devices_of(server_name) if one.ordinal == int(device)}
    elif device in context.gpus:
        return device
    else:
        named = {uuid for uuid in context.gpus if uuid.startswith(device)} or {device}
    return named.pop() if len(named) == 1 else None


def _merge_named_server(
    context: MergeContext, inputs: DaemonInputs, found: Partitioning, named: NamedServer, pid: int
) -> Server:
    """Merge the facts about a server of an MPS v3 daemon that has a process."""
    process = context.process(inputs.facts, pid)
    uid = process.uid if named.uid is None and process is not None else named.uid
    own = [one for one in found.rows(NamespaceClient) if one.server_name == named.name]
    counted = found.is_whole(NamespaceClient, "client_list")
    return Server(
        pid=pid,
        uid=uid,
        user=context.user(uid),
        start_time_seconds=process.start_time_seconds if process is not None else None,
        state=named.status,
        clients_connected=len(own) if counted else None,
        memory_used_bytes=context.memory_used(pid),
        clients=tuple(merge_listed_client(context, inputs, found, pid, one) for one in own),
        confirmed=process is not None and is_server(process),
        name=named.name,
    )


def _count_clients(found: Partitioning, servers: Sequence[Server], *, known: bool) -> Partitioning:
    """Add the number of clients to each namespace and SM partition where it is known."""
    listed = found.rows(NamespaceClient)
    by_namespace = Counter((one.server_name, one.namespace) for one in listed)
    clients = [client for server in servers for client in server.clients]
    by_partition = Counter(client.sm_partition for client in clients)
    all_listed = found.is_whole(NamespaceClient, "client_list")
    all_readable = (
        known
        and all(server.clients_connected is not None for server in servers)
        and all(client.environment_readable for client in clients)
    )

    def counted(row: Any) -> Any:
        if isinstance(row, Namespace) and all_listed and not by_namespace[row.server_name, None]:
            return replace(row, clients=by_namespace[row.server_name, row.name])
        if isinstance(row, SmPartition) and all_readable and row.partition_id is not None:
            return replace(row, clients=by_partition[row.partition_id])
        return row

    return found.changed(counted)
