"""The systemd units and the Ansible role through the checks of systemd and Ansible."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from testing.commands import output_of

DEPLOY = Path(__file__).parents[2] / "deploy"
LEAST_EXPOSURE = 2.0


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with a program that exists in place of the exporter."""
    program = tmp_path / "mps-exporter"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name in ("mps-exporter.service", "mps-exporter.socket"):
        text = (DEPLOY / "systemd" / name).read_text("utf-8")
        (tmp_path / name).write_text(
            text.replace("/opt/mps-exporter/bin/mps-exporter", str(program))
        )
    return tmp_path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.fail("systemd-analyze is missing: apt-get install systemd")
    return output_of(program, *arguments)


def test_systemd_understands_every_line(units: Path) -> None:
    files = [str(units / name) for name in ("mps-exporter.service", "mps-exporter.socket")]
    result = analyze("verify", "--man=no", *files)
    ours = [line for line in result.stderr.splitlines() if "mps-exporter" in line]
    assert ours == []


def test_the_service_is_exposed_to_little(units: Path) -> None:
    result = analyze("security", "--offline=true", str(units / "mps-exporter.service"))
    found = re.search(r"exposure level for mps-exporter.service: ([\d.]+)", result.stdout)
    assert found is not None, result.stdout + result.stderr
    assert float(found[1]) < LEAST_EXPOSURE


def test_the_role_has_the_syntax_of_ansible(tmp_path: Path) -> None:
    check = ("ansible-playbook", "--syntax-check", "--inventory", "localhost,")
    environment = {**os.environ, "ANSIBLE_HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    output_of(*check, DEPLOY / "ansible" / "site.yml", env=environment, check=True)
