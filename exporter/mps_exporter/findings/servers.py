"""What is wrong with a server, its clients, and the users who wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mps_exporter import humanize
from mps_exporter.findings.finding import Case, HostFacts, of_daemon, of_server
from mps_exporter.findings.hangs import ghost_commands, ghost_remedy
from mps_exporter.findings.safe_commands import (
    ANY_USER,
    MAX_PIDS,
    Action,
    end_clients,
    show_processes,
)
from mps_exporter.snapshot import ControlDaemon, Server, Wait

STARTING_LONG_SECONDS = 10.0
"""Age of a server that starts too slowly."""

MAX_BACKOFF_SECONDS = 51.2
"""The longest pause before the daemon tries again to replace a server that had clients (580)."""

CREATING_LONG_SECONDS = 30.0
"""Each of the 257 contexts in our recordings was ACTIVE within 2 ms."""

MAX_NAMED_PROGRAMS = 3
"""Maximum number of programs that a remedy names; of more it gives the number."""

_IN_DRIVER = "state D: it hangs in the driver"


@of_server(
    "critical",
    "A server is in FAULT",
    "A fatal GPU error was contained, but a victim has not exited: until it does, every new "
    "client is refused with error 807.",
    alert="MpsServerStuckInFault",
    page="cuda-error-807-mps-server-not-ready",
)
def server_in_fault(host: HostFacts, daemon: ControlDaemon, server: Server) -> Iterator[Case]:
    if server.ghost or server.state != "FAULT":
        return
    hit = [one for one in server.clients if one.state == "torn_down"]
    until = "the clients that it hit have exited"
    remedy = (
        "Which clients it hit is not known: those get an error at their next CUDA call. Ask "
        "their users."
    )
    if hit:
        those = humanize.capitalize(humanize.processes([one.pid for one in hit]) or "they")
        until = "the client that it hit has exited"
        if len(hit) > 1:
            until = f"the {len(hit)} clients that it hit have exited"
        them = "it" if len(hit) == 1 else "them"
        remedy = f"{those} cannot use the GPU any more: end {them}, and leave the others."
    failed = [one for one in daemon.servers if one.state == "FAULT"]
    yield Case(
        f"{humanize.capitalize(host.server(server))} is in FAULT after a fatal GPU error: it "
        f"accepts no new clients until {until}.",
        remedy,
        end_clients(
            (one for s in failed for one in s.clients if one.state == "torn_down"),
            "ends the clients that the error hit; then the server recovers",
        ),
    )


@of_server(
    "warning",
    "A client is stuck",
    "Its CUDA context was not created, or was destroyed by a fatal GPU error: it cannot use "
    "the GPU, and occupies its slot on the server until it exits.",
    alert="MpsClientStuck",
    page="a-client-is-connected-and-hangs",
)
def client_stuck(host: HostFacts, _: ControlDaemon, server: Server) -> Iterator[Case]:
    if not server.ghost:
        for state, seconds in (("creating_context", CREATING_LONG_SECONDS), ("torn_down", 0)):
            yield from _stuck(host, server, state, seconds)


def _stuck(host: HostFacts, server: Server, state: str, seconds: float) -> Iterator[Case]:
    now = host.snapshot.taken_at
    stuck = [
        one
        for one in server.clients
        if one.state == state and host.age(one.state_since or now) >= seconds
    ]
    if not stuck:
        return
    since = min(one.state_since or now for one in stuck)
    owner, age = host.server(server), humanize.age(host.age(since))
    actions: Iterable[Action]
    if state == "creating_context":
        what = f"whose context {owner} has not finished for {age}"
        remedy = (
            "In state D it hangs in the driver; server.log shows what its server did last. Ask its "
            "user to start it again if it does not continue."
        )
        actions = show_processes((one.pid for one in stuck), _IN_DRIVER)
    else:
        it, it_has = ("it", "it has") if len(stuck) == 1 else ("them", "they have")
        ago = f", {age} ago" if host.age(since) >= 1 else ""
        what = f"that a fatal GPU error on {owner} hit{ago}"
        remedy = (
            f"{'It' if len(stuck) == 1 else 'They'} cannot use the GPU any more, and new clients "
            f"may be refused until {it_has} exited. End {it}, and start {it} again."
        )
        actions = end_clients(stuck, "ends clients that cannot use the GPU any more")
    those = humanize.join_some([host.client(one) for one in stuck])
    text = f"{humanize.count(len(stuck), 'client')} {what}: {those}."
    yield Case(text, remedy, actions, since)


@of_server(
    "warning",
    "A client may have left GPU work behind",
    "A client that ends with GPU work in flight leaves it to the server. Where no other client "
    "is on the GPU, the next CUDA process fails with error 46 (cudaErrorDevicesUnavailable), "
    "and the one after it runs.",
    alert="MpsUnfinishedWork",
    page="cuda-error-46-devices-unavailable",
)
def possible_unfinished_work(host: HostFacts, _: ControlDaemon, server: Server) -> Iterator[Case]:
    work = server.possible_unfinished_work
    if work is None or server.ghost or server.state == "FAULT":
        return
    author = humanize.capitalize(humanize.processes([work.pid]) or "a client")
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
    page="a-program-hangs-in-cuinit",
)
def several_users_one_daemon(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
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
        humanize.sentence(text),
        ghost_remedy(ghost) if ghost else _wait_remedy(host, daemon, alive, holder, idle=idle),
        _show_holders(daemon),
        first.since,
    )


def _behind(host: HostFacts, wait: Wait, holder: Server | None) -> str:
    if wait.behind_uid is None:
        return "behind another user's server"
    if holder is None:
        return f"behind {host.user(wait.behind_uid)}"
    return (
        f"behind the ghost server {holder.pid}" if holder.ghost else f"behind {host.server(holder)}"
    )


def _wait_remedy(
    host: HostFacts,
    daemon: ControlDaemon,
    alive: Sequence[Wait],
    holder: Server | None,
    *,
    idle: bool,
) -> str:
    waiting = humanize.processes([wait.pid for wait in alive]) or "a process that waits"
    clients = holder.clients if holder is not None else ()
    programs = humanize.processes([client.pid for client in clients]) or "the programs"
    if len(clients) > MAX_NAMED_PROGRAMS:
        programs = f"{len(clients)} programs"
    first, other = host.user(alive[0].uid), host.user(alive[0].behind_uid)
    # The pause doubles as long as the server has clients.
    pause = daemon.handover_backoff_seconds if idle else None
    at_most = humanize.age(pause or MAX_BACKOFF_SECONDS)
    served = (
        f"{humanize.capitalize(first)} is served within {at_most}."
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
    pids = [c.pid for s in daemon.servers if s.uid in behind for c in s.clients]
    effect = "shows the programs that hold the GPU"
    if len(pids) > MAX_PIDS and (uid := next(iter(behind))) is not None:
        return [Action(f"ps -o pid,stat,etime,args -u {uid}", ANY_USER, effect, heals=False)]
    return show_processes(pids, effect)


@of_server(
    "warning",
    "A server does not become ready",
    "Until it is ready its clients hang in cuInit; most servers are ready within a second.",
    alert="MpsServerStuckStarting",
    page="a-program-hangs-in-cuinit",
)
def server_starting_long(host: HostFacts, daemon: ControlDaemon, server: Server) -> Iterator[Case]:
    started = server.start_time_seconds
    if (
        started is None
        or server.state != "INITIALIZING"
        or host.age(started) <= STARTING_LONG_SECONDS
    ):
        return
    if server.ghost or server.possible_unfinished_work is not None:
        return
    starting = (one.pid for one in daemon.servers if one.state == "INITIALIZING")
    age = humanize.age(host.age(started))
    yield Case(
        humanize.sentence(f"{host.server(server)} has been starting for {age}"),
        "Its server.log shows where it is stuck; in state D it hangs in the driver.",
        show_processes(starting, _IN_DRIVER),
        started,
    )
