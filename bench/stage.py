"""The whole program on a synthetic host: mps-exporter itself, with another NVML.

    python -m bench.stage FOLDER [flags of mps-exporter]

FOLDER is that of a bench.host.FullHost in another process, which writes the state of its GPUs into
files.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mps_exporter import cli

cli.configure_malloc()  # as exporter/mps_exporter/cli.py does before it imports the rest

from bench.host import TickingNvml, busy_gpus  # noqa: E402
from mps_exporter.sources import live_host  # noqa: E402
from mps_exporter.sources.nvml import NvmlSession  # noqa: E402
from mps_exporter.sources.nvml.pynvml_api import Device, Listed, ProcessKind  # noqa: E402


class StagedNvml(TickingNvml):
    """The stand-in for NVML, whose state is read from files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, Any]] = {}
        super().__init__(*busy_gpus(len(self._read("nvml.json", []))))

    def _read(self, name: str, default: Any) -> Any:
        path = self._folder / name
        try:
            stamp = path.stat().st_mtime_ns
        except FileNotFoundError:
            return default
        if self._seen.get(name, (0, None))[0] != stamp:
            self._seen[name] = stamp, json.loads(path.read_text())
        return self._seen[name][1]

    def processes(self, device: Device, kind: ProcessKind) -> Listed:
        self.fail("", self._read("failing.json", None))
        super().processes(device, kind)
        number = next(n for n, gpu in enumerate(self.gpus) if gpu is device)
        rows = self._read("nvml.json", [])[number][kind]
        return {int(pid): used for pid, used in rows.items()}

    def text(self, function: str, *arguments: object) -> str:
        """Read a text: the driver's version is queried even when nothing else works."""
        self.fail("", self._read("failing.json", None))
        return super().text(function, *arguments)


def main() -> int:
    folder = Path(sys.argv[1])
    session = partial(NvmlSession, StagedNvml(folder))
    vars(live_host)["NvmlSession"] = session
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
