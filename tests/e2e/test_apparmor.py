"""The AppArmor profile through AppArmor's own parser, and in the kernel where it has AppArmor."""

import subprocess
from pathlib import Path

import pytest

from testing.commands import output_of
from testing.prometheus_programs import program

PROFILE = Path(__file__).parents[2] / "deploy" / "apparmor" / "mps-exporter"
LOADED = Path("/sys/kernel/security/apparmor/profiles")


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
