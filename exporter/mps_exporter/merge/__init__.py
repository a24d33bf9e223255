"""Merges the observations and the tracked state of each daemon into a Snapshot. Pure.

Several sources show one thing: a server is in the log, its process in /proc and in NVML's list,
and the control tool replies about it. Without one source, values of the others remain; without
all, the value is absent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.merge.daemons import control_state, merge_daemon
from mps_exporter.merge.gpus import merge_gpus
from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.observations import NvmlObservation, ProcfsObservation
from mps_exporter.snapshot import (
    CollectorResult,
    ControlDaemon,
    NamedServer,
    NamespaceClient,
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
        gpus=merge_gpus(context, merged, daemons),
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
