"""Lays wheels over each other into one folder that several versions of Python can import from.

    python deploy/packages/bundle.py FOLDER WHEEL...

The wheels of one package for CPython 3.11, 3.12 and so on contain the same Python files, and
compiled modules whose names carry the version (``_writer.cpython-311-x86_64-linux-gnu.so``). A file
that two wheels have with different content ends the run: then one folder cannot serve both.
"""

# ruff: noqa: INP001 - a script of the packages, no part of the exporter
from __future__ import annotations

import sys
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


if __name__ == "__main__":
    bundle([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]))
