"""The status of the host as data: the page and /api/v1/status show the same.

Names that other people chose (programs, users, units) are made fit to be shown here, once.
The fields are documented in docs/api.md; they are an interface, so none may change its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, cast

from mps_exporter import humanize
from mps_exporter.diagnostics import ADVICE
from mps_exporter.diagnostics import Severity as FindingSeverity
from mps_exporter.diagnostics.finding import effective_severity
from mps_exporter.diagnostics.partitions import partitioning_lines
from mps_exporter.diagnostics.safe_commands import Action
from mps_exporter.snapshot import (
    Client,
    ControlDaemon,
    EndedBefore,
    Gpu,
    Incident,
    RecordingInfo,
    Server,
    Snapshot,
    TimelineKind,
    Wait,
)
from mps_exporter.web.history import History, Sample

Severity = Literal["critical", "warning", "info", "ok"]
"""Those of the doctor and of the alerts; ok only for an answer such as "All is well"."""
DAY_SECONDS = 86_400.0


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
    first_seen: float | None = None
    """Since when every collection had it, where the moment of its beginning is not known."""
    actions: tuple[Action, ...] = ()
    runbook_url: str | None = None
    docs_url: str | None = None


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
    gpu_uuids: tuple[str, ...]
    server_name: str | None
    namespace: str | None
    sm_partition: str | None
    sm_partition_fault: str | None
    container_id: str | None
    pod_uid: str | None
    slurm_job_id: str | None
    systemd_unit: str | None

    def is_on(self, uuid: str) -> bool:
        """Whether it uses this GPU, as far as anything tells."""
        return bool(
            self.contexts.get(uuid) or uuid in self.memory_used_bytes or uuid in self.gpu_uuids
        )

    @property
    def has_unknown_gpu(self) -> bool:
        """Whether nothing tells which GPU it uses."""
        return not (any(self.contexts.values()) or self.memory_used_bytes or self.gpu_uuids)


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
class SpanView:
    """A part of the last ten minutes."""

    kind: TimelineKind
    user: str
    uid: int | None
    start: float
    end: float


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
    waits_visible: bool
    """control.log can be read, and is of MPS v2: nothing else shows who waits."""
    timeline: tuple[SpanView, ...]
    timeline_since: float | None
    protocol: str | None
    partitioning: tuple[str, ...]
    """Named servers, namespaces, SM partitions, features and GPU memory of control groups as lines
    of text: the numbers are in the metrics."""


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
    samples: tuple[Sample, ...]


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
    caused_by_pids: tuple[int, ...]
    proof: str
    ended_before: tuple[EndedBefore, ...]
    gpu_uuids: tuple[str, ...]
    seconds: float | None


@dataclass(frozen=True, slots=True)
class SourceView:
    """A source of the exporter."""

    name: str
    success: bool
    duration_seconds: float
    error: str | None
    read_at: float | None
    """When it was last read without an error; None: not since the exporter started."""


@dataclass(frozen=True, slots=True)
class TotalsView:
    """The host in numbers; None: not known."""

    gpus: int | None
    clients: int | None
    clients_at_least: int
    """Those of the servers whose clients are known."""
    waiting: int | None
    longest_wait_seconds: float | None
    incidents_24h: int | None
    """Of severity warning and critical."""
    incidents_since: float | None
    """Of what was before this moment not all is known; None: all of the 24 hours is."""
    sm_active_ratio: float | None
    """The mean of the GPUs that have the reading."""


@dataclass(frozen=True, slots=True)
class ExporterView:
    """Name and version of the exporter."""

    name: str
    version: str
    revision: str


@dataclass(frozen=True, slots=True)
class HostStatus:
    """All that the page shows. Documented in docs/api.md."""

    api_version: str
    taken_at: float
    host: str
    exporter: ExporterView
    recording: RecordingInfo | None
    driver_version: str | None
    cuda_version: str | None
    headline: FindingView
    findings: tuple[FindingView, ...]
    blind_spots: tuple[FindingView, ...]
    totals: TotalsView
    sources: tuple[SourceView, ...]
    gpus: tuple[GpuView, ...]
    daemons: tuple[DaemonView, ...]
    incidents: tuple[IncidentView, ...]


_View = TypeVar("_View")

PATH_CHARACTERS = 400
"""Maximum length of a shown path or error text."""


def _path(text: str) -> str:
    return humanize.printable(text, PATH_CHARACTERS)


def _shown(value: Any) -> Any:
    """Return a value as it is shown: text of other people is made fit, an empty one is None."""
    if isinstance(value, str):
        return humanize.printable(value) or None
    return dict(value) if isinstance(value, Mapping) else value


def _view(kind: type[_View], source: object, **derived: Any) -> _View:
    """Make a view of a part of the snapshot: fields that are not derived have the same name."""
    names = (field.name for field in fields(cast("Any", kind)) if field.name not in derived)
    return kind(**{name: _shown(getattr(source, name)) for name in names}, **derived)


def gpu_view(gpu: Gpu, now: float, history: History) -> GpuView:
    seen = gpu.observation
    return _view(
        GpuView,
        gpu,
        name=_shown(seen.name),
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
        served_by=tuple(map(_path, gpu.served_by)),
        samples=history.samples(gpu.uuid, now),
    )


def _client_view(client: Client) -> ClientView:
    return _view(
        ClientView,
        client,
        program=_shown(client.command),
        user=humanize.user_name(client.uid, client.user),
        sm_partition=_shown(client.sm_partition_name or client.sm_partition),
    )


def _oldest_first(client: Client) -> tuple[float, int]:
    return (math.inf if client.connected_at is None else client.connected_at, client.pid)


def _server_view(server: Server) -> ServerView:
    return _view(
        ServerView,
        server,
        user=humanize.user_name(server.uid, server.user),
        ghost=bool(server.ghost),
        started_at=server.start_time_seconds,
        clients=tuple(_client_view(client) for client in sorted(server.clients, key=_oldest_first)),
    )


def _wait(
    wait: Wait, daemon: ControlDaemon, name_of: humanize.UserNameLookup, now: float
) -> WaitView:
    holder = next((server for server in daemon.servers if server.uid == wait.behind_uid), None)
    return _view(
        WaitView,
        wait,
        user=name_of(wait.uid),
        seconds=max(0.0, now - wait.since),
        behind_user=name_of(wait.behind_uid),
        behind_server_pid=holder.pid if holder is not None else None,
    )


def daemon_view(
    daemon: ControlDaemon,
    name_of: humanize.UserNameLookup,
    now: float,
    snapshot: Snapshot,
) -> DaemonView:
    waits = sorted(daemon.waits, key=lambda wait: wait.since)
    return _view(
        DaemonView,
        daemon,
        pipe_directory=_path(daemon.pipe_directory),
        log_directory=_path(daemon.log_directory),
        user=humanize.user_name(daemon.uid, daemon.user) if daemon.uid is not None else None,
        started_at=daemon.start_time_seconds,
        logs_readable=daemon.follows("control") and daemon.follows("server"),
        servers=tuple(map(_server_view, daemon.servers)),
        waits=tuple(_wait(wait, daemon, name_of, now) for wait in waits),
        waits_visible=daemon.shows_waits,
        timeline=tuple(
            _view(SpanView, span, user=name_of(span.uid), end=now if span.ongoing else span.end)
            for span in daemon.timeline
        ),
        partitioning=partitioning_lines(daemon, snapshot),
    )


_SEVERITIES: dict[str, FindingSeverity] = {
    "ghost": "critical",
    "client_terminated": "warning",
    "wait_abandoned": "warning",
}
"""Of kinds of incidents that are no finding; others are for information."""


def incident_view(
    daemon: str, one: Incident, name_of: humanize.UserNameLookup, *, limited: bool
) -> IncidentView:
    advice = ADVICE.get(one.kind)
    severity = _SEVERITIES.get(one.kind, "info") if advice is None else advice.severity
    return _view(
        IncidentView,
        one,
        daemon=_path(daemon),
        severity=effective_severity(severity, limited=limited),
        text=humanize.describe_incident(one, name_of),
        proof=one.proof,
    )


def incident_views(
    daemons: Iterable[ControlDaemon], name_of: humanize.UserNameLookup
) -> tuple[IncidentView, ...]:
    """The last incidents of all daemons, the newest first."""
    found = [
        incident_view(daemon.pipe_directory, one, name_of, limited=daemon.limited)
        for daemon in daemons
        for one in daemon.incidents
    ]
    found.reverse()  # of two at the same moment, the one that was noted later comes first
    return tuple(sorted(found, key=lambda one: -one.at))


def source_views(snapshot: Snapshot, history: History) -> tuple[SourceView, ...]:
    return tuple(
        _view(
            SourceView,
            result,
            error=_path(result.error) if result.error else None,
            read_at=snapshot.taken_at if result.success else history.read_at(result.name),
        )
        for result in snapshot.collectors
    )


def totals(
    snapshot: Snapshot,
    daemons: Iterable[DaemonView],
    incidents: Iterable[IncidentView],
    began_at: float | None,
) -> TotalsView:
    daemons = [daemon for daemon in daemons if daemon.state != "absent"]
    failed = {result.name for result in snapshot.collectors if not result.success}
    clients, all_known = _count_known_clients(daemons)
    waits = [wait for daemon in daemons for wait in daemon.waits]
    seen = "process" not in failed and all(daemon.waits_visible for daemon in daemons)
    recent = [
        one
        for one in incidents
        if one.severity in ("critical", "warning") and snapshot.taken_at - one.at <= DAY_SECONDS
    ]
    activity = [one for gpu in snapshot.gpus if (one := gpu.reading("sm_activity")) is not None]
    begin = snapshot.taken_at - DAY_SECONDS
    return TotalsView(
        gpus=None if "nvml" in failed and not snapshot.gpus else len(snapshot.gpus),
        clients=clients if all_known and "process" not in failed else None,
        clients_at_least=clients,
        waiting=len(waits) if seen or waits else None,
        longest_wait_seconds=max((wait.seconds for wait in waits), default=None),
        incidents_24h=len(recent) if recent or all(d.logs_readable for d in daemons) else None,
        incidents_since=began_at if began_at is not None and began_at > begin else None,
        sm_active_ratio=sum(activity) / len(activity) if activity else None,
    )


def _count_known_clients(daemons: Sequence[DaemonView]) -> tuple[int, bool]:
    """How many clients are known, and whether these are all clients of these daemons."""
    counts = [server.clients_connected for daemon in daemons for server in daemon.servers]
    known = [count for count in counts if count is not None]
    servers_known = all(daemon.servers_count is not None for daemon in daemons)
    return sum(known), servers_known and len(known) == len(counts)
