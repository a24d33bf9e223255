"""``mps-exporter doctor --pid``, ``--user`` and ``--job``: the checks of processes, printed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mps_exporter.commands.common import StartError
from mps_exporter.commands.doctor_report import Painter, plain
from mps_exporter.diagnostics import Finding, findings, trace_findings
from mps_exporter.diagnostics.finding import symptom_url
from mps_exporter.diagnostics.one_process import Check, Outcome, check_process, conclusion, pids_of
from mps_exporter.observations import Leftovers
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources.process_view import open_files, view_process

EXIT_STATUS: Mapping[Outcome, int] = {"ok": 0, "unknown": 0, "warning": 1, "problem": 1}
NOT_KNOWN = 3
"""Whether the process waits cannot be seen."""
_MARKS: Mapping[Outcome, tuple[str, str]] = {
    "ok": ("ok", "good"),
    "problem": ("PROBLEM", "critical"),
    "warning": ("warning", "warning"),
    "unknown": ("not seen", "dim"),
}


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
    servers = Leftovers(open_files=open_files(daemons, procfs) if procfs is not None else ())
    found = (*findings(snapshot), *recent, *trace_findings(servers))
    return {
        pid: check_process(
            pid, snapshot, found, view_process(pid, daemons, procfs) if procfs is not None else None
        )
        for pid in pids
    }


def checks_as_text(checks: Mapping[int, Sequence[Check]], paint: Painter = plain) -> str:
    return "\n\n".join("\n".join(check_lines(pid, found, paint)) for pid, found in checks.items())


def checks_as_json(checks: Mapping[int, Sequence[Check]]) -> str:
    objects = [as_objects(pid, found) for pid, found in checks.items()]
    return json.dumps({"version": 1, "processes": objects}, indent=2)


def check_lines(pid: int, checks: Sequence[Check], paint: Painter = plain) -> Iterator[str]:
    answer = conclusion(list(checks))
    _, style = _MARKS[answer.outcome]
    yield f"{paint(f'Process {pid}', style)}: {answer.text}"
    if answer.remedy:
        yield f"    do:    {answer.remedy}"
    if answer.command:
        yield f"    run:   {answer.command}"
    if answer.page:
        yield f"    see:   {symptom_url(answer.page)}"
    yield ""
    yield "Checked, in this order:"
    for check in checks:
        mark, style = _MARKS[check.outcome]
        yield f"  {paint(f'{mark:8}', style)}  {check.name}: {check.text}"
        if check is not answer and check.remedy and check.outcome != "ok":
            yield f"            do: {check.remedy}"
            if check.command:
                yield f"            run: {check.command}"


def as_objects(pid: int, checks: Sequence[Check]) -> dict[str, object]:
    answer = conclusion(list(checks))
    return {
        "pid": pid,
        "outcome": answer.outcome,
        "conclusion": answer.text,
        "remedy": answer.remedy or None,
        "command": answer.command or None,
        "page": symptom_url(answer.page) if answer.page else None,
        "checks": [
            {
                "name": check.name,
                "outcome": check.outcome,
                "text": check.text,
                "remedy": check.remedy or None,
                "command": check.command or None,
                "page": symptom_url(check.page) if check.page else None,
            }
            for check in checks
        ],
    }


def checks_exit_status(checks: Mapping[int, Sequence[Check]]) -> int:
    """1 where something is wrong with one of the processes; 3 where that is not known; else 0."""
    answers = [conclusion(list(found)) for found in checks.values()]
    if status := max(EXIT_STATUS[one.outcome] for one in answers):
        return status
    unknown = any((one.name, one.outcome) == ("connection", "unknown") for one in answers)
    return NOT_KNOWN if unknown else 0
