"""Fatal GPU errors: responsible clients, victims and recovery."""

import pytest

from testing.mps_logs import (
    GPU,
    GPU_TWO,
    at,
    counted,
    counts,
    incidents,
    read,
    start,
    summary,
    values,
)
from testing.mps_script import DAEMON, HOLDER, client_on, server_starts

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
        text += (
            f"00:{time} S110 Server failed to recevie command with status 806, assuming client "
            f"{{PID: 100, Context ID: {context}}} exit\n"
        )
    (server,) = read(text).servers
    assert [one.pid for one in server.clients if one.contexts] == [100]
    left = server.possible_unfinished_work
    assert left is not None
    assert (left.pid, left.seconds) == (100, 0.195)
