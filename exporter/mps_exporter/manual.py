"""The manual that the package contains: a page for each alert and each error text, and a search.

In a checkout the pages are prometheus/runbooks and docs/symptoms; a package has copies of them.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from mps_exporter.findings.finding import DOCS

FOLDERS = ("docs/symptoms", "prometheus/runbooks")
WANTED_SHARE = 0.6
"""Least share of a text's words, weighted by their rarity, that a page must contain."""

_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
_WORD = re.compile(r"[a-z0-9_]+")
_NUMBER = re.compile(r"\b\d+\b")
_TEXT_BLOCK = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ERROR_NAME = re.compile(r"CUDA_ERROR_\w+|cudaError\w+")


@dataclass(frozen=True)
class ManualPage:
    """A page in Markdown."""

    name: str
    """File name without suffix, which for a runbook is the alert's name."""
    folder: str
    source: str

    @property
    def title(self) -> str:
        return self.source.partition("\n")[0].lstrip("# ")

    @property
    def text(self) -> str:
        """The page without comments; links lead to other pages of the manual, or to the web."""
        return _LINK.sub(self._absolute, _COMMENT.sub("", self.source))

    @cached_property
    def words(self) -> frozenset[str]:
        """Words of the page and of its name, with the findings and alerts of its header."""
        return frozenset(_WORD.findall(f"{self.name.replace('-', ' ')} {self.source}".lower()))

    @cached_property
    def phrases(self) -> str:
        return _phrase(self.source)

    @cached_property
    def quotes(self) -> tuple[str, ...]:
        """The printed texts that the page quotes, and the names of the errors in its title."""
        lines = "".join(_TEXT_BLOCK.findall(self.source)).splitlines()
        texts = [line for line in lines if line.count(" ") > 1] + _ERROR_NAME.findall(self.title)
        return tuple(_phrase(_NUMBER.sub("", one)) for one in texts)

    def _absolute(self, found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(self.folder, found[1]))
        name, anchor = posixpath.basename(path).removesuffix(".md"), found[2] or ""
        return f"]({name}{anchor})" if name in _names() else f"]({DOCS}{path}{anchor})"


def _phrase(text: str) -> str:
    """Return the words of a text in their order, between blanks."""
    return f" {' '.join(_WORD.findall(text.lower()))} "


def _folder(name: str) -> Path:
    package = Path(__file__).parent / "manual" / name
    return package if package.is_dir() else Path(__file__).parents[2] / name


@cache
def _names() -> frozenset[str]:
    files = (file for folder in FOLDERS for file in _folder(folder).glob("*.md"))
    return frozenset(file.stem for file in files if file.stem != "README")


@cache
def pages() -> dict[str, ManualPage]:
    """Return the pages by name."""
    return {
        file.stem: ManualPage(file.stem, folder, file.read_text("utf-8"))
        for folder in FOLDERS
        for file in sorted(_folder(folder).glob("*.md"))
        if file.stem in _names()
    }


def name_of(url: str | None) -> str | None:
    """Return the name of the page with this URL; None: it is not in the manual."""
    name = posixpath.basename(url or "").removesuffix(".md")
    return name if name in _names() else None


def search(text: str, most: int = 5) -> list[ManualPage]:
    """Return the pages about an error text, alert, finding or number, the best first.

    A page that contains the text word for word is better than others, or of which the text
    contains a quoted line. Otherwise the page with most of its rare words is best: a message
    contains PIDs and paths that no page can contain.
    """
    asked = _WORD.findall(text.lower())
    typed, without_numbers = _phrase(text), _phrase(_NUMBER.sub("", text))
    known = pages().values()
    counts = Counter(word for page in known for word in page.words)
    weights = {word: math.log(1 + len(known) / counts[word]) for word in set(asked) if counts[word]}
    missing = len({word for word in asked if not counts[word] and not word.isdecimal()})
    whole = sum(weights.values()) + missing * math.log(1 + len(known)) / 2
    ranked = []
    for page in known:
        share = sum(weights[word] for word in page.words & weights.keys()) / (whole or 1.0)
        quoted = max((len(one) for one in page.quotes if one in without_numbers), default=0)
        exact = len(typed) if asked and typed in page.phrases else quoted
        named = text.strip().lower() == page.name.lower()
        titled = len(weights.keys() & set(_WORD.findall(page.title.lower()))) / (len(asked) or 1)
        if share >= WANTED_SHARE or exact:
            ranked.append(((named, exact, share + titled, -len(page.words)), page))
    return [page for _, page in sorted(ranked, key=lambda one: one[0], reverse=True)[:most]]
