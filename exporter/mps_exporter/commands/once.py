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
from mps_exporter.mps.policy import MIN_QUERY_AGE_SECONDS
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.terminal import print_output

MEASURING_SECONDS = 0.55
"""From the first reading of the GPUs to the second, for metrics: their activity is that of an
interval."""

BRIEF_PAUSE_SECONDS = 0.12
"""The same for a person, of whom the whole look takes a second at most. Two looks are always a few
milliseconds further apart than this pause, and GPM needs 0.1 s."""

CONFIRMING_SECONDS = 1.5
"""From the first collection to the second where the first one found something: a process must look
stranded for 1 s before it is called so."""

MIN_SERVER_AGE_SECONDS = MIN_QUERY_AGE_SECONDS + 0.05
"""So old a server must be before it is asked."""


async def look(
    settings: Settings,
    *,
    pause: Callable[[Snapshot], float] = lambda _: MEASURING_SECONDS,
    meanwhile: Callable[[Snapshot], object] | None = None,
) -> Snapshot:
    """Collect twice: the second time from a host that is known.

    Args:
        settings: Of the collector.
        pause: How long to wait between the two where there is nothing to confirm, in seconds.
        meanwhile: Called in that pause, on a thread, with the first snapshot.
    """
    host = LiveHost(replace(settings, mps_min_query_interval=0.0), brief=True)
    collector = Collector(host, settings)
    began = time.monotonic()
    try:
        first = await collector.collect()
        ended = time.monotonic()
        if meanwhile is not None:
            await asyncio.to_thread(meanwhile, first)
        await asyncio.sleep(pause_until(first, began, ended, pause(first)) - time.monotonic())
        return await collector.collect()
    finally:
        await host.close()


def pause_until(first: Snapshot, began: float, ended: float, seconds: float) -> float:
    """Return when the second collection begins.

    Args:
        first: The first one.
        began: When that was.
        ended: When it ended.
        seconds: How long to wait where there is nothing to confirm.
    """
    if not _is_settled(first):
        return began + CONFIRMING_SECONDS
    starts = [one.start_time_seconds for daemon in first.daemons for one in daemon.servers]
    youngest = min(
        (first.taken_at - at for at in starts if at is not None), default=MIN_SERVER_AGE_SECONDS
    )
    return ended + max(seconds, min(MIN_SERVER_AGE_SECONDS - youngest, MIN_SERVER_AGE_SECONDS))


def brief_pause(first: Snapshot) -> float:
    """The pause where a person waits: only for GPUs that are in use, or may be."""
    used = any(gpu.observation.processes != () for gpu in first.gpus)
    return BRIEF_PAUSE_SECONDS if used else 0.0


def _is_settled(snapshot: Snapshot) -> bool:
    """Whether a second collection can confirm nothing that the first one could not tell."""
    # What cannot be read now cannot be read in a second either.
    states = [one for one in findings(snapshot) if one.advice.kind == "state"]
    starts = [server.start_time_seconds for daemon in snapshot.daemons for server in daemon.servers]
    return (
        all(one.severity == "info" for one in states)
        and not any(gpu.seems_stranded for gpu in snapshot.gpus)
        and not any(daemon.waits for daemon in snapshot.daemons)
        and None not in starts
    )


async def print_metrics(settings: Settings) -> int:
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
    from mps_exporter.metrics.render import SparseSeries, render

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
