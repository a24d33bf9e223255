"""What the lab acts out, and what the exporter must show of it. Users come from setpriv."""

import asyncio
import functools
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

from testing.commands import output_of
from tests.hardware.lab import CONTROL, Client, Daemon, Lab

Scenario = Callable[[Lab], Awaitable[None]]
SCENARIOS: dict[str, tuple[str, Scenario]] = {}


def scenario(words: str) -> Callable[[Scenario], Scenario]:
    """Put a scenario on the list under its function's name."""

    def register(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__.replace("_", "-")] = (words, function)
        return function

    return register


def served(
    words: str, **settings: Any
) -> Callable[[Callable[[Lab, Daemon], Awaitable[None]]], Scenario]:
    """The same, of a scenario with a daemon (see Lab.daemon), which quits at the end."""

    def register(function: Callable[[Lab, Daemon], Awaitable[None]]) -> Scenario:
        @functools.wraps(function)
        async def act(lab: Lab) -> None:
            daemon = lab.daemon(**settings)
            await function(lab, daemon)
            await lab.quit(daemon)

        return scenario(words)(act)

    return register


@scenario("one client of root for 5 s, then the daemon quits")
async def one_client(lab: Lab) -> None:
    daemon = lab.daemon()
    await lab.until("mps_control_up", 1)
    client = await lab.ready_client("spin", 5)
    await lab.until("mps_server_clients", 1)
    lab.check("mps_client_contexts", 1, pid=client.pid)
    lab.check("mps_client_sm_limit", 132, pid=client.pid)
    lab.check("mps_control_starts_total", 1)
    lab.check("mps_gpu_processes", 1, kind="mps_client")
    lab.check("mps_gpu_processes", 1, kind="mps_server")
    lab.check("mps_gpu_processes", 0, kind="direct")
    await lab.left(client)
    await lab.until("mps_server_clients", 0)
    daemon.quit()
    await lab.until("mps_server_exits_total", 1, cause="requested")
    for cause in ("crashed", "start_failed", "daemon_died"):
        lab.check("mps_server_exits_total", 0, cause=cause)
    lab.check("mps_server_starts_total", 1, uid=0)
    lab.check("mps_client_connections_total", 1)
    lab.check("mps_control_log_unrecognized_lines_total", 0)
    lab.check("mps_client_session_seconds_sum", (4.5, 8))
    await lab.until("mps_control_state", 1, mps_control_state="absent")


@served("clients limited to 10, 25 and 50 %, one without limits, one with 2G, a direct process")
async def limits(lab: Lab, daemon: Daemon) -> None:
    limited = [lab.client("spin", 16, percentage=text) for text in ("10", "25", "50")]
    free = lab.client("spin", 16)
    roomy = lab.client("idle", 16, mebibytes=256, memory_limit="0=2G")
    direct = lab.client("idle", 16, mps=False)
    clients = [*limited, free, roomy]
    await lab.ready(*clients, direct)
    await lab.until("mps_server_clients", 5)
    for client in clients:
        sms = float(str((client.event("ready") or {})["sms"]))
        lab.check("mps_client_sm_limit", sms, pid=client.pid)
    lab.check("mps_client_memory_limit_bytes", 2 << 30, pid=roomy.pid)
    lab.check("mps_client_memory_limit_bytes", None, pid=free.pid)
    lab.check("mps_server_client_contexts", 5)
    lab.check("mps_server_client_contexts_limit", 48)
    lab.check("mps_gpu_processes", 1, kind="direct")
    lab.check("mps_gpu_processes", 5, kind="mps_client")
    lab.check("mps_gpu_stranded_clients", 0)
    _memory_as_nvidia_smi(lab, clients)
    await _silence(lab, daemon)
    await lab.run(4)
    await lab.left(*clients, direct)
    await lab.until("mps_server_clients", 0)
    await lab.run(3)


def _memory_as_nvidia_smi(lab: Lab, clients: list[Client]) -> None:
    text = output_of(
        "nvidia-smi",
        "--query-compute-apps=pid,used_memory",
        "--format=csv,noheader,nounits",
        check=True,
    ).stdout
    used = {int(pid): int(mib) for pid, mib in (row.split(", ") for row in text.splitlines())}
    for client in clients:
        got = lab.value("mps_client_memory_used_bytes", pid=client.pid)
        want = used[client.pid]
        ok = got is not None and abs(got / (1 << 20) - want) < 1
        lab.note("client memory as nvidia-smi", ok=ok, wanted=f"{want} MiB", got=got)


async def _silence(lab: Lab, daemon: Daemon) -> None:
    """Check that the exporter's queries leave few lines in control.log."""
    for _ in range(2):  # the second finds everything known
        await lab.look()
        await asyncio.sleep(1.2)
    before = daemon.lines("control")
    await lab.look()
    await asyncio.sleep(0.3)
    probe = daemon.lines("control") - before
    name = "control.log lines of a collection in which nothing changed"
    lab.note(name, ok=probe <= 10, wanted="<= 10", got=probe)
    lab.facts["log_lines_per_probe"] = probe
    from mps_exporter.mps.server_queries import ServerAnswers

    for record in lab.collector._daemons.values():  # forget, so that the server is queried again
        record.answers = ServerAnswers()
    await asyncio.sleep(1.2)
    before = daemon.lines("control")
    await lab.look()
    await asyncio.sleep(0.3)
    whole = daemon.lines("control") - before
    reconciliation = whole - probe
    name = "control.log lines of a reconciliation"
    lab.note(name, ok=reconciliation <= 40, wanted="<= 40", got=reconciliation)
    lab.facts["log_lines_per_reconciliation"] = reconciliation


@served("a wait behind another user is served: 1002 behind 1001")
async def wait_served(lab: Lab, daemon: Daemon) -> None:
    await lab.ready_client("spin", 5, uid=1001)
    second = lab.client("spin", 3, uid=1002)
    began = time.monotonic()
    await lab.until("mps_uid_waiting_clients", 1, uid=1002)
    lab.check("mps_uid_waiting_dead_clients", 0, uid=1002)
    await lab.run(1)
    await lab.ready(second, seconds=60)
    waited = time.monotonic() - began
    await lab.until("mps_uid_waiting_clients", 0, uid=1002)
    await lab.until("mps_uid_wait_seconds", 1, uid=1002)
    lab.check("mps_uid_wait_seconds_sum", (waited - 1.5, waited + 0.3), uid=1002)
    lab.check("mps_uid_handovers_total", 1)
    lab.check("mps_server_exits_total", 1, cause="requested")
    lab.check("mps_server_exits_total", 0, cause="crashed")
    lab.check("mps_uid_handover_idle_seconds_total", (0.01, 10))
    await lab.left(second)
    await lab.run(1)
    lab.check("mps_uid_holding_seconds_total", (4.5, 7), uid=1001)
    lab.check("mps_client_losses_total", 0)


async def _ghost_of(lab: Lab) -> int:
    """Wait for the ghost of a daemon, and give its PID."""
    await lab.until("mps_server_ghost", 1, seconds=30)
    return next(s.pid for one in lab.seen.snapshot.daemons for s in one.servers if s.ghost)


async def _ghost(lab: Lab, how: signal.Signals) -> None:
    daemon = lab.daemon()
    first = await lab.ready_client("spin", 5, uid=1001)
    dead = lab.client("spin", 3, uid=1002)
    await lab.until("mps_uid_waiting_clients", 1, uid=1002)
    await lab.run(1)
    dead.kill(how)
    await asyncio.to_thread(dead.process.wait, 5)
    await lab.until("mps_uid_waiting_dead_clients", 1, uid=1002)
    await lab.left(first)
    ghost = await _ghost_of(lab)
    third = lab.client("spin", 2, uid=1003)
    await lab.run(6)
    lab.facts["state_with_ghost"] = str(lab.seen.snapshot.daemons[0].state)
    lab.check("mps_uid_waits_abandoned_total", 1, uid=1002)
    lab.check("mps_server_ghost", 1, server=ghost)
    os.kill(ghost, signal.SIGKILL)
    await lab.ready(third, seconds=20)
    await lab.until("mps_server_clients", 1, seconds=20)
    lab.check("mps_server_ghost", 0)
    await lab.until("mps_control_up", 1, seconds=40)
    await lab.left(third)
    await lab.run(1)
    await lab.quit(daemon)


for _signal in (signal.SIGTERM, signal.SIGKILL):
    SCENARIOS[f"wait-abandoned-{_signal.name.lower()}"] = (
        f"a queued client gets {_signal.name}: its server becomes a ghost, killing that heals",
        functools.partial(_ghost, how=_signal),
    )


@served("a queued client is killed while nobody scrapes; its ghost is killed when it comes")
async def dead_between_scrapes(lab: Lab, daemon: Daemon) -> None:
    first = await lab.ready_client("spin", 8, uid=1001)
    dead = lab.client("spin", 3, uid=1002)
    await lab.until("mps_uid_waiting_clients", 1, uid=1002)
    killed_at = time.time()
    dead.kill()
    await asyncio.to_thread(dead.process.wait, 5)
    await asyncio.sleep(killed_at + 2.0 - time.time())  # no collection in between
    view = lab.collector._daemons[daemon.label].state  # What is known without a collection.
    shown = [wait.pid for wait in view.waits if wait.dead]
    lab.equal("dead after 2 s without a scrape", shown, [dead.pid])
    ends = [one.at - killed_at for one in view.incidents.snapshot() if one.kind == "wait_abandoned"]
    lab.facts["end_noticed_after_seconds"] = ends
    _note_time_of_end(lab, ends)
    await lab.look()
    lab.check("mps_uid_waiting_dead_clients", 1, uid=1002)
    lab.check("mps_uid_waits_abandoned_total", 1, uid=1002)
    await lab.left(first)
    ghost = await _ghost_of(lab)
    os.kill(ghost, signal.SIGKILL)
    await lab.until("mps_server_exits_total", 1, cause="ghost_ended")
    lab.check("mps_server_exits_total", 0, cause="crashed")


def _note_time_of_end(lab: Lab, ends: list[float]) -> None:
    """Check the only end of this kind; `ends` are seconds after the kill."""
    ok = len(ends) == 1 and 0.0 <= ends[0] <= 0.1
    lab.note("time of the end", ok=ok, wanted="one, 0 to 0.1 s after the kill", got=ends)


@served("short clients of 1001 overtake a waiting client of 1002")
async def starved(lab: Lab, daemon: Daemon) -> None:
    crowd = [lab.client("spin", 1.5, uid=1001)]
    await lab.ready(crowd[0])
    waiting = lab.client("spin", 1, uid=1002)
    await lab.until("mps_uid_waiting_clients", 1, uid=1002)
    for _ in range(12):
        crowd.append(lab.client("spin", 1.2, uid=1001))
        await lab.run(0.4)
    await lab.look()
    lab.check("mps_uid_overtakes_total", (6, 12), uid=1001)
    await lab.left(*crowd)
    await lab.ready(waiting, seconds=60)
    admitted = sum(client.event("ready") is not None for client in crowd[1:])
    await lab.until("mps_uid_waiting_clients", 0, uid=1002)
    lab.check("mps_uid_overtakes_total", (admitted - 1, admitted), uid=1001)
    lab.facts["crowd"] = len(crowd) - 1
    await lab.left(waiting)


@served("three users take turns")
async def three_users(lab: Lab, daemon: Daemon) -> None:
    first = await lab.ready_client("spin", 3, uid=1001)
    second = lab.client("spin", 2, uid=1002)
    await lab.run(0.5)
    third = lab.client("spin", 2, uid=1003)
    await lab.until("mps_uid_waiting_clients", 2)
    await lab.left(first, second, third, seconds=60)
    await lab.run(1)
    lab.check("mps_uid_handovers_total", 2)
    for uid in (1002, 1003):
        lab.check("mps_uid_wait_seconds", 1, uid=uid)
        lab.check("mps_uid_waiting_clients", 0, uid=uid)
    lab.check("mps_server_exits_total", 0, cause="crashed")


@served(
    "a multi-user server: 1001 and 1002 at once, nobody waits",
    arguments=("-d", "-multiuser-server"),
)
async def multi_user(lab: Lab, daemon: Daemon) -> None:
    clients = [lab.client("spin", 4, uid=uid) for uid in (1001, 1002)]
    await lab.ready(*clients)
    await lab.until("mps_server_clients", 2)
    lab.check("mps_control_info", 1, multiuser="true")
    lab.check("mps_uid_waiting_clients", 0)
    for client, uid in zip(clients, (1001, 1002), strict=True):
        lab.check("mps_client_info", 1, pid=client.pid, uid=uid)
    await lab.left(*clients)
    await lab.run(1)
    lab.check("mps_uid_wait_seconds", 0)


@scenario("the server is killed under two clients")
async def server_killed(lab: Lab) -> None:
    daemon = lab.daemon()
    clients = await lab.crowd(2, "spin", 20)
    await lab.until("mps_server_clients", 2)
    await lab.run(1)
    os.kill(lab.server, signal.SIGKILL)
    await lab.until("mps_server_exits_total", 1, cause="crashed")
    lab.check("mps_client_losses_total", 2, cause="server_crashed")
    lab.check("mps_server_exits_total", 0, cause="requested")
    await lab.left(*clients)
    late = await lab.ready_client("spin", 2)
    await lab.until("mps_server_clients", 1)
    lab.check("mps_server_starts_total", 2)
    await lab.left(late)
    daemon.quit()
    await lab.until("mps_server_exits_total", 1, cause="requested")


@served("a daemon of user 1001 cannot start a server for another user: six tries in 2 ms", uid=1001)
async def crash_loop(lab: Lab, daemon: Daemon) -> None:
    await lab.until("mps_control_up", 1)
    other_user = lab.client("spin", 2, uid=0)
    await lab.left(other_user)
    await lab.until("mps_server_exits_total", 6, cause="start_failed")
    lab.check("mps_server_starts_total", 6, uid=0)
    lab.check("mps_uid_waiting_clients", 0)
    lab.check("mps_server_exits_total", 0, cause="crashed")
    own = await lab.ready_client("spin", 2, uid=1001)
    await lab.until("mps_server_clients", 1)
    await lab.left(own)


@scenario("a daemon that is asked to quit while a client works: draining")
async def draining(lab: Lab) -> None:
    daemon = lab.daemon()
    client = await lab.ready_client("spin", 8)
    await lab.until("mps_server_clients", 1)
    lab.others.append(
        subprocess.Popen(["sh", "-c", f"echo quit | {CONTROL}"], env=daemon.environment)
    )
    await lab.until("mps_control_state", 1, mps_control_state="draining", seconds=6)
    await lab.look()
    lab.check("mps_server_clients", 1)
    await lab.left(client)
    await lab.until("mps_control_state", 1, mps_control_state="absent", seconds=20)
    await lab.until("mps_server_exits_total", 1, cause="requested")
    lab.check("mps_server_exits_total", 0, cause="daemon_died")


@scenario("a daemon in a PID namespace of its own: its log calls everyone PID 0")
async def own_pid_namespace(lab: Lab) -> None:
    daemon = lab.directories("mps")
    lab.start_contained(daemon, f"{CONTROL} -d; sleep 60")
    await lab.until("mps_control_up", 1)
    client = await lab.ready_client("spin", 6, uid=1001)
    await lab.until("mps_server_clients", 1)
    lab.check("mps_client_info", 1, pid=client.pid, uid=1001)
    lab.check("mps_client_memory_used_bytes", (1, 1 << 36), pid=client.pid)
    lab.check("mps_gpu_processes", 1, kind="mps_client")
    lab.check("mps_gpu_processes", 0, kind="direct")
    await lab.left(client)
    await lab.run(1)
    lab.check("mps_client_connections_total", 1, uid=1001)
    lab.check("mps_client_disconnections_total", 1, uid=1001)


@scenario("a daemon in the foreground: it writes no log files")
async def foreground(lab: Lab) -> None:
    daemon = lab.directories("mps")
    lab.start_in_foreground(daemon)
    await lab.until("mps_control_up", 1)
    client = await lab.ready_client("spin", 6)
    await lab.until("mps_server_clients", 1)
    lab.check("mps_control_log_readable", 0, log="control")
    lab.check("mps_server_state", 1, mps_server_state="ACTIVE")
    lab.check("mps_client_info", 1, pid=client.pid)
    lab.check("mps_server_exits_total", None)
    await lab.left(client)
    await lab.until("mps_server_clients", 0)


@scenario("the daemon is killed under a client; a new one takes its place")
async def daemon_killed(lab: Lab) -> None:
    daemon = lab.daemon()
    client = await lab.ready_client("spin", 20, uid=1001)
    await lab.until("mps_server_clients", 1)
    daemon.kill()
    await lab.until("mps_control_state", 1, mps_control_state="absent")
    await lab.until("mps_server_exits_total", 1, cause="daemon_died")
    lab.check("mps_client_losses_total", 1, cause="daemon_died")
    await lab.left(client)
    daemon = lab.daemon()
    await lab.until("mps_control_up", 1)
    late = await lab.ready_client("spin", 2, uid=1001)
    await lab.until("mps_server_clients", 1)
    lab.check("mps_control_starts_total", 2)
    lab.check("mps_server_exits_total", 1, cause="daemon_died")
    await lab.quit(daemon, late)


async def _fault(lab: Lab, mode: str, causes: dict[str, int], recovery: float) -> None:
    daemon = lab.daemon()
    neighbour = lab.client("spin", 20, uid=1001)
    faulty = lab.client(mode, 3, uid=1001)
    await lab.ready(neighbour, faulty)
    await lab.until("mps_server_clients", 2)
    await lab.left(neighbour, faulty)
    await lab.until("mps_server_faults_total", 1)
    for cause, count in causes.items():
        await lab.until("mps_client_losses_total", count, cause=cause)
    # A line is held for 0.1 s: the other log may have one from before. (The recovery came 24 ms
    # after the fault, and a page between 0.1 s after the one and after the other had no recovery.)
    await lab.until("mps_server_fault_recovery_seconds", 1)
    lab.check("mps_server_fault_recovery_seconds_sum", (0.001, recovery))
    lab.check("mps_server_exits_total", 0, cause="crashed")
    late = await lab.ready_client("spin", 2, uid=1001)
    await lab.until("mps_server_state", 1, mps_server_state="ACTIVE")
    await lab.until("mps_gpu_xid_errors_total", 1, xid=31, seconds=5)
    await lab.quit(daemon, late)


@scenario("a client has an illegal access and dies; its neighbour dies with it")
async def fault(lab: Lab) -> None:
    await _fault(lab, "fault", {"unattributed_fault": 2}, 1)


@scenario("a client writes behind its memory and dies; its neighbour dies with it")
async def overrun(lab: Lab) -> None:
    await _fault(lab, "overrun", {"own_fault": 1, "neighbour_fault": 1}, 10)


@served("a client catches its fault and stays 8 s: newcomers are refused until it leaves")
async def fault_held(lab: Lab, daemon: Daemon) -> None:
    neighbour = lab.client("spin", 20)
    faulty = lab.client("faulthold", 2)
    await lab.ready(neighbour, faulty)
    await lab.until("mps_server_state", 1, mps_server_state="FAULT", seconds=15)
    refused = lab.client("spin", 2)
    await lab.left(refused)
    await lab.until("mps_client_rejections_total", 1, cause="server_not_ready")
    lab.check("mps_server_state", 1, mps_server_state="FAULT")
    await lab.left(faulty)
    await lab.until("mps_server_fault_recovery_seconds", 1)
    lab.check("mps_server_fault_recovery_seconds_sum", (7.5, 9.5))
    lab.check("mps_server_faults_total", 1)
    lab.check("mps_client_losses_total", 2, cause="unattributed_fault")
    lab.check("mps_server_state", 1, mps_server_state="ACTIVE")


@served("an operator terminates a client")
async def terminate_client(lab: Lab, daemon: Daemon) -> None:
    clients = await lab.crowd(2, "spin", 15)
    await lab.until("mps_server_clients", 2)
    server = lab.server
    daemon.tool(f"terminate_client {server} {clients[0].pid}")
    await lab.left(clients[0])
    await lab.until("mps_client_losses_total", 1, cause="terminated")
    await lab.until("mps_server_clients", 1)
    lab.check("mps_server_faults_total", 0)
    lab.check("mps_server_exits_total", 0, cause="crashed")
    await lab.end(clients[1])
    await lab.until("mps_server_clients", 0)
    lab.check("mps_client_losses_total", 1)


@served("52 clients want a server that takes 48")
async def context_limit(lab: Lab, daemon: Daemon) -> None:
    crowd = [lab.client("idle", 14, mebibytes=8) for _ in range(52)]
    await lab.until("mps_server_clients", 48, seconds=25)
    for _ in range(100):
        if sum(client.process.poll() is not None for client in crowd) >= 4:
            break
        await asyncio.sleep(0.1)
    refused = sum(client.event("error") is not None for client in crowd)
    await lab.look()
    wanted = (refused, 3 * refused)
    lab.check("mps_client_rejections_total", wanted, cause="context_limit")
    lab.check("mps_server_client_contexts", 48)
    lab.check("mps_server_client_contexts_limit", 48)
    # That look asked NVML before it read the logs, and the last of the crowd had just come.
    await lab.until("mps_gpu_processes", 48, kind="mps_client")
    lab.facts["refused"] = refused
    await lab.left(*crowd)
    await lab.until("mps_server_clients", 0)


@served("a client runs into its memory limit of 1G")
async def memory_limit(lab: Lab, daemon: Daemon) -> None:
    client = await lab.ready_client("hog", 4, mebibytes=0, memory_limit="0=1G")
    await lab.until("mps_client_memory_used_bytes", (900 << 20, 1100 << 20), pid=client.pid)
    lab.check("mps_client_memory_limit_bytes", 1 << 30, pid=client.pid)
    await lab.left(client)


@served("the server is stopped with SIGSTOP for some seconds, then the daemon")
async def stopped(lab: Lab, daemon: Daemon) -> None:
    client = await lab.ready_client("idle", 25)
    await lab.until("mps_server_clients", 1)
    server = lab.server
    os.kill(server, signal.SIGSTOP)
    await lab.run(3)
    lab.check("mps_control_up", 1)
    lab.check("mps_server_clients", 1)
    os.kill(server, signal.SIGCONT)
    await lab.run(1)
    os.kill(daemon.pid, signal.SIGSTOP)
    await lab.until("mps_control_state", 1, mps_control_state="unresponsive", seconds=10)
    began = time.monotonic()
    await lab.look()
    took = time.monotonic() - began
    lab.note("a scrape with a hung daemon", ok=took < 3, wanted="< 3 s", got=f"{took:.2f} s")
    lab.check("mps_server_clients", 1)
    lab.check("mps_gpu_processes", 1, kind="mps_client")
    os.kill(daemon.pid, signal.SIGCONT)
    await lab.until("mps_control_up", 1, seconds=30)
    await lab.left(client)


@served("a client outlives its server and keeps its memory: stranded")
async def stranded(lab: Lab, daemon: Daemon) -> None:
    # A process that never calls CUDA again is unaware of its server's exit.
    sleeper = lab.python("sleeper.py", 14)
    await lab.ready(sleeper)
    await lab.until("mps_server_clients", 1)
    os.kill(lab.server, signal.SIGKILL)
    await lab.until("mps_gpu_stranded_clients", 1, seconds=6)
    lab.check("mps_client_losses_total", 1, cause="server_crashed")
    late = await lab.ready_client("idle", 3)
    await lab.run(1)
    lab.check("mps_gpu_stranded_clients", 1)
    lab.check("mps_server_clients", 1)
    sleeper.kill()
    await lab.until("mps_gpu_stranded_clients", 0)
    await lab.left(late)


async def _training(lab: Lab, processes: int, *, mps: bool) -> None:
    if mps:
        lab.daemon()
    crowd = [lab.torch("train", 4000, mps=mps) for _ in range(processes)]
    kinds = "mps_client" if mps else "direct"
    await lab.until("mps_gpu_processes", processes, kind=kinds, seconds=60)
    while any(client.process.poll() is None for client in crowd):
        await lab.run(1)
    lab.facts["processes"] = processes
    lab.facts["kind"] = kinds
    ends = [client.event("done") for client in crowd]
    seconds = [float(str(end["seconds"])) for end in ends if end is not None]
    lab.equal("trainings done", len(seconds), processes)
    if seconds:
        lab.facts["slowest_seconds"] = max(seconds)
        print(f"    slowest of {processes} ({kinds}): {max(seconds):.2f} s")
    for daemon in lab.daemons:
        await lab.quit(daemon)


for _count in (1, 5, 10):
    _words = f"the same small training {_count} times at once, %s MPS"
    for _mps, _name, _how in ((False, "direct", "without"), (True, "mps", "with")):
        _act = functools.partial(_training, processes=_count, mps=_mps)
        SCENARIOS[f"training-{_count}-{_name}"] = (_words % _how, _act)


@scenario(
    "a tour: limits, a wait and a hand-over, a fault with neighbours, a server crash, recovery"
)
async def tour(lab: Lab) -> None:
    await lab.run(3)  # an idle GPU
    daemon = lab.daemon()
    await lab.run(4)
    limited = [
        lab.client("spin", 38, uid=1001, mebibytes=size, blocks=blocks, percentage=text)
        for text, size, blocks in (("10", 512, 8), ("25", 1024, 20), ("50", 2048, 40))
    ]
    free = lab.client("idle", 36, uid=1001, mebibytes=400, memory_limit="0=1G")
    direct = lab.client("idle", 30, mps=False, uid=1003, mebibytes=256)
    await lab.ready(*limited, free, direct)
    await lab.run(12)
    waiting = [lab.client("spin", 25, uid=1002, mebibytes=256, blocks=30)]
    await lab.until("mps_uid_waiting_clients", 1, uid=1002)
    await lab.run(8)
    overtaking = lab.client("spin", 6, uid=1001)
    await lab.run(4)
    await lab.left(*limited, free, overtaking, direct)
    await lab.ready(*waiting, seconds=60)
    await lab.run(3)
    lab.check("mps_uid_handovers_total", 1)
    neighbours = [lab.client("spin", 60, uid=1002, mebibytes=300, blocks=30) for _ in range(2)]
    faulty = lab.client("fault", 8, uid=1002)
    await lab.ready(*neighbours, faulty)
    await lab.run(6)
    await lab.left(faulty, *neighbours)
    await lab.run(6)
    lab.check("mps_server_faults_total", 1)
    await lab.left(*waiting)
    crowd = await lab.crowd(3, "spin", 60, uid=1002, mebibytes=400, blocks=25)
    await lab.run(10)
    os.kill(lab.server, signal.SIGKILL)
    await lab.left(*crowd)
    await lab.run(8)
    lab.check("mps_server_exits_total", 1, cause="crashed")
    last = await lab.crowd(2, "spin", 12, uid=1001, blocks=40)
    await lab.left(*last)
    await lab.run(4)
    daemon.quit()
    await lab.run(3)


@scenario("90 s of a healthy host with two clients")
async def quiet(lab: Lab) -> None:
    lab.daemon()
    clients = await lab.crowd(2, "spin", 88, uid=1001, blocks=40)
    await lab.run(85)
    await lab.left(*clients)
    await lab.run(2)


# ------------------------------------------------------------------------------- two GPUs


@served("two GPUs, one daemon: contexts are counted by GPU")
async def two_gpus_one_daemon(lab: Lab, daemon: Daemon) -> None:
    on_first = lab.client("spin", 8, gpus="0")
    on_second = [lab.client("spin", 8, gpus="1") for _ in range(2)]
    await lab.ready(on_first, *on_second)
    await lab.until("mps_server_clients", 3)
    lab.check("mps_server_client_contexts", 1, gpu=0)
    lab.check("mps_server_client_contexts", 2, gpu=1)
    for gpu, count in ((0, 1), (1, 2)):
        lab.check("mps_gpu_processes", count, kind="mps_client", gpu=gpu)
        lab.check("mps_gpu_processes", 0, kind="direct", gpu=gpu)
        lab.check("mps_gpu_stranded_clients", 0, gpu=gpu)
    await lab.left(on_first, *on_second)


@served("a fault on one of two GPUs: who is on the other survives")
async def fault_two_gpus(lab: Lab, daemon: Daemon) -> None:
    survivor = lab.client("spin", 10, gpus="0")
    neighbour = lab.client("spin", 20, gpus="1")
    faulty = lab.client("fault", 3, gpus="1")
    await lab.ready(survivor, neighbour, faulty)
    await lab.until("mps_server_clients", 3)
    await lab.left(neighbour, faulty)
    await lab.until("mps_server_faults_total", 1, gpu=1)
    lab.check("mps_server_faults_total", 0, gpu=0)
    lab.check("mps_client_losses_total", 2, cause="unattributed_fault")
    await lab.until("mps_server_clients", 1)
    await lab.left(survivor)
    done = survivor.event("done") is not None
    lab.note("the survivor finished", ok=done, wanted=True, got=done)
    await lab.run(1)
    lab.check("mps_client_losses_total", 2)


DOUBLE = (
    "two-gpus-one-daemon",
    "fault-two-gpus",
    "three-daemons",
    "data-parallel",
    "memory-ordinals-two-gpus",
)
"""Scenarios that want two GPUs."""
