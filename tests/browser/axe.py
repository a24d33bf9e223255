"""axe-core, the accessibility checker: fetched by npm once, checked, and kept in .tools."""

import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

VERSION = "4.14.1"
SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
HERE = Path(__file__).resolve().parents[2] / ".tools" / "axe-core"


def script() -> str:
    file = HERE / f"axe-{VERSION}.min.js"
    if not file.exists():
        _fetch(file)
    content = file.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256, f"{file} is not axe-core {VERSION}"
    return content.decode()


def _fetch(file: Path) -> None:
    npm = shutil.which("npm")
    assert npm, "npm is missing: it brings axe-core, the accessibility checker"
    HERE.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [npm, "pack", f"axe-core@{VERSION}", "--silent"],
        cwd=HERE,
        check=True,
        capture_output=True,
        timeout=600,
    )
    package = HERE / f"axe-core-{VERSION}.tgz"
    with tarfile.open(package) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        file.write_bytes(member.read())
    package.unlink()
