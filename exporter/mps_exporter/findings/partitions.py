"""Named servers, namespaces and SM partitions as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter import humanize
from mps_exporter.snapshot import (
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
    counts = found.clients_by_namespace()
    features = (
        [f"Features: {', '.join(map(_feature_text, found.features))}"] if found.features else []
    )
    return (
        *map(_server_line, found.servers or ()),
        *(
            _namespace_line(one, counts.get((one.server_name, one.name)))
            for one in found.namespaces or ()
        ),
        *(_partition_line(one, daemon, snapshot) for one in found.partitions or ()),
        *(_device_line(one, snapshot) for one in found.devices or ()),
        *features,
        *_cgroup_lines(daemon, snapshot),
    )


def _facts_joined(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def _if_known(template: str, value: object) -> str | None:
    """Return a value within its text; None: it is not known."""
    return None if value is None else template.format(value)


def _reply(text: str | None) -> str | None:
    return humanize.printable(text, 400) if text else None


def _server_line(server: NamedServer) -> str:
    gpus = humanize.join_some([humanize.printable(one, 60) for one in server.allowed_devices])
    facts = _facts_joined(
        _reply(server.status),
        _if_known("UID {}", server.uid),
        _if_known("process {}", server.pid) or "no process",
        _if_known("GPUs {}", gpus or None),
        _if_known("contexts {}", _reply(server.context_ids)),
        _reply(server.pipe_directory),
    )
    return f"Server {server.name}: {facts}"


def _namespace_line(namespace: Namespace, clients: int | None) -> str:
    share, memory = namespace.active_thread_ratio, namespace.pinned_memory_limit_bytes
    sms = "no SM limit" if "active_threads" in namespace.unlimited else "SM limit not known"
    pinned = "no memory limit" if "pinned_memory" in namespace.unlimited else None
    facts = _facts_joined(
        _reply(namespace.status),
        sms if share is None else f"up to {humanize.percent(share, exact=True)} of the SMs",
        pinned if memory is None else f"up to {humanize.memory(memory)} on each GPU",
        _if_known("priority {}", namespace.client_priority),
        humanize.count(clients, "client") if clients is not None else None,
        _reply(namespace.pipe_directory),
    )
    return f"Namespace {namespace.server_name}/{namespace.name}: {facts}"


def _partition_line(one: SmPartition, daemon: ControlDaemon, snapshot: Snapshot) -> str:
    of = f" of server {one.server_name}" if one.server_name else ""
    where, size = f"{of} on {gpu_name(one.device, snapshot)}", _size(one)
    if one.unallocated:
        return f"In no SM partition{where}: {size or 'SMs not known'}"
    number = daemon.clients_in(one)
    count = humanize.count(number, "client") if number is not None else None
    if count is None and one.has_clients is not None:
        count = "in use" if one.has_clients else "not in use"
    facts = _facts_joined(
        size,
        "with the remaining SMs" if one.include_remainder else None,
        _reply(one.status),
        count,
        _if_known("ID {}", _reply(one.partition_id) if one.name else None),
    )
    return f"SM partition {humanize.printable(one.label or 'without an ID', 60)}{where}: {facts}"


def _size(one: SmPartition | ServerDevice) -> str:
    return _facts_joined(
        humanize.count(one.sms, "SM") if one.sms is not None else None,
        humanize.count(one.chunks, "chunk") if one.chunks is not None else None,
    )


def _device_line(device: ServerDevice, snapshot: Snapshot) -> str:
    of = f" of server {device.server_name}" if device.server_name else ""
    facts = _facts_joined(
        _if_known("ordinal {}", device.ordinal),
        _reply(device.name),
        _reply(device.pci),
        _size(device),
        _reply(device.attributes),
    )
    return f"{gpu_name(device.uuid, snapshot)}{of}: {facts}"


def _feature_text(one: Feature) -> str:
    more = _facts_joined(
        "default" if one.default else None,
        f"module {one.module}" if one.module not in (None, one.name) else None,
        _if_known("covers {}", _reply(one.covers)),
    )
    return f"{one.name} {'on' if one.enabled else 'off'}{f' ({more})' if more else ''}"


def _cgroup_lines(daemon: ControlDaemon, snapshot: Snapshot) -> Iterator[str]:
    clients = [client for server in daemon.servers for client in server.clients]

    def sized(text: str, size: float | None) -> str | None:
        return None if size is None else text.format(humanize.memory(size))

    for path in sorted({client.cgroup for client in clients if client.cgroup is not None}):
        for uuid, one in snapshot.cgroup_memory.get(path, {}).items():
            facts = _facts_joined(
                sized("{} used", one.used_bytes),
                sized("soft limit {}", one.soft_limit_bytes),
                sized("hard limit {}", one.hard_limit_bytes)
                or ("no hard limit" if one.hard_unlimited else None),
            )
            shown = humanize.printable(path, 200)
            yield f"GPU memory of {shown} on {gpu_name(uuid, snapshot)}: {facts}"
