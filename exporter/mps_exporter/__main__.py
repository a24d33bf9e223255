"""``python -m mps_exporter``."""

from mps_exporter.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
