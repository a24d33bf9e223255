"""More hangs, and processes that are fine: frozen, traced, refused, asked about by their users."""

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.hardware.hangs import (
    ALL_HANG,
    Case,
    Process,
    Stage,
    act_all,
    full_server,
    killed_in_the_queue,
    register,
)
from tests.hardware.lab import CONTROL, Lab, exporter, run
from tests.hardware.scenarios import scenario

CASES: dict[str, Case] = {}
GROUPS = Path("/sys/fs/cgroup")
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
FEW_DESCRIPTORS = 72  # So few that two clients of a server are its last.


case = functools.partial(register, CASES)


@scenario("more hangs, and processes that are fine: no remedy ends a healthy process")
async def hangs_of_processes(lab: Lab) -> None:
    await act_all(lab, CASES)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[Path]:
    """Freeze a process, in a control group of its own."""
    group = GROUPS / f"mps-lab-{pid}"
    group.mkdir(exist_ok=True)
    before = Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition("::")[2]
    (group / "cgroup.procs").write_text(str(pid))
    (group / "cgroup.freeze").write_text("1")
    try:
        yield group
    finally:
        (group / "cgroup.freeze").write_text("0")
        with contextlib.suppress(OSError):
            (GROUPS / before.strip("/") / "cgroup.procs").write_text(str(pid))
            group.rmdir()


@case
async def client_frozen(stage: Stage) -> None:
    process = await stage.started()
    with frozen(process.pid):
        await stage.cure(process, "frozen", again=False)


async def other_frozen(stage: Stage) -> None:
    first = await stage.started()
    server = stage.daemon.servers()[0]
    with frozen(server if stage.name == "server frozen" else stage.daemon.pid):
        process = await stage.started()
        await stage.cure(process, "frozen", again=False)
    await stage.fine(first)


CASES |= dict.fromkeys(("server frozen", "daemon frozen"), other_frozen)


TRACER = f"""
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace({PTRACE_SEIZE}, int(sys.argv[1]), 0, 0) == 0
assert libc.ptrace({PTRACE_INTERRUPT}, int(sys.argv[1]), 0, 0) == 0
time.sleep(60)
"""


@case
async def server_under_a_debugger(stage: Stage) -> None:
    await stage.started()
    tracer = subprocess.Popen([sys.executable, "-c", TRACER, str(stage.daemon.servers()[0])])
    stage.lab.others.append(tracer)
    await asyncio.sleep(1)
    process = await stage.started()
    command = await stage.ask(process, f"{tracer.pid}")
    stage.note("no command is given", "kill" not in command, "", command)
    tracer.kill()
    tracer.wait(5)
    await stage.runs(process)


@case
async def waiting_and_asked_by_its_user(stage: Stage) -> None:
    holder = await stage.started(uid=1001)
    process = stage.start(uid=1002)
    await stage.settled(process, 1)
    answer = await stage.doctor(process.pid, "as its user", uid=1002)
    stage.note("status is not 0", answer["status"] != 0, "1 or 3", answer["status"])
    stage.note("is named", "wait" in str(answer), "wait", answer["conclusion"])
    await stage.ask(process, "has waited", "a-program-hangs-in-cuinit")
    holder.client.kill()
    await stage.runs(process, 60)


@case
async def waiting_at_the_daemon_of_a_container(stage: Stage) -> None:
    daemon = stage.lab.directories("container")
    stage.lab.start_contained(daemon, f"{CONTROL} -d; sleep 120")
    await stage.lab.until("mps_control_up", 1)
    holder = await stage.started(daemon, uid=1001)
    process = stage.start(daemon, uid=1002)
    await stage.settled(process, 1)
    await stage.ask(process, "wait")
    holder.client.kill()
    await stage.settled(process, 60)
    await stage.fine(process)


@case
async def ghost_and_asked_by_a_third_user(stage: Stage) -> None:
    holder = await killed_in_the_queue(stage)
    holder.client.kill()
    await stage.lab.until("mps_server_ghost", 1, seconds=30)
    process = await stage.started(uid=1003)
    answer = await stage.doctor(process.pid, "as a third user", uid=1003)
    stage.note("no kill", "kill" not in str(answer.get("command")), "", answer.get("command"))
    await stage.cure(process, "was started for clients that had died", ALL_HANG, again=False)


@case
async def server_without_descriptors(stage: Stage) -> None:
    daemon = stage.lab.daemon(
        "few-descriptors", before=("prlimit", f"--nofile={FEW_DESCRIPTORS}:{FEW_DESCRIPTORS}")
    )
    healthy = [await stage.started(daemon) for _ in range(2)]
    await stage.started(daemon)
    process = await stage.started(daemon)
    answer = await stage.doctor(process.pid, "answer")
    conclusion = str(answer["conclusion"])
    stage.note("is named", "files open" in conclusion, "descriptors", conclusion)
    report = await run(*exporter("doctor"))
    stage.facts["doctor"] = report.stdout
    named = "A ghost server" not in report.stdout and "file descriptor left" in report.stdout
    stage.note("doctor names it", named, "descriptors", report.stdout[:600])
    for one in healthy:
        stage.note("runs on", one.client.event("error") is None, "ready", one.client.events())


@case
async def refused_and_not_reaped(stage: Stage) -> None:
    await stage.lab.ready_client("faulthold", 1, daemon=stage.daemon)
    await stage.lab.until("mps_server_state", 1, mps_server_state="FAULT")
    client = stage.lab.python("sleeper.py", 1)
    await asyncio.sleep(3)  # nothing reaps it
    await stage.lab.look()
    process = Process(client, stage.daemon, 0, (), {}, client.pid)
    await stage.ask(process, "was refused")


@case
async def refused_at_the_limit_and_reaped(stage: Stage) -> None:
    await full_server(stage)
    client = stage.lab.python("sleeper.py", 1)
    await stage.lab.left(client)
    await stage.lab.look()
    await stage.ask(Process(client, stage.daemon, 0, (), {}, client.pid), "limit")


@case
async def relative_directory(stage: Stage) -> None:
    enter = f'cd {stage.daemon.pipe.parent} && exec "$@"'
    process = await stage.started(
        before=("sh", "-c", enter, "sh"), CUDA_MPS_PIPE_DIRECTORY=stage.daemon.pipe.name
    )
    await stage.fine(process)


@case
async def socket_closed_to_the_user(stage: Stage) -> None:
    (stage.daemon.pipe / "control").chmod(0o600)
    process = await stage.started(uid=1001)
    await stage.cure(process, "may not connect to")


@case
async def stranded_without_a_daemon(stage: Stage) -> None:
    process = await stage.started()
    for pid in (*stage.daemon.servers(), stage.daemon.pid):
        os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(2)
    await stage.ask(process, "lost the MPS server")
