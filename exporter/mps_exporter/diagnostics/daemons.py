"""What is wrong with a control daemon, its servers, its clients, its queue and its logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from mps_exporter import humanize
from mps_exporter.diagnostics import shares, visibility
from mps_exporter.diagnostics.finding import Finding, Texts
from mps_exporter.diagnostics.finding_titles import ADVICE
from mps_exporter.diagnostics.ghost_server import ghost_remedy, ghost_texts, server_of_user
from mps_exporter.diagnostics.partitions import partition_findings
from mps_exporter.diagnostics.safe_commands import Action, end_clients, show_processes
from mps_exporter.diagnostics.unresponsive import unresponsive_texts
from mps_exporter.humanize import UserNameLookup
from mps_exporter.snapshot import Client, ControlDaemon, PossibleUnfinishedWork, Server, Wait

LOG_LARGE_BYTES = 1 << 30
"""The logs are not rotated automatically; a GiB is weeks of a busy host."""

STARTING_LONG_SECONDS = 10.0

MAX_BACKOFF_SECONDS = 51.2
"""The longest pause before the daemon tries again to replace a server that had clients (580)."""

CREATING_LONG_SECONDS = 30.0
"""Each of the 257 contexts in our recordings was ACTIVE within 2 ms."""

_FREES = "ends clients that cannot use the GPU any more"
_DRIVER = "state D: it hangs in the driver"

AddFinding = Callable[..., Finding]
"""(advice, texts, since=..., offered=...) of one daemon."""


def daemon_findings(
    daemon: ControlDaemon, now: float, name_of: UserNameLookup
) -> Iterator[Finding]:
    def found(
        name: str, texts: Texts, since: float | None = None, offered: tuple[Action, ...] = ()
    ) -> Finding:
        pipe, limited = daemon.pipe_directory, daemon.limited
        return Finding(ADVICE[name], texts, pipe, since=since, offered=offered, limited=limited)

    name = humanize.printable(daemon.pipe_directory, 400)
    for server in daemon.servers:
        yield from _server_findings(daemon, server, found, name_of, now)
    yield from _state(daemon, name, found, now)
    yield from _queue(daemon, name, found, name_of, now)
    clients = [client for server in daemon.servers for client in server.clients]
    yield from _limit_findings(clients, found, name_of)
    yield from partition_findings(daemon, name_of)
    yield from shares.share_findings(daemon, clients, found, name_of)
    for log in daemon.logs:
        if log.size_bytes is not None and log.size_bytes > LOG_LARGE_BYTES:
            yield found("log_large", partial(_large_texts, log.path, log.size_bytes))
    yield from visibility.daemon_visibility_findings(daemon, name, found)


def _large_texts(path: str, size_bytes: int) -> tuple[str, str]:
    return (
        f"{humanize.printable(path, 400)} has {humanize.memory(size_bytes)}.",
        "Empty it in place, as its user (truncate). Then set up logrotate with copytruncate.",
    )


def _state(daemon: ControlDaemon, name: str, found: AddFinding, now: float) -> Iterator[Finding]:
    if daemon.state == "unresponsive":
        yield found("daemon_unresponsive", lambda: unresponsive_texts(daemon, name))
    elif daemon.state == "absent" and (quit_at := _quit_time(daemon)) is not None:
        yield found(
            "daemon_quit",
            lambda: (
                f"The MPS daemon {name} received quit and exited {humanize.ago(now - quit_at)}: "
                "programs started for it use the GPU without MPS.",
                "Its user can start it again (nvidia-cuda-mps-control -d).",
            ),
            since=quit_at,
        )
    elif daemon.state == "absent":
        yield found(
            "daemon_absent",
            lambda: (
                f"No MPS daemon runs at {name}: programs started for it use the GPU without MPS, "
                "and without its limits.",
                "Its user can start it again (nvidia-cuda-mps-control -d).",
            ),
            since=_death_time(daemon),
        )
    elif daemon.state == "refused":
        yield found(
            "daemon_refuses",
            lambda: (
                f"The MPS daemon {name} refuses queries.",
                "Run the exporter as root or as the daemon's user.",
            ),
        )
    elif daemon.state == "draining":
        yield found(
            "daemon_draining",
            lambda: (
                f"The MPS daemon {name} was asked to quit and waits for its clients to exit; it "
                "accepts no new ones.",
                "It exits when the last client does.",
            ),
        )


def _quit_time(daemon: ControlDaemon) -> float | None:
    """When it quit, if that is the last that is known of it."""
    last = daemon.incidents[-1] if daemon.incidents else None
    return last.at if last is not None and last.kind == "daemon_quit" else None


def _death_time(daemon: ControlDaemon) -> float | None:
    died = [one.at for one in daemon.incidents if one.kind == "daemon_died"]
    return died[-1] if died else None


def _server_findings(
    daemon: ControlDaemon, server: Server, found: AddFinding, name_of: UserNameLookup, now: float
) -> Iterator[Finding]:
    if server.ghost:
        yield found("ghost_server", lambda: ghost_texts(daemon, server, name_of))
        return
    if server.state == "FAULT":
        yield found("server_in_fault", lambda: _fault_texts(server, name_of))
    elif (work := server.possible_unfinished_work) is not None:
        yield found(
            "possible_unfinished_work",
            lambda: _unfinished_work_texts(server, work, name_of),
            since=work.ended_at,
        )
    elif server.state == "INITIALIZING" and (started := server.start_time_seconds) is not None:
        age = now - started
        if age > STARTING_LONG_SECONDS:
            yield found(
                "server_starting_long",
                lambda: (
                    humanize.sentence(
                        f"{server_of_user(server, name_of)} has been starting for "
                        f"{humanize.age(age)}"
                    ),
                    "Its server.log shows where it is stuck; in state D it hangs in the driver.",
                ),
                since=started,
            )
    yield from _stuck_findings(server, found, name_of, now)


def _fault_texts(server: Server, name_of: UserNameLookup) -> tuple[str, str]:
    hit = [client.pid for client in server.clients if client.state == "torn_down"]
    until = "the clients that it hit have exited"
    remedy = (
        "Which clients it hit is not known: those get an error at their next CUDA call. Ask their "
        "users."
    )
    if hit:
        those = humanize.processes(hit) or "they"
        until = "the client that it hit has exited"
        if len(hit) > 1:
            until = f"the {len(hit)} clients that it hit have exited"
        cannot = f"{humanize.capitalize(those)} cannot use the GPU any more"
        remedy = f"{cannot}: end {'it' if len(hit) == 1 else 'them'}, and leave the others."
    return (
        f"{humanize.capitalize(server_of_user(server, name_of))} is in FAULT after a fatal GPU "
        f"error: it accepts no new clients until {until}.",
        remedy,
    )


def _unfinished_work_texts(
    server: Server, work: PossibleUnfinishedWork, name_of: UserNameLookup
) -> tuple[str, str]:
    author = humanize.capitalize(humanize.processes([work.pid]) or "a client")
    return (
        f"{author} of {name_of(work.uid)} ended on {name_of(server.uid)}'s server {server.pid} and "
        f"may have left GPU work behind: its end took {humanize.duration(work.seconds)}. The next "
        "CUDA process on this server may fail with error 46 (cudaErrorDevicesUnavailable).",
        "If the next process fails with this error, restart it: the one after it runs. Before a "
        "client is killed, terminate it through its daemon: "
        "echo terminate_client SERVER PID | nvidia-cuda-mps-control.",
    )


def _stuck_findings(
    server: Server, found: AddFinding, name_of: UserNameLookup, now: float
) -> Iterator[Finding]:
    """Clients that cannot use the GPU, and stay."""
    for state, seconds in (("creating_context", CREATING_LONG_SECONDS), ("torn_down", 0.0)):
        stuck = [
            client
            for client in server.clients
            if client.state == state and now - (client.state_since or now) >= seconds
        ]
        if stuck:
            since = min(client.state_since or now for client in stuck)
            texts = partial(_stuck_texts, server, state, stuck, now - since, name_of)
            offered = (
                end_clients(stuck, _FREES)
                if state == "torn_down"
                else show_processes((one.pid for one in stuck), _DRIVER)
            )
            yield found("client_stuck", texts, since=since, offered=tuple(offered))


def _stuck_texts(
    server: Server, state: str, stuck: Sequence[Client], age: float, name_of: UserNameLookup
) -> tuple[str, str]:
    owner, one = server_of_user(server, name_of), len(stuck) == 1
    if state == "creating_context":
        what = f"whose context {owner} has not finished"
        remedy = (
            "In state D it hangs in the driver; server.log shows what its server did last. Ask its "
            "user to start it again if it does not continue."
        )
    else:
        what = f"that a fatal GPU error on {owner} hit"
        remedy = (
            f"{'It' if one else 'They'} cannot use the GPU any more, and new clients may be "
            f"refused until {'it has' if one else 'they have'} exited. End "
            f"{'it' if one else 'them'}, and start {'it' if one else 'them'} again."
        )
    since = f", {humanize.age(age)} ago" if age >= 1 and state == "torn_down" else ""
    since = f" for {humanize.age(age)}" if state == "creating_context" else since
    return (
        f"{humanize.count(len(stuck), 'client')} {what}{since}: "
        f"{humanize.join_some([_client_of_user(client, name_of) for client in stuck])}.",
        remedy,
    )


def _queue(
    daemon: ControlDaemon, name: str, found: AddFinding, name_of: UserNameLookup, now: float
) -> Iterator[Finding]:
    dead = [wait for wait in daemon.waits if wait.dead]
    if dead:
        yield found("queued_client_dead", lambda: _dead_texts(dead, name, name_of))
    alive = sorted((wait for wait in daemon.waits if not wait.dead), key=lambda wait: wait.since)
    if alive:
        yield found(
            "several_users_one_daemon",
            lambda: _wait_texts(daemon, alive, name_of, now),
            since=alive[0].since,
        )


def _dead_texts(dead: Sequence[Wait], name: str, name_of: UserNameLookup) -> tuple[str, str]:
    pids = humanize.capitalize(humanize.processes([wait.pid for wait in dead]) or "a process")
    return (
        f"{pids} died while waiting in the queue of {name}, and still "
        f"{'have queue entries' if len(dead) > 1 else 'has a queue entry'}: when the turn comes, "
        "the daemon hangs.",
        "Nothing is lost yet; do not restart the daemon. When the running server exits, the daemon "
        f"starts a server for {name_of(dead[0].uid)} that serves no client: it is reported as a "
        "ghost, with the command that ends it, and then the queue continues. Until then a new "
        "process of this user would hang too.",
    )


def _wait_texts(
    daemon: ControlDaemon, alive: Sequence[Wait], name_of: UserNameLookup, now: float
) -> tuple[str, str]:
    first = alive[0]
    holder = next((one for one in daemon.servers if one.uid == first.behind_uid), None)
    if first.behind_uid is None:
        behind = "behind another user's server"
    elif holder is not None:
        of = "the ghost" if holder.ghost else f"{name_of(first.behind_uid)}'s"
        behind = f"behind {of} server {holder.pid}"
    else:
        behind = f"behind {name_of(first.behind_uid)}"
    text = f"{name_of(first.uid)} has waited {humanize.age(now - first.since)} {behind}"
    if len(alive) == 2:
        text += ", and one more client waits"
    elif len(alive) > 2:
        text += f", and {len(alive) - 1} more clients wait"
    idle = holder is None or (holder.clients_connected == 0 and not holder.ghost)
    if idle and daemon.state == "answering":
        text += ". Meanwhile no client is connected: the daemon has not yet replaced the server"
    if holder is not None and holder.ghost:
        return humanize.sentence(text), ghost_remedy(holder)
    return humanize.sentence(text), _wait_remedy(daemon, alive, holder, name_of, idle=idle)


def _wait_remedy(
    daemon: ControlDaemon,
    alive: Sequence[Wait],
    holder: Server | None,
    name_of: UserNameLookup,
    *,
    idle: bool,
) -> str:
    waiting = humanize.processes([wait.pid for wait in alive]) or "a process that waits"
    clients = holder.clients if holder is not None else ()
    programs = humanize.processes([client.pid for client in clients]) or "the programs"
    first, other = name_of(alive[0].uid), name_of(alive[0].behind_uid)
    # The pause doubles as long as the server has clients.
    pause = daemon.handover_backoff_seconds if idle else None
    at_most = f"{humanize.age(pause or MAX_BACKOFF_SECONDS)}"
    served = (
        f"{humanize.capitalize(first)} is served within {at_most}."
        if idle
        else f"Ask {other} when {programs} will be done: {first} is served when the last client of "
        f"{other} has left, and up to {at_most} after."
    )
    return (
        f"Do not kill {waiting}: a dead entry in the queue hangs the daemon. {served} To avoid "
        "such waits, give each user a daemon (with its own CUDA_MPS_PIPE_DIRECTORY), or run one "
        "daemon as root with -multiuser-server: that puts all users on one server, where a fatal "
        "error of one program takes all others down."
    )


def _limit_findings(
    clients: Sequence[Client], found: AddFinding, name_of: UserNameLookup
) -> Iterator[Finding]:
    percentages = [
        (client, client.percentage_ignored)
        for client in clients
        if client.percentage_ignored is not None
    ]
    if percentages:
        yield found(
            "percentage_ignored",
            lambda: (
                "CUDA ignores the CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of "
                f"{_clients_with(percentages, name_of)}.",
                "Set a number above 0 and up to 100, and restart the process.",
            ),
        )
    memory = [
        (client, client.memory_limit_ignored)
        for client in clients
        if client.memory_limit_ignored is not None
    ]
    if memory:
        yield found(
            "memory_limit_ignored",
            lambda: (
                "CUDA ignores the CUDA_MPS_PINNED_DEVICE_MEM_LIMIT of "
                f"{_clients_with(memory, name_of)}.",
                "Name GPUs by UUID (nvidia-smi -L), and only those that the process sees: its "
                "CUDA_VISIBLE_DEVICES. Then restart the process.",
            ),
        )


def _clients_with(ignored: Iterable[tuple[Client, str]], name_of: UserNameLookup) -> str:
    return humanize.join_some(
        [
            f"{_client_of_user(client, name_of)} with {humanize.printable(repr(value))}"
            for client, value in ignored
        ]
    )


def _client_of_user(client: Client, name_of: UserNameLookup) -> str:
    return humanize.process(client.pid, client.command, name_of(client.uid))
