"""Stranded clients: MPS clients that NVML lists and no server has."""

import math
from collections.abc import Mapping, Sequence

from mps_exporter import limits_timeouts_intervals as policy
from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.snapshot import ControlDaemon, ProcessKind

Known = tuple[ControlDaemon, DaemonInputs]  # A merged daemon and its inputs.


def is_stranded(context: MergeContext, pid: int) -> bool:
    """Return whether a process lacks a server long enough, or no times are known."""
    if context.stranded_since is None:
        return True
    since = context.stranded_since.get(pid, math.inf)
    return since <= context.nvml.at - policy.STRANDED_SECONDS


def stranded_pids(
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
