"""One process that somebody asks about: what is known of it, and what a check says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from mps_exporter.findings.finding import Finding
from mps_exporter.findings.processes import use_daemon
from mps_exporter.observations import ProcessView
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Handover, Snapshot, Wait

Outcome = Literal["ok", "problem", "warning", "unknown"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, and what was found."""

    name: str
    outcome: Outcome
    text: str
    remedy: str = ""
    page: str = ""
    """Of docs/symptoms, without its folder and suffix."""
    command: str = ""
    """The remedy as one line of a shell. One that sets or unsets a variable is for the shell from
    which the process is started again; "": there is none that is right on any host."""


# The checks of a subject are named when all are made.
ok, problem = partial(Check, "", "ok"), partial(Check, "", "problem")
warning, unknown = partial(Check, "", "warning"), partial(Check, "", "unknown")


@dataclass(frozen=True, slots=True)
class Subject:
    """A process, and where it stands in MPS."""

    pid: int
    snapshot: Snapshot
    found: tuple[Finding, ...]
    """The findings of that snapshot, and its recent incidents."""
    view: ProcessView
    recorded: bool
    """The view is empty: a recording has no files of the process."""
    daemon: ControlDaemon | None = None
    client: Client | None = None
    wait: Wait | None = None
    handover: Handover | None = None
    """The daemon does not answer, and the process was the last that it served."""
    direct_on: tuple[Gpu, ...] = ()
    stranded_on: tuple[Gpu, ...] = ()
    """GPUs on which its server has gone, and it has memory."""

    @property
    def ended(self) -> bool:
        return not self.view.present or self.view.state == "Z"

    @property
    def working(self) -> bool:
        return bool(self.direct_on or (self.client is not None and self.client.contexts))

    @property
    def environment(self) -> Mapping[str, str]:
        return self.view.mps_environment or {}

    @property
    def running(self) -> list[ControlDaemon]:
        return [one for one in self.snapshot.daemons if one.state != "absent"]

    @property
    def command_to_use_daemon(self) -> str:
        """The command that sends it to the host's only daemon; "": there is none, or several."""
        running = [one for one in self.running if one.facts is None or not one.facts.root]
        return next((one.command for one in use_daemon(running)), "")

    def gpu(self, uuid: str) -> str:
        return self.snapshot.gpu_indexes.get(uuid, uuid)


def subject(
    pid: int, snapshot: Snapshot, found: tuple[Finding, ...], view: ProcessView | None
) -> Subject:
    """Find a process in MPS; see check_process."""
    known = partial(Subject, pid, snapshot, found, view or ProcessView(pid), view is None)
    direct = tuple(gpu for gpu in snapshot.gpus if pid in gpu.direct_pids)
    for daemon in snapshot.daemons:
        if daemon.handover is not None and daemon.handover.pid == pid:
            return known(daemon, handover=daemon.handover, direct_on=direct)
        for server in daemon.servers:
            for client in server.clients:
                if client.pid == pid:
                    return known(daemon, client, direct_on=direct)
        for wait in daemon.waits:
            if wait.pid == pid:
                return known(daemon, wait=wait, direct_on=direct)
    stranded = tuple(gpu for gpu in snapshot.gpus if pid in (gpu.stranded_pids or ()))
    named = view.daemon_directory if view is not None else None
    of = (one for one in snapshot.daemons if named is not None and one.pipe_directory == named)
    return known(next(of, None), direct_on=direct, stranded_on=stranded)
