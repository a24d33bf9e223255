"""A search for a name leads to one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "exporter/mps_exporter"


def defined_in(source: str) -> set[str]:
    """Public functions and classes of a module, and its private classes."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, kinds)
        and (isinstance(node, ast.ClassDef) or not node.name.startswith("_"))
    }


def test_no_two_modules_define_the_same_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in defined_in(path.read_text()):
            places[name].append(path.relative_to(PACKAGE).as_posix())
    assert len(places) > 100
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
