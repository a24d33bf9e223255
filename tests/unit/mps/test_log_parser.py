"""Lines of the logs, of every driver whose wording is known, and hostile ones."""

from ast import literal_eval
from datetime import UTC, datetime
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.limits_without_a_flag import MAX_LINE_BYTES, MAX_QUOTED_MESSAGE
from mps_exporter.mps.log_parser import (
    DAEMON_STARTING_LINE,
    LogFilter,
    control_line_of,
    parse_line,
    withhold_unknown,
)
from mps_exporter.mps.log_wordings import (
    CONTINUATION,
    CONTROL_LINES,
    KNOWN,
    SERVER_LINES,
    ControlLogReader,
    Event,
    ServerLogReader,
    Shapes,
)
from mps_exporter.mps.state import DaemonState

STAMP = "2026-11-21 08:55:42.578"
STAMP_MS = 1_795_251_342_578


def control(message: str) -> Event:
    return parse_line(f"[{STAMP} Control   630] {message}").event


def server(message: str) -> Event:
    return parse_line(f"[{STAMP} Server   634] {message}").event


def test_the_prefix() -> None:
    line = parse_line(f"[{STAMP} Control   630] Accepting connection...")
    assert line == (STAMP_MS, "Control", 630, Event(KNOWN))
    moment = datetime.fromtimestamp(STAMP_MS / 1000, UTC)
    assert moment.isoformat(sep=" ", timespec="milliseconds") == f"{STAMP}+00:00"
    assert parse_line(f"[{STAMP} Legacy Server   425] Failed to start : invalid argument") == (
        STAMP_MS,
        "Legacy Server",
        425,
        Event("server_failed", ("Failed to start : invalid argument",)),
    )
    assert parse_line(f"[{STAMP} Control 1234567] NEW UI".encode()).pid == 1234567


# Wordings of no recorded log, nor of the older logs in other tests; numbers at their bounds.
CONTROL = """
Cmd:quit -t 5 -> ui_command ('quit -t 5',)
Adding server 'shared' [multiuser enabled] -> known
Adding server 'training' -> known
Adding server 'Not A Name' -> unrecognized ("Adding server 'Not A Name'",)
[memacct] failed to register client pid 0 -> known
Failed to initialize MPS control daemon -> known
To connect CUDA applications to this daemon, set CUDA_MPS_PIPE_DIRECTORY=/run/mps -> known
Insufficient privileges for UID 60000. 'NAMESPACE SET' requires server owner. -> ui_refused
634 -> number (634,)
100.0 -> unrecognized ('100.0',)
Server 99999 not found -> unrecognized ('Server 99999 not found',)
NEW CLIENT 643 from user 4294967294: Server is not ready, push client to pending list
-> state.client_queued (643, 4294967294)
Starting new server 634 for user -2 -> state.servers.start (634, 4294967294)
Server 634 exited with status -1 -> state.server_exited (634, -1)
Failed to start server using uid 0, error: Operation not permitted
-> state.server_forbidden (0, 'Operation not permitted')
Server encountered a fatal exception. Shutting down -> known
Unable to read new connection type information -> known
"""

SERVER = """
Creating server context on device 1 (NVIDIA A16) -> server.add_device (1,)
Created anonymous shared memory region mps.shm.1001.634 -> server.set_owner (1001,)
Created named shared memory region /cuda.shm.0.52.1 -> server.share_by_file
activeThreadsPercentage set to 33.000000 -> server.set_thread_ratio (0.33,)
Received new client request for {PID: -1333654781, Context ID: 0} -> server.request_connection
Received new client request -> server.request_unnamed_connection
Worker created -> known
Creating worker thread -> known
Server failed to receive command with status 3, assuming client exit -> known
Client {PID: 1376, Context ID: 1} exiting. Worker is in reset. Number of active \
client contexts is 0.
-> server.clients.close_context (1376, 1)
MPS Server failed to create/open SHM segment.
-> server_failed ('MPS Server failed to create/open SHM segment',)
MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU.
-> server_failed ('MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU',)
"""


def cases(text: str) -> list[tuple[str, Event]]:
    """Messages with their events, from lines such as "NEW SERVER 634: Ready -> name (634,)"."""
    found = []
    for line in text.strip().replace("\n->", " ->").splitlines():
        message, _, event = line.rpartition(" -> ")
        name, _, values = event.partition(" ")
        found.append((message, Event(name, literal_eval(values) if values else ())))
    return found


@pytest.mark.parametrize(("message", "event"), cases(CONTROL))
def test_control_log(message: str, event: Event) -> None:
    assert control(message) == event
    assert control(message + " \r") == event


@pytest.mark.parametrize(("message", "event"), cases(SERVER))
def test_server_log(message: str, event: Event) -> None:
    assert server(message) == event


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Server 634",
        "[0] 00:00.0, NVIDIA H200",
        "[2026-11-21 08:55:42.578 Control",
        "[2026-11-21 08:55:42.578 Control   630",
        "[2026-13-21 08:55:42.578 Control   630] NEW UI",
        "[2026-11-21 25:55:42.578 Control   630] NEW UI",
        "[2026-11-21 08:55:42.5x8 Control   630] NEW UI",
        "[2026-11-21 08:55:42.578 control   630] NEW UI",
        "[2026-11-21 08:55:42.578 Control   -30] NEW UI",
        "[2026-11-21 08:55:42.578 Control   12345678] NEW UI",
        "[٢٠٢٦-11-21 08:55:42.578 Control   630] NEW UI",
        f" [{STAMP} Control   630] NEW UI",
    ],
)
def test_what_has_no_prefix_continues_the_line_before(line: str) -> None:
    assert parse_line(line).event is CONTINUATION
    assert parse_line(line).stamp_ms is None


@pytest.mark.parametrize(
    "message",
    [
        "NEW CLIENT 12345678 from user 0: Server already exists",
        "NEW CLIENT -1 from user 0: Server already exists",
        "NEW CLIENT 1 from user 12345678901: Server already exists",
        "NEW CLIENT 1 from user 4294967296: Server already exists",
        "NEW CLIENT 1 from user -2147483649: Server already exists",
        "NEW CLIENT 1 from user 0: Server already exists, or not",
        "Starting new server ٣ for user 0",
        "Server 1 exited with status 99999999999",
        "x NEW SERVER 634: Ready",
    ],
)
def test_similar_messages_are_not_recognized(message: str) -> None:
    assert control(message) == Event("unrecognized", (message,))


def test_only_the_beginning_of_a_long_line_is_kept() -> None:
    event = control("x" * 1_000_000)
    assert event == Event("unrecognized", ("x" * MAX_QUOTED_MESSAGE,))
    assert control("Cmd:" + "y" * 1_000_000) == Event("ui_command", ("y" * MAX_QUOTED_MESSAGE,))
    assert control("1" * 1_000) == Event("unrecognized", ("1" * MAX_QUOTED_MESSAGE,))


def test_invalid_bytes_are_shown_as_such() -> None:
    line = parse_line(b"[2026-11-21 08:55:42.578 Control   630] \xff\xfeCmd")
    assert line.event == Event("unrecognized", ("��Cmd",))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    parse_line(data)
    parse_line(b"[2026-11-21 08:55:42.578 Control   630] " + data)
    parse_line(b"[2026-11-21 08:55:42.578 Server   634] " + data)


@pytest.mark.parametrize(
    ("lines", "reader"), [(CONTROL_LINES, ControlLogReader), (SERVER_LINES, ServerLogReader)]
)
def test_every_wording_has_a_method(
    lines: Shapes, reader: type[ControlLogReader | ServerLogReader]
) -> None:
    state = DaemonState()
    applies = reader(state)
    applies.server = state.servers.adopt(110, 1.0)  # type: ignore[union-attr]
    for name, *_ in lines.rows:
        assert name == KNOWN or callable(attrgetter(name)(applies))


# ------------------------------------------------------------------ searches without parsing

WRITER = "[2026-11-21 08:55:42.578 Control   630] "


@pytest.mark.parametrize(
    "message", ["Starting control daemon using socket /tmp/mps/control", "Start", "Start\r"]
)
def test_a_start_is_found_by_the_search_and_by_the_parser(message: str) -> None:
    line = WRITER + message
    assert parse_line(line).event.name == "daemon_starting"
    assert DAEMON_STARTING_LINE.search(f"junk\n{line}\n".encode()) is not None
    # A line of a client or a server, or text within a line, does not show a start.
    assert DAEMON_STARTING_LINE.search(line.replace("Control", "Server").encode()) is None
    assert DAEMON_STARTING_LINE.search(f"echo {line}".encode()) is None


def test_the_lines_of_a_daemon_are_found_by_its_pid() -> None:
    data = f"{WRITER}NEW UI\n".encode()
    assert control_line_of(630).search(data) is not None
    assert control_line_of(63).search(data) is None


# ------------------------------------------------------------------ what leaves the host

PREFIX = WRITER.encode()
ADMITTED = PREFIX + b"NEW CLIENT 632 from user 1001: Server already exists\n"
SHADOW = b"root:$6$salt$hash:20228:0:99999:7:::\n"


@given(st.lists(st.sampled_from([ADMITTED, SHADOW, PREFIX + SHADOW, b"\n", PREFIX + b"\n"])))
def test_a_replay_reads_the_same_kinds_of_lines(lines: list[bytes]) -> None:
    data = b"".join(lines)
    shown = withhold_unknown(data)
    assert [parse_line(line).event.name for line in shown.split(b"\n")] == [
        parse_line(line).event.name for line in data.split(b"\n")
    ]


@given(st.lists(st.integers(0, 400), max_size=10).map(sorted))
def test_pieces_of_lines_are_put_together(cuts: list[int]) -> None:
    data = ADMITTED * 3 + SHADOW + ADMITTED
    lines = LogFilter()
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    shown = b"".join(lines.feed(piece, restarted=False) for piece in pieces)
    assert shown == withhold_unknown(data)


def test_a_line_without_an_end_is_not_buffered_indefinitely() -> None:
    lines = LogFilter()
    shown = b"".join(lines.feed(b"x" * 10_000, restarted=False) for _ in range(20))
    assert 2 * MAX_LINE_BYTES < 20 * 10_000
    assert shown.count(b"withheld") == 2
    assert b"xx" not in shown


def test_what_was_before_a_truncation_is_void() -> None:
    lines = LogFilter()
    assert lines.feed(ADMITTED[:40], restarted=False) == b""
    assert lines.feed(ADMITTED, restarted=True) == ADMITTED
