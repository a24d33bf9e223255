"""The findings of this host as the status page and its JSON show them, and the whole status."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from mps_exporter import findings, humanize
from mps_exporter.findings import ADVICE, of_web_configuration
from mps_exporter.findings.policy import RECENT_INCIDENT_SECONDS
from mps_exporter.humanize import UserNames
from mps_exporter.snapshot import Snapshot
from mps_exporter.web.history import History, Sample
from mps_exporter.web.options import WebOptions
from mps_exporter.web.status_api import (
    Severity,
    View,
    daemon_view,
    finding_view,
    gpu_view,
    incident_views,
    source_views,
    totals,
)

API_VERSION = "1"
_ORDER: tuple[Severity, ...] = ("critical", "warning", "info")


def make_status(
    snapshot: Snapshot,
    options: WebOptions,
    config_error: str | None = None,
    user_names: UserNames | None = None,
    history: History | None = None,
) -> View:
    """A snapshot in the form that people and programs read."""
    name_of = user_names or UserNames(snapshot)
    history = history or History()
    now = snapshot.taken_at
    states = findings.findings(snapshot, name_of)
    news = findings.recent_incidents(snapshot, name_of)
    current = [one for one in (*states, *news) if one.advice.kind != "blindness"]
    blind = [one for one in states if one.advice.kind == "blindness"]
    if config_error is not None:
        blind += of_web_configuration(config_error)
    unseen = tuple(_finding_view(one, history) for one in blind)
    views = [_finding_view(one, history) for one in findings.in_order(current)]
    found = _ordered(views, snapshot)
    daemons = tuple(daemon_view(daemon, name_of, now, snapshot) for daemon in snapshot.daemons)
    incidents = incident_views(snapshot.daemons, name_of)
    status = View(
        api_version=API_VERSION,
        taken_at=now,
        host=options.host,
        exporter=View(name=options.name, version=options.version, revision=options.revision),
        recording=snapshot.recording,
        driver_version=snapshot.driver_version,
        cuda_version=snapshot.cuda_version,
        headline=headline(snapshot, found, unseen),
        findings=found,
        blind_spots=unseen,
        totals=totals(snapshot, daemons, incidents, history.began_at),
        sources=source_views(snapshot, history),
        gpus=tuple(gpu_view(gpu, now, history) for gpu in snapshot.gpus),
        daemons=daemons,
        incidents=incidents,
    )
    if snapshot.recording is None:
        return status
    shifted: View = _in_viewer_time(status, snapshot.recording.viewer_time)
    return shifted


TIMES = {
    "at",
    "connected_at",
    "end",
    "first_seen",
    "incidents_since",
    "read_at",
    "since",
    "start",
    "started_at",
    "state_since",
    "taken_at",
    "timeline_since",
}
"""Fields of the status that are Unix times."""


def _in_viewer_time(value: Any, viewer_time: Callable[[float], float]) -> Any:
    """Return a view in which recorded times are those at which the viewer was shown them."""
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
            if name in TIMES and old is not None
            else _in_viewer_time(old, viewer_time),
        )
        for name, old in value.items()
    )


NEWS_LEADS_SECONDS = 60.0
"""After so long an incident that is over comes behind what is wrong now."""


def _ordered(found: Iterable[View], snapshot: Snapshot) -> tuple[View, ...]:
    """The worst first; of those that are equally bad and have a time, the newest first.

    A critical incident some time ago, as a crash, comes behind a warning about what is still so.
    """
    shown, now = list(found), snapshot.taken_at
    old = [one for one in shown if _is_old_news(one, now) or _is_long_gone(one, snapshot)]
    ordered: list[View] = []
    for severity in _ORDER:
        group = [one for one in shown if one.severity == severity and one not in old]
        dated = iter(sorted((one for one in group if one.since is not None), key=_newest_first))
        ordered += [one if one.since is None else next(dated) for one in group]
        if severity == "warning":
            ordered += sorted(old, key=_newest_first)
    return tuple(ordered)


def _is_old_news(one: View, now: float) -> bool:
    past = one.name in ADVICE and ADVICE[one.name].kind == "news"
    serious = one.severity in ("critical", "warning")
    return past and serious and one.since is not None and now - one.since > NEWS_LEADS_SECONDS


def _is_long_gone(one: View, snapshot: Snapshot) -> bool:
    """Whether it is about a daemon that died some time ago, while others serve."""
    gone = one.name == "daemon_absent" and one.since is not None
    serving = any(daemon.state == "answering" for daemon in snapshot.daemons)
    return gone and serving and snapshot.taken_at - (one.since or 0.0) > RECENT_INCIDENT_SECONDS


def _newest_first(finding: View) -> float:
    return -(finding.since or 0.0)


def _finding_view(one: findings.Finding, history: History) -> View:
    advice = one.advice
    return finding_view(
        severity=one.severity,
        text=one.evidence,
        remedy=one.remedy,
        daemon=humanize.printable(one.daemon, 400) if one.daemon else None,
        since=one.since,
        name=advice.name,
        why=advice.why,
        uuid=one.uuid or None,
        first_seen=history.first_seen(one),
        actions=one.actions,
        runbook_url=advice.runbook_url,
        docs_url=advice.docs_url,
    )


def headline(snapshot: Snapshot, found: tuple[View, ...], unseen: tuple[View, ...] = ()) -> View:
    """The one thing to read when there is time for one.

    What could merely be better is no headline: it stands below the answer.
    """
    gone = [one for one in found if _is_long_gone(one, snapshot)]
    urgent = next(
        (one for one in found if one.severity in ("critical", "warning") and one not in gone), None
    )
    if urgent is not None:
        return urgent
    unknown = findings.unknowns(snapshot)
    if not snapshot.daemons and not snapshot.gpus:
        # Without a driver nothing else on this page can be expected to be there.
        failed = [one.name for one in snapshot.collectors if not one.success]
        driver = next((one for one in unseen if one.name == "source_unreadable"), None)
        if driver is not None and failed == ["nvml"]:
            return driver
    if not snapshot.daemons and unknown:
        return finding_view(
            "info", humanize.sentence(f"no daemon was seen, but {'; '.join(unknown)}")
        )
    if not snapshot.daemons:
        return finding_view(
            "info",
            "No MPS control daemon runs on this host.",
            "Start one with nvidia-cuda-mps-control -d, or name its directory with "
            "--mps.pipe-directory if it hides from /proc.",
        )
    quit_ = next((one for one in found if one.name == "daemon_quit"), None)
    if quit_ is not None and all(daemon.state == "absent" for daemon in snapshot.daemons):
        return quit_
    answer = _who_uses_what(snapshot)
    if unknown:
        return finding_view("info", f"{humanize.capitalize('; '.join((*answer, *unknown)))}.")
    if gone:
        return finding_view("info", f"{humanize.capitalize(answer[0])}. {gone[0].text}")
    well = "All is well: " if _count_clients(snapshot) else ""
    return finding_view("ok", f"{well}{answer[0]}, and no client waits.")


def _count_clients(snapshot: Snapshot) -> int:
    servers = (server for daemon in snapshot.daemons for server in daemon.servers)
    return sum(server.clients_connected or 0 for server in servers)


def _who_uses_what(snapshot: Snapshot) -> tuple[str, ...]:
    """Who uses what, as far as it is known; empty where nothing is."""
    servers = [server for daemon in snapshot.daemons for server in daemon.servers]
    by = humanize.count(len(servers), "server")
    if clients := _count_clients(snapshot):
        shared = {uuid for daemon in snapshot.daemons for uuid in daemon.gpu_uuids}
        share = "share" if clients != 1 else "uses"
        gpus = f" {humanize.count(len(shared), 'GPU')}" if shared else " the GPU"
        return (f"{humanize.count(clients, 'client')} {share}{gpus} through {by}",)
    if servers:
        known = all(server.clients_connected is not None for server in servers)
        return (f"MPS is up: {by}{' without clients' if known else ''}",)
    if not any(daemon.state == "answering" for daemon in snapshot.daemons):
        return ()
    idle = all(daemon.servers_count is not None for daemon in snapshot.daemons)
    return ("MPS is up and idle: no server runs" if idle else "MPS is up",)
