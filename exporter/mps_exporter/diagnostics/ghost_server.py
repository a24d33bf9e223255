"""What doctor, page and mps_advice say of a ghost server: title, evidence, remedy, commands.

(Its incidents, as "What happened" on the page shows them: humanize.py.)
"""

from __future__ import annotations

from collections.abc import Iterable

from mps_exporter import humanize
from mps_exporter.diagnostics.finding import Advice
from mps_exporter.diagnostics.safe_commands import Action, end_clients, may_be_ended
from mps_exporter.humanize import UserNameLookup
from mps_exporter.snapshot import Client, ControlDaemon, Server

GHOST_SERVER = Advice(
    "ghost_server",
    "critical",
    "A ghost server blocks its daemon",
    "It was started for a user whose queued process had died, and serves no process, not even "
    "a new one of that user. As soon as another process connects, the daemon waits for the "
    "ghost forever, and every new CUDA process hangs.",
)


SECOND_STEP_SECONDS = 5
"""With one GPU the daemon continued at once (8 of 8). With two it and the program that is connected
to the ghost waited for each other until that program had ended (7 of 7, driver 580)."""


def server_of_user(server: Server, name_of: UserNameLookup) -> str:
    """A server by its user and PID, within a sentence."""
    return f"{name_of(server.uid)}'s server {server.pid}"


def ghost_texts(daemon: ControlDaemon, server: Server, name_of: UserNameLookup) -> tuple[str, str]:
    """Compose the evidence and the remedy."""
    hung = _hung_on(server)
    text = (
        f"{humanize.capitalize(server_of_user(server, name_of))} was started for clients that had "
        "died in the queue: "
    )
    if hung:
        those = humanize.processes([one.pid for one in hung]) or humanize.count(len(hung), "client")
        text += f"it serves no client; {those} and all later clients hang."
    elif daemon.state == "unresponsive":
        text += "the daemon hangs on it, and with it every new CUDA process."
    else:
        text += "the daemon will hang as soon as another user's client connects."
    return text, ghost_remedy(server)


def ghost_remedy(server: Server) -> str:
    """Say how to end it, and what to do where that is not enough."""
    hung = _hung_on(server)
    those = humanize.processes([one.pid for one in hung if may_be_ended(one)])
    more = f" If the daemon does not answer {SECOND_STEP_SECONDS} s later, "
    if those:
        is_, has = ("is", "has") if len(hung) == 1 else ("are", "have")
        more += f"also end {those}, which {is_} connected to that server and {has} no context."
    else:
        more += "run mps-exporter doctor again: it names what is left to end."
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
