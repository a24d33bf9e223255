"""The pages in docs/symptoms speak of what there is, and of what was seen on real hosts."""

import json
import re
from pathlib import Path

import pytest

from mps_exporter.findings import ADVICE, findings, recent_incidents
from mps_exporter.findings.finding import DOCS, FindingType
from mps_exporter.metrics import CATALOGUE
from testing.each import each
from testing.golden import GOLDEN
from testing.player import RECORDINGS, Player
from tests.unit.docs.markdown import ROOT, anchors
from tools.symptoms import Symptom, symptoms

SYMPTOMS = symptoms()
REPORTED = json.loads(Path(__file__).with_name("reported.json").read_text())
"""Symptom -> public threads."""
EACH = each(SYMPTOMS)
METRIC = re.compile(r"\b(mps_[a-z_]+)(?:\{([^}`]*)\})?")
LABEL = re.compile(r'([a-z_]+)="')
MOMENTS = 24
MAX_WORDS = 250  # Maximum number of words on a page, without its header.


def runbooks() -> set[str]:
    return {path.stem for path in (ROOT / "prometheus" / "runbooks").glob("*.md")}


@EACH
def test_findings_alerts_and_recordings_exist(symptom: Symptom) -> None:
    assert set(symptom.findings) <= set(ADVICE)
    assert set(symptom.alerts) <= runbooks()
    for name in symptom.recordings:
        assert (RECORDINGS / f"{name}.rec.gz").exists(), name
    assert REPORTED.get(symptom.name) or symptom.recordings, "it was reported, or recorded"


@EACH
def test_a_page_is_read_in_two_minutes(symptom: Symptom) -> None:
    text = re.sub(r"<!--.*?-->", "", symptom.path.read_text("utf-8"), flags=re.DOTALL)
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= MAX_WORDS


@EACH
def test_metrics_and_their_labels_exist(symptom: Symptom) -> None:
    for name, labels in METRIC.findall(symptom.path.read_text("utf-8")):
        if name in ADVICE:
            continue
        assert any(known.startswith(name) for known in CATALOGUE), name
        spec = CATALOGUE.get(name)
        assert spec is None or {*LABEL.findall(labels)} <= {spec.name, *spec.labels}, name


@each(ADVICE.values())
def test_the_page_and_the_runbook_of_a_finding_exist(finding: FindingType) -> None:
    for url in (finding.docs_url, finding.runbook_url or finding.docs_url):
        path, _, anchor = url.removeprefix(DOCS).partition("#")
        assert (ROOT / path).is_file(), f"write {path}: its alert or finding leads there"
        assert {anchor} - {""} <= anchors(ROOT / path)


@pytest.mark.parametrize(
    "page",
    [
        "prometheus/runbooks/MpsGhostServer.md",
        "docs/symptoms/a-client-is-connected-and-hangs.md",
        "docs/symptoms/every-cuda-program-hangs-and-the-control-tool-too.md",
    ],
)
def test_a_ghost_is_ended_only_if_no_client_has_a_context_on_it(page: str) -> None:
    text = " ".join((ROOT / page).read_text("utf-8").lower().split())
    assert re.search(r"kill(?: -9`)? th(?:e|at) ghost\b[^.]*if no client has a context on it", text)


async def passing_findings_of(recording: str) -> set[str]:
    """Those that appear at any moment while a recording of a real host is played."""
    player = Player(RECORDINGS / f"{recording}.rec.gz")
    start, length = player.recording.header.started_at, player.recording.duration_seconds
    seen: set[str] = set()
    for number in range(1, MOMENTS + 1):
        snapshot = (await player.to(start + length * number / MOMENTS)).snapshot
        found = (*findings(snapshot), *recent_incidents(snapshot))
        seen |= {finding.advice.name for finding in found}
    return seen


@pytest.mark.parametrize("recording", sorted({name for one in SYMPTOMS for name in one.recordings}))
async def test_a_recording_shows_a_finding_of_each_page_that_names_it(recording: str) -> None:
    named = [one for one in SYMPTOMS if recording in one.recordings and one.findings]
    text = (GOLDEN / f"{recording}.txt").read_text()  # which its own test checks
    seen = {*re.findall(r'^doctor\.\w+\[\d+\]\.name = "(\w+)"', text, re.MULTILINE)}
    if any(seen.isdisjoint(symptom.findings) for symptom in named):
        seen = await passing_findings_of(recording)
    assert [one.name for one in named if seen.isdisjoint(one.findings)] == []
