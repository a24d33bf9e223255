"""The status of the host as data: the page and /api/v1/status show the same.

Names that other people chose (programs, users, units) are made fit to be shown here, once.
The fields are documented in docs/api.md; they are an interface, so none may change its meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from mps_exporter import humanize
from mps_exporter.findings import ADVICE
from mps_exporter.findings import Severity as FindingSeverity
from mps_exporter.findings.finding import effective_severity
from mps_exporter.findings.limits import partitioning_lines
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Incident, Server, Snapshot, Wait
from mps_exporter.web.history import History

Severity = Literal["critical", "warning", "info", "ok"]
"""Those of the doctor and of the alerts; ok only for an answer such as "All is well"."""
DAY_SECONDS = 86_400.0


FIELDS = {
    "finding": (
        "severity text remedy daemon since name why uuid first_seen actions runbook_url docs_url"
    ),
    "client": (
        "pid program user uid connected_at state state_since limit_source active_thread_ratio "
        "sm_limit memory_used_bytes memory_limit_bytes contexts gpu_uuids server_name namespace "
        "sm_partition sm_partition_fault container_id pod_uid slurm_job_id systemd_unit"
    ),
    "server": (
        "pid user uid state ghost started_at clients_connected contexts contexts_limit "
        "active_thread_ratio clients"
    ),
    "wait": "pid user uid since seconds behind_user behind_uid behind_server_pid dead",
    "span": "kind user uid start end",
    "daemon": (
        "pipe_directory log_directory state pid user uid started_at binary_version multiuser "
        "gpu_uuids servers_count logs_readable servers waits waits_visible timeline "
        "timeline_since protocol partitioning"
    ),
    "gpu": (
        "index uuid name parent_uuid lost sm_count compute_mode utilization_ratio sm_active_ratio "
        "memory_used_bytes memory_total_bytes power_watts temperature_celsius sm_committed_ratio "
        "processes_by_kind stranded_clients served_by samples"
    ),
    "incident": (
        "at daemon kind severity text count server_pid uid pids blamed_pid caused_by_pids proof "
        "ended_before gpu_uuids seconds"
    ),
    "source": "name success duration_seconds error read_at",
}
"""Kind of object -> its fields, in the order of the document."""


class View(dict[str, Any]):
    """An object of the status: a field can be read as an attribute, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def to_json(view: View) -> str:
    return json.dumps(view, default=asdict, allow_nan=False)


PATH_CHARACTERS = 400
"""Maximum length of a shown path or error text."""


def _path(text: str) -> str:
    return humanize.printable(text, PATH_CHARACTERS)


def _shown(value: Any) -> Any:
    """Return a value as it is shown: text of other people is made fit, an empty one is None."""
    if isinstance(value, str):
        return humanize.printable(value) or None
    return dict(value) if isinstance(value, Mapping) else value


def _view(kind: str, source: object, **derived: Any) -> View:
    """Make a view of a part of the snapshot: fields that are not derived have the same name."""
    return View(
        (name, derived[name] if name in derived else _shown(getattr(source, name)))
        for name in FIELDS[kind].split()
    )


def finding_view(severity: Severity, text: str, remedy: str = "", **known: Any) -> View:
    """Make a finding: fields that are not known have their defaults."""
    derived = dict.fromkeys(FIELDS["finding"].split()) | {"why": "", "actions": ()} | known
    return View(derived, severity=severity, text=text, remedy=remedy)


def gpu_view(gpu: Gpu, now: float, history: History) -> View:
    seen = gpu.observation
    return _view(
        "gpu",
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


def _client_view(client: Client) -> View:
    return _view(
        "client",
        client,
        program=_shown(client.command),
        user=humanize.user_name(client.uid, client.user),
        sm_partition=_shown(client.sm_partition_name or client.sm_partition),
    )


def _oldest_first(client: Client) -> tuple[float, int]:
    return (math.inf if client.connected_at is None else client.connected_at, client.pid)


def _server_view(server: Server) -> View:
    return _view(
        "server",
        server,
        user=humanize.user_name(server.uid, server.user),
        ghost=bool(server.ghost),
        started_at=server.start_time_seconds,
        clients=tuple(_client_view(client) for client in sorted(server.clients, key=_oldest_first)),
    )


def _wait(wait: Wait, daemon: ControlDaemon, name_of: humanize.UserNameLookup, now: float) -> View:
    holder = next((server for server in daemon.servers if server.uid == wait.behind_uid), None)
    return _view(
        "wait",
        wait,
        user=name_of(wait.uid),
        seconds=max(0.0, now - wait.since),
        behind_user=name_of(wait.behind_uid),
        behind_server_pid=holder.pid if holder is not None else None,
    )


def daemon_view(
    daemon: ControlDaemon, name_of: humanize.UserNameLookup, now: float, snapshot: Snapshot
) -> View:
    waits = sorted(daemon.waits, key=lambda wait: wait.since)
    return _view(
        "daemon",
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
            _view("span", span, user=name_of(span.uid), end=now if span.ongoing else span.end)
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
) -> View:
    advice = ADVICE.get(one.kind)
    severity = _SEVERITIES.get(one.kind, "info") if advice is None else advice.severity
    return _view(
        "incident",
        one,
        daemon=_path(daemon),
        severity=effective_severity(severity, limited=limited),
        text=humanize.describe_incident(one, name_of),
        proof=one.proof,
    )


def incident_views(
    daemons: Iterable[ControlDaemon], name_of: humanize.UserNameLookup
) -> tuple[View, ...]:
    """The last incidents of all daemons, the newest first."""
    found = [
        incident_view(daemon.pipe_directory, one, name_of, limited=daemon.limited)
        for daemon in daemons
        for one in daemon.incidents
    ]
    found.reverse()  # of two at the same moment, the one that was noted later comes first
    return tuple(sorted(found, key=lambda one: -one.at))


def source_views(snapshot: Snapshot, history: History) -> tuple[View, ...]:
    return tuple(
        _view(
            "source",
            result,
            error=_path(result.error) if result.error else None,
            read_at=snapshot.taken_at if result.success else history.read_at(result.name),
        )
        for result in snapshot.collectors
    )


def totals(
    snapshot: Snapshot, daemons: Iterable[View], incidents: Iterable[View], began_at: float | None
) -> View:
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
    return View(
        gpus=None if "nvml" in failed and not snapshot.gpus else len(snapshot.gpus),
        clients=clients if all_known and "process" not in failed else None,
        clients_at_least=clients,
        waiting=len(waits) if seen or waits else None,
        longest_wait_seconds=max((wait.seconds for wait in waits), default=None),
        incidents_24h=len(recent) if recent or all(d.logs_readable for d in daemons) else None,
        incidents_since=began_at if began_at is not None and began_at > begin else None,
        sm_active_ratio=sum(activity) / len(activity) if activity else None,
    )


def _count_known_clients(daemons: Sequence[View]) -> tuple[int, bool]:
    """How many clients are known, and whether these are all clients of these daemons."""
    counts = [server.clients_connected for daemon in daemons for server in daemon.servers]
    known = [count for count in counts if count is not None]
    servers_known = all(daemon.servers_count is not None for daemon in daemons)
    return sum(known), servers_known and len(known) == len(counts)
