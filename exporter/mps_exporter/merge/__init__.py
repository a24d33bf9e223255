"""Observations and ledgers -> a Snapshot. Pure.

Here the different views of one thing meet: the server that the log names, the process of that PID
in /proc, the entry in NVML's list, the answer of the control tool. Where one is missing the others
stand; where all are, the value is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mps_exporter.merge.daemon_inputs import DaemonInputs, MergeContext
from mps_exporter.merge.daemons import control_state, merge_daemon
from mps_exporter.merge.gpus import merge_gpus
from mps_exporter.observations import NvmlObservation, ProcfsObservation
from mps_exporter.snapshot import CollectorResult, ControlDaemon, Snapshot

MAX_CLIENTS_PER_USER = 256
MAX_LIMITED_CLIENTS = 1024
"""So many clients of an ordinary user's daemons have metrics of their own, and of all of them."""

__all__ = ["DaemonInputs", "control_state", "merge", "pids_of_interest"]


def pids_of_interest(gpus: NvmlObservation | None, daemons: Iterable[DaemonInputs]) -> set[int]:
    """The processes that a source named, other than a log: to be identified in /proc."""
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
    """Make the snapshot of one collection. A source that brought nothing is None.

    A client that ends looks stranded for a moment: stranded_since says which looked so in earlier
    readings of the GPUs, and since when (None: every one counts at once). It is the readings' time
    that counts: one reading beside newer and newer logs is no evidence.
    """
    context = MergeContext.of(gpus, processes, daemons, stranded_since)
    merged = _merge_daemons(context, daemons, clients_max, taken_at)
    return Snapshot(
        taken_at=taken_at,
        driver_version=context.driver_version,
        cuda_version=gpus.cuda_version if gpus is not None else None,
        gpus=merge_gpus(context, gpus.gpus if gpus is not None else (), merged, daemons),
        gpu_indexes=context.gpu_indexes,
        daemons=merged,
        collectors=collectors,
        user_names=_user_names(processes),
        containers=processes.containers if processes is not None else (),
        cgroup_memory=context.cgroup_memory,
        unreadable_environments=_unreadable_environments(processes),
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
    """Processes and clients that are left out for the quotas of ordinary users, by user."""
    found = Counter[int]({} if processes is None else processes.ignored_programs)
    for daemon in merged:
        facts = daemon.facts
        if facts is not None and facts.limited and facts.user is not None:
            found[facts.user] += daemon.dropped_clients
    for inputs in daemons:
        if inputs.facts.limited and inputs.facts.user is not None:
            found[inputs.facts.user] += sum(
                server.clients.unfollowed for server in inputs.state.servers
            )
    return {user: count for user, count in found.items() if count}


def _user_names(processes: ProcfsObservation | None) -> dict[int, str]:
    found = () if processes is None else processes.processes.values()
    return {facts.uid: facts.user for facts in found if facts.uid is not None and facts.user}


def _unreadable_environments(processes: ProcfsObservation | None) -> int | None:
    if processes is None:
        return None
    return sum(facts.mps_environment is None for facts in processes.processes.values())
