"""What makes every new CUDA process hang: a ghost server, a daemon that does not answer.

Of the ways out, that which costs least. Only what is proved to be dead is ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mps_exporter import humanize
from mps_exporter.findings.finding import Case, HostFacts, of_daemon, of_server, shown_path
from mps_exporter.findings.safe_commands import (
    PROCESS_OWNER,
    Action,
    end_clients,
    end_processes,
    may_be_ended,
    quoted_path,
    show_processes,
)
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.observations import ProcessFacts, ProcessView
from mps_exporter.snapshot import Client, ControlDaemon, Handover, Server

SECOND_STEP_SECONDS = 5
"""With one GPU the daemon continued at once (8 of 8). With two it and the program that is connected
to the ghost waited for each other until that program had ended (7 of 7, driver 580)."""

HANGS = "every-cuda-program-hangs-and-the-control-tool-too"


@of_server(
    "critical",
    "A ghost server blocks its daemon",
    "It was started for a user whose queued process had died, and serves no process, not even "
    "a new one of that user. As soon as another process connects, the daemon waits for the "
    "ghost forever, and every new CUDA process hangs.",
    alert="MpsGhostServer",
    page=HANGS,
)
def ghost_server(host: HostFacts, daemon: ControlDaemon, server: Server) -> Iterator[Case]:
    if not server.ghost:
        return
    text = "the daemon will hang as soon as another user's client connects."
    if hung := _hung_on(server):
        pids = humanize.processes([one.pid for one in hung])
        those = pids or humanize.count(len(hung), "client")
        text = f"it serves no client; {those} and all later clients hang."
    elif daemon.state == "unresponsive":
        text = "the daemon hangs on it, and with it every new CUDA process."
    whose = humanize.capitalize(host.server(server))
    text = f"{whose} was started for clients that had died in the queue: {text}"
    yield Case(text, ghost_remedy(server), ghost_commands(daemon))


def ghost_remedy(server: Server) -> str:
    """Say how to end it, and what to do where that is not enough."""
    hung = _hung_on(server)
    more = "run mps-exporter doctor again: it names what is left to end."
    if those := humanize.processes([one.pid for one in hung if may_be_ended(one)]):
        is_, has = ("is", "has") if len(hung) == 1 else ("are", "have")
        more = f"also end {those}, which {is_} connected to that server and {has} no context."
    more = f" If the daemon does not answer {SECOND_STEP_SECONDS} s later, {more}"
    if not may_be_ended(server):
        return (
            "End that server to free the queue. Its process is not visible to the exporter (ps -C "
            f"nvidia-cuda-mps-server lists all servers). Do not restart the daemon.{more}"
        )
    return (
        f"End server {server.pid} (with SIGKILL, after a look at its name) to free the queue. Do "
        f"not restart the daemon.{more}"
    )


def ghost_commands(daemon: ControlDaemon) -> Iterable[Action]:
    """The commands to copy; the name of the server is checked before it is killed."""
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
                f"if the daemon does not answer {SECOND_STEP_SECONDS} s later: ends what is "
                "connected to the ghost, and has no context",
            )


def _hung_on(server: Server) -> list[Client]:
    """The clients of a ghost that wait for a context."""
    without = ("connecting", "creating_context")
    return [one for one in server.clients if one.state in without and not one.contexts]


@of_daemon(
    "critical",
    "A control daemon does not answer",
    "Every process that starts to use CUDA now hangs in cuInit.",
    alert="MpsControlDaemonUnresponsive",
    page=HANGS,
)
def daemon_unresponsive(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    if daemon.state == "unresponsive":
        hangs, remedy, actions = _way_out(daemon)
        name = shown_path(daemon.pipe_directory)
        yield Case(f"The MPS daemon {name} does not answer: {hangs}.", remedy, actions)


def _way_out(daemon: ControlDaemon) -> tuple[str, str, Iterable[Action]]:
    """Say why a daemon hangs, what to do, and the commands for it."""
    hangs = "programs that start now hang"
    facts = daemon.facts
    processes = facts.processes if facts is not None else ()
    stopped = next((one for one in processes if one.stopped), None)
    ghost = next((server for server in daemon.servers if server.ghost), None)
    # To end a ghost is enough, whatever holds it.
    itself = facts is not None and facts.process is not None and facts.process.stopped
    if stopped is not None and (ghost is None or itself):
        how, remedy = halt_texts(stopped) or ("stopped", _where_nothing_is_seen(daemon))
        what = "it" if stopped.pid == daemon.pid else f"its server {stopped.pid}"
        return f"{what} is {how}; {hangs}", remedy, resuming(stopped)
    if ghost is not None:
        why = f"it hangs on its ghost server {ghost.pid}"
        return why, ghost_remedy(ghost), ghost_commands(daemon)
    if (last := daemon.handover) is not None and last.server_pid is not None:
        return _of_ended_server(last, hangs)
    remedy = _where_nothing_is_seen(daemon)
    if daemon.resumed:
        remedy = "It was stopped, and was continued since: its next answer shows whether it works."
    return hangs, remedy, show_processes((one.pid for one in processes), _STUCK_IN)


_STUCK_IN = "shows what they are stuck in"


def _of_ended_server(last: Handover, hangs: str) -> tuple[str, str, Iterable[Action]]:
    # On H200s the daemon continued at once, 7 times of 7, and noted the end of its server.
    return (
        f"it waits for process {last.pid}, which it sent to server {last.server_pid}, and that "
        f"has ended; {hangs}",
        f"End process {last.pid}, which has lost its server: the daemon then continues, and "
        "starts a server for the next client. Do not restart the daemon.",
        end_processes([last.pid], "ends the client of a server that has ended; the daemon stays"),
    )


def _where_nothing_is_seen(daemon: ControlDaemon) -> str:
    if not (daemon.follows("control") and daemon.follows("server")):
        return (
            "Not all of its logs can be read, so whether a ghost server blocks it is not known; it "
            "may also be draining, which looks the same (its control.log then has Cmd:quit, and it "
            "exits when its last client does). Ask root to run mps-exporter doctor."
        )
    last = daemon.handover
    sent = "" if last is None else f" The last that it did was for process {last.pid}."
    clients = sum(server.clients_connected or 0 for server in daemon.servers)
    lost = f"its {humanize.count(clients, 'client')}" if clients else "its clients"
    return (
        f"None of its servers is stopped or a ghost, as far as can be seen.{sent} See what it and "
        "its servers are stuck in, and whether they have file descriptors left (mps-exporter "
        f"doctor, as root). The last resort is a restart of the daemon: {lost} will be lost."
    )


def halt_texts(one: ProcessFacts | ProcessView) -> tuple[str, str] | None:
    """Say what keeps a process from running, and what lets it run; None: nothing is seen."""
    if one.frozen_group:
        return (
            f"frozen, with its control group {shown_path(one.frozen_group)}",
            "Thaw that group.",
        )
    if one.state == "t":
        debugger = f"process {humanize.printable(one.tracer)}" if one.tracer else "a debugger"
        return (
            f"stopped by {debugger}, which traces it (state t)",
            f"Let {debugger} continue it, or detach from it; SIGCONT has no effect.",
        )
    if one.state == "T":
        return "stopped (state T)", f"Continue process {one.pid} (SIGCONT)."
    return None


def resuming(one: ProcessFacts | ProcessView) -> Iterator[Action]:
    """Give the command that lets a process run."""
    if one.frozen_group:
        runtime, _, container = (
            parse_cgroup(f"0::{one.frozen_group}").container_id or ""
        ).partition("://")
        paused = runtime in ("docker", "podman") and container in one.frozen_group[-70:]
        if paused:
            yield Action(f"{runtime} unpause {container[:12]}", "root", "thaws the container")
        elif path := quoted_path(f"{one.frozen_group}/cgroup.freeze"):
            yield Action(f"echo 0 > {path}", "root", "thaws the control group")
    elif one.state == "T":
        effect = "lets the stopped process go on"
        yield Action(f"kill -CONT {one.pid}", PROCESS_OWNER, effect)


@of_daemon(
    "warning",
    "A queued process has died",
    "It still occupies its slot in the queue. When its turn comes the daemon starts a server "
    "for it that serves no process, and hangs on that server as soon as another process "
    "connects, including one that the same user started instead.",
    alert="MpsQueuedClientDead",
    page=HANGS,
)
def queued_client_dead(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    dead = [wait for wait in daemon.waits if wait.dead]
    if not dead:
        return
    pids = humanize.capitalize(humanize.processes([one.pid for one in dead]) or "a process")
    yield Case(
        f"{pids} died while waiting in the queue of {shown_path(daemon.pipe_directory)}, and "
        f"still {'have queue entries' if len(dead) > 1 else 'has a queue entry'}: when the "
        "turn comes, the daemon hangs.",
        "Nothing is lost yet; do not restart the daemon. When the running server exits, the "
        f"daemon starts a server for {host.user(dead[0].uid)} that serves no client: it is "
        "reported as a ghost, with the command that ends it, and then the queue continues. "
        "Until then a new process of this user would hang too.",
    )
