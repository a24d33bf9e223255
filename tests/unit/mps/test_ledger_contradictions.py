"""Lost lines, wrong clocks, late replies: corrections of the log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mps_exporter.mps.control_protocol import ProbeReply, ServerReply
from mps_exporter.mps.server_queries import ServerAnswers, reconcile, servers_due, with_servers
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import ControlObservation, DaemonFacts, Outcome, ProcessFacts
from testing.mps_logs import (
    EIGHT,
    PIPE,
    at,
    counts,
    more,
    observation,
    script,
    start,
    summary,
    values,
)
from testing.mps_script import HOLDER, client, leaves

DAEMON = ProcessFacts(630, EIGHT, state="S", namespace_pids=(630,))
SERVER = ProcessFacts(110, EIGHT + 1, name="nvidia-cuda-mps-server", state="S")
FACTS = DaemonFacts(PIPE, "/log", process=DAEMON, servers=(SERVER,))
CRASH = "30:00.000 C630 Server 110 exited with status 0\n"


def clients(tracker: DaemonTracker) -> list[int]:
    (server,) = tracker.state.servers
    return [client.pid for client in server.clients]


def said(tracker: DaemonTracker, now: float, *pids: int) -> None:
    tracker.reconcile(now, now, (110,), [ServerReply(110, state="ACTIVE", client_pids=pids)])
    tracker.add_logs(observation(now + 1, {}))


# ---------------------------------------------------------------- clients


def test_a_client_whose_process_is_gone_has_left_though_no_line_says_so() -> None:
    tracker = start(HOLDER)
    tracker.observe(at("00:20"), FACTS, {110: SERVER}, {100, 110})
    tracker.add_logs(observation(at("00:25"), {}))
    assert clients(tracker) == [100]  # its line may come
    tracker.add_logs(observation(at("00:32"), {}))
    assert clients(tracker) == []
    counters = summary(tracker.state.counters)
    assert counters["disconnections"] == {"1001": 1}
    assert "losses" not in counters
    assert "sessions" not in counters  # when it left is not known


def test_an_exit_that_is_confirmed_late_does_not_count_time_twice() -> None:
    tracker = start(HOLDER + client("00:01.200", 101, 110))
    alive = {110: SERVER, 101: ProcessFacts(101, EIGHT + 1, state="S")}
    tracker.observe(at("00:20"), FACTS, alive, {100, 101, 110})
    more(tracker, "02:01.200 C630 NEW UI")  # the logs could not be read in between
    assert clients(tracker) == [101]
    more(tracker, "02:01.300 C630 NEW UI")
    assert summary(tracker.state.counters)["holding_seconds"] == {"1001": 120.1}


def test_two_replies_that_contradict_the_log_are_accepted() -> None:
    tracker = start(HOLDER)
    said(tracker, at("00:10"), 300)
    assert clients(tracker) == [100]
    said(tracker, at("00:15"), 300)
    assert clients(tracker) == [100]  # too soon after the first
    said(tracker, at("00:30"), 300)
    assert clients(tracker) == [300]


def test_a_client_that_left_after_the_query_is_not_restored() -> None:
    tracker = start("00:00.000 C630 UI closed\n00:00.000 O90 Startup\n")
    said(tracker, at("00:05"), 456, 457)
    replies = [ServerReply(110, state="ACTIVE", client_pids=(456, 457))]
    tracker.reconcile(at("15:00.01"), at("15:00"), (110,), replies)
    more(tracker, leaves("15:00.100", 456, 110))
    (_, server) = tracker.state.servers
    assert [client.pid for client in server.clients] == [457]


def test_clients_known_from_the_tool_only_are_lost_in_a_crash() -> None:
    tracker = start("00:00.000 C630 Starting control daemon using socket /tmp/mps/control\n")
    said(tracker, at("00:05"), 456, 457)
    more(tracker, CRASH)
    counters = summary(tracker.state.counters)
    assert counters["server_exits"] == {"crashed": 1}
    assert sum(counters["losses"].values()) == 2


def test_a_client_keeps_the_limits_that_it_connected_with() -> None:
    limited = HOLDER.replace(
        "00:01.200 S110 Received",
        "00:01.100 S110 Active Threads Percentage set to 100.0\n"
        "00:01.100 S110 Device pinned memory limit for device 0 set to 0x40000000 bytes\n"
        "00:01.200 S110 Received",
        1,
    )
    tracker = start(limited)
    more(
        tracker,
        "00:10.000 C630 NEW UI\n"
        "00:10.000 C630 Cmd:set_active_thread_percentage 110 20\n"
        "00:10.000 C630 20.0\n"
        "00:10.000 C630 UI closed\n"
        "00:11.000 S110 Device pinned memory limit for device 0 set to 0x10000000 bytes\n",
    )
    view = tracker.state
    (server,) = view.servers
    (client,) = server.clients
    assert (server.thread_ratio, client.thread_ratio) == (0.2, 1.0)
    assert client.memory_limits == {0: 1 << 30}
    assert view.daemon.configured_at == at("00:10")


# ---------------------------------------------------------------- servers


def test_a_vanished_server_is_counted_when_its_line_arrives() -> None:
    tracker = start(HOLDER)
    tracker.observe(at("00:10"), FACTS, {}, {110, 100})
    tracker.add_logs(observation(at("00:12"), {}))
    assert tuple(tracker.state.servers) == ()
    more(tracker, CRASH)
    counters = summary(tracker.state.counters)
    assert counters["server_exits"] == {"crashed": 1}
    assert counters["losses"] == {"1001 server_crashed": 1}


def test_a_server_that_the_daemon_no_longer_lists_vanishes() -> None:
    tracker = start(HOLDER)
    for second in (10, 15):
        tracker.reconcile(EIGHT + second, EIGHT + second, (), [])
        tracker.add_logs(observation(EIGHT + second + 1, {}))
        assert len(tuple(tracker.state.servers)) == 1
    tracker.reconcile(EIGHT + 30, EIGHT + 30, (), [])
    tracker.add_logs(observation(EIGHT + 31, {}))
    assert tuple(tracker.state.servers) == ()


def test_a_server_known_from_a_late_line_only_is_queried_and_ready() -> None:
    tracker = start(leaves("10:00.000", 455, 110) + "10:00.100 C630 UI closed\n")
    now = at("11:00")
    answers = ServerAnswers(probe=ProbeReply((110,), 1.0))
    requested = servers_due(
        now=now,
        interval_seconds=900,
        blind_interval_seconds=5,
        answers=answers,
        facts=FACTS,
        state=tracker.state,
        logs_readable=True,
    )
    assert requested == (110,)
    said(tracker, now, 456, 457)
    (server,) = tracker.state.servers
    assert (server.state, server.clients.count) == ("ACTIVE", 2)


def test_a_server_that_the_control_tool_lists_is_not_ready_before_the_log_says_so() -> None:
    tracker = start(HOLDER[: HOLDER.index("        00:01.200 C630")])
    reconcile(tracker.state, at("00:01.100"), [110], [])
    (server,) = tracker.state.servers
    assert (server.state, server.ready_at) == ("INITIALIZING", None)
    more(tracker, "00:01.200 C630 NEW SERVER 110: Ready\n")
    view = tracker.state
    assert (next(iter(view.servers)).state, next(iter(view.servers)).ready_at) == (
        "ACTIVE",
        at("00:01.200"),
    )
    assert summary(view.counters)["startups"] == [1, 0.199]


def test_servers_only_in_the_list_or_only_in_the_log_are_disputed() -> None:
    answers = ServerAnswers(probe=ProbeReply((110, 111), 1.0))
    nothing = ControlObservation(at("00:20"), PIPE, "reconciliation", Outcome.OK, ())
    assert with_servers(answers, nothing, logged=[110]).unexplained == {111}
    assert with_servers(answers, nothing, logged=[110, 111]).unexplained == frozenset()


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize("ahead", [0.0, 5.0, 3600.0])
def test_a_child_of_the_daemon_lives_whatever_the_clock(ahead: float) -> None:
    """Set back after the boot time was read, it makes all start times later than the stamps."""
    tracker = start(HOLDER)
    late = ProcessFacts(110, EIGHT + 1 + ahead, name="nvidia-cuda-mps-server", state="S")
    client = ProcessFacts(100, EIGHT + 1 + ahead, state="S")
    daemon = ProcessFacts(630, EIGHT + ahead, state="S", namespace_pids=(630,))
    facts = DaemonFacts(PIPE, "/log", process=daemon, servers=(late,))
    tracker.observe(at("00:10"), facts, {110: late, 100: client}, {100, 110})
    tracker.add_logs(observation(at("00:40"), {}))
    assert clients(tracker) == [100]


def test_a_client_whose_pid_was_reused_has_left() -> None:
    tracker = start(HOLDER)
    younger = ProcessFacts(100, EIGHT + 500, state="S")
    tracker.observe(at("10:00"), FACTS, {110: SERVER, 100: younger}, {100, 110})
    tracker.add_logs(observation(at("11:00"), {}))
    assert clients(tracker) == []


# ---------------------------------------------------------------- daemons


def test_the_end_of_a_daemon_before_the_exporters_start_is_not_counted() -> None:
    logs = script(HOLDER)
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("50:00"), {"control": logs.control}, history=True))
    tracker.add_logs(observation(at("50:00"), {"server": logs.server}, history=True))
    tracker.mark_absent(at("50:01"))
    tracker.add_logs(observation(at("50:05"), {}))
    view = tracker.state
    assert (tuple(view.servers), view.daemon.died) == ((), True)
    assert "server_exits" not in summary(view.counters)
    assert "losses" not in summary(view.counters)


# ---------------------------------------------------------------- refusals


def test_interleaved_refusals_are_counted_once_each() -> None:
    full = "S110 Failed to accept new client. Maximum number of clients (48) reached."
    status = "S110 Failed to accept client {{PID: {}, Context ID: 0}} with status 808"
    text = f"""
        00:05.000 {full}
        00:05.000 {full}
        00:05.001 {status.format(301)}
        00:05.001 {status.format(302)}
    """
    counters = counts(HOLDER + text)
    assert counters["rejections"] == {"1001 context_limit": 2}


# ---------------------------------------------------------------- logs that are read late


def test_a_server_that_the_tool_named_before_the_logs_were_read_has_not_exited() -> None:
    """On a busy machine or a slow file system the reply precedes the first line."""
    tracker = DaemonTracker(PIPE)
    said(tracker, at("02:00"), 100)
    tracker.add_logs(observation(at("02:05"), script(HOLDER).data, history=True))
    view = tracker.state
    assert [server.pid for server in view.servers] == [110]
    assert next(iter(view.servers)).started_at < at("01:00")  # as the log says
    assert clients(tracker) == [100]
    assert values(view, "mps_server_last_exit_timestamp_seconds") == {}
    assert "daemon_died" not in {incident.kind for incident in view.incidents.snapshot()}


def test_a_server_of_the_present_daemon_has_not_exited_with_the_last_one() -> None:
    """The log was away while one daemon died and another started: the first one's server ended."""
    tracker = start(HOLDER)
    tracker.add_logs(observation(at("05:00"), {}, readable=()))
    tracker.reconcile(at("06:00"), at("06:00"), (210,), [ServerReply(210, state="ACTIVE")])
    assert len(tuple(tracker.state.servers)) == 2
    restart = "05:30.000 C730 Starting control daemon using socket /tmp/mps/control\n"
    started = "05:31.000 C730 Starting new server 210 for user 1001\n"
    tracker.add_logs(observation(at("06:01"), script(restart + started).data))
    view = tracker.state
    assert [server.pid for server in view.servers] == [210]
    assert summary(view.counters)["server_exits"] == {"daemon_died": 1}


def test_a_server_that_the_tool_listed_first_has_not_exited_without_control_log() -> None:
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("01:59"), {}, readable=()))
    tracker.reconcile(at("02:00"), at("02:00"), (110,), [ServerReply(110, state="ACTIVE")])
    older = "00:30.000 O90 Startup\n00:30.000 S90 CUDA MPS Server for Linux/Unix.\n"
    own = "01:00.000 O110 Startup\n01:00.000 S110 CUDA MPS Server for Linux/Unix.\n"
    lines = script(older + own)
    found = observation(at("02:05"), {"server": lines["server"]}, readable=("server",))
    tracker.add_logs(found)
    view = tracker.state
    assert [server.pid for server in view.servers] == [110]
    assert sum(summary(view.counters)["server_exits"].values()) == 1  # of 90, when 110 started


# ---------------------------------------------------------------- failed scans


@pytest.mark.parametrize(
    ("process", "ended"),
    [
        (DAEMON, False),
        (replace(DAEMON, state="Z"), True),
        (replace(DAEMON, start_time_seconds=at("00:30")), True),
        (None, True),
    ],
    ids=["there", "zombie", "another", "gone"],
)
def test_the_pid_of_a_daemon_shows_whether_it_has_exited(
    process: ProcessFacts | None, ended: bool
) -> None:
    """It was not found as a daemon, for example because its directory could not be read."""
    tracker = start(HOLDER)
    tracker.observe(at("00:20"), FACTS, {110: SERVER}, {100, 110})
    missed = replace(FACTS, process=None, servers=())
    there = {110: SERVER} if process is None else {110: SERVER, 630: process}
    tracker.observe(at("00:40"), missed, there, {110, 630})
    tracker.add_logs(observation(at("00:50"), {}))
    view = tracker.state
    assert (view.daemon.ended_at is not None) is ended
    assert bool(values(view, "mps_server_last_exit_timestamp_seconds")) is ended
