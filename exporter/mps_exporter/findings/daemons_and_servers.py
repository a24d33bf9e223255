"""Findings about ghosts, hangs and waits, and about daemons, servers and clients that fail.

A remedy is the least costly one; a command ends only what is proved dead or lost.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence

from mps_exporter import humanize
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings.finding import (
    ANY_USER,
    KERNEL_LOG,
    PROCESS_OWNER,
    Action,
    Case,
    Cases,
    HostFacts,
    clients_of,
    end_clients,
    end_processes,
    may_be_ended,
    of_daemon,
    of_gpu,
    of_server,
    quoted_path,
    show_processes,
    shown_path,
    working,
)
from mps_exporter.humanize import capitalize, count, printable, processes, sentence
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.observations import ProcessFacts, ProcessView
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Server, Wait

HANGS = "every-cuda-program-hangs-and-the-control-tool-too"
WITHOUT_MPS = "cannot-find-mps-control-daemon-process"
_IN_CUINIT = "a-program-hangs-in-cuinit"
_START = "Its user can start it again (nvidia-cuda-mps-control -d)."
_IN_DRIVER = "shows whether it hangs in the driver (state D)"


@of_server(
    "critical",
    "A ghost server blocks its daemon",
    "It was sent a dead process, or had no file descriptor left: it accepts no process any more, "
    "not even one of its own user. As soon as another process connects, the daemon waits for the "
    "ghost forever, and every new CUDA process hangs.",
    alert="MpsGhostServer",
    summary="An MPS server accepts no client since it was sent a dead one; the next client hangs "
    "the daemon.",
    page=HANGS,
)
def ghost_server(host: HostFacts, daemon: ControlDaemon, server: Server) -> Cases:
    if not server.ghost:
        return
    text = "the daemon will hang as soon as another client connects."
    if hung := [one for one in server.clients if one not in working(server)]:
        those = processes([one.pid for one in hung]) or count(len(hung), "client")
        text = f"{those} got no context, and all later clients hang."
    elif daemon.state == "unresponsive":
        text = "the daemon hangs on it, and with it every new CUDA process."
    why = "accepts no client since it was sent a dead one, or had no file descriptor left"
    told = {(one.kind, one.server_pid): one.pids for one in daemon.incidents}
    if told.get(("ghost", server.pid)):
        why = "was started for clients that had died in the queue"
    text = f"{host.server(server)} {why}: {text}"
    yield Case(sentence(text), ghost_remedy(daemon, server), ghost_commands(daemon))


def ghost_remedy(daemon: ControlDaemon, server: Server) -> str:
    """Return how to end a ghost, or which clients to wait for first."""
    again = "run mps-exporter doctor again: it names what is left to end."
    if at_work := working(server):
        those = processes([one.pid for one in at_work]) or count(len(at_work), "client")
        lost = f"Wait for the end of {those}, at work on server {server.pid} and lost with it."
        return f"{lost} Do not restart the daemon. Then {again}"
    more = again
    if those := processes([one.pid for one in server.clients if may_be_ended(one)]):
        more = f"also end {those}: out of the queue, connected to that server, without a context."
    more = f" If the daemon does not answer {policy.GHOST_GRACE_SECONDS} s later, {more}"
    left = {one.pid for one in daemon.waits if not one.dead} - {one.pid for one in server.clients}
    waiting = processes(sorted(left)) or "what waits in the queue"
    more += f" Do not kill {waiting}: a dead queue entry makes the next ghost."
    seen = "that server. Its process is not visible (pgrep -af nvidia-cuda-mps-server lists all)"
    if may_be_ended(server):
        seen = f"server {server.pid} (with SIGKILL, after a look at its name) to free the queue"
    return f"End {seen}. Do not restart the daemon.{more}"


def ghost_commands(daemon: ControlDaemon) -> Iterator[Action]:
    """Yield commands that end ghosts, after a check of the name, and then their clients."""
    for server in daemon.servers:
        if server.ghost and may_be_ended(server):
            yield Action(
                f"ps -o args= -p {server.pid} | grep nvidia-cuda-mps-server && "
                f"kill -9 {server.pid}",
                "root, or the user of this server",
                "ends the ghost server; the daemon stays",
            )
            yield from end_clients(
                server.clients,
                "ends what is connected to the ghost, and has no context",
                f"if the daemon does not answer {policy.GHOST_GRACE_SECONDS} s later",
            )


@of_daemon(
    "critical",
    "A control daemon does not answer",
    "Every process that starts to use CUDA now hangs in cuInit.",
    alert="MpsControlDaemonUnresponsive",
    summary="An MPS control daemon hangs; CUDA programs that start for it hang, too.",
    page=HANGS,
)
def daemon_unresponsive(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.state == "unresponsive":
        hangs, remedy, actions = _way_out(daemon)
        name = shown_path(daemon.pipe_directory)
        yield Case(f"The MPS daemon {name} does not answer: {hangs}.", remedy, actions)


def halt_of(one: ProcessFacts | ProcessView) -> tuple[str, str, tuple[Action, ...]] | None:
    """Return what keeps a process from running, the remedy and the command; None if nothing."""
    if one.frozen_group:
        container = parse_cgroup(f"0::{one.frozen_group}").container_id or ""
        runtime, _, number = container.partition("://")
        command, effect = "", "thaws the container"
        own_group = one.frozen_group.removesuffix(".scope").endswith(number)  # not one below
        if runtime in ("docker", "podman") and own_group:
            command = f"{runtime} unpause {number[:12]}"
        elif path := quoted_path(f"{one.frozen_group}/cgroup.freeze"):
            command, effect = f"echo 0 > {path}", "thaws the control group"
        how = f"frozen, with its control group {shown_path(one.frozen_group)}"
        return how, "Thaw that group.", (Action(command, "root", effect),) if command else ()
    if one.state == "t":
        debugger = f"process {printable(one.tracer)}" if one.tracer else "a debugger"
        remedy = f"Let {debugger} continue it, or detach from it; SIGCONT has no effect."
        return f"stopped by {debugger}, which traces it (state t)", remedy, ()
    if one.state == "T":
        effect = "lets the stopped process go on"
        resume = Action(f"kill -CONT {one.pid}", PROCESS_OWNER, effect)
        return "stopped (state T)", f"Continue process {one.pid} (SIGCONT).", (resume,)
    return None


def _way_out(daemon: ControlDaemon) -> tuple[str, str, Iterable[Action]]:
    """Return a hang's cause, remedy, commands."""
    hangs, facts, last = "programs that start now hang", daemon.facts, daemon.handover
    halts = ((one.pid, halt) for one in facts.processes if (halt := halt_of(one)) is not None)
    halted = next(halts, None)
    ghost = next((server for server in daemon.servers if server.ghost), None)
    # The end of a ghost is enough, even if a server is stopped, but not if the daemon itself is.
    itself = facts.process is not None and facts.process.stopped
    if halted is not None and (ghost is None or itself):
        pid, (how, remedy, commands) = halted
        what = "it" if pid == daemon.pid else f"its server {pid}"
        return f"{what} is {how}; {hangs}", remedy, commands
    if ghost is not None:
        why = f"it hangs on its ghost server {ghost.pid}"
        return why, ghost_remedy(daemon, ghost), ghost_commands(daemon)
    if last is not None and last.server_pid is not None:
        # On H200s the daemon continued at once after the client's end (7 of 7).
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
        show_processes((one.pid for one in facts.processes), "shows what they are stuck in"),
    )


def _remedy_of_unknown_cause(daemon: ControlDaemon) -> str:
    seen = daemon.follows("control") and daemon.follows("server")
    if not seen or any(one.ghost is None for one in daemon.servers):
        return (
            "Not all of its logs or clients are seen, so whether a ghost blocks it is not known; "
            "it may also be draining, which looks the same (its control.log then has Cmd:quit, and "
            "it exits when its last client does). Ask root to run mps-exporter doctor."
        )
    last = daemon.handover.pid if daemon.handover is not None else 0
    sent = f" The last that it did was for process {last}." if last else ""
    clients = sum(server.clients_connected or 0 for server in daemon.servers)
    lost = f"its {count(clients, 'client')}" if clients else "its clients"
    return (
        f"None of its servers is stopped or a ghost, as far as can be seen.{sent} See what it and "
        "its servers are stuck in, and whether they have file descriptors left (mps-exporter "
        f"doctor, as root). The last resort is a restart of the daemon: {lost} will be lost."
    )


@of_daemon(
    "warning",
    "A queued process has died",
    "It still occupies its slot in the queue. When its turn comes the daemon starts a server "
    "for it that serves no process, and hangs on that server as soon as another process "
    "connects, including one that the same user started instead.",
    alert="MpsQueuedClientDead",
    summary="A client died in the MPS queue; after its turn the next client hangs the control "
    "daemon.",
    page=HANGS,
)
def queued_client_dead(host: HostFacts, daemon: ControlDaemon) -> Cases:
    if dead := [wait for wait in daemon.waits if wait.dead]:
        pids = capitalize(host.processes([one.pid for one in dead]) or "a process")
        yield Case(
            f"{pids} died while waiting in the queue of {shown_path(daemon.pipe_directory)}, and "
            f"still {'have queue entries' if len(dead) > 1 else 'has a queue entry'}: after "
            "an entry's turn the next client hangs the daemon.",
            f"Nothing is lost yet: tell the daemon's user ({host.user(daemon.uid)}), and do not "
            "restart it. When the server exits, the daemon starts one for "
            f"{host.user(dead[0].uid)} that serves no client: it is reported as a ghost, with the "
            "command that ends it, and then the queue continues. Until then a new process of this "
            "user would hang too.",
        )


@of_server(
    "critical",
    "A server is in FAULT",
    "A fatal GPU error was contained, but a victim has not exited: until it does, every new "
    "client is refused with error 807.",
    alert="MpsServerStuckInFault",
    summary="An MPS server cannot leave FAULT because a client does not exit; new clients are "
    "refused.",
    page="cuda-error-807-mps-server-not-ready",
)
def server_in_fault(host: HostFacts, daemon: ControlDaemon, server: Server) -> Cases:
    if server.ghost or server.state != "FAULT":
        return
    hit = _torn_down(server)
    until = "the clients that it hit have exited"
    remedy = (
        "Which clients it hit is not known: those get an error at their next CUDA call. Ask "
        "their users."
    )
    if hit:
        those = capitalize(host.processes([one.pid for one in hit]) or "they")
        until, them = "the client that it hit has exited", "it"
        if len(hit) > 1:
            until, them = f"the {len(hit)} clients that it hit have exited", "them"
        remedy = f"{those} cannot use the GPU any more: end only {them} (SIGTERM, then SIGKILL)."
    failed = (one for one in daemon.servers if one.state == "FAULT")
    yield Case(
        f"{capitalize(host.server(server))} is in FAULT after a fatal GPU error: it accepts no new "
        f"clients until {until}.",
        remedy,
        end_clients(
            (client for one in failed for client in _torn_down(one)),
            "ends the clients that the error hit; then the server recovers",
        ),
    )


def _torn_down(server: Server) -> list[Client]:
    return [one for one in server.clients if one.state == "torn_down"]


@of_gpu(
    "critical",
    "A GPU has fallen off the bus",
    "No program can use it, and programs that ran there are lost.",
    "End a ghost server, if any; drain the host (it waits for the lost programs, too); then reset.",
    alert="MpsGpuMissing",
    summary="A GPU that was present no longer responds.",
)
def gpu_lost(_: HostFacts, gpu: Gpu) -> Cases:
    if gpu.observation.lost:
        yield Case(f"GPU {gpu.index} ({gpu.uuid}) has fallen off the bus.", actions=KERNEL_LOG)


@of_daemon(
    "critical",
    "A control daemon is gone",
    "CUDA silently continues without MPS if it finds no daemon: without sharing, and without "
    "limits.",
    _START,
    alert="MpsControlDaemonDown",
    summary="An MPS control daemon is gone; new CUDA programs run without MPS and without its "
    "limits.",
    page=WITHOUT_MPS,
)
def daemon_absent(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.state == "absent" and _quit_time(daemon) is None:
        died = [one.at for one in daemon.incidents if one.kind == "daemon_died"]
        yield Case(
            f"No MPS daemon runs at {shown_path(daemon.pipe_directory)}: programs started for "
            "it use the GPU without MPS, and without its limits.",
            actions=start_daemon(daemon),
            since=died[-1] if died else None,
        )


@of_daemon(
    "info",
    "A control daemon has quit",
    "The daemon received quit. CUDA continues without MPS if it finds no daemon.",
    _START,
    page=WITHOUT_MPS,
)
def daemon_quit(host: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.state == "absent" and (quit_at := _quit_time(daemon)) is not None:
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} received quit and exited "
            f"{humanize.ago(host.age(quit_at))}: programs started for it use the GPU without MPS.",
            actions=start_daemon(daemon),
            since=quit_at,
        )


def _quit_time(daemon: ControlDaemon) -> float | None:
    """Return when a daemon quit, if that is its last incident; else None."""
    last = daemon.incidents[-1] if daemon.incidents else None
    return last.at if last is not None and last.kind == "daemon_quit" else None


def start_daemon(daemon: ControlDaemon) -> Iterator[Action]:
    """Yield commands that start an absent daemon like its last process, if all values are safe."""
    last = daemon.last if daemon.last is not None and not daemon.last.limited else daemon.facts
    seen = last.process.mps_environment if last.process is not None else None
    own = {"PIPE": daemon.pipe_directory, "LOG": daemon.log_directory}
    own = {f"CUDA_MPS_{kind}_DIRECTORY": path for kind, path in own.items()}
    values = {name: quoted_path(one) for name, one in {**own, **(seen or {}), **own}.items()}
    known = all(name.isidentifier() and one for name, one in values.items())
    if daemon.state != "absent" or daemon.facts.root or not known:
        return
    unit = parse_cgroup(last.process.cgroup).systemd_unit if last.process is not None else None
    if unit is not None and unit.endswith(".service"):
        yield Action(f"systemctl start {shlex.quote(unit)}", "root", "starts it, if this unit did")
    command = "".join(f"{name}={one} " for name, one in values.items())
    command += "nvidia-cuda-mps-control -d" + " -multiuser-server" * last.multiuser
    effect = "starts the daemon" + "; its other settings were not seen" * (seen is None)
    yield Action(command, "root, or the user who ran it before", effect)


@of_server(
    "warning",
    "A client is stuck",
    "Its CUDA context was not created, or was destroyed by a fatal GPU error: it cannot use "
    "the GPU, and occupies its slot on the server until it exits.",
    alert="MpsClientStuck",
    summary="An MPS client cannot use its GPU and does not exit.",
    page="a-client-is-connected-and-hangs",
)
def client_stuck(host: HostFacts, _: ControlDaemon, server: Server) -> Cases:
    if not server.ghost:
        creating = [one for one in server.clients if one.state == "creating_context"]
        yield from _stuck(host, server, creating, policy.MAX_CONTEXT_CREATION_SECONDS)
        yield from _stuck(host, server, _torn_down(server), 0)


def _stuck(host: HostFacts, server: Server, clients: Sequence[Client], seconds: float) -> Cases:
    """Yield a case about clients without a context for `seconds`; with 0, hit by a fault."""
    now = host.snapshot.taken_at
    stuck = [one for one in clients if host.age(one.state_since or now) >= seconds]
    if not stuck:
        return
    since = min(one.state_since or now for one in stuck)
    owner, age = host.server(server), humanize.age(host.age(since))
    what = f"whose context {owner} has not finished for {age}"
    remedy = (
        "In state D it hangs in the driver; server.log shows what its server did last. Ask its "
        "user to start it again if it does not continue."
    )
    actions = show_processes((one.pid for one in stuck), _IN_DRIVER)
    if not seconds:
        they, it, has = ("It", "it", "has") if len(stuck) == 1 else ("They", "them", "have")
        ago = f", {age} ago" if host.age(since) >= 1 else ""
        what = f"that a fatal GPU error on {owner} hit{ago}"
        remedy = (
            f"{they} cannot use the GPU any more, and new clients may be refused until "
            f"{they.lower()} {has} exited. End {it}, and start {it} again."
        )
        actions = end_clients(stuck, "ends clients that cannot use the GPU any more")
    those = humanize.join_some([host.client(one) for one in stuck])
    yield Case(f"{count(len(stuck), 'client')} {what}: {those}.", remedy, actions, since)


@of_server(
    "warning",
    "A client cannot map the memory of its server",
    "This server shares memory by a file in /dev/shm. A client with a /dev/shm of its own fails "
    "with error 205 (cudaErrorMapBufferObjectFailed); on old drivers it crashes.",
    "Start it again with the daemon's /dev/shm: docker run --ipc=host, hostIPC: true in its pod, "
    "or a mount of the same folder.",
    page="cuda-error-205-mapping-of-buffer-object-failed",
)
def shared_memory_not_mapped(host: HostFacts, _: ControlDaemon, server: Server) -> Cases:
    without = [one for one in server.clients if one.own_shared_memory and not one.contexts]
    if server.shares_by_file and without:
        those = humanize.join_some([host.client(one) for one in without])
        text = f"Server {server.pid} has a named memory region, which is not in the /dev/shm of"
        yield Case(f"{text} {those}.")


@of_server(
    "warning",
    "A client may have left GPU work behind",
    "A client that ends with GPU work in flight leaves it to the server. Where no other client "
    "is on the GPU, the next CUDA process fails with error 46 (cudaErrorDevicesUnavailable), "
    "and the one after it runs.",
    "If the next process fails with this error, restart it: the one after it runs. Before "
    "a client is killed, terminate it through its daemon: "
    "echo terminate_client SERVER PID | nvidia-cuda-mps-control.",
    runbook="MpsUnfinishedWork",
    page="cuda-error-46-devices-unavailable",
)
def possible_unfinished_work(host: HostFacts, _: ControlDaemon, server: Server) -> Cases:
    work = server.possible_unfinished_work
    if work is None or server.ghost or server.state == "FAULT":
        return
    author = capitalize(host.processes([work.pid]) or "a client")
    yield Case(
        f"{author} of {host.user(work.uid)} ended on {host.server(server)} and may have left "
        f"GPU work behind: its end took {humanize.duration(work.seconds)}. The next CUDA "
        "process on this server may fail with error 46 (cudaErrorDevicesUnavailable).",
        since=work.ended_at,
    )


@of_daemon(
    "warning",
    "Users wait for each other",
    "A control daemon runs one user's server at a time. Processes of other users wait inside "
    "cuInit, without a message and without a time limit.",
    alert="MpsUidWaitLong",
    summary="A user's CUDA programs have hung in cuInit for minutes, queued behind another user's "
    "MPS server.",
    page=_IN_CUINIT,
)
def several_users_one_daemon(host: HostFacts, daemon: ControlDaemon) -> Cases:
    alive = sorted((one for one in daemon.waits if not one.dead), key=lambda one: one.since)
    if not alive:
        return
    first = alive[0]
    holder = next((one for one in daemon.servers if one.uid == first.behind_uid), None)
    ghost = holder if holder is not None and holder.ghost else None
    idle = holder is None or (holder.clients_connected == 0 and not ghost)
    age = humanize.age(host.age(first.since))
    text = f"{host.user(first.uid)} has waited {age} {_behind(host, first, holder)}"
    if others := len(alive) - 1:
        text += f", and {count(others, 'more client waits', 'more clients wait')}"
    if first.overtaken_by and not (ghost or idle):
        clients = count(first.overtaken_by, "newer client")
        text += f". Since then {clients} got in first: it waits as long as more keep coming"
    if idle and daemon.state == "answering":
        text += ". Meanwhile no client is connected: the daemon has not yet replaced the server"
    yield Case(
        sentence(text),
        ghost_remedy(daemon, ghost)
        if ghost
        else _wait_remedy(host, daemon, alive, holder, idle=idle),
        _show_holders(daemon),
        first.since,
    )


def _behind(host: HostFacts, wait: Wait, holder: Server | None) -> str:
    if wait.behind_uid is None:
        return "behind another user's server"
    if holder is None:
        return f"behind {host.user(wait.behind_uid)}"
    return f"behind {f'the ghost server {holder.pid}' if holder.ghost else host.server(holder)}"


def _wait_remedy(
    host: HostFacts,
    daemon: ControlDaemon,
    alive: Sequence[Wait],
    holder: Server | None,
    *,
    idle: bool,
) -> str:
    waiting = host.processes([wait.pid for wait in alive]) or "a process that waits"
    clients = holder.clients if holder is not None else ()
    programs = host.processes([client.pid for client in clients]) or "the programs"
    if len(clients) > humanize.MAX_NAMED_PIDS:
        programs = f"{len(clients)} programs"
    first, other = host.user(alive[0].uid), host.user(alive[0].behind_uid)
    stop = "to start no more programs, and " if alive[0].overtaken_by else ""
    # The pause doubles as long as the server has clients.
    pause = daemon.handover_backoff_seconds if idle else None
    at_most = humanize.age(pause or policy.MAX_BACKOFF_SECONDS)
    served = (
        f"The daemon tries within {at_most} to replace the server."
        if idle
        else f"Ask {other} {stop}when {programs} will be done: the queue is served up to "
        f"{at_most} after the last client of {other} has left."
    )
    if before := alive[0].users_before:
        served += f" {count(before, 'other user')} came before {first}, and may be served first."
    if any(wait.dead for wait in daemon.waits):
        served = "When it is served is not known: a process died in the queue."
    return (
        f"Do not kill {waiting}: a dead queue entry hangs the daemon. {served} To avoid waits, "
        "give each user a daemon, or use -multiuser-server (a fatal error then ends all programs)."
    )


def _show_holders(daemon: ControlDaemon) -> Iterable[Action]:
    if any(server.ghost for server in daemon.servers):
        return ghost_commands(daemon)
    behind = {wait.behind_uid for wait in daemon.waits}
    pids = [one.pid for server in daemon.servers if server.uid in behind for one in server.clients]
    effect = "shows the programs that hold the GPU"
    if len(pids) > policy.MAX_COMMAND_PIDS and (uid := next(iter(behind))) is not None:
        return [Action(f"ps -o pid,stat,etime,args -u {uid}", ANY_USER, effect, heals=False)]
    return show_processes(pids, effect)


@of_server(
    "warning",
    "A server does not become ready",
    "Until it is ready its clients hang in cuInit; most servers are ready within a second.",
    "Its server.log shows where it is stuck; in state D it hangs in the driver.",
    alert="MpsServerStuckStarting",
    summary="An MPS server does not become ready; the programs waiting for it hang.",
    page=_IN_CUINIT,
)
def server_starting_long(host: HostFacts, daemon: ControlDaemon, server: Server) -> Cases:
    started = server.start_time_seconds
    if started is None or server.state != "INITIALIZING" or server.ghost:
        return
    if server.possible_unfinished_work is None and host.age(started) > policy.MAX_START_SECONDS:
        starting = (one.pid for one in daemon.servers if one.state == "INITIALIZING")
        age = humanize.age(host.age(started))
        yield Case(
            sentence(f"{host.server(server)} has been starting for {age}"),
            actions=show_processes(starting, _IN_DRIVER),
            since=started,
        )


@of_daemon(
    "warning",
    "A control daemon refuses queries",
    "It refuses queries, also on retry. The logs are still followed. A daemon that answers no "
    "queries at all looks the same.",
    "Run the exporter as root or as the daemon's user.",
    alert="MpsControlDaemonRefusing",
    summary="An MPS control daemon refuses the exporter's queries; its health is unknown.",
)
def daemon_refuses(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.state == "refused":
        yield Case(f"The MPS daemon {shown_path(daemon.pipe_directory)} refuses queries.")


@of_daemon(
    "warning",
    "A control daemon is draining",
    "It was asked to quit and waits for its clients to exit: new clients are not served.",
    "It exits when the last client does.",
    alert="MpsControlDaemonDraining",
    summary="An MPS control daemon was asked to quit and still waits for its clients.",
    page="quit-does-not-return",
)
def daemon_draining(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.state == "draining":
        pids = [client.pid for client in clients_of(daemon)]
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} was asked to quit and waits "
            "for its clients to exit; it accepts no new ones.",
            actions=show_processes(pids, "shows the clients that it waits for"),
        )
