"""Merges the observations and the tracked state of each daemon into a Snapshot. Pure.

Several sources show one thing: a server is in the log, its process in /proc and in NVML's list,
and the control tool replies about it. Without one source, values of the others remain; without
all, the value is absent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from mps_exporter import limits_timeouts_intervals as policy
from mps_exporter.merge.daemons import control_state, merge_daemon
from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.merge.stranded import is_stranded, stranded_pids
from mps_exporter.observations import (
    GpuObservation,
    NvmlObservation,
    ProcessList,
    ProcfsObservation,
)
from mps_exporter.snapshot import (
    PROCESS_KINDS,
    Client,
    CollectorResult,
    ControlDaemon,
    Gpu,
    NamedServer,
    NamespaceClient,
    ProcessKind,
    Snapshot,
)

__all__ = ["DaemonInputs", "control_state", "merge", "pids_of_interest"]


def pids_of_interest(gpus: NvmlObservation | None, daemons: Iterable[DaemonInputs]) -> set[int]:
    """Return the PIDs that sources other than logs name, to be identified in /proc."""
    pids: set[int] = set()
    for gpu in gpus.gpus if gpus is not None else ():
        pids.update(process.pid for process in gpu.processes or ())
    for daemon in daemons:
        pids.update(process.pid for process in daemon.facts.servers)
        most = policy.MAX_CLIENTS_PER_USER if daemon.facts.limited else None
        for reply in daemon.answers.servers.values():
            pids.update((reply.server_pid, *(reply.client_pids or ())[:most]))
        lists = daemon.answers.partitioning
        pids.update(server.pid or 0 for server in lists.rows(NamedServer)[:most])
        pids.update(client.pid for client in lists.rows(NamespaceClient)[:most])
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
    """Merge the results of one collection. None: a source without a result.

    A client that exits looks stranded for a moment: stranded_since has the processes that looked so
    in earlier readings of the GPUs, with the time of the first such reading (None: each process
    counts at once). One reading proves nothing: the logs may be newer.
    """
    daemons = sorted(daemons, key=lambda inputs: inputs.facts.pipe_directory)
    context = MergeContext(gpus, processes, daemons, stranded_since)
    merged = _merge_daemons(context, daemons, clients_max, taken_at)
    environments = [facts.mps_environment for facts in context.processes.values()]
    return Snapshot(
        taken_at=taken_at,
        driver_version=context.nvml.driver_version,
        cuda_version=context.nvml.cuda_version,
        gpus=_merge_gpus(context, merged, daemons),
        gpu_indexes=context.gpu_indexes,
        daemons=merged,
        collectors=collectors,
        user_names=context.users,
        containers=context.procfs.containers,
        cgroup_memory=context.cgroup_memory,
        unreadable_environments=None if processes is None else environments.count(None),
        ignored_processes=_ignored(context, daemons, merged),
    )


def _merge_daemons(
    context: MergeContext, daemons: Iterable[DaemonInputs], clients_max: int, now: float
) -> tuple[ControlDaemon, ...]:
    merged, shown = list[ControlDaemon](), Counter[int | None]()
    for inputs in daemons:
        user, most = inputs.facts.user, clients_max
        if inputs.facts.limited:
            left = min(
                policy.MAX_CLIENTS_PER_USER - shown[user], policy.MAX_USERS_CLIENTS - shown.total()
            )
            most = min(most, max(0, left))
        merged.append(merge_daemon(context, inputs, most, now))
        if inputs.facts.limited:
            shown[user] += sum(len(server.clients) for server in merged[-1].servers)
    return tuple(merged)


def _ignored(
    context: MergeContext, daemons: Iterable[DaemonInputs], merged: Iterable[ControlDaemon]
) -> dict[int, int]:
    found = Counter[int](context.procfs.ignored_programs)
    for inputs, daemon in zip(daemons, merged, strict=True):
        user = inputs.facts.user
        if inputs.facts.limited and user is not None:
            unfollowed = sum(server.clients.unfollowed for server in inputs.state.servers)
            found[user] += daemon.dropped_clients + unfollowed
    return {user: count for user, count in found.items() if count}


# ---------------------------------------------------------------------------------- GPUs


def _merge_gpus(
    context: MergeContext, daemons: tuple[ControlDaemon, ...], inputs: Sequence[DaemonInputs]
) -> tuple[Gpu, ...]:
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
        seems = stranded_pids(context, by_kind, known, strangers, identified=identified)
        merged.append(_merge_gpu(context, gpu, daemons, by_kind, seems))
    return tuple(merged)


def _merge_gpu(
    context: MergeContext,
    gpu: GpuObservation,
    daemons: Iterable[ControlDaemon],
    by_kind: Mapping[ProcessKind, set[int]],
    seems: tuple[int, ...] | None,
) -> Gpu:
    certain = tuple(pid for pid in seems or () if is_stranded(context, pid))
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
