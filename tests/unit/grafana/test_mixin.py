"""The jsonnet mixin is the same rules and dashboards, with what its _config says."""

import functools
import json
from typing import Any

from _jsonnet import evaluate_snippet

from grafana.__main__ import DASHBOARDS
from grafana.style import Json
from testing.dashboards import load, variable_selector, variables
from testing.rule_files import DASHBOARD_BASE, ROOT, RULE_FILES, RUNBOOK_BASE, rules

TREE = ROOT.parent


@functools.cache
def evaluated(config: str = "{}", *, dashboards: bool = False) -> Any:
    """Return what the mixin has; the dashboards, which take most of the time, on request."""
    snippet = f"""
      local mixin = (import '{TREE}/mixin.libsonnet') {{ _config+:: {config} }};
      {{
        config: mixin._config,
        groups: mixin.prometheusAlerts.groups + mixin.prometheusRules.groups,
        {"dashboards: mixin.grafanaDashboards," * dashboards}
      }}
    """
    return json.loads(evaluate_snippet("test", snippet))


def rules_of(mixin: Any) -> list[Json]:
    return [rule for group in mixin["groups"] for rule in group["rules"]]


def key(fields: Json) -> str:
    return json.dumps(fields, sort_keys=True)


def test_with_the_addresses_of_the_files_it_is_the_files_themselves() -> None:
    addresses = {"dashboardUrl": DASHBOARD_BASE, "runbookUrl": RUNBOOK_BASE}
    config = json.dumps({name: url.rstrip("/") for name, url in addresses.items()})
    mixin = evaluated(config, dashboards=True)
    assert sorted(map(key, rules_of(mixin))) == sorted(key(dict(rule.fields)) for rule in rules())
    committed = {path.name: load(path) for path in DASHBOARDS.glob("*.json")}
    assert mixin["dashboards"] == committed


def test_runbooks_are_linked_without_configuration() -> None:
    found = [rule["annotations"] for rule in rules_of(evaluated()) if "alert" in rule]
    assert all(one["runbook_url"].startswith(RUNBOOK_BASE) for one in found)


def test_without_addresses_there_are_no_links() -> None:
    def texts(annotations: Any) -> str:
        return key({name: annotations[name] for name in ("description", "summary")})

    found = [
        rule["annotations"]
        for rule in rules_of(evaluated("{ runbookUrl: null }"))
        if "alert" in rule
    ]
    assert {name for one in found for name in one} == {"description", "summary"}
    shipped = [rule.annotations for rule in rules() if rule.alert]
    assert sorted(map(texts, found)) == sorted(map(texts, shipped))


def test_it_forgets_no_file() -> None:
    text = (TREE / "mixin.libsonnet").read_text("utf-8")
    for path in (*RULE_FILES, *DASHBOARDS.glob("*.json")):
        assert f"'{path.relative_to(TREE)}'" in text


def test_a_threshold_is_one_number_of_its_alert() -> None:
    thresholds = evaluated()["config"]["thresholds"]
    changed = evaluated(f"{{ thresholds: {json.dumps(dict.fromkeys(thresholds, '123'))} }}")
    found = {rule["alert"]: rule["expr"] for rule in rules_of(changed) if "alert" in rule}
    for alert, number in thresholds.items():
        shipped = next(rule for rule in rules() if rule.alert == alert).expr
        assert shipped.count(f" {number}") == 1, alert
        assert found[alert] == shipped.replace(f" {number}", " 123")


def test_selector_and_addresses_can_be_set() -> None:
    changed = evaluated(
        "{ selector: 'job=\"gpus\"', dashboardUrl: 'https://g/d', runbookUrl: 'https://r' }",
        dashboards=True,
    )
    for rule in rules_of(changed):
        assert 'job="mps-exporter"' not in rule["expr"]
        if "alert" in rule:
            assert rule["annotations"]["dashboard_url"].startswith("https://g/d/mps-")
            assert rule["annotations"]["runbook_url"].startswith("https://r/Mps")
            assert DASHBOARD_BASE not in str(rule)
            assert RUNBOOK_BASE not in str(rule)
    for dashboard in changed["dashboards"].values():
        (job,) = (one for one in variables(dashboard) if one["name"] == "job")
        assert variable_selector(job["query"]) == 'mps_exporter_build_info{job="gpus"}'
        assert job["allValue"] is None
    assert 'up{job="gpus"} == 0' in {rule["expr"] for rule in rules_of(changed)}
