"""``mps-exporter record``: writes the observations of this host's sources to a file."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

from mps_exporter.collector import Collector
from mps_exporter.commands import on_signals
from mps_exporter.flags import Settings, StartError
from mps_exporter.logging import print_status, show_progress
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.recording import RecordingWriter, make_header

FLUSH_INTERVAL_SECONDS = 2.0
"""Interval between writes to the file, and maximum loss if the recorder is killed."""


async def record(settings: Settings) -> int:
    path = Path(settings.record_file)
    stop = asyncio.Event()
    # A closed terminal (SIGHUP) ends a recording like Ctrl-C: the file is complete up to then.
    on_signals(stop.set, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    host = LiveHost(settings)
    try:
        gpus = await host.read_gpus(settings.collector_timeout) if settings.collector_nvml else None
        header = make_header(
            gpus,
            host.now(),
            settings.record_scenario or "no description given",
            anonymised=settings.record_anonymise,
        )
        writer = RecordingWriter(path, header)
        collector = Collector(host, settings, on_observation=writer.add)
        tasks = [
            asyncio.create_task(collector.run_between_collections()),
            asyncio.create_task(_flush_periodically(writer, stop)),
        ]
        end = time.monotonic() + settings.record_duration
        try:
            while not stop.is_set() and (left := end - time.monotonic()) > 0:
                show_progress(f"recording to {path}: {left:.0f} s left, Ctrl-C ends it now")
                await collector.collect()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), min(settings.record_interval, left))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()
    finally:
        await host.close()
    show_progress("")
    if writer.failure is not None:
        raise StartError(
            f"cannot write {path}: {writer.failure.strerror}; what was written until then can be "
            "read"
        )
    print_status(
        f"Recorded {path} ({path.stat().st_size} bytes). "
        f"Look at it with: mps-exporter demo {path}\n"
    )
    return 0


async def _flush_periodically(writer: RecordingWriter, stop: asyncio.Event) -> None:
    """Write the recorded observations to the file; stop when that fails."""
    while writer.failure is None:
        await asyncio.sleep(FLUSH_INTERVAL_SECONDS)
        writer.flush()
    stop.set()
