"""The entry for awesome-prometheus-alerts, in the form of its _data/rules.yml.

There each alert is copied by itself: without recording rules, so increase() stands for those of
counters, and alerts that need others are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.rules import usual_severity

RULES = Path(__file__).parents[1] / "prometheus" / "rules"
CATEGORIES = {
    "Availability": ("mps-exporter", "mps-daemons"),
    "Resource saturation (USE)": ("mps-clients", "mps-gpus"),
    "Performance and errors (RED)": ("mps-servers", "mps-waits"),
    "Info, security and config": ("mps-advice",),
}
SEVERITIES = ("critical", "warning", "info")
WORDS = {"Mps": "MPS", "Gpu": "GPU", "Sm": "SM", "Uid": "UID", "Ecc": "ECC", "Xid": "Xid"}
RECORDED = re.compile(r"[a-z_]+:[a-z]")
INCREASE = re.compile(r"[a-z_]+:(mps_\w+):increase5m(\{[^}]*\})?")


def name_of(alert: str) -> str:
    """Give MpsServerCrashed as that list writes names: MPS server crashed."""
    words = re.findall(r"[A-Z][a-z]*", alert)
    return " ".join(WORDS.get(word, word.lower()) for word in words)


def alerts(file: str) -> Iterator[dict[str, Any]]:
    """Give the alerts of a file that need no recording rule."""
    for group in yaml.safe_load((RULES / f"{file}.yml").read_text("utf-8"))["groups"]:
        for rule in group["rules"]:
            expr = INCREASE.sub(r"(increase(\1_total\2[5m]) > 0)", rule["expr"])
            if "alert" in rule and not RECORDED.search(expr):
                yield rule | {"expr": expr}


def entry() -> Iterator[str]:
    """Give the lines, with the indentation that they have in its file."""
    yield "# An entry for the group Other of awesome-prometheus-alerts, _data/rules.yml."
    yield "# Made by tools/generate_docs.py from prometheus/rules."
    yield "      - name: NVIDIA MPS"
    yield "        exporters:"
    yield "          - name: mps-exporter"
    yield "            slug: mps-exporter"
    yield "            doc_url: https://github.com/mps-exporter/mps-exporter"
    yield "            rules:"
    for category, files in CATEGORIES.items():
        yield "              #"
        yield f"              # {category}"
        yield "              #"
        found = [rule for file in files for rule in alerts(file)]
        severities = [usual_severity(rule["labels"]["severity"]) for rule in found]
        order = sorted(range(len(found)), key=lambda number: SEVERITIES.index(severities[number]))
        for severity, rule in ((severities[number], found[number]) for number in order):
            one = {
                "name": name_of(rule["alert"]),
                "description": rule["annotations"]["summary"],
                "query": " ".join(rule["expr"].split()),
                "severity": severity,
            } | ({"for": rule["for"]} if "for" in rule else {})
            text = yaml.safe_dump([one], sort_keys=False, width=10_000)
            yield from (f"              {line}" for line in text.splitlines())
