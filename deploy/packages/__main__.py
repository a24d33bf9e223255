"""What `python3 /usr/lib/mps-exporter/python` runs: the folder of this file is then importable."""

# ruff: noqa: INP001 - a file of the packages, no part of the exporter
import sys

from mps_exporter.cli import main

if __name__ == "__main__":
    sys.exit(main())
