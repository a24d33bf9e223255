"""Causes that make every new CUDA process hang: ghost servers, unresponsive daemons, dead clients.

A remedy is the least costly one, and ends only what is proved to be dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mps_exporter.findings import policy
from mps_exporter.findings.finding import (
    PROCESS_OWNER,
    Action,
    Case,
    Cases,
    HostFacts,
    end_clients,
    end_processes,
    may_be_ended,
    of_daemon,
    of_server,
    quoted_path,
    show_processes,
    shown_path,
)
from mps_exporter.humanize import capitalize, count, printable, processes, sentence
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.observations import ProcessFacts, ProcessView
from mps_exporter.snapshot import Client, ControlDaemon, Server

HANGS = "every-cuda-program-hangs-and-the-control-tool-too"


@of_server(
    "critical",
    "A ghost server blocks its daemon",
    "It was started for a user whose queued process had died, and serves no process, not even "
    "a new one of that user. As soon as another process connects, the daemon waits for the "
    "ghost forever, and every new CUDA process hangs.",
    alert="MpsGhostServer",
    summary="An MPS server was started for a client that is dead; the daemon will hang on it until "
    "it is killed.",
    page=HANGS,
)
def ghost_server(host: HostFacts, daemon: ControlDaemon, server: Server) -> Cases:
    if not server.ghost:
        return
    text = "the daemon will hang as soon as another user's client connects."
    if hung := _hung_on(server):
        those = processes([one.pid for one in hung]) or count(len(hung), "client")
        text = f"it serves no client; {those} and all later clients hang."
    elif daemon.state == "unresponsive":
        text = "the daemon hangs on it, and with it every new CUDA process."
    text = f"{host.server(server)} was started for clients that had died in the queue: {text}"
    yield Case(sentence(text), ghost_remedy(server), ghost_commands(daemon))


def ghost_remedy(server: Server) -> str:
    """Return how to end a ghost, and what to do if that is not enough."""
    hung = _hung_on(server)
    more = "run mps-exporter doctor again: it names what is left to end."
    if those := processes([one.pid for one in hung if may_be_ended(one)]):
        is_, has = ("is", "has") if len(hung) == 1 else ("are", "have")
        more = f"also end {those}, which {is_} connected to that server and {has} no context."
    more = f" If the daemon does not answer {policy.GHOST_GRACE_SECONDS} s later, {more}"
    if not may_be_ended(server):
        return (
            "End that server to free the queue. Its process is not visible to the exporter (ps -C "
            f"nvidia-cuda-mps-server lists all servers). Do not restart the daemon.{more}"
        )
    return (
        f"End server {server.pid} (with SIGKILL, after a look at its name) to free the queue. Do "
        f"not restart the daemon.{more}"
    )


def ghost_commands(daemon: ControlDaemon) -> Iterator[Action]:
    """Yield the commands that end ghosts; each checks the server's name before it kills."""
    for server in daemon.servers:
        if server.ghost and may_be_ended(server):
            yield Action(
                f"ps -o args= -p {server.pid} | grep nvidia-cuda-mps-server && "
                f"kill -9 {server.pid}",
                "root, or the user of this server",
                "ends the ghost server; the daemon stays",
            )
            yield from end_clients(
                _hung_on(server),
                f"if the daemon does not answer {policy.GHOST_GRACE_SECONDS} s later: ends what is "
                "connected to the ghost, and has no context",
            )


def _hung_on(server: Server) -> list[Client]:
    """Return the clients of a ghost that wait for a context."""
    without = ("connecting", "creating_context")
    return [one for one in server.clients if one.state in without and not one.contexts]


@of_daemon(
    "critical",
    "A control daemon does not answer",
    "Every process that starts to use CUDA now hangs in cuInit.",
    alert="MpsControlDaemonUnresponsive",
    summary="An MPS control daemon hangs; every CUDA program that starts hangs with it.",
    page=HANGS,
)
def daemon_unresponsive(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.state == "unresponsive":
        hangs, remedy, actions = _way_out(daemon)
        name = shown_path(daemon.pipe_directory)
        yield Case(f"The MPS daemon {name} does not answer: {hangs}.", remedy, actions)


def _way_out(daemon: ControlDaemon) -> tuple[str, str, Iterable[Action]]:
    """Return why a daemon hangs, and the remedy."""
    hangs, facts, last = "programs that start now hang", daemon.facts, daemon.handover
    running = facts.processes if facts is not None else ()
    stopped = next((one for one in running if one.stopped), None)
    ghost = next((server for server in daemon.servers if server.ghost), None)
    # The end of a ghost is enough, even if a server is stopped, but not if the daemon itself is.
    itself = facts is not None and facts.process is not None and facts.process.stopped
    if stopped is not None and (ghost is None or itself):
        how, remedy = halt_texts(stopped) or ("stopped", _remedy_of_unknown_cause(daemon))
        what = "it" if stopped.pid == daemon.pid else f"its server {stopped.pid}"
        return f"{what} is {how}; {hangs}", remedy, resuming(stopped)
    if ghost is not None:
        why = f"it hangs on its ghost server {ghost.pid}"
        return why, ghost_remedy(ghost), ghost_commands(daemon)
    if last is not None and last.server_pid is not None:
        # On H200s the daemon continued at once (7 of 7), and logged the end of its server.
        effect = "ends the client of a server that has ended; the daemon stays"
        return (
            f"it waits for process {last.pid}, which it sent to server {last.server_pid}, and that "
            f"has ended; {hangs}",
            f"End process {last.pid}, which has lost its server: the daemon then continues, and "
            "starts a server for the next client. Do not restart the daemon.",
            end_processes([last.pid], effect),
        )
    remedy = _remedy_of_unknown_cause(daemon)
    if daemon.resumed:
        remedy = "It was stopped, and was continued since: its next answer shows whether it works."
    return (
        hangs,
        remedy,
        show_processes((one.pid for one in running), "shows what they are stuck in"),
    )


def _remedy_of_unknown_cause(daemon: ControlDaemon) -> str:
    if not (daemon.follows("control") and daemon.follows("server")):
        return (
            "Not all of its logs can be read, so whether a ghost server blocks it is not known; it "
            "may also be draining, which looks the same (its control.log then has Cmd:quit, and it "
            "exits when its last client does). Ask root to run mps-exporter doctor."
        )
    last = daemon.handover
    sent = "" if last is None else f" The last that it did was for process {last.pid}."
    clients = sum(server.clients_connected or 0 for server in daemon.servers)
    lost = f"its {count(clients, 'client')}" if clients else "its clients"
    return (
        f"None of its servers is stopped or a ghost, as far as can be seen.{sent} See what it and "
        "its servers are stuck in, and whether they have file descriptors left (mps-exporter "
        f"doctor, as root). The last resort is a restart of the daemon: {lost} will be lost."
    )


def halt_texts(one: ProcessFacts | ProcessView) -> tuple[str, str] | None:
    """Return what keeps a process from running and the remedy; None if nothing does."""
    if one.frozen_group:
        return f"frozen, with its control group {shown_path(one.frozen_group)}", "Thaw that group."
    if one.state == "t":
        debugger = f"process {printable(one.tracer)}" if one.tracer else "a debugger"
        return (
            f"stopped by {debugger}, which traces it (state t)",
            f"Let {debugger} continue it, or detach from it; SIGCONT has no effect.",
        )
    if one.state == "T":
        return "stopped (state T)", f"Continue process {one.pid} (SIGCONT)."
    return None


def resuming(one: ProcessFacts | ProcessView) -> Iterator[Action]:
    if one.frozen_group:
        container = parse_cgroup(f"0::{one.frozen_group}").container_id or ""
        runtime, _, number = container.partition("://")
        if runtime in ("docker", "podman") and number in one.frozen_group[-70:]:
            yield Action(f"{runtime} unpause {number[:12]}", "root", "thaws the container")
        elif path := quoted_path(f"{one.frozen_group}/cgroup.freeze"):
            yield Action(f"echo 0 > {path}", "root", "thaws the control group")
    elif one.state == "T":
        yield Action(f"kill -CONT {one.pid}", PROCESS_OWNER, "lets the stopped process go on")


@of_daemon(
    "warning",
    "A queued process has died",
    "It still occupies its slot in the queue. When its turn comes the daemon starts a server "
    "for it that serves no process, and hangs on that server as soon as another process "
    "connects, including one that the same user started instead.",
    alert="MpsQueuedClientDead",
    summary="A client died in the MPS queue; when its turn comes, the control daemon will hang.",
    page=HANGS,
)
def queued_client_dead(host: HostFacts, daemon: ControlDaemon) -> Cases:
    if dead := [wait for wait in daemon.waits if wait.dead]:
        pids = capitalize(processes([one.pid for one in dead]) or "a process")
        yield Case(
            f"{pids} died while waiting in the queue of {shown_path(daemon.pipe_directory)}, and "
            f"still {'have queue entries' if len(dead) > 1 else 'has a queue entry'}: when the "
            "turn comes, the daemon hangs.",
            "Nothing is lost yet; do not restart the daemon. When the running server exits, the "
            f"daemon starts a server for {host.user(dead[0].uid)} that serves no client: it is "
            "reported as a ghost, with the command that ends it, and then the queue continues. "
            "Until then a new process of this user would hang too.",
        )
