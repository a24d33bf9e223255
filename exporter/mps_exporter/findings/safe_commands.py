"""Commands for the operator, and what may be put into one.

A command is given only where every part of it is known and safe to paste: paths are quoted, and one
with control characters gives no command. A command that ends a process names it by what was seen in
the same snapshot.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mps_exporter import humanize
from mps_exporter.observations import ClosedFolder, DaemonFacts
from mps_exporter.snapshot import Client, Server

MAX_PIDS = 20
"""More processes than this are not put into one command."""

PROCESS_OWNER = "root, or the user of these processes"
ANY_USER = "any user"


@dataclass(frozen=True, slots=True)
class Action:
    """A command for a person to run."""

    command: str
    run_as: str
    effect: str
    """What it does, in a few words."""
    heals: bool = True
    """False: it only shows more."""


def permitted(offered: Iterable[Action], daemon: DaemonFacts | None) -> tuple[Action, ...]:
    """The one gate of all commands: those that may be given to a person.

    Of an ordinary user's daemon every path and every PID is that user's choice. What only shows
    something is run as that user; what changes something is not offered.
    """
    if daemon is None or not daemon.limited:
        return tuple(offered)
    return tuple(
        replace(one, command=f"sudo -u '#{daemon.user}' {one.command}", run_as="root")
        for one in offered
        if one.run_as == ANY_USER and not one.heals and daemon.user
    )


def quoted_path(path: str) -> str | None:
    """A path as one word of a shell; None where it cannot be shown as it is."""
    return shlex.quote(path) if path and humanize.printable(path, len(path)) == path else None


def open_folder(closed: ClosedFolder | None, daemon: DaemonFacts) -> tuple[Action, ...]:
    """Open a folder on the way to a daemon's directories: one of that daemon's own user only."""
    path = quoted_path(closed.path) if closed is not None else None
    if path is None or closed is None or closed.owner_uid != daemon.user:
        return ()
    effect = "lets the server pass; then start the process again"
    return permitted([Action(f"chmod a+x {path}", "root, or its owner", effect)], daemon)


def may_be_ended(one: Server | Client) -> bool:
    """Whether its PID may be put into a command: a log can name any process.

    (1 and 2 are init, and the kernel's own.)
    """
    return one.confirmed and one.pid > 2


def pids_in_command(pids: Iterable[int]) -> str:
    """Those that are known, each once; none where they are more than MAX_PIDS."""
    known = sorted({pid for pid in pids if pid})
    return "" if len(known) > MAX_PIDS else " ".join(map(str, known))


def show_processes(pids: Iterable[int], effect: str) -> Iterable[Action]:
    if numbers := pids_in_command(pids):
        command = f"ps -o pid,user,stat,etime,args -p {numbers.replace(' ', ',')}"
        yield Action(command, ANY_USER, effect, heals=False)


def end_processes(pids: Iterable[int], effect: str) -> Iterable[Action]:
    if numbers := pids_in_command(pids):
        yield Action(f"kill {numbers}", PROCESS_OWNER, effect)


def end_clients(clients: Iterable[Client], effect: str) -> Iterable[Action]:
    """The command that ends those of these clients that may be ended."""
    return end_processes((client.pid for client in clients if may_be_ended(client)), effect)


def kernel_log() -> Iterable[Action]:
    yield Action("dmesg -T | grep -i xid", "root", "the driver's account of it", heals=False)
