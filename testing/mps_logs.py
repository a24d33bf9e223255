"""Logs for tests: real ones, scripted ones, and the ways in which their bytes may arrive."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mps_exporter.mps.incidents_and_counters import Counters
from mps_exporter.mps.log_parser import parse_line
from mps_exporter.mps.metrics_from_logs import LOG_METRICS
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import LogChunk, LogName, LogsObservation, LogState
from mps_exporter.snapshot import Histogram, Incident, LabelValues, LogMetricValues

SAMPLES = Path(__file__).parents[1] / "tests" / "recordings" / "samples"
PIPE = "/tmp/mps"
LOGS: tuple[LogName, LogName] = ("control", "server")
GPU = "GPU-00000000-1111-2222-3333-444444444444"
GPU_TWO = "GPU-55555555-6666-7777-8888-999999999999"

DAY = "2026-11-21 08:"
EIGHT = 1795248000.0  # What DAY's full hour is in Unix time.

SETTLED = 0.1004
"""Time after a line at which the end of the file proves that no older line is missing."""

_WRITERS = {
    "C": ("control", "Control"),
    "S": ("server", "Server"),
    "O": ("server", "Other"),
    "L": ("server", "Legacy Server"),
    "K": ("server", "Client"),
}


@dataclass(frozen=True)
class Logs:
    control: bytes
    server: bytes

    def __getitem__(self, log: LogName) -> bytes:
        return self.control if log == "control" else self.server

    def __add__(self, other: Logs) -> Logs:
        return Logs(self.control + other.control, self.server + other.server)

    @property
    def data(self) -> dict[LogName, bytes]:
        return {log: self[log] for log in LOGS}

    def stamps(self) -> list[float]:
        """When something was written, each moment once."""
        return sorted({at for log in LOGS for at, _ in lines(self[log])})

    def until(self, at: float) -> Logs:
        """What is written by then."""
        return Logs(self.control[: _end(self.control, at)], self.server[: _end(self.server, at)])


@cache
def lines(data: bytes) -> tuple[tuple[float, bytes], ...]:
    """Each line with when it was written; continuations belong to the line before."""
    result = []
    at = 0.0
    for line in data.splitlines(keepends=True):
        stamp_ms = parse_line(line.rstrip(b"\n")).stamp_ms
        at = at if stamp_ms is None else max(at, stamp_ms / 1000.0)
        result.append((at, line))
    return tuple(result)


@cache
def _ends(data: bytes) -> tuple[list[float], list[int]]:
    moments, ends = [float("-inf")], [0]
    for written, line in lines(data):
        moments.append(written)
        ends.append(ends[-1] + len(line))
    return moments, ends


def _end(data: bytes, at: float) -> int:
    """How many bytes are written by then."""
    moments, ends = _ends(data)
    return ends[bisect_right(moments, at) - 1]


def sample(name: str) -> Logs:
    names = ("daemon-killed-1", "daemon-killed-2") if name == "daemon-killed" else (name,)
    logs = Logs(b"", b"")
    for part in names:
        folder = SAMPLES / part
        logs += Logs((folder / "control.log").read_bytes(), (folder / "server.log").read_bytes())
    return logs


def truth() -> dict[str, dict[str, Any]]:
    """What is true of the samples."""
    loaded: dict[str, dict[str, Any]] = json.loads((SAMPLES / "truth.json").read_text())
    return loaded


def script(text: str) -> Logs:
    """Write logs from lines like "55:42.578 C630 NEW UI" (minute:second, writer and PID)."""
    logs: dict[str, list[str]] = {"control": [], "server": []}
    for line in text.strip("\n").splitlines():
        time, _, rest = line.strip().partition(" ")
        if not time:
            continue
        writer, _, message = rest.partition(" ")
        log, component = _WRITERS[writer[0]]
        logs[log].append(f"[{DAY}{time} {component} {writer[1:]:>5}] {message}\n")
    return Logs("".join(logs["control"]).encode(), "".join(logs["server"]).encode())


def at(time: str) -> float:
    """Unix time of "55:42.578"."""
    minute, _, second = time.partition(":")
    return round(EIGHT + 60 * int(minute) + float(second), 3)


def observation(
    now: float,
    data: Mapping[LogName, bytes],
    *,
    complete: float | None = None,
    history: bool = False,
    readable: Iterable[LogName] = LOGS,
) -> LogsObservation:
    """An observation of the logs, read to their end."""
    readable = tuple(readable)
    end = now if complete is None else complete
    return LogsObservation(
        at=now,
        chunks=tuple(
            LogChunk(
                at=now,
                pipe_directory=PIPE,
                log=log,
                data=data.get(log, b""),
                history=history,
                complete_until=end,
            )
            for log in readable
        ),
        states=tuple(LogState(PIPE, log, f"/logs/{log}.log", log in readable) for log in LOGS),
    )


def start(
    logs: Logs | str, now: float | None = None, *, readable: Iterable[LogName] = LOGS
) -> DaemonTracker:
    """An exporter that has counted all of these logs, or scripted lines, from the first on."""
    logs = script(logs) if isinstance(logs, str) else logs
    moment = (logs.stamps()[-1] if now is None else now) + SETTLED
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(moment, logs.data, readable=readable))
    return tracker


def more(tracker: DaemonTracker, text: str) -> float:
    """Feed further scripted lines to an exporter. Return the time of the last line."""
    logs = script(text)
    end = logs.stamps()[-1]
    tracker.add_logs(observation(end + SETTLED, {log: logs[log] for log in LOGS}))
    return end


def read(logs: Logs | str, **settings: Any) -> DaemonState:
    """What is known at the end of logs that were counted from the beginning."""
    return start(logs, **settings).state


def counts(text: str, **settings: Any) -> dict[str, Any]:
    """The counters after scripted lines, in the words of truth.json."""
    return summary(read(text, **settings).counters)


def incidents(state: DaemonState, kind: str) -> list[Incident]:
    """The incidents of this kind, oldest first."""
    return [incident for incident in state.incidents.snapshot() if incident.kind == kind]


def values(state: DaemonState, metric: str) -> Mapping[LabelValues, float | Histogram]:
    return state.counters.snapshot()[metric]


def shown(state: DaemonState, now: float = 0.0) -> tuple[Any, ...]:
    """All that is shown of a daemon's state, as values that can be compared."""
    daemon = state.daemon
    servers = [
        (
            *(server.pid, server.uid, server.started_at, server.ready_at, server.state),
            *(server.thread_ratio, dict(server.memory_limits), set(server.devices)),
            *(server.client_limit, server.is_ghost, server.possible_unfinished_work),
            *(len(server.clients), server.start_unknown, server.clients.unfollowed),
            [
                (
                    *(one.pid, one.uid, one.connected_at, one.state, one.contexts_by_gpu),
                    *(one.thread_ratio, one.memory_limits),
                )
                for one in server.clients
            ],
        )
        for server in state.servers
    ]
    return (
        *(servers, state.waits, state.devices, state.handover, state.handover_backoff_seconds),
        *(daemon.ended_at, daemon.died, daemon.quit_requested_at, daemon.binary_version),
        *(state.counters.snapshot(), state.incidents.snapshot(), state.timeline.snapshot(now)),
    )


def _values(counters: Counters | LogMetricValues) -> LogMetricValues:
    return counters.snapshot() if isinstance(counters, Counters) else counters


def counted(
    counters: Counters | LogMetricValues, metric: str
) -> dict[LabelValues, float | Histogram]:
    """The values of a metric that are not 0."""
    return {
        key: value
        for key, value in _values(counters)[metric].items()
        if (sum(value.counts) if isinstance(value, Histogram) else value)
    }


def numbers(counters: Counters | LogMetricValues) -> dict[str, float]:
    """All that is counted, flat: name and labels -> number."""
    flat: dict[str, float] = {}
    for metric, values in _values(counters).items():
        if metric.endswith("_timestamp_seconds"):
            continue
        for key, number in values.items():
            name = f"{metric}{key}"
            if isinstance(number, Histogram):
                flat[f"{name}.sum"] = number.sum_seconds
                for bound, count in zip((*number.bounds, float("inf")), number.counts, strict=True):
                    flat[f"{name}.{bound}"] = count
            else:
                flat[name] = number
    return {name: round(number, 3) for name, number in flat.items() if number}


_OF_TRUTH = {
    "daemon_starts": "mps_control_starts_total",
    "server_starts": "mps_server_starts_total",
    "server_exits": "mps_server_exits_total",
    "startups": "mps_server_startup_seconds",
    "connections": "mps_client_connections_total",
    "disconnections": "mps_client_disconnections_total",
    "sessions": "mps_client_session_seconds",
    "losses": "mps_client_losses_total",
    "unfinished_exits": "mps_client_unfinished_exits_total",
    "rejections": "mps_client_rejections_total",
    "faults": "mps_server_faults_total",
    "recoveries": "mps_server_fault_recovery_seconds",
    "holding_seconds": "mps_uid_holding_seconds_total",
    "waits": "mps_uid_wait_seconds",
    "waits_abandoned": "mps_uid_waits_abandoned_total",
    "overtakes": "mps_uid_overtakes_total",
    "handovers": "mps_uid_handovers_total",
    "handover_idle_seconds": "mps_uid_handover_idle_seconds_total",
}
"""What truth.json calls a metric."""


def summary(counters: Counters | LogMetricValues) -> dict[str, Any]:
    """The counters in the words of truth.json; what is zero is left out."""
    found: dict[str, Any] = {}
    counters = _values(counters)
    for name, metric in _OF_TRUTH.items():
        seen = {
            " ".join(map(str, key)): (
                [sum(value.counts), value.sum_seconds] if isinstance(value, Histogram) else value
            )
            for key, value in counted(counters, metric).items()
        }
        if seen:
            found[name] = seen if LOG_METRICS[metric].labels else seen[""]
    return found
