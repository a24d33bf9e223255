"""``mps-exporter record``: writes what this host's sources read to a file."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import mps_exporter
from mps_exporter.collector import Collector
from mps_exporter.commands.common import StartError, on_signals
from mps_exporter.config import Settings
from mps_exporter.observations import NvmlObservation
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.recording import Header, RecordingError, RecordingWriter
from mps_exporter.terminal import print_status, show_progress

FLUSH_SECONDS = 2.0
"""A recorder that is killed loses no more than this."""


async def record(
    settings: Settings,
    *,
    path: Path,
    duration_seconds: float,
    interval_seconds: float,
    anonymise: bool,
    scenario: str,
) -> int:
    """Write what this host's sources read to a file."""
    stop = asyncio.Event()
    # A terminal that is closed (SIGHUP) ends a recording like Ctrl-C: what there is, is kept.
    on_signals(stop.set, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    host = LiveHost(settings)
    try:
        gpus = await host.read_gpus(settings.collector_timeout) if settings.collector_nvml else None
        header = Header(
            scenario=scenario or "no description given",
            machine=_machine(gpus, anonymise=anonymise),
            driver_version=(gpus.driver_version if gpus else None) or "unknown",
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
            started_at=host.now(),
            exporter_version=mps_exporter.__version__,
            anonymised=anonymise,
        )
        writer = _open_recording(path, header)
        collector = Collector(host, settings, on_observation=writer.add)
        tasks = [
            asyncio.create_task(collector.run_between_collections()),
            asyncio.create_task(_flush_periodically(writer, stop)),
        ]
        end = time.monotonic() + duration_seconds
        try:
            while not stop.is_set() and (left := end - time.monotonic()) > 0:
                show_progress(f"recording to {path}: {left:.0f} s left, Ctrl-C ends it now")
                await collector.collect()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), min(interval_seconds, left))
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
    """Bring what was recorded to the file, again and again; stop when that fails."""
    while writer.failure is None:
        await asyncio.sleep(FLUSH_SECONDS)
        writer.flush()
    stop.set()


def _open_recording(path: Path, header: Header) -> RecordingWriter:
    try:
        return RecordingWriter(path, header)
    except RecordingError as error:
        raise StartError(str(error)) from error


def _machine(gpus: NvmlObservation | None, *, anonymise: bool) -> str:
    names = [gpu.name or "GPU" for gpu in gpus.gpus] if gpus is not None else []
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    address_text = f"Linux {platform.release()}"
    if not anonymise:
        address_text = f"{socket.gethostname()}, {address_text}"
    return f"{counts or 'no GPU'}, {address_text}"
