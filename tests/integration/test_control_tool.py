"""The control tool as a real process: a stand-in that answers, hangs, floods or is not there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mps_exporter.mps.control_protocol import (
    ProbeReply,
    ServerReply,
    parse_probe,
    parse_reconciliation,
)
from mps_exporter.mps.protocol_v3 import parse_v3
from mps_exporter.observations import DaemonFacts, Outcome
from mps_exporter.sources import policy
from mps_exporter.sources.child_process import run_process
from mps_exporter.sources.control_tool import ControlTool
from testing import fake_mps_v3 as published
from testing.fake_host import install_tool, server, set_daemon
from testing.waiting import PATIENCE_SECONDS as PATIENCE
from testing.waiting import until

SERVER = server(468, 1132, 1133, 1134, 1135)


class Host:
    def __init__(self, directory: Path) -> None:
        self.pipe, self.log = directory / "pipe", directory / "log"
        self.log.mkdir()
        self.tool = install_tool(directory)
        self.facts = DaemonFacts(str(self.pipe), str(self.log))

    def daemon(self, **state: Any) -> None:
        set_daemon(self.pipe, log_directory=str(self.log), servers=[SERVER], **state)

    def control(self, timeout_seconds: float = PATIENCE) -> ControlTool:
        return ControlTool(str(self.tool), timeout_seconds, 0.0)

    def lines(self) -> int:
        return len((self.log / "control.log").read_text().splitlines())


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    before = open_files()
    yield Host(tmp_path)
    assert children() == []
    assert open_files() == before


def children() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            found += (task / "children").read_text().split()
    return found


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_it_answers(host: Host) -> None:
    host.daemon()
    seen = await host.control().probe(host.facts, PATIENCE)
    assert seen.outcome is Outcome.OK
    assert parse_probe(seen.exchanges[0]) == ProbeReply((468,), 1.0)


async def test_a_probe_costs_at_most_ten_lines_of_the_daemon_s_log(host: Host) -> None:
    host.daemon()
    await host.control().probe(host.facts, PATIENCE)
    assert host.lines() <= 10


async def test_a_reconciliation_of_four_clients_costs_at_most_forty(host: Host) -> None:
    host.daemon(default_limits={"0": "10G"})
    tool = host.control()
    counts = [0]
    for _ in range(2):
        seen = await tool.reconcile(host.facts, [468], PATIENCE)
        (reply,) = parse_reconciliation(seen)
        assert isinstance(reply, ServerReply)
        assert reply.contexts == {0: {1132: 1, 1133: 1, 1134: 1, 1135: 1}}
        assert reply.default_pinned_memory_limit_bytes == {0: 10 << 30}
        counts.append(host.lines())
    first, second = counts[1], counts[2] - counts[1]
    assert first <= 40
    assert second <= 28


async def test_a_refusal_is_tried_again(host: Host) -> None:
    host.daemon(mode="refuse_once")
    seen = await host.control().probe(host.facts, PATIENCE)
    assert (seen.outcome, seen.exchanges[0].attempts) == (Outcome.OK, 2)


@pytest.mark.parametrize(
    ("mode", "outcome"),
    [
        ("refuse", Outcome.REFUSED),
        ("absent", Outcome.ABSENT),
        ("garbage", Outcome.UNPARSABLE),
        ("silent", Outcome.UNPARSABLE),
    ],
)
async def test_it_fails(host: Host, mode: str, outcome: Outcome) -> None:
    host.daemon(mode=mode)
    assert (await host.control().probe(host.facts, PATIENCE)).outcome is outcome


async def test_one_that_hangs_is_killed_at_the_deadline(host: Host) -> None:
    host.daemon(mode="hang")
    seen = await host.control(0.3).probe(host.facts, PATIENCE)
    assert seen.outcome is Outcome.TIMEOUT
    assert seen.exchanges[0].return_code is None
    assert 0.3 <= seen.exchanges[0].duration_seconds < PATIENCE


async def test_a_stuck_server_hangs_only_who_asks_about_it(host: Host) -> None:
    set_daemon(host.pipe, servers=[{**SERVER, "stuck": True}])
    assert (await host.control().probe(host.facts, PATIENCE)).outcome is Outcome.OK
    seen = await host.control(0.3).reconcile(host.facts, [468], PATIENCE)
    assert seen.outcome is Outcome.TIMEOUT


async def test_one_that_floods_is_stopped(host: Host) -> None:
    host.daemon(mode="flood")
    seen = await host.control().probe(host.facts, PATIENCE)
    assert seen.outcome is Outcome.UNPARSABLE
    assert "more than 1048576 bytes" in (seen.error or "")


async def test_one_that_is_not_there(host: Host) -> None:
    host.tool.unlink()
    seen = await host.control().probe(host.facts, PATIENCE)
    assert seen.outcome is Outcome.ABSENT
    assert "--mps.control-binary" in (seen.error or "")


@pytest.mark.parametrize(("mode", "text"), [(0o644, "#!/bin/sh\n"), (0o755, "\0\0")])
async def test_one_that_is_no_program(host: Host, mode: int, text: str) -> None:
    host.tool.write_text(text)
    host.tool.chmod(mode)
    seen = await host.control().probe(host.facts, PATIENCE)
    assert seen.outcome is Outcome.ABSENT
    assert "cannot be run" in (seen.error or "")


async def test_whoever_asked_may_leave_early(host: Host) -> None:
    host.daemon(mode="hang")
    asking = asyncio.ensure_future(host.control().probe(host.facts, PATIENCE))
    await until(children)
    assert len(children()) == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert children() == []


# ------------------------------------------------------------------------------ the runner

ENVIRONMENT = {"PATH": os.environ["PATH"]}


async def test_nothing_but_the_given_environment(host: Host) -> None:
    result = await run_process(("env",), b"", {**ENVIRONMENT, "A": "1"}, PATIENCE)
    assert sorted(result.stdout.decode().split()) == sorted([f"PATH={os.environ['PATH']}", "A=1"])
    assert result.return_code == 0


async def test_input_output_and_exit_status(host: Host) -> None:
    script = "cat; echo err >&2; exit 3"
    result = await run_process(("sh", "-c", script), b"in\n", ENVIRONMENT, PATIENCE)
    assert (result.stdout, result.stderr, result.return_code) == (b"in\n", b"err\n", 3)
    assert not result.timed_out


async def test_one_that_never_reads_its_input(host: Host) -> None:
    result = await run_process(("true",), b"x" * 1_000_000, ENVIRONMENT, PATIENCE)
    assert result.return_code == 0


async def test_the_whole_group_dies(host: Host) -> None:
    script = "trap '' TERM; sleep 300 & sleep 300"
    result = await run_process(("sh", "-c", script), b"", ENVIRONMENT, 0.3)
    assert result.timed_out
    assert result.return_code is None


async def test_a_stray_child_that_keeps_the_pipe_does_not_hold_us_up(host: Host) -> None:
    result = await run_process(("sh", "-c", "sleep 3600 & echo $!"), b"", ENVIRONMENT, PATIENCE)
    os.kill(int(result.stdout), signal.SIGKILL)
    assert not result.timed_out
    assert result.return_code == 0


async def test_output_is_bounded(host: Host) -> None:
    result = await run_process(("sh", "-c", "yes & yes >&2"), b"", ENVIRONMENT, PATIENCE)
    assert result.output_exceeded
    assert result.return_code is None
    assert max(len(result.stdout), len(result.stderr)) == policy.MAX_CONTROL_OUTPUT_BYTES


async def test_a_v3_daemon_that_only_its_refusal_names(host: Host) -> None:
    set_daemon(host.pipe, v3=published.MANUAL)
    tool = host.control()
    probe = await tool.probe(host.facts, PATIENCE)
    details = await tool.reconcile(host.facts, (), PATIENCE)
    assert (probe.outcome, details.outcome) == (Outcome.OK, Outcome.OK)
    found = parse_v3([probe, details])
    assert found is not None
    assert [server.name for server in found.servers or ()] == ["training"]
    assert [client.pid for client in found.clients or ()] == [51023, 51087]
    assert found.not_understood == {}


async def test_a_daemon_of_driver_580_with_the_variable_of_a_newer_one(host: Host) -> None:
    host.daemon()
    facts = replace(host.facts, protocol="3")
    probe = await host.control().probe(facts, PATIENCE)
    assert probe.outcome is Outcome.OK
    assert parse_probe(probe.exchanges[0]) == ProbeReply((468,), 1.0)
