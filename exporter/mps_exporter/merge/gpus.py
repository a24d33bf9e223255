"""A GPU: NVML's readings, and the roles of its processes in MPS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from mps_exporter.merge.inputs import DaemonInputs, MergeContext
from mps_exporter.observations import GpuObservation, ProcessList
from mps_exporter.snapshot import PROCESS_KINDS, Client, ControlDaemon, Gpu, ProcessKind


def merge_gpus(
    context: MergeContext,
    gpus: Iterable[GpuObservation],
    daemons: tuple[ControlDaemon, ...],
    inputs: Sequence[DaemonInputs],
) -> tuple[Gpu, ...]:
    """Merge the facts about the GPUs."""
    servers = context.server_pids.union(
        server.pid for daemon in daemons for server in daemon.servers
    )
    clients = [
        client for daemon in daemons for server in daemon.servers for client in server.clients
    ]
    by_gpu: dict[str, list[Client]] = {}
    for client in clients:
        for uuid in {*client.contexts, *client.gpu_uuids}:
            by_gpu.setdefault(uuid, []).append(client)
    known = _known_clients(clients, daemons, inputs)
    queued = {wait.pid for daemon in daemons for wait in daemon.waits}
    merged = list[Gpu]()
    for gpu in gpus:
        by_kind = _processes_by_kind(gpu, servers)
        # A server whose process cannot be read looks like a process without MPS.
        identified = by_kind.get("direct", set()) <= context.processes.keys()
        seems = _stranded_pids(by_kind, queued, known, identified=identified)
        on_it = by_gpu.get(gpu.uuid, ())
        merged.append(_merge_gpu(context, gpu, daemons, on_it, by_kind, seems))
    return tuple(merged)


def _merge_gpu(
    context: MergeContext,
    gpu: GpuObservation,
    daemons: Iterable[ControlDaemon],
    clients: Sequence[Client],
    by_kind: Mapping[ProcessKind, set[int]],
    seems: tuple[int, ...] | None,
) -> Gpu:
    stranded = None if seems is None else tuple(filter(context.is_stranded, seems))
    direct = tuple(sorted(by_kind.get("direct", ())))
    return Gpu(
        observation=gpu,
        index=str(gpu.index),
        uuid=gpu.uuid,
        processes_by_kind={kind: len(pids) for kind, pids in by_kind.items()} or None,
        direct_pids=direct,
        direct_processes=tuple(
            context.processes[pid] for pid in direct if pid in context.processes
        ),
        served_by=tuple(
            daemon.pipe_directory
            for daemon in daemons
            if daemon.state != "absent" and gpu.uuid in daemon.gpu_uuids
        ),
        seems_stranded=seems,
        stranded_pids=stranded,
        stranded_clients=None if stranded is None else len(stranded),
        sm_committed_ratio=_sm_committed_ratio(gpu, clients),
        client_memory_committed_bytes=_memory_committed_bytes(gpu, clients),
    )


def _sm_committed_ratio(gpu: GpuObservation, clients: Sequence[Client]) -> float | None:
    """Return the sum of the clients' SM limits; None if one of them is unknown."""
    if not gpu.sm_count or any(gpu.uuid not in client.sm_limit for client in clients):
        return None
    return sum(client.sm_limit[gpu.uuid] for client in clients) / gpu.sm_count


def _memory_committed_bytes(gpu: GpuObservation, clients: Sequence[Client]) -> int | None:
    """Return the sum of the known memory limits."""
    if not clients:
        return None
    return sum(client.memory_limit_bytes.get(gpu.uuid, 0) for client in clients)


def _processes_by_kind(gpu: GpuObservation, servers: frozenset[int]) -> dict[ProcessKind, set[int]]:
    """Return the processes by their role in MPS, for the lists that could be read.

    Only the MPS list, which old drivers lack, distinguishes a client from a process without MPS.
    A server is known by its PID, wherever it is listed.
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


def _stranded_pids(
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


def _known_clients(
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
