"""Clients that share a PID, end unnamed, are refused, or meet a fatal GPU error; unknown lines."""

import pytest

from mps_exporter.limits_without_a_flag import OF_ORDINARY_USER
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.tool_commands import ServerReply
from mps_exporter.mps.tracker import DaemonTracker
from mps_exporter.observations import DaemonFacts, ProcessFacts
from testing.mps_logs import (
    EIGHT,
    GPU,
    GPU_TWO,
    PIPE,
    at,
    counted,
    counts,
    incidents,
    more,
    observation,
    read,
    script,
    start,
    summary,
    values,
)
from testing.mps_script import DAEMON, HOLDER, arrives, client_on, pending, server_starts

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


def test_a_client_that_left_unnamed_is_counted_once_and_named_by_proc() -> None:
    tracker = start(UNNAMED)
    assert len(only_server(tracker).clients) == 1
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
    assert found["losses"] == {"1001 server_crashed": 1}
    assert found["disconnections"] == {"1001": 2}


def test_a_client_that_the_log_does_not_name_is_sent_again_for_a_context() -> None:
    text = UNNAMED.split("00:02")[0] + arrives("00:01.300", 100, 1001)
    left = counts(text + "00:05.000 S110 Client process disconnected\n")
    assert left["sessions"] == {"1001": [1, 3.8]}
    crash = counts(text + "00:05.000 C630 Server 110 exited with status 1\n")
    assert crash["losses"] == {"1001 server_crashed": 1}


@pytest.mark.parametrize("end", ["server_crashed", "daemon_died"])
def test_clients_whose_exits_are_seen_before_their_server_s_end_are_lost(end: str) -> None:
    tracker = start(UNNAMED.rsplit("\n", 2)[0] + "\n")
    alive = {pid: ProcessFacts(pid, EIGHT, state="S") for pid in (100, 101, 110)}
    tracker.observe(at("00:03"), FACTS, alive, alive)
    facts = FACTS if end == "server_crashed" else DaemonFacts(PIPE, "/log")
    tracker.observe(at("00:04.200"), facts, {}, {*alive, 630})
    if end == "server_crashed":
        more(tracker, "00:04.000 C630 Server 110 exited with status 1\n")
    tracker.add_logs(observation(at("00:20"), {}))
    assert summary(tracker.state.counters)["losses"] == {f"1001 {end}": 2}


def test_clients_that_left_unnamed_in_the_history_do_not_fill_the_quota() -> None:
    """Two clients overlapped once; later clients came one after another."""
    text = UNNAMED + "00:04.000 S110 Client process disconnected\n"
    for second in range(5, 5 + OF_ORDINARY_USER.clients + 10):
        stamp = f"{second // 60:02d}:{second % 60:02d}"
        text += arrives(f"{stamp}.000", 1000 + second, 1001)
        text += f"{stamp}.500 S110 Client process disconnected\n"
    text += arrives("59:00.000", 9000, 1001)
    tracker = DaemonTracker(PIPE, OF_ORDINARY_USER)
    tracker.add_logs(observation(at("59:01"), script(text).data, history=True))
    clients = only_server(tracker).clients
    assert clients.get(9000) is not None
    assert (len(clients), clients.unfollowed) == (1, 0)


def test_named_and_unnamed_ends_in_a_forged_log_are_no_negative_number() -> None:
    text = UNNAMED + arrives("00:04.000", 102, 1001) + arrives("00:04.100", 103, 1001)
    text += "00:05.000 S110 Client process disconnected\n" * 2
    text += "".join(f"00:06.000 S110 Client process {pid} disconnected\n" for pid in (101, 102))
    tracker = start(text)
    assert len(only_server(tracker).clients) == 0
    more(tracker, arrives("00:07.000", 104, 1001))
    assert only_server(tracker).clients.get(104) is not None


def test_a_client_that_replies_lack_is_the_one_that_left_unnamed() -> None:
    tracker = start(UNNAMED)
    for second in ("00:20", "00:40", "01:00"):
        reply = ServerReply(110, state="ACTIVE", client_pids=(101,))
        tracker.reconcile(at(second), at(second), [110], [reply])
        tracker.add_logs(observation(at(second) + 3.0, {}))
    assert [one.pid for one in only_server(tracker).clients] == [101]
    assert len(only_server(tracker).clients) == 1
    assert summary(tracker.state.counters)["disconnections"] == {"1001": 1}


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


ASSOCIATED = "S110 Device NVIDIA H200 (uuid {}) is associated"
ACTIVE = "S110 Status of client {{PID: {}, Context ID: 1}} is ACTIVE"
DIES = "S110 Client process {} disconnected"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # The GPU of the second context comes first, and is moved.
        (
            [ASSOCIATED.format(GPU_TWO), ACTIVE.format(101), ASSOCIATED.format(GPU)],
            {100: {GPU: 1}, 101: {GPU_TWO: 1}},
        ),
        # A context that hangs has its GPU.
        ([ASSOCIATED.format(GPU)], {100: {GPU: 1}, 101: {"": 1}}),
        # The GPU of a client that ends is not the GPU of the next.
        (
            [
                *(ASSOCIATED.format(GPU_TWO), DIES.format(100)),
                *(ASSOCIATED.format(GPU), ACTIVE.format(101)),
            ],
            {101: {GPU: 1}},
        ),
    ],
)
def test_the_gpu_of_a_context(lines: list[str], expected: dict[int, dict[str, int]]) -> None:
    text = DAEMON + server_starts("00:01.001", "00:01.100", 110, 1001)
    for pid in (100, 101):
        for context in (0, 1):
            text += f"00:01.200 S110 Client {{PID: {pid}, Context ID: {context}}} connected\n"
    text += "".join(f"00:01.300 {line}\n" for line in lines)
    found = {one.pid: one.contexts_by_gpu for one in only_server(start(text)).clients}
    assert found == expected


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


TWO_GPUS = (
    DAEMON
    + server_starts("00:01.000", "00:01.200", 1909, 1001)
    + "00:01.100 S1909 Creating server context on device 0 (NVIDIA H200)\n"
    + "00:01.100 S1909 Creating server context on device 1 (NVIDIA H200)\n"
    + client_on("00:01.300", 1903, 1909, GPU)
    + client_on("00:01.400", 1904, 1909, GPU_TWO)
    + client_on("00:01.500", 1905, 1909, GPU_TWO)
)
FAULT = """
    00:06.768 S1909 Client {PID: 1905, Context: 1} encountered a fatal GPU error.
    00:06.768 S1909 Server is handling a fatal GPU error.
    00:06.768 S1909 Client {PID: 1905, Context ID: 1} on device 1 to be torn down
    00:06.768 S1909 Client {PID: 1904, Context ID: 1} on device 1 to be torn down
    00:06.768 S1909 All clients belonging to error trigging process 1905 will be torn down
    00:06.768 S1909 Client {PID: 1905, Context ID: 1} on the error-trigging process 1905 to be \
torn down
    00:06.768 S1909 All clients belonging to error trigging process 1904 will be torn down
    00:06.768 S1909 The following devices will be reset:
    00:06.768 S1909 1
    00:06.768 S1909 The following client process have a sticky error set:
    00:06.768 S1909 1905
    00:06.768 S1909 1904
"""
RECOVERY = "00:06.794 S1909 Destroy server context on device 1 (NVIDIA H200)\n"


BOTH_RESET = FAULT.replace(
    "        00:06.768 S1909 1\n", "        00:06.768 S1909 0\n00:06.768 S1909 1\n"
).replace(
    "    00:06.768 S1909 All clients belonging to error trigging process 1905",
    "    00:06.768 S1909 Client {PID: 1903, Context ID: 1} on device 0 to be torn down\n"
    "    00:06.768 S1909 All clients belonging to error trigging process 1905",
)


LOST = "Server failed to recevie command with status 806, assuming client"
HANDLING = "00:06.768 S1909 Server is handling a fatal GPU error.\n"
BLAMED_AGAIN = "00:06.768 S1909 Client {PID: PID_, Context: 2} encountered a fatal GPU error.\n"


@pytest.mark.parametrize(("pid", "faults"), [(1905, 1), (1904, 2)])
def test_a_client_that_is_blamed_again_is_no_second_fault(pid: int, faults: int) -> None:
    """A client may have several contexts; another client is named for a fault of its own."""
    again = HANDLING + BLAMED_AGAIN.replace("PID_", str(pid))
    view = read(TWO_GPUS + FAULT.replace(HANDLING, again) + RECOVERY)
    assert len(incidents(view, "fault")) == faults


def test_a_fault_on_an_unknown_gpu_counts_on_none() -> None:
    text = BOTH_RESET
    for pid in ("1903", "1904", "1905"):
        text = text.replace(f"PID: {pid}", "PID: 0")
    view = read(TWO_GPUS + text + RECOVERY)
    assert summary(view.counters)["faults"] == {"": 1}
    (fault,) = incidents(view, "fault")
    assert fault.gpu_uuids == ()


def test_the_wording_of_2022_blames_no_client() -> None:
    text = HOLDER
    text += """
        00:02.000 S110 Volta MPS: status of client {100, 1} is ACTIVE
        00:03.000 S110 Volta MPS: Server is handling a fatal GPU error.
        00:03.000 S110 Volta MPS: status of client {100, 1} is INACTIVE
        00:03.000 S110 Volta MPS: The following devices
        00:03.000 S110 0
        00:03.000 S110 1
        00:03.000 S110 Volta MPS: The following clients have a sticky error set:
        00:03.000 S110 100
        00:03.000 S110 101
        00:03.500 S110 Client {100, 1} exit
        00:03.500 S110 Volta MPS: Destroy server context on device 0
        00:03.600 S110 Volta MPS: Destroy server context on device 1
    """
    view = read(text)
    found = summary(view.counters)
    assert found["faults"] == {"": 1}  # on one of the two: no client is blamed
    assert found["losses"] == {"1001 unattributed_fault": 2}
    assert found["recoveries"] == [1, 0.6]
    assert not counted(view.counters, "mps_control_log_unrecognized_lines_total")


def test_victims_with_pid_0_are_counted() -> None:
    text = TWO_GPUS + FAULT
    for pid in ("1903", "1904", "1905"):
        text = text.replace(pid, "0")
    tracker = start(text)
    tracker.advance_to(at("00:10"))
    assert summary(tracker.state.counters)["losses"] == {"1001 unattributed_fault": 2}


def test_a_fault_without_a_device_in_the_log() -> None:
    text = HOLDER + "00:03.000 S110 Server is handling a fatal GPU error.\n"
    tracker = start(text)
    assert values(tracker.state, "mps_server_faults_total") == {}
    tracker.advance_to(at("00:04"))
    assert values(tracker.state, "mps_server_faults_total") == {("",): 1}


# ---------------------------------------------------------------- refused newcomers


def test_a_refusal_with_an_unknown_status_has_no_cause() -> None:
    line = "00:03.000 S110 Failed to accept client {PID: 591, Context ID: 1} with status 999"
    assert "rejections" not in counts(HOLDER + line)


def test_a_caller_without_credentials_is_refused_when_no_client_follows() -> None:
    missing = "User did not send valid credentials\n"
    tracker = start(DAEMON + f"00:03.000 C630 {missing}00:05.000 C630 {missing}")
    tracker.advance_to(at("00:12.999"))
    assert counted(tracker.state.counters, "mps_client_rejections_total") == {}
    for until, count in (("00:13", 1), ("00:14.999", 1), ("00:15", 2)):
        tracker.advance_to(at(until))
        found = summary(tracker.state.counters)["rejections"]
        assert found == {"None credentials": count}


def test_a_client_whose_context_ends_late_in_the_log_is_no_company_of_itself() -> None:
    text = HOLDER
    for time, context in (("03.000", 1), ("03.195", 0)):
        text += f"00:{time} S110 {LOST} {{PID: 100, Context ID: {context}}} exit\n"
    (server,) = read(text).servers
    assert [one.pid for one in server.clients if one.contexts] == [100]
    left = server.possible_unfinished_work
    assert left is not None
    assert (left.pid, left.seconds) == (100, 0.195)


def test_of_clients_with_pid_0_that_end_together_it_is_unclear_which_left_work() -> None:
    text = TWO_GPUS.removesuffix(client_on("00:01.500", 1905, 1909, GPU_TWO))
    text = text.replace("PID: 1903", "PID: 0").replace("PID: 1904", "PID: 0")
    context, process = "{PID: 0, Context ID: 1} exit\n", "{PID: 0, Context ID: 0} exit\n"
    for time in ("00:03.000", "00:03.010"):
        text += f"{time} S1909 {LOST} {context}{time} S1909 Client {context}"
    for time in ("00:03.020", "00:03.200"):
        text += f"{time} S1909 {LOST} {process}"
    (server,) = read(text).servers
    assert server.possible_unfinished_work is None
