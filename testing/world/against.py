"""What users see of the worlds, as another revision's exporter shows it and as this one does."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mps_exporter.commands.doctor_report_and_status import checks_as_text, status_of_ends
from mps_exporter.findings import findings, recent_incidents
from mps_exporter.findings.before_kill import before_kill
from mps_exporter.findings.doctor_pid import check_process
from mps_exporter.humanize import UserNames
from mps_exporter.metrics import Build, render
from mps_exporter.metrics.exposition import OPENMETRICS_1_0_0, encode
from mps_exporter.snapshot import Snapshot
from mps_exporter.web.status_api import incident_view
from testing.golden import OF_THIS_RUN, all_shown
from testing.outputs import texts_of, texts_of_findings
from testing.page import text_of
from testing.player import Metrics
from testing.world.checks import Check, Moment
from testing.world.host import WorldHost
from testing.world.model import START_MS

ROOT = Path(__file__).parents[2]
_OF_THIS_RUN = re.compile(r"[\w/]*/world-\w+|collector_duration_seconds{\S* \S+|\bread in \d+ ms")
REPORTS: tuple[Mapping[str, Any], ...] = ({}, {"doctor_job": "4711"}, {"doctor_user": 1001})
PROCESSES = 8  # The doctor explains at most this number.


@contextmanager
def outputs_of(revision: str) -> Iterator[Path]:
    """Play this program's worlds with the exporter of a git revision; yield the outputs' folder."""
    with TemporaryDirectory() as folder:
        archive = ("git", "archive", revision, "exporter", "docs")
        unpacked = subprocess.run(archive, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(("tar", "-xC", folder), input=unpacked, check=True)
        path = os.pathsep.join((f"{folder}/exporter", os.environ.get("PYTHONPATH", "")))
        program = (sys.executable, "-m", "testing.world", *sys.argv[1:], "--write", folder)
        subprocess.run(program, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": path})
        yield Path(folder)


def _shown(moment: Moment) -> Iterator[tuple[str, str]]:
    """Yield the name of each output at a moment, and its text."""
    for whose, snapshot in ("", moment.snapshot), ("a later exporter: ", moment.second):
        if snapshot is not None:
            shown = all_shown(Metrics(snapshot), START_MS / 1000)
            texts = _texts(snapshot) if moment.looks else ()
            for name, text in (*shown, *_incidents(snapshot), *texts):
                if not name.startswith(OF_THIS_RUN):
                    yield f"{whose}{name}", text
    host = None if moment.collector is None else moment.collector._host
    if isinstance(host, WorldHost) and host.procfs is not None:
        snapshot = moment.snapshot
        found = (*findings(snapshot), *recent_incidents(snapshot))
        for about in REPORTS if moment.looks else ():
            yield f"doctor {about}", host.procfs.report(snapshot, **about)
        for pid in sorted(moment.world.processes)[-PROCESSES:] if moment.looks else ():
            view = host.procfs.view(pid)
            checks = check_process(pid, snapshot, found, view)
            yield f"doctor --pid {pid}", checks_as_text({pid: checks})
            told = before_kill(pid, snapshot, view.uid)
            yield f"doctor --before-kill {pid}", status_of_ends([told], as_json=True, many=False)[1]


def _texts(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    yield "metrics without clients", text_of(snapshot, clients="off")
    families = list(render(snapshot, Build("test", "", "")))
    yield "OpenMetrics", encode(families, [], OPENMETRICS_1_0_0).decode()
    for number, (name, text) in enumerate((*texts_of_findings(snapshot), *texts_of(snapshot))):
        yield f"text {number}", f"{name}: {text}"


def _incidents(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    names = UserNames(snapshot)
    for daemon in snapshot.daemons:
        for number, one in enumerate(daemon.incidents):
            text = incident_view(daemon.facts, one, names).text
            yield f"incident {daemon.pipe_directory} {number}", text


def writing(path: Path) -> Check:
    """Return a check that writes what changed since the last moment, and finds nothing."""
    before = dict[str, str | None]()

    def write(moment: Moment) -> Iterator[str]:
        now = _outputs(moment)
        gone = dict.fromkeys(before.keys() - now.keys())
        changed = {name: text for name, text in now.items() if before.get(name) != text}
        with path.open("a") as file:
            print(json.dumps(changed | gone), file=file)
        before.clear()
        before.update(now)
        return iter(())

    return write


def comparing(path: Path) -> Check:
    """Return a check that compares each moment with a file of `writing`."""
    lines, then, count = iter(path.read_text().splitlines()), dict[str, str | None](), 0

    def against(moment: Moment) -> Iterator[str]:
        nonlocal count
        count += 1
        then.update(json.loads(next(lines, "{}")))
        now = _outputs(moment)
        for name in {**then, **now}:
            texts = (one.get(name) or "absent" for one in (then, now))
            for first, second in zip_longest(*(text.splitlines() for text in texts)):
                if first != second:
                    yield f"moment {count}, {name}\n  - {first}\n  + {second}"
                    return

    return against


def _outputs(moment: Moment) -> dict[str, str]:
    return {name: _OF_THIS_RUN.sub("", text) for name, text in _shown(moment)}
