"""The processes that ``mps-exporter doctor`` is asked about, and what is found of each."""

from __future__ import annotations

from dataclasses import dataclass

from mps_exporter.commands.common import StartError
from mps_exporter.diagnostics import Finding, findings, trace_findings
from mps_exporter.diagnostics.one_process import Check, check_process, pids_of
from mps_exporter.observations import HostTraces
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources.host_traces import open_files
from mps_exporter.sources.process_view import view_process


@dataclass(frozen=True, slots=True)
class ProcessSelection:
    """One process, or those of a user or of a job."""

    pid: int | None = None
    uid: int | None = None
    job: str | None = None


def checks_of_processes(
    selection: ProcessSelection, snapshot: Snapshot, recent: tuple[Finding, ...], procfs: str | None
) -> dict[int, list[Check]]:
    """Make the checks of each process.

    Args:
        selection: The processes.
        snapshot: The host.
        recent: The recent incidents.
        procfs: Where procfs is mounted; None: there is none, this is a recording.

    Raises:
        StartError: The user or the job has no process that uses MPS or a GPU.
    """
    pids = (
        [selection.pid]
        if selection.pid is not None
        else pids_of(snapshot, uid=selection.uid, job=selection.job)
    )
    if not pids:
        name = f"user {selection.uid}" if selection.uid is not None else f"job {selection.job}"
        raise StartError(
            f"no process of {name} waits for MPS, is its client, or has a context on a GPU; name "
            "one with --pid"
        )
    daemons = [daemon.facts for daemon in snapshot.daemons if daemon.facts is not None]
    servers = HostTraces(open_files=open_files(daemons, procfs) if procfs is not None else ())
    found = (*findings(snapshot), *recent, *trace_findings(servers))
    return {
        pid: check_process(
            pid,
            snapshot,
            found,
            view_process(pid, daemons, procfs) if procfs is not None else None,
        )
        for pid in pids
    }
