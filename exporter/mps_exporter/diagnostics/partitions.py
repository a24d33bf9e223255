"""Named servers, namespaces and SM partitions as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from mps_exporter import humanize
from mps_exporter.snapshot import (
    Client,
    ControlDaemon,
    Feature,
    NamedServer,
    Namespace,
    Partitioning,
    ServerDevice,
    SmPartition,
    Snapshot,
)


def gpu_name(uuid: str, snapshot: Snapshot) -> str:
    """Name a GPU by its index; one that NVML does not show by its UUID."""
    index = snapshot.gpu_indexes.get(uuid, "")
    return f"GPU {index}" if index else humanize.printable(uuid, 60)


def partitioning_lines(daemon: ControlDaemon, snapshot: Snapshot) -> tuple[str, ...]:
    """Return what a daemon has of servers, namespaces, partitions and features, for a person.

    And the GPU memory of its clients' control groups.
    """
    found = daemon.partitioning or Partitioning("2")
    clients = [client for server in daemon.servers for client in server.clients]
    client_counts = found.clients_by_namespace()

    def gpu(uuid: str) -> str:
        return gpu_name(uuid, snapshot)

    return (
        *map(_server_text, found.servers or ()),
        *(_namespace_text(one, client_counts) for one in found.namespaces or ()),
        *_partitions(found, daemon, gpu),
        *(_device_text(one, gpu) for one in found.devices or ()),
        *_features(found),
        *_cgroups(snapshot, clients, gpu),
    )


def _comma_joined(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def _printable_reply(text: str | None) -> str | None:
    return humanize.printable(text, 400) if text else None


def _server_text(server: NamedServer) -> str:
    gpus = humanize.join_some([humanize.printable(one, 60) for one in server.allowed_devices])
    facts = _comma_joined(
        _printable_reply(server.status),
        f"UID {server.uid}" if server.uid is not None else None,
        f"process {server.pid}" if server.pid is not None else "no process",
        f"GPUs {gpus}" if gpus else None,
        f"contexts {_printable_reply(server.context_ids)}" if server.context_ids else None,
        _printable_reply(server.pipe_directory),
    )
    return f"Server {server.name}: {facts}"


def _namespace_text(namespace: Namespace, client_counts: Mapping[tuple[str, str], int]) -> str:
    share = namespace.active_thread_ratio
    memory = namespace.pinned_memory_limit_bytes
    sms = "no SM limit" if "active_threads" in namespace.unlimited else "SM limit not known"
    pinned = "no memory limit" if "pinned_memory" in namespace.unlimited else None
    number = client_counts.get((namespace.server_name, namespace.name))
    facts = _comma_joined(
        _printable_reply(namespace.status),
        sms if share is None else f"up to {humanize.percent(share, exact=True)} of the SMs",
        pinned if memory is None else f"up to {humanize.memory(memory)} on each GPU",
        f"priority {namespace.client_priority}" if namespace.client_priority is not None else None,
        humanize.count(number, "client") if number is not None else None,
        _printable_reply(namespace.pipe_directory),
    )
    return f"Namespace {namespace.server_name}/{namespace.name}: {facts}"


def _partitions(
    found: Partitioning, daemon: ControlDaemon, gpu: Callable[[str], str]
) -> Iterator[str]:
    for one in found.partitions or ():
        of = f" of server {one.server_name}" if one.server_name else ""
        size = _size(one)
        if one.unallocated:
            yield f"In no SM partition{of} on {gpu(one.device)}: {size or 'SMs not known'}"
            continue
        number = daemon.clients_in(one)
        count = humanize.count(number, "client") if number is not None else None
        remainder = "with the remaining SMs" if one.include_remainder else None
        if count is None and one.has_clients is not None:
            count = "in use" if one.has_clients else "not in use"
        named = _printable_reply(one.partition_id) if one.name else None
        facts = _comma_joined(
            size, remainder, _printable_reply(one.status), count, f"ID {named}" if named else None
        )
        name = humanize.printable(one.label or "without an ID", 60)
        yield f"SM partition {name}{of} on {gpu(one.device)}: {facts}"


def _size(one: SmPartition | ServerDevice) -> str:
    return _comma_joined(
        humanize.count(one.sms, "SM") if one.sms is not None else None,
        humanize.count(one.chunks, "chunk") if one.chunks is not None else None,
    )


def _device_text(device: ServerDevice, gpu: Callable[[str], str]) -> str:
    of = f" of server {device.server_name}" if device.server_name else ""
    facts = _comma_joined(
        f"ordinal {device.ordinal}" if device.ordinal is not None else None,
        _printable_reply(device.name),
        _printable_reply(device.pci),
        _size(device),
        _printable_reply(device.attributes),
    )
    return f"{gpu(device.uuid)}{of}: {facts}"


def _features(found: Partitioning) -> Iterator[str]:
    if found.features:
        yield f"Features: {', '.join(map(_feature_text, found.features))}"


def _feature_text(one: Feature) -> str:
    more = _comma_joined(
        "default" if one.default else None,
        f"module {one.module}" if one.module not in (None, one.name) else None,
        f"covers {_printable_reply(one.covers)}" if one.covers else None,
    )
    return f"{one.name} {'on' if one.enabled else 'off'}{f' ({more})' if more else ''}"


def _cgroups(
    snapshot: Snapshot, clients: Sequence[Client], gpu: Callable[[str], str]
) -> Iterator[str]:
    for path in sorted({client.cgroup for client in clients if client.cgroup is not None}):
        for uuid, one in snapshot.cgroup_memory.get(path, {}).items():
            used = f"{humanize.memory(one.used_bytes)} used" if one.used_bytes is not None else None
            hard = "no hard limit" if one.hard_unlimited else None
            if one.hard_limit_bytes is not None:
                hard = f"hard limit {humanize.memory(one.hard_limit_bytes)}"
            soft = None
            if one.soft_limit_bytes is not None:
                soft = f"soft limit {humanize.memory(one.soft_limit_bytes)}"
            facts = _comma_joined(used, soft, hard)
            yield f"GPU memory of {humanize.printable(path, 200)} on {gpu(uuid)}: {facts}"
