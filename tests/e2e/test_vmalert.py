"""vmalert loads the rule files of Prometheus."""

from testing.commands import output_of
from testing.prometheus_programs import program
from testing.rule_files import RULE_FILES


def test_vmalert_takes_our_rules_as_they_are() -> None:
    done = output_of(program("vmalert"), "-dryRun", *(f"-rule={file}" for file in RULE_FILES))
    assert done.returncode == 0, done.stderr
