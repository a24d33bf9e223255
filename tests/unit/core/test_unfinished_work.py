"""Unfinished work, from the lines of a real log to what people and Prometheus are told."""

from __future__ import annotations

from mps_exporter.diagnostics import findings, recent_incidents
from mps_exporter.merge import DaemonInputs, merge
from mps_exporter.metrics.render import Build, render
from mps_exporter.observations import DaemonFacts, LogState
from mps_exporter.snapshot import Snapshot
from mps_exporter.web.options import WebOptions
from mps_exporter.web.status_findings import make_status
from testing.mps_logs import EIGHT, PIPE, read, sample

LOGS = tuple(LogState(PIPE, log, f"/l/{log}.log", readable=True) for log in ("control", "server"))
TEN_TO_ELEVEN = EIGHT + 14 * 3600.0 + 55 * 60.0
"""22:55, when the sample was made."""


def host(name: str, moment: float | None = None) -> Snapshot:
    logs = sample(name)
    at = logs.stamps()[-1] if moment is None else moment
    view = read(logs.until(at), now=at)
    inputs = DaemonInputs(DaemonFacts(PIPE, "/l"), view=view, logs=LOGS, was_readable=True)
    return merge(taken_at=at, gpus=None, processes=None, daemons=[inputs])


def values(snapshot: Snapshot, name: str) -> dict[tuple[str, ...], object]:
    (family,) = [one for one in render(snapshot, Build("1", "", "")) if one.spec.name == name]
    return {tuple(labels[1:]): value for labels, value in family.samples if value}


def test_the_warning_comes_before_the_next_program_fails() -> None:
    before = host("left-work-sole-then-wait-5", TEN_TO_ELEVEN + 30.0)
    (finding,) = [one for one in findings(before) if one.advice.name == "possible_unfinished_work"]
    assert finding.evidence == (
        "Process 1077 of root ended on root's server 1068 and may have left GPU work behind: its "
        "end took 195 ms. The next CUDA process on this server may fail with error 46 "
        "(cudaErrorDevicesUnavailable)."
    )
    assert make_status(before, WebOptions()).headline.name == "possible_unfinished_work"
    assert ("possible_unfinished_work", "warning", PIPE, "", "") in {
        labels for family in render(before, Build("1", "", "")) for labels, _ in family.samples
    }
    after = host("left-work-sole-then-wait-5", TEN_TO_ELEVEN + 36.0)
    assert "possible_unfinished_work" not in {one.advice.name for one in findings(after)}


def test_the_victims_and_the_one_who_did_it() -> None:
    found = host("left-work-kill-idle-neighbours")
    assert values(found, "mps_client_losses_total") == {("0", "unfinished_work"): 9}
    assert values(found, "mps_client_unfinished_exits_total") == {("0",): 3}
    (finding,) = [one for one in recent_incidents(found) if one.advice.name == "unfinished_work"]
    assert finding.evidence.startswith(
        "Process 611 ended with GPU work in flight, which caused a fatal GPU error in root's "
        "server 533: 3 clients were lost (processes 595, 596 and 597); MPS blames process 596"
    )
    assert "fault" not in {one.advice.name for one in recent_incidents(found)}
