"""The settings in docs/fleet.md, as a reader would copy them."""

from __future__ import annotations

import re
from typing import Any

import yaml

from testing.rule_files import ROOT

PAGE = ROOT.parent / "docs" / "fleet.md"


def settings() -> dict[str, Any]:
    """All YAML of the page in one configuration."""
    merged: dict[str, Any] = {}
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        merged |= yaml.safe_load(block)
    return merged


def dropped(name: str) -> bool:
    """Whether its metric_relabel_configs leave out the series of this name."""
    return any(
        rule["action"] == "drop" and re.fullmatch(rule["regex"], name)
        for scrape in settings()["scrape_configs"]
        for rule in scrape["metric_relabel_configs"]
    )


def kept_for_long(name: str) -> bool:
    """Whether its remote write sends the series of this name on."""
    (target,) = settings()["remote_write"]
    return all(
        rule["action"] == "keep" and re.fullmatch(rule["regex"], name)
        for rule in target["write_relabel_configs"]
    )
