"""Lines of control.log and server.log, of every driver whose wording is known, and hostile ones."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mps_exporter.mps import log_events as e
from mps_exporter.mps.log_parser import CONTINUATION, MAX_QUOTED, NOISE, parse_line

STAMP = "2026-11-21 08:55:42.578"
STAMP_MS = 1_795_251_342_578


def control(message: str) -> e.LogEvent:
    return parse_line(f"[{STAMP} Control   630] {message}").event


def server(message: str) -> e.LogEvent:
    return parse_line(f"[{STAMP} Server   634] {message}").event


def test_the_prefix() -> None:
    line = parse_line(f"[{STAMP} Control   630] Accepting connection...")
    assert line == (STAMP_MS, "Control", 630, NOISE)
    moment = datetime.fromtimestamp(STAMP_MS / 1000, UTC)
    assert moment.isoformat(sep=" ", timespec="milliseconds") == f"{STAMP}+00:00"
    assert parse_line(f"[{STAMP} Legacy Server   425] Failed to start : invalid argument") == (
        STAMP_MS,
        "Legacy Server",
        425,
        e.ServerFailed("Failed to start : invalid argument"),
    )
    assert parse_line(f"[{STAMP} Control 1234567] NEW UI".encode()).pid == 1234567


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ("NEW UI", e.UiOpened()),
        ("Cmd:get_server_list", e.UiCommand("get_server_list")),
        ("Cmd:quit -t 5", e.UiCommand("quit -t 5")),
        ("UI closed", e.UiClosed()),
        ("Insufficient privileges for UID 1001. Control deamon settings", e.UiRefused()),
        # Published of MPS v3 daemons, driver 615.
        ("Adding server 'shared' [multiuser enabled]", e.Noise()),
        ("Adding server 'training'", e.Noise()),
        ("Adding server 'Not A Name'", e.Unrecognized("Adding server 'Not A Name'")),
        ("[memacct] failed to register client pid 0", e.Noise()),
        ("Failed to initialize MPS control daemon", e.Noise()),
        (
            "To connect CUDA applications to this daemon, set CUDA_MPS_PIPE_DIRECTORY=/run/mps",
            e.Noise(),
        ),
        (
            "Insufficient privileges for UID 60000. 'NAMESPACE SET' requires server owner.",
            e.UiRefused(),
        ),
        ("634", e.Number(634)),
        ("100.0", e.Unrecognized("100.0")),
        ("", e.Unrecognized("")),
        ("Server 99999 not found", e.Unrecognized("Server 99999 not found")),
        ("User did not send valid credentials", e.CredentialsMissing()),
        ("NEW CLIENT 0 from user 1001: Server already exists", e.ClientArrived(0, 1001, False)),
        (
            "NEW CLIENT 643 from user 4294967294: Server is not ready, push client to pending list",
            e.ClientArrived(643, 4294967294, True),
        ),
        ("Starting new server 634 for user 1001", e.ServerStarting(634, 1001)),
        ("Starting new server 634 for user -2", e.ServerStarting(634, 4294967294)),
        ("NEW SERVER 634: Ready", e.ServerReady(634)),
        ("Server 634 exited with status 0", e.ServerExited(634, 0)),
        ("Server 634 exited with status -1", e.ServerExited(634, -1)),
        ("Try shutting down server 634, backoff is disabled", e.ShutdownTried(634)),
        (
            "Server 634 has 2 active worker threads. Server will not shutdown.",
            e.ShutdownDeclined(634),
        ),
        (
            "Control will try shutting down server 634 again in at most 51200ms",
            e.ShutdownRetry(51200),
        ),
        (
            "Failed to start server using uid 0, error: Operation not permitted",
            e.ServerForbidden(0, "Operation not permitted"),
        ),
        ("Server encountered a fatal exception. Shutting down", e.ServerFailed()),
        ("Starting control daemon using socket /tmp/mps/control", e.DaemonStarting()),
        ("Start", e.DaemonStarting()),
        ("CUDA MPS Control binary version: 13030", e.BinaryVersion("13030")),
        ("Exit with status 0", e.DaemonExited()),
        ("Unable to accept connection", NOISE),
        ("Unable to read new connection type information", NOISE),
    ],
)
def test_control_log(message: str, event: e.LogEvent) -> None:
    assert control(message) == event
    assert control(message + " \r") == event


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ("Startup", e.ServerProcess()),
        ("Start", e.ServerProcess()),
        ("Creating server context on device 1 (NVIDIA A16)", e.DeviceOpened(1, "NVIDIA A16")),
        ("Volta MPS: Creating server context on device 0", e.DeviceOpened(0, "")),
        ("Destroy server context on device 0 (NVIDIA H200)", e.DeviceClosed(0)),
        ("Volta MPS: Destroy server context on device 0", e.DeviceClosed(0)),
        ("Created anonymous shared memory region mps.shm.1001.634", e.ServerOwner(1001)),
        ("Created named shared memory region /cuda.shm.0.52.1", NOISE),
        ("Active Threads Percentage set to 80.0", e.ThreadLimitSet(0.8)),
        ("activeThreadsPercentage set to 33.000000", e.ThreadLimitSet(0.33)),
        (
            "Device pinned memory limit for device 0 set to 0x77f00000 bytes",
            e.MemoryLimitSet(0, 0x77F00000),
        ),
        ("Server Priority set to 0", NOISE),
        ("Server has started", e.ServerOpen()),
        ("MPS Server is started", e.ServerOpen()),
        (
            "Received new client request for {PID: -1333654781, Context ID: 0}",
            e.ConnectionRequested(named=True),
        ),
        ("Received new client request", e.ConnectionRequested(named=False)),
        ("Volta MPS Server: Received new client request", e.ConnectionRequested(named=False)),
        ("MPS Server: worker created", NOISE),
        ("Worker created", NOISE),
        ("Creating worker thread", NOISE),
        ("Creating worker thread for client {PID: 440, Context ID: 1}", NOISE),
        ("Client {PID: 440, Context ID: 1} connected", e.ClientConnected(440, 1)),
        ("New client 14781 connected", e.ClientConnected(14781, 0)),
        (
            "Device NVIDIA H200 (uuid GPU-5e4dfbf1-1b01-c801-7bf9-ce9d9398f893) is associated",
            e.DeviceAssociated("GPU-5e4dfbf1-1b01-c801-7bf9-ce9d9398f893"),
        ),
        (
            "Volta MPS: Device Tesla T4 "
            "(uuid 0xafc3ccca-0xc3365689-0x2ed8f0e1-0x4233036f) is associated",
            e.DeviceAssociated("GPU-afc3ccca-c336-5689-2ed8-f0e14233036f"),
        ),
        ("Status of client {PID: 440, Context ID: 1} is ACTIVE", e.ClientStatus(440, 1, True)),
        ("Volta MPS: status of client {11641, 1} is INACTIVE", e.ClientStatus(11641, 1, False)),
        (
            "Server failed to recevie command with status 806, assuming client "
            "{PID: 451, Context ID: 1} exit",
            e.ConnectionLost(451, 1),
        ),
        ("Server failed to receive command with status 3, assuming client exit", NOISE),
        ("Receive command failed, assuming client exit", NOISE),
        (
            "Client {PID: 451, Context ID: 1} exiting. Number of active client contexts is 1.",
            e.ContextLeft(451, 1),
        ),
        (
            "Client {PID: 1376, Context ID: 1} exiting. Worker is in reset. "
            "Number of active client contexts is 0.",
            e.ContextLeft(1376, 1),
        ),
        ("Client {11641, 1} exit", e.ContextLeft(11641, 1)),
        (
            "Volta MPS: Client disconnected. Number of active client contexts is 2",
            e.ContextLeft(None, None),
        ),
        ("Client process 451 disconnected", e.ClientLeft(451)),
        ("Volta MPS: Client process disconnected", e.ClientLeft(None)),
        ("Client 14777 disconnected", e.ClientLeft(14777)),
        ("Server was unable to shutdown due to 2 active clients", NOISE),
        ("Exiting", e.ServerExiting()),
        ("Received device query command. There are 1 devices", NOISE),
        (
            "MPS server requesting client {PID: 1244, Context ID: 1} to exit",
            e.TerminationRequested(1244),
        ),
        ("Client termination succeeded.", e.TerminationDone()),
        (
            "Failed to accept new client. Maximum number of clients (48) reached.",
            e.LimitReached(48),
        ),
        (
            "Server teardown in progress. Refusing to accept new client {PID: 591, Context ID: 0}",
            e.TeardownRefusal(591, 0),
        ),
        (
            "Failed to accept client {PID: 591, Context ID: 0} with status 807",
            e.AcceptFailed(591, 0, 807),
        ),
        ("Invalid CUDA_VISIBLE_DEVICES.", e.InvalidDevice()),
        (
            "Client {PID: 991, Context: 1} encountered a fatal GPU error.",
            e.FaultBlamed(991, 1),
        ),
        ("Volta MPS: Server is handling a fatal GPU error.", e.FaultHandling()),
        (
            "Client {PID: 990, Context ID: 1} on device 0 to be torn down",
            e.FaultTeardown(990, 1, 0),
        ),
        (
            "Client {PID: 990, Context ID: 1} on the error-trigging process 990 to be torn down",
            e.FaultTeardown(990, 1, None),
        ),
        ("The following devices will be reset:", e.FaultList("devices")),
        ("Volta MPS: The following devices", e.FaultList("devices")),
        ("The following client process have a sticky error set:", e.FaultList("clients")),
        ("Volta MPS: The following clients have a sticky error set:", e.FaultList("clients")),
        ("0", e.Number(0)),
        ("User did not send valid credentials", e.CredentialsMissing()),
        (
            "Failed to start : invalid argument",
            e.ServerFailed("Failed to start : invalid argument"),
        ),
        (
            "MPS Server failed to create/open SHM segment.",
            e.ServerFailed("MPS Server failed to create/open SHM segment"),
        ),
        (
            "MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU.",
            e.ServerFailed(
                "MPS is only supported on 64-bit Linux platforms, with an SM 3.5 or higher GPU"
            ),
        ),
    ],
)
def test_server_log(message: str, event: e.LogEvent) -> None:
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
    assert control(message) == e.Unrecognized(message)


def test_nothing_of_a_huge_line_is_kept_but_its_beginning() -> None:
    event = control("x" * 1_000_000)
    assert event == e.Unrecognized("x" * MAX_QUOTED)
    assert control("Cmd:" + "y" * 1_000_000) == e.UiCommand("y" * MAX_QUOTED)
    assert control("1" * 1_000) == e.Unrecognized("1" * MAX_QUOTED)


def test_invalid_bytes_are_shown_as_such() -> None:
    line = parse_line(b"[2026-11-21 08:55:42.578 Control   630] \xff\xfeCmd")
    assert line.event == e.Unrecognized("\ufffd\ufffdCmd")


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
