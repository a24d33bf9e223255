"""``mps-exporter doctor``: looks at the host, or at a recording, and prints a report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mps_exporter.commands.common import StartError
from mps_exporter.commands.once import brief_pause, look
from mps_exporter.config import Settings
from mps_exporter.diagnostics import recent_incidents
from mps_exporter.observations import DaemonConditions, Leftovers
from mps_exporter.snapshot import Snapshot
from mps_exporter.terminal import print_output, supports_colour

if TYPE_CHECKING:
    from mps_exporter.commands.process_report import ProcessSelection


async def diagnose(
    settings: Settings,
    *,
    as_json: bool,
    recording: Path | None,
    at_seconds: float | None,
    check: str | None = None,
    selection: ProcessSelection | None = None,
) -> int:
    """Look at the host once and print what is found; gives the exit status.

    Args:
        settings: Of the collector.
        as_json: Print JSON.
        recording: Look at this instead of the host.
        at_seconds: Of the recording: the moment; None: its end.
        check: Report only this, in one line: see doctor_report.status_of_check.
        selection: Say what is wrong with these processes, not with the host.
    """
    traces = Leftovers()
    if recording is None and check is None and selection is None:

        def look_around(first: Snapshot) -> None:
            nonlocal traces
            traces = _traces(first, settings.path_procfs)
            import mps_exporter.commands.doctor_report  # noqa: F401 - while the GPUs are measured

        snapshot = await look(settings, pause=brief_pause, meanwhile=look_around)
    elif recording is None:
        # Of one process it does not matter how busy the GPUs are.
        snapshot = await look(settings, pause=(lambda _: 0.0) if selection else brief_pause)
    else:
        snapshot = await _collect_from_recording(settings, recording, at_seconds)
    from mps_exporter.commands import doctor_report

    if check is not None:
        status, line = doctor_report.status_of_check(snapshot, check)
        _print(line)
        return status
    paint = (
        doctor_report.coloured if supports_colour(sys.stdout, os.environ) else doctor_report.plain
    )
    procfs = settings.path_procfs if recording is None else None
    recent = recent_incidents(snapshot, views=_failing(snapshot, procfs))
    if selection is None:
        diagnosis = doctor_report.Diagnosis(snapshot, recent, traces)
        lines = doctor_report.diagnosis_lines(diagnosis, paint)
        _print(doctor_report.diagnosis_as_json(diagnosis) if as_json else "\n".join(lines))
        return doctor_report.diagnosis_exit_status(diagnosis)
    # A diagnosis of the host is made without these, and sooner.
    from mps_exporter.commands import process_report

    checks = process_report.checks_of_processes(selection, snapshot, recent, procfs)
    _print(
        process_report.checks_as_json(checks)
        if as_json
        else process_report.checks_as_text(checks, paint)
    )
    return process_report.checks_exit_status(checks)


def _traces(snapshot: Snapshot, procfs: str) -> Leftovers:
    # A recording is looked at without it.
    from mps_exporter.sources.process_view import find_leftovers

    return find_leftovers([one.facts for one in snapshot.daemons if one.facts], procfs)


def _failing(snapshot: Snapshot, procfs: str | None) -> dict[str, DaemonConditions]:
    """What /proc shows of the daemons whose servers could not start."""
    views = {}
    for daemon in snapshot.daemons:
        failed = [one for one in daemon.incidents if one.kind == "server_start_failed"]
        if failed and daemon.facts is not None and procfs is not None:
            # Only now: it is the rare case.
            from mps_exporter.sources.process_view import view_daemon

            uids = {one.uid for one in failed if one.uid is not None}
            views[daemon.pipe_directory] = view_daemon(daemon.facts, uids, procfs)
    return views


def _print(text: str) -> None:
    try:
        print_output(text)
    except OSError as error:
        raise StartError(f"cannot print what was found: {error.strerror}") from error


async def _collect_from_recording(
    settings: Settings, path: Path, at_seconds: float | None
) -> Snapshot:
    # A live host is diagnosed without these, and 0.05 s sooner.
    from mps_exporter.collector import Collector
    from mps_exporter.commands.common import load_recording
    from mps_exporter.replay import advance
    from mps_exporter.sources.replay_host import ReplayHost

    recording = load_recording(path)
    length = recording.duration_seconds
    if at_seconds is not None and at_seconds > length:
        raise StartError(f"--at: {path} ends {length:.1f} s after its start")
    host = ReplayHost(recording)
    return await advance(
        host, Collector(host, settings), length if at_seconds is None else at_seconds
    )
