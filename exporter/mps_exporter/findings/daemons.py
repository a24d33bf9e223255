"""GPUs and daemons that are gone, daemons that do not serve, servers, clients and waiting users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mps_exporter import humanize
from mps_exporter.findings import policy
from mps_exporter.findings.finding import (
    ANY_USER,
    KERNEL_LOG,
    Action,
    Case,
    Cases,
    HostFacts,
    end_clients,
    of_daemon,
    of_gpu,
    of_server,
    quoted_path,
    show_processes,
    shown_path,
)
from mps_exporter.findings.ghosts_and_hangs import ghost_commands, ghost_remedy
from mps_exporter.humanize import capitalize, count, processes, sentence
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Server, Wait

WITHOUT_MPS = "cannot-find-mps-control-daemon-process"
_IN_CUINIT = "a-program-hangs-in-cuinit"
_START = "Its user can start it again (nvidia-cuda-mps-control -d)."
_IN_DRIVER = "state D: it hangs in the driver"


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
        those = capitalize(processes([one.pid for one in hit]) or "they")
        until, them = "the client that it hit has exited", "it"
        if len(hit) > 1:
            until, them = f"the {len(hit)} clients that it hit have exited", "them"
        remedy = f"{those} cannot use the GPU any more: end {them}, and leave the others."
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
    alert="MpsGpuMissing",
    summary="A GPU that was present no longer responds.",
)
def gpu_lost(_: HostFacts, gpu: Gpu) -> Cases:
    if gpu.observation.lost:
        yield Case(
            f"GPU {gpu.index} ({gpu.uuid}) has fallen off the bus.",
            "Drain the host. Only a reset or a reboot may bring the GPU back.",
            KERNEL_LOG,
        )


@of_daemon(
    "critical",
    "A control daemon is gone",
    "CUDA silently continues without MPS if it finds no daemon: without sharing, and without "
    "limits.",
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
            _START,
            start_daemon(daemon),
            died[-1] if died else None,
        )


@of_daemon(
    "info",
    "A control daemon has quit",
    "The daemon received quit. CUDA continues without MPS if it finds no daemon.",
    page=WITHOUT_MPS,
)
def daemon_quit(host: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.state == "absent" and (quit_at := _quit_time(daemon)) is not None:
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} received quit and exited "
            f"{humanize.ago(host.age(quit_at))}: programs started for it use the GPU without MPS.",
            _START,
            start_daemon(daemon),
            quit_at,
        )


def _quit_time(daemon: ControlDaemon) -> float | None:
    """Return when a daemon quit; None if something is known to have happened to it since."""
    last = daemon.incidents[-1] if daemon.incidents else None
    return last.at if last is not None and last.kind == "daemon_quit" else None


def start_daemon(daemon: ControlDaemon) -> Iterator[Action]:
    pipe, log = quoted_path(daemon.pipe_directory), quoted_path(daemon.log_directory)
    if daemon.state == "absent" and pipe and log:
        yield Action(
            f"CUDA_MPS_PIPE_DIRECTORY={pipe} CUDA_MPS_LOG_DIRECTORY={log} "
            "nvidia-cuda-mps-control -d",
            "root, or the user who ran it before",
            "starts the daemon",
        )


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
    """Yield the clients that have been without a context for this time, or that a fault hit (0)."""
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
    "A client may have left GPU work behind",
    "A client that ends with GPU work in flight leaves it to the server. Where no other client "
    "is on the GPU, the next CUDA process fails with error 46 (cudaErrorDevicesUnavailable), "
    "and the one after it runs.",
    runbook="MpsUnfinishedWork",
    page="cuda-error-46-devices-unavailable",
)
def possible_unfinished_work(host: HostFacts, _: ControlDaemon, server: Server) -> Cases:
    work = server.possible_unfinished_work
    if work is None or server.ghost or server.state == "FAULT":
        return
    author = capitalize(processes([work.pid]) or "a client")
    yield Case(
        f"{author} of {host.user(work.uid)} ended on {host.server(server)} and may have left "
        f"GPU work behind: its end took {humanize.duration(work.seconds)}. The next CUDA "
        "process on this server may fail with error 46 (cudaErrorDevicesUnavailable).",
        "If the next process fails with this error, restart it: the one after it runs. Before "
        "a client is killed, terminate it through its daemon: "
        "echo terminate_client SERVER PID | nvidia-cuda-mps-control.",
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
    if len(alive) == 2:
        text += ", and one more client waits"
    elif len(alive) > 2:
        text += f", and {len(alive) - 1} more clients wait"
    if idle and daemon.state == "answering":
        text += ". Meanwhile no client is connected: the daemon has not yet replaced the server"
    yield Case(
        sentence(text),
        ghost_remedy(ghost) if ghost else _wait_remedy(host, daemon, alive, holder, idle=idle),
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
    waiting = processes([wait.pid for wait in alive]) or "a process that waits"
    clients = holder.clients if holder is not None else ()
    programs = processes([client.pid for client in clients]) or "the programs"
    if len(clients) > policy.MAX_NAMED_PROGRAMS:
        programs = f"{len(clients)} programs"
    first, other = host.user(alive[0].uid), host.user(alive[0].behind_uid)
    # The pause doubles as long as the server has clients.
    pause = daemon.handover_backoff_seconds if idle else None
    at_most = humanize.age(pause or policy.MAX_BACKOFF_SECONDS)
    served = (
        f"{capitalize(first)} is served within {at_most}."
        if idle
        else f"Ask {other} when {programs} will be done: {first} is served up to {at_most} after "
        f"the last client of {other} has left."
    )
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
            "Its server.log shows where it is stuck; in state D it hangs in the driver.",
            show_processes(starting, _IN_DRIVER),
            started,
        )


@of_daemon(
    "warning",
    "A control daemon refuses queries",
    "It refuses queries, also on retry. The logs are still followed. A daemon that answers no "
    "queries at all looks the same.",
    alert="MpsControlDaemonRefusing",
    summary="An MPS control daemon refuses the exporter's queries; its health is unknown.",
)
def daemon_refuses(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.state == "refused":
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} refuses queries.",
            "Run the exporter as root or as the daemon's user.",
        )


@of_daemon(
    "warning",
    "A control daemon is draining",
    "It was asked to quit and waits for its clients to exit: new clients are not served.",
    alert="MpsControlDaemonDraining",
    summary="An MPS control daemon was asked to quit and still waits for its clients.",
    page="quit-does-not-return",
)
def daemon_draining(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.state == "draining":
        pids = [client.pid for server in daemon.servers for client in server.clients]
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} was asked to quit and waits "
            "for its clients to exit; it accepts no new ones.",
            "It exits when the last client does.",
            show_processes(pids, "shows the clients that it waits for"),
        )
