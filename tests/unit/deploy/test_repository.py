"""A real apt takes packages from the repository that tools/repository.sh makes."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.commands import TREE, output_of
from testing.waiting import wait_for

TOOLS = "apt-get dpkg-deb dpkg-scanpackages gpg gpgconf gpgv pgrep createrepo_c"
MISSING = [name for name in TOOLS.split() if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)}")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A key in a home of gpg of its own, whose agent ends with the test."""
    # Not tmp_path: the agent's socket has room for a short path only.
    with tempfile.TemporaryDirectory(prefix="gpg-") as home:
        monkeypatch.setenv("GNUPGHOME", home)
        name = "packages@example.org"
        try:
            make = ("gpg", "--batch", "--passphrase", "", "--quick-gen-key", name, "ed25519")
            output_of(*make, check=True)
            yield name
        finally:
            output_of("gpgconf", "--kill", "all", check=True)
            wait_for(lambda: output_of("pgrep", "--full", home).returncode == 1)


class Host:
    """Folders of an apt that knows this repository only, and no installed package."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self._folder = folder
        for name in ("sources", "state/lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "state" / "status").touch()
        shutil.copy(repository / "mps-exporter.sources", folder / "sources")

    def apt(self, *words: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "Dir::Etc": self._folder,
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": self._folder / "sources",
            "Dir::State": self._folder / "state",
            "Dir::State::Status": self._folder / "state" / "status",
            "Dir::Cache": self._folder / "cache",
            "APT::Architecture": "amd64",
            "APT::Sandbox::User": "",
        }
        options = [f"-o{name}={value}" for name, value in settings.items()]
        return output_of("apt-get", *options, *words, cwd=self._folder)


def package(folder: Path, version: str) -> Path:
    control = folder / version / "DEBIAN" / "control"
    control.parent.mkdir(parents=True)
    control.write_text(
        f"Package: mps-exporter\nVersion: {version}\nArchitecture: amd64\n"
        "Maintainer: nobody <nobody@example.org>\nDescription: a test\n"
    )
    file = folder / f"mps-exporter_{version}_amd64.deb"
    output_of("dpkg-deb", "--build", control.parents[1], file, check=True)
    return file


def publish(repository: Path, key: str, *packages: Path) -> None:
    script = TREE / "tools" / "repository.sh"
    output_of(script, repository, f"file:{repository}", key, *packages, check=True)


def test_apt_takes_the_newest_package_of_a_repository_that_grows(tmp_path: Path, key: str) -> None:
    repository = tmp_path / "repository"
    publish(repository, key, package(tmp_path, "0.9"))
    publish(repository, key, package(tmp_path, "0.10"), package(tmp_path, "0.2"))
    host = Host(tmp_path / "host", repository)
    assert host.apt("update").returncode == 0
    assert host.apt("download", "mps-exporter").returncode == 0
    found = [path.name for path in (tmp_path / "host").glob("*.deb")]
    assert found == ["mps-exporter_0.10_amd64.deb"]
    assert host.apt("download", "mps-exporter=0.9").returncode == 0


@pytest.mark.parametrize("name", ["InRelease", "Packages*"])
def test_apt_refuses_an_index_that_was_changed_after_it_was_signed(
    tmp_path: Path, key: str, name: str
) -> None:
    repository = tmp_path / "repository"
    publish(repository, key, package(tmp_path, "0.9"))
    for file in (repository / "apt").glob(name):
        file.write_bytes(file.read_bytes().replace(b"Origin: mps", b"Origin: MPS") + b"\n")
    host = Host(tmp_path / "host", repository)
    host.apt("update")
    assert host.apt("download", "mps-exporter").returncode != 0


def test_the_index_for_yum_is_signed_with_the_key_beside_it(tmp_path: Path, key: str) -> None:
    repository = tmp_path / "repository"
    publish(repository, key, package(tmp_path, "0.9"))
    index = repository / "yum" / "repodata" / "repomd.xml"
    assert 'type="primary"' in index.read_text("utf-8")
    keyring = tmp_path / "keyring"
    output_of("gpg", "--dearmor", "--output", keyring, repository / "key.asc", check=True)
    signature = index.with_suffix(".xml.asc")
    output_of("gpgv", "--keyring", keyring, signature, index, check=True)
