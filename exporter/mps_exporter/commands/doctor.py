"""``mps-exporter doctor``: looks at the host, or at a recording, and prints a report."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from mps_exporter.collector import Collector
from mps_exporter.commands import doctor_report, process_report
from mps_exporter.commands.common import StartError, load_recording
from mps_exporter.commands.doctor_processes import Whom, check
from mps_exporter.config import Settings
from mps_exporter.replay import advance
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.replay_host import ReplayHost
from mps_exporter.terminal import print_output, supports_colour

PAUSE_SECONDS = 1.5
"""Between the two looks: one server must be this old before it is asked."""


async def diagnose(
    settings: Settings,
    *,
    as_json: bool,
    recording: Path | None,
    at_seconds: float | None,
    whom: Whom | None = None,
) -> int:
    """Look at the host once and print what is found; gives the exit status.

    Args:
        settings: Of the collector.
        as_json: Print JSON.
        recording: Look at this instead of the host.
        at_seconds: Of the recording: the moment; None: its end.
        whom: Say what is wrong with these processes, not with the host.
    """
    if recording is None:
        snapshot = await _collect_twice(settings)
    else:
        snapshot = await _collect_from_recording(settings, recording, at_seconds)
    paint = (
        doctor_report.coloured if supports_colour(sys.stdout, os.environ) else doctor_report.plain
    )
    if whom is None:
        lines = doctor_report.report(snapshot, paint)
        text = doctor_report.as_json(snapshot) if as_json else "\n".join(lines)
        status = doctor_report.exit_status(snapshot)
    else:
        procfs = settings.path_procfs if recording is None else None
        checks = check(whom, snapshot, procfs)
        text = process_report.as_json(checks) if as_json else process_report.text(checks, paint)
        status = process_report.exit_status(checks)
    try:
        print_output(text)
    except OSError as error:
        raise StartError(f"cannot print what was found: {error.strerror}") from error
    return status


async def _collect_twice(settings: Settings) -> Snapshot:
    """Look twice: the second look is one at a host that is known.

    By then a server is old enough to be asked, and the GPUs' activity has an interval to be of.
    """
    host = LiveHost(replace(settings, mps_min_query_interval=0.0))
    collector = Collector(host, settings)
    try:
        await collector.collect()
        await asyncio.sleep(PAUSE_SECONDS)
        return await collector.collect()
    finally:
        await host.close()


async def _collect_from_recording(
    settings: Settings, path: Path, at_seconds: float | None
) -> Snapshot:
    recording = load_recording(path)
    length = recording.duration_seconds
    if at_seconds is not None and at_seconds > length:
        raise StartError(f"--at: {path} ends {length:.1f} s after its start")
    host = ReplayHost(recording)
    return await advance(
        host, Collector(host, settings), length if at_seconds is None else at_seconds
    )
