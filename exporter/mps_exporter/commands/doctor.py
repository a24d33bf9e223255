"""Collections of a short run: ``mps-exporter doctor``, ``--once`` and ``--textfile``."""

import asyncio
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.collector import Collector
from mps_exporter.commands import doctor_report_and_status as report
from mps_exporter.findings import ADVICE, recent_incidents
from mps_exporter.findings.before_kill import before_kill
from mps_exporter.findings.doctor_pid import check_process, pids_of
from mps_exporter.flags import InvalidSettingError, Settings, StartError
from mps_exporter.hindsight import latest_recording
from mps_exporter.logging import print_output, supports_colour
from mps_exporter.observations import Leftovers, ProcessFacts, ProcessView
from mps_exporter.snapshot import Snapshot
from mps_exporter.sources import process_view
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.live_host import LiveHost
from mps_exporter.sources.processes import Processes

MEASURING_SECONDS = 0.55  # Minimum time between two collections, to measure GPU activity.
CONFIRMING_SECONDS = 1.5
"""Time from the start of the first collection to the second: a process must look stranded for 1 s
before it is reported, and a server be 1 s old for queries."""


async def collect_twice(settings: Settings) -> Snapshot:
    """Return the second of two collections: activity and some findings need two."""
    host = LiveHost(replace(settings, mps_min_query_interval=0.0))
    collector = Collector(host, settings)
    began = time.monotonic()
    try:
        await collector.collect()
        await asyncio.sleep(max(MEASURING_SECONDS, began + CONFIRMING_SECONDS - time.monotonic()))
        return await collector.collect()
    finally:
        await host.close()


async def diagnose(settings: Settings) -> int:
    """Print a report, a check, or advice on ending processes; return the exit status."""
    check = wanted = settings.doctor_check
    if check is not None and check not in report.CHECKS:
        named = (one for one in report.CHECKS[1:] if ADVICE[one].alert == check)
        if (check := next(named, None)) is None:
            why = f"--check: no finding {wanted!r}; see docs/troubleshooting.md"
            raise InvalidSettingError(why)
    live = settings.doctor_recording is None
    snapshot = await (collect_twice(settings) if live else _collect_from_recording(settings))
    if pids := list(dict.fromkeys(settings.doctor_before_kill)):
        seen = Processes(settings.path_procfs if live else os.devnull)  # A recording has no files.
        # Without a UID: exited, for example since mps-scancel listed it.
        uids = [(pid, seen.status(pid).uid) for pid in _with_descendants(pids, seen)]
        ends = [
            before_kill(pid, snapshot, uid, seen.hidden, gone=live and uid is None)
            for pid, uid in uids
        ]
        given = ends[: len(pids)]
        shown = [one for one in ends if one.in_danger] or given
        if (as_json := settings.doctor_json) and not pids[1:]:
            below = tuple(one for one in ends[1:] if one.in_danger)
            danger = given[0].in_danger or bool(below)
            shown = [replace(given[0], in_danger=danger, children=below)]
        status, text = report.status_of_ends(shown, as_json=as_json, many=len(pids) > 1)
        if status and not (as_json or any(one.in_danger for one in given)):
            text = f"What it has started mostly ends with it.\n{text}"
    elif check is not None:
        status, text = report.status_of_check(snapshot, check)
    else:
        status, text = _report(snapshot, settings, settings.path_procfs if live else None)
    print_output(text)
    return status


def _report(snapshot: Snapshot, settings: Settings, procfs: str | None) -> tuple[int, str]:
    """Return the exit status and the report. procfs: None for a recording."""
    colour = supports_colour(sys.stdout, os.environ)
    paint = report.coloured if colour else report.plain
    about_host = {settings.doctor_pid, settings.doctor_user, settings.doctor_job} == {None}
    pids = [] if about_host else selected_pids(settings, snapshot)
    read = _read_in_time({} if procfs is None else _reads(snapshot, pids, procfs))
    starts = (daemon.pipe_directory for daemon in snapshot.daemons)
    views = {name: read[name] for name in starts if read.get(name) is not None}
    recent = recent_incidents(snapshot, views=views)
    traces = replace(read.get(_LEFT) or Leftovers(), directories=read.get(_DIRECTORIES) or ())
    unread = tuple(str(name) for name, result in read.items() if result is None)
    kept = None if procfs is None else latest_recording(settings.record_directory)
    diagnosis = report.Diagnosis(snapshot, recent, traces, unread, kept)
    if about_host:
        status = report.diagnosis_exit_status(diagnosis)
        if settings.doctor_json:
            return status, report.diagnosis_as_json(diagnosis)
        ports = [] if procfs is None else port_lines()
        return status, "\n".join([*report.diagnosis_lines(diagnosis, paint), *ports])
    found = (*diagnosis.found, *recent)
    checks = {}
    for pid in pids:
        view = None if procfs is None else read[pid] or ProcessView(pid, reading_hangs=True)
        checks[pid] = check_process(pid, snapshot, found, view)
    status = report.checks_exit_status(checks)
    if settings.doctor_json:
        return status, report.checks_as_json(checks)
    return status, report.checks_as_text(checks, paint)


def port_lines(ports: Iterable[int] = (9400, 9401)) -> list[str]:
    """Return lines that name the exporters on the ports in use; none if all are free."""
    owners = _read_in_time({port: partial(_port_owner, port) for port in ports})
    used = [f"{port} {owner or 'not known'}" for port, owner in owners.items() if owner != "free"]
    return ["", f"Ports: {', '.join(used)}"] if used else []


def _port_owner(port: int) -> str:
    with suppress(OSError):
        try:
            one = socket.create_connection(("127.0.0.1", port), timeout=0.5)
        except ConnectionRefusedError:
            return "free"
        with one, one.makefile("rb") as page:
            one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            if found := re.search(rb"# HELP (mps|DCGM)_", page.read(1 << 16)):
                return "mps-exporter" if found[1] == b"mps" else "dcgm-exporter"
    return ""


_LEFT, _DIRECTORIES = "what MPS left on the host", "directories where a daemon has run"


def _reads(
    snapshot: Snapshot, pids: Iterable[int], procfs: str
) -> dict[Hashable, Callable[[], Any]]:
    """Return the calls that read the doctor's own facts, by PID, pipe directory, or title."""
    facts = [daemon.facts for daemon in snapshot.daemons]
    reads: dict[Hashable, Callable[[], Any]] = {
        _LEFT: partial(process_view.find_leftovers, facts, procfs),
        _DIRECTORIES: partial(process_view.find_directories, facts),
    }
    for daemon in snapshot.daemons:
        # The conditions in /proc of the daemons whose servers could not start.
        failed = [one for one in daemon.incidents if one.kind == "server_start_failed"]
        if failed:
            uids = {one.uid for one in failed if one.uid is not None}
            view = partial(process_view.view_daemon, daemon.facts, uids, procfs)
            reads[daemon.pipe_directory] = view
    reads |= {pid: partial(process_view.view_process, pid, facts, procfs) for pid in pids}
    return reads


def _read_in_time(reads: Mapping[Hashable, Callable[[], Any]]) -> dict[Hashable, Any]:
    """Call these functions on threads; return the results, None after a failure or a timeout.

    Users choose the directories: any of them may be in a file system that does not answer.
    """
    calls = BlockingCalls[Any]()
    calls.start({name: (None, function) for name, function in reads.items()})
    calls.wait(policy.DOCTOR_TIMEOUT_SECONDS)
    found = calls.results(reads)
    return {name: found.get(name) for name in reads}


def _with_descendants(pids: Iterable[int], processes: Processes) -> list[int]:
    """Return these processes and those that they have started, which mostly end with them."""
    found = list(pids)
    for pid in found:
        found += [one for one in processes.children(pid) if one not in found]
    return found


def selected_pids(settings: Settings, snapshot: Snapshot) -> list[int]:
    pid, uid, job = settings.doctor_pid, settings.doctor_user, settings.doctor_job
    waiting = dict[int, ProcessFacts]()
    if job is not None and settings.doctor_recording is None:
        waits = [wait.pid for daemon in snapshot.daemons for wait in daemon.waits if wait.pid]
        waiting, _ = Processes(settings.path_procfs).identify(waits)
    pids = [pid] if pid else pids_of(snapshot, uid=uid, job=job, waiting=waiting.values())
    if not pids:
        name = f"user {uid}" if uid is not None else f"pod or job {job!r}"
        live = settings.doctor_recording is None
        where = "on this host" if live else "at this time of the recording (--at)"
        hidden = live and Processes(settings.path_procfs).hidden
        raise StartError(
            f"no process of {name} was seen {where} to wait for MPS, to be its client, or to "
            f"have a context on a GPU{f' ({hidden} cannot be seen)' if hidden else ''}. "
            "That proves nothing about MPS: end no process, check the name, or use --pid"
        )
    return pids


async def _collect_from_recording(settings: Settings) -> Snapshot:
    from mps_exporter.backend import play
    from mps_exporter.sources.recording import read_recording

    recording = read_recording(Path(settings.doctor_recording or ""))
    length, at = recording.duration_seconds, settings.doctor_at
    if at is not None and at > length:
        raise StartError(f"--at: {settings.doctor_recording} ends {length:.1f} s after its start")
    return await play(recording, settings, length if at is None else at)


# ------------------------------------------------------------------ --once and --textfile


async def expose_once(settings: Settings) -> int:
    page, file = _encode_once(await collect_twice(settings)), settings.serve_textfile
    if file is None:
        print_output(page.decode().removesuffix("\n"))
        return 0
    try:
        write_atomically(Path(file), page)
    except OSError as error:
        raise StartError(f"cannot write {file}: {error.strerror}") from error
    return 0


def _encode_once(snapshot: Snapshot) -> bytes:
    from mps_exporter.backend import build
    from mps_exporter.metrics import SparseSeries, render
    from mps_exporter.metrics.exposition import TEXT_0_0_4, encode

    # Counters begin at 0 with each start of the exporter: a short run has nothing to count.
    counted = {"counter", "histogram"}
    families = [one for one in render(snapshot, build()) if one.spec.kind not in counted]
    return encode(SparseSeries().shown(families), (), TEXT_0_0_4)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file; a reader sees the old or the new content, and after an error the old."""
    # node_exporter reads every *.prom of the directory, so the temporary name ends differently.
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
