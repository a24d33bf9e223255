"""Lines of control.log and server.log, of every driver whose wording is known, and hostile ones."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.mps.control_log import CONTROL_LINES, ControlLogReader
from mps_exporter.mps.log_lines import KNOWN, MAX_QUOTED, Event, Shapes
from mps_exporter.mps.log_parser import CONTINUATION, parse_line
from mps_exporter.mps.server_log import SERVER_LINES, ServerLogReader

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


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ("NEW UI", Event("ui_opened")),
        ("Cmd:get_server_list", Event("ui_command", ("get_server_list",))),
        ("Cmd:quit -t 5", Event("ui_command", ("quit -t 5",))),
        ("UI closed", Event("ui_closed")),
        ("Insufficient privileges for UID 1001. Control deamon settings", Event("ui_refused")),
        # Published of MPS v3 daemons, driver 615.
        ("Adding server 'shared' [multiuser enabled]", Event(KNOWN)),
        ("Adding server 'training'", Event(KNOWN)),
        ("Adding server 'Not A Name'", Event("unrecognized", ("Adding server 'Not A Name'",))),
        ("[memacct] failed to register client pid 0", Event(KNOWN)),
        ("Failed to initialize MPS control daemon", Event(KNOWN)),
        (
            "To connect CUDA applications to this daemon, set CUDA_MPS_PIPE_DIRECTORY=/run/mps",
            Event(KNOWN),
        ),
        (
            "Insufficient privileges for UID 60000. 'NAMESPACE SET' requires server owner.",
            Event("ui_refused"),
        ),
        ("634", Event("number", (634,))),
        ("100.0", Event("unrecognized", ("100.0",))),
        ("", Event("unrecognized", ("",))),
        ("Server 99999 not found", Event("unrecognized", ("Server 99999 not found",))),
        ("User did not send valid credentials", Event("credentials_missing")),
        ("NEW CLIENT 0 from user 1001: Server already exists", Event("client_sent", (0, 1001))),
        (
            "NEW CLIENT 643 from user 4294967294: Server is not ready, push client to pending list",
            Event("client_queued", (643, 4294967294)),
        ),
        ("Starting new server 634 for user 1001", Event("server_starting", (634, 1001))),
        ("Starting new server 634 for user -2", Event("server_starting", (634, 4294967294))),
        ("NEW SERVER 634: Ready", Event("server_ready", (634,))),
        ("Server 634 exited with status 0", Event("server_exited", (634, 0))),
        ("Server 634 exited with status -1", Event("server_exited", (634, -1))),
        ("Try shutting down server 634, backoff is disabled", Event("shutdown_tried", (634,))),
        (
            "Server 634 has 2 active worker threads. Server will not shutdown.",
            Event("shutdown_declined", (634,)),
        ),
        (
            "Control will try shutting down server 634 again in at most 51200ms",
            Event("shutdown_retry", (51200,)),
        ),
        (
            "Failed to start server using uid 0, error: Operation not permitted",
            Event("server_forbidden", (0, "Operation not permitted")),
        ),
        ("Server encountered a fatal exception. Shutting down", Event(KNOWN)),
        ("Starting control daemon using socket /tmp/mps/control", Event("daemon_starting")),
        ("Start", Event("daemon_starting")),
        ("CUDA MPS Control binary version: 13030", Event("binary_version", ("13030",))),
        ("Exit with status 0", Event("daemon_exited")),
        ("Unable to accept connection", Event(KNOWN)),
        ("Unable to read new connection type information", Event(KNOWN)),
    ],
)
def test_control_log(message: str, event: Event) -> None:
    assert control(message) == event
    assert control(message + " \r") == event


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ("Startup", Event("server_process")),
        ("Start", Event("server_process")),
        (
            "Creating server context on device 1 (NVIDIA A16)",
            Event("device_opened", (1, "NVIDIA A16")),
        ),
        ("Volta MPS: Creating server context on device 0", Event("device_opened", (0, ""))),
        ("Destroy server context on device 0 (NVIDIA H200)", Event("device_closed", (0,))),
        ("Volta MPS: Destroy server context on device 0", Event("device_closed", (0,))),
        ("Created anonymous shared memory region mps.shm.1001.634", Event("server_owner", (1001,))),
        ("Created named shared memory region /cuda.shm.0.52.1", Event(KNOWN)),
        ("Active Threads Percentage set to 80.0", Event("thread_limit_set", (0.8,))),
        ("activeThreadsPercentage set to 33.000000", Event("thread_limit_set", (0.33,))),
        (
            "Device pinned memory limit for device 0 set to 0x77f00000 bytes",
            Event("memory_limit_set", (0, 2012217344)),
        ),
        ("Server Priority set to 0", Event(KNOWN)),
        ("Server has started", Event("server_open")),
        ("MPS Server is started", Event("server_open")),
        (
            "Received new client request for {PID: -1333654781, Context ID: 0}",
            Event("connection_requested"),
        ),
        ("Received new client request", Event("unnamed_connection_requested")),
        ("Volta MPS Server: Received new client request", Event("unnamed_connection_requested")),
        ("MPS Server: worker created", Event(KNOWN)),
        ("Worker created", Event(KNOWN)),
        ("Creating worker thread", Event(KNOWN)),
        ("Creating worker thread for client {PID: 440, Context ID: 1}", Event(KNOWN)),
        ("Client {PID: 440, Context ID: 1} connected", Event("client_connected", (440, 1))),
        ("New client 14781 connected", Event("client_process_connected", (14781,))),
        (
            "Device NVIDIA H200 (uuid GPU-5e4dfbf1-1b01-c801-7bf9-ce9d9398f893) is associated",
            Event("device_associated", ("GPU-5e4dfbf1-1b01-c801-7bf9-ce9d9398f893",)),
        ),
        (
            "Volta MPS: Device Tesla T4 "
            "(uuid 0xafc3ccca-0xc3365689-0x2ed8f0e1-0x4233036f) is associated",
            Event("device_associated", ("GPU-afc3ccca-c336-5689-2ed8-f0e14233036f",)),
        ),
        ("Status of client {PID: 440, Context ID: 1} is ACTIVE", Event("context_active", (440, 1))),
        (
            "Volta MPS: status of client {11641, 1} is INACTIVE",
            Event("context_inactive", (11641, 1)),
        ),
        (
            "Server failed to recevie command with status 806, assuming client "
            "{PID: 451, Context ID: 1} exit",
            Event("connection_lost", (451, 1)),
        ),
        ("Server failed to receive command with status 3, assuming client exit", Event(KNOWN)),
        ("Receive command failed, assuming client exit", Event(KNOWN)),
        (
            "Client {PID: 451, Context ID: 1} exiting. Number of active client contexts is 1.",
            Event("context_left", (451, 1)),
        ),
        (
            "Client {PID: 1376, Context ID: 1} exiting. Worker is in reset. "
            "Number of active client contexts is 0.",
            Event("context_left", (1376, 1)),
        ),
        ("Client {11641, 1} exit", Event("context_left", (11641, 1))),
        (
            "Volta MPS: Client disconnected. Number of active client contexts is 2",
            Event("unnamed_context_left"),
        ),
        ("Client process 451 disconnected", Event("client_left", (451,))),
        ("Volta MPS: Client process disconnected", Event("unnamed_client_left")),
        ("Client 14777 disconnected", Event("client_left", (14777,))),
        ("Server was unable to shutdown due to 2 active clients", Event(KNOWN)),
        ("Exiting", Event("server_exiting")),
        ("Received device query command. There are 1 devices", Event(KNOWN)),
        (
            "MPS server requesting client {PID: 1244, Context ID: 1} to exit",
            Event("termination_requested", (1244, 1)),
        ),
        ("Client termination succeeded.", Event("termination_done")),
        (
            "Failed to accept new client. Maximum number of clients (48) reached.",
            Event("limit_reached", (48,)),
        ),
        (
            "Server teardown in progress. Refusing to accept new client {PID: 591, Context ID: 0}",
            Event("refused_in_teardown", (591, 0)),
        ),
        (
            "Failed to accept client {PID: 591, Context ID: 0} with status 807",
            Event("accept_failed", (591, 0, 807)),
        ),
        ("Invalid CUDA_VISIBLE_DEVICES.", Event("invalid_device")),
        (
            "Client {PID: 991, Context: 1} encountered a fatal GPU error.",
            Event("fault_named", (991, 1)),
        ),
        ("Volta MPS: Server is handling a fatal GPU error.", Event("fault_handled")),
        (
            "Client {PID: 990, Context ID: 1} on device 0 to be torn down",
            Event("fault_teardown", (990, 1, 0)),
        ),
        (
            "Client {PID: 990, Context ID: 1} on the error-trigging process 990 to be torn down",
            Event("fault_teardown", (990, 1)),
        ),
        ("The following devices will be reset:", Event("fault_list", ("devices",))),
        ("Volta MPS: The following devices", Event("fault_list", ("devices",))),
        (
            "The following client process have a sticky error set:",
            Event("fault_list", ("clients",)),
        ),
        (
            "Volta MPS: The following clients have a sticky error set:",
            Event("fault_list", ("clients",)),
        ),
        ("0", Event("number", (0,))),
        ("User did not send valid credentials", Event("credentials_missing")),
        (
            "Failed to start : invalid argument",
            Event("server_failed", ("Failed to start : invalid argument",)),
        ),
        (
            "MPS Server failed to create/open SHM segment.",
            Event("server_failed", ("MPS Server failed to create/open SHM segment",)),
        ),
        (
            "MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU.",
            Event(
                "server_failed",
                ("MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU",),
            ),
        ),
    ],
)
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
def test_what_only_looks_like_an_event_is_none(message: str) -> None:
    assert control(message) == Event("unrecognized", (message,))


def test_nothing_of_a_huge_line_is_kept_but_its_beginning() -> None:
    event = control("x" * 1_000_000)
    assert event == Event("unrecognized", ("x" * MAX_QUOTED,))
    assert control("Cmd:" + "y" * 1_000_000) == Event("ui_command", ("y" * MAX_QUOTED,))
    assert control("1" * 1_000) == Event("unrecognized", ("1" * MAX_QUOTED,))


def test_invalid_bytes_are_shown_as_such() -> None:
    line = parse_line(b"[2026-11-21 08:55:42.578 Control   630] \xff\xfeCmd")
    assert line.event == Event("unrecognized", ("��Cmd",))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    parse_line(data)
    parse_line(b"[2026-11-21 08:55:42.578 Control   630] " + data)
    parse_line(b"[2026-11-21 08:55:42.578 Server   634] " + data)


WORDS = st.sampled_from(
    [
        "NEW",
        "CLIENT",
        "SERVER",
        "from",
        "user",
        "{PID:",
        "Context",
        "ID:",
        "1}",
        "999999999999",
        ":",
    ]
)


@settings(max_examples=300)
@given(st.lists(WORDS | st.integers(-(10**12), 10**12).map(str), max_size=9).map(" ".join))
def test_no_words_raise(message: str) -> None:
    control(message)
    server(message)


@pytest.mark.parametrize(
    ("lines", "reader"), [(CONTROL_LINES, ControlLogReader), (SERVER_LINES, ServerLogReader)]
)
def test_every_wording_has_a_method(lines: Shapes, reader: type) -> None:
    others = {"daemon_starting", "invalid_device", "server_failed"}  # applied with the writer's PID
    assert {name for name in lines.names if not hasattr(reader, name)} <= others
