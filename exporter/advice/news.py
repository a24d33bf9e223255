"""What happened a moment ago that a person wants to read first."""

from __future__ import annotations

from collections.abc import Iterator

from exporter import words
from exporter.advice.table import ADVICE, Finding
from exporter.model import ControlDaemon
from exporter.words import Who

RECENT_SECONDS = 300.0
"""So long a crash is still news."""

_AFTERWARDS = {
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


def of_incidents(daemon: ControlDaemon, now: float, who: Who) -> Iterator[Finding]:
    """The last incident of each kind that a person must know of, while it is news."""
    told = set()
    for incident in reversed(daemon.incidents):
        age = now - incident.at
        if age > RECENT_SECONDS:
            return
        if incident.kind in told or incident.kind not in _AFTERWARDS:
            continue
        told.add(incident.kind)
        text = words.incident(incident, who).removesuffix(".")
        remedy = _AFTERWARDS[incident.kind]
        if incident.kind == "daemon_died" and daemon.state == "answering":
            remedy = "It was started again; programs that were connected were not."
        elif incident.kind == "fault" and incident.ended_pids:
            remedy = (
                "Programs that were lost must be started again. Who caused it cannot be told: the "
                "one that MPS blames may be a victim."
            )
        yield Finding(
            ADVICE[incident.kind],
            f"{text}, {words.ago(age)}.",
            remedy,
            daemon=daemon.pipe_directory,
            since=incident.at,
        )
