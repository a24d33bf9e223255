"""The table of reported symptoms names pages, findings, recordings and tests that exist."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from mps_exporter.commands.doctor_report import CHECKS
from mps_exporter.config import options_of
from mps_exporter.diagnostics import ADVICE
from mps_exporter.metrics.catalogue import CATALOGUE
from testing.player import RECORDINGS
from tests.hardware.hangs import CASES
from tests.unit.docs.markdown import ROOT
from tests.unit.docs.test_symptoms import findings_of
from tools.hardware_cases import answers, cases
from tools.symptoms import FOLDER, REPORTED, symptoms

ANSWERED = 65
"""So many at the least have a page, something that tells, and a proof."""

NOT = "not answered: "
PAGES = {symptom.path.name: symptom for symptom in symptoms()}
FLAGS = {option.field for option in options_of("doctor")}
PROOF = re.compile(r"(recording|hardware|test) `([^`]+)`")


class Row(NamedTuple):
    number: int
    reported: str
    where: str
    page: str
    tells: str
    proof: str

    @property
    def named(self) -> list[str]:
        """What it says tells: findings, metrics, commands."""
        return re.findall(r"`([^`]+)`", self.tells)

    @property
    def findings(self) -> set[str]:
        return set(self.named) & set(ADVICE)

    def proofs(self, kind: str) -> list[str]:
        return [name for one, name in PROOF.findall(self.proof) if one == kind]


def rows() -> list[Row]:
    lines = re.findall(r"^\| (\d+ \|.*) \|$", REPORTED.read_text("utf-8"), re.MULTILINE)
    cells = [line.split(" | ") for line in lines]
    return [Row(int(number), *others) for number, *others in cells]


ROWS = rows()
ANSWERS = [row for row in ROWS if not row.tells.startswith(NOT)]
EACH = pytest.mark.parametrize("row", ANSWERS, ids=lambda row: str(row.number))


def test_all_reported_symptoms_are_listed_and_most_are_answered() -> None:
    assert [row.number for row in ROWS] == list(range(1, 77))
    assert len(ANSWERS) >= ANSWERED
    said = f"{len(ANSWERS)} of {len(ROWS)} are answered."
    assert said in REPORTED.read_text("utf-8")
    for row in ROWS:
        assert row in ANSWERS or len(row.tells) > len(NOT) + 20, "it says why not"


@EACH
def test_an_answer_has_a_page_that_names_the_same_findings(row: Row) -> None:
    (page,) = re.findall(r"\]\(([^)]+)\)", row.page)
    assert (FOLDER / page).exists()
    told = set(PAGES[page].findings)
    text = PAGES[page].path.read_text("utf-8")
    assert not row.findings or row.findings & told or any(f"`{one}`" in text for one in row.named)


@EACH
def test_what_tells_exists(row: Row) -> None:
    assert row.named
    for name in row.named:
        if name.startswith("doctor"):
            _, *words = name.split()
            assert {word.removeprefix("--") for word in words[:1]} <= FLAGS
            assert set(words[1:]) <= set(CHECKS)
        elif name.startswith("mps_") and name not in ADVICE:
            assert name in CATALOGUE
        else:
            assert name in ADVICE or name == "slurm_job_id"


@EACH
def test_what_proves_it_exists(row: Row) -> None:
    assert PROOF.findall(row.proof)
    assert PROOF.sub("", row.proof).strip(" ,") == ""
    for name in row.proofs("recording"):
        assert (RECORDINGS / f"{name}.rec.gz").exists(), name
    assert set(row.proofs("hardware")) <= set(CASES)
    for name in row.proofs("test"):
        file, _, function = name.partition("::")
        assert re.search(
            rf"^(?:async )?def {function}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE
        )


@pytest.mark.parametrize(
    "row",
    [row for row in ANSWERS if row.findings and row.proofs("recording")],
    ids=lambda row: str(row.number),
)
async def test_a_recording_shows_a_finding_of_its_row(row: Row) -> None:
    seen = [await findings_of(name) for name in row.proofs("recording")]
    assert any(found & row.findings for found in seen) or row.proofs("hardware")


def test_every_case_was_acted_out_named_and_healed() -> None:
    found = cases()
    assert found.keys() == CASES.keys()
    for name, facts in found.items():
        before, after = answers(facts, "answer"), answers(facts, "afterwards")
        assert before or name.startswith("healthy"), name
        assert all(one["outcome"] in ("problem", "warning") for one in before), name
        assert after[-1]["outcome"] == "ok", name
        assert all(one["seconds"] <= 3.0 for one in before), name
