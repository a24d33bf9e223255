"""The processes that ``mps-exporter doctor`` is asked about, and what is found of each."""

from __future__ import annotations

from dataclasses import dataclass

from mps_exporter.commands.common import StartError
from mps_exporter.diagnostics import Finding, findings
from mps_exporter.diagnostics.one_process import Check, check_process, pids_of
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources.process_view import view_process


@dataclass(frozen=True, slots=True)
class Whom:
    """One process, or those of a user or of a job."""

    pid: int | None = None
    uid: int | None = None
    job: str | None = None


def check(
    whom: Whom, snapshot: Snapshot, recent: tuple[Finding, ...], procfs: str | None
) -> dict[int, list[Check]]:
    """Make the checks of each process.

    Args:
        whom: The processes.
        snapshot: The host.
        recent: The recent incidents.
        procfs: Where procfs is mounted; None: there is none, this is a recording.

    Raises:
        StartError: The user or the job has no process that uses MPS or a GPU.
    """
    pids = [whom.pid] if whom.pid is not None else pids_of(snapshot, uid=whom.uid, job=whom.job)
    if not pids:
        name = f"user {whom.uid}" if whom.uid is not None else f"job {whom.job}"
        raise StartError(
            f"no process of {name} waits for MPS, is its client, or has a context on a GPU; name "
            "one with --pid"
        )
    found = (*findings(snapshot), *recent)
    daemons = [daemon.facts for daemon in snapshot.daemons if daemon.facts is not None]
    return {
        pid: check_process(
            pid,
            snapshot,
            found,
            view_process(pid, daemons, procfs) if procfs is not None else None,
        )
        for pid in pids
    }
