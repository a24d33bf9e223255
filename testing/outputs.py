"""All texts that the exporter's programs give about a snapshot."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape

from mps_exporter.commands.doctor_report import (
    Diagnosis,
    checks_as_text,
    diagnosis_as_json,
    diagnosis_lines,
    plain,
)
from mps_exporter.findings import findings, recent_incidents
from mps_exporter.findings.one_process import check_process
from mps_exporter.snapshot import Snapshot
from mps_exporter.web.policy import WebOptions
from mps_exporter.web.status_api import make_status, to_json
from mps_exporter.web.status_page import render_page


def words_of(page: str) -> str:
    """Return the text of a page, a line for each element."""
    parts = (" ".join(unescape(part).split()) for part in re.split(r"<[^>]*>", page))
    return "\n".join(filter(None, parts))


def strings_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


def texts_of(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Page, API and doctor: (source, text)."""
    options = WebOptions()
    status = make_status(snapshot, options)
    yield "page", words_of(render_page(status, options))
    yield "api", "\n".join(strings_in(json.loads(to_json(status))))
    diagnosis = Diagnosis(snapshot, recent_incidents(snapshot))
    yield "doctor", "\n".join(diagnosis_lines(diagnosis, plain))
    yield "doctor --json", "\n".join(strings_in(json.loads(diagnosis_as_json(diagnosis))))
    yield from texts_of_processes(snapshot)


def texts_of_findings(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield the name of each finding and recent incident, with its texts and commands."""
    for one in (*findings(snapshot), *recent_incidents(snapshot)):
        commands = [action.command for action in one.actions]
        yield one.advice.name, "\n".join((f"{one.evidence} {one.remedy}", *commands))


def texts_of_processes(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield the doctor's texts for each process."""
    found = (*findings(snapshot), *recent_incidents(snapshot))
    pids = {client.pid for d in snapshot.daemons for s in d.servers for client in s.clients}
    pids |= {wait.pid for daemon in snapshot.daemons for wait in daemon.waits}
    for pid in sorted(pids):
        checks = {pid: check_process(pid, snapshot, found, None)}
        yield f"doctor --pid {pid}", checks_as_text(checks)
