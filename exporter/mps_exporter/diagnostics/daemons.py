"""What is wrong with a control daemon, its servers, its clients, its queue and its logs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from mps_exporter import humanize
from mps_exporter.diagnostics import shares, visibility
from mps_exporter.diagnostics.finding import Finding, Texts
from mps_exporter.diagnostics.finding_titles import ADVICE
from mps_exporter.diagnostics.ghost_server import ghost_remedy, ghost_texts, server_of_user
from mps_exporter.diagnostics.partitions import partition_findings
from mps_exporter.diagnostics.safe_commands import joined_pids, may_be_ended
from mps_exporter.humanize import UserNameLookup
from mps_exporter.snapshot import Client, ControlDaemon, PossibleUnfinishedWork, Server, Wait

LOG_LARGE_BYTES = 1 << 30
"""The logs are not rotated automatically; a GiB is weeks of a busy host."""

STARTING_LONG_SECONDS = 10.0

CREATING_LONG_SECONDS = 30.0
"""Each of the 257 contexts in our recordings was ACTIVE within 2 ms."""

AddFinding = Callable[..., Finding]
"""(advice, texts, since=...) of one daemon."""


def daemon_findings(
    daemon: ControlDaemon, now: float, name_of: UserNameLookup
) -> Iterator[Finding]:
    """All findings of one daemon."""

    def found(name: str, texts: Texts, since: float | None = None) -> Finding:
        return Finding(ADVICE[name], texts, daemon=daemon.pipe_directory, since=since)

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
            yield found("log_large", partial(_large_texts, daemon, log.path, log.size_bytes))
    yield from visibility.daemon_visibility_findings(daemon, name, found)


def _large_texts(daemon: ControlDaemon, path: str, size_bytes: int) -> tuple[str, str]:
    shown = humanize.printable(path, 4096)
    command = ""
    if shown == path:
        # As its user: root would truncate whatever a link leads to by then.
        user = f"sudo -u '#{daemon.facts.user}' " if daemon.facts and daemon.facts.user else ""
        command = f": {user}truncate -s 0 {shlex.quote(path)}"
    return (
        f"{humanize.printable(path, 400)} has {humanize.memory(size_bytes)}.",
        f"Empty it in place{command}. Then set up logrotate with copytruncate.",
    )


def _state(daemon: ControlDaemon, name: str, found: AddFinding, now: float) -> Iterator[Finding]:
    if daemon.state == "unresponsive":
        yield found("daemon_unresponsive", lambda: _unresponsive_texts(daemon, name))
    elif daemon.state == "absent" and (quit_at := _quit_time(daemon)) is not None:
        yield found(
            "daemon_quit",
            lambda: (
                f"The MPS daemon {name} received quit and exited {humanize.ago(now - quit_at)}: "
                "programs started for it use the GPU without MPS.",
                "Start it with nvidia-cuda-mps-control -d when it is needed again.",
            ),
            since=quit_at,
        )
    elif daemon.state == "absent":
        yield found(
            "daemon_absent",
            lambda: (
                f"No MPS daemon runs at {name}: programs started for it use the GPU without MPS, "
                "and without its limits.",
                "Start it with nvidia-cuda-mps-control -d.",
            ),
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


def _unresponsive_texts(daemon: ControlDaemon, name: str) -> tuple[str, str]:
    ghost = next((server.pid for server in daemon.servers if server.ghost), None)
    hangs = (
        "programs that start now hang" if ghost is None else f"it hangs on its ghost server {ghost}"
    )
    last = daemon.handover
    if ghost is None and last is not None and last.server_pid is not None:
        hangs = (
            f"it waits for process {last.pid}, which it sent to server {last.server_pid}, and that "
            "has ended; programs that start now hang"
        )
    return f"The MPS daemon {name} does not answer: {hangs}.", _free(daemon)


def _free(daemon: ControlDaemon) -> str:
    """What frees a daemon that does not answer: of what is seen, that which costs least."""
    control = daemon.facts.process if daemon.facts is not None else None
    servers = daemon.facts.servers if daemon.facts is not None else ()
    if control is not None and control.stopped:
        return f"The daemon itself is stopped: continue it (kill -CONT {control.pid})."
    if (ghost := next((one for one in daemon.servers if one.ghost), None)) is not None:
        return ghost_remedy(ghost)
    last = daemon.handover
    if last is not None and last.server_pid is not None:
        # On H200s it continued at once, 7 times of 7, and noted the end of its server.
        return (
            f"End process {last.pid} (kill {last.pid}): the daemon then continues, and starts a "
            "server for the next client. Do not restart the daemon."
        )
    if stopped := joined_pids(server.pid for server in servers if server.stopped):
        return f"Its server {stopped} is stopped: continue it (kill -CONT {stopped})."
    if daemon.resumed:
        return "It was stopped, and was continued since: its next answer shows whether it works."
    last_client = ""
    if last is not None:
        last_client = (
            f" Its control.log ends with process {last.pid}, which it sent to its server: end that "
            f"process first (kill {last.pid})."
        )
    everything = joined_pids(one.pid for one in (control, *servers) if one is not None)
    return (
        f"None of its servers is stopped or a ghost, as far as can be seen.{last_client} If this "
        f"persists, kill it and its server ({f'kill -9 {everything}' if everything else 'kill -9'})"
        f", and restart it; their clients are lost.{_doubt(daemon)}"
    )


def _doubt(daemon: ControlDaemon) -> str:
    if daemon.follows("control"):
        return ""
    return (
        " It may also be draining, which looks the same: then its control.log, which the exporter "
        "cannot read, has Cmd:quit, and it exits when its last client does."
    )


def _quit_time(daemon: ControlDaemon) -> float | None:
    """When it quit, if that is the last that is known of it."""
    last = daemon.incidents[-1] if daemon.incidents else None
    return last.at if last is not None and last.kind == "daemon_quit" else None


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
                    f"{server_of_user(server, name_of)} has been starting for {humanize.age(age)}.",
                    "Its server.log shows where it is stuck; in state D (ps -o stat= -p "
                    f"{server.pid}) it hangs in the driver.",
                ),
                since=started,
            )
    yield from _stuck_findings(server, found, name_of, now)


def _fault_texts(server: Server, name_of: UserNameLookup) -> tuple[str, str]:
    left = server.clients_connected
    clients = "its client has" if left == 1 else "its clients have"
    if left is not None and left > 1:
        clients = f"its {left} clients have"
    torn = [client for client in server.clients if client.state == "torn_down"]
    pids = joined_pids(client.pid for client in torn or server.clients if may_be_ended(client))
    return (
        f"{server_of_user(server, name_of)} is in FAULT after a fatal GPU error: it accepts no "
        f"new clients until {clients} exited.",
        f"End the remaining clients{f' (kill {pids})' if pids else ''}; they cannot use the GPU "
        "any more.",
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
        f"echo terminate_client {server.pid} PID | nvidia-cuda-mps-control.",
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
            yield found("client_stuck", texts, since=since)


def _stuck_texts(
    server: Server, state: str, stuck: Sequence[Client], age: float, name_of: UserNameLookup
) -> tuple[str, str]:
    owner = server_of_user(server, name_of)
    if state == "creating_context":
        what = f"whose context {owner} has not finished"
        remedy = (
            "In state D (ps -o stat= -p PID) it hangs in the driver; server.log shows what its "
            "server did last. If it does not continue, end it"
        )
    else:
        what = f"that a fatal GPU error on {owner} hit"
        remedy = (
            "It cannot use the GPU any more, and new clients may be refused until it has exited. "
            "End it"
        )
    pids = joined_pids(client.pid for client in stuck if may_be_ended(client))
    return (
        f"{humanize.count(len(stuck), 'client')} {what}, for {humanize.age(age)}: "
        f"{humanize.join_some([_client_of_user(client, name_of) for client in stuck])}.",
        f"{remedy}{f' (kill {pids})' if pids else ''} and restart it.",
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
        f"starts a server for {name_of(dead[0].uid)} that serves no client and is reported as a "
        "ghost: kill that server (kill -9), and the queue continues. Until then a new process of "
        "this user would hang too.",
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
    remedy = (
        ghost_remedy(holder)
        if holder is not None and holder.ghost
        else "MPS serves one user at a time: the wait ends when all clients of the other user "
        "have exited. Run both as one user, give each user a daemon (with its own "
        "CUDA_MPS_PIPE_DIRECTORY), or run one daemon as root with -multiuser-server."
    )
    return humanize.sentence(text), remedy


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
