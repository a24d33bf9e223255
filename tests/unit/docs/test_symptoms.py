"""The pages in docs/symptoms speak of what there is, and of what was seen on real hosts."""

from __future__ import annotations

import re

import pytest

from mps_exporter.diagnostics import ADVICE, findings, recent_incidents
from mps_exporter.metrics import CATALOGUE
from testing.player import RECORDINGS, Player
from tests.unit.docs.markdown import ROOT
from tools.symptoms import Symptom, symptoms

SYMPTOMS = symptoms()
EACH = pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.name)
METRIC = re.compile(r"\b(mps_[a-z_]+)(?:\{([^}`]*)\})?")
LABEL = re.compile(r'([a-z_]+)="([^"]*)"')
MOMENTS = 24
NO_PAGE = {
    "gpu_lost",
    "log_large",
    "not_exclusive_mode",
    "tool_missing",
    "source_unreadable",
    "logs_unreadable",
    "kernel_log_unreadable",
    "directories_assumed",
    "replies_not_understood",
    "web_configuration_unusable",
    "processes_ignored",
}
"""Findings of the host or of the exporter, not of a program: their remedy says all there is."""


def runbooks() -> set[str]:
    return {path.stem for path in (ROOT / "prometheus" / "runbooks").glob("*.md")}


@EACH
def test_findings_alerts_and_recordings_exist(symptom: Symptom) -> None:
    assert set(symptom.findings) <= set(ADVICE)
    assert set(symptom.alerts) <= runbooks()
    for name in symptom.recordings:
        assert (RECORDINGS / f"{name}.rec.gz").exists(), name
    assert symptom.reported or symptom.recordings, "somebody reported it, or it was seen"


@EACH
def test_metrics_and_their_labels_exist(symptom: Symptom) -> None:
    for name, labels in METRIC.findall(symptom.path.read_text("utf-8")):
        if name in ADVICE:
            continue
        spec = CATALOGUE.get(name)
        assert any(known.startswith(name) for known in CATALOGUE), name
        for label, value in LABEL.findall(labels):
            assert spec is not None
            known = spec.states if label == spec.name else spec.values.get(label)
            assert label == spec.name or label in spec.labels, f"{name} has no label {label}"
            assert known is None or value in known, f"{label} of {name} is never {value}"


def test_every_finding_and_every_alert_of_a_program_has_a_page() -> None:
    told = {name for symptom in SYMPTOMS for name in symptom.findings}
    assert set(ADVICE) - told == NO_PAGE


_CACHE: dict[str, frozenset[str]] = {}


async def findings_of(recording: str) -> frozenset[str]:
    """The findings and incidents that appear while a recording of a real host is played."""
    if recording not in _CACHE:
        player = Player(RECORDINGS / f"{recording}.rec.gz")
        start, length = player.recording.header.started_at, player.recording.duration_seconds
        seen: set[str] = set()
        for number in range(1, MOMENTS + 1):
            snapshot = (await player.to(start + length * number / MOMENTS)).snapshot
            found = (*findings(snapshot), *recent_incidents(snapshot))
            seen |= {finding.advice.name for finding in found}
        _CACHE[recording] = frozenset(seen)
    return _CACHE[recording]


@pytest.mark.parametrize(
    "symptom",
    [one for one in SYMPTOMS if one.recordings and one.findings],
    ids=lambda symptom: symptom.name,
)
async def test_the_recordings_show_a_finding_of_the_page(symptom: Symptom) -> None:
    for recording in symptom.recordings:
        assert set(symptom.findings) & await findings_of(recording), recording
