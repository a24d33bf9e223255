"""The control tool as a real process: a stand-in that answers, hangs, floods or is not there."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.mps.tool_commands import ProbeReply, parse_probe, server_replies
from mps_exporter.observations import DaemonFacts, Outcome
from mps_exporter.sources.child_process import ProcessResult, run_process
from mps_exporter.sources.control_tool import ControlTool
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


async def test_a_probe_costs_at_most_ten_lines_of_the_log(host: Host) -> None:
    host.daemon()
    seen = await host.control().probe(host.facts, PATIENCE)
    assert seen.outcome is Outcome.OK
    assert parse_probe(seen.exchanges[0]) == ProbeReply((468,), 1.0)
    assert host.lines() <= 10


async def test_a_reconciliation_of_four_clients_costs_at_most_forty(host: Host) -> None:
    host.daemon(default_limits={"0": "10G"})
    tool = host.control()
    counts = [0]
    for _ in range(2):
        seen = await tool.reconcile(host.facts, [468], PATIENCE)
        (reply,) = server_replies(seen)
        assert reply.contexts == {0: {1132: 1, 1133: 1, 1134: 1, 1135: 1}}
        assert reply.default_pinned_memory_limit_bytes == {0: 10 << 30}
        counts.append(host.lines())
    first, second = counts[1], counts[2] - counts[1]
    assert first <= 40
    assert second <= 28


@pytest.mark.parametrize(
    ("mode", "text", "error"),
    [
        (0o755, None, "--mps.control-binary"),
        (0o644, "#!/bin/sh\n", "cannot be run: Permission denied"),
        (0o755, "\0\0", "cannot be run: Exec format error"),
    ],
)
async def test_a_tool_that_is_missing_or_not_a_program(
    host: Host, mode: int, text: str | None, error: str
) -> None:
    host.tool.unlink()
    if text is not None:
        host.tool.write_text(text)
        host.tool.chmod(mode)
    seen = await host.control().probe(host.facts, PATIENCE)
    assert seen.outcome is Outcome.ABSENT
    assert error in (seen.error or "")


async def test_a_cancelled_query_leaves_no_process(host: Host) -> None:
    host.daemon(mode="hang")
    asking = asyncio.ensure_future(host.control().probe(host.facts, PATIENCE))
    await until(children)
    assert len(children()) == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert children() == []


# ------------------------------------------------------------------------------ the runner

ENVIRONMENT = {"PATH": os.environ["PATH"], "A": "1"}


async def shell(script: str, data: bytes = b"", seconds: float = PATIENCE) -> ProcessResult:
    return await run_process(("sh", "-c", script), data, ENVIRONMENT, seconds)


async def test_environment_input_output_and_exit_status(host: Host) -> None:
    result = await run_process(("env",), b"", ENVIRONMENT, PATIENCE)
    shown = [line.split("=", 1) for line in result.stdout.decode().splitlines()]
    assert dict(shown) == ENVIRONMENT
    result = await shell("read line; echo $line; echo err >&2; exit 3", b"in\n")
    assert (result.stdout, result.stderr, result.return_code) == (b"in\n", b"err\n", 3)
    assert not result.timed_out


async def test_a_program_that_never_reads_its_input(host: Host) -> None:
    assert (await shell("true", b"x" * 1_000_000)).return_code == 0


async def test_a_program_that_ignores_signals_is_killed(host: Host) -> None:
    result = await shell("trap '' TERM INT HUP; while :; do :; done", seconds=0.3)
    assert result.timed_out
    assert result.return_code is None


ESCAPE = """
import ctypes, os, threading, time
syscall = ctypes.CDLL(None).syscall
SIGCHLD = 17
ways = {
    "fork": os.fork,
    "spawn": lambda: os.posix_spawn("/bin/sleep", ["sleep", "600"], {}, setsid=True),
    "clone": lambda: syscall(220 if os.uname().machine == "aarch64" else 56, SIGCHLD, 0, 0, 0, 0),
    "clone3": lambda: syscall(435, (ctypes.c_uint64 * 8)(0, 0, 0, 0, SIGCHLD), 64),
}
thread = threading.Thread(target=print, args=("a thread",), kwargs={"flush": True})
thread.start()
thread.join()
for name, way in ways.items():
    try:
        pid = way()
    except OSError:
        continue
    if pid == 0:
        os.setsid()
        time.sleep(600)
    if pid > 0:
        print(name, pid, flush=True)
"""


async def test_a_program_leaves_no_process_in_a_session_of_its_own(host: Host) -> None:
    """A user whose daemon the tool queries as this user can make the tool do this."""
    result = await run_process((sys.executable, "-c", ESCAPE), b"", ENVIRONMENT, PATIENCE)
    thread, *escaped = result.stdout.decode().splitlines()
    for line in escaped:
        os.kill(int(line.split()[1]), signal.SIGKILL)
    assert thread == "a thread"  # NVIDIA's tool needs threads
    assert escaped == []


RUNNER = """
import asyncio
from mps_exporter.sources.child_process import run_process
asyncio.run(run_process(("sleep", "600"), b"", {"PATH": "/usr/bin:/bin"}, 600.0))
"""


async def test_the_program_dies_with_the_exporter(host: Host) -> None:
    exporter = await asyncio.create_subprocess_exec(sys.executable, "-c", RUNNER)
    of_exporter = Path(f"/proc/{exporter.pid}/task/{exporter.pid}/children")
    await until(of_exporter.read_text)
    (pid,) = of_exporter.read_text().split()
    await until(lambda: name_of(pid) == "sleep")
    exporter.kill()
    await exporter.wait()
    try:
        await until(lambda: name_of(pid) != "sleep")
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def name_of(pid: str) -> str:
    """Return the name of the process; "" if it has ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().replace("(", ")").split(")")
        return "" if words[2].split()[0] == "Z" else words[1]
    return ""


async def test_output_is_bounded(host: Host) -> None:
    result = await shell("while echo 0123456789; do echo 0123456789 >&2; done")
    assert result.output_exceeded
    assert result.return_code is None
    assert max(len(result.stdout), len(result.stderr)) == policy.MAX_CONTROL_OUTPUT_BYTES
