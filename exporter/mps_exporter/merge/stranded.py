"""Stranded clients: MPS clients that NVML lists and no server has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.snapshot import Client, ControlDaemon, ProcessKind

STRANDED_SECONDS = 1.0
"""Minimum time without a server after which a client is stranded. A client that exits leaves NVML's
list within this time after it left its server."""


def is_stranded(context: MergeContext, pid: int) -> bool:
    """Return whether a process that lacks a server has lacked it long enough."""
    if context.stranded_since is None:
        return True
    since = context.stranded_since.get(pid, math.inf)
    return since <= context.nvml.at - STRANDED_SECONDS


def stranded_pids(
    by_kind: Mapping[ProcessKind, set[int]],
    queued: set[int],
    known: set[int] | None,
    *,
    identified: bool,
) -> tuple[int, ...] | None:
    """Return the MPS processes without a server; None if unknown.

    Certain if no server is on the GPU, or if every daemon's log shows all its clients. NVML also
    lists a process that waits in a queue, which lacks a server for another reason.
    """
    if "mps_client" not in by_kind:
        return None
    candidates = by_kind["mps_client"] - queued
    if not by_kind["mps_server"] and identified:
        return tuple(sorted(candidates))
    return None if known is None else tuple(sorted(candidates - known))


def known_clients(
    clients: Iterable[Client], daemons: Sequence[ControlDaemon], inputs: Sequence[DaemonInputs]
) -> set[int] | None:
    """Return the PIDs of all servers' clients; None if there may be others."""
    all_readable = all(
        daemon.log_readable("control") and daemon.log_readable("server") for daemon in inputs
    ) and not any(daemon.protocol == "3" for daemon in daemons)  # a new client is listed later
    connected = {client.pid for client in clients}
    if not all_readable or 0 in connected or any(daemon.dropped_clients for daemon in daemons):
        return None
    if any(map(_may_miss_clients, inputs)):
        return None
    return connected | _listed_client_pids(inputs)


def _may_miss_clients(daemon: DaemonInputs) -> bool:
    """Return whether a running server may have clients whose lines were not read."""
    lost_at = daemon.state.server_log_lost_at
    return any(
        not server.has_log or (lost_at is not None and server.started_at <= lost_at)
        for server in daemon.state.servers
    )


def _listed_client_pids(inputs: Sequence[DaemonInputs]) -> set[int]:
    """Return the clients that the control tool lists, in their daemons' PID namespaces."""
    replies = (reply for daemon in inputs for reply in daemon.answers.servers.values())
    return {pid for reply in replies for pids in (reply.contexts or {}).values() for pid in pids}
