"""The status of the host: everything that the page and the JSON show."""

from __future__ import annotations

from dataclasses import dataclass

from mps_exporter.snapshot import RecordingInfo, Snapshot
from mps_exporter.user_names import UserNames
from mps_exporter.web import status_findings
from mps_exporter.web.options import WebOptions
from mps_exporter.web.status_api import (
    DaemonView,
    FindingView,
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
class HostStatus:
    """All that the page shows. Documented in docs/api.md."""

    api_version: str
    taken_at: float
    exporter: ExporterView
    recording: RecordingInfo | None
    driver_version: str | None
    cuda_version: str | None
    headline: FindingView
    findings: tuple[FindingView, ...]
    blind_spots: tuple[FindingView, ...]
    gpus: tuple[GpuView, ...]
    daemons: tuple[DaemonView, ...]
    incidents: tuple[IncidentView, ...]


def make_status(
    snapshot: Snapshot,
    options: WebOptions,
    config_error: str | None = None,
    user_names: UserNames | None = None,
) -> HostStatus:
    """What a snapshot says, in the form that people and programs read."""
    name_of = user_names or UserNames(snapshot)
    found = status_findings.current_findings(snapshot, name_of)
    return HostStatus(
        api_version=API_VERSION,
        taken_at=snapshot.taken_at,
        exporter=ExporterView(options.name, options.version, options.revision),
        recording=snapshot.recording,
        driver_version=snapshot.driver_version,
        cuda_version=snapshot.cuda_version,
        headline=status_findings.headline(snapshot, found),
        findings=found,
        blind_spots=status_findings.blind_spots(snapshot, name_of, config_error),
        gpus=tuple(gpu_view(gpu) for gpu in snapshot.gpus),
        daemons=tuple(
            daemon_view(daemon, name_of, snapshot.taken_at) for daemon in snapshot.daemons
        ),
        incidents=incident_views(snapshot.daemons, name_of),
    )
