"""Waits behind another user's server: their start, end and cost."""

import pytest

from mps_exporter.limits_without_a_flag import MAX_TIMELINE_SPANS, TIMELINE_SECONDS
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.mps.waits import Timeline
from testing.mps_logs import Logs, at, counted, incidents, more, read, script, start, summary
from testing.mps_script import HOLDER, arrives, leaves, pending, server_ends, server_starts


def test_a_queued_pid_of_another_user_replaces_the_dead_client() -> None:
    text = HOLDER + pending("00:02.000", 200, 1002) + pending("00:04.000", 200, 1003)
    view = read(text)
    assert [(w.uid, w.since) for w in view.waits] == [(1003, at("00:04"))]
    assert counted(view.counters, "mps_uid_waits_abandoned_total") == {(1002,): 1}


def test_waits_are_abandoned_when_the_daemon_exits() -> None:
    view = read(HOLDER + pending("00:02.000", 200, 1002) + "00:09.000 C630 Exit with status 0\n")
    assert view.waits == ()
    assert counted(view.counters, "mps_uid_waits_abandoned_total") == {(1002,): 1}


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
    view = look(start(text), "00:10", {0})  # /proc has no PID 0
    assert [w.dead for w in view.waits] == [False] * 3
    assert 200 in view.pids_to_watch()
    assert 0 not in view.pids_to_watch()


def test_overtakers_with_pid_0_are_counted_by_their_first_connection() -> None:
    arrival = "C630 NEW CLIENT 0 from user 1001: Server already exists\n"
    text = HOLDER + pending("00:02.000", 200, 1002)
    for second in ("03", "04"):
        text += f"00:{second}.000 C630 User did not send valid credentials\n"
        text += f"00:{second}.000 {arrival}00:{second}.010 {arrival}00:{second}.020 {arrival}"
    found = read(text)
    assert counted(found.counters, "mps_uid_overtakes_total") == {(1001,): 2}
    assert [one.overtaken_by for one in found.waits] == [2]


# ---------------------------------------------------------------- /proc knows more


def look(tracker: DaemonTracker, time: str, dead: set[int]) -> DaemonState:
    """Look at /proc, and at the logs again two seconds later."""
    now = at(time)
    tracker.update_liveness(now, lambda pid, _at: pid not in dead)
    tracker.advance_to(now + 2.0)
    return tracker.state


def test_a_pid_that_never_connected_is_admitted_again() -> None:
    refused = "{0} C630 User did not send valid credentials\n"
    for time in ("00:09.000", "00:25.000"):  # before and after the first is given up
        text = HOLDER + arrives("00:03.000", 300, 1001) + refused.format(time)
        tracker = start(text + arrives(time, 300, 1001))
        tracker.advance_to(at("01:00"))
        assert "rejections" not in summary(tracker.state.counters)


GHOST = (
    HOLDER
    + pending("00:02.000", 200, 1002)
    + leaves("00:04.000", 100, 110)
    + server_ends("00:05.000", 110)
    + server_starts("00:05.000", "00:05.300", 461, 1002)
)
"""A server for user 1002, whose only queued client has died: no client connects."""


def test_a_death_that_is_certain_before_a_line_is_applied_before_it() -> None:
    queued = HOLDER + pending("00:02.000", 200, 1002)
    tracker = start(queued)
    tracker.update_liveness(at("00:03"), lambda pid, _at: pid != 200)
    more(tracker, GHOST.removeprefix(queued))
    (found,) = incidents(tracker.state, "wait_abandoned")
    assert (found.at, found.seconds) == (at("00:03"), 1.0)


def test_a_ghost_needs_no_control_log_and_no_names() -> None:
    text = "00:00.500 O461 Startup\n00:01.000 S461 Received new client request\n"
    text += "00:01.001 S461 User did not send valid credentials\n"
    logs = Logs(b"", script(text).server)
    (server,) = start(logs, readable=("server",)).state.servers
    assert server.is_ghost


@pytest.mark.parametrize(
    ("text", "ghost"),
    [
        (GHOST, True),
        (GHOST.replace(HOLDER, HOLDER + pending("00:01.900", 0, 1002)), False),
        (GHOST + pending("00:05.400", 0, 1002), False),
    ],
)
def test_a_server_with_another_queued_client_with_pid_0_is_no_ghost(text: str, ghost: bool) -> None:
    (server,) = look(start(text), "00:06", {200}).servers
    assert server.is_ghost is ghost


DEAF = HOLDER + arrives("00:03.000", 200, 1001)
DEAF += "00:03.001 S110 User did not send valid credentials\n"
LOST = "00:04.{} S110 Server failed to recevie command with status 806, assuming client {} exit\n"
LEFT = LOST.format("010", "{PID: 100, Context ID: 1}")
LEFT += LOST.format("030", "{PID: 100, Context ID: 0}")
ACCEPTS = "00:04.000 S110 Received new client request for {PID: 100, Context ID: 1}\n"


@pytest.mark.parametrize(
    ("more", "ghost", "cause"),
    [("", True, "crashed"), (LEFT, True, "ghost_ended"), (ACCEPTS, False, "crashed")],
)
def test_the_clients_of_a_deaf_server_work(more: str, ghost: bool, cause: str) -> None:
    (server,) = read(DEAF + more).servers
    assert (server.is_ghost, len(list(server.clients))) == (ghost, more != LEFT)
    killed = "00:05.000 C630 Server 110 exited with status 0\n"
    assert summary(read(DEAF + more + killed).counters)["server_exits"] == {cause: 1}


def test_of_two_clients_with_pid_0_that_without_a_context_has_left_a_deaf_server() -> None:
    newer = "00:02.000 S110 Client {PID: 0, Context ID: 0} connected\n"
    text = (HOLDER + newer).replace("PID: 100", "PID: 0") + DEAF.removeprefix(HOLDER)
    text += LOST.format("030", "{PID: 0, Context ID: 0}")
    (server,) = read(text).servers
    assert (server.is_ghost, [one.state[0] for one in server.clients]) == (True, ["active"])


@pytest.mark.parametrize(("more", "verdict"), [("", None), (LEFT, True)])
def test_a_deaf_server_whose_clients_are_hidden_is_not_called_a_ghost(
    more: str, verdict: bool | None
) -> None:
    state = read(DEAF + more)
    (server,) = state.servers
    for readable in (False, True):
        state.readable["server"] = readable
        assert server.is_ghost is (readable or verdict)
    server.clients.unfollowed = 1
    assert server.is_ghost is verdict
    server.clients.unfollowed = 0
    state.lines_lost("server", at("00:05.000"), certain=True)
    assert server.is_ghost is verdict


@pytest.mark.parametrize("unseen", ["lines", "clients", "names"])
def test_a_deaf_server_with_clients_that_may_be_unseen_is_not_called_a_ghost(unseen: str) -> None:
    before = HOLDER if unseen == "names" else HOLDER + leaves("00:02.500", 100, 110)
    tracker = start(before)
    (server,) = tracker.state.servers
    if unseen == "lines":
        tracker.state.lines_lost("server", at("00:02.000"), certain=False)
    server.clients.unfollowed = int(unseen == "clients")
    for client in server.clients:
        client.inferred = True
    more(tracker, DEAF.removeprefix(HOLDER))
    assert server.is_ghost is None
    more(tracker, ACCEPTS)
    assert server.is_ghost is False


def test_a_server_whose_line_without_credentials_may_be_lost_is_not_called_healthy() -> None:
    tracker = start(HOLDER)
    (server,) = tracker.state.servers
    verdicts = [server.is_ghost]
    for certain in (False, True):  # first after a truncation whose copy was read whole
        tracker.state.lines_lost("server", at("00:02.000"), certain=certain)
        verdicts.append(server.is_ghost)
    more(tracker, ACCEPTS)
    assert [*verdicts, server.is_ghost] == [False, False, None, False]


# ---------------------------------------------------------------- what grows between lines


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
