"""Misconfigurations and hangs, acted out one after another: ``doctor --pid`` diagnoses each.

The program runs as a person runs it, next to a process that hangs, fails or runs without MPS. Its
first conclusion must name the cause; the command that it prints is run verbatim, or, if the remedy
is not a command, the remedy is acted out; then the process must run, and the doctor must find
nothing wrong with it. Its output and its duration are in the truth file.
"""

import asyncio
import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hardware.lab import CONTROL, Client, Daemon, Lab, end_all, exporter, inner_pid, run
from tests.hardware.scenarios import scenario

LIMIT_SECONDS = 240  # No case begins later.

CASE_SECONDS = 55
ONLY = "LAB_CASES"  # Variable with a regular expression of the cases to act out.
HANGS_SECONDS = 2.5
"""Silence after which a process counts as hanging, in seconds: a context takes about 0.2 s."""

NO_DAEMON = "cannot-find-mps-control-daemon-process"
ALL_HANG = "every-cuda-program-hangs-and-the-control-tool-too"
BAD_DEVICES = "invalid-cuda-visible-devices"
INJECTION = "CUDA_INJECTION64_PATH"
SHELL = ("export ", "unset ")
"""Commands that begin so are for the shell from which the process is started again."""


@dataclass
class Stage:
    """One case under way."""

    lab: Lab
    name: str
    facts: dict[str, object] = field(default_factory=dict)
    rounds: int = 0

    @functools.cached_property
    def daemon(self) -> Daemon:
        """The daemon of the case, started when it is first used."""
        return self.new_daemon()

    def new_daemon(self, name: str = "", **settings: Any) -> Daemon:
        return self.lab.daemon(f"{self.name}{name}".replace(" ", "-"), **settings)

    def start(
        self,
        daemon: Daemon | None = None,
        /,
        *,
        uid: int = 0,
        before: Sequence[str] = (),
        inner: bool = False,
        **environment: str,
    ) -> Client:
        """Start a process that makes a context, and stays whatever comes of it."""
        daemon = daemon or self.daemon
        client = self.lab.stayer(daemon=daemon, uid=uid, before=before, more=environment)
        client.inner = inner_pid(client.pid) if inner else 0
        return client

    async def started(self, daemon: Daemon | None = None, /, **settings: Any) -> Client:
        """Start a process, and wait until it has a context, or an error, or hangs."""
        process = self.start(daemon, **settings)
        await self.settled(process)
        return process

    async def cure(
        self, process: Client, words: str, page: str = "", *, again: bool = True
    ) -> None:
        """Ask why it hangs, and carry out what the answer gives."""
        await self.heal(process, await self.ask(process, words, page), again=again)

    async def settled(self, process: Client, seconds: float = HANGS_SECONDS) -> None:
        """Wait until it has a context, or an error, or hangs."""
        await self.lab.settled(process, seconds)
        self.facts["the process said"] = process.events()[:1]

    async def ask(self, process: Client, words: str, page: str = "") -> str:
        """Diagnose the process; the conclusion must contain these words. Return the command."""
        answer = await self.doctor(process.pid, "answer")
        await self.lab.look()  # for the recording
        text, of = str(answer.get("conclusion")), str(answer.get("page") or "")
        self.note("is named", words in text, words, text)
        if page:
            self.note("page", of.endswith(f"docs/symptoms/{page}.md"), page, of)
        return str(answer.get("command") or "")

    async def doctor(self, pid: int, fact: str, uid: int = 0) -> dict[str, object]:
        """Ask about a process; its answer, and the exit status as "status"."""
        began = time.monotonic()
        done = await run(*exporter("doctor", f"--pid={pid}", "--json", uid=uid))
        seconds = time.monotonic() - began
        processes = json.loads(done.stdout)["processes"] if done.stdout else []
        answer = processes[0] if processes else {"conclusion": done.stderr}
        self.facts[fact] = {"seconds": round(seconds, 2), **answer}
        print(f"    {seconds:.2f} s  {self.name}: {answer['conclusion']}", flush=True)
        return {"status": done.returncode, **answer}

    async def heal(
        self, process: Client, command: str, *, again: bool = True, rounds: int = 1
    ) -> None:
        """Run the command verbatim, and check that the process runs afterwards.

        Args:
            process: The process that hangs.
            command: The doctor's command.
            again: Whether the process must be restarted after the command.
            rounds: Maximum number of diagnoses and commands until the process runs.
        """
        for left in reversed(range(rounds)):
            process = await self._carry_out(process, command, again=again)
            if not left:
                break
            await self.settled(process)
            if process.event("error") is not None:
                # The error came when the server that the process was sent to exited.
                process = self._start_again(process)
                await self.settled(process)
            if process.event("ready") is not None:
                break
            answer = await self.doctor(process.pid, f"answer {rounds - left + 1}")
            command = str(answer.get("command") or "")
        await self.runs(process)

    async def _carry_out(self, process: Client, command: str, *, again: bool) -> Client:
        """Run a command, and restart the process if necessary; return the process that runs."""
        self.note("a command is given", bool(command), "one", command)
        if command.startswith(SHELL):
            return self._start_again(process, f"{command} && ")
        done = await run("sh", "-c", command)
        self.note("the command", done.returncode == 0, 0, f"{done.returncode} {done.stderr}")
        return self._start_again(process) if again else process

    async def restart(self, process: Client, **environment: str) -> None:
        """Start it again, with something set; it must run."""
        await self.runs(self._start_again(process, **environment))

    def _start_again(self, process: Client, setting: str = "", **environment: str) -> Client:
        """Start it again, in a shell in which something was set."""
        process.kill()
        process.process.wait(10)
        shell = ("sh", "-c", f'{setting}exec "$@"', "sh") if setting else ()
        return self.start(
            process.daemon,
            uid=process.uid,
            before=(*process.before, *shell),
            inner=False,
            **{**process.environment, **environment},
        )

    async def runs(self, process: Client, seconds: float = 20) -> None:
        """It gets its context, and the doctor finds nothing wrong with it."""
        await self.settled(process, seconds)
        event = process.event("ready")
        self.note("it runs", event is not None, "ready", process.events())
        await self.fine(process)

    async def fine(self, process: Client) -> None:
        answer = await self.doctor(process.pid, f"afterwards {len(self.facts)}")
        ok = answer.get("outcome") in ("ok", "unknown")
        self.note("nothing is wrong", ok, "ok", answer.get("conclusion"))

    def note(self, what: str, ok: bool, wanted: object, got: object) -> None:
        self.lab.note(f"{self.name}: {what}", ok=ok, wanted=wanted, got=got)


Case = Callable[[Stage], Awaitable[None]]
CASES: dict[str, Case] = {}
CASES_OF_PROCESSES: dict[str, Case] = {}


def register(cases: dict[str, Case], function: Case) -> Case:
    cases[function.__name__.replace("_", " ")] = function
    return function


case = functools.partial(register, CASES)
case_of_processes = functools.partial(register, CASES_OF_PROCESSES)


@scenario("misconfigurations and hangs: each is named by doctor --pid, and its command heals")
async def hangs(lab: Lab) -> None:
    await act_all(lab, CASES)


@scenario("more hangs, and processes that are fine: no remedy ends a healthy process")
async def hangs_of_processes(lab: Lab) -> None:
    await act_all(lab, CASES_OF_PROCESSES)


async def act_all(lab: Lab, cases: dict[str, Case]) -> None:
    began = time.monotonic()
    only = os.environ.get(ONLY, "")
    for name, act in cases.items():
        if not re.search(only, name):
            continue
        if time.monotonic() - began > LIMIT_SECONDS:
            lab.note(name, ok=False, wanted="acted out", got="no time left")
            continue
        print(f"  - {name}", flush=True)
        stage = Stage(lab, name)
        at = time.monotonic()
        clients, daemons = len(lab.clients), len(lab.daemons)
        try:
            await asyncio.wait_for(act(stage), CASE_SECONDS)
        except Exception as error:  # noqa: BLE001 - the other cases continue
            lab.note(name, ok=False, wanted="to be acted out", got=repr(error))
        finally:
            end_all(lab.clients[clients:])
            for daemon in lab.daemons[daemons:]:
                daemon.resume()
                await asyncio.to_thread(daemon.quit, 5)
        stage.facts["seconds in all"] = round(time.monotonic() - at, 1)
        lab.facts[name] = stage.facts
    named = [note.ok for note in lab.checks if note.name.endswith(": is named")]
    print(f"    {sum(named)} of {len(named)} causes are named first", flush=True)


# ---------------------------------------------------------------- the search for a daemon


@case
async def healthy_and_a_second_daemon_refused(stage: Stage) -> None:
    process = await stage.started()
    second = await run(CONTROL, "-d", environment=stage.daemon.environment)
    stage.facts["the second daemon"] = [second.returncode, second.stdout + second.stderr]
    await stage.fine(process)


@case
async def path_too_long(stage: Stage) -> None:
    link = stage.lab.folder / ("long-" * 24)
    link.symlink_to(stage.daemon.pipe)
    process = await stage.started(CUDA_MPS_PIPE_DIRECTORY=str(link))
    await stage.cure(process, "bytes, of at most", NO_DAEMON)


@case
async def folder_closed_to_the_user(stage: Stage) -> None:
    closed = stage.lab.folder / "closed"
    closed.mkdir()
    daemon = stage.lab.daemon("closed/pipe")
    closed.chmod(0o700)
    process = await stage.started(daemon, uid=1001, CUDA_MPS_PIPE_DIRECTORY=str(closed / "pipe"))
    await stage.cure(process, "is closed to user 1001 (mode 0700)")


@case
async def daemon_dead_and_its_directory_left(stage: Stage) -> None:
    stage.daemon.kill()
    process = await stage.started()
    await stage.cure(process, "and is gone", NO_DAEMON)
    stage.daemon.find()


@case
async def directory_not_mounted_into_the_container(stage: Stage) -> None:
    hide = f'mount -t tmpfs none {shlex.quote(str(stage.daemon.pipe))} && exec "$@"'
    process = await stage.started(before=("unshare", "--mount", "sh", "-c", hide, "sh"))
    command = await stage.ask(process, "No control daemon serves", NO_DAEMON)
    stage.note("no command is given", not command, "", command)
    process.before = ()
    await stage.restart(process)


@case
async def namespaces_of_its_own(stage: Stage) -> None:
    fork = ("--pid", "--fork", "--kill-child")
    for name, words in (("ipc", ("--ipc",)), ("pid", (*fork, "--mount-proc"))):
        process = await stage.started(before=("unshare", *words), inner=name == "pid")
        stage.facts[name] = stage.facts["the process said"]
        await stage.fine(process)
    process = await stage.started(before=("unshare", *fork), inner=True)
    await stage.ask(process, "sees the /proc of another", "cuda-error-304-operating-system")
    process.before = ()
    await stage.restart(process)


@case
async def folder_closed_to_its_server(stage: Stage) -> None:
    folder = stage.lab.folder / "passable"
    folder.mkdir()
    daemon = stage.lab.daemon("passable/pipe")
    folder.chmod(0o701)
    process = await stage.started(daemon, uid=1001)
    await stage.cure(
        process,
        "passable is closed to user 1001 (mode 0701)",
        "server-encountered-a-fatal-exception",
    )


# ---------------------------------------------------------------------------- its environment


WRONG_VARIABLES = {
    "directory missing": ("CUDA_MPS_PIPE_DIRECTORY", "/none", "/none is not there", NO_DAEMON),
    "wrong directory": ("CUDA_MPS_PIPE_DIRECTORY", "/tmp", "No control daemon serves", NO_DAEMON),
    "no visible device": ("CUDA_VISIBLE_DEVICES", "", "names no GPU", BAD_DEVICES),
    "unknown visible device": ("CUDA_VISIBLE_DEVICES", "97", "names no GPU", BAD_DEVICES),
    "injected library missing": (INJECTION, "/nowhere/libtool.so", INJECTION, ""),
}
"""Variable, its value, the words that name the cause, and the page. The doctor's command heals."""
IGNORED_LIMITS = {
    "percentage ignored": ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "lots", "50"),
    "memory limit ignored": ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "97=1G", "0=1G"),
}
"""Variable, a value that is ignored, and a valid value."""


async def wrong_variable(stage: Stage) -> None:
    variable, value, words, page = WRONG_VARIABLES[stage.name]
    process = await stage.started(**{variable: value})
    await stage.cure(process, words, page)


async def ignored_limit(stage: Stage) -> None:
    variable, value, right = IGNORED_LIMITS[stage.name]
    process = await stage.started(**{variable: value})
    await stage.ask(process, f"with '{value}'", "a-limit-has-no-effect")
    await stage.restart(process, **{variable: right})


CASES |= dict.fromkeys(WRONG_VARIABLES, wrong_variable)
CASES |= dict.fromkeys(IGNORED_LIMITS, ignored_limit)


@case
async def no_variable(stage: Stage) -> None:
    process = await stage.started(before=("env", "-u", "CUDA_MPS_PIPE_DIRECTORY"))
    await stage.cure(process, "No control daemon serves", NO_DAEMON)


@case
async def memory_limit_below_a_context(stage: Stage) -> None:
    for mebibytes in (320, 384, 448, 512):
        process = await stage.started(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=f"0={mebibytes}M")
        stage.facts[f"limit of {mebibytes} MiB"] = process.events()[:1]
    process = await stage.started(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=100M")
    await stage.ask(process, "allows 100 MiB", "cuda-error-2-out-of-memory-under-mps")
    await stage.restart(process, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1G")


# ------------------------------------------------------------- daemons and servers that hang


@case
async def process_stopped(stage: Stage) -> None:
    process = await stage.started()
    process.kill(signal.SIGSTOP)
    await stage.cure(process, "is stopped (state T)", again=False)


@case
async def daemon_stopped(stage: Stage) -> None:
    os.kill(stage.daemon.pid, signal.SIGSTOP)
    process = await stage.started()
    await stage.cure(process, "does not answer", ALL_HANG, again=False)


@case
async def server_stopped(stage: Stage) -> None:
    await stage.started()
    for server in stage.daemon.servers():
        os.kill(server, signal.SIGSTOP)
    process = await stage.started()
    await stage.cure(process, "does not answer", ALL_HANG, again=False)


async def full_server(stage: Stage) -> list[Client]:
    """A server with as many contexts as it accepts."""
    crowd = [stage.lab.client("idle", 60, daemon=stage.daemon, mebibytes=8) for _ in range(48)]
    await stage.lab.ready(*crowd, seconds=40)
    return crowd


async def killed_in_the_queue(stage: Stage) -> Client:
    """A daemon that user 1001 holds, with the entry of a dead process of 1002 in its queue."""
    holder = await stage.started(uid=1001)
    dead = stage.start(uid=1002)
    await stage.lab.until("mps_uid_waiting_clients", 1, uid=1002)
    dead.kill()
    dead.process.wait(10)
    await stage.lab.until("mps_uid_waiting_dead_clients", 1, uid=1002)
    return holder


@case
async def deaf_server(stage: Stage) -> None:
    holder = await killed_in_the_queue(stage)
    process = stage.start(uid=1002)
    await stage.lab.until("mps_uid_waiting_clients", 2, uid=1002)
    holder.kill()
    await stage.lab.until("mps_server_ghost", 1, seconds=30)
    command = await stage.ask(process, "was started for clients that had died", ALL_HANG)
    # Its server's end does not free the daemon while the client that it sent there is left.
    await stage.heal(process, command, again=True, rounds=3)


@case
async def daemon_of_another_user(stage: Stage) -> None:
    daemon = stage.lab.daemon("of-1001", uid=1001)
    process = await stage.started(daemon, uid=1002)
    await stage.ask(process, "was started by user 1001", "cuda-error-805-mps-connection-failed")
    daemon.quit()
    process.daemon = stage.new_daemon("-of-root")
    await stage.restart(process)


@case
async def server_lost(stage: Stage) -> None:
    process = await stage.started()
    for server in stage.daemon.servers():
        os.kill(server, signal.SIGKILL)
    await stage.cure(process, "lost the MPS server", "cuda-error-806-mps-rpc-failure")


@case
async def refused_by_a_server_in_fault(stage: Stage) -> None:
    await stage.lab.ready_client("faulthold", 1, daemon=stage.daemon)
    await stage.lab.until("mps_server_state", 1, mps_server_state="FAULT")
    process = await stage.started()
    await stage.cure(process, "is in FAULT", "cuda-error-807-mps-server-not-ready")


@case
async def daemon_asked_to_quit(stage: Stage) -> None:
    holder = await stage.started()
    quitting = asyncio.create_task(asyncio.to_thread(stage.daemon.tool, "quit", 40))
    await stage.lab.until("mps_control_state", 1, mps_control_state="draining")
    process = await stage.started()
    await stage.ask(process, "was asked to quit", "quit-does-not-return")
    holder.kill()
    await quitting
    await stage.settled(process, 5)
    stage.facts["once it had quit"] = process.events()
    process.daemon = stage.new_daemon("-again")
    await stage.restart(process)


@case
async def server_full(stage: Stage) -> None:
    crowd = await full_server(stage)
    process = stage.start()
    await stage.settled(process, 5)
    await stage.ask(
        process, "has 48 of at most 48 contexts", "cuda-error-808-809-mps-max-clients-reached"
    )
    for client in crowd[:4]:
        client.kill()
    await stage.lab.left(*crowd[:4])
    await stage.restart(process)


# ---------------------------- processes: frozen, traced, refused, asked about by their users

GROUPS = Path("/sys/fs/cgroup")
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
FEW_DESCRIPTORS = 72  # So few that two clients of a server are its last.


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


@case_of_processes
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


CASES_OF_PROCESSES |= dict.fromkeys(("server frozen", "daemon frozen"), other_frozen)


TRACER = f"""
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace({PTRACE_SEIZE}, int(sys.argv[1]), 0, 0) == 0
assert libc.ptrace({PTRACE_INTERRUPT}, int(sys.argv[1]), 0, 0) == 0
time.sleep(60)
"""


@case_of_processes
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


@case_of_processes
async def waiting_and_asked_by_its_user(stage: Stage) -> None:
    holder = await stage.started(uid=1001)
    process = stage.start(uid=1002)
    await stage.settled(process, 1)
    answer = await stage.doctor(process.pid, "as its user", uid=1002)
    stage.note("status is not 0", answer["status"] != 0, "1 or 3", answer["status"])
    stage.note("is named", "wait" in str(answer), "wait", answer["conclusion"])
    await stage.ask(process, "has waited", "a-program-hangs-in-cuinit")
    holder.kill()
    await stage.runs(process, 60)


@case_of_processes
async def waiting_at_the_daemon_of_a_container(stage: Stage) -> None:
    daemon = stage.lab.directories("container")
    stage.lab.start_contained(daemon, f"{CONTROL} -d; sleep 120")
    await stage.lab.until("mps_control_up", 1)
    holder = await stage.started(daemon, uid=1001)
    process = stage.start(daemon, uid=1002)
    await stage.settled(process, 1)
    await stage.ask(process, "wait")
    holder.kill()
    await stage.settled(process, 60)
    await stage.fine(process)


@case_of_processes
async def ghost_and_asked_by_a_third_user(stage: Stage) -> None:
    holder = await killed_in_the_queue(stage)
    holder.kill()
    await stage.lab.until("mps_server_ghost", 1, seconds=30)
    process = await stage.started(uid=1003)
    answer = await stage.doctor(process.pid, "as a third user", uid=1003)
    stage.note("no kill", "kill" not in str(answer.get("command")), "", answer.get("command"))
    await stage.cure(process, "was started for clients that had died", ALL_HANG, again=False)


@case_of_processes
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
    named = "has no file descriptor left" in report.stdout and "kill -9" not in report.stdout
    stage.note("doctor names it", named, "descriptors", report.stdout[:600])
    for one in healthy:
        stage.note("runs on", one.event("error") is None, "ready", one.events())


@case_of_processes
async def refused_and_not_reaped(stage: Stage) -> None:
    await stage.lab.ready_client("faulthold", 1, daemon=stage.daemon)
    await stage.lab.until("mps_server_state", 1, mps_server_state="FAULT")
    client = stage.lab.python("sleeper.py", 1)
    await asyncio.sleep(3)  # nothing reaps it
    await stage.lab.look()
    await stage.ask(client, "was refused")


@case_of_processes
async def refused_at_the_limit_and_reaped(stage: Stage) -> None:
    await full_server(stage)
    client = stage.lab.python("sleeper.py", 1)
    await stage.lab.left(client)
    await stage.lab.look()
    await stage.ask(client, "limit")


@case_of_processes
async def relative_directory(stage: Stage) -> None:
    enter = f'cd {stage.daemon.pipe.parent} && exec "$@"'
    process = await stage.started(
        before=("sh", "-c", enter, "sh"), CUDA_MPS_PIPE_DIRECTORY=stage.daemon.pipe.name
    )
    await stage.fine(process)


@case_of_processes
async def socket_closed_to_the_user(stage: Stage) -> None:
    (stage.daemon.pipe / "control").chmod(0o600)
    process = await stage.started(uid=1001)
    await stage.cure(process, "may not connect to")


@case_of_processes
async def stranded_without_a_daemon(stage: Stage) -> None:
    process = await stage.started()
    for pid in (*stage.daemon.servers(), stage.daemon.pid):
        os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(2)
    await stage.ask(process, "lost the MPS server")
