"""Who left GPU work behind: named only where the log singles out one client."""

from __future__ import annotations

from typing import Any

import pytest

from mps_exporter.mps.unfinished_work import (
    DECISION_SECONDS,
    NEWCOMER_TO_FAULT_SECONDS,
    QUEUED_END_SECONDS,
)
from mps_exporter.snapshot import LedgerView
from testing.mps_logs import GPU, GPU_TWO, at, counted, more, read, script, start, summary
from testing.mps_script import DAEMON, client_on, server_starts

SERVER = DAEMON + server_starts("00:01.000", "00:01.200", 110, 1001)
NEIGHBOURS = client_on("00:01.300", 101, 110, GPU) + client_on("00:01.400", 102, 110, GPU)
BUSY = SERVER + NEIGHBOURS + client_on("00:02.000", 100, 110, GPU)


def stamp(seconds: float) -> str:
    return f"{int(seconds // 60):02}:{seconds % 60:06.3f}"


def ends(pid: int, context_at: float, process_at: float | None = None, context: int = 1) -> str:
    """A client's end, as far as it has come."""
    lost = "Server failed to recevie command with status 806, assuming client"
    name_of = f"{{PID: {pid}, Context ID: {context}}}"
    text = f"""
        {stamp(context_at)} S110 {lost} {name_of} exit
        {stamp(context_at)} S110 Client {name_of} exiting. Number of active client contexts is 0.
    """
    return text if process_at is None else text + process_ends(pid, process_at)


def process_ends(pid: int, process_at: float) -> str:
    return f"""
        {stamp(process_at)} S110 Server failed to recevie command with status 806, \
assuming client {{PID: {pid}, Context ID: 0}} exit
        {stamp(process_at)} S110 Client process {pid} disconnected
    """


def fault(moment: float, *victims: int, device: int = 0) -> str:
    """A fault; MPS names the first victim."""
    lines = [
        f"Client {{PID: {victims[0]}, Context: 1}} encountered a fatal GPU error.",
        "Server is handling a fatal GPU error.",
        *(
            f"Client {{PID: {pid}, Context ID: 1}} on device {device} to be torn down"
            for pid in victims
        ),
        "The following devices will be reset:",
        str(device),
        "The following client process have a sticky error set:",
        *(str(pid) for pid in victims),
    ]
    return "".join(f"{stamp(moment)} S110 {line}\n" for line in lines)


def in_order(*texts: str) -> str:
    """Lines in the order of their stamps."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return "\n".join(sorted(lines, key=lambda line: line[:9])) + "\n"


def seen(*texts: str, later: float = 60.0) -> LedgerView:
    """What is known long after these lines."""
    tracker = start(script(in_order(*texts)))
    tracker.ledger.advance_to(at(stamp(later)))
    return tracker.ledger.view(0.0)


def outcome(view: LedgerView) -> tuple[int | None, dict[str, Any]]:
    """Who is named, and what the victims were lost to."""
    (incident,) = [i for i in view.incidents if i.kind in ("fault", "unfinished_work")]
    return incident.left_by_pid, summary(view.counters)["losses"]


NAMED = (100, {"1001 unfinished_work": 2})
DOUBTFUL = (None, {"1001 unattributed_fault": 2})
BLAMED = (None, {"1001 own_fault": 1, "1001 neighbour_fault": 1})


# ---------------------------------------------------------------- with neighbours


@pytest.mark.parametrize(
    ("context_at", "process_at", "fault_at", "expected"),
    [
        # Measured: with busy neighbours the fault falls between the two lines
        (5.000, 5.195, 5.163, NAMED),
        (5.000, 5.268, 5.177, DOUBTFUL),
        (5.000, 5.242, 5.162, NAMED),
        # an ordinary end that the fault of another client held up; one with work may be like it
        (5.000, 5.291, 5.203, DOUBTFUL),
        (5.000, 5.290, 5.206, DOUBTFUL),
        (5.000, 5.430, 5.170, DOUBTFUL),
        # with idle ones it comes just after the second
        (5.000, 5.193, 5.233, NAMED),
        (5.000, 5.203, 5.249, NAMED),
        # an ordinary end
        (5.000, 5.016, 5.010, BLAMED),
        (5.000, 5.016, 5.090, BLAMED),
        (5.000, 5.016, 5.310, BLAMED),
        # an ordinary end when a culprit's would have been: one of 132 ended as quickly
        (5.000, 5.021, 5.165, DOUBTFUL),
        (5.000, 5.063, 5.191, DOUBTFUL),
        (5.000, 5.093, 5.160, DOUBTFUL),
        # too early or too late to have to do with it
        (5.000, 5.195, 5.050, BLAMED),
        (5.000, 5.195, 6.000, BLAMED),
        # a long end, but not at the measured distance: nobody can tell
        (5.000, 5.195, 5.320, DOUBTFUL),
        (5.000, 5.150, 5.270, DOUBTFUL),
        (5.000, 5.700, 5.400, DOUBTFUL),
        # it has no end: the program destroyed a context, perhaps
        (5.000, None, 5.163, DOUBTFUL),
        (5.000, None, 5.001 + QUEUED_END_SECONDS, BLAMED),
    ],
)
def test_the_times_of_one_end(
    context_at: float, process_at: float | None, fault_at: float, expected: object
) -> None:
    view = seen(BUSY, ends(100, context_at, process_at), fault(fault_at, 101, 102))
    assert outcome(view) == expected
    named = expected is NAMED
    assert counted(view.counters, "mps_client_unfinished_exits_total") == (
        {(1001,): 1} if named else {}
    )
    (incident,) = [i for i in view.incidents if i.kind in ("fault", "unfinished_work")]
    assert incident.blamed_pid == 101
    assert incident.pids == ((101, 102) if named else (102,))
    assert incident.ended_pids == ((100,) if expected is DOUBTFUL else ())
    assert view.counters["mps_server_faults_total"] == {(GPU,): 1}


def test_without_an_end_the_word_of_mps_stands_at_once() -> None:
    view = read(script(in_order(BUSY, fault(5.0, 100, 101))))
    assert summary(view.counters)["losses"] == BLAMED[1]


def test_the_victims_are_counted_once_the_process_has_ended() -> None:
    tracker = start(script(in_order(BUSY, ends(100, 5.0), fault(5.163, 101, 102))))
    assert "losses" not in summary(tracker.ledger.view(0.0).counters)
    more(tracker, "00:05.189 S110 Destroy server context on device 0 (NVIDIA H200)\n")
    more(tracker, in_order(process_ends(100, 5.195), ends(101, 5.195, 5.250)))
    view = tracker.ledger.view(0.0)
    assert outcome(view) == NAMED
    kinds = [i.kind for i in view.incidents][-2:]
    assert kinds == ["unfinished_work", "fault_recovered"]
    tracker.ledger.advance_to(at("00:59"))
    assert outcome(tracker.ledger.view(0.0)) == NAMED


def test_the_decision_does_not_wait_for_longer_than_half_a_second() -> None:
    tracker = start(script(in_order(BUSY, ends(100, 5.0), fault(5.163, 101, 102))))
    tracker.ledger.advance_to(at(stamp(5.163 + DECISION_SECONDS - 0.001)))
    assert "losses" not in summary(tracker.ledger.view(0.0).counters)
    tracker.ledger.advance_to(at(stamp(5.163 + DECISION_SECONDS)))
    assert outcome(tracker.ledger.view(0.0)) == DOUBTFUL


def test_a_server_that_ends_meanwhile_loses_nobody_twice() -> None:
    text = in_order(BUSY, ends(100, 5.0), fault(5.163, 101, 102))
    view = read(script(text + "00:05.200 C630 Server 110 exited with status 0\n"))
    assert summary(view.counters)["losses"] == {"1001 unattributed_fault": 2}


def test_one_of_two_that_end_together_is_not_singled_out() -> None:
    text = SERVER + NEIGHBOURS + client_on("00:02.000", 100, 110, GPU)
    text += client_on("00:02.000", 99, 110, GPU)
    view = seen(text, ends(100, 5.0, 5.229), ends(99, 5.0, 5.227), fault(5.187, 101, 102))
    assert outcome(view) == DOUBTFUL
    (incident,) = [i for i in view.incidents if i.kind == "fault"]
    assert sorted(incident.ended_pids) == [99, 100]
    assert counted(view.counters, "mps_client_unfinished_exits_total") == {}


def test_an_ordinary_end_beside_it_excuses_nobody() -> None:
    text = SERVER + NEIGHBOURS + client_on("00:02.000", 100, 110, GPU)
    text += client_on("00:02.000", 99, 110, GPU)
    view = seen(text, ends(100, 5.0, 5.202), ends(99, 4.943, 4.967), fault(5.165, 101, 102))
    assert outcome(view) == NAMED


def test_a_crowd_explains_a_long_end() -> None:
    crowd = range(90, 93)
    text = BUSY + "".join(client_on("00:02.000", pid, 110, GPU) for pid in crowd)
    leaving = "".join(ends(pid, 4.990, 5.080) for pid in crowd)
    view = seen(text, leaving, ends(100, 5.0, 5.195), fault(5.163, 101, 102))
    assert outcome(view) == DOUBTFUL


def test_a_client_that_an_operator_terminated_left_nothing() -> None:
    ended = (
        f"{stamp(4.990)} S110 MPS server requesting client {{PID: 100, Context ID: 1}} to exit\n"
    )
    view = seen(BUSY, ended, ends(100, 5.0, 5.195), fault(5.163, 101, 102))
    assert counted(view.counters, "mps_client_unfinished_exits_total") == {}
    assert summary(view.counters)["losses"] == {**BLAMED[1], "1001 terminated": 1}


def test_a_victim_of_an_earlier_fault_is_no_culprit_of_the_next() -> None:
    text = BUSY + client_on("00:03.000", 103, 110, GPU)
    view = seen(text, fault(4.9, 100), ends(100, 5.0, 5.195), fault(5.163, 101, 102))
    assert counted(view.counters, "mps_client_unfinished_exits_total") == {}
    assert summary(view.counters)["losses"] == {"1001 own_fault": 2, "1001 neighbour_fault": 1}


@pytest.mark.parametrize(
    ("gpu", "expected"), [(GPU_TWO, (100, {"1001 unfinished_work": 1})), (GPU, (None, None))]
)
def test_work_on_one_gpu_hurts_nobody_on_another(gpu: str, expected: tuple[Any, Any]) -> None:
    text = SERVER + client_on("00:01.300", 101, 110, GPU_TWO)
    text += client_on("00:01.400", 102, 110, GPU) + client_on("00:02.000", 100, 110, gpu)
    view = seen(text, ends(100, 5.0, 5.195), fault(5.163, 101, device=1))
    assert outcome(view) == (expected if expected[0] else (None, {"1001 own_fault": 1}))


def test_a_client_that_goes_on_with_another_context_does_not_end() -> None:
    again = client_on("00:05.050", 100, 110, GPU, context=2).splitlines()[3:]
    view = seen(BUSY, ends(100, 5.0), "\n".join(again), fault(5.163, 101, 102))
    assert outcome(view) == BLAMED


def test_clients_without_a_number_are_counted_and_not_named() -> None:
    view = seen(BUSY.replace("PID: 100,", "PID: 0,"), ends(0, 5.0, 5.195), fault(5.163, 101, 102))
    assert outcome(view) == (0, {"1001 unfinished_work": 2})


# ---------------------------------------------------------------- the last one on a GPU


def newcomer(pid: int, moment: float) -> str:
    return client_on(stamp(moment), pid, 110, GPU)


ALONE = SERVER + client_on("00:02.000", 100, 110, GPU)


@pytest.mark.parametrize("process_at", [5.199, 5.019])
@pytest.mark.parametrize("fault_after", [0.172, 0.201, 0.697])
def test_the_next_client_fails_in_its_first_call(process_at: float, fault_after: float) -> None:
    moment = 10.0 + fault_after
    view = seen(
        ALONE,
        ends(100, 5.0, process_at),
        newcomer(101, 10.0),
        fault(moment, 101),
        ends(101, moment + 0.054, moment + 0.055),
    )
    assert outcome(view) == (100, {"1001 unfinished_work": 1})
    assert counted(view.counters, "mps_client_unfinished_exits_total") == {(1001,): 1}


@pytest.mark.parametrize(
    ("process_at", "cause"), [(5.199, "unattributed_fault"), (5.019, "own_fault")]
)
def test_a_newcomer_that_ran_may_have_a_fault_of_its_own(process_at: float, cause: str) -> None:
    view = seen(
        ALONE,
        ends(100, 5.0, process_at),
        newcomer(101, 10.0),
        fault(10.201, 101),
        ends(101, 10.221, 10.236),
    )
    assert outcome(view) == (None, {f"1001 {cause}": 1})
    assert counted(view.counters, "mps_client_unfinished_exits_total") == {}


@pytest.mark.parametrize(
    ("process_at", "cause"), [(5.199, "unattributed_fault"), (5.019, "own_fault")]
)
def test_a_newcomer_that_stays_leaves_a_doubt_after_a_long_end(
    process_at: float, cause: str
) -> None:
    view = seen(ALONE, ends(100, 5.0, process_at), newcomer(101, 10.0), fault(10.201, 101))
    assert outcome(view) == (None, {f"1001 {cause}": 1})


def test_a_newcomer_that_has_run_for_a_while_has_a_fault_of_its_own() -> None:
    moment = 10.001 + NEWCOMER_TO_FAULT_SECONDS
    view = seen(
        ALONE,
        ends(100, 5.0, 5.199),
        newcomer(101, 10.0),
        fault(moment, 101),
        ends(101, moment + 0.054, moment + 0.055),
    )
    assert outcome(view) == (None, {"1001 own_fault": 1})


def test_of_two_that_were_the_last_together_nobody_is_named() -> None:
    view = seen(
        ALONE,
        client_on("00:02.000", 99, 110, GPU),
        ends(100, 5.0, 5.167),
        ends(99, 5.002, 5.169),
        newcomer(101, 10.0),
        fault(10.214, 101),
        ends(101, 10.348, 10.349),
    )
    assert outcome(view) == (None, {"1001 unattributed_fault": 1})
    assert [i.ended_pids for i in view.incidents if i.kind == "fault"] == [(100, 99)]


def test_a_newcomer_that_is_killed_at_once_is_not_accused_of_what_was_there_before() -> None:
    view = seen(
        ALONE,
        ends(100, 5.0, 5.199),
        newcomer(99, 8.0),
        ends(99, 8.1, 8.12),
        newcomer(101, 10.0),
        fault(10.201, 101),
        ends(101, 10.255, 10.256),
    )
    assert outcome(view)[0] is None
    assert outcome(view)[1] == {"1001 unattributed_fault": 1}


# ---------------------------------------------------------------- the warning


def warned(*texts: str, later: float) -> int | None:
    (server,) = seen(*texts, later=later).servers
    left = server.possible_unfinished_work
    return None if left is None else left.pid


def test_a_long_end_alone_warns_until_a_newcomer_has_run() -> None:
    ended = (ALONE, ends(100, 5.0, 5.195))
    assert warned(*ended, later=3600.0 - 1) == 100
    (server,) = seen(*ended).servers
    left = server.possible_unfinished_work
    assert left is not None
    assert (left.uid, left.ended_at, left.seconds) == (1001, at("00:05.195"), 0.195)
    assert left.gpu_uuids == (GPU,)
    come = (*ended, newcomer(101, 10.0))
    assert warned(*come, later=10.0 + NEWCOMER_TO_FAULT_SECONDS - 0.001) == 100
    assert warned(*come, later=10.0 + NEWCOMER_TO_FAULT_SECONDS) is None
    failed = (*come, fault(10.201, 101), ends(101, 10.255, 10.256))
    assert warned(*failed, later=10.3) is None


@pytest.mark.parametrize(
    ("others", "end"),
    [
        (client_on("00:01.300", 101, 110, GPU), ends(100, 5.0, 5.195)),  # a neighbour is there
        ("", ends(100, 5.0, 5.019)),  # an ordinary end
        ("", ends(100, 5.0, 5.900)),  # it destroyed its context and went on
        (  # another one was ending
            client_on("00:01.300", 101, 110, GPU),
            ends(100, 5.0, 5.195) + ends(101, 5.1, 5.180),
        ),
    ],
)
def test_no_other_end_warns(others: str, end: str) -> None:
    assert warned(ALONE, others, end, later=20.0) is None


def test_a_neighbour_on_another_gpu_does_not_matter() -> None:
    other = client_on("00:01.300", 101, 110, GPU_TWO)
    ended = (ALONE, other, ends(100, 5.0, 5.195))
    assert warned(*ended, later=20.0) == 100
    elsewhere = client_on("00:10.000", 102, 110, GPU_TWO)
    assert warned(*ended, elsewhere, later=20.0) == 100
    assert warned(*ended, ends(101, 6.0, 6.016), later=20.0) == 100
    assert warned(*ended, newcomer(102, 10.0), later=20.0) is None
