"""Merges the observations and the tracked state of each daemon into a Snapshot. Pure.

Here the views of one thing meet: the server in the log, the process of that PID in /proc, the entry
in NVML's list, the reply of the control tool. If one view is missing, the others remain; if all
are, the value is absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mps_exporter.merge.daemons import control_state, merge_daemon
from mps_exporter.merge.gpus import merge_gpus
from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.merge.policy import MAX_CLIENTS_PER_USER, MAX_LIMITED_CLIENTS
from mps_exporter.observations import NvmlObservation, ProcfsObservation
from mps_exporter.snapshot import CollectorResult, ControlDaemon, Snapshot

__all__ = ["DaemonInputs", "control_state", "merge", "pids_of_interest"]


def pids_of_interest(gpus: NvmlObservation | None, daemons: Iterable[DaemonInputs]) -> set[int]:
    """Return the processes that a source other than a log names, to be identified in /proc."""
    pids: set[int] = set()
    for gpu in gpus.gpus if gpus is not None else ():
        pids.update(process.pid for process in gpu.processes or ())
    for daemon in daemons:
        pids.update(process.pid for process in daemon.facts.servers)
        most = MAX_CLIENTS_PER_USER if daemon.facts.limited else None
        for reply in daemon.answers.servers.values():
            pids.update((reply.server_pid, *(reply.client_pids or ())[:most]))
        if (named := daemon.answers.partitioning) is not None:
            pids.update(server.pid or 0 for server in (named.servers or ())[:most])
            pids.update(client.pid for client in (named.clients or ())[:most])
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
    """Merge the results of one collection; a source without a result is None.

    A client that exits looks stranded for a moment: stranded_since has the processes that looked so
    in earlier readings of the GPUs, with the time of the first such reading (None: each process
    counts at once). Newer logs next to one reading are no evidence.
    """
    context = MergeContext.of(gpus, processes, daemons, stranded_since)
    merged = _merge_daemons(context, daemons, clients_max, taken_at)
    identified = None if processes is None else processes.processes.values()
    return Snapshot(
        taken_at=taken_at,
        driver_version=context.driver_version,
        cuda_version=gpus.cuda_version if gpus is not None else None,
        gpus=merge_gpus(context, gpus.gpus if gpus is not None else (), merged, daemons),
        gpu_indexes=context.gpu_indexes,
        daemons=merged,
        collectors=collectors,
        user_names=context.users,
        containers=processes.containers if processes is not None else (),
        cgroup_memory=context.cgroup_memory,
        unreadable_environments=(
            None
            if identified is None
            else sum(facts.mps_environment is None for facts in identified)
        ),
        ignored_processes=_ignored(processes, daemons, merged),
    )


def _merge_daemons(
    context: MergeContext, daemons: Iterable[DaemonInputs], clients_max: int, now: float
) -> tuple[ControlDaemon, ...]:
    merged, shown = list[ControlDaemon](), Counter[int | None]()
    for inputs in sorted(daemons, key=lambda inputs: inputs.facts.pipe_directory):
        user, most = inputs.facts.user, clients_max
        if inputs.facts.limited:
            left = min(MAX_CLIENTS_PER_USER - shown[user], MAX_LIMITED_CLIENTS - shown.total())
            most = min(most, max(0, left))
        merged.append(merge_daemon(context, inputs, most, now))
        if inputs.facts.limited:
            shown[user] += sum(len(server.clients) for server in merged[-1].servers)
    return tuple(merged)


def _ignored(
    processes: ProcfsObservation | None,
    daemons: Iterable[DaemonInputs],
    merged: Iterable[ControlDaemon],
) -> dict[int, int]:
    """Return the processes and clients that the quotas of ordinary users omit, by user."""
    found = Counter[int]({} if processes is None else processes.ignored_programs)
    for daemon in merged:
        facts = daemon.facts
        if facts is not None and facts.limited and facts.user is not None:
            found[facts.user] += daemon.dropped_clients
    for inputs in daemons:
        if inputs.facts.limited and inputs.facts.user is not None:
            servers = inputs.state.servers
            found[inputs.facts.user] += sum(server.clients.unfollowed for server in servers)
    return {user: count for user, count in found.items() if count}
