"""GPU memory of control groups, and which client is in which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mps_exporter.merge.daemon_inputs import MergeContext
from mps_exporter.mps.cgroups import unified_path, with_parents
from mps_exporter.observations import CgroupMemory, ProcfsObservation
from mps_exporter.snapshot import Client, ControlDaemon

CgroupMemories = Mapping[str, Mapping[str, CgroupMemory]]


def merge_cgroups(context: MergeContext, processes: ProcfsObservation | None) -> CgroupMemories:
    """Give the memory of control groups by path and GPU; of GPUs that NVML does not show, none."""
    uuids = {
        _pci(gpu.pci_bus_id): gpu.uuid
        for gpu in context.gpus.values()
        if gpu.pci_bus_id is not None and gpu.parent_uuid is None
    }
    found: dict[str, dict[str, CgroupMemory]] = {}
    for one in processes.cgroup_memory if processes is not None else ():
        uuid = uuids.get(_pci(one.pci_bus_id))
        if uuid is not None:
            found.setdefault(one.path, {})[uuid] = one
    return found


def _pci(address: str) -> str:
    """Write a PCI address as the kernel does: 00000000:02:00.0, in small letters."""
    return address.lower().rjust(len("00000000:02:00.0"), "0")


def with_cgroups(
    context: MergeContext, known: CgroupMemories, daemon: ControlDaemon
) -> ControlDaemon:
    """Add to the clients their control groups, where memory of these is known."""
    if not known:
        return daemon
    servers = (
        replace(server, clients=tuple(_in_cgroup(context, known, one) for one in server.clients))
        for server in daemon.servers
    )
    return replace(daemon, servers=tuple(servers))


def _in_cgroup(context: MergeContext, known: CgroupMemories, client: Client) -> Client:
    process = context.processes.get(client.pid)
    path = unified_path(process.cgroup) if process is not None else None
    if path is None:
        return client
    groups = with_parents(path)
    return replace(client, cgroup=next((group for group in groups if group in known), None))
