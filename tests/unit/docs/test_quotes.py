"""Every flag, variable, path, target and command that a page quotes exists.

In backquotes and in blocks of code, also where a block is marked and cannot be run. A path is one
of this tree if its first part is; what is made there (``build/``, ``.venv/``) is not looked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mps_exporter.config import FLAGS, REVISION_VARIABLE
from testing.commands import output_of
from tests.unit.docs.markdown import ROOT, blocks, files, pages, quotes

# What the changelog says of earlier versions is history.
CURRENT = [page for page in pages() if page.name != "CHANGELOG.md"]
EACH = pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))

OURS = re.compile(r"(?<![\w-])--(?:no-)?(?:web|mps|path|collector|log|replay|page)\.[a-z][a-z.-]*")
VARIABLE = re.compile(r"\bMPS_EXPORTER_[A-Z_]*[A-Z]\b")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w.-])")
PATH = re.compile(r"(?<![\w./$~<-])\.{0,2}/?[\w.-]+(?:/[\w.*-]+)+/?")
PLACE = re.compile(r"[\w*-]+(?:/[\w.*-]+)*(?:/|\.[a-z]+)")
"""On the page of the architecture: a file or, with a slash behind it, a folder."""
MADE = {"build", ".venv", ".tools", "dist"}
TOPS = {Path(name).parts[0] for name in files()} - MADE
COMMANDS = ("serve", "demo", "doctor", "record")

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


@EACH
def test_every_flag_of_the_exporter_exists(page: Path) -> None:
    known = {f"--{flag.name}" for flag in FLAGS} | {f"--no-{flag.name}" for flag in FLAGS}
    given = {found.rstrip(".-") for line in code(page) for found in OURS.findall(line)}
    # Several flags at once: `--collector.nvml.…`.
    prefixes = {flag for flag in given if any(name.startswith(f"{flag}.") for name in known)}
    assert {flag for flag in given - prefixes if "external-url" not in flag} - known == set()


@EACH
def test_every_variable_exists(page: Path) -> None:
    known = {flag.variable for flag in FLAGS} | {REVISION_VARIABLE}
    assert {name for line in code(page) for name in VARIABLE.findall(line)} - known == set()


@EACH
def test_every_command_of_the_exporter_has_its_flags(page: Path) -> None:
    wrong = []
    for line in code(page):
        for found in re.finditer(r"(?:^|^\$ |sudo |/bin/)mps-exporter +([^|;&)`#]*)", line):
            words = found[1].split()
            command = next((word for word in words if not word.startswith("-")), "")
            if words and words[0] in COMMANDS:
                command = words[0]
            elif words and words[0].startswith("--"):
                command = "serve"
            else:
                continue
            known = helped(command) | helped()
            wrong += [f"{command} {flag}" for flag in FLAG.findall(found[1]) if flag not in known]
    assert wrong == []


@EACH
def test_every_path_of_the_tree_exists(page: Path) -> None:
    missing = []
    for line in code(page):
        for found in PATH.findall(line):
            name = found.removeprefix("./").rstrip("/.")
            # docs/alerts.md is about prometheus/, and names what is there from there.
            places = (ROOT, ROOT / "prometheus")
            if Path(name).parts[0] in TOPS and not any(any(one.glob(name)) for one in places):
                missing.append(found)
    assert missing == []


def test_every_path_of_the_architecture_exists() -> None:
    places = (ROOT / "exporter" / "mps_exporter", ROOT)
    named = {one for one in quotes(ROOT / "docs" / "architecture.md") if PLACE.fullmatch(one)}
    assert len(named) > 40
    assert {one for one in named if not any(any(place.glob(one)) for place in places)} == set()


@EACH
def test_every_target_of_make_exists(page: Path) -> None:
    targets = set(re.findall(r"^\.PHONY: (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        found
        for line in code(page)
        for found in re.findall(r"(?:^|\s)make ([a-z][a-z0-9-]*)", line)
    }
    assert named - targets == set()


@EACH
def test_every_command_is_one_of_ours_or_of_the_host(page: Path) -> None:
    """In blocks of shell: a misspelt or vanished program is found also where it cannot be run."""
    unknown = []
    for block in blocks(page):
        if block.language != "sh":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            line = re.sub(r"^\s*\w+=\$\(", "", line)  # noqa: PLW2901 - what is run in it
            word = re.sub(r"^(\s*\w+=\S*)+ ", "", line).split(maxsplit=1)[:1]
            name = word[0] if word else "#"
            if (
                name.startswith("#")
                or SYSTEM.fullmatch(name)
                or name in ("make", "mps-exporter", "python")
            ):
                continue
            ours = "mps-exporter" in name or (ROOT / name).exists()
            if "/" in name and (ours or (ROOT / "deploy" / "jobs" / Path(name).name).exists()):
                continue
            unknown.append(line)
    assert unknown == []
