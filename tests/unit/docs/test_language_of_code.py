"""Docstrings and comments are plain technical English: the patterns that must become rarer.

Each pattern is a habit that makes a sentence hard to read once. The number of texts that match may
only fall: a change that lowers it lowers CEILINGS, too.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

CEILINGS = {"exporter": 0, "tests": 13, "testing": 3, "tools": 1, "bench": 1, "grafana": 2}
"""Maximum number of docstrings and comments of a folder that match a pattern."""

_AUX = "(?:is|are|was|were|be|been)"
_NEGATION = "(?:not|no|never|nothing|none|nor|nobody|neither)"

INSTEAD = {
    r"(?:^|[.] |; )[Gg]ives? (?!up\b|way\b)": "return, yield",
    r"^(?:Let|Say|Tell|Note) ": "record, set, log, return",
    r"\b[Ss]o (?:long|many|much|often|seldom|old)\b(?! (?:as|that)\b)": "at most, maximum",
    rf"\b(?:{_AUX}|not|nobody) told\b|\btold (?:of|by|so|last)\b"
    r"|\btells? (?:of|nothing|that|which|how|when|where|what|whose|so|each|already|the"
    r"|whether|by)\b": ("show, report, return; unknown"),
    rf"\bsays? (?:so|no more|nothing|of)\b|\b{_AUX} said\b|\bdid not say\b"
    r"|\b(?:none|nothing|nobody|/proc|kernel|cell|row|chunk|others|environment|daemon)"
    r" (?:says?|said)\b": ("show, report, contain, print"),
    r"\b(?:a|the|one|each|this|last|first|second|earlier|later|whole) looks?\b"
    r"|\blook(?:s|ed|ing)? (?:at|for)\b": "scan, read, check, probe",
    rf"\bquestions?\b|\b(?:{_AUX}|who|whom) (?:not |never )?asked\b(?! to)|\basked for\b": (
        "query, call, request"
    ),
    rf"(?<!there )\b{_AUX} no (?!longer\b|more\b|less\b|need\b|room\b|such\b)[a-z]+": "is not a",
    r"^(?:Those|That) (?:of|that|which|who|in|on)\b"
    r"|\b(?:of|by|for|from|with|than|among|but) (?:those|that) (?:of|that|which|who|in|on)\b": (
        "repeat the noun"
    ),
    r"(?:^|[.;:,(] |\b(?:of|by|in|for|from|with|than|as|to|and|or) )"
    r"[Oo]nes? (?:that|which|who|whose)\b": ("repeat the noun"),
    r"(?:^|[.;:(] |, and |, or |\b(?:of|for|to|by) )[Ww]ho(?:ever)? (?:asks?|has|names|knows|comes"
    r"|is (?:sent|cancelled|inside)|configured|debugs|searches|opens|starts|renders|looks|wants"
    r"|made|runs|may|else)\b": "the process that, the caller",
    r"\bwhom\b|\b[Ww]hose (?:[a-z]+ )?(?:it|they|these|those|that|PID) (?:is|are|was)\b"
    r"|\bwho these are\b": "owner, user; repeat the noun",
    r"(?:^|[.;:] )Of (?!the form)[a-z]": "start with the noun",
    r"(?:^|[.;] )Where [a-z][^.]{8,}?, ": "if, when",
    r"\b(?:go|goes|going|went|gone) on\b": "continue, resume",
    r"\b(?:some|no|any)thing (?:happens|happened|new|came|comes|changed)\b|\bnews\b": (
        "new data, event, activity"
    ),
    r"\bbut for (?!one daemon)": "except",
    r"\b(?:anew|beside|thrice|lest|by turns|otherwise than|for ever|in the long run|seldom"
    r"|so far apart|for want of)\b": "again, next to, forever, on average",
    r"\b(?:no|some|any|every)body\b": "no client, no process, a caller",
    r"\bas far as\b": "if known; up to",
    r"\blets? (?:\w+ )?go\b|\btakes? it along\b|\bgives? way\b|\btak(?:e|es|en) notice\b"
    r"|\btak(?:e|es) in\b|\bcomes? out\b|\btaken? for (?!granted|its)|\bstumbles?\b"
    r"|\btelling tales\b": ("close, release; exit; mistaken for"),
    r"^(?:By|As) ": "keyed by",
    rf"\b{_NEGATION}\b[^.;:,()]{{1,25}}\b(?:{_NEGATION}|without)\b": "the positive fact",
    r"\bstands? (?:in|at|behind|under|still|there|until|below|no)\b|\b(?:brings?|brought)\b": (
        "is in; is valid; returns"
    ),
    r"\bas (?:it|they) (?:was|were|is|are|does|do|came|stands?|says?)\b": "verbatim; last known",
}
"""A pattern -> what to write."""

_PATTERNS = [(re.compile(pattern), words) for pattern, words in INSTEAD.items()]


@cache
def texts_in(path: Path) -> tuple[tuple[int, str], ...]:
    """Return the line and the text of each docstring and each block of comments, on one line."""
    return tuple(texts(path.read_text("utf-8")))


def texts(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, " ".join(text.split())
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and not (token.line.lstrip().startswith("#") and line == first + len(block)):
            yield first, " ".join(block)
            block = []
        first = first if block else line
        block.append(token.string.lstrip("# "))
    if block:
        yield first, " ".join(block)


def complaints(folder: str) -> list[str]:
    """Return a line for each text of a folder's modules that matches a pattern."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line, text in texts_in(path):
            words = [instead for pattern, instead in _PATTERNS if pattern.search(text)]
            if words and path != Path(__file__):
                found.append(f"{path.relative_to(ROOT)}:{line}: {text[:160]}; write: {words}")
    return found


@pytest.mark.parametrize("folder", CEILINGS)
def test_odd_sentences_become_rarer(folder: str) -> None:
    found = complaints(folder)
    assert len(found) <= CEILINGS[folder], "\n".join(found)


def test_a_module_that_a_text_names_exists() -> None:
    modules = [path for folder in CEILINGS for path in (ROOT / folder).rglob("*.py")]
    existing = {path.name for path in modules}
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules
        if path.is_relative_to(ROOT / "exporter")
        for line, text in texts_in(path)
        for name in re.findall(r"(?<!name=)\b([a-z_0-9]+\.py)\b", text)  # not of a logged process
        if name not in existing
    ]
    assert missing == []
