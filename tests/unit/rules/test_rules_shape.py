"""Rules are complete, explained, tested, and lead somewhere."""

import re
from pathlib import Path

import yaml

from grafana.boards import BOARDS
from mps_exporter.findings import ADVICE
from testing import promql
from testing.each import each
from testing.rule_files import (
    DASHBOARD_BASE,
    ROOT,
    RUNBOOK_BASE,
    RUNBOOKS,
    Rule,
    alert_cases,
    alerts,
    records,
    rules,
    unit_tests,
)
from tests.unit.rules.templates import schema
from tools.generate_docs import alert_rule

ALERTS = each(alerts())
RECORDS = each(records())
PAGES = each(sorted(RUNBOOKS.glob("*.md")))
FINDINGS = {one.alert: one.name for one in ADVICE.values() if one.alert}
DURATION = re.compile(r"[1-9]\d*[smh]")
TEXTS = {"summary", "description", "runbook_url", "dashboard_url"}


@ALERTS
def test_alert_has_only_fields_of_an_alert(rule: Rule) -> None:
    """`for` or `keep_firing_for` under labels is a label, and no Prometheus complains."""
    allowed = "alert expr for keep_firing_for labels annotations"
    assert rule.fields.keys() <= set(allowed.split())
    wanted = {"severity"}
    if "$labels.daemon" in rule.annotations["description"]:
        wanted.add("daemon_uid")
        wanted |= {"uuid"} if "$labels.uuid" in rule.annotations["description"] else set()
    if "daemon_uid" in wanted and rule.severity == "critical":
        # The log of an ordinary user's daemon is that user's text: it must not page.
        assert rule.labels["severity"].startswith("{{ if query")
        assert rule.labels["severity"].endswith("}}warning{{ else }}critical{{ end }}")
    assert rule.labels.keys() == wanted
    assert rule.severity in {"critical", "warning", "info"}


@RECORDS
def test_record_has_only_fields_of_a_record(rule: Rule) -> None:
    assert rule.fields.keys() == {"record", "expr"}
    assert re.fullmatch(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+", rule.record)


@ALERTS
def test_alert_waits_for_a_reason(rule: Rule) -> None:
    """The comment above the rule gives the reason for its `for`, or for none."""
    explained = " ".join(rule.comment)
    assert len(explained) > 40
    if "for" in rule.fields:
        assert DURATION.fullmatch(rule.fields["for"])
    else:
        windowed = re.search(r"\[\d+[mh]\]", rule.expr)
        assert "No `for`" in explained or windowed, explained


@ALERTS
def test_annotations(rule: Rule) -> None:
    texts = rule.annotations
    assert set(texts) == TEXTS
    assert "{{" not in texts["summary"], "constant, so that alerts group"
    assert texts["summary"].endswith(".")
    assert "First" in texts["description"], "what to do first"
    assert not re.search(r"\$value(?!\s*\|)", re.sub(r"if eq \$value", "", texts["description"]))
    if rule.alert != "MpsExporterAbsent":
        assert "$labels.instance" in texts["description"]


@ALERTS
def test_the_runbook_of_an_alert_exists(rule: Rule) -> None:
    """The alert of a finding may share the runbook of another alert."""
    url = rule.annotations["runbook_url"]
    assert url == f"{RUNBOOK_BASE}{rule.alert}.md" or rule.alert in FINDINGS
    assert url.startswith(RUNBOOK_BASE)
    assert (RUNBOOKS / url.removeprefix(RUNBOOK_BASE)).is_file()


@ALERTS
def test_the_dashboard_of_an_alert_opens_with_its_object_chosen(rule: Rule) -> None:
    """It sets each visible variable for which the alert has a label. A receiver adds the time."""
    uid, parameters = rule.annotations["dashboard_url"].removeprefix(DASHBOARD_BASE).split("?")
    (board,) = (board for board in BOARDS if board.uid == uid)
    labels = schema().labels(promql.parse(rule.expr)) or frozenset[str]()
    offered = {one.name for one in board.variables if one.name == "job" or not one.hidden}
    chosen = set(re.findall(r"var-(\w+)=\{\{(?:\.|\$labels\.\1)\|urlquery\}\}", parameters))
    assert chosen == offered & labels or rule.alert == "MpsExporterAbsent"


def test_a_rule_without_texts_gets_the_texts_of_its_finding() -> None:
    rule = "      - alert: MpsGhostServer\n        expr: mps_server_ghost == 1\n"
    generated = alert_rule(rule)
    (fields,) = yaml.safe_load(generated)
    description = fields["annotations"]["description"]
    assert fields["expr"] == "mps_server_ghost == 1"
    assert ADVICE["ghost_server"].why in description
    assert "{{ $labels.server }} of {{ $labels.daemon }}" in description
    assert fields["labels"]["severity"].endswith("}}warning{{ else }}critical{{ end }}")
    assert alert_rule(generated) == generated
    assert alert_rule(generated.replace("serves no process", "is old")) == generated
    own = generated.replace("First: run", "First: do")
    assert alert_rule(own) == own
    assert "var-gpu" not in fields["annotations"]["dashboard_url"]


def test_a_generated_link_chooses_the_gpu() -> None:
    alert = next(one.alert for one in ADVICE.values() if one.alert and one.scope == "gpu")
    (fields,) = yaml.safe_load(alert_rule(f"      - alert: {alert}\n        expr: vector(1)\n"))
    assert "{{with($labels.gpu)}}&var-gpu={{.|urlquery}}" in fields["annotations"]["dashboard_url"]


@PAGES
def test_a_runbook_belongs_to_an_alert_and_has_all_sections(page: Path) -> None:
    assert any(rule.alert == page.stem for rule in alerts())
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert headings == ["Meaning", "Confirm", "Do", "Do not"]
    there = "[Kubernetes](" in text or "in Kubernetes" in text
    assert there or "```sh" not in text, "where its commands are run there"


@PAGES
def test_a_runbook_ends_no_process_unseen(page: Path) -> None:
    """Before `kill -9` of a number it says how to see that the number is still what it was."""
    text = re.sub(r"\s+", " ", page.read_text())
    for found in re.finditer(r"kill -9 ?`? ?(?:of the )?(SERVER|PID)", text):
        if page.stem == "MpsServerStuckInFault":  # its own clients, listed the moment before
            continue
        assert f"ps -o args= -p {found[1]}" in text[max(0, found.start() - 600) : found.end() + 200]


@each(sorted({rule.alert for rule in alerts()}))
def test_alert_is_tested_firing_and_not_firing(name: str) -> None:
    """The host of a finding proves only that the alert fires, not its `for` and its silence."""
    cases = [case for case in alert_cases() if case.alert == name]
    assert cases, f"write cases for {name} in prometheus/tests"
    severities = {rule.severity for rule in alerts() if rule.alert == name}
    seen = {
        expected["exp_labels"]["severity"]
        for case in cases
        for expected in case.expected
        if "daemon_uid" not in expected["exp_labels"]
    }
    assert seen == severities, "a firing case for each severity"
    quiet = [case for case in cases if not case.expected]
    assert {case.test for case in quiet} - {case.test for case in cases if case.expected}, (
        "a case of its own in which it must not fire"
    )
    for case in cases:
        for expected in case.expected:
            assert expected["exp_annotations"].keys() == TEXTS
            assert "{{" not in expected["exp_annotations"]["description"]


def test_tests_use_series_that_the_exporter_can_have() -> None:
    """Series that no exporter writes would make a test meaningless."""
    target = {"namespace", "pod", "container"}  # as a ServiceMonitor adds them
    for file, test in unit_tests():
        for given in test["input_series"]:
            node = promql.parse(given["series"])
            known = schema().series(node.name).labels | target
            labels = {label for label, _, _ in promql.matchers(node)}
            assert labels <= known, f"{file.name}: {given['series']}: {labels - known}"


def test_prometheus_loads_all_rule_files() -> None:
    config = yaml.safe_load((ROOT / "prometheus.yml").read_text())
    assert config["rule_files"] == ["rules/*.yml"]
    jobs = {scrape["job_name"] for scrape in config["scrape_configs"]}
    named = {
        value
        for rule in rules()
        for selector in promql.selectors(promql.parse(rule.expr))
        for label, op, value in promql.matchers(selector)
        if label == "job" and op == "="
    }
    assert named <= jobs


def test_alertmanager_speaks_of_alerts_that_exist() -> None:
    """In each matcher of an inhibition, every branch names at least one alert, with its labels."""
    config = yaml.safe_load((ROOT / "alertmanager.yml").read_text())
    for inhibition in config["inhibit_rules"]:
        for side in ("source_matchers", "target_matchers"):
            (named,) = [text for text in inhibition[side] if text.startswith("alertname")]
            pattern = re.sub(r"^alertname=~?", "", named).strip('"')
            for branch in re.split(r"\|(?![^(]*\))", pattern):
                found = [rule for rule in alerts() if re.fullmatch(branch, rule.alert)]
                assert found, branch
                if "|" not in pattern:
                    wanted = {*inhibition["equal"]} - {"cluster"}
                    for rule in found:
                        labels = schema().labels(promql.parse(rule.expr)) or frozenset()
                        assert wanted <= labels, named
