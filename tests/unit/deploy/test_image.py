import json
import os
import re
import subprocess
import sys
import tomllib
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


PTRACE_AND_READ = "0000000000080004"
SETPRIV = "libexec/setpriv --inh-caps={0} --ambient-caps={0} -- HOME/bin/mps-exporter"
AS_IT_IS = "bin/mps-exporter"
USER, ROOT_USER = 64730, 0


@pytest.mark.parametrize(
    ("bounding", "uid", "no_new_privileges", "started"),
    [
        ("00000000a80425fb", USER, 0, AS_IT_IS),  # Docker's default
        (PTRACE_AND_READ, USER, 0, "+dac_read_search,+sys_ptrace"),
        ("0000000400080004", USER, 0, "+dac_read_search,+sys_ptrace,+syslog"),
        ("0000000000080000", USER, 0, "+sys_ptrace"),
        ("0000000000000004", USER, 0, "+dac_read_search"),
        ("000001ffffffffff", USER, 0, "+dac_read_search,+sys_ptrace,+syslog"),
        (PTRACE_AND_READ, ROOT_USER, 0, AS_IT_IS),  # which has them already
        (PTRACE_AND_READ, USER, 1, AS_IT_IS),
    ],
)
def test_added_rights_are_handed_on_and_no_others(
    tmp_path: Path, bounding: str, uid: int, no_new_privileges: int, started: str
) -> None:
    """With a status file, and programs that only print how they were started."""
    for name in ("bin/mps-exporter", "libexec/setpriv", "bin/id"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin" / "id").write_text(f"#!/bin/sh\necho {uid}\n")
    status = f"Name:\tsh\nCapBnd:\t{bounding}\nNoNewPrivs:\t{no_new_privileges}\n"
    (tmp_path / "status").write_text(status)
    script = (ROOT / "deploy" / "image" / "entrypoint.sh").read_text()
    script = script.replace("/proc/self/status", str(tmp_path / "status"))
    (tmp_path / "entrypoint").write_text(
        script.replace("home=/opt/mps-exporter", f"home={tmp_path}")
    )
    words = ("/bin/sh", tmp_path / "entrypoint", "serve", "--log.level=warn")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    result = output_of(*words, env={"PATH": path}, check=True)
    shown = result.stdout.replace(str(tmp_path), "HOME")
    expected = started if started == AS_IT_IS else SETPRIV.format(started)
    assert shown == f"{expected} serve --log.level=warn\n"
    assert ("no-new-privileges" in result.stderr) == bool(no_new_privileges)
