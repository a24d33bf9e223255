"""Which servers are queried, when, and which replies are kept."""

from dataclasses import replace
from typing import Any

import pytest

from mps_exporter.mps.server_queries import (
    ServerAnswers,
    can_answer,
    servers_due,
    with_probe,
    with_servers,
)
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.tool_commands import PROBE, ProbeReply, ServerReply
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    Exchange,
    Outcome,
    ProcessFacts,
)
from testing import fake_mps_v3 as published
from testing.logged import LoggedServer, logged, logged_client

PIPE = "/tmp/mps"
NOW = 10_000.0
DEVICE = {0: "GPU-a"}
REPLIES = {pid: ServerReply(pid, "ACTIVE", 1.0, (), {}, DEVICE) for pid in (20, 21)}
ANSWERED = ServerAnswers(
    ProbeReply((21, 20), 1.0), REPLIES, NOW - 100.0, dict.fromkeys(REPLIES, NOW - 100.0)
)
"""Two servers, which answered 100 s ago."""


def server(pid: int, **more: Any) -> LoggedServer:
    return LoggedServer(pid, attributes=more)


def state(*servers: LoggedServer, **more: Any) -> DaemonState:
    return logged(*(servers or (server(20), server(21))), **more)


def due(
    answers: ServerAnswers = ANSWERED,
    known: DaemonState | None = None,
    *processes: ProcessFacts,
    interval: float = 900.0,
    logs_readable: bool = True,
) -> tuple[int, ...]:
    return servers_due(
        now=NOW,
        interval_seconds=interval,
        blind_interval_seconds=5.0,
        answers=answers,
        facts=DaemonFacts(PIPE, "/log", servers=processes),
        state=state() if known is None else known,
        logs_readable=logs_readable,
    )


# ------------------------------------------------------------------------------ when


@pytest.mark.parametrize(
    ("asked_at", "more", "asked"),
    [
        (NOW - 100.0, {"interval": 100.0}, True),
        (NOW - 100.0, {"interval": 100.1}, False),
        (None, {}, True),
        (NOW + 1.0, {}, True),  # the clock was set back
        (NOW - 5.0, {"logs_readable": False}, True),
        (NOW - 4.9, {"logs_readable": False}, False),
        (NOW - 100.0, {"known": state(configured_at=NOW - 99.0)}, True),
        (NOW - 100.0, {"known": state(configured_at=NOW - 101.0)}, False),
    ],
)
def test_servers_are_queried_after_an_interval_or_a_change(
    asked_at: float | None, more: dict[str, Any], asked: bool
) -> None:
    assert due(replace(ANSWERED, asked_at=asked_at), **more) == ((20, 21) if asked else ())


@pytest.mark.parametrize(
    ("again", "age", "asked"),
    [(False, 1.0, True), (False, 0.9, False), (True, 60.0, True), (True, 59.0, False)],
)
@pytest.mark.parametrize("unexplained", [21, 22], ids=["no reply", "only in the log"])
def test_the_interval_of_queries_about_an_unexplained_server(
    unexplained: int, again: bool, age: float, asked: bool
) -> None:
    known = state(server(20), server(21), *([server(22)] if unexplained == 22 else []))
    answers = replace(
        ANSWERED,
        asked_at=NOW - age,
        servers={pid: reply for pid, reply in REPLIES.items() if pid != unexplained},
        unexplained=frozenset({unexplained} if again else ()),
    )
    assert due(answers, known, interval=1e9) == ((20, 21) if asked else ())


# ------------------------------------------------------------------------------ which servers


NEW = ServerAnswers(ProbeReply((20,), 1.0))
LINES_LOST = {"ghost": True, "deaf_since": NOW, "has_all_lines": False}
"""A ghost that has clients, of which not all lines were read."""


@pytest.mark.parametrize(
    ("answers", "known", "asked"),
    [
        (ServerAnswers(), state(), False),  # no list
        (NEW, state(), True),
        (NEW, state(quit_requested_at=NOW - 1.0), False),
        (NEW, state(server(20), server(21, ghost=True)), False),
        (NEW, state(server(20), server(21, deaf_since=NOW)), False),
        (NEW, state(server(20), LoggedServer(21, (logged_client(30),), 9, 2.0, LINES_LOST)), False),
        (NEW, state(server(20, ready_at=None)), False),
        (NEW, state(server(20, ready_at=None, start_unknown=True)), True),
        (NEW, state(server(20, started_at=NOW - 0.9)), False),
        (NEW, state(server(20, started_at=NOW - 1.0)), True),
        (NEW, state(server(20, started_at=NOW + 5.0)), True),  # the clock was set back
    ],
)
def test_a_daemon_or_a_server_that_could_block_is_not_queried(
    answers: ServerAnswers, known: DaemonState, asked: bool
) -> None:
    assert due(answers, known) == ((20,) if asked else ())


def test_an_unresponsive_server_is_not_queried() -> None:
    for letter in "DTtZX":
        process = ProcessFacts(21, 1.0, state=letter)
        assert due(ServerAnswers(ANSWERED.probe), None, process) == (20,)


def test_a_server_is_found_by_the_number_that_its_daemon_knows() -> None:
    inner = ProcessFacts(900, 1.0, state="T", namespace_pids=(900, 40, 7))
    assert not can_answer(7, (inner,))
    assert not can_answer(900, (inner,))
    assert can_answer(40, (inner,))
    assert can_answer(8, (inner, ProcessFacts(8, 1.0, state="S")))


# ------------------------------------------------------------------------------ what is kept


def control(*exchanges: Exchange, at: float = NOW, outcome: Outcome = Outcome.OK) -> Any:
    return ControlObservation(at, PIPE, "reconciliation", outcome, exchanges)


def status(pid: int, stdout: str = "ACTIVE\n") -> Exchange:
    return Exchange((f"get_server_status {pid}",), Outcome.OK, stdout, return_code=0)


def listed(stdout: str, outcome: Outcome = Outcome.OK) -> Any:
    return control(Exchange(PROBE, outcome, stdout, return_code=0), outcome=outcome)


def test_the_map_of_devices_is_kept_for_a_server_s_life() -> None:
    found = with_servers(ANSWERED, control(status(20, "FAULT\n"), status(22)))
    assert found.servers == {
        20: ServerReply(20, "FAULT", devices=DEVICE),
        21: REPLIES[21],
        22: ServerReply(22, "ACTIVE"),
    }
    assert found.answered_at == {20: NOW, 21: NOW - 100.0, 22: NOW}
    assert found.device_uuids() == {0: "GPU-a"}
    mapped = status(20, "ACTIVE\n")
    query = "Server 20\n1,0000:00.07.00,GPU-b,NVIDIA H200,N/A\n"
    mapped = replace(
        mapped, commands=(*mapped.commands, "device_query 20 --csv"), stdout=f"ACTIVE\n{query}"
    )
    assert with_servers(ANSWERED, control(mapped)).device_uuids() == {0: "GPU-a", 1: "GPU-b"}


def test_a_server_without_a_reply_is_unexplained() -> None:
    known = (20, 21)
    once = with_servers(ANSWERED, control(status(20)), (20, 22), known)
    assert (once.unexplained, once.asked_at) == (frozenset({22}), NOW)
    assert with_servers(once, control(outcome=Outcome.SKIPPED), (22,), known) == once


def test_replies_of_servers_that_are_gone_are_dropped() -> None:
    found = with_probe(ANSWERED, listed("20\n100.0\n"))
    assert found.probe == ProbeReply((20,), 1.0)
    assert found.servers == {20: REPLIES[20]}


@pytest.mark.parametrize(
    "observation", [None, listed("20\n"), listed("20\n100.0\n", Outcome.TIMEOUT)]
)
def test_a_failed_probe_has_no_list_and_keeps_the_replies(observation: Any) -> None:
    found = with_probe(ANSWERED, observation)
    assert (found.probe, found.servers) == (None, REPLIES)


# ------------------------------------------------------------------------------ MPS v3


def test_a_v2_daemon_is_not_queried_for_the_details_of_v3() -> None:
    probe = control(Exchange(("lspart",), Outcome.OK, published.LSPART_CAPTURE, return_code=0))
    v2 = with_probe(ServerAnswers(), probe)
    assert v2.partitioning.protocol == "2"
    assert not v2.v3_due(probe)
