"""Grafana's own linter of dashboards, with all of its rules.

Two are met on a copy only: it wants the variable `instance` to be called Instance, and people call
it a host; and it wants several hosts to be possible, and some dashboards can show one host only.
"""

import json
import shutil
from pathlib import Path

import pytest

from testing.commands import output_of
from testing.dashboards import FILES

TOOLS = Path(__file__).parents[2] / ".tools" / "bin"


def dashboard_linter() -> str:
    found = shutil.which("dashboard-linter") or shutil.which("dashboard-linter", path=str(TOOLS))
    if found is None:
        pytest.skip("not there: run grafana/linter/build.sh .tools/bin/dashboard-linter")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_linter_finds_nothing(path: Path, tmp_path: Path) -> None:
    assert not list(path.parent.glob(".lint*")), "rules are obeyed, not excluded"
    copy = tmp_path / path.name
    text = path.read_text("utf-8").replace('"label": "Host"', '"label": "Instance"')
    # Whether a job is ours shows by any of its hosts; series of a whole job have no host.
    for anything in (".+", ".*"):
        text = text.replace(f'instance=~\\"{anything}\\"', 'instance=~\\"$instance\\"')
    dashboard = json.loads(text)
    for variable in dashboard["templating"]["list"]:
        variable["multi"] |= variable["name"] == "instance"
    copy.write_text(json.dumps(dashboard))
    command = [dashboard_linter(), "lint", "--strict", "--verbose", str(copy)]
    result = output_of(*command, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
