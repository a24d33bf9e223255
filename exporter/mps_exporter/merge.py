"""Observations and ledgers -> a Snapshot. Pure.

Here the different views of one thing meet: the server that the log names, the process of that PID
in /proc, the entry in NVML's list, the answer of the control tool. Where one is missing the others
stand; where all are, the value is left out.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import get_args

from mps_exporter.mps import limits
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.mps.control_protocol import CANNOT_SEND, ServerReply
from mps_exporter.mps.query_schedule import ServerAnswers
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    GpuObservation,
    LogState,
    NvmlObservation,
    Outcome,
    ProcessFacts,
    ProcessList,
    ProcfsObservation,
)
from mps_exporter.snapshot import (
    PROCESS_KINDS,
    Client,
    ClientSession,
    CollectorResult,
    ControlDaemon,
    ControlState,
    Gpu,
    LedgerView,
    LimitSource,
    ProcessKind,
    Server,
    ServerSession,
    Snapshot,
)

SERVER_PROGRAM = "nvidia-cuda-mps-server"

STRANDED_SECONDS = 1.0
"""A client that ends leaves NVML's list within this time after it left its server."""

LIMIT_VARIABLES = (
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_VISIBLE_DEVICES",
)

# Hundreds of clients stay where they are from one collection to the next.
_attribution_of = lru_cache(maxsize=1024)(parse_cgroup)


@dataclass(frozen=True, slots=True)
class DaemonInputs:
    """All that is known of one daemon at the end of a collection."""

    facts: DaemonFacts
    probe: ControlObservation | None = None
    answers: ServerAnswers = field(default_factory=ServerAnswers)
    view: LedgerView = field(default_factory=lambda: LedgerView(at=0.0))
    logs: tuple[LogState, ...] = ()
    was_readable: bool = False
    """Its control.log could be read at some time: its counters mean something."""
    hung: bool = False
    """The last question that was put to it was not answered in time."""
    queries: int = 0
    query_failures: Mapping[str, int] = field(default_factory=dict)

    def log_readable(self, log: str) -> bool:
        """Whether this log can be read now."""
        return any(state.log == log and state.readable for state in self.logs)

    def logged_servers(self) -> tuple[ServerSession, ...]:
        """The servers of the log; none where it cannot be read."""
        return self.view.servers if self.log_readable("control") else ()


def pids_of_interest(gpus: NvmlObservation | None, daemons: Iterable[DaemonInputs]) -> set[int]:
    """The processes that somebody named: to be identified in /proc."""
    pids: set[int] = set()
    for gpu in gpus.gpus if gpus is not None else ():
        pids.update(process.pid for process in gpu.processes or ())
    for daemon in daemons:
        pids.update(process.pid for process in daemon.facts.servers)
        pids.update(wait.pid for wait in daemon.view.waits)
        for server in daemon.view.servers:
            pids.add(server.pid)
            pids.update(client.pid for client in server.clients)
        for reply in daemon.answers.servers.values():
            pids.update((reply.server_pid, *(reply.client_pids or ())))
    return pids - {0}


def merge(
    *,
    taken_at: float,
    gpus: NvmlObservation | None,
    processes: ProcfsObservation | None,
    daemons: Sequence[DaemonInputs],
    collectors: tuple[CollectorResult, ...] = (),
    clients_max: int = 1000,
    stranded_since: Mapping[int, float] | None = None,
) -> Snapshot:
    """Make the snapshot of one collection. A source that brought nothing is None.

    A client that ends looks stranded for a moment: stranded_since says which looked so in earlier
    readings of the GPUs, and since when (None: every one counts at once). It is the readings' time
    that counts: one reading beside newer and newer logs is no evidence.
    """
    context = _MergeContext(gpus, processes, daemons)
    context.stranded_before = (
        None if stranded_since is None or gpus is None else gpus.at - STRANDED_SECONDS,
        stranded_since or {},
    )
    merged = tuple(
        _daemon(context, inputs, clients_max)
        for inputs in sorted(daemons, key=lambda inputs: inputs.facts.pipe_directory)
    )
    observed = gpus.gpus if gpus is not None else ()
    return Snapshot(
        taken_at=taken_at,
        driver_version=gpus.driver_version if gpus is not None else None,
        cuda_version=gpus.cuda_version if gpus is not None else None,
        gpus=tuple(_gpu(context, gpu, merged, daemons) for gpu in observed),
        gpu_indexes=context.indexes,
        daemons=merged,
        collectors=collectors,
        unreadable_environments=context.unreadable_environments(),
    )


class _MergeContext:
    """What several parts of the merge look up."""

    def __init__(
        self,
        gpus: NvmlObservation | None,
        processes: ProcfsObservation | None,
        daemons: Sequence[DaemonInputs],
    ) -> None:
        self.gpus = {gpu.uuid: gpu for gpu in (gpus.gpus if gpus is not None else ())}
        self.driver_version = gpus.driver_version if gpus is not None else None
        self.processes: Mapping[int, ProcessFacts] = (
            processes.processes if processes is not None else {}
        )
        self.has_processes = processes is not None
        self.stranded_before: tuple[float | None, Mapping[int, float]] = (None, {})
        self.users = {
            facts.uid: facts.user
            for facts in (*self.processes.values(), *_daemon_processes(daemons))
            if facts.uid is not None and facts.user is not None
        }
        self.server_pids = {pid for pid, facts in self.processes.items() if _is_server(facts)}
        self.inner_pids: dict[tuple[int, int], int] = {}
        """(PID namespace, PID in it) -> PID as the host sees it."""
        for facts in self.processes.values():
            if facts.pid_namespace is not None and facts.namespace_pids:
                inner = facts.pid_namespace, facts.namespace_pids[-1]
                self.inner_pids.setdefault(inner, facts.pid)
        self.known_pids = self.server_pids | {
            client.pid
            for inputs in daemons
            if len((inputs.facts.process or _NO_PROCESS).namespace_pids) <= 1
            for session in inputs.logged_servers()
            for client in session.clients
        }
        """Processes, by the host's PIDs, whose daemons are known."""
        self._memory = _memory_by_process(self.gpus.values())
        self.indexes = {gpu.uuid: str(gpu.index) for gpu in self.gpus.values()}
        for inputs in daemons:
            # A daemon that sees all GPUs numbers them as NVML does; one with a choice does not.
            whole = _visible_devices(inputs.facts) is None
            for ordinal, uuid in _device_uuids(inputs).items():
                self.indexes.setdefault(uuid, str(ordinal) if whole else "")

    def is_stranded(self, pid: int) -> bool:
        """Whether a process has looked stranded for long enough to be."""
        before, since = self.stranded_before
        return before is None or since.get(pid, math.inf) <= before

    def user(self, uid: int | None) -> str | None:
        return None if uid is None else self.users.get(uid)

    def memory_used(self, pid: int) -> Mapping[str, int]:
        """GPU UUID -> bytes that the process uses there, as far as NVML tells."""
        return self._memory.get(pid, {})

    def unreadable_environments(self) -> int | None:
        if not self.has_processes:
            return None
        return sum(facts.mps_environment is None for facts in self.processes.values())


def _memory_by_process(gpus: Iterable[GpuObservation]) -> dict[int, dict[str, int]]:
    """PID -> GPU UUID -> bytes."""
    used: dict[int, dict[str, int]] = {}
    for gpu in gpus:
        for process in gpu.processes or ():
            if process.kind == "compute" and process.used_memory_bytes is not None:
                used.setdefault(process.pid, {})[gpu.uuid] = process.used_memory_bytes
    return used


def _daemon_processes(daemons: Iterable[DaemonInputs]) -> Iterable[ProcessFacts]:
    for inputs in daemons:
        if inputs.facts.process is not None:
            yield inputs.facts.process
        yield from inputs.facts.servers


def _visible_devices(facts: DaemonFacts) -> str | None:
    environment = facts.process.mps_environment if facts.process is not None else None
    return (environment or {}).get("CUDA_VISIBLE_DEVICES")


def _device_uuids(inputs: DaemonInputs) -> dict[int, str]:
    """Device ordinal of the daemon -> GPU UUID, from the tool's map or the log."""
    return {**inputs.answers.device_uuids(), **inputs.view.devices}


def _daemon_gpus(context: _MergeContext, inputs: DaemonInputs) -> limits.DaemonGpus:
    """The GPUs of a daemon, in the driver's order.

    The driver orders GPUs of one model as NVML does, by PCI address. Where the models differ its
    default is "the fastest first", which cannot be seen from outside; neither can that of MIG.
    """
    uuids = frozenset(_device_uuids(inputs).values()) - {""}
    whole = {uuid for uuid, gpu in context.gpus.items() if gpu.parent_uuid is None}
    # The tool's map has all of them; the log only those that were used.
    complete = bool(inputs.answers.device_uuids()) or (bool(uuids) and uuids == whole)
    models = {context.gpus[uuid].name or uuid for uuid in uuids & whole}
    order = None
    if complete and (len(uuids) == 1 or (uuids <= whole and len(models) == 1)):
        order = tuple(
            sorted(uuids, key=lambda uuid: context.gpus[uuid].index if uuid in whole else 0)
        )
    return limits.DaemonGpus(uuids, complete, order)


# ---------------------------------------------------------------------------------- daemons


def control_state(inputs: DaemonInputs) -> ControlState | None:
    """Why a daemon answers or not; None when nobody asked and /proc does not tell."""
    facts, probe = inputs.facts, inputs.probe
    alive = facts.process is not None or facts.lock_holder_pid is not None
    if probe is None:
        return "absent" if facts.lock_tested and not alive else None
    if probe.outcome is Outcome.OK:
        return "answering"
    if inputs.view.quit_requested_at is not None and alive:
        # While it drains, the tool is refused, or gets an empty answer, or waits (driver 580).
        return "draining"
    if probe.outcome is Outcome.ABSENT:
        if all(exchange.return_code is None for exchange in probe.exchanges):
            # The tool itself is missing: nobody was asked.
            return "absent" if facts.lock_tested and not alive else None
        return "refused" if alive else "absent"
    if inputs.hung:
        return "unresponsive"
    if probe.outcome in (Outcome.SKIPPED, Outcome.TIMEOUT):
        return None  # nobody was asked, or it has served somebody since
    if alive and _may_drain(inputs, probe):
        return None
    return "refused"


def _may_drain(inputs: DaemonInputs, probe: ControlObservation) -> bool:
    """Whether this may be a daemon that was asked to quit, which only control.log tells for sure.

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


def _daemon(context: _MergeContext, inputs: DaemonInputs, clients_max: int) -> ControlDaemon:
    facts, ledger, answers = inputs.facts, inputs.view, inputs.answers
    process = facts.process
    state = control_state(inputs)
    probe = answers.probe
    servers = tuple(_server(context, inputs, pid) for pid in _server_pids(inputs))
    kept, dropped = _limit_clients(servers, clients_max)
    served = {*_device_uuids(inputs).values()}
    served.update(
        uuid for server in servers for uuid in (*server.contexts, *server.memory_used_bytes)
    )
    return ControlDaemon(
        pipe_directory=facts.pipe_directory,
        log_directory=facts.log_directory,
        state=state,
        pid=process.pid if process is not None else None,
        uid=process.uid if process is not None else None,
        user=process.user if process is not None else None,
        start_time_seconds=process.start_time_seconds if process is not None else None,
        binary_version=ledger.binary_version if process is not None else None,
        protocol="2" if probe is not None else None,
        multiuser=facts.multiuser if process is not None else None,
        visible_devices=_visible_devices(facts),
        query_duration_seconds=_duration(inputs.probe),
        query_failures=inputs.query_failures,
        queries=inputs.queries,
        default_active_thread_ratio=(
            probe.default_active_thread_ratio if probe is not None else None
        ),
        default_pinned_memory_limit_bytes=_default_memory_limits(inputs),
        default_client_priority=next(
            (
                reply.default_client_priority
                for reply in answers.servers.values()
                if reply.default_client_priority is not None
            ),
            None,
        ),
        servers_count=len(servers) if _servers_known(inputs) else None,
        servers=kept,
        waits=ledger.waits,
        handover_backoff_seconds=ledger.handover_backoff_seconds,
        gpu_uuids=tuple(sorted(served - {""})),
        logs=inputs.logs,
        counters=ledger.counters if inputs.was_readable else None,
        incidents=ledger.incidents,
        dropped_clients=dropped,
        error=inputs.probe.error if inputs.probe is not None else None,
        facts=facts,
    )


def _duration(probe: ControlObservation | None) -> float | None:
    if probe is None or not probe.exchanges:
        return None
    return sum(exchange.duration_seconds for exchange in probe.exchanges)


def _default_memory_limits(inputs: DaemonInputs) -> dict[str, int]:
    uuids = _device_uuids(inputs)
    return {
        uuids[ordinal]: limit
        for reply in inputs.answers.servers.values()
        for ordinal, limit in reply.default_pinned_memory_limit_bytes.items()
        if ordinal in uuids
    }


def _limit_clients(servers: tuple[Server, ...], clients_max: int) -> tuple[tuple[Server, ...], int]:
    """Keep at most so many clients with metrics of their own: those that came first."""
    kept, left, dropped = [], clients_max, 0
    for server in servers:
        clients = server.clients[:left]
        left -= len(clients)
        dropped += len(server.clients) - len(clients)
        kept.append(replace(server, clients=clients))
    return tuple(kept), dropped


# ---------------------------------------------------------------------------------- servers


def _servers_known(inputs: DaemonInputs) -> bool:
    return inputs.log_readable("control") or inputs.answers.probe is not None


def _server_pids(inputs: DaemonInputs) -> list[int]:
    """The servers alive, as the daemon numbers processes.

    The log is ahead of the tool's answer, which may be some seconds old; without it, the answer is
    all there is; without either, a child of the daemon in /proc is still a server.
    """
    if inputs.log_readable("control"):
        return [session.pid for session in inputs.view.servers]
    if inputs.answers.probe is not None:
        return list(inputs.answers.probe.server_pids)
    return [process.namespace_pids[-1] if process.namespace_pids else process.pid
            for process in inputs.facts.servers]  # fmt: skip


def _process_of(inputs: DaemonInputs, context: _MergeContext, pid: int) -> ProcessFacts | None:
    """The server's process as this host sees it: by its PID in the daemon's namespace."""
    for process in inputs.facts.servers:
        if pid == (process.namespace_pids[-1] if process.namespace_pids else process.pid):
            return context.processes.get(process.pid, process)
    found = context.processes.get(pid)
    return found if found is not None and _is_server(found) else None


def _is_server(facts: ProcessFacts) -> bool:
    return SERVER_PROGRAM.startswith(facts.name[:15]) and facts.name.startswith("nvidia-cuda-mps")


def _server(context: _MergeContext, inputs: DaemonInputs, pid: int) -> Server:
    session = next((found for found in inputs.logged_servers() if found.pid == pid), None)
    reply = inputs.answers.servers.get(pid)
    process = _process_of(inputs, context, pid)
    host_pid = process.pid if process is not None else pid
    uid = session.uid if session is not None else None
    if uid is None and process is not None:
        uid = process.uid
    started = session.started_at if session is not None else None
    clients = _clients(context, inputs, session, reply, host_pid)
    uuids = _device_uuids(inputs)
    contexts: dict[str, int] = {}
    if clients is not None:
        contexts = dict.fromkeys((*uuids.values(),), 0)
        for client in clients:
            for uuid, count in client.contexts.items():
                contexts[uuid] = contexts.get(uuid, 0) + count
    return Server(
        pid=host_pid,
        uid=uid,
        user=context.user(uid),
        start_time_seconds=process.start_time_seconds if process is not None else started,
        state=_state(session, reply),
        ghost=session.ghost if session is not None else None,
        clients_connected=_count(inputs, session, clients),
        contexts=contexts,
        contexts_limit=_contexts_limits(context, session, (*uuids.values(), *contexts)),
        active_thread_ratio=_thread_ratio(session, reply),
        pinned_memory_limit_bytes={
            uuids[ordinal]: limit
            for ordinal, limit in _memory_limits(session, reply).items()
            if ordinal in uuids
        },
        memory_used_bytes=context.memory_used(host_pid),
        possible_unfinished_work=session.possible_unfinished_work if session is not None else None,
        clients=clients or (),
    )


def _count(
    inputs: DaemonInputs, session: ServerSession | None, clients: tuple[Client, ...] | None
) -> int | None:
    if session is not None and inputs.log_readable("server"):
        return session.clients_count
    return len(clients) if clients is not None else None


def _state(session: ServerSession | None, reply: ServerReply | None) -> str | None:
    if session is not None:
        return session.state
    return reply.state if reply is not None else None


def _thread_ratio(session: ServerSession | None, reply: ServerReply | None) -> float | None:
    if session is not None and session.active_thread_ratio is not None:
        return session.active_thread_ratio
    return reply.active_thread_ratio if reply is not None else None


def _memory_limits(session: ServerSession | None, reply: ServerReply | None) -> Mapping[int, int]:
    reported = reply.pinned_memory_limit_bytes if reply is not None else {}
    logged = session.pinned_memory_limit_bytes if session is not None else {}
    return {**reported, **logged}


def _contexts_limits(
    context: _MergeContext, session: ServerSession | None, uuids: Iterable[str]
) -> dict[str, int]:
    """The documented limit, corrected by the number that the log named when it refused a client."""
    found = {}
    for uuid in uuids:
        gpu = context.gpus.get(uuid)
        capability = gpu.compute_capability if gpu is not None else None
        limit = session.client_limit if session is not None else None
        limit = limit or limits.context_limit(capability, context.driver_version)
        if limit is not None:
            found[uuid] = limit
    return found


# ---------------------------------------------------------------------------------- clients


@dataclass(frozen=True, slots=True)
class _ServerContext:
    """A server, and what all its clients have in common."""

    inputs: DaemonInputs
    session: ServerSession | None
    reply: ServerReply | None
    pid: int
    gpus: limits.DaemonGpus
    ordinals: Mapping[str, int]
    ratio: float | None
    memory: Mapping[int, int]
    limits: dict[Hashable, _ClientLimits] = field(default_factory=dict)
    """By what they follow from: a server's clients are mostly alike."""


def _clients(
    context: _MergeContext,
    inputs: DaemonInputs,
    session: ServerSession | None,
    reply: ServerReply | None,
    server_pid: int,
) -> tuple[Client, ...] | None:
    """The server's clients; None when neither the log nor the tool tells."""
    uuids = _device_uuids(inputs)
    connected: tuple[ClientSession, ...]
    if session is not None and inputs.log_readable("server"):
        connected = session.clients
    elif reply is not None and reply.client_pids is not None:
        connected = tuple(
            ClientSession(
                pid=pid,
                server_pid=server_pid,
                uid=session.uid if session is not None else None,
                connected_at=None,
                contexts={
                    uuids[ordinal]: clients[pid]
                    for ordinal, clients in (reply.contexts or {}).items()
                    if pid in clients and ordinal in uuids
                },
            )
            for pid in dict.fromkeys(reply.client_pids)
        )
    else:
        return None
    if len((inputs.facts.process or _NO_PROCESS).namespace_pids) > 1:
        connected = tuple(
            replace(one, pid=_host_pid(context, inputs, one.pid)) for one in connected
        )
    server_context = _ServerContext(
        inputs=inputs,
        session=session,
        reply=reply,
        pid=server_pid,
        gpus=_daemon_gpus(context, inputs),
        ordinals={uuid: ordinal for ordinal, uuid in uuids.items()},
        ratio=_thread_ratio(session, reply),
        memory=_memory_limits(session, reply),
    )
    if any(client.pid == 0 for client in connected):
        connected = _resolve_pid0_clients(context, connected, server_pid)
    return tuple(_client(context, one, server_context) for one in connected)


_NO_PROCESS = ProcessFacts(0, 0.0)


def _host_pid(context: _MergeContext, inputs: DaemonInputs, pid: int) -> int:
    """Find whom a daemon in its own PID namespace calls so; 0: nobody who could be found."""
    namespace = (inputs.facts.process or _NO_PROCESS).pid_namespace
    return context.inner_pids.get((namespace, pid), 0) if pid and namespace is not None else 0


def _resolve_pid0_clients(
    context: _MergeContext, connected: tuple[ClientSession, ...], server_pid: int
) -> tuple[ClientSession, ...]:
    """Clients that the daemon calls PID 0, since it lives in a PID namespace of its own.

    NVML knows their true PIDs. Where it lists as many MPS processes on the server's GPUs as the
    daemon has clients, they are these; else nobody can say which are whose.
    """
    listed: dict[int, dict[str, int]] = {}
    for gpu in context.gpus.values():
        of_gpu = {process.pid for process in gpu.processes or () if process.kind == "compute"}
        if server_pid not in of_gpu:
            continue
        for process in gpu.processes or ():
            own = process.pid in of_gpu and process.pid not in context.known_pids
            if process.kind == "mps" and own and process.pid != server_pid:
                listed.setdefault(process.pid, {})[gpu.uuid] = 1
    if len(listed) != len(connected):
        return connected
    return tuple(
        replace(one, pid=pid, contexts=contexts)
        for one, (pid, contexts) in zip(connected, sorted(listed.items()), strict=True)
    )


def _client(
    context: _MergeContext, session: ClientSession, server_context: _ServerContext
) -> Client:
    process = context.processes.get(session.pid)
    uid = process.uid if process is not None else session.uid
    attribution = _attribution_of(process.cgroup if process is not None else None)
    environment = process.mps_environment if process is not None else None
    # Without its environment: whether it lowered its own limits, nobody here may know.
    own = (
        _NOT_KNOWN
        if environment is None
        else _limits(context, session, server_context, environment)
    )
    return Client(
        pid=session.pid,
        server_pid=server_context.pid,
        uid=uid,
        user=process.user if process is not None else context.user(uid),
        command=process.name if process is not None else None,
        container_id=attribution.container_id,
        pod_uid=attribution.pod_uid,
        slurm_job_id=attribution.slurm_job_id,
        systemd_unit=attribution.systemd_unit,
        pid_namespace=process.pid_namespace if process is not None else None,
        environment_readable=environment is not None if process is not None else None,
        connected_at=session.connected_at,
        state=session.state,
        state_since=session.state_since,
        contexts=session.contexts,
        memory_used_bytes=context.memory_used(session.pid) if session.pid else {},
        limit_source=own.source,
        active_thread_ratio=own.ratio,
        sm_limit=own.sms,
        memory_limit_bytes=own.memory,
        priority=own.priority,
        percentage_ignored=own.percentage_ignored,
        memory_limit_ignored=own.memory_ignored,
    )


@dataclass(frozen=True, slots=True)
class _ClientLimits:
    """What a client may use, as far as its environment and its server tell."""

    source: LimitSource = "unknown"
    ratio: float | None = None
    sms: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    priority: int | None = None
    percentage_ignored: str | None = None
    memory_ignored: str | None = None


_NOT_KNOWN = _ClientLimits()


def _limits(
    context: _MergeContext,
    session: ClientSession,
    server_context: _ServerContext,
    environment: Mapping[str, str],
) -> _ClientLimits:
    """Give a client's limits; those that have the same reasons are worked out once."""
    allowed_ratio = session.active_thread_ratio  # at connect
    if allowed_ratio is None:
        allowed_ratio = server_context.ratio
    allowed_memory = session.pinned_memory_limit_bytes  # at connect
    if allowed_memory is None:
        allowed_memory = server_context.memory
    reported = tuple(map(environment.get, LIMIT_VARIABLES))
    reasons = allowed_ratio, tuple(allowed_memory.items()), reported, tuple(session.contexts)
    found = server_context.limits.get(reasons)
    if found is None:
        uuids = tuple(session.contexts)
        found = _limits_of(context, allowed_ratio, allowed_memory, uuids, server_context, *reported)
        server_context.limits[reasons] = found
    return found


def _limits_of(
    context: _MergeContext,
    allowed_ratio: float | None,
    allowed_memory: Mapping[int, int],
    uuids: tuple[str, ...],
    server_context: _ServerContext,
    percentage: str | None,
    memory_text: str | None,
    priority: str | None,
    visible_devices: str | None,
) -> _ClientLimits:
    own = limits.parse_active_thread_percentage(percentage)
    ratio = limits.effective_ratio(own.ratio, allowed_ratio) if allowed_ratio is not None else None
    lowered = own.ratio is not None and allowed_ratio is not None and own.ratio < allowed_ratio
    sms: dict[str, int] = {}
    memory: dict[str, int] = {}
    visible = limits.visible_gpus(visible_devices, server_context.gpus)
    own_memory = limits.client_memory_limits(memory_text, visible, uuids, server_context.gpus)
    for uuid in uuids:
        gpu = context.gpus.get(uuid)
        if ratio is not None and gpu is not None and gpu.sm_count is not None:
            count = limits.sm_limit(ratio, gpu.sm_count, gpu.compute_capability)
            if count is not None:
                sms[uuid] = count
        if own_memory.bytes_by_uuid is None:
            continue
        ordinal = server_context.ordinals.get(uuid)
        given = own_memory.bytes_by_uuid.get(uuid)
        allowed = allowed_memory.get(ordinal) if ordinal is not None else None
        known = [limit for limit in (given, allowed) if limit is not None]
        if known:
            memory[uuid] = min(known)
    source: LimitSource = "client" if lowered else "server"
    return _ClientLimits(
        source="unknown" if own_memory.bytes_by_uuid is None else source,
        ratio=ratio,
        sms=sms,
        memory=memory,
        priority=limits.parse_client_priority(priority),
        percentage_ignored=percentage if own.ignored else None,
        memory_ignored=memory_text if own_memory.ignored else None,
    )


# ---------------------------------------------------------------------------------- GPUs


def _gpu(
    context: _MergeContext,
    gpu: GpuObservation,
    daemons: tuple[ControlDaemon, ...],
    inputs: Sequence[DaemonInputs],
) -> Gpu:
    servers = {server.pid for daemon in daemons for server in daemon.servers}
    servers |= context.server_pids
    clients = [client for daemon in daemons for server in daemon.servers
               for client in server.clients if gpu.uuid in client.contexts]  # fmt: skip
    processes_by_kind = _processes_by_kind(gpu, servers)
    stranded = None
    if "mps_client" in processes_by_kind:
        found = _stranded(
            processes_by_kind["mps_client"], processes_by_kind["mps_server"], daemons, inputs
        )
        stranded = None if found is None else tuple(sorted(found))
    direct = sorted(processes_by_kind.get("direct", ()))
    committed = sum(client.sm_limit.get(gpu.uuid, 0) for client in clients)
    all_known = all(gpu.uuid in client.sm_limit for client in clients)
    whole = gpu.sm_count
    with_memory = [client.memory_limit_bytes[gpu.uuid] for client in clients
                   if gpu.uuid in client.memory_limit_bytes]  # fmt: skip
    return Gpu(
        observation=gpu,
        index=str(gpu.index),
        uuid=gpu.uuid,
        processes_by_kind={kind: len(pids) for kind, pids in processes_by_kind.items()}
        if processes_by_kind
        else None,
        direct_pids=tuple(direct),
        direct_processes=tuple(
            context.processes[pid] for pid in direct if pid in context.processes
        ),
        served_by=tuple(
            daemon.pipe_directory
            for daemon in daemons
            if daemon.state != "absent" and gpu.uuid in daemon.gpu_uuids
        ),
        stranded_pids=stranded,
        stranded_clients=None if stranded is None else sum(map(context.is_stranded, stranded)),
        sm_committed_ratio=committed / whole if whole and all_known else None,
        client_memory_committed_bytes=sum(with_memory) if clients else None,
    )


def _processes_by_kind(gpu: GpuObservation, servers: set[int]) -> dict[ProcessKind, set[int]]:
    """The processes by what they are to MPS, as far as the lists that could be read tell.

    A client is told from a process beside MPS by the MPS list alone, so that without it, which old
    drivers lack, neither is known. A server is known by its PID, wherever it is listed.
    """
    if gpu.processes is None:
        return {}
    lists: dict[ProcessList, set[int]] = {
        kind: set() for kind in get_args(ProcessList) if kind not in gpu.unread_lists
    }
    for process in gpu.processes:
        lists[process.kind].add(process.pid)
    processes_by_kind: dict[ProcessKind, set[int]] = {}
    if "compute" in lists:
        compute = lists["compute"]
        if "mps" in lists:
            # NVML's MPS list can hold a client of another GPU, with 0 bytes: the compute list has
            # not.
            clients = (lists["mps"] & compute) - servers
            processes_by_kind = {"mps_client": clients, "direct": compute - clients - servers}
        processes_by_kind["mps_server"] = compute & servers
    if "graphics" in lists:
        processes_by_kind["graphics"] = lists["graphics"]
    return {kind: processes_by_kind[kind] for kind in PROCESS_KINDS if kind in processes_by_kind}


def _stranded(
    mps: set[int],
    servers_here: set[int],
    daemons: tuple[ControlDaemon, ...],
    inputs: Sequence[DaemonInputs],
) -> set[int] | None:
    """Find the MPS processes without a server; None: it cannot be told.

    Certain where no server is on the GPU, or where every daemon's log names all its clients. A
    process that waits in a queue is listed by NVML, too, and lacks a server for another reason.
    """
    queued = {wait.pid for daemon in daemons for wait in daemon.waits}
    if not servers_here:
        return mps - queued
    all_readable = all(
        daemon.log_readable("control") and daemon.log_readable("server") for daemon in inputs
    )
    connected = {client.pid for daemon in daemons for server in daemon.servers
                 for client in server.clients}  # fmt: skip
    if not all_readable or 0 in connected or any(daemon.dropped_clients for daemon in daemons):
        return None
    return mps - connected - queued
