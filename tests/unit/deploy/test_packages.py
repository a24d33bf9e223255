"""What the Debian and RPM packages are made of, and the tools of a release."""

import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from testing.commands import output_of
from tools import release_notes, rules

ROOT = Path(__file__).parents[3]
PACKAGES = ROOT / "deploy" / "packages"
bundle = runpy.run_path(str(PACKAGES / "bundle.py"))["bundle"]


def wheel(folder: Path, name: str, **files: str) -> Path:
    path = folder / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("p-1.dist-info/", "")
        archive.writestr("p-1.dist-info/RECORD", name)
        archive.writestr("p-1.dist-info/METADATA", "Name: p")
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def test_wheels_for_several_pythons_share_a_folder(tmp_path: Path) -> None:
    both = {"p/__init__.py": "x = 1", "p/_c.pyx": "no", "p/py.typed": ""}
    wheels = [
        wheel(tmp_path, "cp311", **both, **{"p/_c.cpython-311.so": "a"}),
        wheel(
            tmp_path,
            "cp312",
            **both,
            **{"p/_c.cpython-312.so": "b"},
            **{"p-1.data/data/share/man/man1/p.1": ""},
        ),
    ]
    bundle(wheels, tmp_path / "out")
    found = {
        str(path.relative_to(tmp_path / "out"))
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == {
        "p/__init__.py",
        "p/_c.cpython-311.so",
        "p/_c.cpython-312.so",
        "p-1.dist-info/METADATA",
    }


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"p/__init__.py": "x = 2"}, "differs"),
        ({"p-1.data/scripts/x": ""}, "belongs elsewhere"),
        ({"p/../../x.py": ""}, "belongs elsewhere"),
    ],
)
def test_wheels_that_cannot_share_one_end_the_build(
    tmp_path: Path, files: dict[str, str], why: str
) -> None:
    wheels = [wheel(tmp_path, "a", **{"p/__init__.py": "x = 1"}), wheel(tmp_path, "b", **files)]
    with pytest.raises(SystemExit, match=why):
        bundle(wheels, tmp_path / "out")


def test_the_launcher_refuses_a_host_without_a_new_python(tmp_path: Path) -> None:
    """With a /usr/bin of its own, in which python3 is 3.9."""
    text = (PACKAGES / "mps-exporter.sh").read_text("utf-8").replace("/usr/bin/", f"{tmp_path}/")
    launcher = tmp_path / "mps-exporter"
    launcher.write_text(text)
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho old\n")
    old.chmod(0o755)
    (tmp_path / "python3").symlink_to("python3.9")

    def run() -> subprocess.CompletedProcess[str]:
        return output_of("sh", launcher, "--version")

    refused = run()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no Python 3.11 or newer" in refused.stderr
    new = tmp_path / "python3.12"
    new.write_text('#!/bin/sh\necho "$@"\n')
    new.chmod(0o755)
    taken = run()
    assert re.fullmatch(r"-I -S -B \S*/mps-exporter/python --version\n", taken.stdout)


def test_an_old_python_is_told_which_version_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a traceback: python3 of RHEL 9 is 3.9."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"needs Python 3\.10 or newer"):
        runpy.run_path(str(PACKAGES / "__main__.py"))


def test_the_unit_of_the_package_differs_by_its_program_only() -> None:
    """tools/release.sh replaces that path, wherever it stands."""
    unit = (ROOT / "deploy" / "systemd" / "mps-exporter.service").read_text("utf-8")
    assert "/opt/mps-exporter/bin/mps-exporter" in (ROOT / "tools" / "release.sh").read_text()
    assert re.findall(r".*/opt/.*", unit) == [
        "ExecStart=/opt/mps-exporter/bin/mps-exporter serve --web.systemd-socket $ARGS"
    ]


def bill_of(folder: Path, licence: str, name: str = "p") -> subprocess.CompletedProcess[str]:
    """Print the bill of a folder with one package, whose metadata has this line."""
    (folder / f"{name}-1.dist-info").mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\n{licence}\n"
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(text)
    return output_of(sys.executable, ROOT / "deploy" / "image" / "sbom.py", folder)


@pytest.mark.parametrize(
    ("line", "licence"),
    [
        ("License-Expression: MIT AND PSF-2.0", {"expression": "MIT AND PSF-2.0"}),
        ("License: Apache 2.0", {"license": {"name": "Apache 2.0"}}),
        (
            "Classifier: License :: OSI Approved :: BSD License",
            {"license": {"name": "BSD License"}},
        ),
    ],
)
def test_a_bill_of_a_folder_lists_that_folder_only(
    tmp_path: Path, line: str, licence: dict[str, str]
) -> None:
    (found,) = json.loads(bill_of(tmp_path, line).stdout)["components"]
    assert (found["purl"], found["licenses"]) == ("pkg:pypi/p@1", [licence])


@pytest.mark.parametrize(
    "line", ["Summary: x", "License: Proprietary", "License-Expression: MIT AND AGPL-3.0-only"]
)
def test_an_unknown_licence_ends_the_build(tmp_path: Path, line: str) -> None:
    result = bill_of(tmp_path, line)
    assert result.returncode != 0
    assert "the licence of p 1 is unknown" in result.stderr


def test_licences_are_listed_with_all_texts_that_packages_ship(tmp_path: Path) -> None:
    for name, texts in (("q", {}), ("p", {"LICENSE.md": "Permission", "vendor/x/NOTICE": "By X"})):
        folder = tmp_path / f"{name}-1.dist-info"
        for file, text in texts.items():
            (folder / "licenses" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "licenses" / file).write_text(text)
        bill_of(tmp_path, "License-Expression: MIT", name)
    program = ROOT / "deploy" / "image" / "sbom.py"
    listed = output_of(sys.executable, program, "--licences", tmp_path).stdout
    line = "=" * 70
    assert listed == f"{line}\np 1: MIT\n\nPermission\n\nBy X\n\n{line}\nq 1: MIT\n"


def test_the_licence_of_every_locked_dependency_is_known() -> None:
    licence_of = runpy.run_path(str(ROOT / "deploy" / "image" / "sbom.py"))["licence_of"]
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    names = re.findall(r"^([a-z0-9_.-]+)==", lock, re.MULTILINE)
    assert len(names) > 10
    for name in names:
        assert licence_of(metadata.distribution(name))


def test_the_release_audits_the_locked_dependencies_and_none_is_left_out() -> None:
    """Without --strict, pip-audit succeeds where it finds no data about any package."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
    steps = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    (audit,) = (step for step in steps if "pip_audit" in step)
    locks = {"requirements.lock", "deploy/packages/python310.lock"}
    assert {"--strict", "--require-hashes", *locks} <= set(audit.split())
    assert steps.index(audit) < steps.index("make release-check")


# ---------------------------------------------------------------------- the installer

INSTALLER = ROOT / "deploy" / "install.sh"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "usage: install.sh"),
        (["--what"], "unknown option: --what"),
        (["--port"], "--port needs a number"),
        (["nothing.deb"], "there is no package nothing.deb"),
        (["--port", "94o1", str(INSTALLER)], "--port 94o1: not a number"),
        (["--slurm-epilog", "epilog.d", str(INSTALLER)], "epilog.d: no absolute path"),
    ],
)
def test_the_installer_refuses_what_it_cannot_do(arguments: list[str], why: str) -> None:
    """Before it changes anything."""
    if os.geteuid() and arguments and arguments[0] not in ("--what", "--port"):
        why = "this needs root"
    result = output_of("sh", INSTALLER, *arguments)
    assert result.returncode != 0
    assert why in result.stderr


# ---------------------------------------------------------------------- rules and notes


def test_rules_are_written_without_links_or_with_those_that_are_given(tmp_path: Path) -> None:
    rules.main([str(tmp_path / "none")])
    rules.main(
        [str(tmp_path / "both"), "--grafana", "https://g.example/", "--runbooks", "https://w.e/r"]
    )
    alerts = 0
    for source in rules.RULES.glob("*.yml"):
        shipped = yaml.safe_load(source.read_text("utf-8"))
        none = yaml.safe_load((tmp_path / "none" / source.name).read_text("utf-8"))
        both = yaml.safe_load((tmp_path / "both" / source.name).read_text("utf-8"))
        for groups in zip(shipped["groups"], none["groups"], both["groups"], strict=True):
            for original, bare, linked in zip(*(group["rules"] for group in groups), strict=True):
                if "alert" in original:
                    alerts += 1
                    runbook = linked["annotations"].pop("runbook_url")
                    assert runbook.startswith("https://w.e/r/Mps")
                    board = linked["annotations"].pop("dashboard_url")
                    assert board.startswith("https://g.example/d/mps-")
                    del original["annotations"]["runbook_url"]
                    del original["annotations"]["dashboard_url"]
                assert bare == linked == original
    assert alerts > 20


def test_notes_are_the_section_of_the_version() -> None:
    changelog = "# C\n\n## Unreleased\n\n* new\n\n## 0.2.0 / 2026-01-01\n\n* two\n"
    assert release_notes.notes(changelog, "0.2.0") == "* two\n"
    assert release_notes.notes(changelog, "0.3.0") == "* new\n"
    with pytest.raises(SystemExit, match="no section for 9"):
        release_notes.notes("# C\n\n## Unreleased\n\n## 0.1 / now\n", "9")
