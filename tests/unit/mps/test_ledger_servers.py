"""Starts and ends of servers, their causes, and the end of the daemon."""

from dataclasses import replace

import pytest

from mps_exporter.mps.server_queries import reconcile
from mps_exporter.mps.tool_commands import ServerReply
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
TRIED = "00:04.900 C630 Try shutting down server 110, backoff is enabled\n"
DECLINED = "00:04.900 C630 Server 110 has 2 active worker threads. Server will not shutdown.\n"
FINISHES = "00:04.900 S110 Waiting for current clients to finish\n"
LEAVES = leaves("00:04.990", 100, 110)
CONTROL_ONLY: tuple[LogName, ...] = ("control",)


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        (TRIED, "crashed"),
        (LEAVES, "crashed"),
        (FINISHES, "crashed"),
        (FINISHES + LEAVES, "requested"),
    ],
)
def test_only_a_server_that_finished_ends_orderly_without_its_last_line(
    before: str, cause: str
) -> None:
    assert counts(HOLDER + before + KILLED)["server_exits"] == {cause: 1}


def test_the_detail_of_a_crash_names_lost_lines() -> None:
    tracker = start(HOLDER)
    gap = observation(at("00:04.500"), {})
    tracker.add_logs(replace(gap, chunks=tuple(replace(one, lost_bytes=99) for one in gap.chunks)))
    more(tracker, KILLED)
    (crash,) = incidents(tracker.state, "server_crashed")
    assert crash.detail == "exit status 0, no orderly end in server.log, of which lines were lost"


def test_the_reason_of_a_failed_start_is_that_of_server_log() -> None:
    text = DAEMON + pending("00:01.000", 100, 1001)
    text += """
        00:01.000 C64 Starting new server 110 for user 1001
        00:01.010 L110 Failed to start : invalid argument
        00:01.020 C64 Server 110 exited with status 1
    """
    (failed,) = incidents(read(text), "server_start_failed")
    assert failed.detail == "exit status 1, Failed to start : invalid argument"


# ---------------------------------------------------------------- the daemon


def test_a_daemon_seen_again_was_only_missed() -> None:
    tracker = start(HOLDER)
    tracker.update_liveness(at("00:05"), lambda _pid, _at: True, daemon=False)
    tracker.update_liveness(at("00:05.500"), lambda _pid, _at: True, daemon=True)
    tracker.advance_to(at("00:20"))
    assert not tracker.state.daemon.died


def test_a_reply_and_a_refused_command_are_no_events() -> None:
    """Another user cannot fake the end of a daemon."""
    text = """
        00:05.000 C630 NEW UI
        00:05.000 C630 Cmd:quit
        00:05.000 C630 Insufficient privileges for UID 1001. Control deamon settings can only be \
modified by the user who started it or by the root user.
        00:05.000 C630 Cmd:ps
        00:05.000 C630 PID       ID        SERVER         DEVICE     NAMESPACE      COMMAND
        00:05.000 C630 Cmd:get_server_list
        00:05.000 C630 110
        00:05.000 C630 UI closed
        00:06.000 C630 A sentence of a driver yet to come
    """
    view = read(HOLDER + text)
    assert view.daemon.quit_requested_at is None
    assert values(view, "mps_control_log_query_lines_total")[()] == 9
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
    00:00.001 C6 Starting control daemon using socket /tmp/nvidia-mps/control
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
    assert (len(server.clients), server.thread_ratio) == (2, 0.5)
    assert view.devices == {0: "GPU-afc3ccca-c336-5689-2ed8-f0e14233036f"}
    text = OLD
    text += """
        00:05.000 S17 Receive command failed, assuming client exit
        00:05.000 S17 Volta MPS: Client disconnected. Number of active client contexts is 1
        00:05.000 S17 Volta MPS: Client process disconnected
        00:06.000 S17 Volta MPS: Client process disconnected
        00:06.000 S17 Volta MPS: Client process disconnected
    """
    view = read(text)
    assert not counted(view.counters, "mps_control_log_unrecognized_lines_total")
    found = summary(view.counters)
    assert found["daemon_starts"] == 1
    assert found["connections"] == found["disconnections"] == {"0": 2}
    assert found["holding_seconds"] == {"0": pytest.approx(6.0 - 1.621)}
    assert "sessions" not in found  # who left when is not known


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ("", "crashed"),
        ("00:08.000 C6 Cmd:quit\n", "requested"),
        (pending("00:08.000", 200, 1002), "requested"),
        (pending("00:08.000", 200, 0), "crashed"),
    ],
)
def test_without_an_exiting_line_control_log_decides(before: str, cause: str) -> None:
    end = "00:09.000 C6 Server 17 exited with status 0\n"
    assert counts(OLD + before + end)["server_exits"] == {cause: 1}


def test_logs_in_one_file_are_distinguished_by_component() -> None:
    """Some daemons write both into one file."""
    text = HOLDER + leaves("00:04.000", 100, 110) + server_ends("00:05.000", 110)
    two = script(text)
    each = [script(line) for line in text.splitlines() if line.strip()]
    one = Logs(b"".join(line.control + line.server for line in each), b"")
    assert summary(read(one).counters) == summary(read(two).counters)


def test_without_server_log_control_log_and_proc_show_the_clients() -> None:
    text = HOLDER + arrives("00:03.000", 101, 1001) + arrives("00:03.100", 101, 1001)
    tracker = start(text, readable=CONTROL_ONLY)
    (server,) = tracker.state.servers
    assert [(c.pid, c.state) for c in server.clients] == [(100, (None, None)), (101, (None, None))]
    tracker.update_liveness(at("00:08"), lambda pid, _at: pid != 100)
    tracker.advance_to(at("00:10"))
    view = tracker.state
    assert [c.pid for c in next(iter(view.servers)).clients] == [101]
    assert values(view, "mps_client_disconnections_total") == {(1001,): 1}
    assert counted(view.counters, "mps_client_session_seconds") == {}


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


def test_without_server_log_control_log_shows_that_an_operator_ended_a_client() -> None:
    text = """
        00:03.000 C630 NEW UI
        00:03.000 C630 Cmd:terminate_client 110 100
        00:03.010 C630 0
        00:03.010 C630 UI closed
    """
    assert counts(HOLDER + text, readable=CONTROL_ONLY)["losses"] == {"1001 terminated": 1}


def test_without_control_log_server_log_shows_readiness_and_exits() -> None:
    text = """
        00:01.000 O110 Startup
        00:01.100 S110 Created anonymous shared memory region mps.shm.1001.110
        00:01.200 S110 Server has started
    """ + client("00:01.200", 100, 110)
    idle, _ = text.split("started\n")
    for lines in (text, f"{idle}started\n"):
        (server,) = read(lines, readable=("server",)).servers
        assert (server.uid, server.ready_at, server.state) == (1001, at("00:01.200"), "ACTIVE")
    ended = read(text + "00:05.000 S110 Exiting\n", readable=("server",))
    assert tuple(ended.servers) == ()
    assert summary(ended.counters)["server_exits"] == {"requested": 1}
    successor = "00:05.000 O120 Startup\n"
    view = read(text + successor, readable=("server",))
    found = summary(view.counters)
    assert not {"server_starts", "startups"} & found.keys()  # control.log is their source
    assert found["server_exits"] == {"crashed": 1}
    assert found["losses"] == {"1001 server_crashed": 1}
    (incident,) = incidents(view, "server_crashed")
    assert "its exit status cannot be seen" in incident.detail


def test_without_any_log_nothing_is_counted_but_the_state_is_shown() -> None:
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("00:01"), {}, readable=()))
    for time, pids in (("00:02", (100, 101)), ("00:09", (101,))):
        reconcile(tracker.state, at(time), [110], [ServerReply(110, client_pids=pids)])
        (server,) = tracker.state.servers
        assert tuple(one.pid for one in server.clients) == pids
    reconcile(tracker.state, at("00:12"), [], [])
    reconcile(tracker.state, at("00:14"), [], [])
    tracker.update_liveness(at("00:16"), lambda _pid, _at: None)
    assert tuple(tracker.state.servers) == ()
    assert "server_exits" not in summary(tracker.state.counters)


def test_what_the_log_explains_is_not_changed_by_the_control_tool() -> None:
    tracker = start(HOLDER)
    before = shown(tracker.state)[0]
    reconcile(tracker.state, at("00:02"), [], [ServerReply(110, state="FAULT", client_pids=(7,))])
    tracker.advance_to(at("00:09"))
    assert shown(tracker.state)[0] == before


def test_a_reply_does_not_wait_indefinitely_for_an_idle_log() -> None:
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("00:01"), {}))
    tracker.reconcile(at("00:02"), at("00:02"), [110], [ServerReply(110, client_pids=(100,))])
    assert tuple(tracker.state.servers) == ()
    tracker.advance(at("00:08"))
    assert [server.pid for server in tracker.state.servers] == [110]


def test_a_client_of_the_control_tool_is_counted_when_the_log_names_it() -> None:
    tracker = DaemonTracker(PIPE)
    tracker.add_logs(observation(at("00:01"), {}))
    reconcile(tracker.state, at("00:02"), [110], [ServerReply(110, client_pids=(100,))])
    assert values(tracker.state, "mps_client_connections_total") == {}
    more(tracker, client("00:02.100", 100, 110))
    more(tracker, leaves("00:05.000", 100, 110))
    found = summary(tracker.state.counters)
    assert found["connections"] == found["disconnections"] == {"None": 1}
    assert found["sessions"] == {"None": [1, 3.0]}


# ---------------------------------------------------------------- /proc


def facts(**process: object) -> DaemonFacts:
    daemon = ProcessFacts(630, at("00:00"), **process)  # type: ignore[arg-type]
    return DaemonFacts(PIPE, "/logs", process=daemon)


SLEEPS = ProcessFacts(200, at("00:01.990"), state="S")
INSIDE = facts(namespace_pids=(630, 1))


@pytest.mark.parametrize(
    ("daemon", "process", "requested", "dead"),
    [
        (facts(), SLEEPS, [200], False),
        (facts(), replace(SLEEPS, state="Z"), [200], True),
        (facts(), None, [200], True),
        (facts(), None, [], False),
        (INSIDE, None, [200], False),
        (DaemonFacts(PIPE, "/logs"), None, [200], False),
    ],
)
def test_a_queued_client_is_dead_where_proc_shows_it(
    daemon: DaemonFacts, process: ProcessFacts | None, requested: list[int], dead: bool
) -> None:
    tracker = start(HOLDER + pending("00:02.000", 200, 1002))
    seen = {} if process is None else {200: process}
    tracker.observe(at("00:01.900"), daemon, {}, requested)  # perhaps the PID's last process
    tracker.advance_to(at("00:05"))
    tracker.observe(at("00:40"), daemon, seen, requested)
    tracker.advance_to(at("00:42"))
    assert [wait.dead for wait in tracker.state.waits] == [dead]
    assert not tracker.state.daemon.died


@pytest.mark.parametrize("lost", [True, False])
def test_a_server_whose_client_may_have_connected_in_lost_lines_is_no_ghost(lost: bool) -> None:
    tracker = start(
        DAEMON
        + pending("00:01.000", 100, 1001)
        + server_starts("00:01.001", "00:01.200", 110, 1001)
    )
    request = "00:09.000 S110 Received new client request for {PID: 100, Context ID: 0}"
    later = script(request + server_starts("00:09.100", "00:09.200", 210, 1002))
    seen = observation(at("00:09.500"), later.data)
    chunks = tuple(replace(one, restarted=lost and one.log == "server") for one in seen.chunks)
    tracker.add_logs(replace(seen, chunks=chunks))
    tracker.observe(at("00:10"), facts(), {}, [100])
    tracker.advance_to(at("00:12"))
    found = [(server.ghost, server.has_all_lines) for server in tracker.state.servers]
    assert found == [(not lost, not lost), (False, True)]


def test_a_reply_is_not_applied_before_the_lines_that_a_cut_log_delays() -> None:
    tracker = start(DAEMON)
    reply = ServerReply(110, state="ACTIVE", client_pids=())
    tracker.reconcile(at("00:10.050"), at("00:10"), [110], [reply])
    begun = script(server_starts("00:09.900", "00:10.100", 110, 1001)).data
    seen = observation(at("00:10.300"), begun)
    cut = tuple(replace(one, restarted=one.log == "server") for one in seen.chunks)
    tracker.add_logs(replace(seen, chunks=cut))
    tracker.add_logs(observation(at("00:14"), {}))
    (server,) = tracker.state.servers
    assert (server.uid, server.start_unknown) == (1001, False)
    assert summary(tracker.state.counters)["startups"] == [1, 0.2]


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
