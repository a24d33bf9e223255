"""Texts are plain technical English.

Some words must not come back in texts for users: the documentation, the runbooks, the rules and
configuration files that users copy, and every string of the package except docstrings. Code, links
and output of programs are not checked. In docstrings and comments, some habits that make a sentence
hard to read once must become rarer: a change that lowers their number lowers CEILINGS, too.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

CEILINGS = {"exporter": 0, "tests": 13, "testing": 2, "tools": 1, "bench": 0, "grafana": 2}
"""Maximum number of docstrings and comments of a folder that match a pattern."""

_AUX = "(?:is|are|was|were|be|been)"
_NEGATION = "(?:not|no|never|nothing|none|nor|nobody|neither)"

WORDS = {
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
"""A pattern of words in texts for users -> what to write."""

HABITS = {
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
"""A pattern in docstrings and comments -> what to write."""

_WORDS, _HABITS = (
    [(re.compile(pattern), instead) for pattern, instead in table.items()]
    for table in ({rf"(?i)\b(?:{word})\b": instead for word, instead in WORDS.items()}, HABITS)
)
_NOT_PROSE = re.compile(
    r"^ *```.*?^ *```|`[^`]*`|\]\([^)]*\)|<!--[^\n]*?-->|https?://\S+", re.DOTALL | re.MULTILINE
)

_TEXT = re.compile(
    r'^[ ]*r?"""(?P<docstring>(?:\\.|[^\\])*?)"""$'
    r'|"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'|(?P<comment>#[^\n]*)",
    re.DOTALL | re.MULTILINE,
)
"""A docstring, another string (which may contain a #), or a comment."""


# ------------------------------------------------------------------------ texts for users


def matched(text: str) -> Iterator[str]:
    """Yield each pattern of words in a text without code, links and comments."""
    prose = _NOT_PROSE.sub(" ", text)
    for pattern, instead in _WORDS:
        for found in pattern.finditer(prose):
            yield f"{prose[max(0, found.start() - 40) : found.end()]!r}; write: {instead}"


def in_strings(source: str) -> Iterator[str]:
    """Yield them from strings, parts of f-strings included; no docstrings, and no names."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documentation:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield from matched(node.value)


PROSE = ("README.md", "docs/**/*.md", "prometheus/runbooks/*.md")
CONFIGURATION = ("prometheus/**/*.yml", "prometheus/**/*.tmpl", "deploy/**/*")


@pytest.mark.parametrize(
    ("places", "search"),
    [(PROSE, matched), (CONFIGURATION, matched), (("exporter/**/*.py",), in_strings)],
    ids=["documentation", "configuration", "strings"],
)
def test_no_word_that_a_reader_stumbles_over(
    places: tuple[str, ...], search: Callable[[str], Iterator[str]]
) -> None:
    paths = [path for place in places for path in ROOT.glob(place) if path.is_file()]
    # The chart has copies, and Python leaves compiled modules.
    left_out = {"tests", "files", "__pycache__"}
    paths = [one for one in paths if left_out.isdisjoint(one.relative_to(ROOT).parts)]
    assert paths
    found = [f"{path}: {wrong}" for path in paths for wrong in search(path.read_text("utf-8"))]
    assert found == [], "\n".join(found)


# ------------------------------------------------------------------ docstrings and comments


@cache
def texts_in(path: Path) -> tuple[tuple[int, str], ...]:
    """Return the line and the text of each docstring and each block of comments, on one line."""
    return tuple(texts(path.read_text("utf-8")))


def texts(source: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    first = 0
    for found in _TEXT.finditer(source):
        before = source[: found.start()].rpartition("\n")[2]
        line = source.count("\n", 0, found.start()) + 1
        if found["docstring"]:
            yield line, " ".join(found["docstring"].split())
        elif found["comment"]:
            if block and (before.strip() or line != first + len(block)):
                yield first, " ".join(block)
                block = []
            first = first if block else line
            block.append(found["comment"].lstrip("# "))
    if block:
        yield first, " ".join(block)


@pytest.mark.parametrize("folder", CEILINGS)
def test_odd_sentences_become_rarer(folder: str) -> None:
    found = [
        f"{path}:{line}: {text[:160]}; write: {instead}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for line, text in texts_in(path)
        if (instead := [words for pattern, words in _HABITS if pattern.search(text)])
    ]
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
