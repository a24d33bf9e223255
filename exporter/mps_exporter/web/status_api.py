"""What the status page and its JSON show of a snapshot: the same for both.

Names that other people chose (programs, users, units) are made fit to be shown here, once.
The fields are documented in docs/api.md; they are an interface, so none may change its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mps_exporter import humanize
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Incident, Server, Wait

Severity = Literal["trouble", "warning", "notice", "ok"]


@dataclass(frozen=True, slots=True)
class FindingView:
    """Something a person should know, and what can be done about it."""

    severity: Severity
    text: str
    remedy: str = ""
    daemon: str | None = None
    since: float | None = None
    name: str | None = None
    """As in the metric mps_advice."""
    why: str = ""
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class ClientView:
    """A client of a server."""

    pid: int
    program: str | None
    user: str
    uid: int | None
    connected_at: float | None
    state: str | None
    state_since: float | None
    limit_source: str
    active_thread_ratio: float | None
    sm_limit: dict[str, int]
    memory_used_bytes: dict[str, int]
    memory_limit_bytes: dict[str, int]
    contexts: dict[str, int]
    container_id: str | None
    pod_uid: str | None
    slurm_job_id: str | None
    systemd_unit: str | None

    def is_on(self, uuid: str) -> bool:
        """Whether it uses this GPU, as far as anything tells."""
        return bool(self.contexts.get(uuid) or uuid in self.memory_used_bytes)

    @property
    def has_unknown_gpu(self) -> bool:
        """Whether nothing tells which GPU it uses."""
        return not any(self.contexts.values()) and not self.memory_used_bytes


@dataclass(frozen=True, slots=True)
class ServerView:
    """A server and its clients."""

    pid: int
    user: str
    uid: int | None
    state: str | None
    ghost: bool
    started_at: float | None
    clients_connected: int | None
    contexts: dict[str, int]
    contexts_limit: dict[str, int]
    active_thread_ratio: float | None
    clients: tuple[ClientView, ...]


@dataclass(frozen=True, slots=True)
class WaitView:
    """A client that waits behind another user's server."""

    pid: int
    user: str
    uid: int
    since: float
    seconds: float
    behind_user: str
    behind_uid: int | None
    behind_server_pid: int | None
    dead: bool


@dataclass(frozen=True, slots=True)
class DaemonView:
    """A control daemon."""

    pipe_directory: str
    log_directory: str
    state: str | None
    pid: int | None
    user: str | None
    uid: int | None
    started_at: float | None
    binary_version: str | None
    multiuser: bool | None
    gpu_uuids: tuple[str, ...]
    servers_count: int | None
    """None: whether a server runs is not known."""
    logs_readable: bool
    """Both logs: without them incidents and waits cannot be seen."""
    servers: tuple[ServerView, ...]
    waits: tuple[WaitView, ...]


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU or a MIG instance."""

    index: str
    uuid: str
    name: str | None
    parent_uuid: str | None
    lost: bool
    sm_count: int | None
    compute_mode: str | None
    utilization_ratio: float | None
    sm_active_ratio: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_watts: float | None
    temperature_celsius: float | None
    sm_committed_ratio: float | None
    processes_by_kind: dict[str, int] | None
    stranded_clients: int | None
    served_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IncidentView:
    """Something that happened."""

    at: float
    daemon: str
    kind: str
    severity: Severity
    text: str
    count: int
    server_pid: int | None
    uid: int | None
    pids: tuple[int, ...]
    blamed_pid: int | None
    left_by_pid: int | None
    ended_pids: tuple[int, ...]
    gpu_uuids: tuple[str, ...]
    seconds: float | None


def gpu_view(gpu: Gpu) -> GpuView:
    """A GPU as it is shown."""
    seen = gpu.observation
    return GpuView(
        index=gpu.index,
        uuid=gpu.uuid,
        name=seen.name and humanize.printable(seen.name),
        parent_uuid=seen.parent_uuid,
        lost=seen.lost,
        sm_count=seen.sm_count,
        compute_mode=seen.compute_mode,
        utilization_ratio=gpu.reading("gpu_utilization"),
        sm_active_ratio=gpu.reading("sm_activity"),
        memory_used_bytes=gpu.reading("memory_used"),
        memory_total_bytes=gpu.reading("memory_total"),
        power_watts=gpu.reading("power"),
        temperature_celsius=gpu.reading("temperature", sensor="gpu"),
        sm_committed_ratio=gpu.sm_committed_ratio,
        processes_by_kind=dict(gpu.processes_by_kind)
        if gpu.processes_by_kind is not None
        else None,
        stranded_clients=gpu.stranded_clients,
        served_by=tuple(humanize.printable(name, 400) for name in gpu.served_by),
    )


def _optional(text: str | None) -> str | None:
    return humanize.printable(text) if text else None


def _client(client: Client) -> ClientView:
    return ClientView(
        pid=client.pid,
        program=_optional(client.command),
        user=humanize.user_name(client.uid, client.user),
        uid=client.uid,
        connected_at=client.connected_at,
        state=client.state,
        state_since=client.state_since,
        limit_source=client.limit_source,
        active_thread_ratio=client.active_thread_ratio,
        sm_limit=dict(client.sm_limit),
        memory_used_bytes=dict(client.memory_used_bytes),
        memory_limit_bytes=dict(client.memory_limit_bytes),
        contexts=dict(client.contexts),
        container_id=_optional(client.container_id),
        pod_uid=_optional(client.pod_uid),
        slurm_job_id=_optional(client.slurm_job_id),
        systemd_unit=_optional(client.systemd_unit),
    )


def _seniority(client: Client) -> tuple[float, int]:
    return (math.inf if client.connected_at is None else client.connected_at, client.pid)


def _server(server: Server) -> ServerView:
    return ServerView(
        pid=server.pid,
        user=humanize.user_name(server.uid, server.user),
        uid=server.uid,
        state=_optional(server.state),
        ghost=bool(server.ghost),
        started_at=server.start_time_seconds,
        clients_connected=server.clients_connected,
        contexts=dict(server.contexts),
        contexts_limit=dict(server.contexts_limit),
        active_thread_ratio=server.active_thread_ratio,
        clients=tuple(_client(client) for client in sorted(server.clients, key=_seniority)),
    )


def _wait(
    wait: Wait, daemon: ControlDaemon, name_of: humanize.UserNameLookup, now: float
) -> WaitView:
    holder = next((server for server in daemon.servers if server.uid == wait.behind_uid), None)
    return WaitView(
        pid=wait.pid,
        user=name_of(wait.uid),
        uid=wait.uid,
        since=wait.since,
        seconds=max(0.0, now - wait.since),
        behind_user=name_of(wait.behind_uid),
        behind_uid=wait.behind_uid,
        behind_server_pid=holder.pid if holder is not None else None,
        dead=wait.dead,
    )


def daemon_view(daemon: ControlDaemon, name_of: humanize.UserNameLookup, now: float) -> DaemonView:
    """A daemon as it is shown."""
    waits = sorted(daemon.waits, key=lambda wait: wait.since)
    return DaemonView(
        pipe_directory=humanize.printable(daemon.pipe_directory, 400),
        log_directory=humanize.printable(daemon.log_directory, 400),
        state=daemon.state,
        pid=daemon.pid,
        user=humanize.user_name(daemon.uid, daemon.user) if daemon.uid is not None else None,
        uid=daemon.uid,
        started_at=daemon.start_time_seconds,
        binary_version=_optional(daemon.binary_version),
        multiuser=daemon.multiuser,
        gpu_uuids=daemon.gpu_uuids,
        servers_count=daemon.servers_count,
        logs_readable=daemon.follows("control") and daemon.follows("server"),
        servers=tuple(_server(server) for server in daemon.servers),
        waits=tuple(_wait(wait, daemon, name_of, now) for wait in waits),
    )


def _severity(kind: str) -> Severity:
    if kind in humanize.SEVERE_INCIDENTS:
        return "trouble"
    return "warning" if kind in humanize.NOTABLE_INCIDENTS else "notice"


def incident_view(daemon: str, one: Incident, name_of: humanize.UserNameLookup) -> IncidentView:
    """An incident as it is shown."""
    return IncidentView(
        at=one.at,
        daemon=humanize.printable(daemon, 400),
        kind=one.kind,
        severity=_severity(one.kind),
        text=humanize.describe_incident(one, name_of),
        count=one.count,
        server_pid=one.server_pid,
        uid=one.uid,
        pids=one.pids,
        blamed_pid=one.blamed_pid,
        left_by_pid=one.left_by_pid,
        ended_pids=one.ended_pids,
        gpu_uuids=one.gpu_uuids,
        seconds=one.seconds,
    )


def incident_views(
    daemons: Iterable[ControlDaemon], name_of: humanize.UserNameLookup
) -> tuple[IncidentView, ...]:
    """The last incidents of all daemons, the newest first."""
    found = [
        incident_view(daemon.pipe_directory, one, name_of)
        for daemon in daemons
        for one in daemon.incidents
    ]
    found.reverse()  # of two at the same moment, the one that was noted later comes first
    return tuple(sorted(found, key=lambda one: -one.at))
