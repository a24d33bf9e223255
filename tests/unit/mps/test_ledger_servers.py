"""Starts and ends of servers, their causes, and the end of the daemon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mps_exporter.mps.control_protocol import ServerReply
from mps_exporter.mps.server_queries import reconcile
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import DaemonFacts, LogName, ProcessFacts
from testing.mps_logs import (
    GPU,
    GPU_TWO,
    PIPE,
    Logs,
    at,
    counted,
    counts,
    incidents,
    more,
    observation,
    read,
    script,
    shown,
    start,
    summary,
    values,
)
from testing.mps_script import (
    DAEMON,
    HOLDER,
    arrives,
    client,
    client_on,
    leaves,
    pending,
    server_ends,
    server_starts,
)

KILLED = "00:05.000 C630 Server 110 exited with status 0\n"


def exits(text: str) -> dict[str, int]:
    found: dict[str, int] = counts(text)["server_exits"]
    return found


def test_a_client_that_left_just_before_a_crash_is_no_loss() -> None:
    left = counts(HOLDER + leaves("00:04.990", 100, 110) + KILLED)
    assert "losses" not in left
    leaving = "00:04.990 S110 Client {PID: 100, Context ID: 1} exiting. \
Number of active client contexts is 0.\n"
    found = counts(HOLDER + leaving + KILLED)
    assert "losses" not in found
    assert found["disconnections"] == {"1001": 1}


def test_a_shutdown_request_does_not_prove_an_orderly_end() -> None:
    assert exits(HOLDER + TRIED + KILLED) == {"crashed": 1}


def test_a_finishing_server_without_its_last_line_ended_orderly() -> None:
    waits = "00:04.900 S110 Waiting for current clients to finish\n"
    assert exits(HOLDER + waits + leaves("00:04.990", 100, 110) + KILLED) == {"requested": 1}
    assert exits(HOLDER + waits + KILLED) == {"crashed": 1}
    assert exits(HOLDER + leaves("00:04.990", 100, 110) + KILLED) == {"crashed": 1}


def test_the_detail_of_a_crash_names_lost_lines() -> None:
    def detail(lost_bytes: int) -> str:
        tracker = start(HOLDER)
        looked = observation(at("00:04.500"), {})
        chunks = tuple(
            replace(one, lost_bytes=lost_bytes if one.log == "server" else 0)
            for one in looked.chunks
        )
        tracker.add_logs(replace(looked, chunks=chunks))
        more(tracker, KILLED)
        incidents = tracker.state.incidents.snapshot()
        (crash,) = [one for one in incidents if one.kind == "server_crashed"]
        return crash.detail

    assert detail(0) == "exit status 0, no orderly end in server.log"
    assert detail(99) == "exit status 0, no orderly end in server.log, of which lines were lost"


def test_clients_of_a_server_that_ends_by_force_are_terminated() -> None:
    found = counts(HOLDER + server_ends("00:05.000", 110))
    assert found["server_exits"] == {"requested": 1}
    assert found["losses"] == {"1001 terminated": 1}


def test_the_reason_of_a_failed_start_is_that_of_the_logs() -> None:
    text = DAEMON + pending("00:01.000", 100, 1001)
    text += """
        00:01.000 C64 Starting new server 110 for user 1001
        00:01.010 L110 Failed to start : invalid argument
        00:01.020 C64 Server 110 exited with status 1
        00:01.030 C64 Starting new server 111 for user 1001
        00:01.030 C64 Failed to start server using uid 1001, error: Operation not permitted
        00:01.040 C64 Server 111 exited with status 1
        00:01.050 C64 Starting new server 112 for user 1001
        00:01.060 C64 Server 112 exited with status 1
    """
    details = [i.detail for i in read(text).incidents.snapshot() if i.kind == "server_start_failed"]
    assert details == [
        "exit status 1, Failed to start : invalid argument",
        "exit status 1, Operation not permitted",
        "exit status 1",
    ]


def test_a_server_with_an_unread_start_is_accepted() -> None:
    text = client("00:03.000", 100, 110)
    (server,) = read(text).servers
    assert (server.pid, server.uid, server.start_unknown, server.clients.count) == (
        110,
        None,
        True,
        1,
    )
    assert exits(text + KILLED) == {"crashed": 1}
    assert exits("00:01.000 C630 NEW UI\n" + KILLED) == {"crashed": 1}


# ---------------------------------------------------------------- the daemon


def test_a_daemon_missing_in_proc_died_once_the_log_is_read_up_to_then() -> None:
    tracker = start(HOLDER)
    tracker.update_liveness(at("00:05"), lambda _pid, _at: False, daemon=False)
    tracker.advance_to(at("00:05.500"))
    assert tuple(tracker.state.servers) != ()
    tracker.advance_to(at("00:06"))
    view = tracker.state
    assert view.daemon.died
    assert view.daemon.ended_at == at("00:05")  # when it went, not when that was certain
    assert tuple(view.servers) == ()
    assert summary(view.counters)["server_exits"] == {"daemon_died": 1}
    again = DAEMON.replace("00:00.000 C630", "00:09.000 C700")
    more(tracker, again)
    found = summary(tracker.state.counters)
    assert found["server_exits"] == {"daemon_died": 1}
    assert found["daemon_starts"] == 2
    assert not tracker.state.daemon.died


def test_a_daemon_seen_again_was_only_missed() -> None:
    tracker = start(HOLDER)
    tracker.update_liveness(at("00:05"), lambda _pid, _at: True, daemon=False)
    tracker.update_liveness(at("00:05.500"), lambda _pid, _at: True, daemon=True)
    tracker.advance_to(at("00:20"))
    assert not tracker.state.daemon.died


def test_old_daemons_say_start_in_two_lines() -> None:
    text = "00:00.000 C6 Start\n00:00.001 C6 Starting control daemon using socket /t/control\n"
    assert read(text).counters.snapshot()["mps_control_starts_total"][()] == 1


def test_a_server_that_writes_in_the_millisecond_of_the_daemons_start_is_its_own() -> None:
    text = """
        00:01.000 C630 Starting control daemon using socket /t/control
        00:01.000 C630 Starting new server 110 for user 1001
        00:01.000 O110 Startup
        00:01.000 C630 NEW SERVER 110: Ready
    """
    view = read(text)
    assert [server.pid for server in view.servers] == [110]
    assert summary(view.counters).get("server_exits", {}) == {}
    assert [incident.kind for incident in view.incidents.snapshot()] == ["daemon_started"]


def test_another_user_cannot_fake_a_draining_daemon() -> None:
    text = HOLDER
    text += """
        00:05.000 C630 NEW UI
        00:05.000 C630 Cmd:quit
        00:05.000 C630 Insufficient privileges for UID 1001. Control deamon settings can only be \
modified by the user who started it or by the root user.
        00:05.000 C630 UI closed
    """
    view = read(text)
    assert view.daemon.quit_requested_at is None
    assert values(view, "mps_control_log_query_lines_total")[()] == 5
    assert not counted(view.counters, "mps_control_log_unrecognized_lines_total")


def test_lines_of_a_reply_are_not_events() -> None:
    text = HOLDER
    text += """
        00:05.000 C630 NEW UI
        00:05.000 C630 Cmd:ps
        00:05.000 C630 PID       ID        SERVER         DEVICE     NAMESPACE      COMMAND
        00:05.000 C630 100       1         110            GPU-0      4026531836     /tmp/cl
        00:05.000 C630 Cmd:get_server_list
        00:05.000 C630 110
        00:05.000 C630 UI closed
        00:06.000 C630 A sentence of a driver yet to come
    """
    view = read(text)
    assert values(view, "mps_control_log_query_lines_total")[()] == 8
    unrecognized = counted(view.counters, "mps_control_log_unrecognized_lines_total")
    assert unrecognized == {("control",): 1}
    assert len(tuple(view.servers)) == 1


def test_a_device_query_maps_ordinals_to_gpus() -> None:
    text = HOLDER
    text += f"""
        00:05.000 C630 Cmd:device_query 110 --csv
        00:05.000 C630 Device Ordinal,PCI IDs,UUID,Name,Attributes
        00:05.000 C630 3,0000:00.06.00,{GPU},NVIDIA H200,N/A
        00:06.000 C630 Cmd:device_query 110
        00:06.000 C630 4               0000:00.07.00  {GPU}  NVIDIA H200        N/A
    """
    assert read(text).devices == {3: GPU, 4: GPU}


def test_device_0_is_the_only_gpu_that_is_named_and_none_of_several() -> None:
    opened = "00:01.100 S110 Creating server context on device 0 (NVIDIA H200)\n"
    text = HOLDER + opened + client_on("00:02.000", 300, 110, GPU)
    assert read(text).devices == {0: GPU}
    text += client_on("00:03.000", 301, 110, GPU_TWO)
    assert read(text).devices == {}


# ---------------------------------------------------------------- old wordings, missing logs


OLD = """
    00:00.000 C6 Start
    00:01.000 C6 NEW CLIENT 0 from user 0: Server is not ready, push client to pending list
    00:01.000 C6 Starting new server 17 for user 0
    00:01.010 O17 Start
    00:01.010 O17 MPS Server connecting to control daemon on socket: /tmp/nvidia-mps/control
    00:01.300 S17 Volta MPS: Creating server context on device 0
    00:01.600 S17 Active Threads Percentage set to 50.0
    00:01.600 S17 MPS Server is started
    00:01.621 C6 NEW SERVER 17: Ready
    00:01.621 S17 Volta MPS Server: Received new client request
    00:01.621 S17 MPS Server: worker created
    00:01.621 S17 Volta MPS: Creating worker thread
    00:01.622 C6 NEW CLIENT 0 from user 0: Server already exists
    00:01.622 S17 Volta MPS: Device Tesla T4 (uuid \
0xafc3ccca-0xc3365689-0x2ed8f0e1-0x4233036f) is associated
    00:02.000 C6 User did not send valid credentials
    00:02.000 C6 NEW CLIENT 0 from user 0: Server already exists
    00:02.100 C6 NEW CLIENT 0 from user 0: Server already exists
"""


def test_the_wording_of_2021() -> None:
    view = read(OLD)
    (server,) = view.servers
    assert server.clients.count == 2
    assert server.thread_ratio == 0.5
    assert view.devices == {0: "GPU-afc3ccca-c336-5689-2ed8-f0e14233036f"}
    assert not counted(view.counters, "mps_control_log_unrecognized_lines_total")
    text = OLD
    text += """
        00:05.000 S17 Receive command failed, assuming client exit
        00:05.000 S17 Volta MPS: Client disconnected. Number of active client contexts is 1
        00:05.000 S17 Volta MPS: Client process disconnected
    """
    view = read(text)
    assert next(iter(view.servers)).clients.count == 1
    assert values(view, "mps_client_disconnections_total") == {(0,): 1}
    text += "00:06.000 S17 Volta MPS: Client process disconnected\n"
    found = counts(text)
    assert found["connections"] == found["disconnections"] == {"0": 2}
    assert found["holding_seconds"] == {"0": pytest.approx(6.0 - 1.621)}
    assert "sessions" not in found  # who left when is not known


def test_the_wording_of_2021_when_the_server_writes_later() -> None:
    text = OLD.replace("00:01.621 S17", "00:01.630 S17")
    text = text.replace("NEW CLIENT 0", "NEW CLIENT 400")
    view = read(text)
    assert values(view, "mps_client_connections_total") == {(0,): 1}
    text += "00:05.000 S17 Volta MPS: Client process disconnected\n"
    found = counts(text)
    assert found["disconnections"] == {"0": 1}
    assert found["sessions"] == {
        "0": [1, pytest.approx(5.0 - 1.621)]
    }  # no other client was connected


def test_without_an_exiting_line_control_log_decides() -> None:
    assert exits(OLD + "00:09.000 C6 Server 17 exited with status 0\n") == {"crashed": 1}
    assert exits(OLD + "00:09.000 C6 Server 17 exited with status 1\n") == {"crashed": 1}
    text = OLD + "00:08.000 C6 Cmd:quit\n00:09.000 C6 Server 17 exited with status 0\n"
    assert exits(text) == {"requested": 1}


@pytest.mark.parametrize(("waiting", "cause"), [(1002, "requested"), (0, "crashed")])
def test_without_an_exiting_line_a_server_ends_for_another_user(waiting: int, cause: str) -> None:
    text = OLD + pending("00:08.000", 200, waiting)
    assert exits(text + "00:09.000 C6 Server 17 exited with status 0\n") == {cause: 1}


def test_logs_in_one_file_are_distinguished_by_component() -> None:
    """Some daemons write both into one file."""
    text = HOLDER + leaves("00:04.000", 100, 110) + server_ends("00:05.000", 110)
    two = script(text)
    each = [script(line) for line in text.splitlines() if line.strip()]
    one = Logs(b"".join(line.control + line.server for line in each), b"")
    assert summary(read(one).counters) == summary(read(two).counters)


def test_a_server_that_the_log_started_ends_with_its_daemon_though_the_clock_was_set_back() -> None:
    tracker = start(HOLDER.replace("00:0", "50:0"))
    more(tracker, "20:00.000 C630 Exit with status 0\n")
    view = tracker.state
    assert (tuple(view.servers), view.daemon.ended_at) == ((), at("20:00"))
    assert summary(view.counters)["server_exits"] == {"requested": 1}


def test_a_client_belongs_to_the_server_of_its_own_user() -> None:
    """The line of the first one's end was lost."""
    text = (
        HOLDER
        + pending("00:05.000", 200, 1002)
        + "00:05.001 C120 Starting new server 120 for user 1002\n"
    )
    tracker = start(text + pending("00:05.100", 201, 1002))
    assert [wait.pid for wait in tracker.state.waits] == [200]
    more(tracker, "00:05.200 C630 NEW SERVER 120: Ready\n" + client("00:05.200", 200, 120))
    more(tracker, arrives("00:05.300", 202, 1002) + client("00:05.300", 202, 120, 2))
    first, second = tracker.state.servers
    assert [one.pid for one in first.clients] == [100]
    assert [(one.pid, one.uid) for one in second.clients] == [(200, 1002), (202, 1002)]


CONTROL_ONLY: tuple[LogName, ...] = ("control",)
SERVER_ONLY: tuple[LogName, ...] = ("server",)


def test_without_server_log_control_log_and_proc_show_the_clients() -> None:
    text = HOLDER + arrives("00:03.000", 101, 1001) + arrives("00:03.100", 101, 1001)
    tracker = start(text, readable=CONTROL_ONLY)
    (server,) = tracker.state.servers
    assert [c.pid for c in server.clients] == [100, 101]
    tracker.update_liveness(at("00:08"), lambda pid, _at: pid != 100)
    tracker.advance_to(at("00:10"))
    view = tracker.state
    assert [c.pid for c in next(iter(view.servers)).clients] == [101]
    assert values(view, "mps_client_disconnections_total") == {(1001,): 1}
    assert counted(view.counters, "mps_client_session_seconds") == {}


TRIED = "00:04.900 C630 Try shutting down server 110, backoff is enabled\n"
DECLINED = "00:04.900 C630 Server 110 has 2 active worker threads. Server will not shutdown.\n"


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (KILLED, "crashed"),
        (TRIED + KILLED, "requested"),
        (TRIED + KILLED.replace("status 0", "status 1"), "crashed"),
        (TRIED + DECLINED + KILLED, "crashed"),
        (TRIED + KILLED.replace("05.000", "09.899"), "requested"),
        (TRIED + KILLED.replace("05.000", "09.901"), "crashed"),
    ],
)
def test_without_server_log_an_end_is_judged_by_what_came_before(end: str, cause: str) -> None:
    tracker = start(HOLDER + end, readable=CONTROL_ONLY)
    view = tracker.state
    assert summary(view.counters)["server_exits"] == {cause: 1}
    if cause == "crashed":
        (incident,) = incidents(view, "server_crashed")
        assert "judged by control.log alone" in incident.detail


def test_without_control_log_server_log_shows_starts_and_exits() -> None:
    text = """
        00:01.000 O110 Startup
        00:01.100 S110 Created anonymous shared memory region mps.shm.1001.110
        00:01.200 S110 Server has started
    """ + client("00:01.200", 100, 110)
    logs = Logs(b"", script(text).server)
    view = start(logs, readable=SERVER_ONLY).state
    (server,) = view.servers
    assert (server.uid, server.ready_at, next(iter(server.clients)).uid) == (
        1001,
        at("00:01.200"),
        1001,
    )
    assert values(view, "mps_server_starts_total") == {(1001,): 1}
    ended = Logs(b"", script(text + "00:05.000 S110 Exiting\n").server)
    found = summary(start(ended, readable=SERVER_ONLY).state.counters)
    assert found["server_exits"] == {"requested": 1}
    followed = Logs(b"", script(text + "00:05.000 O120 Startup\n").server)
    view = start(followed, readable=SERVER_ONLY).state
    found = summary(view.counters)
    assert found["server_exits"] == {"crashed": 1}
    assert found["losses"] == {"1001 server_crashed": 1}
    (incident,) = incidents(view, "server_crashed")
    # Only control.log tells an exit status.
    assert "its exit status cannot be seen, no orderly end in server.log" in incident.detail


def test_a_server_that_proc_misses_while_control_log_is_unreadable() -> None:
    text = "00:01.000 O110 Startup\n" + client("00:01.200", 100, 110)
    tracker = start(Logs(b"", script(text).server), readable=SERVER_ONLY)
    tracker.update_liveness(at("00:05"), lambda pid, _at: pid != 110, daemon=True)
    tracker.advance_to(at("00:07"))
    view = tracker.state
    counters = view.counters.snapshot()
    assert "exit status cannot be seen" in " ".join(i.detail for i in view.incidents.snapshot())
    assert summary(counters)["server_exits"] == {"crashed": 1}
    assert counters["mps_server_last_exit_timestamp_seconds"] == {("crashed",): at("00:05")}


def test_without_any_log_nothing_is_counted_but_the_state_is_shown() -> None:
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("00:01"), {}, readable=()))
    contexts = {0: {100: 1, 101: 2}}
    reply = ServerReply(110, "ACTIVE", 0.5, (100, 101), contexts, devices={0: GPU})
    reconcile(tracker.state, at("00:02"), [110], [reply])
    (server,) = tracker.state.servers
    assert [(c.pid, c.contexts_by_gpu) for c in server.clients] == [
        (100, {GPU: 1}),
        (101, {GPU: 2}),
    ]
    assert (server.state, server.thread_ratio) == ("ACTIVE", 0.5)
    reconcile(
        tracker.state, at("00:09"), [110], [ServerReply(110, state="FAULT", client_pids=(101,))]
    )
    (server,) = tracker.state.servers
    assert [(c.pid, c.contexts_by_gpu) for c in server.clients] == [(101, {GPU: 2})]
    assert server.state == "FAULT"
    fewer = ServerReply(110, state="ACTIVE", client_pids=(101,), contexts={0: {101: 1, 102: 3}})
    reconcile(tracker.state, at("00:19"), [110], [fewer])
    (server,) = tracker.state.servers
    assert [(c.pid, c.contexts_by_gpu) for c in server.clients] == [(101, {GPU: 1})]
    assert server.thread_ratio == 0.5
    reconcile(tracker.state, at("00:12"), [], [])
    reconcile(tracker.state, at("00:14"), [], [])
    tracker.update_liveness(at("00:16"), lambda _pid, _at: None)
    view = tracker.state
    assert tuple(view.servers) == ()
    assert "server_exits" not in summary(view.counters)


def test_what_the_log_explains_is_not_changed_by_the_control_tool() -> None:
    tracker = start(HOLDER)
    before = shown(tracker.state)[0]
    reconcile(tracker.state, at("00:02"), [], [ServerReply(110, state="FAULT", client_pids=(7,))])
    tracker.advance_to(at("00:09"))
    assert shown(tracker.state)[0] == before


def test_the_control_tool_may_be_quicker_than_the_log() -> None:
    slow = start(HOLDER)
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("00:00") - 5, {}))
    replies = [ServerReply(110, client_pids=(100,))]
    tracker.reconcile(at("00:09"), at("00:09"), [110], replies)
    assert tuple(tracker.state.servers) == ()
    more(tracker, HOLDER)
    counters = summary(tracker.state.counters)
    assert counters == summary(slow.state.counters)
    assert "server_exits" not in counters
    assert [server.uid for server in tracker.state.servers] == [1001]


def test_a_reply_from_the_future_waits_for_its_time() -> None:
    tracker = DaemonTracker(PIPE)
    tracker.reconcile(at("00:01"), at("00:02"), [110], [ServerReply(110, client_pids=(100,))])
    assert tuple(tracker.state.servers) == ()
    tracker.advance(at("00:02"))
    assert [server.pid for server in tracker.state.servers] == [110]


def test_a_reply_does_not_wait_indefinitely_for_an_idle_log() -> None:
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("00:01"), {}))
    tracker.reconcile(at("00:02"), at("00:02"), [110], [ServerReply(110, client_pids=(100,))])
    assert tuple(tracker.state.servers) == ()
    tracker.advance(at("00:08"))
    assert [server.pid for server in tracker.state.servers] == [110]


def test_an_adopted_client_is_counted_when_the_log_names_it() -> None:
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("00:01"), {}))
    reconcile(tracker.state, at("00:02"), [110], [ServerReply(110, client_pids=(100,))])
    assert values(tracker.state, "mps_client_connections_total") == {}
    more(tracker, client("00:02.100", 100, 110))
    assert values(tracker.state, "mps_client_connections_total") == {(None,): 1}
    assert next(iter(tracker.state.servers)).clients.count == 1
    more(tracker, leaves("00:05.000", 100, 110))
    found = summary(tracker.state.counters)
    assert (found["disconnections"], found["sessions"]) == ({"None": 1}, {"None": [1, 3.0]})


# ---------------------------------------------------------------- /proc


def facts(**process: object) -> DaemonFacts:
    daemon = ProcessFacts(630, at("00:00"), **process)  # type: ignore[arg-type]
    return DaemonFacts(PIPE, "/logs", process=daemon)


@pytest.mark.parametrize(
    ("process", "dead"),
    [
        (ProcessFacts(200, at("00:01.990")), False),
        (ProcessFacts(200, at("00:01.990"), state="Z"), True),
    ],
)
def test_a_queued_zombie_is_dead(process: ProcessFacts, dead: bool) -> None:
    tracker = start(HOLDER + pending("00:02.000", 200, 1002))
    tracker.observe(at("00:40"), facts(), {200: process}, [200])
    tracker.advance_to(at("00:42"))
    assert [w.dead for w in tracker.state.waits] == [dead]


@pytest.mark.parametrize(
    ("daemon", "requested"),
    [(facts(namespace_pids=(630, 1)), [200]), (facts(), []), (DaemonFacts(PIPE, "/logs"), [200])],
)
def test_what_proc_does_not_show_is_not_guessed(daemon: DaemonFacts, requested: list[int]) -> None:
    tracker = start(HOLDER + pending("00:02.000", 200, 1002))
    tracker.observe(at("00:40"), daemon, {}, requested)
    tracker.advance_to(at("00:42"))
    view = tracker.state
    assert [w.dead for w in view.waits] == [False]
    assert not view.daemon.died


def test_a_daemon_whose_process_disappeared_died() -> None:
    tracker = start(HOLDER)
    tracker.observe(at("00:30"), facts(namespace_pids=(630, 1)), {}, [])
    tracker.observe(at("00:40"), DaemonFacts(PIPE, "/logs"), {}, [])
    tracker.advance_to(at("00:42"))
    view = tracker.state
    assert view.daemon.died
    assert view.incidents.snapshot()[-1].detail == ""


def test_a_daemon_that_is_replaced_at_once_died_when_its_process_disappeared() -> None:
    tracker = start(HOLDER)
    tracker.observe(at("00:30"), facts(), {}, [])
    tracker.observe(at("00:40"), DaemonFacts(PIPE, "/logs"), {}, [])
    more(tracker, "00:40.700 C700 Starting control daemon using socket /tmp/mps/control")
    died = incidents(tracker.state, "daemon_died")
    assert [one.at for one in died] == [at("00:40")]


@pytest.mark.parametrize("lost", [True, False])
def test_a_server_whose_client_may_have_connected_in_lost_lines_is_no_ghost(lost: bool) -> None:
    tracker = start(
        DAEMON
        + pending("00:01.000", 100, 1001)
        + server_starts("00:01.001", "00:01.200", 110, 1001)
    )
    later = script("00:09.000 S110 Received new client request for {PID: 100, Context ID: 0}")
    seen = observation(at("00:09.500"), later.data)
    chunks = tuple(replace(one, restarted=lost and one.log == "server") for one in seen.chunks)
    tracker.add_logs(replace(seen, chunks=chunks))
    tracker.observe(at("00:10"), facts(), {}, [100])
    tracker.advance_to(at("00:12"))
    assert [server.ghost for server in tracker.state.servers] == [not lost]


@pytest.mark.parametrize("readable", [("control", "server"), ("server",)])
def test_a_server_that_ends_with_its_daemon_did_not_crash(readable: tuple[LogName, ...]) -> None:
    owner = "00:01.100 S110 Created anonymous shared memory region mps.shm.1001.110\n"
    text = HOLDER.replace("00:01.200 C630", owner + "00:01.200 C630")
    tracker = start(text, readable=readable)
    alive = facts()
    tracker.observe(at("00:04"), alive, {110: ProcessFacts(110, at("00:01"))}, [110])
    tracker.observe(at("00:05"), alive, {}, [110])
    tracker.observe(at("00:05.500"), DaemonFacts(PIPE, "/logs"), {}, [])
    tracker.advance_to(at("00:06.200"))  # certain of the server, not yet of the daemon
    assert [server.pid for server in tracker.state.servers] == [110]
    tracker.advance_to(at("00:07"))
    found = summary(tracker.state.counters)
    assert found["server_exits"] == {"daemon_died": 1}
    assert found["losses"] == {"1001 daemon_died": 1}


def test_daemons_without_logs_may_die_one_after_another() -> None:
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("00:01"), {}, readable=()))
    gone = DaemonFacts(PIPE, "/logs")
    for minute in ("01", "02"):
        tracker.observe(at(f"{minute}:00"), facts(), {}, [])
        assert not tracker.state.daemon.died
        tracker.observe(at(f"{minute}:10"), gone, {}, [])
        tracker.observe(at(f"{minute}:20"), gone, {}, [])
        assert tracker.state.daemon.died
    incidents = tracker.state.incidents.snapshot()
    assert [one.kind for one in incidents] == ["daemon_died"] * 2
    assert all("control.log cannot be read" in one.detail for one in incidents)


def test_the_lock_of_a_dead_daemon_is_free() -> None:
    tracker = start(HOLDER)
    tracker.observe(at("00:40"), DaemonFacts(PIPE, "/logs", lock_tested=True), {}, [])
    tracker.advance_to(at("00:42"))
    assert tracker.state.daemon.died


def test_every_process_of_interest_is_looked_up() -> None:
    text = HOLDER + pending("00:02.000", 200, 1002) + pending("00:02.000", 0, 1002)
    assert start(text).state.pids_to_look_up() == {100, 110, 200}
    # The queue is empty when the server is ready; the client may never connect.
    text = DAEMON + pending("00:01.000", 100, 1001)
    text += server_starts("00:01.001", "00:01.200", 110, 1001)
    assert start(text).state.pids_to_look_up() == {100, 110}
    assert start(text + client("00:01.300", 101, 110)).state.pids_to_look_up() == {101, 110}


def test_incidents_can_be_read_one_after_another() -> None:
    tracker = start(HOLDER)
    news, seen = tracker.state.incidents.since(0)
    assert [incident.kind for incident in news] == ["daemon_started"]
    assert tracker.state.incidents.since(seen) == ((), seen)
    more(tracker, KILLED)
    news, seen = tracker.state.incidents.since(seen)
    assert [(i.kind, i.pids) for i in news] == [("server_crashed", (100,))]


def test_a_client_keeps_the_memory_limits_of_its_server_where_these_were_logged() -> None:
    limit = "00:01.100 S110 Device pinned memory limit for device 0 set to 0x300000000 bytes\n"
    (server,) = read(HOLDER.replace("00:01.200 C630", limit + "00:01.200 C630")).servers
    assert next(iter(server.clients)).memory_limits == {0: 12 << 30}
    # What was set before the first line that could be read is not known; the control tool may say.
    (server,) = read(client("00:01.200", 100, 110)).servers
    assert server.start_unknown
    assert next(iter(server.clients)).memory_limits is None
