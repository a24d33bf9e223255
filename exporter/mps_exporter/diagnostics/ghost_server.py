"""What doctor, page and mps_advice say of a ghost server: title, evidence, remedy, commands.

(Its incidents, as "What happened" on the page shows them: humanize.py.)
"""

from __future__ import annotations

from collections.abc import Iterable

from mps_exporter import humanize
from mps_exporter.diagnostics.finding import Advice
from mps_exporter.diagnostics.safe_commands import Action, end_clients, joined_pids, may_be_ended
from mps_exporter.humanize import UserNameLookup
from mps_exporter.snapshot import ControlDaemon, Server

GHOST_SERVER = Advice(
    "ghost_server",
    "critical",
    "A ghost server blocks its daemon",
    "It was started for a user whose queued process had died, and serves no process, not even "
    "a new one of that user. As soon as another process connects, the daemon waits for the "
    "ghost forever, and every new CUDA process hangs.",
)


def server_of_user(server: Server, name_of: UserNameLookup) -> str:
    """A server by its user and PID."""
    return humanize.capitalize(f"{name_of(server.uid)}'s server {server.pid}")


def ghost_texts(daemon: ControlDaemon, server: Server, name_of: UserNameLookup) -> tuple[str, str]:
    """Compose the evidence and the remedy."""
    without = ("connecting", "creating_context")
    hung = [client.pid for client in server.clients if client.state in without]
    text = f"{server_of_user(server, name_of)} was started for clients that had died in the queue: "
    remedy = ghost_remedy(server)
    if hung:
        those = humanize.processes(hung) or humanize.count(len(hung), "client")
        text += f"it serves no client; {those} and all later clients hang."
        # With one GPU it gets error 46 (8 of 8). With two it went on hanging (7 of 7): it and the
        # daemon wait for each other (control daemon in recvmsg on its connection, driver 580), and
        # the daemon continues when it has ended (5 of 5).
        ended = joined_pids(
            client.pid
            for client in server.clients
            if client.state in without and may_be_ended(client)
        )
        remedy += f" {humanize.capitalize(those)} will get an error and must be restarted"
        remedy += f"; what still hangs must be ended (kill {ended})." if ended else "."
    elif daemon.state == "unresponsive":
        text += "the daemon hangs on it, and with it every new CUDA process."
    else:
        text += "the daemon will hang as soon as another user's client connects."
    return text, remedy


def ghost_remedy(server: Server) -> str:
    """Say how to end it."""
    if not may_be_ended(server):
        return (
            "End that server to free the queue. Its process is not visible to the exporter (ps -C "
            "nvidia-cuda-mps-server lists all servers). Do not restart the daemon."
        )
    pid = server.pid
    return (
        f"If ps -o args= -p {pid} says nvidia-cuda-mps-server, end it (kill -9 {pid}) to free the "
        "queue. Do not restart the daemon."
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
            hung = (client for client in server.clients if client.state == "connecting")
            yield from end_clients(hung, "ends the client that still hangs after that, if it does")
