"""Commands in the pages are run, or state why they cannot be run here.

A block of shell commands (``sh``) is run in a copy of the tree, unless a comment right before it is

- ``<!-- needs: gpu -->`` (or another of NEEDS): what it needs that a test does not have;
- ``<!-- in: folder -->``: the folder of the tree in which it is run.

All blocks of runbooks and symptom pages need a GPU host or a cluster.
A command that serves (``mps-exporter demo``) is scraped and stopped; it listens on a free port.
Durations of minutes are shortened to seconds.
"""

import asyncio
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from mps_exporter.cli import main
from mps_exporter.manual_search import FOLDERS
from testing.commands import output_of
from testing.program import running
from tests.unit.docs.markdown import ROOT, Block, blocks, files, pages

NEEDS = {
    "gpu": "a host with a GPU, and on most of them MPS in some trouble",
    "cluster": "a Kubernetes cluster",
    "docker": "a container engine",
    "root": "root, and systemd",
    "network": "PyPI; tests/e2e/test_fresh_clone.py runs these commands",
    "minutes": "some minutes, and a machine that does nothing else",
    "npm": "node, and npm with its registry",
}
LANGUAGES = {"sh", "console", "yaml", "json", "ini", "text", "promql", "python", "toml", "mermaid"}


def can_run(block: Block) -> bool:
    in_manual = str(block.page.parent.relative_to(ROOT)) in FOLDERS and block.page.stem != "README"
    return not in_manual and not block.mark("needs")


BLOCKS = [block for page in pages() for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
UNMARKED = list({block.text: block for block in SHELL if can_run(block)}.values())
"""Blocks to run here; several pages contain the same commands."""
ANSWERS = ("Findings: ", "Nothing is wrong here.", "Checked, in this order:")
"""What the doctor's report contains."""


def commands(text: str) -> list[str]:
    """The commands of a block, each on one line."""
    joined = re.sub(r"--duration \d+m", "--duration 2s", text.replace("\\\n", " "))
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def test_every_block_names_its_language_and_its_needs() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block}: so that no command is missed"
        assert (block.mark("needs") or "gpu") in NEEDS, str(block)


def test_every_block_is_shell() -> None:
    """Also those that cannot be run."""
    for block in SHELL:
        text = re.sub(r"<<<? ?(?=[A-Z]|$)", "", block.text)
        check = output_of("bash", "-n", input=text)
        assert (check.returncode, check.stderr) == (0, ""), str(block)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree, in which the commands may write."""
    copy = tmp_path_factory.mktemp("copy") / "tree"
    for name in files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


def environment() -> dict[str, str]:
    places = (Path(sys.executable).parent, ROOT / ".tools" / "bin")
    path = os.pathsep.join((*map(str, places), os.environ["PATH"]))
    return {**os.environ, "PATH": path}


@pytest.mark.parametrize("block", UNMARKED, ids=str)
def test_it_runs(
    block: Block, tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tree / (block.mark("in") or ""))
    for line in commands(block.text):
        match shlex.split(line):
            case ["mps-exporter", "doctor" | "record" as command, *_] as words:
                status, output = main(words[1:]), capfd.readouterr().out
                assert status == 0 or command == "doctor", output  # its status is what it found
                assert command == "record" or any(answer in output for answer in ANSWERS), output
            case ["mps-exporter", *flags]:
                asyncio.run(_serves(Path.cwd(), flags))
            case _:
                ran = output_of("bash", "-euo", "pipefail", "-c", line, env=environment())
                assert ran.returncode == 0, ran.stdout + ran.stderr


async def _serves(folder: Path, words: list[str]) -> None:
    """Start it with a free port, and scrape it."""
    flags = [word for word in words if not word.startswith("--web.listen-address=")]
    flags = [str(folder / word) if word.endswith(".rec.gz") else word for word in flags]
    async with running(folder, *flags) as program:
        page = await program.page()
        assert page.value("mps_exporter_build_info") == 1
