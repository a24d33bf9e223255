"""Our Markdown pages, taken apart: blocks of code with their marks, links, headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from testing.commands import output_of

ROOT = Path(__file__).parents[3]
MARK = re.compile(r"<!-- (needs|in): (.+?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of code, with the marks in the comments right before it."""

    page: Path
    line: int
    language: str
    text: str
    marks: tuple[tuple[str, str], ...]

    def mark(self, name: str) -> str | None:
        return dict(self.marks).get(name)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def files() -> list[str]:
    """Every file of the tree that git knows or would take."""
    listed = output_of(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT, check=True
    ).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


def pages() -> list[Path]:
    return [ROOT / name for name in files() if name.endswith(".md")]


@cache
def parsed(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    marks: list[tuple[str, str]] = []
    for token in parsed(page):
        if token.type == "html_block":
            marks += [(found[1], found[2]) for found in MARK.finditer(token.content)]
        elif token.type == "fence":
            begin = (token.map or [0])[0] + 1
            yield Block(page, begin, token.info.strip(), token.content, tuple(marks))
            marks = []
        elif token.nesting == 0 and token.type != "html_block":
            marks = []


def _inline(page: Path) -> Iterator[Token]:
    for token in parsed(page):
        yield from token.children or ()


def links(page: Path) -> Iterator[str]:
    """Where links and pictures point to."""
    for token in _inline(page):
        for name in ("href", "src"):
            if isinstance(target := token.attrs.get(name), str):
                yield target


def quotes(page: Path) -> Iterator[str]:
    """Yield the texts in backquotes."""
    for token in _inline(page):
        if token.type == "code_inline":
            yield token.content


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of headings, as GitHub and Forgejo make them."""
    found: set[str] = set()
    heading = False
    for token in parsed(page):
        if heading:
            text = "".join(
                child.content
                for child in token.children or ()
                if child.type in ("text", "code_inline")
            )
            plain = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            name, count = plain, 0
            while name in found:
                count += 1
                name = f"{plain}-{count}"
            found.add(name)
        heading = token.type == "heading_open"
    return frozenset(found)
