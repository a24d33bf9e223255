"""Prometheus's own tools on our files, of the oldest release that we support and of version 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mps_exporter.findings import ADVICE
from testing import fleet_page
from testing.commands import output_of
from testing.finding_hosts import SYNTHETIC
from testing.page import text_of
from testing.prometheus_programs import program
from testing.promtool import fired, page_of, receiver_of
from testing.rule_files import ROOT, RULE_FILES, TEST_FILES

PROMTOOLS = pytest.mark.parametrize("promtool", ["promtool", "promtool3"])


def run(*command: str | Path) -> str:
    done = output_of(*command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@PROMTOOLS
def test_rules_are_valid(promtool: str) -> None:
    reported = run(program(promtool), "check", "rules", *RULE_FILES)
    assert reported.count("SUCCESS") == len(RULE_FILES)


@PROMTOOLS
@pytest.mark.parametrize("file", TEST_FILES, ids=lambda file: file.stem)
def test_unit_tests_pass(promtool: str, file: Path) -> None:
    assert "SUCCESS" in run(program(promtool), "test", "rules", file)


@pytest.mark.parametrize("name", [name for name in SYNTHETIC if ADVICE[name].alert])
def test_the_host_of_a_finding_raises_its_alert(name: str, tmp_path: Path) -> None:
    """The condition in Python and the expression of the alert agree."""
    page = page_of(text_of(SYNTHETIC[name]))
    alerts = fired(tmp_path, "gpu01", [page] * 3, 30.0, waiting=False)
    labels = [one.labels for one in alerts]
    severities = {one["severity"] for one in labels if one["alertname"] == ADVICE[name].alert}
    assert severities == {ADVICE[name].severity}


@PROMTOOLS
def test_prometheus_configuration_is_valid(promtool: str) -> None:
    run(program(promtool), "check", "config", "prometheus.yml")


@PROMTOOLS
def test_settings_for_many_hosts_are_valid(promtool: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.yml").write_text(yaml.safe_dump(fleet_page.settings()))
    run(program(promtool), "check", "config", tmp_path / "fleet.yml")


def test_alertmanager_configuration_is_valid() -> None:
    reported = run(program("amtool"), "check-config", "alertmanager.yml")
    assert "1 templates" in reported


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("alertname=MpsServerCrashed severity=critical", "pager"),
        ("alertname=MpsServerCrashed severity=critical environment=demo", "demo"),
        ("alertname=MpsServerCrashed severity=critical daemon_uid=2001", "tickets"),
        ("alertname=MpsUidWaitLong severity=warning", "tickets"),
        ("alertname=MpsWouldHelp severity=info", "none"),
        ("alertname=SomebodyElse severity=critical", "tickets"),
    ],
)
def test_routing(labels: str, receiver: str) -> None:
    assert receiver_of(*labels.split()) == receiver
