"""The status of the host: everything that the page and the JSON show."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.model import RecordingInfo, Snapshot
from exporter.people import People
from exporter.web import findings
from exporter.web.options import WebOptions
from exporter.web.view import (
    DaemonView,
    Finding,
    GpuView,
    IncidentView,
    daemon_view,
    gpu_view,
    incident_views,
)

API_VERSION = "1"


@dataclass(frozen=True, slots=True)
class ExporterView:
    """Who says so."""

    name: str
    version: str
    revision: str


@dataclass(frozen=True, slots=True)
class Status:
    """All that the page shows. Documented in docs/api.md."""

    api_version: str
    taken_at: float
    exporter: ExporterView
    recording: RecordingInfo | None
    driver_version: str | None
    cuda_version: str | None
    headline: Finding
    findings: tuple[Finding, ...]
    blind_spots: tuple[Finding, ...]
    gpus: tuple[GpuView, ...]
    daemons: tuple[DaemonView, ...]
    incidents: tuple[IncidentView, ...]


def make_status(
    snapshot: Snapshot,
    options: WebOptions,
    config_error: str | None = None,
    people: People | None = None,
) -> Status:
    """What a snapshot says, in the form that people and programs read."""
    who = people or People(snapshot)
    found = findings.troubles(snapshot, who)
    return Status(
        api_version=API_VERSION,
        taken_at=snapshot.taken_at,
        exporter=ExporterView(options.name, options.version, options.revision),
        recording=snapshot.recording,
        driver_version=snapshot.driver_version,
        cuda_version=snapshot.cuda_version,
        headline=findings.headline(snapshot, found),
        findings=found,
        blind_spots=findings.blind_spots(snapshot, who, config_error),
        gpus=tuple(gpu_view(gpu) for gpu in snapshot.gpus),
        daemons=tuple(daemon_view(daemon, who, snapshot.taken_at) for daemon in snapshot.daemons),
        incidents=incident_views(snapshot.daemons, who),
    )
