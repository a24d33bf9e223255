"""Each GPU: its processes by their role in MPS, and stranded clients, which no server has."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.observations import GpuObservation, ProcessList
from mps_exporter.snapshot import PROCESS_KINDS, Client, ControlDaemon, Gpu, ProcessKind

Known = tuple[ControlDaemon, DaemonInputs]  # A merged daemon and its inputs.


def merge_gpus(
    context: MergeContext, daemons: tuple[ControlDaemon, ...], inputs: Sequence[DaemonInputs]
) -> tuple[Gpu, ...]:
    """Return the GPUs that NVML lists, with the processes that each of them has."""
    # The log of an ordinary user's daemon may call any process its server.
    claimed = {
        server.pid
        for daemon in daemons
        for server in daemon.servers
        if server.confirmed or not daemon.facts.limited
    }
    strangers = context.server_pids - claimed
    known = tuple(zip(daemons, inputs, strict=True))
    merged = list[Gpu]()
    for gpu in context.nvml.gpus:
        by_kind = _processes_by_kind(gpu, context.server_pids | claimed)
        # A server whose process cannot be read looks like a process without MPS.
        identified = by_kind.get("direct", set()) <= context.processes.keys()
        seems = _stranded_pids(context, by_kind, known, strangers, identified=identified)
        merged.append(_merge_gpu(context, gpu, daemons, by_kind, seems))
    return tuple(merged)


def _merge_gpu(
    context: MergeContext,
    gpu: GpuObservation,
    daemons: Iterable[ControlDaemon],
    by_kind: Mapping[ProcessKind, set[int]],
    seems: tuple[int, ...] | None,
) -> Gpu:
    certain = tuple(pid for pid in seems or () if _is_stranded(context, pid))
    stranded = certain if certain or seems == () else None  # The others may be about to exit.
    direct = tuple(sorted(by_kind.get("direct", ())))
    serving = [one for one in daemons if one.state != "absent" and gpu.uuid in one.gpu_uuids]
    # What ordinary users' daemons claim counts only where no other daemon serves the GPU.
    trusted = any(not one.facts.limited for one in serving)
    counted = [one for one in daemons if not (trusted and one.facts.limited)]
    clients = [
        client
        for daemon in counted
        for server in daemon.servers
        for client in server.clients
        if gpu.uuid in client.contexts or gpu.uuid in client.gpu_uuids
    ]
    memory = (client.memory_limit_bytes.get(gpu.uuid, 0) for client in clients)
    unlisted = any(
        server.clients_connected is None
        for daemon in counted
        if gpu.uuid in daemon.gpu_uuids or not daemon.gpu_uuids
        for server in daemon.servers
    )
    return Gpu(
        observation=gpu,
        index=str(gpu.index),
        uuid=gpu.uuid,
        processes_by_kind={kind: len(pids) for kind, pids in by_kind.items()} or None,
        direct_pids=direct,
        direct_processes=tuple(
            context.processes[pid] for pid in direct if pid in context.processes
        ),
        served_by=tuple(daemon.pipe_directory for daemon in serving),
        seems_stranded=seems,
        stranded_pids=stranded,
        stranded_clients=None if stranded is None else len(stranded),
        sm_committed_ratio=None if unlisted else _sm_committed_ratio(gpu, clients),
        client_memory_committed_bytes=sum(memory) if clients else None,
    )


def _sm_committed_ratio(gpu: GpuObservation, clients: Sequence[Client]) -> float | None:
    """Return the clients' SM limits / the GPU's SMs; None if one is unknown."""
    if not gpu.sm_count or any(gpu.uuid not in client.sm_limit for client in clients):
        return None
    return sum(client.sm_limit[gpu.uuid] for client in clients) / gpu.sm_count


def _processes_by_kind(gpu: GpuObservation, servers: frozenset[int]) -> dict[ProcessKind, set[int]]:
    """Return the processes by their role in MPS, for the lists that could be read.

    Only the MPS list, which old drivers lack, distinguishes a client from a process without MPS.
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
            # Unlike the compute list, the MPS list can contain a client of another GPU (0 bytes).
            clients = (lists["mps"] & compute) - servers
            processes_by_kind = {"mps_client": clients, "direct": compute - clients - servers}
        processes_by_kind["mps_server"] = compute & servers
    if "graphics" in lists:
        processes_by_kind["graphics"] = lists["graphics"]
    return {kind: processes_by_kind[kind] for kind in PROCESS_KINDS if kind in processes_by_kind}


def _is_stranded(context: MergeContext, pid: int) -> bool:
    """Return whether a process lacks a server long enough, or no times are known."""
    if context.stranded_since is None:
        return True
    since = context.stranded_since.get(pid, math.inf)
    return since <= context.nvml.at - policy.STRANDED_SECONDS


def _stranded_pids(
    context: MergeContext,
    by_kind: Mapping[ProcessKind, set[int]],
    daemons: Sequence[Known],
    strangers: frozenset[int],
    *,
    identified: bool,
) -> tuple[int, ...] | None:
    """Return the MPS processes without a server; None if unknown.

    Certain if no server is on the GPU, or if the logs of every daemon that may serve the process
    show all its clients. Processes that wait in a queue are left out: NVML lists them, too.
    `strangers` are servers of no known daemon: on the GPU, such a server may serve its user's
    clients, and root's server the clients of all users. Not `identified`: a process that /proc does
    not show may be a server.
    """
    if "mps_client" not in by_kind:
        return None
    certain, unknown = list[int](), False
    by_user: dict[int | None, set[int]] = {}
    for pid in by_kind["mps_client"]:
        facts = context.processes.get(pid)
        by_user.setdefault(None if facts is None else facts.uid, set()).add(pid)
    others = {context.processes[pid].uid for pid in by_kind["mps_server"] & strangers}
    for uid, pids in by_user.items():
        # An ordinary user's daemon serves that user only, whatever its logs claim of others.
        serving = [
            one for one in daemons if not one[0].facts.limited or uid in (None, one[0].facts.user)
        ]
        if not by_kind["mps_server"] and identified:
            known: set[int] | None = set()
        elif others and (uid is None or not others.isdisjoint({uid, 0, None})):
            known = None
        else:
            known = _known_clients(serving, context.nvml.at - policy.STRANDED_SECONDS)
        left = pids - (known or set()) - {wait.pid for one, _ in serving for wait in one.waits}
        if known is None or (left and not identified):
            unknown = True
        else:
            certain += left
    return tuple(sorted(certain)) if certain or not unknown else None


def _known_clients(daemons: Sequence[Known], at: float) -> set[int] | None:
    """Return the PIDs of the daemons' clients at a time; None if not all known, or no daemons."""
    inputs = [one for _, one in daemons]
    # An MPS v3 daemon lists a new client too late.
    all_readable = all(one.log_names_servers() and one.log_readable("server") for one in inputs)
    connected = {
        client.pid
        for daemon, _ in daemons
        for server in daemon.servers
        for client in server.clients
    }
    complete = daemons and all_readable and 0 not in connected
    if not complete or any(daemon.dropped_clients for daemon, _ in daemons):
        return None
    hangs = any((one.state.clock_ms or 0) < at * 1000.0 for one in inputs)  # a log read hangs
    if hangs or not all(server.has_all_lines for one in inputs for server in one.state.servers):
        return None
    # Replies about living servers list clients, too, by their PIDs in the daemon's namespace.
    # Replies about ended servers may list the clients left behind.
    for one in inputs:
        for server in one.state.servers:
            if (reply := one.answers.servers.get(server.pid)) is not None:
                connected.update(*(reply.contexts or {}).values())
    return connected
