"""Clients that share a PID, end unnamed or are refused; limits; unknown lines."""

from __future__ import annotations

import pytest

from mps_exporter.mps.policy import OF_ORDINARY_USER
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
    numbers,
    observation,
    read,
    script,
    start,
    summary,
    values,
)
from testing.mps_script import DAEMON, HOLDER, arrives, client, leaves, pending, server_starts

FACTS = DaemonFacts(PIPE, "/log", process=ProcessFacts(630, EIGHT, state="S"))
UNRECOGNIZED = "mps_control_log_unrecognized_lines_total('server',)"


def only_server(tracker: DaemonTracker) -> TrackedServer:
    (server,) = tracker.state.servers
    return server


def counted(text: str) -> dict[str, float]:
    return numbers(read(text).counters)


def test_a_pid_that_connects_again_belongs_to_another_process() -> None:
    tracker = start(HOLDER + client("00:05.000", 100, 110))
    found = summary(tracker.state.counters)
    assert (found["connections"], found["disconnections"]) == ({"1001": 2}, {"1001": 1})
    assert found["sessions"] == {"1001": [1, 3.8]}
    assert [one.connected_at for one in only_server(tracker).clients] == [at("00:05.000")]


UNNAMED = (
    DAEMON
    + pending("00:01.000", 100, 1001)
    + server_starts("00:01.001", "00:01.200", 110, 1001)
    + "00:01.201 S110 Received new client request\n"
    + arrives("00:02.000", 101, 1001)
    + "00:03.000 S110 Client process disconnected\n"
)
"""A log that names no clients: 100 and 101 connected, one of them left."""


def test_a_client_that_left_unnamed_is_counted_once_and_named_by_proc() -> None:
    tracker = start(UNNAMED)
    assert only_server(tracker).clients.count == 1
    alive = {110: ProcessFacts(110, EIGHT, state="S"), 101: ProcessFacts(101, EIGHT, state="S")}
    tracker.observe(at("00:04"), FACTS, alive, {100, 101, 110})
    tracker.add_logs(observation(at("00:06"), {}))
    assert [one.pid for one in only_server(tracker).clients] == [101]
    assert summary(tracker.state.counters)["disconnections"] == {"1001": 1}
    tracker.observe(at("00:07"), FACTS, {}, {100, 101})
    tracker.add_logs(observation(at("00:09"), {}))
    assert summary(tracker.state.counters)["disconnections"] == {"1001": 2}


def test_a_client_that_left_unnamed_is_not_lost_with_the_server() -> None:
    found = counts(UNNAMED + "00:05.000 C630 Server 110 exited with status 1\n")
    assert found["server_exits"] == {"crashed": 1}
    assert found["losses"] == {"1001 server_crashed": 1}
    assert found["disconnections"] == {"1001": 2}


def test_more_ends_than_clients_change_nothing() -> None:
    tracker = start(UNNAMED + 3 * "00:04.000 S110 Client process disconnected\n")
    assert only_server(tracker).clients.count == 0
    found = summary(tracker.state.counters)
    assert found["disconnections"] == {"1001": 2}
    assert found["holding_seconds"] == {"1001": 2.799}


def test_after_the_last_unnamed_end_a_pid_may_connect_again() -> None:
    tracker = start(UNNAMED + "00:04.000 S110 Client process disconnected\n")
    more(tracker, arrives("00:05.000", 101, 1001))
    assert only_server(tracker).clients.count == 1
    assert summary(tracker.state.counters)["connections"] == {"1001": 3}


def test_clients_with_pid_0_have_contexts_of_their_own() -> None:
    connected = "S110 Client {PID: 0, Context ID: "
    tracker = start(
        DAEMON
        + server_starts("00:01.001", "00:01.200", 110, 1001)
        + f"00:01.200 {connected}0}} connected\n"
        + f"00:01.200 {connected}1}} connected\n"
        + f"00:01.300 {connected}0}} connected\n"
        + f"00:01.300 {connected}1}} connected\n"
        + f"00:01.300 {connected}2}} connected\n"
    )
    found = [sum(one.contexts_by_gpu.values()) for one in only_server(tracker).clients]
    assert found == [2, 1]


@pytest.mark.parametrize(("until", "abandoned"), [("00:11.199", {}), ("00:11.201", {"1001": 1})])
def test_a_client_that_does_not_connect_in_ten_seconds_has_given_up(
    until: str, abandoned: dict[str, int]
) -> None:
    tracker = start(
        DAEMON
        + server_starts("00:00.100", "00:00.200", 90, 1002)
        + pending("00:00.500", 100, 1001)
        + "00:01.000 S90 Exiting\n00:01.000 C630 Server 90 exited with status 0\n"
        + server_starts("00:01.001", "00:01.200", 110, 1001)
    )
    more(tracker, f"{until} C630 NEW CLIENT 7 from user 1001: Server already exists\n")
    found = summary(tracker.state.counters)
    assert found.get("waits_abandoned", {}) == abandoned


def test_a_waiter_that_is_refused_has_given_up() -> None:
    refused = "S110 Server teardown in progress. Refusing to accept new client "
    tracker = start(
        DAEMON
        + server_starts("00:00.100", "00:00.200", 90, 1002)
        + pending("00:00.500", 100, 1001)
        + "00:01.000 S90 Exiting\n00:01.000 C630 Server 90 exited with status 0\n"
        + server_starts("00:01.001", "00:01.200", 110, 1001)
        + f"00:01.300 {refused}{{PID: 100, Context ID: 0}}\n"
    )
    found = summary(tracker.state.counters)
    assert found["waits_abandoned"] == {"1001": 1}
    assert found["rejections"] == {"1001 server_not_ready": 1}


def test_a_context_of_a_client_whose_connection_was_not_read() -> None:
    text = "S110 Client {PID: 300, Context ID: 1} connected\n"
    tracker = start(f"{HOLDER}00:02.000 {text}")
    found = {one.pid: sum(one.contexts_by_gpu.values()) for one in only_server(tracker).clients}
    assert found == {100: 1, 300: 1}


def test_without_control_log_a_server_has_started_when_it_says_so() -> None:
    logs = script("00:01.000 O110 Startup\n00:01.250 O110 Server has started\n")
    found = summary(read(logs, readable=("server",)).counters)
    assert (found["server_starts"], found["startups"]) == ({"None": 1}, [1, 0.25])


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


def test_a_server_whose_queued_client_died_before_it_was_ready_is_a_ghost() -> None:
    text = (
        DAEMON
        + pending("00:01.000", 100, 1001)
        + "00:01.001 C630 Starting new server 110 for \
user 1001\n"
    )
    text += "00:01.002 O110 Startup\n" + pending("00:05.000", 100, 1002)
    text += "00:06.000 C630 NEW SERVER 110: Ready\n"
    tracker = start(text)
    reused = {110: ProcessFacts(110, EIGHT, state="S"), 100: ProcessFacts(100, EIGHT + 5)}
    tracker.observe(at("00:07"), FACTS, reused, {100, 110})
    tracker.add_logs(observation(at("00:09"), {}))
    assert only_server(tracker).is_ghost


NOT_READY = "S110 Server teardown in progress. Refusing to accept new client"
STATUS = "S110 Failed to accept client {PID: 300, Context ID: 0} with status 807"
INVALID = "K300 Invalid CUDA_VISIBLE_DEVICES."


@pytest.mark.parametrize(("second_at", "refusals"), [("00:03.000", 1), ("00:03.001", 2)])
@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        (f"{NOT_READY} {{PID: 300, Context ID: 0}}", STATUS, "server_not_ready"),
        (INVALID, INVALID, "invalid_device"),
    ],
)
def test_two_lines_of_one_second_are_one_refusal(
    first: str, second: str, cause: str, second_at: str, refusals: int
) -> None:
    found = counts(HOLDER + f"00:02.000 {first}\n{second_at} {second}\n")
    assert found["rejections"] == {f"1001 {cause}": refusals}


def test_the_first_thread_limit_is_that_of_all_clients_and_later_ones_of_new_ones() -> None:
    tracker = start(
        HOLDER
        + "00:02.000 S110 Active Threads Percentage set to 50.0\n"
        + "00:03.000 S110 Active Threads Percentage set to 20.0\n"
        + client("00:04.000", 101, 110)
    )
    server = only_server(tracker)
    assert server.thread_ratio == 0.2
    assert [one.thread_ratio for one in server.clients] == [0.5, 0.2]


def test_unknown_lines_of_a_server_are_counted_and_numbers_outside_a_list() -> None:
    assert UNRECOGNIZED not in counted(HOLDER)
    assert counted(HOLDER + "00:02.000 S110 A new driver says this\n")[UNRECOGNIZED] == 1
    assert counted(HOLDER + "00:02.000 S110 100\n")[UNRECOGNIZED] == 1
    blamed = "00:02.000 S110 Client {PID: 100, Context: 1} encountered a fatal GPU error.\n"
    listed = "00:02.000 S110 The following devices will be reset:\n00:02.000 S110 0\n"
    assert UNRECOGNIZED not in counted(HOLDER + blamed + listed)
    assert counted(HOLDER + blamed + "00:02.000 S110 0\n")[UNRECOGNIZED] == 1
    assert counted(HOLDER + blamed + listed + "00:02.501 S110 0\n")[UNRECOGNIZED] == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_gpu_that_was_given_to_the_wrong_context_is_moved(late: bool) -> None:
    def opens(pid: int) -> str:
        return (
            f"00:01.200 S110 Client {{PID: {pid}, Context ID: 0}} connected\n"
            f"00:01.200 S110 Client {{PID: {pid}, Context ID: 1}} connected\n"
        )

    def gets(pid: int, uuid: str) -> str:
        return (
            f"00:01.300 S110 Device NVIDIA H200 (uuid {uuid}) is associated\n"
            f"00:01.300 S110 Status of client {{PID: {pid}, Context ID: 1}} is ACTIVE\n"
        )

    text = DAEMON + server_starts("00:01.001", "00:01.100", 110, 1001) + opens(100) + opens(101)
    text += gets(101, GPU_TWO)
    if late:
        text += leaves("00:01.300", 101, 110) + gets(100, GPU)
        expected = {100: {GPU: 1}}
    else:
        text += gets(100, GPU)
        expected = {100: {GPU: 1}, 101: {GPU_TWO: 1}}
    found = {one.pid: one.contexts_by_gpu for one in only_server(start(text)).clients}
    assert found == expected


def test_a_server_is_ready_once() -> None:
    text = HOLDER + "00:05.000 C630 NEW SERVER 110: Ready\n"
    assert counts(text)["startups"] == [1, 0.199]


def test_a_server_whose_start_was_not_read_has_no_startup_time() -> None:
    found = counts("00:05.000 C630 NEW SERVER 110: Ready\n")
    assert "startups" not in found


def test_of_an_ordinary_users_daemon_little_is_kept() -> None:
    """Any user can write such lines into the log of a daemon of their own."""
    text = DAEMON
    for server_pid in range(200, 204):
        text += server_starts("00:01.000", "00:01.200", server_pid, 1001)
        for pid in range(300):
            client_pid = server_pid * 1000 + pid
            text += (
                f"00:01.500 S{server_pid} Client {{PID: {client_pid}, Context ID: 0}} connected\n"
            )
    for uid in range(3000, 3040):
        text += (
            f"00:02.000 C630 NEW CLIENT {uid} from user {uid}: "
            "Server is not ready, push client to pending list\n"
        )
    tracker = DaemonTracker(PIPE, OF_ORDINARY_USER)
    tracker.add_logs(observation(at("00:20"), script(text).data))
    view = tracker.state
    assert len(tuple(view.servers)) == OF_ORDINARY_USER.servers
    for server in view.servers:
        assert len(tuple(server.clients)) == OF_ORDINARY_USER.clients
        assert server.clients.unfollowed == 300 - OF_ORDINARY_USER.clients
    users = {labels[0] for labels in values(view, "mps_server_starts_total")}
    users |= {labels[0] for labels in values(view, "mps_client_connections_total")}
    assert len(users) <= OF_ORDINARY_USER.users + 1
    assert len(view.waits) <= OF_ORDINARY_USER.queued
    more(tracker, "00:21.000 S203 Client process 203299 disconnected\n")
    assert tuple(tracker.state.servers)[-1].clients.unfollowed == 299 - OF_ORDINARY_USER.clients
