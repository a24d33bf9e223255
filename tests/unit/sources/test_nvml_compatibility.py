"""docs/compatibility.md and the rules with the old names, held against each other and ours."""

import re
from pathlib import Path

import yaml

from mps_exporter.metrics import CATALOGUE

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
RULES = yaml.safe_load((ROOT / "prometheus" / "dcgm-compat.rules.yml").read_text())["groups"]
TESTS = (ROOT / "prometheus" / "tests" / "dcgm-compat.yml").read_text()

ROWS = dict(re.findall(r"^- `(DCGM_\w+)`: (.*)$", PAGE, flags=re.MULTILINE))
"""DCGM's metric -> ours, as the page writes it."""


def test_every_row_is_ours() -> None:
    assert len(ROWS) > 40
    for name, ours in ROWS.items():
        found = re.findall(r"`(\w+)(?:\{(.*?)\})?`", ours)
        assert found, name
        for metric, labels in found:
            named = set(re.findall(r'(\w+)(?==|,|$)(?!")', labels))
            assert named <= {*CATALOGUE[metric].labels}, name


def test_every_row_that_is_ours_is_recorded_under_its_old_name_and_tested() -> None:
    recorded = {rule["record"] for group in RULES for rule in group["rules"]}
    # Their labels are labels of mps_gpu_info.
    series = {name for name, ours in ROWS.items() if "`mps_gpu_info" not in ours}
    assert {name for name in recorded if name.startswith("DCGM_")} == series
    for name in series:
        assert f"({name})" in TESTS, name


def test_rules_ask_for_metrics_that_exist() -> None:
    for group in RULES:
        for rule in group["rules"]:
            for metric in re.findall(r"(?<![:\w])(mps_gpu_\w+)(?![:\w])", rule["expr"]):
                assert metric in CATALOGUE, rule["record"]
