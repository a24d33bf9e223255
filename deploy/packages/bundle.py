"""Lays wheels over each other into one folder that several versions of Python can import from.

    python deploy/packages/bundle.py FOLDER WHEEL...
    python deploy/packages/bundle.py FILE.pyz WHEEL...

The wheels of one package for CPython 3.11, 3.12 and so on contain the same Python files, and
compiled modules whose names carry the version (``_writer.cpython-311-x86_64-linux-gnu.so``). A file
that two wheels have with different content ends the run: then one folder cannot serve both.

A .pyz is one file for hosts without a network and any Python 3.10 or newer. It has no compiled
modules: the packages have slower Python versions of them, but for bcrypt, which is left out.
"""

# ruff: noqa: INP001 - a script of the packages, no part of the exporter
from __future__ import annotations

import os
import sys
import tempfile
import time
import zipfile
from pathlib import Path, PurePosixPath

NOT_NEEDED = {".c", ".h", ".pxd", ".pyi", ".pyx", ".typed"}
UNUSED = ("yaml/_yaml.", "example.py")
"""PyYAML's binding to libyaml, 10 MB of 52: the exporter parses one small file, in Python. And an
example of nvidia-ml-py."""
OF_ONE_WHEEL = {"RECORD", "WHEEL"}
"""Of .dist-info: these differ between the wheels of one package, and only installers read them."""


def is_needed(name: str) -> bool:
    """Whether the exporter can make use of a file of a wheel when it runs."""
    path = PurePosixPath(name)
    # Man pages and scripts: the packages have them in the system's folders.
    if name.endswith("/") or ".data/data/share/man/" in name or ".data/scripts/mps-" in name:
        return False
    if path.parts[0].endswith(".dist-info"):
        return path.name not in OF_ONE_WHEEL
    return path.suffix not in NOT_NEEDED and not name.startswith(UNUSED)


def bundle(wheels: list[Path], folder: Path) -> None:
    """Unpack the wheels into the folder."""
    for wheel in sorted(wheels):
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(is_needed, archive.namelist()):
                if ".data/" in name or ".." in PurePosixPath(name).parts:
                    raise SystemExit(f"{wheel.name} has {name}, which belongs elsewhere")
                target, data = folder / name, archive.read(name)
                if target.exists() and target.read_bytes() != data:
                    raise SystemExit(f"{name} of {wheel.name} differs from that of another wheel")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)


def make_pyz(wheels: list[Path], target: Path) -> None:
    """Write the file; its times are SOURCE_DATE_EPOCH."""
    moment = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))[:6]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle([one for one in wheels if not one.name.startswith("bcrypt-")], folder)
        for one in ("__main__.py", "python310.py"):
            (folder / one).write_bytes((Path(__file__).parent / one).read_bytes())
        files = sorted(one for one in folder.rglob("*") if one.is_file() and one.suffix != ".so")
        with target.open("wb") as file:
            file.write(b"#!/usr/bin/env python3\n")
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
                for one in files:
                    entry = zipfile.ZipInfo(one.relative_to(folder).as_posix(), moment)
                    entry.external_attr = 0o644 << 16
                    archive.writestr(entry, one.read_bytes(), zipfile.ZIP_DEFLATED)
    target.chmod(0o755)


if __name__ == "__main__":
    make = make_pyz if sys.argv[1].endswith(".pyz") else bundle
    make([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]))
