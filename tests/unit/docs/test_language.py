"""User-facing text is plain technical English: words that must not come back, with what to write.

Checks the documentation, the runbooks, the rules and configuration files that users copy, and
every string of the package except docstrings: help texts, findings, messages, the status page.
Code, links and output of programs are not checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

INSTEAD = {
    r"(?:some|no|any|every)body": "who or what it is: no client, another user, all programs",
    "anew": "again",
    "besides?": "next to, with, without",
    "newcomers?": "new client",
    "for ever": "forever, or until what ends it",
    "in vain": "without effect",
    "mends?|mended": "fix, correct",
    r"(?:goes|went) on": "continues, continued",
    r"(?:takes?|took|taken) (?:\w+ ){1,4}along": "the clients that were lost",
    "otherwise than": "differently from",
    "environment twin": "environment variable",
    r"(?:daemon|exporter|server|driver|log|page|MPS|CUDA|NVML)s? (?:says?|knows?|believes?)": (
        "reports, shows, has: programs do not speak or know"
    ),
}
"""A pattern of words -> what to write."""

_WORDS = re.compile(
    "|".join(rf"(?P<_{n}>\b(?:{word})\b)" for n, word in enumerate(INSTEAD)), re.IGNORECASE
)
_NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|https?://\S+")
_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)

PROSE = sorted(
    path
    for pattern in ("README.md", "docs/**/*.md", "prometheus/runbooks/*.md")
    for path in ROOT.glob(pattern)
)
CONFIGURATION = sorted(
    path
    for pattern in ("prometheus/**/*.yml", "prometheus/**/*.tmpl", "deploy/**/*")
    for path in ROOT.glob(pattern)
    # The chart has copies of these, and Python leaves compiled modules.
    if path.is_file() and not {"tests", "files", "__pycache__"} & set(path.parts)
)
CODE = sorted((ROOT / "exporter").rglob("*.py"))


def complaints(text: str) -> Iterator[tuple[int, str]]:
    """Line from 0, and what is wrong there."""
    for found in _WORDS.finditer(text):
        word = list(INSTEAD)[int(str(found.lastgroup)[1:])]
        yield text.count("\n", 0, found.start()), f'"{found[0]}"; write: {INSTEAD[word]}'


def _blank(found: re.Match[str]) -> str:
    """Return the same number of lines, without text."""
    return "\n" * found[0].count("\n")


def in_prose(markdown: str) -> Iterator[tuple[int, str]]:
    """Everything but code, links and comments."""
    yield from complaints(_NOT_PROSE.sub(_blank, _FENCE.sub(_blank, markdown)))


def in_code(source: str) -> Iterator[tuple[int, str]]:
    """Strings, parts of f-strings included; no docstrings, and no names."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documentation:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield from ((node.lineno - 1 + line, wrong) for line, wrong in in_prose(node.value))


@pytest.mark.parametrize(
    ("paths", "look"),
    [(PROSE, in_prose), (CONFIGURATION, in_prose), (CODE, in_code)],
    ids=["documentation", "configuration", "strings"],
)
def test_no_word_that_a_reader_stumbles_over(paths: list[Path], look: object) -> None:
    assert callable(look)
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{line + 1}: {wrong}"
        for path in paths
        for line, wrong in look(path.read_text("utf-8"))
    ]
    assert found == [], "\n" + "\n".join(found)
