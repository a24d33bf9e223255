"""Who caused a fault, in recordings of a real GPU: named where it is proved, never an innocent."""

import json
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from mps_exporter.daemon_registry import DaemonRecord
from mps_exporter.findings import findings, recent_incidents
from mps_exporter.merge import DaemonInputs, merge
from mps_exporter.metrics import Build, render
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.mps.xid_lines import KernelFault, parse_fault
from mps_exporter.observations import (
    AddressRanges,
    DaemonFacts,
    KernelObservation,
    LogsObservation,
    LogState,
    ProcfsObservation,
)
from mps_exporter.snapshot import Incident, Snapshot
from mps_exporter.sources.recording import read_recording
from mps_exporter.web.status_api import make_status
from testing.each import each
from testing.mps_logs import EIGHT, PIPE, read, sample, summary

LOGS = tuple(LogState(PIPE, log, f"/l/{log}.log", readable=True) for log in ("control", "server"))
TEN_TO_ELEVEN = EIGHT + 14 * 3600.0 + 55 * 60.0  # 22:55, when the sample was made.
XID = Path(__file__).parents[2] / "recordings" / "xid"
SERIES = json.loads((XID / "series.json").read_text())
UNREAD = {"quick idle2"}  # Rounds in which the client ended before its memory was read.


@cache
def series(*, kernel_log: bool) -> dict[str, DaemonRecord]:
    """Play the recording of all rounds; each has a daemon of its own."""
    recording = read_recording(XID / "series.rec.gz")
    found = [o for o in recording.observations if isinstance(o, ProcfsObservation)]
    records = {
        facts.pipe_directory: DaemonRecord(facts, DaemonTracker(facts.pipe_directory))
        for observation in found
        for facts in observation.daemons
    }
    faults, ranges = deque[KernelFault](), deque[AddressRanges]()
    for observation in sorted(recording.observations, key=lambda one: one.at):
        if isinstance(observation, KernelObservation) and kernel_log:
            faults.extend(filter(None, (parse_fault(line, {}) for line in observation.lines)))
            ranges.extend(observation.ranges)
            for record in records.values():
                record.observe_kernel(observation, faults, ranges)
        elif isinstance(observation, LogsObservation):
            for pipe in {chunk.pipe_directory for chunk in observation.chunks}:
                records[pipe].tracker.add_logs(observation)
    for record in records.values():
        record.tracker.advance_to(recording.ended_at + 60.0)
    return records


def fault_of(one: dict[str, Any], *, kernel_log: bool) -> tuple[Incident, dict[str, int]]:
    view = series(kernel_log=kernel_log)[one["daemon"]].state
    (incident,) = [i for i in view.incidents.snapshot() if i.kind in ("fault", "unfinished_work")]
    losses: dict[str, int] = {}
    for labels, count in summary(view.counters)["losses"].items():
        cause = labels.split()[1]
        losses[cause] = losses.get(cause, 0) + count
    return incident, losses


@each(SERIES)
def test_with_the_kernel_log_only_the_responsible_clients_are_named(one: dict[str, Any]) -> None:
    incident, losses = fault_of(one, kernel_log=True)
    lost = len(incident.pids)
    if one["left_work"] and one["round"] not in UNREAD:
        assert (incident.kind, incident.proof) == ("unfinished_work", "address")
        assert incident.caused_by_pids
        assert set(incident.caused_by_pids) <= set(one["left_work"])
        assert losses == {"unfinished_work": lost}
    elif "over" in one["round"]:
        assert (incident.kind, incident.proof) == ("fault", "address")
        assert list(incident.caused_by_pids) == one["own_fault"]
        assert losses == {"own_fault": 1, "neighbour_fault": lost - 1}
    else:
        proof = "unit" if "null" in one["round"] else "unknown"
        assert (incident.kind, incident.proof, incident.caused_by_pids) == ("fault", proof, ())
        assert losses == {"unattributed_fault": lost}
        assert proof == "unknown" or incident.ended_before == ()


@each(SERIES)
def test_without_the_kernel_log_no_client_is_named(one: dict[str, Any]) -> None:
    incident, losses = fault_of(one, kernel_log=False)
    assert (incident.kind, incident.proof, incident.caused_by_pids) == ("fault", "unread", ())
    assert losses == {"unattributed_fault": len(incident.pids)}
    assert all(0.1 <= ended.seconds <= 0.3 for ended in incident.ended_before)


def host(name: str, moment: float | None = None) -> Snapshot:
    logs = sample(name)
    at = logs.stamps()[-1] if moment is None else moment
    state = read(logs.until(at), now=at)
    inputs = DaemonInputs(DaemonFacts(PIPE, "/l"), state=state, logs=LOGS, was_readable=True)
    return merge(taken_at=at, gpus=None, processes=None, daemons=[inputs])


def test_the_warning_comes_before_the_next_program_fails() -> None:
    before = host("left-work-sole-then-wait-5", TEN_TO_ELEVEN + 30.0)
    (finding,) = [one for one in findings(before) if one.advice.name == "possible_unfinished_work"]
    assert finding.evidence == (
        "Process 1077 of root ended on root's server 1068 and may have left GPU work behind: its "
        "end took 195 ms. The next CUDA process on this server may fail with error 46 "
        "(cudaErrorDevicesUnavailable)."
    )
    assert make_status(before).headline.name == "possible_unfinished_work"
    assert ("possible_unfinished_work", "warning", PIPE, "", "") in {
        labels for family in render(before, Build("1", "", "")) for labels, _ in family.samples
    }
    after = host("left-work-sole-then-wait-5", TEN_TO_ELEVEN + 36.0)
    assert "possible_unfinished_work" not in {one.advice.name for one in findings(after)}


def test_without_proof_the_page_accuses_no_process() -> None:
    found = host("left-work-kill-idle-neighbours")
    (finding,) = [one for one in recent_incidents(found) if one.advice.name == "fault"]
    assert finding.evidence.startswith(
        "A fatal GPU error in root's server 533: which client caused it is not known without the "
        "kernel log; 3 clients were lost (processes 595, 596 and 597); possible, but not proved: "
        "process 611 (ended 0.2 s before); MPS names process 596, which proves nothing"
    )
    assert "End only what the error hit and does not exit." in finding.remedy
