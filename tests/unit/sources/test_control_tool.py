from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mps_exporter.mps.control_protocol import PROBE
from mps_exporter.mps.protocol_v3 import CLIENTS, DEVICES, FEATURES, NAMESPACES, PARTITIONS, SERVERS
from mps_exporter.observations import DaemonFacts, Outcome, ProcessFacts
from mps_exporter.sources import policy
from mps_exporter.sources.child_process import ChildRights, ProcessResult
from mps_exporter.sources.control_tool import PATH, ControlTool
from testing import fake_mps_control
from testing import fake_mps_v3 as published
from testing.fake_host import H200, server

DAEMON = DaemonFacts("/tmp/mps", "/tmp/log")
OK = ProcessResult(0, b"468\n100.0\n")
REFUSED = ProcessResult(1, stderr=b"Cannot send command to MPS control daemon process\n")
ABSENT = ProcessResult(1, stderr=b"Cannot find MPS control daemon process\n")
GARBAGE = ProcessResult(0, b"\xff\n")
HUNG = ProcessResult(None, timed_out=True)

Answer = ProcessResult | OSError | Callable[[list[str]], ProcessResult]


@dataclass
class Desk:
    """A clock, and a program that gives prepared answers."""

    answers: list[Answer] = field(default_factory=list)
    time: float = 1000.0
    asked: list[list[str]] = field(default_factory=list)
    environments: list[Mapping[str, str]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    rights: list[ChildRights] = field(default_factory=list)

    def tool(self, min_interval_seconds: float = 0.0) -> ControlTool:
        return ControlTool(
            "tool",
            2.0,
            min_interval_seconds,
            run=self.run,
            now=lambda: self.time,
            clock=lambda: self.time,
        )

    async def run(
        self,
        argv: Sequence[str],
        stdin: bytes,
        environment: Mapping[str, str],
        timeout_seconds: float,
        rights: ChildRights,
    ) -> ProcessResult:
        program, *arguments = argv
        assert program == "tool"
        self.rights.append(rights)
        self.asked.append([" ".join(arguments)] if arguments else stdin.decode().split("\n")[:-1])
        self.environments.append(environment)
        self.limits.append(timeout_seconds)
        answer = self.answers.pop(0)
        await asyncio.sleep(0)
        if isinstance(answer, OSError):
            raise answer
        return answer if isinstance(answer, ProcessResult) else answer(self.asked[-1])


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(policy, "CONTROL_RETRY_DELAY_SECONDS", 0.0)
    return Desk()


async def test_a_probe(desk: Desk) -> None:
    desk.answers = [OK]
    seen = await desk.tool().probe(DAEMON, 1.5)
    assert (seen.at, seen.pipe_directory, seen.kind, seen.outcome) == (
        1000.0,
        "/tmp/mps",
        "probe",
        Outcome.OK,
    )
    assert seen.error is None
    (exchange,) = seen.exchanges
    assert exchange.commands == ("get_server_list", "get_default_active_thread_percentage")
    assert (exchange.stdout, exchange.return_code, exchange.attempts) == ("468\n100.0\n", 0, 1)
    assert desk.limits == [1.5]


async def test_the_tool_gets_a_minimal_environment(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/opt/bin")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere")
    monkeypatch.setenv("SECRET", "x")
    desk.answers = [OK]
    await desk.tool().probe(replace(DAEMON, root="/proc/9/root"), 5)
    assert desk.environments == [{"CUDA_MPS_PIPE_DIRECTORY": "/proc/9/root/tmp/mps", "PATH": PATH}]
    assert desk.limits == [2.0]


@pytest.mark.parametrize("first", [REFUSED, GARBAGE, ProcessResult(0, b""), ProcessResult(139)])
async def test_a_single_failure_is_tried_again(desk: Desk, first: ProcessResult) -> None:
    desk.answers = [first, OK]
    tool = desk.tool()
    seen = await tool.probe(DAEMON, 5)
    assert seen.outcome is Outcome.OK
    assert seen.exchanges[0].attempts == 2
    assert tool.counts("/tmp/mps") == (2, {})


@pytest.mark.parametrize(
    ("answer", "outcome", "why"),
    [
        (REFUSED, Outcome.REFUSED, "Cannot send command to MPS control daemon process"),
        (GARBAGE, Outcome.UNPARSABLE, r"\\xff"),
        (ProcessResult(0, b""), Outcome.UNPARSABLE, "it said nothing"),
        (
            ProcessResult(None, b"x" * 9000, output_exceeded=True),
            Outcome.UNPARSABLE,
            "more than 1048576",
        ),
    ],
)
async def test_two_failures_are_a_failure(
    desk: Desk, answer: ProcessResult, outcome: Outcome, why: str
) -> None:
    desk.answers = [answer, answer]
    tool = desk.tool()
    seen = await tool.probe(DAEMON, 5)
    assert seen.outcome is outcome
    assert why.replace("\\\\", "\\") in (seen.error or "")
    assert len(seen.exchanges[0].stdout) < 5000
    assert tool.counts("/tmp/mps") == (2, {outcome.value: 1})


async def test_an_absent_daemon_is_asked_once(desk: Desk) -> None:
    desk.answers = [ABSENT]
    tool = desk.tool()
    assert (await tool.probe(DAEMON, 5)).outcome is Outcome.ABSENT
    assert tool.counts("/tmp/mps") == (1, {"absent": 1})


@pytest.mark.parametrize(
    "alive",
    [
        replace(DAEMON, lock_holder_pid=7, lock_tested=True),
        replace(DAEMON, process=ProcessFacts(7, 1.0)),
    ],
)
async def test_one_whose_process_is_there_is_asked_twice(desk: Desk, alive: DaemonFacts) -> None:
    desk.answers = [ABSENT, OK]
    assert (await desk.tool().probe(alive, 5)).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (FileNotFoundError(2, "No such file"), "--mps.control-binary"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (OSError(8, "Exec format error"), "Exec format error"),
    ],
)
async def test_a_tool_that_cannot_be_run(desk: Desk, error: OSError, why: str) -> None:
    desk.answers = [error]
    alive = replace(DAEMON, lock_holder_pid=7, lock_tested=True)
    seen = await desk.tool().probe(alive, 5)
    assert seen.outcome is Outcome.ABSENT
    assert why in (seen.error or "")


@pytest.mark.parametrize("seconds", [0.05, 0.49])
async def test_without_time_nothing_is_asked(desk: Desk, seconds: float) -> None:
    tool = desk.tool()
    seen = await tool.probe(DAEMON, seconds)
    assert seen.outcome is Outcome.SKIPPED
    assert tool.counts("/tmp/mps") == (0, {})


async def test_silence_in_less_time_than_it_should_have_is_no_hang(desk: Desk) -> None:
    desk.answers = [HUNG, OK]
    tool = desk.tool()
    seen = await tool.probe(DAEMON, 0.6)
    assert seen.outcome is Outcome.SKIPPED
    assert (seen.error or "").endswith("no answer within 0.6 s, and no more time was left")
    assert tool.counts("/tmp/mps") == (1, {})
    assert (await tool.probe(DAEMON, 5)).outcome is Outcome.OK


async def test_silence_adds_up_to_a_hang(desk: Desk) -> None:
    """Else a scraper in a hurry would never notice, and block the daemon each time."""
    desk.answers = [HUNG, HUNG, OK, HUNG, HUNG, HUNG]
    tool = desk.tool()
    outcomes = [(await tool.probe(DAEMON, 0.8)).outcome.value for _ in range(6)]
    assert outcomes == ["skipped", "skipped", "ok", "skipped", "skipped", "timeout"]


async def test_a_second_try_needs_less_time(desk: Desk) -> None:
    desk.answers = [REFUSED, OK]
    tool = desk.tool()

    async def slow(*arguments: Any, **_: Any) -> ProcessResult:
        desk.time += 0.3
        return await desk.run(*arguments)

    tool._run = slow
    assert (await tool.probe(DAEMON, 0.55)).outcome is Outcome.OK


async def test_within_the_interval_the_last_answer_is_given_again(desk: Desk) -> None:
    desk.answers = [OK, OK]
    tool = desk.tool(5.0)
    first = await tool.probe(DAEMON, 5)
    desk.time += 4.9
    assert await tool.probe(DAEMON, 5) is first
    desk.time += 0.2
    assert await tool.probe(DAEMON, 5) is not first
    assert len(desk.asked) == 2


async def test_another_process_in_the_same_directory_is_queried_again(desk: Desk) -> None:
    desk.answers = [OK, OK, OK]
    tool = desk.tool(5.0)
    for daemon in (
        replace(DAEMON, process=ProcessFacts(7, 1.0)),
        replace(DAEMON, process=ProcessFacts(7, 2.0)),
        replace(DAEMON, lock_holder_pid=9, lock_tested=True),
    ):
        await tool.probe(daemon, 5)
    assert len(desk.asked) == 3


async def test_after_a_hang_it_is_left_alone_longer_and_longer(desk: Desk) -> None:
    tool = desk.tool()
    for pause in (10, 20, 40, 80, 160, 300, 300):
        desk.answers = [HUNG]
        seen = await tool.probe(DAEMON, 5)
        assert seen.outcome is Outcome.TIMEOUT
        assert (seen.error or "").endswith(f"it is left alone for {pause} s")
        desk.time += pause - 0.1
        assert (await tool.probe(DAEMON, 5)).outcome is Outcome.SKIPPED
        assert (await tool.reconcile(DAEMON, [468], 5)).outcome is Outcome.SKIPPED
        desk.time += 0.2
    desk.answers = [OK, HUNG]
    assert (await tool.probe(DAEMON, 5)).outcome is Outcome.OK
    seen = await tool.probe(DAEMON, 5)
    assert (seen.error or "").endswith("for 10 s")
    assert tool.counts("/tmp/mps") == (9, {"timeout": 8})


async def test_one_that_was_seen_to_serve_since_is_asked_again_soon(desk: Desk) -> None:
    tool = desk.tool()
    for pause in (10, 20, 40):
        desk.answers = [HUNG]
        await tool.probe(DAEMON, 5)
        desk.time += pause + 0.1
    desk.answers = [HUNG]
    hung_at = desk.time
    await tool.probe(DAEMON, 5)
    tool.record_activity("/tmp/mps", hung_at - 0.1)  # before it hung
    tool.record_activity("/tmp/unknown", hung_at + 1.0)
    desk.time = hung_at + 30.0
    assert (await tool.probe(DAEMON, 5)).outcome is Outcome.SKIPPED
    tool.record_activity("/tmp/mps", hung_at + 25.0)
    desk.answers = [HUNG]
    again = await tool.probe(DAEMON, 5)
    assert (again.error or "").endswith("it is left alone for 160 s")
    tool.record_activity("/tmp/mps", desk.time + 1.0)
    desk.time += 9.0
    assert (await tool.probe(DAEMON, 5)).outcome is Outcome.SKIPPED  # not sooner than this
    desk.time += 1.1
    desk.answers = [OK]
    assert (await tool.probe(DAEMON, 5)).outcome is Outcome.OK


async def test_an_ordinary_users_daemon_that_works_again_is_asked_at_once(desk: Desk) -> None:
    """Its log tells, as that of every real daemon does."""
    daemon = replace(DAEMON, limited=True, owner_uid=2001)
    tool = desk.tool()
    desk.answers = [ABSENT]
    failed = await tool.probe(daemon, 5)
    desk.time += 2.0
    tool.record_activity(daemon.pipe_directory, failed.at - 1.0)
    assert await tool.probe(daemon, 5) is failed
    tool.record_activity(daemon.pipe_directory, failed.at + 1.5)
    desk.answers = [OK]
    assert (await tool.probe(daemon, 5)).outcome is Outcome.OK


async def test_the_first_sign_of_life_ends_the_pause_at_once(desk: Desk) -> None:
    tool = desk.tool()
    for _ in range(2):
        desk.answers = [HUNG]
        await tool.probe(DAEMON, 5)
        desk.time += 0.1
        assert (await tool.probe(DAEMON, 5)).outcome is Outcome.SKIPPED
        tool.record_activity("/tmp/mps", desk.time)
        desk.answers = [OK]
        assert (await tool.probe(DAEMON, 5)).outcome is Outcome.OK
        desk.time += 60.0


async def test_a_reply_older_than_the_caller_allows_is_not_reused(desk: Desk) -> None:
    tool = desk.tool(60.0)
    desk.answers = [OK, OK]
    first = await tool.probe(DAEMON, 5)
    assert await tool.probe(DAEMON, 5, first.at) is first
    desk.time += 1.0
    assert await tool.probe(DAEMON, 5, desk.time) is not first


async def test_an_answer_before_the_hang_is_not_given_after_it(desk: Desk) -> None:
    desk.answers = [OK, HUNG]
    tool = desk.tool(60.0)
    await tool.probe(DAEMON, 5)
    assert (await tool.reconcile(DAEMON, [468], 5)).outcome is Outcome.TIMEOUT
    assert (await tool.probe(DAEMON, 5)).outcome is Outcome.SKIPPED


async def test_a_new_daemon_starts_with_a_clean_slate(desk: Desk) -> None:
    desk.answers = [HUNG, OK]
    tool = desk.tool()
    await tool.probe(replace(DAEMON, process=ProcessFacts(7, 1.0)), 5)
    seen = await tool.probe(replace(DAEMON, process=ProcessFacts(8, 2.0)), 5)
    assert seen.outcome is Outcome.OK


async def test_daemons_do_not_share_their_troubles(desk: Desk) -> None:
    desk.answers = [HUNG, OK]
    tool = desk.tool()
    await tool.probe(DAEMON, 5)
    other = replace(DAEMON, pipe_directory="/tmp/other")
    assert (await tool.probe(other, 5)).outcome is Outcome.OK
    assert tool.counts("/tmp/other") == (1, {})


async def test_a_path_too_long_for_a_socket_is_explained(desk: Desk) -> None:
    # /proc/4711/root + directory + /control = 107 and 108 bytes
    fits = replace(DAEMON, root="/proc/4711/root", pipe_directory="/" + "d" * 83)
    desk.answers = [OK]
    assert (await desk.tool().probe(fits, 5)).outcome is Outcome.OK
    seen = await desk.tool().probe(replace(fits, pipe_directory="/" + "d" * 84), 5)
    assert seen.outcome is Outcome.SKIPPED
    assert "108 bytes, and only 107 are possible: /proc/4711/root/ddd" in (seen.error or "")


def message_of(state: dict[str, object]) -> Callable[[list[str]], ProcessResult]:
    def answer(commands: list[str]) -> ProcessResult:
        lines = [line for command in commands for line in fake_mps_control.reply(state, command)]
        return ProcessResult(0, "".join(f"{line}\n" for line in lines).encode())

    return answer


LIVE = message_of({"devices": [H200], "servers": [server(468, 1, 2), server(469)]})


async def test_a_reconciliation_asks_for_the_devices_once_a_server(desk: Desk) -> None:
    desk.answers = [LIVE] * 7
    tool = desk.tool()
    first = await tool.reconcile(DAEMON, [468, 469], 5)
    assert first.outcome is Outcome.OK
    assert first.kind == "reconciliation"
    assert [exchange.commands[-1] for exchange in first.exchanges] == [
        "device_query 468 --csv",
        "get_default_device_pinned_mem_limit 0",
        "device_query 469 --csv",
        "get_default_device_pinned_mem_limit 0",
    ]
    again = await tool.reconcile(DAEMON, [468], 5)
    (exchange,) = again.exchanges
    assert "get_device_pinned_mem_limit 468 0" in exchange.commands
    assert not any("device_query" in command for command in exchange.commands)
    # 469 is gone; should a server of that number come, it is another one.
    third = await tool.reconcile(DAEMON, [469], 5)
    assert third.exchanges[0].commands[-1] == "device_query 469 --csv"


async def test_it_stops_at_the_first_server_that_hangs(desk: Desk) -> None:
    desk.answers = [LIVE, LIVE, HUNG]
    tool = desk.tool()
    seen = await tool.reconcile(DAEMON, [468, 469, 470], 5)
    assert seen.outcome is Outcome.TIMEOUT
    assert [exchange.outcome for exchange in seen.exchanges] == ["ok", "ok", "timeout"]
    assert seen.error == (
        "get_default_client_priority and 5 more: no answer within 2 s; it is left alone for 10 s"
    )


async def test_a_server_that_hangs_again_is_asked_less_though_the_daemon_answers(
    desk: Desk,
) -> None:
    desk.answers = [HUNG, OK, HUNG, OK, LIVE, LIVE]
    tool = desk.tool()
    outcomes = []
    for _ in range(4):
        outcomes.append((await tool.reconcile(DAEMON, [468], 5)).outcome.value)
        desk.time += 10.1
        if outcomes[-1] == "timeout":
            assert (await tool.probe(DAEMON, 5)).outcome is Outcome.OK
    assert outcomes == ["timeout", "timeout", "skipped", "ok"]


async def test_a_server_that_is_gone_is_an_answer(desk: Desk) -> None:
    desk.answers = [message_of({})]
    seen = await desk.tool().reconcile(DAEMON, [468], 5)
    assert seen.outcome is Outcome.OK


@pytest.mark.parametrize("forgotten", [False, True])
async def test_questions_to_one_daemon_wait_for_each_other(*, forgotten: bool) -> None:
    inside, most = 0, 0

    async def run(*_: object, **__: object) -> ProcessResult:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return OK

    tool = ControlTool("tool", 2.0, 0.0, run=run)
    restarted = replace(DAEMON, lock_holder_pid=1)  # by then another process answers
    asked = []
    for number in range(6):
        asked.append(asyncio.ensure_future(tool.probe((DAEMON, restarted)[number % 2], 5)))
        await asyncio.sleep(0)
        if forgotten:
            tool.forget(())
    assert {one.outcome for one in await asyncio.gather(*asked)} == {Outcome.OK}
    assert most == 1
    tool.forget(())
    assert not tool._daemons


async def test_who_waits_too_long_for_its_turn_gives_up(desk: Desk) -> None:
    gate = asyncio.Event()

    async def run(*_: object, **__: object) -> ProcessResult:
        await gate.wait()
        return OK

    tool = ControlTool("tool", 2.0, 0.0, run=run)
    first = asyncio.ensure_future(tool.probe(DAEMON, 5))
    await asyncio.sleep(0)
    second = await tool.probe(DAEMON, 0.02)
    assert second.outcome is Outcome.SKIPPED
    assert second.error == "not asked: another question to it is still under way"
    gate.set()
    assert (await first).outcome is Outcome.OK


async def test_one_line_when_it_fails_and_one_when_it_is_back(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    desk.answers = [OK, HUNG, HUNG, REFUSED, REFUSED, OK, OK]
    tool = desk.tool()
    for _ in range(6):
        await tool.probe(DAEMON, 5)
        desk.time += 100
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "control daemon does not answer"),
        ("INFO", "control daemon answers"),
    ]
    assert vars(caplog.records[0])["fields"]["daemon"] == "/tmp/mps"


async def test_what_is_gone_is_forgotten(desk: Desk) -> None:
    desk.answers = [HUNG, OK]
    tool = desk.tool()
    await tool.probe(DAEMON, 5)
    tool.forget(["/tmp/mps"])
    assert tool.counts("/tmp/mps") == (1, {"timeout": 1})
    tool.forget([])
    assert tool.counts("/tmp/mps") == (0, {})
    assert (await tool.probe(DAEMON, 5)).outcome is Outcome.OK


# ------------------------------------------------------------------------------ MPS v3, partitions

V3 = replace(DAEMON, protocol="3")
V2_REFUSES = ProcessResult(0, b"Unrecognized option \0\nCUDA MPS Control for Linux/Unix/QNX.\n")
"""Driver 580, asked with arguments."""
V3_REFUSES = ProcessResult(1, stderr=f"{fake_mps_control.V3_USAGE}\n".encode())


def manual(commands: list[str]) -> ProcessResult:
    text = published.MANUAL.get(commands[0]) if len(commands) == 1 else None
    return V3_REFUSES if text is None else ProcessResult(0, text.encode())


async def test_a_v3_daemon_is_asked_with_arguments(desk: Desk) -> None:
    desk.answers = [manual] * 12
    tool = desk.tool()
    probe = await tool.probe(V3, 5)
    assert probe.outcome is Outcome.OK
    assert desk.asked == [[SERVERS], [NAMESPACES]]
    assert desk.environments[0]["CUDA_MPS_PROTOCOL_VERSION"] == "3"
    details = await tool.reconcile(V3, [], 5)
    assert details.outcome is Outcome.OK
    assert [one.commands for one in details.exchanges] == [
        (CLIENTS,),
        (PARTITIONS,),
        (DEVICES,),
        (FEATURES,),
    ]
    # What changes with the servers only is not asked for again.
    again = await tool.reconcile(V3, [], 5)
    assert desk.asked[6:] == [[CLIENTS], [PARTITIONS]]
    assert again.exchanges[2:] == details.exchanges[2:]


async def test_other_servers_have_other_devices(desk: Desk) -> None:
    desk.answers = [manual] * 6
    tool = desk.tool()
    await tool.probe(V3, 5)
    await tool.reconcile(V3, [], 5)
    more = published.MANUAL[SERVERS] + "serving,1000,48300,Ready,/run/nvidia-mps/serving,-,-\n"
    desk.answers = [ProcessResult(0, more.encode()), *[manual] * 5]
    await tool.probe(V3, 5)
    await tool.reconcile(V3, [], 5)
    assert desk.asked[-2:] == [[DEVICES], [FEATURES]]


async def test_a_v2_daemon_costs_no_query_more(desk: Desk) -> None:
    desk.answers = [LIVE] * 2
    tool = desk.tool()
    for _ in range(2):
        assert (await tool.probe(DAEMON, 5)).outcome is Outcome.OK
    assert desk.asked == [list(PROBE)] * 2


async def test_a_v3_daemon_that_nothing_names_is_recognised_by_its_refusal(desk: Desk) -> None:
    desk.answers = [V3_REFUSES, V3_REFUSES, manual, manual, manual, manual]
    tool = desk.tool()
    first = await tool.probe(DAEMON, 5)
    assert first.outcome is Outcome.OK
    assert [one.commands for one in first.exchanges] == [(SERVERS,), (NAMESPACES,)]
    # From now on it is known.
    await tool.probe(DAEMON, 5)
    assert desk.asked[4:] == [[SERVERS], [NAMESPACES]]


async def test_a_daemon_of_an_old_driver_takes_no_notice_of_the_variable(desk: Desk) -> None:
    desk.answers = [V2_REFUSES, V2_REFUSES, LIVE, LIVE]
    tool = desk.tool()
    first = await tool.probe(V3, 5)
    assert (first.outcome, first.exchanges[0].commands) == (Outcome.OK, PROBE)
    await tool.probe(V3, 5)
    assert desk.asked == [[SERVERS], [SERVERS], list(PROBE), list(PROBE)]


async def test_one_that_answers_neither_way_is_reported_as_it_was_asked_first(desk: Desk) -> None:
    desk.answers = [V3_REFUSES] * 4
    probe = await desk.tool().probe(DAEMON, 5)
    assert (probe.outcome, probe.exchanges[0].commands) == (Outcome.REFUSED, PROBE)


async def test_a_list_that_a_driver_does_not_have_is_no_failure(desk: Desk) -> None:
    refused = ProcessResult(1, stderr=b"sm-partition: not supported")
    desk.answers = [manual, manual, manual, refused, refused, manual, manual]
    tool = desk.tool()
    await tool.probe(V3, 5)
    details = await tool.reconcile(V3, [], 5)
    assert details.outcome is Outcome.OK
    partitions = details.exchanges[1]
    assert (partitions.outcome, partitions.error) == (
        Outcome.OK,
        "exit status 1, said sm-partition: not supported",
    )


async def test_a_v3_list_that_hangs_is_the_last_question(desk: Desk) -> None:
    desk.answers = [manual, manual, HUNG]
    tool = desk.tool()
    await tool.probe(V3, 5)
    details = await tool.reconcile(V3, [], 5)
    assert details.outcome is Outcome.TIMEOUT
    assert desk.asked[-1] == [CLIENTS]


STATIC = replace(DAEMON, static_partitioning=True)


async def test_partitions_of_a_v2_daemon_are_asked_for_with_a_server_only(desk: Desk) -> None:
    idle = message_of({"devices": [H200]})
    desk.answers = [idle, LIVE, ProcessResult(0, published.LSPART_DOCS.encode())]
    tool = desk.tool()
    assert len((await tool.probe(STATIC, 5)).exchanges) == 1
    probe = await tool.probe(STATIC, 5)
    assert (probe.outcome, probe.exchanges[1].stdout) == (Outcome.OK, published.LSPART_DOCS)
    assert desk.asked[-1] == ["lspart"]


@pytest.mark.parametrize("refusal", [LIVE, REFUSED])  # LIVE: as driver 580 says
async def test_a_daemon_without_partitions_answers_all_the_same(
    desk: Desk, refusal: Answer
) -> None:
    desk.answers = [LIVE, refusal, refusal]
    probe = await desk.tool().probe(STATIC, 5)
    assert probe.outcome is Outcome.OK
    lspart = probe.exchanges[1]
    assert lspart.error or lspart.stdout == 'Unknown command "lspart"\n'


async def test_an_ordinary_users_daemon_that_fails_is_asked_less_and_less(desk: Desk) -> None:
    """Each run costs the exporter's time, and any process may have the name of a daemon."""
    process = ProcessFacts(9, 1.0, uid=2001)
    daemon = replace(DAEMON, limited=True, owner_uid=2001, process=process)
    tool, pauses, asked_at = desk.tool(), list[float](), desk.time
    desk.answers = [ABSENT] * 7
    while desk.answers:
        await tool.probe(daemon, 5, since=desk.time)
        if len(desk.asked) > len(pauses) + 1:
            pauses.append(desk.time - asked_at)
            asked_at = desk.time
        desk.time += 1.0
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    desk.time += 60.0
    desk.answers = [OK]
    assert (await tool.probe(daemon, 5)).outcome is Outcome.OK  # and nothing is remembered
    desk.answers = [OK]
    await tool.probe(daemon, 5)
    assert desk.answers == []
