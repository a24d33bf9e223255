"""Hold the rule of exporter/mps/unfinished_work.py against runs on a GPU, and print the table.

    python -m tools.unfinished_work_table DIRECTORY [--runs]

DIRECTORY has a folder for each run, with the daemon's control.log and server.log and a truth.json:

    {"ends": [{"pid": 808, "how": "SIGKILL", "in_flight": true, "neighbours": "spin1", ...}],
     "victims": [{"pid": 795, "error": "700", ...}], "own_faults": [], ...}

in_flight is null where it is not known. A run may have no fault although work was in flight: then
no client is to be named. docs/unfinished-work.md holds the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exporter.model import Incident
from exporter.mps.fold import Fold
from exporter.mps.log_lines import parse
from exporter.observations import LogChunk, LogName, LogsObservation

PIPE = "run"
LOGS: tuple[LogName, LogName] = ("control", "server")
OUTCOMES = ("named", "doubtful", "blamed", "accused")
"""The one who did it is named; a doubt is stated; MPS's word stands; somebody else is named."""


def read(folder: Path) -> tuple[list[Incident], list[int]]:
    """Read a run's logs: its incidents, and who was warned of as having ended alone with work."""
    fold, warned = Fold(PIPE), []
    logs = {log: (folder / f"{log}.log").read_bytes() for log in LOGS}
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


def _take(fold: Fold, now: float, data: dict[LogName, bytes]) -> None:
    chunks = tuple(
        LogChunk(
            at=now, pipe_directory=PIPE, log=log, data=data.get(log, b""), complete_until=now + 0.1
        )
        for log in LOGS
    )
    fold.take(LogsObservation(at=now, chunks=chunks))


def _stamped(data: bytes) -> Iterator[tuple[float, int, bytes]]:
    at = 0.0
    for number, line in enumerate(data.splitlines(keepends=True)):
        stamp_ms = parse(line.rstrip(b"\n")).stamp_ms
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
    busy, idle = any(word in text for word in ("spin", "write")), "idle" in text
    kinds = [kind for kind, there in (("busy", busy), ("idle", idle)) if there]
    return f"{' and '.join(kinds)} neighbours" if kinds else "alone"


def main() -> int:
    """Print the table; fails if anybody was accused wrongly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--runs", action="store_true", help="print each run, too")
    arguments = parser.parse_args()
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(arguments.directory.glob("*/truth.json")):
        truth = json.loads(path.read_text(encoding="utf-8"))
        incidents, warned = read(path.parent)
        faults = [one for one in incidents if one.kind in ("fault", "unfinished_work")]
        found = [outcome(one, truth) for one in faults]
        row = table[group(truth)]
        row["runs"] += 1
        row["faults"] += len(faults)
        row.update(found)
        left = {end["pid"] for end in truth["ends"] if end["in_flight"] is not False}
        row["warned"] += sum(pid in left for pid in warned)
        row["warned in vain"] += sum(pid not in left for pid in warned)
        if arguments.runs:
            print(path.parent.name, found, f"warned of {warned}" if warned else "", sep="\t")
    columns = ("runs", "faults", *OUTCOMES, "warned", "warned in vain")
    print(f"| run | {' | '.join(columns)} |")
    print(f"|---|{'---:|' * len(columns)}")
    for name, row in sorted(table.items()):
        print(f"| {name} | {' | '.join(str(row[column]) for column in columns)} |")
    return 1 if any(row["accused"] for row in table.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
