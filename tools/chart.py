"""Files of the chart besides its templates: copies of rules and dashboards, and its README.

They are copies because Flux and others that fetch a chart by git drop symbolic links: the chart
would have no rules and no dashboards. The list of values is generated from values.yaml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "mps-exporter"
COPIES = {
    "files/rules": ("prometheus/rules", "*.yml"),
    "files/dashboards": ("grafana/dashboards", "*.json"),
}
BEGIN, END = "<!-- values -->", "<!-- end -->"
KEY = re.compile(r"( *)([A-Za-z][A-Za-z0-9]*):")


def values(text: str) -> Iterator[tuple[str, Any, str]]:
    """Yield each documented value: its path, its default, and the comment above it.

    A mapping whose keys have comments of their own is yielded for its comment, without a default.
    """
    defaults = yaml.safe_load(text)
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
        elif found := KEY.match(line):
            path[len(found[1]) // 2 :] = [found[2]]
            if comment:
                yield ".".join(path), _at(defaults, path), " ".join(comment)
            comment = []
        else:
            comment = []


def _at(defaults: Any, path: list[str]) -> Any:
    for key in path:
        defaults = defaults[key]
    return defaults


def value_list(text: str) -> Iterator[str]:
    rows = list(values(text))
    yield ""
    for path, default, meaning in rows:
        is_heading = any(other.startswith(f"{path}.") for other, _, _ in rows)
        is_shown = not is_heading and default not in ("", [], {})
        shown = f" Default: `{json.dumps(default)}`." if is_shown else ""
        yield f"- `{path}`: {meaning}{shown}"
    yield ""


def files() -> dict[Path, str]:
    """Return all generated files of the chart, by path."""
    made = {}
    for folder, (source, pattern) in COPIES.items():
        for path in sorted((ROOT / source).glob(pattern)):
            made[CHART / folder / path.name] = path.read_text("utf-8")
    readme = CHART / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    rows = "\n".join(value_list((CHART / "values.yaml").read_text("utf-8")))
    made[readme] = f"{before}{BEGIN}\n{rows}\n{END}{rest.partition(END)[2]}"
    return made


def obsolete() -> list[Path]:
    there = {path for folder in COPIES for path in (CHART / folder).iterdir()}
    return sorted(there - files().keys())
