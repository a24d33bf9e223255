"""The whole program on a made-up host: mps-exporter itself, with another NVML.

    python -m bench.stage FOLDER [flags of mps-exporter]

FOLDER is that of a bench.host.FullHost in another process, which tells through files what its GPUs
do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mps_exporter.memory import limit_malloc_arenas

limit_malloc_arenas()  # as exporter/mps_exporter/cli.py does before it imports the rest

from bench.host import TickingNvml, uuid_of  # noqa: E402
from mps_exporter import cli  # noqa: E402
from mps_exporter.sources import live_host  # noqa: E402
from mps_exporter.sources.nvml import NvmlSession  # noqa: E402
from mps_exporter.sources.nvml.accumulators import GPM_ALL  # noqa: E402
from mps_exporter.sources.nvml.api import Device, ListedProcess, ProcessKind  # noqa: E402
from tests.support.fake_nvml import FakeDevice  # noqa: E402


class StagedNvml(TickingNvml):
    """The stand-in for NVML, told by files what is so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, Any]] = {}
        metrics = dict.fromkeys(GPM_ALL, 50.0)
        count = len(self._read("nvml.json", []))
        super().__init__(
            *(
                FakeDevice(uuid_of(gpu), busy=lambda now: now * 0.6, metrics=metrics)
                for gpu in range(count)
            )
        )

    def _read(self, name: str, default: Any) -> Any:
        path = self._folder / name
        try:
            stamp = path.stat().st_mtime_ns
        except FileNotFoundError:
            return default
        if self._seen.get(name, (0, None))[0] != stamp:
            self._seen[name] = stamp, json.loads(path.read_text())
        return self._seen[name][1]

    def processes(self, device: Device, kind: ProcessKind) -> list[ListedProcess]:
        """Read the list of this kind."""
        self.fail("", self._read("failing.json", None))
        super().processes(device, kind)
        number = next(n for n, gpu in enumerate(self.gpus) if gpu is device)
        return [ListedProcess(*row) for row in self._read("nvml.json", [])[number][kind]]

    def system_text(self, function: str) -> str:
        """Read a version; NVML may be asked this when nothing else works."""
        self.fail("", self._read("failing.json", None))
        return super().system_text(function)


def main() -> int:
    """Run it."""
    folder = Path(sys.argv[1])
    live_host.NvmlSession = lambda options: NvmlSession(StagedNvml(folder), None, options)  # type: ignore[assignment, misc]
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
