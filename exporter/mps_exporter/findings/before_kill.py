"""The programs that the end of a process would take down, and how to end it without that.

A client that ends with GPU work in flight leaves it to the server, and 0.1 to 0.3 s later a fault
follows: the busy clients of the server on the same GPU die, and the idle ones cannot use the GPU
any more (measured on H200 with driver 580). A client's own fault takes down the same clients. A
lost client with contexts on two GPUs takes the fault to the second GPU, too (measured on two H100).
"""

from dataclasses import dataclass

from mps_exporter.findings import finding
from mps_exporter.findings.finding import Action, HostFacts, end_clients, permitted, quoted_path
from mps_exporter.findings.visibility import SOURCES
from mps_exporter.humanize import UserNames, capitalize, count, join_some
from mps_exporter.snapshot import Client, ControlDaemon, Server, Snapshot


def _neighbours(client: Client, server: Server) -> list[Client]:
    """Return the other clients of a server that still work, and that a client's fault reaches."""
    others = [one for one in server.clients if one is not client and one.state != "torn_down"]
    reached, gpus = set[str](), _gpus_of(client)
    while gpus - reached:
        reached |= gpus
        gpus = gpus.union(*(_gpus_of(one) for one in others if reached & _gpus_of(one)))
    return [one for one in others if reached & _gpus_of(one)]


def _gpus_of(client: Client) -> set[str]:
    return {*client.contexts, *client.gpu_uuids}


def neighbour_counts(client: Client, server: Server) -> dict[str, int]:
    """Return the number of the neighbours, and of the other users among them."""
    found = _neighbours(client, server)
    users = {other.uid for other in found} - {client.uid, None}
    return {"clients": len(found), "users": len(users)}


@dataclass(frozen=True, slots=True)
class EndAdvice:
    """What happens when a process ends."""

    pid: int
    in_danger: bool  # Whether others may be harmed; also True if not known.
    text: tuple[str, ...]
    neighbours: tuple[int, ...] = ()  # Processes that can be lost with it.
    actions: tuple[Action, ...] = ()  # Commands that end it, in order.
    children: tuple["EndAdvice", ...] = ()  # Its descendants whose end endangers others.


def before_kill(
    pid: int, snapshot: Snapshot, uid: int | None = None, hidden: str = "", *, gone: bool = False
) -> EndAdvice:
    """Return what the end of a process would do to others. uid: its user; hidden: what is not seen.

    An ordinary user's daemon serves only that user, but may name any PID: checked last.
    """
    host = HostFacts(snapshot, UserNames(snapshot))
    may_serve = [
        one for one in snapshot.daemons if not one.facts.limited or uid in (None, one.facts.user)
    ]
    for daemon in sorted(may_serve, key=lambda one: one.facts.limited):
        limited = daemon.facts.limited
        ghosts = [one for one in daemon.servers if one.ghost and finding.may_be_ended(one)]
        if any(wait.pid == pid and not wait.dead for wait in daemon.waits):
            queued = (
                f"Process {pid} waits in the queue of {daemon.pipe_directory}.",
                "A process that dies in the queue stays in it: after its turn the next client "
                "hangs the daemon, and every other program waits. "
                f"End {'the ghost server first' if ghosts else 'it once --pid shows it served'}.",
            )
            return EndAdvice(pid, in_danger=True, text=queued)
        if pid == daemon.pid:
            end = f"Process {pid} is a control daemon: its end takes down its servers and clients."
            return EndAdvice(pid, in_danger=True, text=(end,))
        for server in daemon.servers:
            if pid == server.pid and (server.confirmed or not limited):
                named, lost = host.server(server), tuple(one.pid for one in server.clients)
                known = server.clients_connected == len(lost)
                what = "it has no clients" if known else "its clients are not known"
                if lost:
                    what = "its end takes down all its clients"
                if server in ghosts:  # measured: the client that hangs on it gets error 46 or 805
                    what = "no client works on this ghost, and its end frees the daemon"
                    lost, known = (), True
                end = f"Process {pid} is {named}: {what}."
                clients = capitalize(join_some([host.client(one) for one in server.clients]))
                text = (end, f"{clients}.") if lost else (end,)
                return EndAdvice(pid, bool(lost) or not known, text, lost)
            for client in server.clients:
                if client.pid == pid and (client.confirmed or not limited):
                    return _of_client(host, daemon, server, client)
    what = "is not seen (exited? wrong PID?)" if gone else "is in no list of clients and no queue"
    unread = _unread(snapshot, may_serve, uid, hidden)
    end = f"Process {pid} {what}{unread or ': its end ends no other program.'}"
    return EndAdvice(pid, in_danger=bool(unread), text=(end,))


def _unread(snapshot: Snapshot, daemons: list[ControlDaemon], uid: int | None, hidden: str) -> str:
    """Return a warning if a source of clients or waits (not NVML) was not read, else ""."""
    failed = {one.name for one in snapshot.collectors if not one.success} - {"nvml"}
    # A container's daemon logs no host PID of a process that waits.
    nameless = (not wait.pid and uid in (None, wait.uid) for one in daemons for wait in one.waits)
    unread = hidden or " and ".join(SOURCES[name][0] for name in sorted(failed))
    if not unread and not all(map(_shows_clients, daemons)):
        unread = "all clients in server.log"
    if not unread and (any(nameless) or not all(one.shows_waits for one in daemons)):
        unread = "the queue of a daemon"
    act = "ask its user whether its first CUDA call has returned."
    if hidden or not all(one.follows("control") and one.follows("server") for one in daemons):
        act = "name its logs (--mps.log-directory=DIR), or ask root."
    return f", but {unread} could not be read: not known. Do not end it; {act}" if unread else ""


def _shows_clients(daemon: ControlDaemon) -> bool:
    """Return whether all clients, and the GPUs of their contexts, are known."""
    listed = daemon.follows("server") or daemon.protocol == "3"
    clients = (client for server in daemon.servers for client in server.clients)
    return listed and not (daemon.dropped_clients or any("" in one.contexts for one in clients))


def _of_client(host: HostFacts, daemon: ControlDaemon, server: Server, client: Client) -> EndAdvice:
    found = _neighbours(client, server)
    users = neighbour_counts(client, server)["users"]
    # None: a ghost that may hide what its clients do (see TrackedServer.is_ghost).
    known = _shows_clients(daemon) and (server.ghost is not None or daemon.protocol == "3")
    of_users = f" of {count(users, 'other user')}" if users else ""
    text = [f"{capitalize(host.client(client))} is a client of {host.server(server)}."]
    if found:
        text += [
            f"{count(len(found), 'other client')}{of_users} can be lost if it ends with GPU work "
            "in flight (measured: not with kernels of 3 ms or less), or by a fault of its own: "
            "busy clients die, idle ones cannot use the GPU any more.",
            f"{capitalize(join_some([host.client(one) for one in found]))}.",
        ]
    elif not known:
        text.append(
            "Not all clients of its daemon, and their GPUs, are known: others may be lost with it."
        )
    elif not _gpus_of(client):
        text.append("It has no context on a GPU: its end takes no other program down.")
    else:
        text.append(
            "No other client is on its GPU. If it ends with GPU work in flight, the next CUDA "
            "process fails once with error 46 (cudaErrorDevicesUnavailable)."
        )
    if actions := _in_order(daemon, client):
        text.append("In this order, its end takes no other program down:")
    in_danger, pids = bool(found) or not known, tuple(one.pid for one in found)
    return EndAdvice(client.pid, in_danger, tuple(text), pids, actions)


def _in_order(daemon: ControlDaemon, client: Client) -> tuple[Action, ...]:
    """Return commands that end only a client that uses a GPU; none if a part is unknown."""
    kill = tuple(end_clients([client], "ends the process"))
    path = quoted_path(daemon.pipe_directory)
    if not (_gpus_of(client) and kill and path) or daemon.facts.has_own_pid_namespace:
        return ()
    word = "client terminate" if daemon.protocol == "3" else f"terminate_client {client.server_pid}"
    tool = f"CUDA_MPS_PIPE_DIRECTORY={path} timeout 5 nvidia-cuda-mps-control"
    command = f"echo {word} {client.pid} | {tool}"
    first = Action(command, "root, or the user of the process", "ends its GPU work; prints 0")
    return permitted([first, *kill], daemon.facts)
