"""Looks at this host once: for the doctor, and for node_exporter's textfile collector."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mps_exporter.collector import Collector
from mps_exporter.commands.common import StartError
from mps_exporter.config import Settings
from mps_exporter.diagnostics import findings
from mps_exporter.mps.server_queries import SETTLING_SECONDS
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.terminal import print_output

MEASURING_SECONDS = 0.55
"""From the first reading of the GPUs to the second: their activity is that of an interval, which
NVML's sources need to be 0.5 s long."""

CONFIRMING_SECONDS = 1.5
"""From the first collection to the second where the first one found something: a server must be 1 s
old before it is asked, and a process must look stranded for 1 s before it is called so."""


async def look(
    settings: Settings,
    *,
    activity: bool = True,
    meanwhile: Callable[[Snapshot], object] | None = None,
) -> Snapshot:
    """Collect twice: the second time from a host that is known.

    Args:
        settings: Of the collector.
        activity: Whether it matters how busy the GPUs are, which takes an interval to see.
        meanwhile: Called in the pause between the two, on a thread, with the first snapshot.
    """
    host = LiveHost(replace(settings, mps_min_query_interval=0.0), brief=True)
    collector = Collector(host, settings)
    began = time.monotonic()
    try:
        first = await collector.collect()
        if meanwhile is not None:
            await asyncio.to_thread(meanwhile, first)
        await asyncio.sleep(pause_seconds(first, time.monotonic() - began, activity=activity))
        return await collector.collect()
    finally:
        await host.close()


def pause_seconds(first: Snapshot, elapsed: float, *, activity: bool = True) -> float:
    """Return how long to wait for the second collection, so long after the first one began."""
    wanted = CONFIRMING_SECONDS
    if _is_settled(first):
        wanted = MEASURING_SECONDS if activity else 0.0
    return max(0.0, wanted - elapsed)


def _is_settled(snapshot: Snapshot) -> bool:
    """Whether a second collection can confirm nothing that the first one could not tell."""
    # What cannot be read now cannot be read in a second either.
    states = [one.advice for one in findings(snapshot) if one.advice.kind == "state"]
    starts = [server.start_time_seconds for daemon in snapshot.daemons for server in daemon.servers]
    return (
        all(advice.severity == "info" for advice in states)
        and not any(gpu.stranded_pids for gpu in snapshot.gpus)
        and not any(daemon.waits for daemon in snapshot.daemons)
        and all(
            start is not None and snapshot.taken_at - start >= SETTLING_SECONDS for start in starts
        )
    )


async def print_metrics(settings: Settings) -> int:
    """Print the metrics of one look."""
    try:
        print_output((await _metrics(settings)).decode().removesuffix("\n"))
    except OSError as error:
        raise StartError(f"cannot print the metrics: {error.strerror}") from error
    return 0


async def write_metrics(settings: Settings, path: Path) -> int:
    """Write the metrics of one look to a file, which is complete at every moment."""
    page = await _metrics(settings)
    try:
        write_whole(path, page)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from error
    return 0


async def _metrics(settings: Settings) -> bytes:
    # The doctor needs none of it, and starts 0.1 s sooner without.
    from mps_exporter.backend import build
    from mps_exporter.metrics.content_format import TEXT_0_0_4
    from mps_exporter.metrics.exposition import Encoder
    from mps_exporter.metrics.render import render
    from mps_exporter.metrics.sparse import SparseSeries

    snapshot = await look(settings)
    # Counters begin at 0 with each start of the exporter: here they would never be anything else.
    families = [
        family
        for family in render(snapshot, build())
        if family.spec.kind not in {"counter", "histogram"}
    ]
    return Encoder().encode(SparseSeries().shown(families), (), TEXT_0_0_4)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by another: a reader sees the old one or the new one, whole.

    Raises:
        OSError: It cannot be written; the old one stays.
    """
    # node_exporter reads every *.prom of the directory: the name of the unfinished one ends
    # otherwise.
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)  # node_exporter is another user
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise
