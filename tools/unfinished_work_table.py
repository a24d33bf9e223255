"""Hold the rule of mps/unfinished_work.py against runs on a GPU, and print the table.

    python -m tools.unfinished_work_table [SERIES ...] [--runs]

SERIES is a directory, or an archive of one (tests/recordings/ends/*.tar.xz), with a folder for each
run: the daemon's control.log and server.log and a truth.json:

    {"ends": [{"pid": 808, "how": "SIGKILL", "in_flight": true, "neighbours": "spin1", ...}],
     "victims": [{"pid": 795, "error": "700", ...}], "own_faults": [], ...}

in_flight is null where it is not known. A run may have no fault although work was in flight: then
no client is to be named.

Without SERIES, the tables of docs/unfinished-work.md are written: each stands between two marks,
``<!-- series: NAME ... -->`` and ``<!-- end -->``, and is made from tests/recordings/ends.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mps_exporter.mps.log_parser import parse_line
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import LogChunk, LogName, LogsObservation
from mps_exporter.snapshot import Incident

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "unfinished-work.md"
ENDS = ROOT / "tests" / "recordings" / "ends"
MARK = re.compile(r"(<!-- series: ([a-z0-9 -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PIPE = "run"
LOGS: tuple[LogName, LogName] = ("control", "server")
OUTCOMES = ("named", "doubtful", "blamed", "accused")
"""The one who did it is named; a doubt is stated; MPS's word stands; somebody else is named."""


class Run(NamedTuple):
    """One run: what the daemon wrote, and what happened."""

    name: str
    logs: Mapping[LogName, bytes]
    truth: dict[str, Any]


def runs(series: Path) -> Iterator[Run]:
    """Give the runs of a directory or an archive, by name."""
    files = _unpacked(series) if series.is_file() else _files(series)
    for folder in sorted({name.rpartition("/")[0] for name in files}):
        logs = {log: files[f"{folder}/{log}.log"] for log in LOGS}
        yield Run(folder, logs, json.loads(files[f"{folder}/truth.json"]))


def _files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for truth in directory.glob("*/truth.json")
        for path in (truth, *(truth.with_name(f"{log}.log") for log in LOGS))
    }


def _unpacked(archive: Path) -> dict[str, bytes]:
    files = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                files[member.name] = file.read()
    return files


def read(logs: Mapping[LogName, bytes]) -> tuple[list[Incident], list[int]]:
    """Read a run's logs: its incidents, and who was warned of as having ended alone with work."""
    fold, warned = DaemonTracker(PIPE), []
    lines = sorted(
        (stamp, number, log, line) for log in LOGS for stamp, number, line in _stamped(logs[log])
    )
    for stamp, _, log, line in lines:
        _take(fold, stamp, {log: line})
        for server in fold.ledger.view(stamp).servers:
            left = server.possible_unfinished_work
            if left is not None and left.pid not in warned:
                warned.append(left.pid)
    _take(fold, lines[-1][0] + 10.0 if lines else 0.0, {})
    return list(fold.ledger.view(0.0).incidents), warned


def _take(fold: DaemonTracker, now: float, data: dict[LogName, bytes]) -> None:
    chunks = tuple(
        LogChunk(
            at=now, pipe_directory=PIPE, log=log, data=data.get(log, b""), complete_until=now + 0.1
        )
        for log in LOGS
    )
    fold.add_logs(LogsObservation(at=now, chunks=chunks))


def _stamped(data: bytes) -> Iterator[tuple[float, int, bytes]]:
    at = 0.0
    for number, line in enumerate(data.splitlines(keepends=True)):
        stamp_ms = parse_line(line.rstrip(b"\n")).stamp_ms
        at = at if stamp_ms is None else max(at, stamp_ms / 1000.0)
        yield at, number, line


def outcome(incident: Incident, truth: dict[str, Any]) -> str:
    """What the exporter makes of one fault."""
    left = {end["pid"] for end in truth["ends"] if end["in_flight"] is not False}
    if incident.kind == "unfinished_work":
        return "named" if incident.left_by_pid in left else "accused"
    return "doubtful" if incident.ended_pids else "blamed"


def group(truth: dict[str, Any]) -> str:
    """What kind of run it is."""
    ends = truth["ends"]
    others = "" if len(ends) < 2 else "one other ends" if len(ends) == 2 else "6 to 20 others end"
    if truth["own_faults"]:
        return "a bad pointer of its own" + (", another client ends shortly before" if ends else "")
    if all(end["in_flight"] is None for end in ends):
        return "a small PyTorch training ends"
    in_flight = sum(end["in_flight"] is True for end in ends)
    if not in_flight:
        return "ends without work in flight" + (", 20 together" if others else "")
    if in_flight > 1:
        return "two end with work in flight together"
    return f"work in flight, {f'{others} within 0.3 s' if others else neighbours(ends[0])}"


def neighbours(end: dict[str, Any]) -> str:
    """Which other clients were on the server."""
    text = end["neighbours"]
    if text.startswith("GPUs"):
        return "busy neighbours on one or both of two GPUs"
    busy, idle = any(word in text for word in ("busy", "writing", "spin", "write")), "idle" in text
    kinds = [kind for kind, there in (("busy", busy), ("idle", idle)) if there]
    return f"{' and '.join(kinds)} neighbours" if kinds else "alone"


class Result(NamedTuple):
    """What the exporter makes of one run."""

    run: Run
    outcomes: list[str]
    """One for each fault."""
    warned: list[int]

    @property
    def left(self) -> set[int]:
        """The clients that left work, or may have."""
        return {end["pid"] for end in self.run.truth["ends"] if end["in_flight"] is not False}


def results(series: Iterable[Path]) -> list[Result]:
    """Read all runs of these series."""
    found = []
    for run in (run for one in series for run in runs(one)):
        incidents, warned = read(run.logs)
        faults = [one for one in incidents if one.kind in ("fault", "unfinished_work")]
        found.append(Result(run, [outcome(one, run.truth) for one in faults], warned))
    return found


def table(found: Iterable[Result]) -> str:
    """Make the table in Markdown."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for result in found:
        row = rows[group(result.run.truth)]
        row["runs"] += 1
        row["faults"] += len(result.outcomes)
        row.update(result.outcomes)
        row["warned"] += sum(pid in result.left for pid in result.warned)
        row["false warnings"] += sum(pid not in result.left for pid in result.warned)
    total = sum(rows.values(), Counter[str]())
    columns = ("runs", "faults", *OUTCOMES, "warned", "false warnings")
    lines = [f"| run | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    lines += [
        f"| {name} | {' | '.join(str(row[column]) for column in columns)} |"
        for name, row in (*sorted(rows.items()), ("all", total))
    ]
    return "\n".join(lines) + "\n"


def fill(text: str) -> str:
    """Return the page's text with every table made anew."""

    def made(mark: re.Match[str]) -> str:
        series = [ENDS / f"{name}.tar.xz" for name in mark[2].split()]
        return f"{mark[1]}{table(results(series))}{mark[3]}"

    return MARK.sub(made, text)


def main() -> int:
    """Print the table; fails if anybody was accused wrongly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("series", type=Path, nargs="*")
    parser.add_argument("--runs", action="store_true", help="print each run, too")
    arguments = parser.parse_args()
    if not arguments.series:
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    found = results(arguments.series)
    if arguments.runs:
        for run, outcomes, warned in found:
            print(run.name, outcomes, f"warned of {warned}" if warned else "", sep="\t")
    print(table(found), end="")
    return 1 if any("accused" in result.outcomes for result in found) else 0


if __name__ == "__main__":
    sys.exit(main())
