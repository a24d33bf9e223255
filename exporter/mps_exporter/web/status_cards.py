"""A card for each GPU, with who uses it; and one for each daemon whose GPUs are not known."""

from __future__ import annotations

from mps_exporter import humanize
from mps_exporter.web.html import Markup, h, join
from mps_exporter.web.status_api import ClientView, DaemonView, GpuView, ServerView
from mps_exporter.web.status_report import HostStatus

_STATES = {
    "answering": "answers",
    "absent": "does not run",
    "unresponsive": "does not answer",
    "draining": "is draining",
    "refused": "refuses to answer",
    None: "state not known",
}
_CLIENT_STATES = {
    "connecting": "connected, without a context",
    "creating_context": "creating its context",
    "torn_down": "torn down by a fatal GPU error",
}
"""An active client is what is expected; one that waits is in the queue."""
_KINDS = (
    ("mps_client", "MPS client"),
    ("direct", "process without MPS", "processes without MPS"),
    ("graphics", "graphics process", "graphics processes"),
)


def cards(status: HostStatus) -> Markup:
    """All of them."""
    shown = {gpu.uuid for gpu in status.gpus}
    parts = [_gpu(gpu, status) for gpu in status.gpus]
    parts += [
        _lone_daemon(daemon, status.taken_at)
        for daemon in status.daemons
        if shown.isdisjoint(daemon.gpu_uuids)
    ]
    if not parts:
        return h("p", "No GPU and no MPS daemon could be seen on this host.", class_="quiet")
    return join(parts)


def bar(ratio: float | None, label: str, kind: str = "") -> Markup:
    """A bar from 0 to 1; without a ratio, an empty one."""
    width = 0.0 if ratio is None else max(0.0, min(1.0, ratio)) * 100
    return h(
        "svg",
        h("rect", class_="track", width=100, height=8),
        h("rect", class_="fill", width=f"{width:.1f}", height=8),
        class_=f"bar {kind}".strip(),
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )


def meter(title: str, value: str, ratio: float | None, kind: str = "") -> Markup:
    """A quantity with its bar."""
    return h(
        "div",
        h("dt", title),
        h("dd", h("span", value, class_="value"), bar(ratio, f"{title}: {value}", kind)),
    )


def _gpu(gpu: GpuView, status: HostStatus) -> Markup:
    daemons = [daemon for daemon in status.daemons if gpu.uuid in daemon.gpu_uuids]
    name = f"GPU {gpu.index}" if gpu.parent_uuid is None else f"MIG instance {gpu.index}"
    return h(
        "article",
        h(
            "header",
            h("h3", name, h("span", f" {gpu.name or ''}", class_="model")),
            h("p", _facts(gpu), class_="quiet"),
        ),
        h("p", "This GPU has fallen off the bus.", class_="alarm") if gpu.lost else None,
        _meters(gpu),
        _reading_aid(gpu),
        [_daemon(daemon, gpu, status.taken_at) for daemon in daemons]
        or h("p", "No MPS daemon is known to serve this GPU.", class_="quiet empty"),
        class_="card",
        aria_label=name,
    )


def _facts(gpu: GpuView) -> str:
    facts = []
    if gpu.power_watts is not None:
        facts.append(f"{gpu.power_watts:.0f} W")
    if gpu.temperature_celsius is not None:
        facts.append(f"{gpu.temperature_celsius:.0f} °C")
    if gpu.compute_mode not in (None, "default"):
        facts.append(str(gpu.compute_mode).replace("_", " "))
    kinds = gpu.processes_by_kind or {}
    facts += [humanize.count(kinds[kind], *names) for kind, *names in _KINDS if kinds.get(kind)]
    if gpu.stranded_clients:
        facts.append(f"{humanize.count(gpu.stranded_clients, 'client')} without a server")
    return " · ".join(facts)


def _meters(gpu: GpuView) -> Markup | None:
    parts = []
    if gpu.utilization_ratio is not None:
        busy = humanize.percent(gpu.utilization_ratio)
        parts.append(meter("Time busy", busy, gpu.utilization_ratio, "activity"))
    if gpu.sm_active_ratio is not None:
        active = humanize.percent(gpu.sm_active_ratio)
        parts.append(meter("SMs active", active, gpu.sm_active_ratio, "activity"))
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
        text = (
            f"{humanize.memory(gpu.memory_used_bytes)} of {humanize.memory(gpu.memory_total_bytes)}"
        )
        parts.append(
            meter("Memory", text, gpu.memory_used_bytes / gpu.memory_total_bytes, "memory")
        )
    return h("dl", parts, class_="meters") if parts else None


def _reading_aid(gpu: GpuView) -> Markup | None:
    """What the two numbers side by side mean, where they tell different stories."""
    busy, active = gpu.utilization_ratio, gpu.sm_active_ratio
    if busy is None or active is None or busy < 0.5 or active > busy / 2:
        return None
    return h(
        "p",
        f"Something ran {humanize.percent(busy)} of the time, but on {humanize.percent(active)} of "
        f"the "
        "SMs on average: it does not fill this GPU.",
        class_="aid",
    )


def _daemon_line(daemon: DaemonView, now: float) -> Markup:
    well = daemon.state == "answering"
    facts = [_STATES.get(daemon.state, str(daemon.state))]
    if daemon.user is not None and daemon.uid != 0:
        facts.append(f"runs as {daemon.user}")
    if daemon.started_at is not None:
        facts.append(f"up {humanize.age(now - daemon.started_at)}")
    return h(
        "p",
        "Daemon ",
        h("code", daemon.pipe_directory),
        " ",
        h("span", facts[0], class_="quiet" if well or daemon.state is None else "alarm"),
        h("span", "".join(f" · {fact}" for fact in facts[1:]), class_="quiet"),
        class_="daemon",
    )


def _daemon(daemon: DaemonView, gpu: GpuView, now: float) -> Markup:
    first = gpu.uuid == min(daemon.gpu_uuids)
    servers = []
    for server in daemon.servers:
        clients = [
            one for one in server.clients if one.is_on(gpu.uuid) or (one.has_unknown_gpu and first)
        ]
        servers.append(_server(server, clients, gpu, now))
    return h(
        "section",
        _daemon_line(daemon, now),
        servers or _no_server(daemon),
        aria_label=f"Daemon {daemon.pipe_directory}",
    )


def _no_server(daemon: DaemonView) -> Markup:
    known = daemon.servers_count is not None
    text = "No server runs." if known else "Whether a server runs is not known."
    return h("p", text, class_="quiet empty")


def _lone_daemon(daemon: DaemonView, now: float) -> Markup:
    return h(
        "article",
        h("header", h("h3", "MPS daemon")),
        _daemon_line(daemon, now),
        [_server(server, server.clients, None, now) for server in daemon.servers]
        or _no_server(daemon),
        class_="card",
        aria_label=f"Daemon {daemon.pipe_directory}",
    )


def _server(
    server: ServerView, clients: list[ClientView] | tuple[ClientView, ...], gpu: GpuView | None,
    now: float,
) -> Markup:  # fmt: skip
    known = clients or server.clients_connected is not None
    facts = [humanize.count(len(clients), "client") if known else "clients not known"]
    if gpu is not None and (limit := server.contexts_limit.get(gpu.uuid)):
        facts.append(f"{server.contexts.get(gpu.uuid, 0)} of {limit} contexts")
    if server.active_thread_ratio is not None and server.active_thread_ratio < 1:
        facts.append(f"new clients get {humanize.percent(server.active_thread_ratio)} of the SMs")
    if gpu is not None and gpu.sm_committed_ratio is not None and len(clients) > 1:
        facts.append(f"limits add up to {humanize.percent(gpu.sm_committed_ratio)} of the SMs")
    if server.started_at is not None:
        facts.append(f"up {humanize.age(now - server.started_at)}")
    state = "ghost" if server.ghost else server.state
    return h(
        "div",
        h(
            "p",
            h("strong", humanize.sentence(server.user).removesuffix(".") + "'s server"),
            h("span", f" {server.pid}", class_="quiet"),
            " ",
            h("span", state, class_="alarm") if state not in (None, "ACTIVE") else None,
            h("span", f" {' · '.join(facts)}", class_="quiet facts"),
            class_="owner",
        ),
        h("ul", [_client(one, gpu, now) for one in clients], class_="clients") if clients else None,
        class_="server",
    )


def _client(client: ClientView, gpu: GpuView | None, now: float) -> Markup:
    uuid = gpu.uuid if gpu is not None else ""
    meta = [client.user]
    if client.pid:
        meta.append(f"process {client.pid}")
    if client.connected_at is not None:
        meta.append(f"for {humanize.age(now - client.connected_at)}")
    state = _CLIENT_STATES.get(client.state or "")
    if state is not None and client.state_since is not None:
        state += f" for {humanize.age(now - client.state_since)}"
    return h(
        "li",
        h(
            "div",
            h("p", client.program or "unknown program", class_="program"),
            h("p", " · ".join(meta), class_="quiet"),
            h("p", state, class_="alarm" if client.state == "torn_down" else "quiet")
            if state
            else None,
            _belongs_to(client),
            class_="who",
        ),
        _sm_limit(client, uuid, gpu),
        _memory(client, uuid, gpu),
    )


def _belongs_to(client: ClientView) -> Markup | None:
    owners = [
        f"{kind} {name[:length]}"
        for kind, name, length in (
            ("Slurm job", client.slurm_job_id, 40),
            ("pod", client.pod_uid, 40),
            ("container", client.container_id, 12),
            ("unit", client.systemd_unit, 60),
        )
        if name
    ]
    return h("p", owners[0], class_="quiet") if owners else None


def _sm_limit(client: ClientView, uuid: str, gpu: GpuView | None) -> Markup:
    limit = client.sm_limit.get(uuid)
    total = gpu.sm_count if gpu is not None else None
    # "At most": a program may lower its limits while it starts, which is not seen from outside.
    if limit is not None and total:
        text = f"at most {limit} of {total} SMs" if limit < total else f"up to all {total} SMs"
        return _amount(text, limit / total, f"SM limit: {text}", "limit")
    if client.active_thread_ratio is not None:
        text = f"at most {humanize.percent(client.active_thread_ratio)} of the SMs"
        return _amount(text, client.active_thread_ratio, f"SM limit: {text}", "limit")
    return _amount("SM limit not known", None, "SM limit: not known", "limit")


def _memory(client: ClientView, uuid: str, gpu: GpuView | None) -> Markup:
    used = client.memory_used_bytes.get(uuid)
    limit = client.memory_limit_bytes.get(uuid)
    total = gpu.memory_total_bytes if gpu is not None else None
    if used is None:
        text = f"at most {humanize.memory(limit)}" if limit else "memory not known"
        return _amount(text, None, f"Memory: {text}", "memory")
    if limit:
        text = f"{humanize.memory(used)} of at most {humanize.memory(limit)}"
        return _amount(text, used / limit, f"Memory: {text}", "memory")
    unknown = client.limit_source == "unknown"
    text = f"{humanize.memory(used)}, {'limit not known' if unknown else 'no limit seen'}"
    return _amount(text, used / total if total else None, f"Memory: {text}", "memory")


def _amount(text: str, ratio: float | None, label: str, kind: str) -> Markup:
    return h("div", h("span", text, class_="value"), bar(ratio, label, kind), class_="amount")
