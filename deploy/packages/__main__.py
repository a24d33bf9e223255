"""What `python3 /usr/lib/mps-exporter/python` and mps-exporter.pyz run."""

# ruff: noqa: INP001, UP036 - a file of the packages, no part of the exporter
import sys
import tempfile
import zipfile

if sys.version_info < (3, 10):  # python3 of RHEL 8 and 9
    sys.exit(f"mps-exporter needs Python 3.10 or newer, and {sys.executable} is older")
if sys.version_info < (3, 11):
    import python310

    python310.install()

if zipfile.is_zipfile(sys.path[0]) and sys.argv[1:2] not in (["doctor"], ["record"]):
    # The pages, the manual and the demo are read as files. Python removes the folder at exit.
    unpacked = tempfile.TemporaryDirectory(prefix="mps-exporter-")
    with zipfile.ZipFile(sys.path[0]) as archive:
        archive.extractall(unpacked.name)
    sys.path[0] = unpacked.name

from mps_exporter.cli import main

if __name__ == "__main__":
    sys.exit(main())
