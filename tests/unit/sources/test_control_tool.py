import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.protocol_v3 import (
    ACCOUNTING,
    CLIENTS,
    DEVICES,
    FEATURES,
    NAMESPACES,
    PARTITIONS,
    SERVERS,
)
from mps_exporter.mps.tool_commands import PROBE
from mps_exporter.observations import (
    ControlObservation,
    DaemonFacts,
    Exchange,
    Outcome,
    ProcessFacts,
)
from mps_exporter.sources import child_process
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

Answer = ProcessResult | Callable[[list[str]], ProcessResult]


@dataclass
class Desk:
    """A clock, and a program with prepared replies."""

    answers: list[Answer] = field(default_factory=list)
    time: float = 1000.0
    asked: list[list[str]] = field(default_factory=list)
    environments: list[Mapping[str, str]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    rights: list[ChildRights] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control = self.tool()

    def tool(self, min_interval_seconds: float = 0.0) -> ControlTool:
        return ControlTool(
            "tool",
            2.0,
            min_interval_seconds,
            run=self.run,
            now=lambda: self.time,
            clock=lambda: self.time,
        )

    async def probe(self, *answers: Answer, seconds: float = 5.0, active_at: float = 0.0) -> str:
        """Probe the daemon, with these replies to the tool's runs; return the outcome."""
        self.answers = list(answers)
        self.seen = await self.control.probe(DAEMON, seconds, active_at=active_at)
        assert not self.answers
        return self.seen.outcome.value

    async def reconcile(self, *answers: Answer) -> str:
        """Query the daemon's server 468, with these replies."""
        self.answers = list(answers)
        return (await self.control.reconcile(DAEMON, [468], 5.0)).outcome.value

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
        return answer if isinstance(answer, ProcessResult) else answer(self.asked[-1])


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(policy, "CONTROL_RETRY_DELAY_SECONDS", 0.0)
    return Desk()


async def test_a_probe_gets_a_minimal_environment(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/opt/bin")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere")
    monkeypatch.setenv("SECRET", "x")
    desk.answers = [OK]
    seen = await desk.tool().probe(replace(DAEMON, root="/proc/9/root"), 5)
    exchange = Exchange(PROBE, Outcome.OK, "468\n100.0\n", return_code=0)
    assert seen == ControlObservation(1000.0, "/tmp/mps", "probe", Outcome.OK, (exchange,))
    assert desk.environments == [{"CUDA_MPS_PIPE_DIRECTORY": "/proc/9/root/tmp/mps", "PATH": PATH}]


@pytest.mark.parametrize(
    ("reply", "runs", "why"),
    [
        (REFUSED, 2, "Cannot send command to MPS control daemon process"),
        (GARBAGE, 2, "\\xff"),
        (ProcessResult(None, b"x" * 9000, output_exceeded=True), 2, "more than 1048576"),
        (ABSENT, 1, ""),
    ],
)
async def test_a_failure_is_retried_once(
    desk: Desk, reply: ProcessResult, runs: int, why: str
) -> None:
    """An absent daemon is queried again only if its process exists. Every run is counted."""
    tool = desk.tool()
    alive = replace(DAEMON, lock_holder_pid=7, lock_tested=True)
    desk.answers = [reply, OK]
    seen = await tool.probe(alive, 5)
    assert (seen.outcome, seen.exchanges[0].attempts) == (Outcome.OK, 2)
    before = tool.counts("/tmp/mps")
    desk.answers = [reply, reply]
    seen = await tool.probe(DAEMON, 5)
    assert seen.outcome not in (Outcome.OK, Outcome.SKIPPED)
    assert why in (seen.error or "")
    assert len(seen.exchanges[0].stdout) < 5000
    assert before == (2, {seen.outcome.value: 1})
    assert tool.counts("/tmp/mps") == (2 + runs, {seen.outcome.value: 1 + runs})


async def test_a_probe_is_reused_until_it_is_too_old(desk: Desk) -> None:
    desk.answers = [OK, OK, OK]
    tool = desk.tool(5.0)
    first = await tool.probe(DAEMON, 5)
    desk.time += 4.9
    assert await tool.probe(DAEMON, 5, first.at) is first
    second = await tool.probe(DAEMON, 5, desk.time)  # the caller wants a newer reply
    assert second is not first
    desk.time += 5.1
    assert await tool.probe(DAEMON, 5) is not second
    assert len(desk.asked) == 3


async def test_a_run_begins_in_time_and_has_its_full_timeout(desk: Desk) -> None:
    """A shorter silence would prove no hang, and block the daemon at each collection."""
    assert await desk.probe(seconds=0.09) == "skipped"
    assert desk.control.counts("/tmp/mps") == (0, {})
    assert await desk.probe(HUNG, seconds=0.11) == "timeout"
    assert desk.limits == [2.0]


async def test_another_process_in_the_same_directory_is_queried(desk: Desk) -> None:
    desk.answers = [OK, OK, OK]
    tool = desk.tool(5.0)
    for start in (1.0, 2.0):
        await tool.probe(replace(DAEMON, process=ProcessFacts(7, start)), 5)
    await tool.probe(replace(DAEMON, lock_holder_pid=9, lock_tested=True), 5)
    assert not desk.answers


async def test_the_pause_doubles_with_each_hang(desk: Desk) -> None:
    for pause in (10, 20, 40, 80, 160, 300, 300):
        assert await desk.probe(HUNG) == "timeout"
        assert (desk.seen.error or "").endswith(f"it is left alone for {pause} s")
        desk.time += pause - 0.1
        assert await desk.probe() == await desk.reconcile() == "skipped"
        desk.time += 0.2
    assert [await desk.probe(OK), await desk.probe(HUNG)] == ["ok", "timeout"]
    assert (desk.seen.error or "").endswith("for 10 s")
    assert desk.control.counts("/tmp/mps") == (9, {"timeout": 8})


async def test_activity_shortens_the_pause(desk: Desk) -> None:
    for pause in (10, 20, 40, 0):
        await desk.probe(HUNG)
        desk.time += pause + 0.1
    desk.time += 30.0
    assert await desk.probe(active_at=desk.time - 31.0) == "skipped"  # before it hung
    await desk.probe(HUNG, active_at=desk.time - 5.0)
    assert (desk.seen.error or "").endswith("it is left alone for 160 s")
    active_at = desk.time + 1.0
    desk.time += 9.0
    assert await desk.probe(active_at=active_at) == "skipped"  # not sooner than this
    desk.time += 1.1
    assert await desk.probe(OK) == "ok"


async def test_the_first_sign_of_life_ends_the_pause_at_once(desk: Desk) -> None:
    for _ in range(2):
        await desk.probe(HUNG)
        desk.time += 0.1
        assert await desk.probe() == "skipped"
        assert await desk.probe(OK, active_at=desk.time) == "ok"
        desk.time += 60.0


async def test_activity_ends_the_pause_of_an_ordinary_users_daemon(desk: Desk) -> None:
    """Its log tells, as that of every real daemon does."""
    daemon = replace(DAEMON, limited=True, owner_uid=2001)
    tool = desk.tool()
    desk.answers = [ABSENT]
    failed = await tool.probe(daemon, 5)
    desk.time += 2.0
    assert await tool.probe(daemon, 5, active_at=failed.at - 1.0) is failed
    desk.answers = [OK]
    assert (await tool.probe(daemon, 5, active_at=failed.at + 1.5)).outcome is Outcome.OK


async def test_a_reply_before_a_hang_is_not_reused(desk: Desk) -> None:
    desk.answers = [OK, HUNG]
    tool = desk.tool(60.0)
    await tool.probe(DAEMON, 5)
    assert (await tool.reconcile(DAEMON, [468], 5)).outcome is Outcome.TIMEOUT
    assert (await tool.probe(DAEMON, 5)).outcome is Outcome.SKIPPED


@pytest.mark.parametrize(("capabilities", "may"), [(0xE0, True), (0xA0, False), (0, False)])
def test_the_user_is_changed_only_with_all_capabilities_for_that(
    capabilities: int, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "effective_capabilities", lambda: capabilities)
    assert child_process.may_change_user() is may


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


async def test_a_reconciliation_queries_the_devices_once_a_server(desk: Desk) -> None:
    desk.answers = [LIVE] * 7
    tool = desk.control
    first = await tool.reconcile(DAEMON, [468, 469], 5)
    assert (first.outcome, first.kind) == (Outcome.OK, "reconciliation")
    last = [exchange.commands[-1] for exchange in first.exchanges]
    assert last[::2] == ["device_query 468 --csv", "device_query 469 --csv"]
    assert last[1::2] == ["get_default_device_pinned_mem_limit 0"] * 2
    (exchange,) = (await tool.reconcile(DAEMON, [468], 5)).exchanges
    assert "get_device_pinned_mem_limit 468 0" in exchange.commands
    assert not any("device_query" in command for command in exchange.commands)
    # 469 is gone; should a server of that number come, it is another one.
    third = await tool.reconcile(DAEMON, [469], 5)
    assert third.exchanges[0].commands[-1] == "device_query 469 --csv"


async def test_a_reconciliation_stops_at_the_first_server_that_hangs(desk: Desk) -> None:
    desk.answers = [LIVE, LIVE, HUNG]
    seen = await desk.control.reconcile(DAEMON, [468, 469, 470], 5)
    assert seen.outcome is Outcome.TIMEOUT
    assert [exchange.outcome for exchange in seen.exchanges] == ["ok", "ok", "timeout"]
    assert seen.error == (
        "get_default_client_priority and 5 more: no answer within 2 s; it is left alone for 10 s"
    )


async def test_a_server_that_hangs_again_is_queried_less_often(desk: Desk) -> None:
    for _ in range(2):
        assert await desk.reconcile(HUNG) == "timeout"
        desk.time += 10.1
        assert await desk.probe(OK) == "ok"
    assert await desk.reconcile() == "skipped"
    desk.time += 10.1
    assert await desk.reconcile(LIVE, LIVE) == "ok"


async def test_queries_of_one_daemon_are_serialized() -> None:
    """Also while its state is forgotten, and while another process takes its place."""
    inside, most = 0, 0

    async def run(*_: object, **__: object) -> ProcessResult:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return OK

    tool = ControlTool("tool", 2.0, 0.0, run=run)
    restarted = replace(DAEMON, lock_holder_pid=1)
    asked = []
    for number in range(6):
        asked.append(asyncio.ensure_future(tool.probe((DAEMON, restarted)[number % 2], 5)))
        await asyncio.sleep(0)
        tool.forget(())
    assert {one.outcome for one in await asyncio.gather(*asked)} == {Outcome.OK}
    assert most == 1
    tool.forget(())
    assert not tool._daemons
    assert tool.counts(DAEMON.pipe_directory) == (0, {})


async def test_a_query_that_waits_too_long_is_skipped() -> None:
    async def run(*_: object, **__: object) -> ProcessResult:
        await asyncio.sleep(0.1)
        return OK

    tool = ControlTool("tool", 2.0, 0.0, run=run)
    first, second = await asyncio.gather(tool.probe(DAEMON, 5), tool.probe(DAEMON, 0.02))
    assert (first.outcome, second.outcome) == (Outcome.OK, Outcome.SKIPPED)
    assert second.error == "not asked: another question to it is still under way"


async def test_a_failure_and_the_recovery_are_logged_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for replies in ((OK,), (HUNG,), (HUNG,), (REFUSED, REFUSED), (OK,), (OK,)):
        await desk.probe(*replies)
        desk.time += 100
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "queries of a control daemon fail"),
        ("INFO", "a control daemon replies again"),
    ]
    assert vars(caplog.records[0])["fields"]["daemon"] == "/tmp/mps"


# ------------------------------------------------------------------------------ MPS v3, partitions

V3 = replace(DAEMON, protocol="3")
V2_REFUSES = ProcessResult(0, b"Unrecognized option \0\nCUDA MPS Control for Linux/Unix/QNX.\n")
"""Driver 580, asked with arguments."""
V3_REFUSES = ProcessResult(1, stderr=f"{fake_mps_control.V3_USAGE}\n".encode())


def manual(commands: list[str]) -> ProcessResult:
    text = published.MANUAL.get(commands[0]) if len(commands) == 1 else None
    return V3_REFUSES if text is None else ProcessResult(0, text.encode())


async def test_a_v3_daemon_is_queried_with_arguments(desk: Desk) -> None:
    desk.answers = [manual] * 7
    tool = desk.tool()
    assert (await tool.probe(V3, 5)).outcome is Outcome.OK
    assert desk.asked == [[SERVERS], [NAMESPACES]]
    assert desk.environments[0]["CUDA_MPS_PROTOCOL_VERSION"] == "3"
    details = await tool.reconcile(V3, [], 5)
    assert details.outcome is Outcome.OK
    commands = [one.commands for one in details.exchanges]
    assert commands == [(CLIENTS,), (PARTITIONS,), (DEVICES,), (FEATURES,), (ACCOUNTING,)]


async def test_a_v3_daemon_that_nothing_names_is_recognised_by_its_refusal(desk: Desk) -> None:
    assert await desk.probe(V3_REFUSES, V3_REFUSES, manual, manual) == "ok"
    assert [one.commands for one in desk.seen.exchanges] == [(SERVERS,), (NAMESPACES,)]
    assert await desk.probe(manual, manual) == "ok"  # from now on it is known
    assert desk.asked[4:] == [[SERVERS], [NAMESPACES]]


async def test_a_daemon_of_an_old_driver_ignores_the_variable(desk: Desk) -> None:
    desk.answers = [V2_REFUSES, V2_REFUSES, LIVE, LIVE]
    first = await desk.control.probe(V3, 5)
    assert (first.outcome, first.exchanges[0].commands) == (Outcome.OK, PROBE)
    await desk.control.probe(V3, 5)
    assert desk.asked == [[SERVERS], [SERVERS], list(PROBE), list(PROBE)]


async def test_a_refusal_of_both_interfaces_is_reported_for_the_first(desk: Desk) -> None:
    assert await desk.probe(*[V3_REFUSES] * 4) == "refused"
    assert desk.seen.exchanges[0].commands == PROBE


async def test_a_missing_list_of_a_driver_is_accepted(desk: Desk) -> None:
    refused = ProcessResult(1, stderr=b"sm-partition: not supported")
    desk.answers = [manual, manual, manual, refused, refused, manual, manual, manual]
    await desk.control.probe(V3, 5)
    details = await desk.control.reconcile(V3, [], 5)
    assert details.outcome is details.exchanges[1].outcome is Outcome.OK
    assert details.exchanges[1].error == "exit status 1, said sm-partition: not supported"


STATIC = replace(DAEMON, static_partitioning=True)


async def test_partitions_of_a_v2_daemon_are_queried_only_with_a_server(desk: Desk) -> None:
    idle = message_of({"devices": [H200]})
    desk.answers = [idle, LIVE, ProcessResult(0, published.LSPART_DOCS.encode())]
    assert len((await desk.control.probe(STATIC, 5)).exchanges) == 1
    probe = await desk.control.probe(STATIC, 5)
    assert (probe.outcome, probe.exchanges[1].stdout) == (Outcome.OK, published.LSPART_DOCS)
    assert desk.asked[-1] == ["lspart"]


@pytest.mark.parametrize("refusal", [LIVE, REFUSED])  # LIVE: as driver 580 says
async def test_a_daemon_without_partitions_replies(desk: Desk, refusal: Answer) -> None:
    desk.answers = [LIVE, refusal, refusal]
    probe = await desk.tool().probe(STATIC, 5)
    assert probe.outcome is Outcome.OK
    lspart = probe.exchanges[1]
    assert lspart.error or lspart.stdout == 'Unknown command "lspart"\n'


async def test_an_ordinary_users_daemon_that_fails_is_queried_less_often(desk: Desk) -> None:
    """Each run costs the exporter's time, and any process may have the name of a daemon."""
    process = ProcessFacts(9, 1.0, uid=2001)
    daemon = replace(DAEMON, limited=True, owner_uid=2001, process=process)
    tool, asked_at = desk.tool(), list[float]()
    desk.answers = [ABSENT] * 7
    while desk.answers:
        left = len(desk.answers)
        await tool.probe(daemon, 5, since=desk.time)
        if len(desk.answers) < left:
            asked_at.append(desk.time)
        desk.time += 1.0
    pauses = [after - before for before, after in itertools.pairwise(asked_at)]
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    desk.time += 60.0
    desk.answers = [OK, OK, ABSENT, OK]
    assert (await tool.probe(daemon, 5)).outcome is Outcome.OK  # and nothing is remembered
    await tool.probe(daemon, 5)
    await tool.probe(daemon, 5)
    desk.time += 5.0  # the first pause again: the daemon had answered
    assert (await tool.probe(daemon, 5)).outcome is Outcome.OK
    assert desk.answers == []
