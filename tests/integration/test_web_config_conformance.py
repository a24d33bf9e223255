"""Our loader of web configuration files beside Prometheus' own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mps_exporter.web.webconfig import WebConfigError
from mps_exporter.web.webconfig.reload import load
from tests.support.waiting import PATIENCE_SECONDS
from tests.unit.web.webconfigs import (
    agreed,
    newer,
    stricter,
    stricter_than_newer,
    write_certificates,
)


def tool(name: str) -> str:
    here = Path(__file__).resolve().parents[2] / ".tools" / "bin" / name
    found = str(here) if here.exists() else shutil.which(name)
    assert found, f"{name} is missing: tools/install-system.sh servers brings it"
    return found


def ours(path: Path) -> str | None:
    """Why we refuse the file; None when we do not."""
    try:
        load(str(path))
    except WebConfigError as error:
        return str(error)
    return None


def theirs(promtool: str, paths: list[Path]) -> dict[str, bool]:
    done = subprocess.run(
        [promtool, "check", "web-config", *map(str, paths)],
        capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    output = done.stdout + done.stderr
    return {path.stem: f"{path} SUCCESS" in output for path in paths}


def written(folder: Path, files: Mapping[str, str]) -> list[Path]:
    paths = []
    for name, text in files.items():
        path = folder / f"{name}.yml"
        path.write_text(text)
        paths.append(path)
    return paths


def assert_agreement(promtool: str, folder: Path, files: dict[str, tuple[bool, str]]) -> None:
    expected = {name: good for name, (good, _) in files.items()}
    paths = written(folder, {name: text for name, (_, text) in files.items()})

    assert theirs(promtool, paths) == expected
    assert {path.stem: ours(path) is None for path in paths} == expected


def assert_stricter(promtool: str, folder: Path, files: dict[str, tuple[str, str]]) -> None:
    paths = written(folder, {name: text for name, (text, _) in files.items()})

    assert theirs(promtool, paths) == dict.fromkeys(files, True)
    for path in paths:
        reason = ours(path)
        assert reason is not None, f"{path.stem} was not refused"
        assert files[path.stem][1] in reason
        assert str(path) in reason


def test_we_and_promtool_agree(tmp_path: Path) -> None:
    write_certificates(tmp_path)
    files = agreed(tmp_path)

    assert len(files) >= 40
    assert_agreement(tool("promtool"), tmp_path, files)


def test_where_we_are_stricter(tmp_path: Path) -> None:
    write_certificates(tmp_path)

    assert_stricter(tool("promtool"), tmp_path, stricter())


def test_we_and_a_newer_promtool_agree(tmp_path: Path) -> None:
    write_certificates(tmp_path)

    assert_agreement(tool("promtool3"), tmp_path, newer(tmp_path))


def test_where_we_are_stricter_than_a_newer_one(tmp_path: Path) -> None:
    write_certificates(tmp_path)

    assert_stricter(tool("promtool3"), tmp_path, stricter_than_newer())
