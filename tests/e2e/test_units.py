"""Units, the AppArmor profile, the Ansible role and the rules through programs that read them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from testing.commands import output_of
from testing.prometheus_programs import program
from testing.rule_files import RULE_FILES

DEPLOY = Path(__file__).parents[2] / "deploy"
LEAST_EXPOSURE = 2.0
PROFILE = DEPLOY / "apparmor" / "mps-exporter"
LOADED = Path("/sys/kernel/security/apparmor/profiles")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with a program that exists in place of the exporter."""
    stand_in = tmp_path / "mps-exporter"
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)
    for name in ("mps-exporter.service", "mps-exporter.socket"):
        text = (DEPLOY / "systemd" / name).read_text("utf-8")
        (tmp_path / name).write_text(
            text.replace("/opt/mps-exporter/bin/mps-exporter", str(stand_in))
        )
    return tmp_path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    analyzer = shutil.which("systemd-analyze")
    if analyzer is None:
        pytest.fail("systemd-analyze is missing: apt-get install systemd")
    return output_of(analyzer, *arguments)


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


def parse(*arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    return output_of(program("apparmor_parser"), "--skip-cache", *arguments, input=text)


def test_the_parser_accepts_the_profile() -> None:
    text = PROFILE.read_text("utf-8")
    result = parse("--skip-kernel-load", text=text)
    assert result.returncode == 0, result.stderr
    assert parse("--skip-kernel-load", text=text.replace("/** r,", "/** q,")).returncode != 0


@pytest.mark.skipif(not LOADED.exists(), reason="the kernel has no AppArmor")
def test_the_kernel_takes_the_profile() -> None:
    text = PROFILE.read_text("utf-8").replace("mps-exporter flags", "mps-exporter-test flags")
    try:
        assert parse("--replace", text=text).returncode == 0
        assert "mps-exporter-test (enforce)" in LOADED.read_text()
    finally:
        parse("--remove", text=text)


def test_vmalert_takes_our_rules_as_they_are() -> None:
    done = output_of(program("vmalert"), "-dryRun", *(f"-rule={file}" for file in RULE_FILES))
    assert done.returncode == 0, done.stderr
