"""The status of the host: everything that the page and the JSON show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

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
    status = HostStatus(
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
    if snapshot.recording is None:
        return status
    shifted: HostStatus = _in_viewer_time(status, snapshot.recording.viewer_time)
    return shifted


TIMES = {"taken_at", "since", "at", "started_at", "connected_at", "state_since"}
"""Fields of the status that are Unix times."""


def _in_viewer_time(value: Any, viewer_time: Callable[[float], float]) -> Any:
    """Return a view in which recorded times are those at which the viewer was shown them."""
    if isinstance(value, tuple):
        return tuple(_in_viewer_time(one, viewer_time) for one in value)
    if not is_dataclass(value) or isinstance(value, type | RecordingInfo):
        return value
    changes = {}
    for field in fields(value):
        old = getattr(value, field.name)
        if field.name in TIMES and isinstance(old, float | int):
            changes[field.name] = viewer_time(old)
        elif isinstance(old, tuple) or is_dataclass(old):
            changes[field.name] = _in_viewer_time(old, viewer_time)
    return replace(value, **changes)
