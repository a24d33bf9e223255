"""Files of the chart besides its templates: copies of rules and dashboards, and its README.

They are copies because Flux and others that fetch a chart by git drop symbolic links: the chart
would have no rules and no dashboards. The table of values is generated from values.yaml.
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


def undocumented(text: str) -> list[str]:
    """Return the values without a comment of their own or of a mapping that contains them."""
    named = {path for path, _, _ in values(text)}

    def missing(value: Any, path: str) -> Iterator[str]:
        inside = any(name.startswith(f"{path}.") for name in named)
        if path in named and not inside:
            return
        if isinstance(value, dict) and inside:
            for key, below in value.items():
                yield from missing(below, f"{path}.{key}")
        else:
            yield path

    return [found for key, value in yaml.safe_load(text).items() for found in missing(value, key)]


def table(text: str) -> Iterator[str]:
    """The rows of the README."""
    rows = list(values(text))
    yield "| value | default | meaning |"
    yield "| --- | --- | --- |"
    for path, default, meaning in rows:
        is_heading = any(other.startswith(f"{path}.") for other, _, _ in rows)
        shown = "" if is_heading else f"`{json.dumps(default)}`"
        yield f"| `{path}` | {shown} | {meaning.replace('|', chr(92) + '|')} |"


def files() -> dict[Path, str]:
    """Return all generated files of the chart, by path."""
    made = {}
    for folder, (source, pattern) in COPIES.items():
        for path in sorted((ROOT / source).glob(pattern)):
            made[CHART / folder / path.name] = path.read_text("utf-8")
    readme = CHART / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    rows = "\n".join(table((CHART / "values.yaml").read_text("utf-8")))
    made[readme] = f"{before}{BEGIN}\n{rows}\n{END}{rest.partition(END)[2]}"
    return made


def stale() -> list[str]:
    """Return the files that are missing, differ, or have no source."""
    made = files()
    there = {path for folder in COPIES for path in (CHART / folder).iterdir()}
    wrong = {
        path for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text
    }
    return sorted(str(path.relative_to(ROOT)) for path in wrong | (there - made.keys()))


def write() -> None:
    """Write what is stale."""
    made = files()
    for name in stale():
        path = ROOT / name
        if path in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path], "utf-8")
        else:
            path.unlink()
