"""Waits behind another user's server: their start, end and cost."""

from __future__ import annotations

import pytest

from mps_exporter.mps.policy import MAX_TIMELINE_SPANS, TIMELINE_SECONDS
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.mps.waits import Timeline
from testing.mps_logs import (
    Logs,
    at,
    counted,
    incidents,
    more,
    read,
    script,
    start,
    summary,
    values,
)
from testing.mps_script import HOLDER, arrives, client, leaves, pending, server_ends, server_starts


def waiting(view: DaemonState) -> list[tuple[int, int, float, int | None, bool]]:
    return [(w.pid, w.uid, w.since, w.behind_uid, w.dead) for w in view.waits]


def test_an_overtaking_pid_that_is_reused_counts_again() -> None:
    arrival = "C630 NEW CLIENT 101 from user 1001: Server already exists\n"
    text = HOLDER + pending("00:02.000", 200, 1002)
    for second in ("03", "05"):
        text += f"00:{second}.000 {arrival}" + client(f"00:{second}.000", 101, 110)
        text += leaves(f"00:{second}.500", 101, 110)
    assert counted(read(text).counters, "mps_uid_overtakes_total") == {(1001,): 2}


def test_a_queued_pid_of_another_user_replaces_the_dead_client() -> None:
    text = HOLDER + pending("00:02.000", 200, 1002) + pending("00:04.000", 200, 1003)
    view = read(text)
    assert waiting(view) == [(200, 1003, at("00:04"), 1001, False)]
    assert counted(view.counters, "mps_uid_waits_abandoned_total") == {(1002,): 1}


def test_a_client_queued_twice_waits_once_since_the_first_time() -> None:
    text = HOLDER + pending("00:02.000", 200, 1002) + pending("00:04.000", 200, 1002)
    assert waiting(read(text)) == [(200, 1002, at("00:02"), 1001, False)]


def test_a_client_with_pid_0_ends_its_users_oldest_wait_with_pid_0() -> None:
    text = HOLDER + pending("00:02.000", 200, 1002) + pending("00:02.100", 0, 1003)
    text += pending("00:02.200", 0, 1002) + pending("00:02.300", 0, 1002)
    text += leaves("00:03.000", 100, 110) + server_ends("00:03.500", 110)
    text += """
        00:03.500 C210 Starting new server 210 for user 1002
        00:03.600 S210 Client {PID: 0, Context ID: 0} connected
    """
    assert [(w.pid, w.uid, w.since) for w in read(text).waits] == [
        (200, 1002, at("00:02")),
        (0, 1003, at("00:02.100")),
        (0, 1002, at("00:02.300")),
    ]
    tracker = start(text)
    # /proc has no PID 0.
    assert 0 not in tracker.state.pids_to_look_up()
    view = look(tracker, "00:10", {0})
    assert [w.dead for w in view.waits] == [False] * 3


def test_a_client_that_is_refused_for_the_limit_of_contexts_overtakes_once() -> None:
    """control.log shows its request of a context with the timestamp of its refusal."""
    text = (
        HOLDER
        + pending("00:02.000", 200, 1002)
        + """
        00:03.000 C630 NEW CLIENT 101 from user 1001: Server already exists
        00:03.001 S110 Client {PID: 101, Context ID: 0} connected
        00:03.015 C630 NEW CLIENT 101 from user 1001: Server already exists
        00:03.015 S110 Client {PID: 101, Context ID: 1} connected
        00:03.015 S110 Failed to accept new client. Maximum number of clients (48) reached.
        00:03.015 S110 Client process 101 disconnected
        """
    )
    assert counted(read(text).counters, "mps_uid_overtakes_total") == {(1001,): 1}


def test_overtakers_with_pid_0_are_counted_by_their_first_connection() -> None:
    arrival = "C630 NEW CLIENT 0 from user 1001: Server already exists\n"
    text = HOLDER + pending("00:02.000", 200, 1002)
    for second in ("03", "04"):
        text += f"00:{second}.000 C630 User did not send valid credentials\n"
        text += f"00:{second}.000 {arrival}00:{second}.010 {arrival}00:{second}.020 {arrival}"
    assert counted(read(text).counters, "mps_uid_overtakes_total") == {(1001,): 2}


# ---------------------------------------------------------------- /proc knows more


def look(
    tracker: DaemonTracker, time: str, dead: set[int], *, daemon: bool | None = None
) -> DaemonState:
    """Look at /proc, and at the logs again two seconds later."""
    now = at(time)
    tracker.update_liveness(now, lambda pid, _at: pid not in dead, daemon=daemon)
    tracker.advance_to(now + 2.0)
    return tracker.state


def test_a_waiting_client_died_when_it_was_first_missing() -> None:
    tracker = start(HOLDER + pending("00:02.000", 200, 1002))
    for time in ("00:10", "00:09.300", "00:11"):  # a pidfd reports it after a scan
        tracker.update_liveness(at(time), lambda pid, _at: pid != 200)
    tracker.advance_to(at("00:12"))
    (incident,) = incidents(tracker.state, "wait_abandoned")
    assert (incident.at, incident.seconds) == (at("00:09.300"), 7.3)


def test_processes_whose_exit_no_log_shows_are_watched() -> None:
    tracker = start(GHOST + pending("00:06.000", 300, 1003) + pending("00:06.000", 0, 1004))
    assert {pid for pid in tracker.state.pids_to_watch() if pid} == {461, 200, 300}
    look(tracker, "00:10", {200, 300})
    assert {pid for pid in tracker.state.pids_to_watch() if pid} == {461}
    assert set(start(HOLDER).state.pids_to_watch()) == {110}  # connected clients: server.log


def test_a_reused_pid_of_the_same_user_begins_a_new_wait() -> None:
    tracker = start(HOLDER + pending("00:02.000", 200, 1002))
    look(tracker, "00:10", {200})
    more(tracker, pending("00:20.000", 200, 1002))
    view = tracker.state
    assert waiting(view) == [(200, 1002, at("00:20"), 1001, False)]
    assert counted(view.counters, "mps_uid_waits_abandoned_total") == {(1002,): 1}


def test_a_pid_that_is_reused_before_its_exit_is_confirmed_begins_a_new_wait() -> None:
    tracker = start(HOLDER + pending("00:02.000", 200, 1002))
    tracker.update_liveness(at("00:10"), lambda pid, _at: pid != 200)
    more(tracker, pending("00:10.500", 200, 1002))
    assert waiting(tracker.state) == [(200, 1002, at("00:10.500"), 1001, False)]


def test_a_pid_that_never_connected_is_admitted_again() -> None:
    refused = "{0} C630 User did not send valid credentials\n"
    for time in ("00:09.000", "00:25.000"):  # before and after the first is given up
        text = HOLDER + arrives("00:03.000", 300, 1001) + refused.format(time)
        tracker = start(text + arrives(time, 300, 1001))
        tracker.advance_to(at("01:00"))
        assert "rejections" not in summary(tracker.state.counters)


def test_a_waiter_that_was_served_and_left_before_the_log_was_read_is_not_abandoned() -> None:
    tracker = start(HOLDER + pending("00:02.000", 200, 1002))
    tracker.update_liveness(at("00:05"), lambda pid, _at: pid != 200)
    text = leaves("00:04.000", 100, 110) + server_ends("00:04.100", 110)
    text += server_starts("00:04.100", "00:04.200", 210, 1002) + client("00:04.200", 200, 210)
    more(tracker, text + leaves("00:04.900", 200, 210))
    tracker.advance_to(at("00:08"))
    counters = tracker.state.counters.snapshot()
    assert counted(counters, "mps_uid_waits_abandoned_total") == {}
    assert summary(counters)["waits"]["1002"][0] == 1


GHOST = (
    HOLDER
    + pending("00:02.000", 200, 1002)
    + leaves("00:04.000", 100, 110)
    + server_ends("00:05.000", 110)
    + server_starts("00:05.000", "00:05.300", 461, 1002)
)
"""A server for user 1002, whose only queued client has died: no client connects."""


def test_a_ghost_whose_process_has_exited_is_not_reported() -> None:
    tracker = start(GHOST + "00:05.300 S461 User did not send valid credentials\n")
    tracker.advance_to(at("00:30"))
    tracker.update_liveness(at("00:31"), lambda pid, _at: pid != 461)
    (server,) = tracker.state.servers
    assert not server.is_ghost
    more(tracker, "00:31.000 C630 Server 461 exited with status 0\n")
    assert summary(tracker.state.counters)["server_exits"]["ghost_ended"] == 1


def test_a_server_that_serves_is_no_ghost_when_its_descriptors_run_out() -> None:
    missing = "00:03.000 S110 User did not send valid credentials\n"
    served = read(HOLDER + missing)
    assert [server.is_ghost for server in served.servers] == [False]
    assert not incidents(served, "ghost")


def test_a_ghost_needs_no_control_log_and_no_names() -> None:
    text = "00:01.000 S461 Received new client request\n"
    text += "00:01.001 S461 User did not send valid credentials\n"
    logs = Logs(b"", script(text).server)
    (server,) = start(logs, readable=("server",)).state.servers
    assert server.is_ghost


def test_the_lines_of_a_context_may_come_in_any_order() -> None:
    text = HOLDER
    text += """
        00:03.000 S110 Client {PID: 101, Context ID: 0} connected
        00:03.000 S110 Status of client {PID: 101, Context ID: 1} is ACTIVE
        00:03.000 S110 Client {PID: 101, Context ID: 1} connected
    """
    (server,) = read(text).servers
    assert [(c.pid, *c.state) for c in server.clients] == [
        (100, "active", at("00:01.2")),
        (101, "active", at("00:03")),
    ]


def test_without_server_log_the_state_of_a_client_is_unknown() -> None:
    logs = Logs(script(HOLDER).control, b"")
    (server,) = start(logs, readable=("control",)).state.servers
    (client,) = server.clients
    assert client.state == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        GHOST.replace(HOLDER, HOLDER + pending("00:01.900", 0, 1002)),
        GHOST + pending("00:05.400", 0, 1002),
    ],
    ids=["before the server starts", "when it is ready"],
)
def test_a_server_with_another_queued_client_with_pid_0_is_no_ghost(text: str) -> None:
    (server,) = look(start(text), "00:06", {200}).servers
    assert not server.is_ghost


def test_six_forbidden_starts_abandon_the_wait() -> None:
    text = HOLDER + leaves("00:02.000", 100, 110) + pending("00:03.000", 200, 0)
    text += server_ends("00:03.050", 110)
    for pid in range(605, 611):
        text += f"""
            00:03.060 C{pid} Starting new server {pid} for user 0
            00:03.061 C{pid} Failed to start server using uid 0, error: Operation not permitted
            00:03.061 C630 Server {pid} exited with status 1
        """
    view = read(text)
    assert (view.waits, tuple(view.servers)) == ((), ())
    found = summary(view.counters)
    assert found["server_exits"] == {"requested": 1, "start_failed": 6}
    assert found["server_starts"] == {"1001": 1, "0": 6}
    assert found["waits_abandoned"] == {"0": 1}
    (incident,) = incidents(view, "server_start_failed")
    assert incident.count == 6


# ---------------------------------------------------------------- what grows between lines


@pytest.mark.parametrize("end", ["Exit with status 0", "Starting control daemon using socket /t"])
def test_waits_are_abandoned_when_the_daemon_exits(end: str) -> None:
    logs = script(HOLDER + pending("00:02.000", 200, 1002) + f"00:09.000 C630 {end}\n")
    view = read(logs)
    assert (view.waits, counted(view.counters, "mps_uid_waits_abandoned_total")) == (
        (),
        {(1002,): 1},
    )


def test_the_gpu_is_not_idle_while_an_admitted_client_connects() -> None:
    text = HOLDER + pending("00:02.000", 200, 1002) + leaves("00:04.000", 100, 110)
    text += arrives("00:05.000", 101, 1001)
    tracker = start(text)
    tracker.advance_to(at("00:06"))
    idle = "mps_uid_handover_idle_seconds_total"
    assert values(tracker.state, idle) == {(): 1.0}
    more(tracker, client("00:07.000", 101, 110))
    tracker.advance_to(at("00:08"))
    counters = tracker.state.counters.snapshot()
    assert counters[idle] == {(): 1.0}
    assert counted(counters, "mps_uid_holding_seconds_total") == {(1001,): 2.8 + 1.0}


def test_the_backoff_applies_only_while_a_client_waits() -> None:
    retry = "00:02.000 C630 Control will try shutting down server 110 again in at most 51200ms\n"
    assert read(HOLDER + retry).handover_backoff_seconds is None
    text = HOLDER + pending("00:02.000", 200, 1002) + retry
    assert read(text).handover_backoff_seconds == 51.2
    text += leaves("00:04.000", 100, 110) + server_ends("00:05.000", 110)
    assert read(text).handover_backoff_seconds is None


def test_waits_with_only_control_log_end_when_the_server_is_ready() -> None:
    text = HOLDER + pending("00:02.000", 200, 1002) + server_ends("00:05.000", 110)
    text += server_starts("00:05.000", "00:05.300", 210, 1002)
    logs = Logs(script(text).control, b"")
    found = summary(start(logs, readable=("control",)).state.counters)
    assert found["waits"] == {"1002": [1, 3.3]}
    assert found["handovers"] == 1


# ------------------------------------------------------------------ the last ten minutes


def test_what_goes_on_is_ongoing_and_begins_with_the_first_line() -> None:
    view = read(HOLDER + pending("00:10.000", 200, 1002) + leaves("00:19.000", 1, 110))

    since, found = view.timeline.snapshot(0.0)
    assert {one.kind for one in found if one.ongoing} == {"held", "waited"}
    assert since is not None
    assert since <= at("00:01.000")


def test_the_timeline_is_bounded() -> None:
    lines = Timeline()
    for step in range(5 * MAX_TIMELINE_SPANS):
        lines.add(step, step + 1, [("held", step)])
    assert len(lines.snapshot(1.0)[1]) == MAX_TIMELINE_SPANS
    lines.add(5000, 5000 + 2000 * TIMELINE_SECONDS, [("waited", 1)])
    late = 5.0 + 2 * TIMELINE_SECONDS
    since, found = lines.snapshot(late)
    assert [(one.kind, one.start, one.end) for one in found] == [("waited", late - 600, late)]
    assert since == late - 600
