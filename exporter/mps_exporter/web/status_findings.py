"""The advice for this host as the status page and its JSON show it."""

from __future__ import annotations

from mps_exporter import diagnostics, humanize
from mps_exporter.diagnostics.visibility import of_web_configuration
from mps_exporter.snapshot import Snapshot
from mps_exporter.web.status_api import FindingView, Severity

LONG_WAIT_SECONDS = 60.0
"""Who has waited for longer is shown as trouble."""

_SEVERITIES: dict[diagnostics.Severity, Severity] = {
    "critical": "trouble",
    "warning": "warning",
    "info": "notice",
}
_ORDER: tuple[Severity, ...] = ("trouble", "warning", "notice", "ok")


def current_findings(
    snapshot: Snapshot, name_of: humanize.UserNameLookup
) -> tuple[FindingView, ...]:
    """What is wrong, was a moment ago, or could be better; the worst first.

    Of findings that are equally bad and have a time, the newest comes first.
    """
    found = diagnostics.in_order(
        (*diagnostics.findings(snapshot, name_of), *diagnostics.recent_incidents(snapshot, name_of))
    )
    shown = [
        _finding_view(one, snapshot.taken_at) for one in found if one.advice.kind != "blindness"
    ]
    ordered: list[FindingView] = []
    for severity in _ORDER:
        group = [finding for finding in shown if finding.severity == severity]
        dated = iter(sorted((one for one in group if one.since is not None), key=_newest_first))
        ordered += [one if one.since is None else next(dated) for one in group]
    return tuple(ordered)


def _newest_first(finding: FindingView) -> float:
    return -(finding.since or 0.0)


def blind_spots(
    snapshot: Snapshot, name_of: humanize.UserNameLookup, config_error: str | None = None
) -> tuple[FindingView, ...]:
    """What the exporter could not read, and what to do about it."""
    found = [
        one for one in diagnostics.findings(snapshot, name_of) if one.advice.kind == "blindness"
    ]
    if config_error is not None:
        found.append(of_web_configuration(config_error))
    return tuple(_finding_view(one, snapshot.taken_at) for one in found)


def _finding_view(one: diagnostics.Finding, now: float) -> FindingView:
    severity = _SEVERITIES[one.advice.severity]
    if one.advice.name == "several_users_one_daemon" and one.since is not None:
        severity = "trouble" if now - one.since > LONG_WAIT_SECONDS else severity
    return FindingView(
        severity,
        one.evidence,
        one.remedy,
        humanize.printable(one.daemon, 400) if one.daemon else None,
        one.since,
        one.advice.name,
        one.advice.why,
        one.uuid or None,
    )


def headline(snapshot: Snapshot, found: tuple[FindingView, ...]) -> FindingView:
    """The one thing to read when there is time for one.

    What could merely be better is no headline: it stands below the answer.
    """
    urgent = next((one for one in found if one.severity in ("trouble", "warning")), None)
    if urgent is not None:
        return urgent
    unknown = diagnostics.unseen(snapshot)
    if not snapshot.daemons and unknown:
        return FindingView(
            "notice", humanize.sentence(f"no daemon was seen, but {'; '.join(unknown)}")
        )
    if not snapshot.daemons:
        return FindingView(
            "notice",
            "No MPS control daemon runs on this host.",
            "Start one with nvidia-cuda-mps-control -d, or name its directory with "
            "--mps.pipe-directory if it hides from /proc.",
        )
    quit_ = next((one for one in found if one.name == "daemon_quit"), None)
    if quit_ is not None and all(daemon.state == "absent" for daemon in snapshot.daemons):
        return quit_
    answer = _answer(snapshot)
    if unknown:
        return FindingView("notice", f"{humanize.capitalize('; '.join((*answer, *unknown)))}.")
    well = "All is well: " if _clients(snapshot) else ""
    return FindingView("ok", f"{well}{answer[0]}, and no client waits.")


def _clients(snapshot: Snapshot) -> int:
    servers = (server for daemon in snapshot.daemons for server in daemon.servers)
    return sum(server.clients_connected or 0 for server in servers)


def _answer(snapshot: Snapshot) -> tuple[str, ...]:
    """Who uses what, as far as it is known; empty where nothing is."""
    servers = [server for daemon in snapshot.daemons for server in daemon.servers]
    by = humanize.count(len(servers), "server")
    if clients := _clients(snapshot):
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
