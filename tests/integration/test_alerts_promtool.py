"""Prometheus's own tools on our files, of the oldest release that we support and of version 3."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mps_exporter.findings import ADVICE
from testing.commands import output_of
from testing.finding_hosts import SYNTHETIC
from testing.page import text_of
from testing.prometheus_programs import program
from testing.promtool import fired, page_of, receiver_of
from testing.rule_files import ROOT, RULE_FILES, TEST_FILES, alerts, fleet_settings

PLACE = ("job", "instance", "daemon")
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


def of_a_user(expected: dict[str, Any]) -> dict[str, Any]:
    """Return the alert that is expected if its daemon is an ordinary user's."""
    labels = {**expected["exp_labels"], "daemon_uid": "2001"}
    if labels["severity"] == "critical":
        labels["severity"] = "warning"
    texts = expected["exp_annotations"]
    if uuid := labels.get("uuid"):
        labels["uuid"] = f"claimed {uuid}"
        described = texts["description"].replace(f"({uuid})", f"(claimed {uuid})")
        texts = {**texts, "description": described}
    return {"exp_labels": labels, "exp_annotations": texts}


def test_every_alert_about_a_users_daemon_names_the_user(tmp_path: Path) -> None:
    """And no such alert is critical, or names a GPU as if it were proved."""
    seen = {one.alert for one in ADVICE.values() if one.alert and one.scope in ("daemon", "server")}
    for file in TEST_FILES:
        document = yaml.safe_load(file.read_text())
        document["rule_files"] = [str(file.parent / one) for one in document["rule_files"]]
        tests = []
        for test in document["tests"]:
            cases = [
                case
                for case in test.get("alert_rule_test", ())
                if any("daemon" in one["exp_labels"] for one in case.get("exp_alerts") or ())
            ]
            places = set()
            for case in cases:
                seen.add(case["alertname"])
                labels = [one["exp_labels"] for one in case["exp_alerts"]]
                places |= {tuple(one[name] for name in PLACE) for one in labels}
                case["exp_alerts"] = [of_a_user(one) for one in case["exp_alerts"]]
            for place in places:
                known = ",".join(
                    f'{name}="{value}"' for name, value in zip(PLACE, place, strict=True)
                )
                series = f'mps_control_unprivileged_info{{{known},uid="2001"}}'
                test["input_series"].append({"series": series, "values": "1x20000"})
            if cases:
                tests.append({**test, "alert_rule_test": cases, "promql_expr_test": []})
        if tests:
            (tmp_path / file.name).write_text(yaml.safe_dump({**document, "tests": tests}))
            run(program("promtool"), "test", "rules", tmp_path / file.name)
    about = {one.alert for one in alerts() if "$labels.daemon" in one.annotations["description"]}
    assert about <= seen


LABEL = re.compile(r'(\w+)="([^"]*)"')


def claims(test: dict[str, Any]) -> set[str]:
    """Return the series of a daemon of user 2001 that refuses queries and claims all GPUs."""
    found = set()
    about_daemons = {one["alertname"] for one in test.get("alert_rule_test", ())}
    for one in test["input_series"]:
        labels = dict(LABEL.findall(one["series"]))
        if not {"job", "instance"} <= labels.keys():
            continue
        own = f'job="{labels["job"]}",instance="{labels["instance"]}",daemon="/tmp/alice"'
        found.add(f'mps_control_unprivileged_info{{{own},uid="2001"}}')
        if "MpsControlDaemonRefusing" not in about_daemons:
            found.add(f'mps_control_state{{{own},mps_control_state="refused"}}')
        if {"gpu", "uuid"} <= labels.keys():
            own += f',gpu="{labels["gpu"]}",uuid="{labels["uuid"]}"'
            found.add(f"mps_gpu_served{{{own}}}")
            found.add(f'mps_client_sm_limit{{{own},server="1",pid="2"}}')
    return found


@pytest.mark.parametrize("file", TEST_FILES, ids=lambda file: file.stem)
def test_an_ordinary_users_daemon_raises_and_hides_no_other_alert(
    file: Path, tmp_path: Path
) -> None:
    document = yaml.safe_load(file.read_text())
    document["rule_files"] = [str(file.parent / one) for one in document["rule_files"]]
    for test in document["tests"]:
        test["promql_expr_test"] = []
        series = [{"series": one, "values": "1x20000"} for one in sorted(claims(test))]
        test["input_series"] += series
    (tmp_path / file.name).write_text(yaml.safe_dump(document))
    run(program("promtool"), "test", "rules", tmp_path / file.name)


@PROMTOOLS
def test_configurations_are_valid_for_one_host_and_for_many(promtool: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.yml").write_text(yaml.safe_dump(fleet_settings()))
    for config in ("prometheus.yml", tmp_path / "fleet.yml"):
        run(program(promtool), "check", "config", config)


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
