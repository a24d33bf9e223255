"""What the metrics of a host must be, computed from the world and not from the exporter."""

from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from mps_exporter.metrics import Build, render
from mps_exporter.metrics.exposition import OPENMETRICS_1_0_0, encode
from mps_exporter.metrics.metric_types import Family
from mps_exporter.snapshot import Histogram, Snapshot
from testing.page import Page, text_of
from testing.world.daemon import Daemon
from testing.world.files import NAMES
from testing.world.gpus import model_of, sms_of
from testing.world.host import SERVER_BYTES
from testing.world.model import World
from testing.world.processes import SMS, Client, Process
from testing.world.settings import CONTAINER, MEMORY_OF_GROUPS, PLACES

Labels = Mapping[str, object]
ATTRIBUTES = ("container_id", "pod_uid", "slurm_job_id", "systemd_unit")
Expected = tuple[str, Labels, float]


def differences(world: World, snapshot: Snapshot) -> Iterator[str]:
    """Yield each sample that is not what the world says, and each metric with other samples."""
    page = Page(text_of(snapshot))
    yield from _encodings(snapshot, page)
    yield from _without_clients(snapshot)
    shown = {one.pipe_directory for one in snapshot.daemons}
    known = [
        one
        for one in world.daemons.values()
        if one.exists and one.pipe in shown and not one.truth.unknowable
    ]
    lost = [one.uuid for one in snapshot.gpus if one.observation.lost]
    for daemon in known:
        yield from _differences_of_daemon(world, daemon, page, lost)
    if world.sight.nvml:
        yield from _groups(page)
        yield from _places(world, page)
        yield from _stranded(world, page)
    if world.sight.nvml and len(known) == len(world.daemons):
        for name, labels, value in _of_gpus(world):
            if labels["uuid"] in lost:
                continue
            seen = page.value(name, **labels)
            unknown = name == "mps_gpu_served" and seen is None  # The daemon has not replied yet.
            if seen != value and not unknown:
                yield f"{name} {labels} is {seen}, not {value}"


def _differences_of_daemon(
    world: World, daemon: Daemon, page: Page, lost: Collection[str]
) -> Iterator[str]:
    expected = [
        one
        for one in _of_daemon(world, daemon)
        if "_memory_used_" not in one[0] or one[1]["uuid"] not in lost
    ]
    for name, labels, value in expected:
        seen = page.value(name, daemon=daemon.pipe, **labels)
        if seen is None or abs(seen - value) > 0.006:
            yield f"{name} {daemon.pipe} {labels} is {seen}, not {value}"
    yield from _lines(daemon, page)
    yield from _limits(world, daemon, page)
    yield from _waiting(daemon, page)
    names = [name for name, _, _ in expected]
    for name in set(names):
        if (count := len(page.all(name, daemon=daemon.pipe))) != names.count(name):
            yield f"{name} has {count} samples of {daemon.pipe}, not {names.count(name)}"


def _without_clients(snapshot: Snapshot) -> Iterator[str]:
    for name, samples in Page(text_of(snapshot, clients="off")).items():
        if name.startswith(("mps_client_", "mps_container_")) and any(
            "pid" in one.labels or "container_id" in one.labels for one in samples
        ):
            yield f"{name} names clients, without --collector.clients"


def _lines(daemon: Daemon, page: Page) -> Iterator[str]:
    """Compare the lines that were read with those before the collection, and after it."""
    for log, least in daemon.truth.lines.items():
        read = page.value("mps_control_log_lines_total", daemon=daemon.pipe, log=log) or 0
        most = daemon.logs[log].count(b"\n")
        if not least <= read <= most:
            yield f"{read:g} lines of {daemon.pipe}, {log}, not {least} to {most}"


def _waiting(daemon: Daemon, page: Page) -> Iterator[str]:
    """Compare the waits of clients and of users, and since when."""
    waits, server = daemon.waits(), daemon.server
    connected = {one.pid for one in server.clients} if server is not None else set()
    since = "mps_client_state_since_timestamp_seconds"
    seen = {
        (int(one.labels["pid"]), round(one.value * 1000))
        for one in page.all(since, daemon=daemon.pipe, state="waiting")
    }
    true = {(one.pid, one.since_ms) for one in waits if not one.dead and one.pid not in connected}
    if seen != true:
        yield f"{seen} wait, not {true}"
    for uid in {one.uid for one in waits}:
        mine, of = [one for one in waits if one.uid == uid], {"daemon": daemon.pipe, "uid": uid}
        for name, value in (
            ("waiting_clients", len(mine)),
            ("waiting_since_timestamp_seconds", min(one.since_ms for one in mine) / 1000),
            ("waiting_dead_clients", sum(one.dead for one in mine)),
        ):
            shown = page.value(f"mps_uid_{name}", **of)
            if shown is None or abs(shown - value) > 0.001:
                yield f"mps_uid_{name} of {uid} is {shown}, not {value}"


def _limits(world: World, daemon: Daemon, page: Page) -> Iterator[str]:
    """Compare the limits of clients: the lower of a client's own and the daemon's default."""
    server = daemon.server
    for client in server.clients if server is not None else ():
        here = {"daemon": daemon.pipe, "pid": client.pid}
        ratio = min(client.settings.ratio or 1.0, daemon.percentage / 100)
        for ordinal in client.gpus if client.complete else ():
            uuid = daemon.gpus[ordinal].uuid
            sms = sms_of(model_of(world, uuid), ratio) if world.sight.nvml else None
            seen = page.value("mps_client_sm_limit", uuid=uuid, **here)
            if seen is not None and seen != sms:
                yield f"{seen} SMs for {client.pid}, not {sms}"
            limit = page.value("mps_client_memory_limit_bytes", uuid=uuid, **here)
            true = client.limit_on(ordinal)
            if limit not in (None, true, client.settings.bytes):
                yield f"{limit} bytes for {client.pid} on {uuid}, not {true}"
        shown = page.value("mps_client_active_thread_ratio", **here)
        if shown is not None and abs(shown - ratio) > 1e-6:
            yield f"{shown} of the SMs for {client.pid}, not {ratio}"


def _groups(page: Page) -> Iterator[str]:
    """Compare the memory of control groups, if the host shows any, and their owners."""
    for place, found in zip(PLACES, MEMORY_OF_GROUPS, strict=False):
        expected = {
            "memory_used_bytes": found["current"],
            "memory_soft_limit_bytes": found["min"],
            "memory_hard_limit_bytes": found["max"],
            "memory_limited": found["max"] is not None,
        }
        for one in page.all("mps_cgroup_memory_used_bytes", cgroup=place.path):
            for name, true in expected.items():
                seen = page.value(f"mps_cgroup_{name}", **one.labels)
                if seen != true:
                    yield f"mps_cgroup_{name} {one.labels} is {seen}, not {true}"
    known = {place.path: place.labels for place in PLACES[: len(MEMORY_OF_GROUPS)]}
    for one in page.all("mps_cgroup_info"):
        if not known.get(one.labels["cgroup"], {"": ""}).items() <= one.labels.items():
            yield f"{one.labels}, not {known}"


def _places(world: World, page: Page) -> Iterator[str]:
    """Compare what clients belong to."""
    for one in page.all("mps_client_cgroup_info"):
        owners = world.known.get(int(one.labels["pid"]), [])
        if one.labels["cgroup"] not in {process.settings.place.path for process in owners}:
            yield f"{one.labels} of no client"
    for one in page.all("mps_client_info", container_id=CONTAINER["container_id"]):
        if page.value("mps_container_info", **CONTAINER) != 1:
            yield f"no name of the container of {one.labels}"


def _stranded(world: World, page: Page) -> Iterator[str]:
    """Compare the clients without a server; their number is absent if all may be about to exit."""
    left = [
        client.daemon.gpus[ordinal].uuid
        for client in world.processes.values()
        if isinstance(client, Client) and client.alive and client.active_ms is not None
        if client.daemon.server is None or client not in client.daemon.server.clients
        for ordinal in client.gpus
    ]
    for uuid in (gpu.uuid for gpu in world.gpus):
        seen, most = page.value("mps_gpu_stranded_clients", uuid=uuid), left.count(uuid)
        if seen is not None and not bool(most) <= seen <= most:
            yield f"{seen:g} stranded clients on {uuid}, not {most}"


def _encodings(snapshot: Snapshot, page: Page) -> Iterator[str]:
    """Compare both formats, as the library reads them, with the values."""
    families = list(render(snapshot, Build("test", "", "")))
    values = {key: value for family in families for key, value in _samples(family)}
    openmetrics = encode(families, [], OPENMETRICS_1_0_0).decode()
    parsed = text_string_to_metric_families(openmetrics)  # type: ignore[no-untyped-call]
    for what, samples in (
        ("text", [(name, one.labels, one.value) for name, found in page.items() for one in found]),
        ("OpenMetrics", [(o.name, o.labels, o.value) for family in parsed for o in family.samples]),
    ):
        seen = {(name, *sorted(labels.items())): value for name, labels, value in samples}
        for key in seen.keys() ^ values.keys():
            yield f"{key} is not in the {what}, or only there"
        for key in seen.keys() & values.keys():
            if seen[key] != values[key]:
                yield f"{key} is {seen[key]} in the {what}, not {values[key]}"


def _samples(family: Family) -> Iterator[tuple[tuple[object, ...], float]]:
    name, names = family.spec.name, family.spec.sample_labels
    for texts, value in family.samples:
        labels = dict(zip(names, texts, strict=True))
        if not isinstance(value, Histogram):
            yield (name, *sorted(labels.items())), float(value)
            continue
        bounds = [*map(str, map(float, value.bounds)), "+Inf"]
        for bound, count in zip(bounds, accumulate(value.counts), strict=True):
            yield (f"{name}_bucket", *sorted({**labels, "le": bound}.items())), count
        yield (f"{name}_count", *sorted(labels.items())), sum(value.counts)
        yield (f"{name}_sum", *sorted(labels.items())), value.sum_seconds


def _of_daemon(world: World, daemon: Daemon) -> Iterator[Expected]:
    yield (
        "mps_control_info",
        {
            **_owner(daemon),
            "pid": daemon.pid,
            "log_directory": daemon.log_directory,
            "multiuser": str(daemon.multiuser).lower(),
        },
        1,
    )
    if not world.stepped_ms:
        yield "mps_control_start_time_seconds", {}, daemon.started_ms / 1000
    server = daemon.server
    if server is None:
        return
    of_server = {"server": server.pid}
    yield "mps_server_info", {**of_server, **_owner(server)}, 1
    yield "mps_server_clients", of_server, len(server.clients)
    for gpu in daemon.gpus if world.sight.nvml and server.ready else ():
        yield "mps_server_memory_used_bytes", {**of_server, "uuid": gpu.uuid}, SERVER_BYTES
    if not world.stepped_ms:
        yield "mps_server_start_time_seconds", of_server, server.started_ms / 1000
    for client in server.clients:
        of_client = {**of_server, "pid": client.pid}
        if not client.exists:
            continue
        place = client.settings.place.labels
        info = {**of_client, **_owner(client), **place, "command": client.name}
        yield "mps_client_info", {**dict.fromkeys(ATTRIBUTES, ""), **info}, 1
        if client.settings.low_priority:
            yield "mps_client_priority", of_client, 1
        for ordinal in set(client.contexts.values()):
            where = {**of_client, "uuid": daemon.gpus[ordinal].uuid}
            count = list(client.contexts.values()).count(ordinal)
            yield "mps_client_contexts", where, count
            if world.sight.nvml and client.active_ms is not None and client.alive:
                yield "mps_client_memory_used_bytes", where, client.used_on(ordinal)


def _owner(process: Process) -> Labels:
    return {"uid": process.uid, "user": NAMES.get(process.uid, "")}


def _of_gpus(world: World) -> Iterator[Expected]:
    for gpu in world.gpus:
        yield "mps_gpu_info", {"uuid": gpu.uuid, "gpu": gpu.index}, 1
        yield "mps_gpu_sms", {"uuid": gpu.uuid}, SMS
        servers = [
            server
            for one in world.daemons.values()
            for server in one.servers
            if gpu in one.gpus and server.ready
        ]
        yield "mps_gpu_processes", {"uuid": gpu.uuid, "kind": "mps_server"}, len(servers)
        yield "mps_gpu_processes", {"uuid": gpu.uuid, "kind": "graphics"}, 0
        serving = sum(gpu in one.gpus and one.exists for one in world.daemons.values())
        yield "mps_gpu_served", {"uuid": gpu.uuid}, serving
