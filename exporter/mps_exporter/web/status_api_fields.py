"""The objects of the status and their fields, which docs/api.md documents.

The fields are an interface: none may change its meaning. Names that other people choose (programs,
users, units) are made printable here, once.
"""

from collections.abc import Mapping
from typing import Any, Literal

from mps_exporter.findings.finding import shown_path

Severity = Literal["critical", "warning", "info", "ok"]
"""The severities of findings and alerts; ok only for a headline: "All is well"."""

FIELDS = {
    "finding": (
        "severity ordinary_user text remedy daemon since name why uuid first_seen actions "
        "runbook_url docs_url"
    ),
    "client": (
        "pid program user uid joined_by connected_at state state_since limit_source "
        "active_thread_ratio sm_limit memory_used_bytes memory_limit_bytes contexts gpu_uuids "
        "server_name namespace sm_partition sm_partition_fault neighbours sm_use container_id "
        "pod_uid slurm_job_id systemd_unit"
    ),
    "server": (
        "pid user uid state ghost started_at clients_connected contexts contexts_limit "
        "active_thread_ratio clients"
    ),
    "wait": "pid user uid since seconds behind_user behind_uid behind_server_pid dead",
    "span": "kind user uid start end",
    "daemon": (
        "pipe_directory log_directory state pid user uid started_at binary_version multiuser "
        "gpu_uuids servers_count logs_readable servers waits waits_visible timeline "
        "timeline_since protocol partitioning"
    ),
    "gpu": (
        "index uuid name parent_uuid lost sm_count compute_mode utilization_ratio sm_active_ratio "
        "memory_used_bytes memory_total_bytes power_watts temperature_celsius sm_committed_ratio "
        "processes_by_kind stranded_clients served_by samples"
    ),
    "incident": (
        "id at daemon kind severity text count counted server_pid uid pids blamed_pid "
        "caused_by_pids proof ended_before gpu_uuids seconds recorded"
    ),
    "source": "name success duration_seconds error read_at",
    "recording": (
        "scenario machine driver_version recorded_at speed loop chapters chapter position_seconds "
        "duration_seconds names_replaced recorded_from played_from"
    ),
}
"""Kind of object -> its fields, in the order of the JSON."""


class View(dict[str, Any]):
    """An object of the status, whose fields are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def shown(value: Any) -> Any:
    """Return the value to show: printable text; None for an empty text."""
    if isinstance(value, str):
        return shown_path(value) or None
    if isinstance(value, tuple):
        return tuple(map(shown, value))
    return dict(value) if isinstance(value, Mapping) else value


def view_of(kind: str, *sources: object, **derived: Any) -> View:
    """Return an object of this kind: fields in `derived`, else attributes of the sources."""

    def field(name: str) -> Any:
        return shown(next(getattr(one, name) for one in sources if hasattr(one, name)))

    return View(
        (name, derived[name] if name in derived else field(name)) for name in FIELDS[kind].split()
    )


def finding_view(severity: Severity, text: str, remedy: str = "", **known: Any) -> View:
    """Return a finding: unknown fields have their defaults."""
    defaults = {"why": "", "actions": (), "ordinary_user": False}
    derived = dict.fromkeys(FIELDS["finding"].split()) | defaults | known
    return View(derived, severity=severity, text=text, remedy=remedy)
