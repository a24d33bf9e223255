"""Speed of applying log lines.

A synthetic daemon with a waiting user, short clients and a control tool that asks every second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import LogChunk, LogName, LogsObservation

ROUNDS = 200
"""Seconds of logs in one observation."""
BEGIN = 1_795_000_000.0


def stamp(at: float) -> str:
    """Return a time in the form of the logs."""
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return f"{whole}.{int(at * 1000) % 1000:03d}"


def rounds() -> Iterator[tuple[float, list[str], list[str]]]:
    """Yield (time, lines of control.log, lines of server.log) without end, a client a second."""
    at, pid = BEGIN, 1000
    c = f"[{stamp(at)} Control   630] "
    yield (
        at,
        [
            c + "Starting control daemon using socket /tmp/mps/control",
            c + "NEW CLIENT 999 from user 1001: Server is not ready, push client to pending list",
            c + "Starting new server 634 for user 1001",
            c + "NEW SERVER 634: Ready",
            c + "NEW CLIENT 998 from user 1002: Server is not ready, push client to pending list",
        ],
        [],
    )
    while True:
        at += 1.0
        pid = 1000 + (pid - 999) % 4_000_000
        c, s = f"[{stamp(at)} Control   630] ", f"[{stamp(at)} Server   634] "
        control = [
            "Accepting connection...",
            "User did not send valid credentials",
            "Accepting connection...",
            f"NEW CLIENT {pid} from user 1001: Server already exists",
            "Accepting connection...",
            f"NEW CLIENT {pid} from user 1001: Server already exists",
            "Accepting connection...",
            "NEW UI",
            "Cmd:get_server_list",
            "634",
            "Cmd:get_default_active_thread_percentage",
            "100.0",
            "UI closed",
            "Try shutting down server 634, backoff is enabled",
            "Server 634 has 2 active worker threads. Server will not shutdown.",
            "Control will try shutting down server 634 again in at most 51200ms",
        ]
        server = [
            "Received new client request for {PID: -1333654781, Context ID: 0}",
            f"Client {{PID: {pid}, Context ID: 0}} connected",
            f"Creating worker thread for client {{PID: {pid}, Context ID: 0}}",
            f"Client {{PID: {pid}, Context ID: 1}} connected",
            f"Creating worker thread for client {{PID: {pid}, Context ID: 1}}",
            "Device NVIDIA H200 (uuid GPU-00000000-1111-2222-3333-444444444444) is associated",
            f"Status of client {{PID: {pid}, Context ID: 1}} is ACTIVE",
            f"Client {{PID: {pid}, Context ID: 1}} exiting. Number of active client contexts is 0.",
            f"Client process {pid} disconnected",
            "Server has been notified to shutdown",
            "Server was unable to shutdown due to 2 active clients",
        ]
        yield at, [c + line for line in control], [s + line for line in server]


def observations(lines: int) -> Iterator[LogsObservation]:
    """Yield at least this many lines, in observations of ROUNDS seconds."""
    later = rounds()
    while lines > 0:
        part = list(islice(later, ROUNDS))
        now = part[-1][0] + 0.5
        logs: dict[LogName, list[str]] = {
            "control": [line for _, control, _ in part for line in control],
            "server": [line for _, _, server in part for line in server],
        }
        lines -= sum(map(len, logs.values()))
        chunks = (
            LogChunk(
                at=now,
                pipe_directory="/tmp/mps",
                log=log,
                data=("\n".join(text) + "\n").encode(),
                complete_until=now,
            )
            for log, text in logs.items()
        )
        yield LogsObservation(at=now, chunks=tuple(chunks))


def speed(lines: int) -> list[str]:
    """Measure how fast lines are applied; return the lines of a report."""
    tracker = DaemonTracker("/tmp/mps")
    spent = 0.0
    for observation in observations(lines):
        before = time.process_time()
        tracker.add_logs(observation)
        spent += time.process_time() - before
    counted = tracker.state.counters.snapshot()

    names = ("control_log_lines", "uid_overtakes", "control_log_query_lines")
    total, overtakes, queries = (
        sum(int(v) for v in counted[f"mps_{name}_total"].values() if isinstance(v, int | float))
        for name in names
    )
    return [
        f"{total} lines of logs in {spent:.2f} s of CPU: {total / spent:,.0f} lines/s",
        f"{overtakes} overtakes, {queries} query lines",
    ]
