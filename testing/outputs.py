"""All texts that the exporter's programs give about a snapshot, and what they tell to end."""

import json
import re
from collections.abc import Iterator
from html import unescape

from mps_exporter.commands.doctor_report_and_status import (
    Diagnosis,
    checks_as_text,
    diagnosis_as_json,
    diagnosis_lines,
    plain,
)
from mps_exporter.findings import findings, recent_incidents
from mps_exporter.findings.doctor_pid import check_process
from mps_exporter.snapshot import Snapshot
from mps_exporter.web.status_api import make_status, to_json
from mps_exporter.web.status_page import render_page
from testing.snapshots import process_using


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
    status = make_status(snapshot)
    yield "page", words_of(render_page(status))
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
    known = {
        (one.pid, one.uid, daemon.pipe_directory)
        for daemon in snapshot.daemons
        for server in daemon.servers
        for one in server.clients
    }
    known |= {(one.pid, one.uid, d.pipe_directory) for d in snapshot.daemons for one in d.waits}
    for pid, uid, pipe in sorted(known, key=str):
        for view in (None, process_using(pipe, pid, uid=uid)):
            checks = {pid: check_process(pid, snapshot, found, view)}
            yield f"doctor --pid {pid}", checks_as_text(checks)


_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])|\n+")
_ENDING = re.compile(
    r"\b(?:p?kill(?:all)?|end|terminate|stop|scancel|SIGKILL|SIGTERM|terminate_client"
    r"|(?:must|can|may|should) be (?:ended|killed|terminated|stopped))\b",
    re.IGNORECASE,
)
_HARMLESS = re.compile(
    r"\b(?:do not|never|must not|cannot|not to|nor) (?:\w+ )?(?:kill|end|stop|terminate)\b"
    r"|\bkill -CONT\b[\d ]*|\bend only what the error hit\b"
    r"|\b(?:at|in|to|by|until|before|after) (?:the|its|an) end\b|\bthe end of\b|\bits end took\b"
    r"|\b(?:ask|wait for|waits for|let)\b[^.;]*?\bend\b"
    r"|\bto end\b|\bend a ghost server, if any\b",
    re.IGNORECASE,
)
_NO_PID = re.compile(
    r"\S*/\S*|\b(?:error|uid|user|Xid|GPU|job|status|line)s? \d+|\d+ ?(?:ms|s|MiB|GiB|%)\b",
    re.IGNORECASE,
)
_OF_ITS_OWN = re.compile(r"\bbefore a client\b", re.IGNORECASE)
"""What "it" means is in the sentence itself."""
_SERVER = re.compile(r"\bserver \d+", re.IGNORECASE)
_BACKWARD = re.compile(r"\b(?:it|them|these|those|that|both|all)\b", re.IGNORECASE)


def sentences(text: str) -> list[str]:
    return [one.strip() for one in _SENTENCE.split(text) if one.strip()]


def ended_pids(text: str) -> Iterator[tuple[int, str]]:
    """Each number in a sentence that ends something, or in the one that "them" refers to."""
    before: set[int] = set()
    for sentence in sentences(text):
        bare = _NO_PID.sub("", sentence)
        if _OF_ITS_OWN.search(bare):
            before = set()
        named = _numbers(bare)
        if _ENDING.search(_HARMLESS.sub("", bare)):  # it instructs to end a process
            refers = not named and _BACKWARD.search(sentence)
            for pid in before if refers else named:
                yield pid, sentence
        # "It" is the client that a sentence is about, not the server that it mentions.
        before = _numbers(_SERVER.sub("", bare)) or before


def ended_among(pids: set[int], text: str) -> Iterator[tuple[int, str]]:
    """Each of these PIDs that a text ends, with the sentence; most texts name none of them."""
    if not pids.isdisjoint(map(int, re.findall(r"\d+", text))):
        yield from ((pid, sentence) for pid, sentence in ended_pids(text) if pid in pids)


def _numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"(?<![\w-])\d+\b", text)}
