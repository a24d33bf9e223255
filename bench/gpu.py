"""On a host with a GPU: one reading of its NVML beside one run of nvidia-smi.

python -m bench.gpu
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

from bench.collection import measure
from mps_exporter.collector import Collector
from mps_exporter.config import Settings
from mps_exporter.metrics.content_format import TEXT_0_0_4
from mps_exporter.metrics.exposition import Encoder
from mps_exporter.metrics.render import Build, render
from mps_exporter.sources.live_host import LiveHost

SMI = (
    "--query-gpu=utilization.gpu,memory.used,power.draw,temperature.gpu,clocks.sm",
    "--format=csv,noheader",
)


def resident_megabytes() -> float:
    """Give what this process holds now."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line) / 1024


async def _measure(smi: str) -> list[str]:
    settings = Settings(mps_min_query_interval=0.0)
    before = resident_megabytes()
    host = LiveHost(settings)
    collector = Collector(host, settings)

    encoder = Encoder()

    async def scrape() -> None:
        encoder.encode(render(await collector.collect(), Build("bench", "", "")), (), TEXT_0_0_4)

    async def tool() -> None:
        await asyncio.to_thread(subprocess.run, [smi, *SMI], capture_output=True, check=True)

    try:
        await host.read_gpus(10)
        library = resident_megabytes() - before
        await collector.collect()
        ours, reference = await measure([scrape, tool])
    finally:
        await host.close()
    return [
        f"this host: one collection       {ours}",
        f"           nvidia-smi           {reference}",
        f"           ours / nvidia-smi    {ours.wall / reference.wall:.2f} of its wall time",
        f"           NVML, first reading  {library:.1f} MB of memory, after {before:.1f} MB",
    ]


def report() -> list[str]:
    """Measure and tell it in words; without a GPU say so."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ["this host: no nvidia-smi here, so nothing to compare with"]
    return asyncio.run(_measure(smi))


if __name__ == "__main__":
    print("\n".join(report()))
