"""vmalert loads the rule files of Prometheus."""

from __future__ import annotations

import subprocess

from testing.prometheus_programs import program
from testing.rule_files import RULE_FILES


def test_vmalert_takes_our_rules_as_they_are() -> None:
    done = subprocess.run(
        [program("vmalert"), "-dryRun", *(f"-rule={file}" for file in RULE_FILES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
