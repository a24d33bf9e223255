"""docs/unfinished-work.md: its tables are what the exporter makes of the recorded logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testing.archives import unpack
from tools.unfinished_work_table import (
    ENDS,
    MARK,
    OUTCOMES,
    PAGE,
    Result,
    fill,
    main,
    results,
    runs,
)

TEXT = PAGE.read_text("utf-8")
SERIES = sorted(ENDS.glob("*.tar.xz"))


@pytest.fixture(scope="module")
def found() -> list[Result]:
    return results(SERIES)


def test_every_table_is_what_the_recorded_logs_say() -> None:
    assert fill(TEXT) == TEXT, "run python -m tools.unfinished_work_table"
    named = [name for _, names, _ in MARK.findall(TEXT) for name in names.split()]
    assert named == [path.name.removesuffix(".tar.xz") for path in SERIES]


def test_nobody_is_accused_who_did_not_do_it(found: list[Result]) -> None:
    accused = [result.run.name for result in found if "accused" in result.outcomes]
    assert len(found) == 539
    assert {outcome for result in found for outcome in result.outcomes} <= set(OUTCOMES)
    assert accused == []


def test_each_run_is_complete(found: list[Result]) -> None:
    assert all(result.run.logs["server"] and result.run.logs["control"] for result in found)
    assert all({"ends", "victims", "own_faults"} <= result.run.truth.keys() for result in found)


def test_a_directory_of_runs_is_read_like_an_archive(tmp_path: Path) -> None:
    unpack(SERIES[-1], tmp_path)
    assert list(runs(tmp_path)) == list(runs(SERIES[-1]))


def test_who_is_accused_wrongly_fails_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = next(run for run in runs(SERIES[2]) if run.name.endswith("SIGKILL-busy1"))
    folder = tmp_path / run.name
    folder.mkdir()
    for log, data in run.logs.items():
        (folder / f"{log}.log").write_bytes(data)
    monkeypatch.setattr("sys.argv", ["", str(tmp_path)])
    for in_flight, status in ((True, 0), (False, 1)):
        ends = [{**end, "in_flight": in_flight} for end in run.truth["ends"]]
        (folder / "truth.json").write_text(json.dumps({**run.truth, "ends": ends}))
        assert main() == status
