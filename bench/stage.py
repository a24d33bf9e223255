"""The whole program on a synthetic host: mps-exporter itself, with another NVML.

    python -m bench.stage FOLDER [flags of mps-exporter]

FOLDER is that of a bench.host.FullHost in another process, which writes the state of its GPUs into
files.
"""

import sys
from functools import partial
from pathlib import Path

from mps_exporter import cli

cli.configure_malloc()  # as exporter/mps_exporter/cli.py does before it imports the rest

from bench.host import StagedNvml  # noqa: E402
from mps_exporter.sources import live_host  # noqa: E402
from mps_exporter.sources.nvml import NvmlSession  # noqa: E402


def main() -> int:
    folder = Path(sys.argv[1])
    session = partial(NvmlSession, StagedNvml(folder))
    vars(live_host)["NvmlSession"] = session
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
