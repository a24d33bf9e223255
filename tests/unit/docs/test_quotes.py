"""Every flag, variable, path, target and command that a page quotes exists.

In backquotes and in blocks of code, also where a block is marked and cannot be run. A path is one
of this tree if its first part is; generated folders (``build/``, ``.venv/``) are not checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from mps_exporter.flags import FLAGS, REVISION_VARIABLE
from testing.commands import output_of
from tests.unit.docs.markdown import ROOT, blocks, files, pages, quotes

# The changelog describes earlier versions.
CURRENT = [page for page in pages() if page.name != "CHANGELOG.md"]

OURS = re.compile(r"(?<![\w-])--(?:no-)?(?:web|mps|path|collector|log|replay|page)\.[a-z][a-z.-]*")
VARIABLE = re.compile(r"\bMPS_EXPORTER_[A-Z_]*[A-Z]\b")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w.-])")
PATH = re.compile(r"(?<![\w./$~<-])\.{0,2}/?[\w.-]+(?:/[\w.*-]+)+/?")
PLACE = re.compile(r"[\w*-]+(?:/[\w.*-]+)*(?:/|\.[a-z]+)")
"""On the page of the architecture: a file or, with a slash behind it, a folder."""
MADE = {"build", ".venv", ".tools", "dist"}
TOPS = {Path(name).parts[0] for name in files()} - MADE
COMMANDS = ("serve", "demo", "doctor", "record")

JOBS = ROOT / "deploy" / "jobs"
SYSTEM = re.compile(
    r"cat|cd|curl|df|dmesg|docker|done|echo|export|fi|for|fuser|grep|helm|if|install|ipmitool|"
    r"journalctl|kubectl|ln|ls|lspci|nvidia-smi|pgrep|ps|python3|rm|scontrol|sh|sudo|systemctl|"
    r"systemd-sysusers|tail|timeout|tr|userdel"
)
"""Programs of a host on which the command is meant to run."""


@cache
def helped(*words: str) -> frozenset[str]:
    """Return the flags in the help of our program."""
    program = Path(sys.executable).with_name("mps-exporter")
    result = output_of(program, *words, "--help", check=True)
    return frozenset(re.findall(r"--[a-z][a-z0-9.-]*", result.stdout))


def code(page: Path) -> Iterator[str]:
    """Yield everything that is quoted on a page, line by line."""
    yield from quotes(page)
    for block in blocks(page):
        if block.language != "mermaid":
            yield from block.text.replace("\\\n", " ").splitlines()


def unknown_flags(page: Path) -> Iterator[str]:
    known = {f"--{flag.name}" for flag in FLAGS} | {f"--no-{flag.name}" for flag in FLAGS}
    for line in code(page):
        for flag in {found.rstrip(".-") for found in OURS.findall(line)} - known:
            # Several flags at once: `--collector.nvml.…`.
            is_prefix = any(name.startswith(f"{flag}.") for name in known)
            if not is_prefix and "external-url" not in flag:
                yield flag


def unknown_variables(page: Path) -> Iterator[str]:
    known = {flag.variable for flag in FLAGS} | {REVISION_VARIABLE}
    yield from {name for line in code(page) for name in VARIABLE.findall(line)} - known


def flags_of_another_command(page: Path) -> Iterator[str]:
    for line in code(page):
        for found in re.finditer(r"(?:^|^\$ |sudo |/bin/)mps-exporter +([^|;&)`#]*)", line):
            first = found[1].split()[:1]
            command = "serve" if first and first[0].startswith("--") else "".join(first)
            if command in COMMANDS:
                known = helped(command) | helped()
                yield from (f"{command} {flag}" for flag in {*FLAG.findall(found[1])} - known)


def missing_paths(page: Path) -> Iterator[str]:
    # docs/alerts.md is about prometheus/, and its paths are relative to that.
    places = (ROOT, ROOT / "prometheus")
    for line in code(page):
        for found in PATH.findall(line):
            name = found.removeprefix("./").rstrip("/.")
            if Path(name).parts[0] in TOPS and not any(any(place.glob(name)) for place in places):
                yield found


def unknown_targets(page: Path) -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY: (\S+)", makefile, re.MULTILINE))
    for line in code(page):
        yield from {*re.findall(r"(?:^|\s)make ([a-z][a-z0-9-]*)", line)} - targets


def unknown_programs(page: Path) -> Iterator[str]:
    """In blocks of shell: finds a misspelt program also in a block that cannot be run."""
    for block in blocks(page):
        if block.language != "sh":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            bare = re.sub(r"^\s*\w+=\$\(", "", line)
            word = re.sub(r"^(\s*\w+=\S*)+ ", "", bare).split(maxsplit=1)[:1]
            name = word[0] if word else "#"
            ours = name in ("make", "mps-exporter", "python") or (
                "/" in name
                and (
                    "mps-exporter" in name
                    or (ROOT / name).exists()
                    or (JOBS / Path(name).name).exists()
                )
            )
            if not ours and not name.startswith("#") and not SYSTEM.fullmatch(name):
                yield line


CHECKS = (
    unknown_flags,
    unknown_variables,
    flags_of_another_command,
    missing_paths,
    unknown_targets,
    unknown_programs,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pages_quote_nothing_that_does_not_exist(check: Callable[[Path], Iterator[str]]) -> None:
    assert [f"{page.relative_to(ROOT)}: {wrong}" for page in CURRENT for wrong in check(page)] == []


def test_every_path_of_the_architecture_exists() -> None:
    places = (ROOT / "exporter" / "mps_exporter", ROOT)
    named = {name for name in quotes(ROOT / "docs" / "architecture.md") if PLACE.fullmatch(name)}
    assert len(named) > 40
    assert {name for name in named if not any(any(place.glob(name)) for place in places)} == set()
