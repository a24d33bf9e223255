"""The programs that the end of a process would take down, and how to end it without that.

A client that ends with GPU work in flight leaves it to the server, and 0.1 to 0.3 s later a fault
follows: the busy clients of the server on the same GPU die, and the idle ones cannot use the GPU
any more (measured on H200 with driver 580). A client's own fault takes down the same clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mps_exporter import humanize
from mps_exporter.findings.finding import (
    PROCESS_OWNER,
    Action,
    HostFacts,
    may_be_ended,
    permitted,
    quoted_path,
)
from mps_exporter.humanize import capitalize, count
from mps_exporter.snapshot import Client, ControlDaemon, Server, Snapshot

TORN_DOWN = "torn_down"


def neighbours_of(client: Client, server: Server) -> list[Client]:
    """Return the other clients of a server that share a GPU with a client, and still work."""
    used = _gpus_of(client)
    return [
        other
        for other in server.clients
        if other is not client and other.state != TORN_DOWN and used & _gpus_of(other)
    ]


def _gpus_of(client: Client) -> set[str]:
    return {*client.contexts, *client.gpu_uuids}


def neighbour_counts(client: Client, server: Server) -> Mapping[str, int]:
    """Return the number of the neighbours, and of the other users among them."""
    found = neighbours_of(client, server)
    users = {other.uid for other in found} - {client.uid, None}
    return {"clients": len(found), "users": len(users)}


@dataclass(frozen=True, slots=True)
class EndAdvice:
    """What happens when a process ends."""

    pid: int
    in_danger: bool
    """Whether other programs are lost, or the daemon may hang."""
    text: tuple[str, ...]
    """Sentences."""
    neighbours: tuple[int, ...] = ()
    """Processes that are lost if it ends with GPU work in flight."""
    actions: tuple[Action, ...] = field(default=())
    """The commands, in their order."""


def before_kill(pid: int, snapshot: Snapshot) -> EndAdvice:
    """Return what the end of a process would do to others."""
    host = HostFacts(snapshot, humanize.UserNames(snapshot))
    for daemon in snapshot.daemons:
        if any(wait.pid == pid and not wait.dead for wait in daemon.waits):
            return _queued(pid, daemon)
        for server in daemon.servers:
            if pid == server.pid:
                return _of_a_server(host, server)
            for client in server.clients:
                if client.pid == pid:
                    return _of_client(host, daemon, server, client)
    failed = [result.name for result in snapshot.collectors if not result.success]
    if failed or any(not daemon.follows("server") for daemon in snapshot.daemons):
        unread = ", ".join(failed) or "server.log"
        text = f"Process {pid} is in no list of clients, but {unread} could not be read: not known."
        return EndAdvice(pid, in_danger=True, text=(text,))
    text = f"Process {pid} is no client of MPS: its end takes no other program down."
    return EndAdvice(pid, in_danger=False, text=(text,))


def _queued(pid: int, daemon: ControlDaemon) -> EndAdvice:
    text = (
        f"Process {pid} waits in the queue of {daemon.pipe_directory}.",
        "A process that dies in the queue stays in it: the daemon may hang when its turn comes, "
        "and then every other program waits. Let it run first, or quit the daemon when no client "
        "is connected.",
    )
    return EndAdvice(pid, in_danger=True, text=text)


def _of_a_server(host: HostFacts, server: Server) -> EndAdvice:
    pids = tuple(client.pid for client in server.clients)
    text = f"Process {server.pid} is {host.server(server)}: its end takes down all its clients."
    lost = capitalize(humanize.join_some([host.client(one) for one in server.clients]))
    shown = (f"{lost}.",) if pids else ()
    return EndAdvice(server.pid, in_danger=bool(pids), text=(text, *shown), neighbours=pids)


def _of_client(host: HostFacts, daemon: ControlDaemon, server: Server, client: Client) -> EndAdvice:
    found = neighbours_of(client, server)
    users = neighbour_counts(client, server)["users"]
    text = [f"{capitalize(host.client(client))} is a client of {host.server(server)}."]
    if found:
        of_users = f" of {count(users, 'other user')}" if users else ""
        text += [
            f"{count(len(found), 'other client')}{of_users} on the same GPU would be lost if it "
            "ends with GPU work in flight, or by a fault of its own: busy clients die, idle ones "
            "cannot use the GPU any more.",
            f"{capitalize(humanize.join_some([host.client(one) for one in found]))}.",
        ]
    elif not _gpus_of(client):
        text.append("It has no context on a GPU: its end takes no other program down.")
    else:
        text.append(
            "No other client is on its GPU. If it ends with GPU work in flight, the next CUDA "
            "process fails once with error 46 (cudaErrorDevicesUnavailable)."
        )
    actions = () if not _gpus_of(client) else _in_order(daemon, client)
    if actions:
        text.append("In this order, its end takes no other program down:")
    pids = tuple(one.pid for one in found)
    return EndAdvice(client.pid, bool(found), tuple(text), pids, tuple(actions))


def _in_order(daemon: ControlDaemon, client: Client) -> tuple[Action, ...]:
    """Return the commands, if each part of them is known."""
    path = quoted_path(daemon.pipe_directory)
    if not may_be_ended(client) or path is None or daemon.facts.has_own_pid_namespace:
        return ()
    of_v3 = daemon.protocol == "3"
    words = (
        f"client terminate {client.pid}"
        if of_v3
        else (f"terminate_client {client.server_pid} {client.pid}")
    )
    tool = f"echo {words} | CUDA_MPS_PIPE_DIRECTORY={path} nvidia-cuda-mps-control"
    return permitted(
        (
            Action(tool, "root, or the daemon's user", "ends its GPU work; prints 0"),
            Action(f"kill {client.pid}", PROCESS_OWNER, "ends the process"),
        ),
        daemon.facts,
    )
