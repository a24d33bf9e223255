"""What happened a moment ago that a person wants to read first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mps_exporter import humanize
from mps_exporter.diagnostics.catalogue import ADVICE, Finding
from mps_exporter.humanize import UserNameLookup
from mps_exporter.snapshot import ControlDaemon, Incident

RECENT_SECONDS = 300.0
"""So long a crash is still news."""

_REMEDIES = {
    "server_crashed": "Programs that were connected must be started again; the kernel log may "
    "name the cause (Xid).",
    "server_start_failed": "The daemon tries again for as long as a client waits. server.log names "
    "the cause.",
    "unfinished_work": "Programs that were lost must be started again; they did nothing wrong. "
    "Before a client is killed, terminate it through its daemon: "
    "echo terminate_client SERVER PID | nvidia-cuda-mps-control.",
    "fault": "Programs that were connected must be started again; the one that caused it has a "
    "bug, or the GPU has one.",
    "client_rejected": "The program got a CUDA error and has most likely ended.",
    "daemon_died": "Start it again; programs that start meanwhile use the GPU without MPS.",
}


def of_incidents(daemon: ControlDaemon, now: float, name_of: UserNameLookup) -> Iterator[Finding]:
    """The last incident of each kind that a person must know of, while it is news."""
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
            partial(_texts, incident, daemon, age, name_of),
            daemon=daemon.pipe_directory,
            since=incident.at,
        )


def _texts(
    incident: Incident, daemon: ControlDaemon, age: float, name_of: UserNameLookup
) -> tuple[str, str]:
    text = humanize.describe_incident(incident, name_of).removesuffix(".")
    remedy = _REMEDIES[incident.kind]
    if incident.kind == "daemon_died" and daemon.state == "answering":
        remedy = "It was started again; programs that were connected were not."
    elif incident.kind == "fault" and incident.ended_pids:
        remedy = (
            "Programs that were lost must be started again. Who caused it cannot be told: the "
            "one that MPS blames may be a victim."
        )
    return f"{text}, {humanize.ago(age)}.", remedy
