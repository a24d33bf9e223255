"""Why one process hangs, fails or runs without MPS: the checks, in the order of a CUDA start.

Pure: from a snapshot of the host and, on a live host, from what /proc shows of the process. The
first check that finds a problem is the answer; those before it were passed, or could not be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from mps_exporter import humanize
from mps_exporter.findings import process_start, process_use
from mps_exporter.findings.finding import Finding
from mps_exporter.findings.process_subject import Check, Outcome, Subject, subject
from mps_exporter.observations import ProcessView
from mps_exporter.snapshot import Snapshot

__all__ = ["Check", "Outcome", "check_process", "conclusion", "pids_of"]

_CHECKS: tuple[tuple[str, Callable[[Subject], Iterator[Check]]], ...] = (
    ("process", process_start.process_itself),
    ("directory", process_start.directory),
    ("process", process_start.foreign_proc),
    ("variables", process_start.variables),
    ("daemon", process_start.daemon),
    ("service", process_use.service),
    ("connection", process_use.connection),
    ("limits", process_use.limits),
    ("memory", process_use.host_memory),
    ("history", process_use.history),
)
_OF_ENDED = (process_start.process_itself, process_use.history)


def check_process(
    pid: int, snapshot: Snapshot, found: tuple[Finding, ...], view: ProcessView | None
) -> list[Check]:
    """Make all checks of a process.

    Args:
        pid: As the host numbers processes.
        snapshot: The host.
        found: The findings of that snapshot, and its recent incidents.
        view: What /proc shows of the process; None: this is a recording.
    """
    one = subject(pid, snapshot, found, view)
    return [
        replace(check, name=name)
        for name, checks in _CHECKS
        if not one.ended or checks in _OF_ENDED
        for check in checks(one)
    ]


def conclusion(checks: list[Check]) -> Check:
    """The check that answers the question: the first problem, else the first warning."""
    for outcome in ("problem", "warning"):
        for check in checks:
            if check.outcome == outcome:
                return check
    for check in checks:
        if check.outcome == "unknown" and check.name == "connection":
            return replace(check, text=humanize.sentence(check.text))
    unknown = [check.text for check in checks if check.outcome == "unknown"]
    if unknown:
        return Check("conclusion", "unknown", f"Nothing wrong was seen, but {unknown[0]}")
    return Check("conclusion", "ok", "Nothing is wrong with this process as far as MPS goes.")


def pids_of(snapshot: Snapshot, *, uid: int | None = None, job: str | None = None) -> list[int]:
    """The clients, waiting processes and processes without MPS of a user, or of a job.

    A job is a Slurm job's number, or the UID of a pod; a process that waits is of no known job.
    """
    found: set[int] = set()
    for daemon in snapshot.daemons:
        for server in daemon.servers:
            for client in server.clients:
                if (uid is not None and client.uid == uid) or (
                    job is not None and job in (client.slurm_job_id, client.pod_uid)
                ):
                    found.add(client.pid)
        found |= {wait.pid for wait in daemon.waits if uid is not None and wait.uid == uid}
    for gpu in snapshot.gpus:
        found |= {one.pid for one in gpu.direct_processes if uid is not None and one.uid == uid}
    return sorted(found)
