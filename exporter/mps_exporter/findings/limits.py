"""Limits that are ignored, too loose or held several times; MPS v3 servers and SM partitions."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings.finding import Case, Cases, HostFacts, clients_of, of_daemon
from mps_exporter.humanize import count, join_some, memory, percent, printable, sentence
from mps_exporter.snapshot import (
    Client,
    ControlDaemon,
    Feature,
    NamedServer,
    Namespace,
    ServerDevice,
    Setting,
    SmPartition,
    Snapshot,
)

NO_EFFECT = "a-limit-has-no-effect"


def _sm_excess(own: float, default: float) -> str:
    own_text, default_text = percent(min(own, 1.0), exact=True), percent(default, exact=True)
    return f"{own_text} of the SMs, where the default is {default_text}"


def _memory_excess(own: int | None, default: int) -> str:
    own_text = "any amount" if own is None else memory(own)
    return f"{own_text} of GPU memory, where the default is {memory(default)}"


@of_daemon(
    "warning",
    "A client has more than its daemon allows by default",
    "A running client keeps the limits that its server had when it connected. One that started "
    "before its daemon was configured has none, without a message.",
    "Its owner can start it again, if the default is meant for it. A server that was started "
    "before keeps its own limits for new clients, too, also while it is idle; "
    "set_active_thread_percentage and set_device_pinned_mem_limit change them.",
    page=NO_EFFECT,
)
def limit_looser_than_default(host: HostFacts, daemon: ControlDaemon) -> Cases:
    found = [(one, looser_limit(one, daemon)) for one in clients_of(daemon)]
    if those := [f"{host.client(one)} may use {excess}" for one, excess in found if excess]:
        yield Case(sentence(join_some(those)))


def looser_limit(client: Client, daemon: ControlDaemon) -> str:
    """Return a text on a client's first limit above the daemon's current default; "" if none."""
    share, ratio = daemon.default_active_thread_ratio, client.active_thread_ratio
    if share is not None and ratio is not None and ratio > share + policy.RATIO_TOLERANCE:
        return _sm_excess(ratio, share)
    if client.limit_source != "unknown":
        for uuid, limit in daemon.default_pinned_memory_limit_bytes.items():
            own = client.memory_limit_bytes.get(uuid)
            if uuid in client.contexts and (own is None or own > limit):
                return _memory_excess(own, limit)
    return ""


@of_daemon(
    "warning",
    "An active thread percentage is ignored",
    "CUDA silently ignores a CUDA_MPS_ACTIVE_THREAD_PERCENTAGE that is 0, negative, above 100 "
    "or not a number: the process may use all SMs.",
    "Its owner can set a number above 0 and up to 100, and start it again.",
    page=NO_EFFECT,
)
def percentage_ignored(host: HostFacts, daemon: ControlDaemon) -> Cases:
    return _without_effect(host, daemon, "percentage_ignored", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


@of_daemon(
    "warning",
    "A memory limit is ignored",
    "One entry of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT names no GPU that the process sees; CUDA "
    "then silently ignores all of them. An ordinal counts in the process's own "
    "CUDA_VISIBLE_DEVICES, not among the GPUs of the host.",
    "Name GPUs by UUID (nvidia-smi -L), and only those that the process sees: its "
    "CUDA_VISIBLE_DEVICES. Then its owner can start it again.",
    page=NO_EFFECT,
)
def memory_limit_ignored(host: HostFacts, daemon: ControlDaemon) -> Cases:
    return _without_effect(host, daemon, "memory_limit_ignored", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")


def _without_effect(host: HostFacts, daemon: ControlDaemon, field: str, variable: str) -> Cases:
    if those := [
        f"{host.client(one)} with {printable(repr(text))}"
        for one in clients_of(daemon)
        if (text := getattr(one, field)) is not None
    ]:
        yield Case(f"CUDA ignores the {variable} of {join_some(those)}.")


@of_daemon(
    "info",
    "A client has a limiter that may not hold under MPS",
    "NVML counts all clients of a server as one process. A limiter that reads the use of each "
    "process there sees none, and lets the client use all SMs.",
    "Limit it with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, or start it without MPS.",
    page=NO_EFFECT,
)
def limiter_under_mps(host: HostFacts, daemon: ControlDaemon) -> Cases:
    clients = [one for one in clients_of(daemon) if one.limiter]
    if those := [f"{host.client(one)}: {one.limiter}" for one in clients]:
        yield Case(f"Preloaded or mounted for {join_some(those)}.")


_PARTITION_FAULTS = {
    "unknown": "which its daemon does not have, or no longer",
    "other_server": "which belongs to another server",
    "other_gpu": "which is on another GPU than the process",
}


@of_daemon(
    "warning",
    "A client is in an SM partition that was not meant for it",
    "A process chooses its SM partition itself (CUDA_MPS_SM_PARTITION), and MPS does not check "
    "the choice: it takes SMs from the clients of that partition, or fails as it starts.",
    "Start the process with the ID that the daemon lists for the partition that was "
    "meant: nvidia-cuda-mps-control sm-partition list --all (MPS v3) or echo lspart | "
    "nvidia-cuda-mps-control.",
    page="cuda-error-invalid-resource-configuration",
)
def sm_partition_mismatch(host: HostFacts, daemon: ControlDaemon) -> Cases:
    stray = [
        f"{host.client(one)} names {printable(one.sm_partition or '', 60)}, "
        + _PARTITION_FAULTS.get(one.sm_partition_fault, "")
        for one in clients_of(daemon)
        if one.sm_partition_fault is not None
    ]
    if stray:
        yield Case(
            f"{count(len(stray), 'client')} with a wrong CUDA_MPS_SM_PARTITION: {join_some(stray)}."
        )


@of_daemon(
    "info",
    "A job or pod may use more than one share",
    "MPS limits each process. Several processes of one job or pod have that much each.",
    "Divide the limits by the number of processes, in the environment of the job "
    "(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT).",
    page="one-pod-or-job-gets-more-than-its-share",
)
def share_exceeded(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if those := list(_exceeding(daemon)):
        yield Case(sentence(join_some(those)))


def _exceeding(daemon: ControlDaemon) -> Iterator[str]:
    """Yield texts on jobs and pods that may use more than the default of one process."""
    groups: dict[tuple[str, str], list[Client]] = {}
    for client in clients_of(daemon):
        if client.slurm_job_id is not None:
            groups.setdefault(("Slurm job", client.slurm_job_id), []).append(client)
        elif client.pod_uid is not None:
            groups.setdefault(("pod", client.pod_uid), []).append(client)
    for (kind, name), members in groups.items():
        for uuid in sorted({uuid for one in members for uuid in one.contexts}):
            here = [one for one in members if uuid in one.contexts]
            if excess := _shared_excess(daemon, here, uuid):
                yield (
                    f"{kind} {printable(name)} has {len(here)} processes, which may "
                    f"together use {excess} for one process"
                )
                break


def _shared_excess(daemon: ControlDaemon, here: Sequence[Client], uuid: str) -> str:
    """Return a text if several clients on a GPU may use more than one's default; "" if not."""
    share = daemon.default_active_thread_ratio
    ratios = [one.active_thread_ratio for one in here if one.active_thread_ratio is not None]
    used = sum(ratios) if len(ratios) > 1 else 0.0
    if share is not None and share < 1 and used > share + policy.RATIO_TOLERANCE:
        return _sm_excess(used, share)
    limit = daemon.default_pinned_memory_limit_bytes.get(uuid)
    limits = [one.memory_limit_bytes[uuid] for one in here if uuid in one.memory_limit_bytes]
    if limit is not None and len(limits) > 1 and sum(limits) > limit:
        return _memory_excess(sum(limits), limit)
    return ""


def gpu_name(uuid: str, snapshot: Snapshot) -> str:
    """Return "GPU INDEX", or the UUID if the index is unknown."""
    index = snapshot.gpu_indexes.get(uuid, "")
    return f"GPU {index}" if index else printable(uuid, 60)


def partitioning_lines(daemon: ControlDaemon, snapshot: Snapshot) -> Iterator[str]:
    """Yield lines on a daemon's partitioning and the GPU memory of its clients' cgroups."""
    found = daemon.partitioning
    for server in found.rows(NamedServer):
        yield _line(
            "Server {name}: {status}, UID {uid}, {process}, GPUs {gpus}, contexts {context_ids}, "
            "{pipe_directory}",
            server,
            process="no process" if server.pid is None else f"process {server.pid}",
            gpus=_short(server.allowed_devices),
        )
    for namespace in found.rows(Namespace):
        share, size = namespace.active_thread_ratio, namespace.pinned_memory_limit_bytes
        sms = "no SM limit" if share == math.inf else "SM limit not known"
        if share is not None and share <= 1:
            sms = f"up to {percent(share, exact=True)} of the SMs"
        yield _line(
            "Namespace {server_name}/{name}: {status}, {sms}, {memory}, "
            "priority {client_priority}, {number}, {pipe_directory}",
            namespace,
            sms=sms,
            memory="no memory limit" if size == math.inf else _if_known(_EACH, size, memory),
            number=_count(namespace.clients, "client"),
        )
    for partition in found.rows(SmPartition):
        yield _partition_line(partition, snapshot)
    for device in found.rows(ServerDevice):
        yield _line(
            "{gpu}{of}: ordinal {ordinal}, {model}, {pci}, {size}, {attributes}",
            device,
            gpu=gpu_name(device.uuid, snapshot),
            of=_if_known(" of server {}", device.server_name),
            size=_size(device),
        )
    if features := ", ".join(map(_feature_text, found.rows(Feature))):
        yield f"Features: {features}"
    for one in found.rows(Setting):
        yield f"Memory accounting: {one.key} {printable(one.value or '?', 60)}"
    for (reply, column), cells in found.unknown_columns.items():
        yield f"Column {printable(column, 60)} of {reply}: {_short(cells)}"
    yield from _cgroup_lines(daemon, snapshot)


def _cgroup_lines(daemon: ControlDaemon, snapshot: Snapshot) -> Iterator[str]:
    for path in sorted({one.cgroup for one in clients_of(daemon) if one.cgroup is not None}):
        for uuid, used in snapshot.cgroup_memory.get(path, {}).items():
            yield _line(
                "GPU memory of {path} on {gpu}: {used}, {soft}, {hard}",
                path=path,
                gpu=gpu_name(uuid, snapshot),
                used=_if_known("{} used", used.used_bytes, memory),
                soft=_if_known("soft limit {}", used.soft_limit_bytes, memory),
                hard=_if_known("hard limit {}", used.hard_limit_bytes, memory)
                or ("no hard limit" if used.hard_unlimited else ""),
            )


_FACT = re.compile(r"{(\w+)}")
_EACH = "up to {} on each GPU"


def _line(template: str, row: Any = None, **more: object) -> str:
    """Return "TITLE: FACT, FACT"; a fact whose value in `row` or `more` is unknown is left out."""
    values = {**(asdict(row) if row is not None else {}), **more}
    shown = {
        name: "" if value is None else printable(str(value), 400) for name, value in values.items()
    }
    title, _, facts = template.partition(": ")
    known = [one for one in facts.split(", ") if all(shown[name] for name in _FACT.findall(one))]
    return f"{title}: {', '.join(known)}".format_map(shown)


def _if_known(text: str, value: Any, show: Callable[[Any], str] = str) -> str:
    return "" if value in (None, "") else text.format(show(value))


def _count(number: int | None, thing: str) -> str:
    return "" if number is None else count(number, thing)


def _short(texts: Iterable[str]) -> str:
    return join_some([printable(text, 60) for text in texts])


def _size(one: SmPartition | ServerDevice) -> str:
    return ", ".join(filter(None, (_count(one.sms, "SM"), _count(one.chunks, "chunk"))))


def _partition_line(one: SmPartition, snapshot: Snapshot) -> str:
    of = _if_known(" of server {}", one.server_name)
    where = f"{of} on {gpu_name(one.device, snapshot)}"
    if one.unallocated:
        return f"In no SM partition{where}: {_size(one) or 'SMs not known'}"
    in_use = {True: "in use", False: "not in use", None: ""}[one.has_clients]
    return _line(
        "SM partition {label}{where}: {size}, {remainder}, {status}, {use}, ID {id}",
        one,
        label=printable(one.label or "without an ID", 60),
        where=where,
        size=_size(one),
        remainder="with the remaining SMs" if one.include_remainder else None,
        use=_count(one.clients, "client") or in_use,
        id=one.partition_id if one.name else None,
    )


def _feature_text(one: Feature) -> str:
    more = [
        "default" if one.default else "",
        f"module {one.module}" if one.module not in (None, one.feature) else "",
        _if_known("covers {}", printable(one.covers or "", 400)),
    ]
    facts = ", ".join(filter(None, more))
    return f"{one.feature} {'on' if one.enabled else 'off'}{f' ({facts})' if facts else ''}"
