import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import pytest

from testing.commands import output_of

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")


def instructions(name: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE))
    return re.findall(rf"(?m)^{name}\s+(.*)$", joined)


def test_it_runs_as_an_unprivileged_user() -> None:
    assert instructions("USER") == ["64730:64730"]


def test_the_base_is_pinned_by_digest() -> None:
    (base,) = (one for one in instructions("ARG") if one.startswith("PYTHON_IMAGE="))
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.12\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", base)


def test_what_it_copies_is_there_and_let_through_to_the_build() -> None:
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    for copied in instructions("COPY"):
        if "--from" in copied:
            continue
        *sources, _ = [word for word in copied.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists()
            assert let_through & {source, *map(str, Path(source).parents)}


def test_all_that_the_wheel_contains_is_copied() -> None:
    copied = {word for one in instructions("COPY") for word in one.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in (*wheel["force-include"], *wheel["shared-data"], *wheel["shared-scripts"]):
        assert copied & {name, *map(str, Path(name).parents)}, name


def test_the_lock_of_the_build_backend_is_whole() -> None:
    """The Dockerfile picks exactly hatchling's requirements from the lock file."""
    picked = re.search(r"keep = /\^\(([^)]*)\)==/", DOCKERFILE)
    assert picked is not None
    requirements = {"hatchling"}
    for requirement in requires("hatchling") or ():
        name, _, marker = requirement.partition(";")
        if "extra" not in marker and "python_version <" not in marker:
            requirements.add(re.split(r"[<>=!~ ]", name, maxsplit=1)[0])
    assert set(picked[1].split("|")) == requirements


def test_the_health_check_asks_a_server_that_runs_whether_it_is_healthy() -> None:
    command = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    assert command[:2] == ["/opt/mps-exporter/bin/python", "-c"]
    assert "'http://127.0.0.1:9400/-/healthy'" in command[2]
    nobody = command[2].replace(":9400", ":1")
    failed = subprocess.run([sys.executable, "-c", nobody], capture_output=True, check=False)
    assert failed.returncode == 1


# ---------------------------------------------------------------------- the entrypoint


Entry = Callable[..., subprocess.CompletedProcess[str]]

PTRACE_AND_READ = "0000000000080004"
ALL_OF_USE = "0000000400080004"
DOCKERS_DEFAULT = "00000000a80425fb"


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    """The entrypoint, with a status file and programs that only say that they were started."""
    for name in ("bin/mps-exporter", "libexec/setpriv"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        path.chmod(0o755)
    (tmp_path / "bin" / "id").write_text('#!/bin/sh\necho "$TEST_UID"\n')
    (tmp_path / "bin" / "id").chmod(0o755)
    script = (ROOT / "deploy" / "image" / "entrypoint.sh").read_text()
    script = script.replace("/proc/self/status", str(tmp_path / "status"))
    script = script.replace("home=/opt/mps-exporter", f"home={tmp_path}")
    (tmp_path / "entrypoint").write_text(script)

    def run(bounding: str, *, uid: int = 64730, no_new_privileges: int = 0) -> object:
        status = f"Name:\tsh\nCapBnd:\t{bounding}\nNoNewPrivs:\t{no_new_privileges}\n"
        (tmp_path / "status").write_text(status)
        words = ("/bin/sh", tmp_path / "entrypoint", "serve", "--log.level=warn")
        variables = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TEST_UID": str(uid)}
        return output_of(*words, env=variables, check=True)

    return run  # type: ignore[return-value]


def test_a_container_without_added_rights_starts_the_exporter_as_it_is(entry: Entry) -> None:
    result = entry(DOCKERS_DEFAULT)
    assert (result.stdout, result.stderr) == ("bin/mps-exporter serve --log.level=warn\n", "")


@pytest.mark.parametrize(
    ("bounding", "handed_on"),
    [
        (PTRACE_AND_READ, "+dac_read_search,+sys_ptrace"),
        (ALL_OF_USE, "+dac_read_search,+sys_ptrace,+syslog"),
        ("0000000000080000", "+sys_ptrace"),
        ("0000000000000004", "+dac_read_search"),
        ("000001ffffffffff", "+dac_read_search,+sys_ptrace,+syslog"),
    ],
)
def test_added_rights_are_handed_on_and_no_others(
    entry: Entry, bounding: str, handed_on: str
) -> None:
    words = entry(bounding).stdout.split()
    rights = [f"--inh-caps={handed_on}", f"--ambient-caps={handed_on}"]
    assert words[:4] == ["libexec/setpriv", *rights, "--"]
    assert words[4].endswith("/bin/mps-exporter")
    assert words[5:] == ["serve", "--log.level=warn"]


def test_root_has_what_was_added_already(entry: Entry) -> None:
    assert entry(PTRACE_AND_READ, uid=0).stdout.startswith("bin/mps-exporter ")


def test_missing_capabilities_are_reported_and_the_exporter_starts(entry: Entry) -> None:
    result = entry(PTRACE_AND_READ, no_new_privileges=1)
    assert result.stdout.startswith("bin/mps-exporter ")
    assert "no-new-privileges" in result.stderr
