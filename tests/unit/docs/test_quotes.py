"""Every flag, variable and path that a page or a file of deploy/ contains exists.

A path is one of this tree if its first part is; generated folders (``build/``, ``.venv/``) are not
checked. The changelog describes earlier versions.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from mps_exporter.flags import FLAGS, REVISION_VARIABLE
from tests.unit.docs.markdown import ROOT, blocks, files, pages, quotes

CURRENT = [page for page in pages() if page.name != "CHANGELOG.md"]

SETTING = re.compile(r"(?<![\w-])--(?:no-)?(?:web|mps|path|collector|log|replay)\.[a-z.-]*[a-z]")
VARIABLE = re.compile(r"\bMPS_EXPORTER_[A-Z_]*[A-Z]\b")
PATH = re.compile(r"(?<![\w./$~<-])\.{0,2}/?[\w.-]+(?:/[\w.*-]+)+/?")
PLACE = re.compile(r"[\w*-]+(?:/[\w.*-]+)*(?:/|\.[a-z]+)")
"""On the page of the architecture: a file or, with a slash behind it, a folder."""
TOPS = {Path(name).parts[0] for name in files()} - {"build", ".venv", ".tools", "dist"}


def quoted(page: Path) -> Iterator[str]:
    """Yield the code of a page, line by line."""
    yield from quotes(page)
    for block in blocks(page):
        if block.language != "mermaid":
            yield from block.text.replace("\\\n", " ").splitlines()


def texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file that may contain flags and variables."""
    for page in CURRENT:
        yield str(page.relative_to(ROOT)), "\n".join(quoted(page))
    for name in files():
        # The chart has copies of dashboards and rules.
        if name == "Dockerfile" or (name.startswith("deploy/") and "/files/" not in name):
            yield name, (ROOT / name).read_text("utf-8")


def test_every_flag_and_every_variable_exists() -> None:
    flags = {f"--{no}{flag.name}" for flag in FLAGS for no in ("", "no-")}
    # The second is the one that Kubernetes makes of the name of a Service.
    variables = {flag.variable for flag in FLAGS} | {REVISION_VARIABLE, "MPS_EXPORTER_PORT"}
    for name, text in texts():
        for flag in SETTING.findall(text):
            # Prometheus has --web.external-url. Several flags at once: `--collector.nvml.…`.
            known = any(one == flag or one.startswith(f"{flag}.") for one in flags)
            assert known or "external-url" in flag, f"{name}: {flag}"
        assert set(VARIABLE.findall(text)) <= variables, name


def test_every_path_exists() -> None:
    # docs/alerts.md is about prometheus/, and its paths are relative to that.
    places = (ROOT, ROOT / "prometheus")
    for page in CURRENT:
        for path in PATH.findall("\n".join(quoted(page))):
            name = path.removeprefix("./").rstrip("/.")
            ours = Path(name).parts[0] in TOPS
            assert not ours or any(any(place.glob(name)) for place in places), f"{page}: {path}"


def test_every_path_of_the_architecture_exists() -> None:
    places = (ROOT / "exporter" / "mps_exporter", ROOT)
    named = {name for name in quotes(ROOT / "docs" / "architecture.md") if PLACE.fullmatch(name)}
    assert len(named) > 40
    assert {name for name in named if not any(any(place.glob(name)) for place in places)} == set()
