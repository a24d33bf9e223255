"""A control daemon that does not answer: what is seen of it, and what frees it.

Of what is seen, that which costs least. Only what is proved to be dead is ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from mps_exporter import humanize
from mps_exporter.diagnostics.ghost_server import ghost_commands, ghost_remedy
from mps_exporter.diagnostics.halted import halt_texts, resuming
from mps_exporter.diagnostics.safe_commands import Action, end_processes, show_processes
from mps_exporter.observations import ProcessFacts
from mps_exporter.snapshot import ControlDaemon, Handover, Server


def unresponsive_texts(daemon: ControlDaemon, name: str) -> tuple[str, str]:
    """Compose the evidence and the remedy."""
    hangs, ghost, last = "programs that start now hang", _ghost_of(daemon), _of_ended_server(daemon)
    if halted := _halted(daemon):
        hangs = f"{_halted_text(halted, daemon)}; {hangs}"
    elif ghost is not None:
        hangs = f"it hangs on its ghost server {ghost.pid}"
    elif last is not None:
        hangs = (
            f"it waits for process {last.pid}, which it sent to server {last.server_pid}, and that "
            f"has ended; {hangs}"
        )
    return f"The MPS daemon {name} does not answer: {hangs}.", _remedy(daemon)


def unresponsive_commands(daemon: ControlDaemon) -> Iterable[Action]:
    """The commands for what the remedy says."""
    if halted := _halted(daemon):
        return resuming(halted)
    if _ghost_of(daemon) is not None:
        return ghost_commands(daemon)
    if (last := _of_ended_server(daemon)) is not None:
        effect = "ends the client of a server that has ended; the daemon stays"
        return end_processes([last.pid], effect)
    processes = () if daemon.facts is None else daemon.facts.processes
    return show_processes((one.pid for one in processes), "shows what they are stuck in")


def _remedy(daemon: ControlDaemon) -> str:
    if (halted := _halted(daemon)) is not None and (texts := halt_texts(halted)) is not None:
        return texts[1]
    if (ghost := _ghost_of(daemon)) is not None:
        return ghost_remedy(ghost)
    if (last := _of_ended_server(daemon)) is not None:
        # On H200s it continued at once, 7 times of 7, and noted the end of its server.
        return (
            f"End process {last.pid}, which has lost its server: the daemon then continues, and "
            "starts a server for the next client. Do not restart the daemon."
        )
    if daemon.resumed:
        return "It was stopped, and was continued since: its next answer shows whether it works."
    return _where_nothing_is_seen(daemon)


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


def _halted(daemon: ControlDaemon) -> ProcessFacts | None:
    processes = daemon.facts.processes if daemon.facts is not None else ()
    own = daemon.facts.process if daemon.facts is not None else None
    if _ghost_of(daemon) is not None and (own is None or not own.stopped):
        return None  # to end a ghost is enough, whatever holds it
    return next((one for one in processes if one.stopped), None)


def _halted_text(halted: ProcessFacts, daemon: ControlDaemon) -> str:
    texts = halt_texts(halted)
    what = "it" if halted.pid == daemon.pid else f"its server {halted.pid}"
    return f"{what} is {texts[0] if texts is not None else 'stopped'}"


def _ghost_of(daemon: ControlDaemon) -> Server | None:
    return next((server for server in daemon.servers if server.ghost), None)


def _of_ended_server(daemon: ControlDaemon) -> Handover | None:
    last = daemon.handover
    return last if last is not None and last.server_pid is not None else None
