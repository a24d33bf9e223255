"""Each check finds a defect that is put into the exporter."""

from pathlib import Path

import pytest

from testing.world import checks
from testing.world.against import comparing, writing
from testing.world.defects import DEFECTS, put_back
from testing.world.drive import play


@pytest.mark.parametrize("name", DEFECTS)
async def test_a_defect_is_found_by_its_check(name: str) -> None:
    defect = DEFECTS[name]
    only = (getattr(checks, defect.check),)
    with put_back(name):
        for seed in range(defect.seed, defect.seed + 100):
            if (await play(seed, defect.minutes, checks=only)).violations:
                return
    pytest.fail("no seed finds it")


def test_each_check_has_a_defect() -> None:
    assert {defect.check for defect in DEFECTS.values()} == {one.__name__ for one in checks.CHECKS}


async def test_outputs_are_compared_with_those_of_another_exporter(tmp_path: Path) -> None:
    file = tmp_path / "outputs"
    await play(3, 3.0, checks=(writing(file),))
    assert (await play(3, 3.0, checks=(comparing(file),))).violations == ()
    with put_back("each server is called root's"):
        found = (await play(3, 3.0, checks=(comparing(file),))).violations
    assert "- Process 1001 is anna's server" in found[0].replace('    "', "")
    assert "+ Process 1001 is root's server" in found[0].replace('    "', "")
