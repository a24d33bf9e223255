"""The headline of the status page, and the order of the findings below the headline."""

from collections.abc import Iterable

from mps_exporter import findings, humanize
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings import ADVICE, visibility
from mps_exporter.findings.finding import SEVERITIES
from mps_exporter.snapshot import Snapshot
from mps_exporter.web.status_api_fields import View, finding_view


def in_page_order(found: Iterable[View], snapshot: Snapshot) -> tuple[View, ...]:
    """Return the findings by severity; within a severity, dated findings with the newest first.

    Past incidents, such as a crash, and daemons that died long ago come after current warnings.
    """
    shown, now = list(found), snapshot.taken_at
    old = [one for one in shown if _is_past_incident(one, now) or _is_long_gone(one, snapshot)]
    ordered: list[View] = []
    for severity in SEVERITIES:
        group = [one for one in shown if one.severity == severity and one not in old]
        dated = iter(sorted((one for one in group if one.since is not None), key=_newest_first))
        ordered += [one if one.since is None else next(dated) for one in group]
        if severity == "warning":
            ordered += sorted(old, key=_newest_first)
    return tuple(ordered)


def _is_past_incident(one: View, now: float) -> bool:
    past = one.name in ADVICE and ADVICE[one.name].kind == "news" and one.since is not None
    serious = one.severity in ("critical", "warning")
    return past and serious and now - one.since > policy.INCIDENT_LEAD_SECONDS


def _newest_first(finding: View) -> float:
    return -(finding.since or 0.0)


def _is_long_gone(one: View, snapshot: Snapshot) -> bool:
    """Return whether the finding is about a daemon long gone, while others serve."""
    gone = one.name == "daemon_absent" and one.since is not None
    serving = any(daemon.state == "answering" for daemon in snapshot.daemons)
    age = snapshot.taken_at - (one.since or 0.0)
    return gone and serving and age > policy.RECENT_INCIDENT_SECONDS


def headline(snapshot: Snapshot, found: tuple[View, ...], unknowns: tuple[View, ...] = ()) -> View:
    """Return the most urgent finding, else a sentence about the host; never a mere suggestion.

    Findings about ordinary users' daemons are never the headline.
    """
    users = [one for one in found if one.ordinary_user and one.severity == "warning"]
    found = tuple(one for one in found if not one.ordinary_user)
    node = findings.of_node(snapshot)
    snapshot = node if node.daemons else snapshot
    gone = [one for one in found if _is_long_gone(one, snapshot)]
    urgent = next(
        (one for one in found if one.severity in ("critical", "warning") and one not in gone), None
    )
    if urgent is not None:
        return urgent
    unknown = visibility.unknowns(snapshot)
    if not snapshot.daemons and not snapshot.gpus:
        # Without a driver the rest of the page is empty.
        failed = [one.name for one in snapshot.collectors if not one.success]
        driver = next((one for one in unknowns if one.name == "source_unreadable"), None)
        if driver is not None and failed == ["nvml"]:
            return driver
    if not snapshot.daemons:
        return _without_daemon(snapshot, unknown)
    quit_ = next((one for one in found if one.name == "daemon_quit"), None)
    if quit_ is not None and all(daemon.state == "absent" for daemon in snapshot.daemons):
        return quit_
    answer, clients = _who_uses_what(snapshot)
    if unknown:
        text = "; ".join((answer, *unknown) if answer else unknown)
        return finding_view("info", f"{humanize.capitalize(text)}.")
    if gone:
        return finding_view("info", f"{humanize.capitalize(answer)}. {gone[0].text}")
    if users and not node.daemons:
        text = f"{answer or 'MPS'}: only daemons of ordinary users, which have findings"
        return finding_view("info", f"{humanize.capitalize(text)}.")
    well = "All is well: " if clients else ""
    return finding_view("ok", f"{well}{answer}, and no client waits.")


def _without_daemon(snapshot: Snapshot, unknown: tuple[str, ...]) -> View:
    if not any(one.name == "process" for one in snapshot.collectors):
        unknown += ("the processes are not searched",)
    if snapshot.ignored_processes:
        unknown += ("not all processes of MPS's programs could be read",)
    if unknown:
        text = f"no daemon was seen, but {'; '.join(unknown)}"
        return finding_view("info", humanize.sentence(text))
    return finding_view(
        "info",
        "No MPS control daemon runs on this host.",
        "An administrator can start one (nvidia-cuda-mps-control -d). If one hides from /proc, "
        "name its directory with --mps.pipe-directory.",
    )


def _who_uses_what(snapshot: Snapshot) -> tuple[str, int]:
    """Return clients, GPUs and servers as text ("" if unknown), and the number of known clients."""
    servers = [server for daemon in snapshot.daemons for server in daemon.servers]
    by = humanize.count(len(servers), "server")
    counts = [server.clients_connected for server in servers]
    if clients := sum(count or 0 for count in counts):
        shared = {uuid for daemon in snapshot.daemons for uuid in daemon.gpu_uuids}
        share = "share" if clients != 1 else "uses"
        gpus = f" {humanize.count(len(shared), 'GPU')}" if shared else " the GPU"
        return f"{humanize.count(clients, 'client')} {share}{gpus} through {by}", clients
    if servers:
        return f"MPS is up: {by}{'' if None in counts else ' without clients'}", 0
    if not any(daemon.state == "answering" for daemon in snapshot.daemons):
        return "", 0
    idle = all(daemon.servers_count is not None for daemon in snapshot.daemons)
    return "MPS is up and idle: no server runs" if idle else "MPS is up", 0
