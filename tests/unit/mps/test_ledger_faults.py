"""Fatal GPU errors: responsible clients, victims and recovery."""

from __future__ import annotations

import pytest

from testing.mps_logs import (
    GPU,
    GPU_TWO,
    at,
    counted,
    counts,
    incidents,
    more,
    read,
    start,
    summary,
    values,
)
from testing.mps_script import DAEMON, HOLDER, arrives, client_on, leaves, server_starts

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


def test_a_victim_is_known_before_the_list_of_victims() -> None:
    """The lists come last, and may be lost."""
    begun = FAULT[: FAULT.index("    00:06.768 S1909 The following devices")]
    view = read(TWO_GPUS + begun + leaves("00:08.000", 1903, 1909))
    found = summary(view.counters)
    assert found["losses"] == {"1001 unattributed_fault": 2}
    assert found["faults"] == {GPU_TWO: 1}
    (fault,) = incidents(view, "fault")
    assert (fault.blamed_pid, fault.pids) == (1905, (1905, 1904))


BOTH_RESET = FAULT.replace(
    "        00:06.768 S1909 1\n", "        00:06.768 S1909 0\n00:06.768 S1909 1\n"
).replace(
    "    00:06.768 S1909 All clients belonging to error trigging process 1905",
    "    00:06.768 S1909 Client {PID: 1903, Context ID: 1} on device 0 to be torn down\n"
    "    00:06.768 S1909 All clients belonging to error trigging process 1905",
)


def test_two_clients_blamed_on_two_gpus_are_a_fault_on_each() -> None:
    second = "    00:06.768 S1909 Client {PID: 1903, Context: 1} encountered a fatal GPU error.\n"
    view = read(TWO_GPUS + second + BOTH_RESET)
    assert summary(view.counters)["faults"] == {GPU: 1, GPU_TWO: 1}


HANDLING = "00:06.768 S1909 Server is handling a fatal GPU error.\n"
BLAMED_AGAIN = "00:06.768 S1909 Client {PID: PID_, Context: 2} encountered a fatal GPU error.\n"


@pytest.mark.parametrize(("pid", "faults"), [(1905, 1), (1904, 2)])
def test_a_client_that_is_blamed_again_is_no_second_fault(pid: int, faults: int) -> None:
    """A client may have several contexts; another client is named for a fault of its own."""
    again = HANDLING + BLAMED_AGAIN.replace("PID_", str(pid))
    view = read(TWO_GPUS + FAULT.replace(HANDLING, again) + RECOVERY)
    assert len(incidents(view, "fault")) == faults


@pytest.mark.parametrize("anonymous", ["blamed", "nobody"])
def test_a_fault_on_an_unknown_gpu_counts_on_none(anonymous: str) -> None:
    text = BOTH_RESET
    for pid in ("1903", "1904", "1905"):
        text = text.replace(f"PID: {pid}", "PID: 0")
    if anonymous == "nobody":
        text = "".join(f"{line}\n" for line in text.splitlines() if "encountered" not in line)
    view = read(TWO_GPUS + text + RECOVERY)
    assert summary(view.counters)["faults"] == {"": 1}
    assert [i.gpu_uuids for i in view.incidents.snapshot() if i.kind == "fault"] == [()]


@pytest.mark.parametrize("later", ["00:08.000", "00:08.001"])
def test_a_refused_client_may_connect_later_and_overtake(later: str) -> None:
    waiter = "00:07.000 C630 NEW CLIENT 7 from user 9: Server is not ready, push client to \
pending list\n"
    text = TWO_GPUS + FAULT + waiter + arrives("00:08.000", 591, 1001)
    text += f"{later} S1909 Failed to accept client {{PID: 591, Context ID: 0}} with status 807\n"
    before = counts(text).get("overtakes", {})
    text += RECOVERY.replace("00:06.794", "00:09.000") + arrives("00:10.000", 591, 1001)
    text += client_on("00:10.000", 591, 1909, GPU)
    after = counts(text)["overtakes"]
    assert after["1001"] - before.get("1001", 0) == 1
    # A client that server.log refused in the same millisecond was never let in.
    assert before.get("1001", 0) == (0 if later == "00:08.000" else 1)


def test_a_server_that_is_killed_in_a_fault_loses_the_rest_only() -> None:
    text = TWO_GPUS + FAULT + "00:07.000 C630 Server 1909 exited with status 0\n"
    found = counts(text)
    assert found["losses"] == {"1001 unattributed_fault": 2, "1001 server_crashed": 1}
    assert found["disconnections"] == {"1001": 3}


def test_two_faults_are_two() -> None:
    second = FAULT.replace("00:06.768", "00:09.000").replace("1905", "1903")
    second = second.replace("device 1", "device 0").replace("S1909 1\n", "S1909 0\n")
    text = TWO_GPUS + FAULT + RECOVERY + second.replace("1904", "1903")
    tracker = start(text)
    tracker.advance_to(at("00:10.000"))
    found = summary(tracker.state.counters)
    assert found["faults"] == {GPU_TWO: 1, GPU: 1}
    assert found["losses"] == {"1001 unattributed_fault": 3}
    again = TWO_GPUS + FAULT + second.replace("00:09.000", "00:06.769").replace("1904", "1903")
    found = counts(again + RECOVERY)
    assert found["faults"] == {GPU_TWO: 1, GPU: 1}
    assert found["recoveries"] == [1, 0.026]


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
    text = TWO_GPUS.replace("1903", "0").replace("1904", "0").replace("1905", "0")
    fault = FAULT.replace("1905", "0").replace("1904", "0")
    tracker = start(text + fault)
    tracker.advance_to(at("00:10.000"))
    found = summary(tracker.state.counters)
    assert found["losses"] == {"1001 unattributed_fault": 2}


def test_a_fault_without_a_device_in_the_log() -> None:
    text = HOLDER + "00:03.000 S110 Server is handling a fatal GPU error.\n"
    tracker = start(text)
    assert values(tracker.state, "mps_server_faults_total") == {}
    tracker.advance_to(at("00:04"))
    assert values(tracker.state, "mps_server_faults_total") == {("",): 1}


def test_an_operator_ends_a_client_while_server_log_is_unreadable() -> None:
    text = HOLDER
    text += """
        00:03.000 C630 NEW UI
        00:03.000 C630 Cmd:terminate_client 110 100
        00:03.010 C630 0
        00:03.010 C630 UI closed
    """
    view = start(text, readable=("control",)).state
    assert summary(view.counters)["losses"] == {"1001 terminated": 1}


# ---------------------------------------------------------------- refused newcomers


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["Failed to accept new client. Maximum number of clients (48) reached."], "context_limit"),
        (
            [
                "Failed to accept new client. Maximum number of clients (48) reached.",
                "Failed to accept client {PID: 591, Context ID: 1} with status 808",
            ],
            "context_limit",
        ),
        (["Failed to accept client {PID: 591, Context ID: 1} with status 808"], "context_limit"),
        (["Failed to accept client {PID: 591, Context ID: 1} with status 809"], "context_limit"),
        (["Failed to accept client {PID: 591, Context ID: 0} with status 807"], "server_not_ready"),
    ],
)
def test_a_refusal_with_several_lines_is_counted_once(lines: list[str], cause: str) -> None:
    text = HOLDER + "".join(f"00:03.000 S110 {line}\n" for line in lines)
    view = read(text)
    last = "mps_client_last_rejection_timestamp_seconds"
    assert summary(view.counters)["rejections"] == {f"1001 {cause}": 1}
    assert values(view, last) == {(): at("00:03.000")}
    assert values(view, "mps_client_last_loss_timestamp_seconds") == {}
    twice = text + "".join(f"00:03.500 S110 {line}\n" for line in lines)
    after = read(twice).counters.snapshot()
    assert summary(after)["rejections"] == {f"1001 {cause}": 2}
    assert after[last] == {(): at("00:03.500")}
    assert next(iter(view.servers)).client_limit == (48 if "(48)" in lines[0] else None)


def test_an_unknown_error_counts_as_no_refusal() -> None:
    line = "00:03.000 S110 Failed to accept client {PID: 591, Context ID: 0} with status 999\n"
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


def test_a_draining_daemon_refuses_no_client() -> None:
    text = HOLDER + "00:02.000 C630 Cmd:quit\n00:03.000 C630 User did not send valid credentials\n"
    tracker = start(text)
    tracker.advance_to(at("00:59"))
    assert counted(tracker.state.counters, "mps_client_rejections_total") == {}


# ---------------------------------------------------------------- contexts and GPUs


def test_a_late_line_of_a_fault_begins_no_other() -> None:
    late = "00:08.000 S1909 Client {PID: 1904, Context ID: 1} on device 1 to be torn down\n"
    tracker = start(TWO_GPUS + FAULT.replace(late.replace("08.000", "06.768"), ""))
    tracker.advance_to(at("00:07.500"))
    more(tracker, late)
    view = tracker.state
    found = summary(view.counters)
    assert found["faults"] == {GPU_TWO: 1}
    assert found["losses"] == {"1001 unattributed_fault": 2}
    assert values(view, "mps_server_last_fault_timestamp_seconds") == {(): at("00:06.768")}
