"""Clients that share a PID, end unnamed or are refused; limits; unknown lines."""

from copy import deepcopy

import pytest

from mps_exporter.limits_timeouts_intervals import OF_ORDINARY_USER
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import DaemonFacts, ProcessFacts
from testing.mps_logs import (
    EIGHT,
    GPU,
    GPU_TWO,
    PIPE,
    at,
    counts,
    more,
    observation,
    read,
    script,
    start,
    summary,
    values,
)
from testing.mps_script import DAEMON, HOLDER, arrives, pending, server_starts

FACTS = DaemonFacts(PIPE, "/log", process=ProcessFacts(630, EIGHT, state="S"))


def only_server(tracker: DaemonTracker) -> TrackedServer:
    (server,) = tracker.state.servers
    return server


UNNAMED = (
    DAEMON
    + pending("00:01.000", 100, 1001)
    + server_starts("00:01.001", "00:01.200", 110, 1001)
    + "00:01.201 S110 Received new client request\n"
    + arrives("00:02.000", 101, 1001)
    + "00:03.000 S110 Client process disconnected\n"
)
"""A log that names no clients: 100 and 101 connected, one of them left."""


def test_a_client_that_left_unnamed_is_named_by_proc_and_not_lost_with_the_server() -> None:
    tracker = start(UNNAMED)
    alive = {110: ProcessFacts(110, EIGHT, state="S"), 101: ProcessFacts(101, EIGHT, state="S")}
    tracker.observe(at("00:04"), FACTS, alive, {100, 101, 110})
    killed = deepcopy(tracker)
    tracker.add_logs(observation(at("00:06"), {}))
    assert [one.pid for one in only_server(tracker).clients] == [101]
    assert summary(tracker.state.counters)["disconnections"] == {"1001": 1}
    more(killed, "00:04.500 C630 Server 110 exited with status 1\n")
    assert summary(killed.state.counters)["losses"] == {"1001 server_crashed": 1}


def test_a_server_that_writes_nothing_to_the_log_that_is_read_is_no_ghost() -> None:
    """After a rotation with a new file the connected clients are unknown."""
    text = DAEMON + pending("00:01.000", 100, 1001)
    text += "00:01.001 C630 Starting new server 110 for user 1001\n"
    text += "00:02.000 C630 NEW SERVER 110: Ready\n"
    text += "00:02.100 C630 NEW CLIENT 100 from user 1001: Server already exists\n"
    tracker = start(text)
    tracker.update_liveness(at("00:08"), lambda pid, _at: pid != 100)
    tracker.advance_to(at("00:10"))
    server = only_server(tracker)
    assert not server.is_ghost
    assert not server.has_log


REFUSING = "S110 Server teardown in progress. Refusing to accept new client"
STATUS = "S110 Failed to accept client {{PID: 300, Context ID: 0}} with status {}"
FULL = "S110 Failed to accept new client. Maximum number of clients (48) reached."
DEVICES = "S110 Failed to accept new client. Reached maximum number of device connections"
BLAMED = "Client {PID: 100, Context: 1} encountered a fatal GPU error."
INVALID = "K300 Invalid CUDA_VISIBLE_DEVICES."


@pytest.mark.parametrize(("second_at", "refusals"), [("00:03.000", 1), ("00:03.001", 2)])
@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        (f"{REFUSING} {{PID: 300, Context ID: 0}}", STATUS.format(807), "server_not_ready"),
        (FULL, STATUS.format(808), "context_limit"),
        (DEVICES, STATUS.format(809), "context_limit"),
        (INVALID, INVALID, "invalid_device"),
    ],
)
def test_two_lines_of_one_second_are_one_refusal(
    first: str, second: str, cause: str, second_at: str, refusals: int
) -> None:
    found = counts(HOLDER + f"00:02.000 {first}\n{second_at} {second}\n")
    assert found["rejections"] == {f"1001 {cause}": refusals}


@pytest.mark.parametrize(
    ("lines", "unrecognized"),
    [
        (["A new driver says this"], 1),
        (["100"], 1),
        ([BLAMED, "The following devices will be reset:", "0"], 0),
        ([BLAMED, "0"], 1),
    ],
)
def test_unknown_lines_are_counted_and_numbers_outside_a_list(
    lines: list[str], unrecognized: int
) -> None:
    text = HOLDER + "".join(f"00:02.000 S110 {line}\n" for line in lines)
    found = values(read(text), "mps_control_log_unrecognized_lines_total")
    assert found["server",] == unrecognized


def test_a_gpu_that_was_given_to_the_wrong_context_is_moved() -> None:
    text = DAEMON + server_starts("00:01.001", "00:01.100", 110, 1001)
    for pid in (100, 101):
        for context in (0, 1):
            text += f"00:01.200 S110 Client {{PID: {pid}, Context ID: {context}}} connected\n"
    for pid, uuid in ((101, GPU_TWO), (100, GPU)):
        text += f"00:01.300 S110 Device NVIDIA H200 (uuid {uuid}) is associated\n"
        text += f"00:01.300 S110 Status of client {{PID: {pid}, Context ID: 1}} is ACTIVE\n"
    found = {one.pid: one.contexts_by_gpu for one in only_server(start(text)).clients}
    assert found == {100: {GPU: 1}, 101: {GPU_TWO: 1}}


def test_clients_beyond_the_quota_are_counted_only() -> None:
    text = DAEMON + server_starts("00:01.000", "00:01.200", 200, 1001)
    for pid in range(1000, 1300):
        text += f"00:01.500 S200 Client {{PID: {pid}, Context ID: 0}} connected\n"
    tracker = DaemonTracker(PIPE, OF_ORDINARY_USER)
    tracker.add_logs(observation(at("00:20"), script(text).data))
    assert len(tuple(only_server(tracker).clients)) == OF_ORDINARY_USER.clients
    assert only_server(tracker).clients.unfollowed == 300 - OF_ORDINARY_USER.clients
    more(tracker, "00:21.000 S200 Client process 1299 disconnected\n")
    assert only_server(tracker).clients.unfollowed == 299 - OF_ORDINARY_USER.clients
