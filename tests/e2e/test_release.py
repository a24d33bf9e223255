"""A release is built twice with the same bytes, and its package runs from where it is unpacked."""

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

import mps_exporter
from testing.commands import output_of

ROOT = Path(__file__).parents[2]
VERSION = mps_exporter.__version__


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("release") / "out"
    result = output_of(ROOT / "tools" / "release-check.sh", out)
    assert result.returncode == 0, result.stderr
    assert "both builds are identical" in result.stderr
    return out


def test_everything_is_there_with_its_sum(release: Path) -> None:
    made = {path.name for path in release.iterdir()}
    assert made == {
        "SHA256SUMS",
        "LICENCES.txt",
        "NOTES.md",
        "install.sh",
        "mps-exporter.pyz",
        f"mps_exporter-{VERSION}.tar.gz",
        f"mps_exporter-{VERSION}-py3-none-any.whl",
        f"mps-exporter-chart-{VERSION}.tgz",
        f"mps-exporter-monitoring-{VERSION}.tar.gz",
        *(f"mps-exporter_{VERSION}-1_{one}.deb" for one in ("amd64", "arm64")),
        *(f"mps-exporter-{VERSION}-1.{one}.rpm" for one in ("x86_64", "aarch64")),
        *(f"mps-exporter_{VERSION}_{one}.cdx.json" for one in ("amd64", "arm64", "pyz")),
    }
    summed = {line.split()[1] for line in (release / "SHA256SUMS").read_text().splitlines()}
    assert summed == made - {"SHA256SUMS"}


def unpack_package(release: Path, architecture: str, folder: Path) -> None:
    package = release / f"mps-exporter_{VERSION}-1_{architecture}.deb"
    output_of("dpkg-deb", "-x", package, folder, check=True)


@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_the_package_has_modules_for_every_python(
    release: Path, tmp_path: Path, architecture: str
) -> None:
    unpack_package(release, architecture, tmp_path)
    machine = {"amd64": "x86_64", "arm64": "aarch64"}[architecture]
    names = {path.name for path in (tmp_path / "usr/lib/mps-exporter/python/aiohttp").iterdir()}
    for version in ("311", "312", "313", "314"):
        assert f"_http_writer.cpython-{version}-{machine}-linux-gnu.so" in names
    unit = (tmp_path / "usr/lib/systemd/system/mps-exporter.service").read_text()
    assert "ExecStart=/usr/bin/mps-exporter serve" in unit
    assert "/opt/" not in unit


def test_the_package_runs_with_nothing_but_python(release: Path, tmp_path: Path) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("this machine has no /usr/bin/python3")
    unpack_package(release, output_of("dpkg", "--print-architecture").stdout.strip(), tmp_path)
    recording = ROOT / "tests" / "recordings" / "quiet.rec.gz"
    doctor = [tmp_path / "usr/bin/mps-exporter", "doctor", "--recording", recording]
    result = output_of(*doctor, "--at", "30s", "--json", env={"PATH": "/usr/bin:/bin"})
    assert result.returncode in (0, 1, 2), result.stderr
    json.loads(result.stdout)
    assert list(tmp_path.rglob("__pycache__")) == [], "it writes nothing"


PYTHONS = [
    *(path for path in map(shutil.which, (f"python3.{one}" for one in range(10, 16))) if path)
]


@pytest.mark.parametrize("python", PYTHONS)
def test_one_file_runs_with_every_python(release: Path, tmp_path: Path, python: str) -> None:
    """Diagnosis, and the demo with its pages; users of a web configuration need bcrypt."""
    if output_of(python, "-V").returncode:
        pytest.skip("this Python is a name only")
    file = release / "mps-exporter.pyz"
    run: list[str | Path] = [python, "-I", "-S", "-B", file]  # without installed packages
    recording = ROOT / "tests" / "recordings" / "starved.rec.gz"
    doctor = output_of(*run, "doctor", "--recording", recording, "--at=3s", "--json")
    assert doctor.returncode == 1, f"the wait in the logs is not seen: {doctor.stderr}"
    json.loads(doctor.stdout)
    assert output_of(*run, "explain", "error 810").returncode == 0
    users = tmp_path / "web.yml"
    users.write_text(f"basic_auth_users: {{a: '$2y$10${'a' * 53}'}}\n")
    words = ("demo", f"--web.config.file={users}", "--web.listen-address=:0")
    refused = output_of(*run, *words, timeout=60)
    assert refused.returncode == 1
    assert "needs the Python package bcrypt" in refused.stderr
    address = f"unix:{tmp_path / 'socket'}"
    with subprocess.Popen([*run, "demo", f"--web.listen-address={address}"]) as demo:
        try:
            get = ["curl", "-sSf", "--retry", "60", "--retry-all-errors", "--retry-delay", "1"]
            for path in ("/metrics", "/", "/docs/"):
                socket = ["--unix-socket", tmp_path / "socket"]
                output_of(*get, *socket, f"http://localhost{path}", check=True)
        finally:
            demo.terminate()
    assert demo.returncode == 0


def test_rules_for_a_prometheus_have_no_links_that_lead_nowhere(
    release: Path, tmp_path: Path
) -> None:
    with tarfile.open(release / f"mps-exporter-monitoring-{VERSION}.tar.gz") as archive:
        # Python 3.11.2, that of Debian 12, has no filters; 3.14 requires one.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)  # noqa: S202 - of this project
    (folder,) = tmp_path.iterdir()
    rules = sorted(folder.glob("rules/*.yml"))
    assert [path.name for path in rules] == sorted(
        path.name for path in (ROOT / "prometheus" / "rules").glob("*.yml")
    )
    for path in rules:
        text = path.read_text("utf-8")
        assert "_url:" not in text
        yaml.safe_load(text)
    made = {path.name for path in folder.glob("dashboards/*.json")}
    assert made == {path.name for path in (ROOT / "grafana" / "dashboards").glob("*.json")}
