"""The status of the host as data: the page and /api/v1/status show the same."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from mps_exporter import findings, humanize
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings.before_kill import neighbour_counts
from mps_exporter.findings.finding import Finding, shown_path
from mps_exporter.findings.limits import partitioning_lines
from mps_exporter.flags import PROGRAM
from mps_exporter.humanize import UserNames, describe_incident
from mps_exporter.metrics import Build
from mps_exporter.observations import DaemonFacts
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Incident, Server, Snapshot, Wait
from mps_exporter.web.headline import headline, in_page_order
from mps_exporter.web.status_api_fields import View, finding_view, shown, view_of

DAY_SECONDS = 86_400.0
NO_BUILD = Build("", "", "")


@dataclass(frozen=True, slots=True)
class Sample:
    """The activity of a GPU at one collection; None if it could not be read."""

    at: float
    utilization_ratio: float | None
    sm_active_ratio: float | None


class History:
    """Recent activity of each GPU, and the times of the sources and findings.

    Nothing is read for the history: scrapes and readers of the page cause its snapshots.
    """

    def __init__(self) -> None:
        self.began_at: float | None = None  # Time of the first collection.
        self._last_at, self._loop = 0.0, 0
        self._samples: dict[str, deque[Sample]] = {}
        self.read_at: dict[str, float] = {}  # Source -> time of its last read without an error.
        self._first_seen: dict[tuple[str, str, str], float] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Record a collection. A replay that restarts begins a new history."""
        now = snapshot.taken_at
        loop = snapshot.recording.loop if snapshot.recording is not None else 0
        if self.began_at is None or now < self._last_at - 1.0 or loop != self._loop:
            self.began_at = now
            for memory in (self._samples, self.read_at, self._first_seen):
                memory.clear()
        self._last_at, self._loop = now, loop
        for result in snapshot.collectors:
            if result.success:
                self.read_at[result.name] = now
        if not any(result.name == "nvml" for result in snapshot.collectors):
            return  # a scrape of selected collectors: the GPUs were not read
        self._first_seen = {
            one.key: self._first_seen.get(one.key, now) for one in findings.findings(snapshot)
        }
        for gpu in snapshot.gpus:
            samples = self._samples.setdefault(gpu.uuid, deque(maxlen=policy.MAX_HISTORY_SAMPLES))
            if not samples or now - samples[-1].at >= policy.HISTORY_INTERVAL_SECONDS:
                busy, active = gpu.reading("gpu_utilization"), gpu.reading("sm_activity")
                samples.append(Sample(now, busy, active))
        self._samples = {
            uuid: kept
            for uuid, kept in self._samples.items()
            if kept[-1].at >= now - policy.HISTORY_SECONDS
        }

    def samples(self, uuid: str, now: float) -> tuple[Sample, ...]:
        begin = now - policy.HISTORY_SECONDS
        return tuple(one for one in self._samples.get(uuid, ()) if one.at >= begin)

    def first_seen(self, finding: Finding) -> float | None:
        """Return since when all collections have had this finding, or None."""
        return self._first_seen.get(finding.key)


def gpu_view(gpu: Gpu, now: float, history: History) -> View:
    return view_of(
        "gpu",
        gpu,
        gpu.observation,
        utilization_ratio=gpu.reading("gpu_utilization"),
        sm_active_ratio=gpu.reading("sm_activity"),
        memory_used_bytes=gpu.reading("memory_used"),
        memory_total_bytes=gpu.reading("memory_total"),
        power_watts=gpu.reading("power"),
        temperature_celsius=gpu.reading("temperature", sensor="gpu"),
        samples=history.samples(gpu.uuid, now),
    )


def _server_view(server: Server, daemon: ControlDaemon, snapshot: Snapshot) -> View:
    def client_view(client: Client) -> View:
        return view_of(
            "client",
            client,
            neighbours=neighbour_counts(client, server),
            sm_use=snapshot.sm_use.get((daemon.pipe_directory, server.pid, client.pid), {}),
            program=shown(client.command),
            user=humanize.user_name(client.uid, client.user),
            sm_partition=shown(client.sm_partition_name or client.sm_partition),
        )

    oldest_first = sorted(
        server.clients,
        key=lambda one: (math.inf if one.connected_at is None else one.connected_at, one.pid),
    )
    return view_of(
        "server",
        server,
        user=humanize.user_name(server.uid, server.user),
        ghost=bool(server.ghost),
        started_at=server.start_time_seconds,
        clients=tuple(map(client_view, oldest_first)),
    )


def _wait(wait: Wait, daemon: ControlDaemon, name_of: humanize.UserNameLookup, now: float) -> View:
    holder = next((server for server in daemon.servers if server.uid == wait.behind_uid), None)
    return view_of(
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
    return view_of(
        "daemon",
        daemon,
        user=humanize.user_name(daemon.uid, daemon.user) if daemon.uid is not None else None,
        started_at=daemon.start_time_seconds,
        logs_readable=daemon.follows("control") and daemon.follows("server"),
        servers=tuple(_server_view(one, daemon, snapshot) for one in daemon.servers),
        waits=tuple(_wait(wait, daemon, name_of, now) for wait in waits),
        waits_visible=daemon.shows_waits,
        timeline=tuple(
            view_of("span", span, user=name_of(span.uid), end=now if span.ongoing else span.end)
            for span in daemon.timeline
        ),
        partitioning=tuple(partitioning_lines(daemon, snapshot)),
    )


def incident_view(daemon: DaemonFacts, one: Incident, name_of: humanize.UserNameLookup) -> View:
    return view_of(
        "incident",
        one,
        daemon=shown_path(daemon.pipe_directory),
        severity=findings.incident_severity(one.kind, limited=daemon.limited),
        text=describe_incident(one, name_of),
        proof=one.proof,  # empty: no fault
    )


def _incidents(snapshot: Snapshot, name_of: humanize.UserNameLookup) -> tuple[View, ...]:
    """Return the incidents, the newest first; of equal times, the last recorded first."""
    found = [
        incident_view(daemon.facts, one, name_of)
        for daemon in reversed(snapshot.daemons)
        for one in reversed(daemon.incidents)
    ]
    return tuple(sorted(found, key=lambda one: -one.at))


def _totals(
    snapshot: Snapshot, daemons: Iterable[View], incidents: Iterable[View], began_at: float | None
) -> View:
    daemons = [daemon for daemon in daemons if daemon.state != "absent"]
    failed = {result.name for result in snapshot.collectors if not result.success}
    counts = [server.clients_connected for daemon in daemons for server in daemon.servers]
    clients_known = None not in (*counts, *(daemon.servers_count for daemon in daemons))
    clients = sum(count or 0 for count in counts)
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
        clients=clients if clients_known and "process" not in failed else None,
        clients_at_least=clients,
        waiting=len(waits) if seen or waits else None,
        longest_wait_seconds=max((wait.seconds for wait in waits), default=None),
        incidents_24h=len(recent) if recent or all(d.logs_readable for d in daemons) else None,
        incidents_since=began_at if began_at is not None and began_at > begin else None,
        sm_active_ratio=sum(activity) / len(activity) if activity else None,
    )


# ------------------------------------------------------------------------------ the status


def to_json(view: View) -> str:
    return json.dumps(view, default=asdict, allow_nan=False)


def make_status(
    snapshot: Snapshot,
    config_error: str | None = None,
    user_names: UserNames | None = None,
    history: History | None = None,
    *,
    host: str = "",
    build: Build = NO_BUILD,
) -> View:
    """Return the view of a snapshot for people and programs."""
    name_of = user_names or UserNames(snapshot)
    history = history or History()
    now, info = snapshot.taken_at, snapshot.recording
    states = findings.findings(snapshot, name_of, config_error=config_error)
    news = findings.recent_incidents(snapshot, name_of)
    current = [one for one in (*states, *news) if one.advice.kind != "blindness"]
    blind = [one for one in states if one.advice.kind == "blindness"]
    unknowns = tuple(_finding_view(one, history) for one in blind)
    views = [_finding_view(one, history) for one in findings.in_order(current)]
    found = in_page_order(views, snapshot)
    incidents = _incidents(snapshot, name_of)
    daemons = tuple(daemon_view(daemon, name_of, now, snapshot) for daemon in snapshot.daemons)
    status = View(
        api_version="1",
        taken_at=now,
        host=host,
        exporter=View(name=PROGRAM, version=build.version, revision=build.revision),
        recording=info
        and view_of("recording", info, **asdict(info.header), recorded_from=info.header.started_at),
        driver_version=snapshot.driver_version,
        cuda_version=snapshot.cuda_version,
        headline=headline(snapshot, found, unknowns),
        findings=found,
        blind_spots=unknowns,
        totals=_totals(snapshot, daemons, incidents, history.began_at),
        sources=tuple(
            view_of("source", one, read_at=now if one.success else history.read_at.get(one.name))
            for one in snapshot.collectors
        ),
        gpus=tuple(gpu_view(gpu, now, history) for gpu in snapshot.gpus),
        daemons=daemons,
        incidents=incidents,
    )
    if info is None:
        return status
    shifted: View = _in_viewer_time(status, info.viewer_time)
    return shifted


TIMES = (
    "at connected_at end first_seen incidents_since read_at since start started_at state_since "
    "taken_at timeline_since"
)
"""Fields of the status that are Unix times."""


def _in_viewer_time(value: Any, viewer_time: Callable[[float], float]) -> Any:
    """Return the view with recorded times mapped to the viewer's clock."""
    if isinstance(value, tuple):
        return tuple(_in_viewer_time(one, viewer_time) for one in value)
    if isinstance(value, Sample):
        return replace(value, at=viewer_time(value.at))
    if not isinstance(value, View):
        return value
    return View(
        (
            name,
            viewer_time(old)
            if name in TIMES.split() and old is not None
            else _in_viewer_time(old, viewer_time),
        )
        for name, old in value.items()
    )


def _finding_view(one: Finding, history: History) -> View:
    advice = one.advice
    return finding_view(
        severity=one.severity,
        ordinary_user=one.limited,
        text=one.evidence,
        remedy=one.remedy,
        daemon=shown(one.daemon),
        since=one.since,
        name=advice.name,
        why=advice.why,
        uuid=one.uuid or None,
        first_seen=history.first_seen(one),
        actions=one.actions,
        runbook_url=advice.runbook_url,
        docs_url=advice.docs_url,
    )
