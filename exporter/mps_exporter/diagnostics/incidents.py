"""Recent incidents, shown first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mps_exporter import humanize
from mps_exporter.diagnostics.causes import start_failure
from mps_exporter.diagnostics.finding import Finding
from mps_exporter.diagnostics.finding_titles import ADVICE
from mps_exporter.diagnostics.safe_commands import Action, open_folder
from mps_exporter.humanize import UserNameLookup
from mps_exporter.observations import DaemonConditions
from mps_exporter.snapshot import ControlDaemon, Incident, Snapshot

RECENT_SECONDS = 300.0
"""How long an incident counts as recent."""

_REMEDIES = {
    "server_crashed": "Programs that were connected must be restarted; the kernel log may show "
    "the cause (Xid).",
    "server_start_failed": "The daemon retries for as long as a client waits. server.log shows "
    "the cause.",
    "unfinished_work": "The lost programs must be restarted; they did nothing wrong. "
    "Before a client is killed, terminate it through its daemon: "
    "echo terminate_client SERVER PID | nvidia-cuda-mps-control.",
    "fault": "The lost programs must be restarted. Do not end the process that MPS names.",
    "client_rejected": "Start the program again when other clients have exited, or run fewer "
    "processes on this server.",
    "daemon_died": "Restart it; programs that start meanwhile use the GPU without MPS.",
}


def incident_findings(
    daemon: ControlDaemon,
    snapshot: Snapshot,
    name_of: UserNameLookup,
    view: DaemonConditions | None = None,
) -> Iterator[Finding]:
    """Return the last incident of each kind that has a remedy, while it is recent."""
    now = snapshot.taken_at
    told = set()
    for incident in reversed(daemon.incidents):
        age = now - incident.at
        if age > RECENT_SECONDS:
            return
        if incident.kind in told or incident.kind not in _REMEDIES:
            continue
        told.add(incident.kind)
        yield Finding(
            ADVICE[incident.kind],
            partial(_start_texts, incident, daemon, snapshot, view, name_of)
            if incident.kind == "server_start_failed"
            else partial(_incident_texts, incident, daemon, age, name_of),
            daemon=daemon.pipe_directory,
            since=incident.at,
            offered=_opening(incident, daemon, view),
            limited=daemon.limited,
        )


def _opening(
    incident: Incident, daemon: ControlDaemon, view: DaemonConditions | None
) -> tuple[Action, ...]:
    """Open the folder that kept a server from starting, where this host has it under that path."""
    facts = daemon.facts
    if view is None or facts is None or facts.root or incident.kind != "server_start_failed":
        return ()
    return open_folder(view.closed.get(incident.uid or 0), facts)


def _start_texts(
    incident: Incident,
    daemon: ControlDaemon,
    snapshot: Snapshot,
    view: DaemonConditions | None,
    name_of: UserNameLookup,
) -> tuple[str, str]:
    age = snapshot.taken_at - incident.at
    text, remedy = _incident_texts(incident, daemon, age, name_of)
    cause, cure = start_failure(incident, daemon, snapshot, view)
    return f"{text} {cause}", cure or remedy


def _incident_texts(
    incident: Incident, daemon: ControlDaemon, age: float, name_of: UserNameLookup
) -> tuple[str, str]:
    text = humanize.describe_incident(incident, name_of).removesuffix(".")
    remedy = _REMEDIES[incident.kind]
    if incident.kind == "daemon_died" and daemon.state == "answering":
        remedy = "The daemon was restarted; programs that were connected must be restarted too."
    elif incident.kind == "fault" and incident.caused_by_pids:
        who = humanize.processes(incident.caused_by_pids)
        remedy = f"The lost programs must be restarted, and the program of {who} has a bug."
    return f"{text}, {humanize.ago(age)}.", remedy
