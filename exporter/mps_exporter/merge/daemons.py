"""A daemon and its servers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mps_exporter.merge.clients import merge_clients
from mps_exporter.merge.daemon_inputs import DaemonInputs, MergeContext, ServerInputs, is_server
from mps_exporter.merge.named_servers import (
    clients_by_partition,
    in_partitions,
    merge_named_servers,
    merge_partitioning,
)
from mps_exporter.mps import client_limits
from mps_exporter.mps.control_protocol import CANNOT_SEND
from mps_exporter.mps.policy import CLOCK_TOLERANCE_SECONDS
from mps_exporter.observations import ControlObservation, Outcome, ProcessFacts
from mps_exporter.snapshot import (
    Client,
    ControlDaemon,
    ControlState,
    Handover,
    Partitioning,
    Server,
)


def merge_daemon(
    context: MergeContext, inputs: DaemonInputs, clients_max: int, now: float
) -> ControlDaemon:
    """Merge all that is known of one daemon."""
    facts, logged, probe = inputs.facts, inputs.state, inputs.answers.probe
    process = facts.process
    devices = inputs.device_uuids()
    partitioning = merge_partitioning(context, inputs)
    if partitioning is not None and partitioning.protocol == "3":
        servers = merge_named_servers(context, inputs, partitioning)
        whole = partitioning.is_whole("server_list")
        servers_known = partitioning.servers is not None and whole
    else:
        servers = tuple(
            _merge_server(context, _server_inputs(context, inputs, pid))
            for pid in _server_pids(inputs)
        )
        servers_known = _servers_known(inputs)
    servers = in_partitions(context, partitioning, servers)
    kept, dropped = _limit_clients(servers, clients_max)
    state = control_state(inputs)
    timeline_since, timeline = logged.timeline.snapshot(now)
    return ControlDaemon(
        pipe_directory=facts.pipe_directory,
        log_directory=facts.log_directory,
        state=state,
        resumed=inputs.resumed,
        pid=process.pid if process is not None else None,
        uid=process.uid if process is not None else None,
        user=process.user if process is not None else None,
        start_time_seconds=process.start_time_seconds if process is not None else None,
        binary_version=logged.daemon.binary_version if process is not None else None,
        protocol="3" if inputs.speaks_v3 else "2" if probe is not None else None,
        multiuser=facts.multiuser if process is not None else None,
        visible_devices=inputs.visible_devices(),
        query_duration_seconds=_probe_seconds(inputs.probe),
        query_failures=inputs.query_failures,
        queries=inputs.queries,
        default_active_thread_ratio=(
            probe.default_active_thread_ratio if probe is not None else None
        ),
        default_pinned_memory_limit_bytes=_default_memory_limits(inputs),
        default_client_priority=_default_client_priority(inputs),
        servers_count=len(servers) if servers_known else None,
        servers=kept,
        waits=logged.waits,
        handover_backoff_seconds=logged.handover_backoff_seconds,
        gpu_uuids=_served_gpus(context, devices.values(), servers, partitioning),
        logs=inputs.logs,
        counters=logged.counters.snapshot() if inputs.was_readable else None,
        incidents=logged.incidents.snapshot(),
        timeline=timeline,
        timeline_since=timeline_since,
        dropped_clients=dropped,
        error=inputs.probe.error if inputs.probe is not None else None,
        facts=facts,
        partitioning=partitioning,
        clients_by_partition=clients_by_partition(servers) if servers_known else None,
        handover=_handover_in_progress(context, inputs) if state == "unresponsive" else None,
    )


def _handover_in_progress(context: MergeContext, inputs: DaemonInputs) -> Handover | None:
    """The client that the daemon was serving last, if its process is surely this one."""
    last = inputs.state.handover
    if last is None or not inputs.log_readable("control") or inputs.has_own_pid_namespace():
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
    context: MergeContext,
    uuids: Iterable[str],
    servers: Iterable[Server],
    partitioning: Partitioning | None,
) -> tuple[str, ...]:
    """The GPUs that a daemon is known to serve, and those on which a server of it is."""
    served = set(uuids)
    if partitioning is not None:
        served.update(one.uuid for one in partitioning.devices or ())
        for named in partitioning.servers or ():
            served.update(one for one in named.allowed_devices if one in context.gpus)
    for server in servers:
        served.update(server.contexts, server.memory_used_bytes)
    return tuple(sorted(served - {""}))


def _probe_seconds(probe: ControlObservation | None) -> float | None:
    if probe is None or not probe.exchanges:
        return None
    return sum(exchange.duration_seconds for exchange in probe.exchanges)


def _default_memory_limits(inputs: DaemonInputs) -> dict[str, int]:
    uuids = inputs.device_uuids()
    return {
        uuids[ordinal]: limit
        for reply in inputs.answers.servers.values()
        for ordinal, limit in reply.default_pinned_memory_limit_bytes.items()
        if ordinal in uuids
    }


def _default_client_priority(inputs: DaemonInputs) -> int | None:
    for reply in inputs.answers.servers.values():
        if reply.default_client_priority is not None:
            return reply.default_client_priority
    return None


def _limit_clients(servers: tuple[Server, ...], clients_max: int) -> tuple[tuple[Server, ...], int]:
    """Keep at most so many clients with metrics of their own: those that came first."""
    kept, left, dropped = [], clients_max, 0
    for server in servers:
        clients = server.clients[:left]
        left -= len(clients)
        dropped += len(server.clients) - len(clients)
        kept.append(replace(server, clients=clients))
    return tuple(kept), dropped


# ---------------------------------------------------------------------------------- state


def control_state(inputs: DaemonInputs) -> ControlState | None:
    """Why a daemon answers or not; None when no query was sent and /proc does not show it."""
    probe = inputs.probe
    alive = _is_running(inputs)
    unasked: ControlState | None = "absent" if inputs.facts.lock_tested and not alive else None
    if probe is None:
        return unasked
    if probe.outcome is Outcome.OK:
        return "answering"
    if inputs.state.daemon.quit_requested_at is not None and alive:
        # While it drains, the tool is refused, or gets an empty answer, or waits (driver 580).
        return "draining"
    if probe.outcome is Outcome.ABSENT:
        if not _tool_ran(probe):
            return unasked
        return "refused" if alive else "absent"
    if inputs.hung:
        return "unresponsive"
    if probe.outcome in (Outcome.SKIPPED, Outcome.TIMEOUT):
        return None  # no query was sent, or it has served a client since
    if alive and _may_drain(inputs, probe):
        return None
    return "refused"


def _is_running(inputs: DaemonInputs) -> bool:
    return inputs.facts.process is not None or inputs.facts.lock_holder_pid is not None


def _tool_ran(probe: ControlObservation) -> bool:
    """Whether a query was sent: the tool itself may be missing."""
    return any(exchange.return_code is not None for exchange in probe.exchanges)


def _may_drain(inputs: DaemonInputs, probe: ControlObservation) -> bool:
    """Whether this may be a daemon that was asked to quit, which only control.log proves.

    While it drains, the tool says that it cannot send the command, or nothing (driver 580).
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


def _servers_known(inputs: DaemonInputs) -> bool:
    known = inputs.log_names_servers() or inputs.answers.probe is not None
    return known or (inputs.speaks_v3 and control_state(inputs) == "absent")


def _server_pids(inputs: DaemonInputs) -> list[int]:
    """The servers alive, as the daemon numbers processes.

    The log is ahead of the tool's answer, which may be some seconds old; without it, the answer is
    all there is; without either, a child of the daemon in /proc is still a server.
    """
    if inputs.log_names_servers():
        return [server.pid for server in inputs.state.servers]
    if inputs.answers.probe is not None:
        return list(inputs.answers.probe.server_pids)
    return [process.own_pid for process in inputs.facts.servers]


def _process_of(context: MergeContext, inputs: DaemonInputs, pid: int) -> ProcessFacts | None:
    """The server's process as this host sees it: by its PID in the daemon's namespace."""
    for process in inputs.facts.servers:
        if pid == process.own_pid:
            return context.processes.get(process.pid, process)
    found = context.process(inputs.facts, pid)
    return found if found is not None and is_server(found) else None


def _server_inputs(context: MergeContext, inputs: DaemonInputs, pid: int) -> ServerInputs:
    """All that is known of the server that its daemon calls so."""
    process = _process_of(context, inputs, pid)
    logged = inputs.state.servers.get(pid) if inputs.log_names_servers() else None
    return ServerInputs(
        daemon=inputs,
        pid=process.pid if process is not None else pid,
        logged=logged,
        reply=inputs.answers.servers.get(pid),
        process=process,
        devices=inputs.device_uuids(),
    )


def _merge_server(context: MergeContext, inputs: ServerInputs) -> Server:
    logged, process = inputs.logged, inputs.process
    uid = inputs.uid()
    started = logged.started_at if logged is not None else None
    clients = merge_clients(context, inputs)
    contexts = _contexts(inputs.devices.values(), clients) if clients is not None else {}
    confirmed = process is not None and is_server(process)
    # An ordinary user's log may call any process its server.
    unproved = not confirmed and inputs.daemon.facts.limited
    return Server(
        pid=inputs.pid,
        uid=uid,
        user=context.user(uid),
        start_time_seconds=process.start_time_seconds if process is not None else started,
        state=inputs.state(),
        ghost=logged.is_ghost if logged is not None and not unproved else None,
        clients_connected=_count(inputs, clients),
        contexts=contexts,
        contexts_limit=_contexts_limits(context, inputs, (*inputs.devices.values(), *contexts)),
        active_thread_ratio=inputs.thread_ratio(),
        pinned_memory_limit_bytes={
            inputs.devices[ordinal]: limit
            for ordinal, limit in inputs.memory_limits_by_ordinal().items()
            if ordinal in inputs.devices
        },
        memory_used_bytes=context.memory_used(inputs.pid),
        possible_unfinished_work=logged.possible_unfinished_work if logged is not None else None,
        clients=clients or (),
        confirmed=confirmed,
    )


def _contexts(uuids: Iterable[str], clients: Iterable[Client]) -> dict[str, int]:
    """GPU UUID -> CUDA contexts of all clients; 0 on a GPU of the daemon that no client uses."""
    contexts = dict.fromkeys(uuids, 0)
    for client in clients:
        for uuid, count in client.contexts.items():
            contexts[uuid] = contexts.get(uuid, 0) + count
    return contexts


def _count(inputs: ServerInputs, clients: tuple[Client, ...] | None) -> int | None:
    if inputs.logged is not None and inputs.clients_logged:
        return inputs.logged.clients.count
    return len(clients) if clients is not None else None


def _contexts_limits(
    context: MergeContext, inputs: ServerInputs, uuids: Iterable[str]
) -> dict[str, int]:
    """The documented limit, corrected by the number that the log named when it refused a client."""
    found = {}
    for uuid in uuids:
        gpu = context.gpus.get(uuid)
        capability = gpu.compute_capability if gpu is not None else None
        limit = inputs.logged.client_limit if inputs.logged is not None else None
        limit = limit or client_limits.context_limit(capability, context.driver_version)
        if limit is not None:
            found[uuid] = limit
    return found
