"""``mps-exporter record``: writes the observations of this host's sources to a file."""

import asyncio
import contextlib
import gzip
import json
import os
import signal
import time
from pathlib import Path

import mps_exporter
from mps_exporter.backend import play
from mps_exporter.collector import Collector
from mps_exporter.commands import on_signals
from mps_exporter.commands.doctor_report_and_status import Diagnosis, diagnosis_as_json
from mps_exporter.findings import recent_incidents
from mps_exporter.findings.finding import DOCS, page_url
from mps_exporter.flags import Settings, StartError
from mps_exporter.hindsight import latest_recording
from mps_exporter.humanize import printable
from mps_exporter.logging import print_status, show_progress
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.recording import (
    RecordingError,
    RecordingWriter,
    create_private,
    make_header,
    read_recording,
)

FLUSH_INTERVAL_SECONDS = 2.0
"""Interval between writes to the file, and maximum loss if the recorder is killed."""


async def record(settings: Settings) -> int:
    if settings.record_incident is not None:
        return await _report_bug(settings, settings.record_incident)
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
            settings,
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


async def _report_bug(settings: Settings, incident: str) -> int:
    """Write a bug report: a recording, with the doctor's findings in it appended."""
    source = Path(incident) if incident != "latest" else latest_recording(settings.record_directory)
    if source is None:
        raise StartError("no recording in --record.directory: name one that the page gave")
    path, recording = Path(settings.record_file), read_recording(source)
    snapshot, header = await play(recording, settings, recording.duration_seconds), recording.header
    seen = Diagnosis(snapshot, recent_incidents(snapshot))
    added = {"version": mps_exporter.__version__, "doctor": json.loads(diagnosis_as_json(seen))}
    try:
        data = source.read_bytes() + gzip.compress(json.dumps(added).encode() + b"\n")
        os.close(create_private(path, data))
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from error
    try:
        read_recording(path)  # fails for a recording that was cut off
    except RecordingError:
        if path.is_file() and not path.is_symlink():  # not a device or a link
            path.unlink()
        raise
    names = "without names" if header.anonymised else "WITH the names of users, programs and paths"
    names_found = dict.fromkeys(one.advice.name for one in (*seen.found, *seen.recent))
    found = ", ".join(names_found) or "nothing"
    print_status(
        f"Wrote {path} ({len(data)} bytes), {names}: the recording of an incident\n"
        f"({printable(header.scenario)}), the exporter's version and flags, and doctor's findings\n"
        f"({found}).\nRead it before you attach it to an issue: zcat {path}\n"
        f"{page_url('recordings.md')}\n{DOCS.removesuffix('blob/main/')}issues\n"
    )
    return 0


async def _flush_periodically(writer: RecordingWriter, stop: asyncio.Event) -> None:
    """Write the recorded observations to the file; stop when that fails."""
    while writer.failure is None:
        await asyncio.sleep(FLUSH_INTERVAL_SECONDS)
        writer.flush()
    stop.set()
