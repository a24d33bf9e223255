"""A finding: its declaration, its condition, its cases on a host, and the commands it may offer.

A command is offered only if every part of it is known and safe to paste: paths are quoted, and a
path with control characters gives no command. A command that ends a process takes the PID from the
same snapshot.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from mps_exporter import humanize
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.humanize import UserNameLookup, describe_incident
from mps_exporter.observations import ClosedFolder, DaemonConditions, DaemonFacts, Leftovers
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Incident, Server, Snapshot

DOCS = "https://github.com/mps-exporter/mps-exporter/blob/main/"
PROCESS_OWNER = "root, or the user of these processes"
ANY_USER = "any user"

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
Scope = Literal["host", "daemon", "server", "gpu"]
Kind = Literal["state", "blindness", "news", "trace"]
"""A state of the host, missing visibility, a recent incident, or a leftover that only the doctor
searches for."""


def effective_severity(severity: Severity, *, limited: bool) -> Severity:
    """Return at most a warning for an ordinary user's daemon, which its user can break."""
    return "warning" if limited and severity == "critical" else severity


def page_url(page: str) -> str:
    """Return the URL of a page of docs; a bare name is a page of docs/symptoms."""
    return f"{DOCS}docs/{page}" if ".md" in page else f"{DOCS}docs/symptoms/{page}.md"


def shown_path(path: str) -> str:
    """Return a path in a form that is safe to show."""
    return humanize.printable(path, 400)


@dataclass(frozen=True, slots=True)
class Action:
    """A command for a person to run."""

    command: str
    run_as: str
    effect: str
    heals: bool = True  # False if the command only shows more.
    condition: str = ""  # The command is right only if this holds; "" for always.


def permitted(offered: Iterable[Action], daemon: DaemonFacts | None) -> tuple[Action, ...]:
    """Return the commands that may be offered for a daemon, or for the host or a GPU (None).

    An ordinary user chooses every path and every PID of that user's daemon. A command for any user
    that only shows something is run as that user; other commands are not offered.
    """
    if daemon is None or not daemon.limited:
        return tuple(offered)
    return tuple(
        replace(one, command=f"sudo -u '#{daemon.user}' {one.command}", run_as="root")
        for one in offered
        if one.run_as == ANY_USER and not one.heals and daemon.user
    )


def quoted_path(path: str) -> str | None:
    """Return a path as one shell word; None if it is empty or has unprintable characters."""
    return shlex.quote(path) if path and humanize.printable(path, len(path)) == path else None


def open_folder(closed: ClosedFolder | None, daemon: DaemonFacts | None) -> tuple[Action, ...]:
    """Return the command that opens a folder of the daemon's user, if permitted; else nothing."""
    path = quoted_path(closed.path) if closed is not None else None
    if path is None or closed is None or daemon is None or closed.owner_uid != daemon.user:
        return ()
    effect = "lets the server pass; then start the process again"
    return permitted([Action(f"chmod a+x {path}", "root, or its owner", effect)], daemon)


def clients_of(daemon: ControlDaemon) -> list[Client]:
    return [client for server in daemon.servers for client in server.clients]


def may_be_ended(one: Server | Client) -> bool:
    """Return whether a process may be ended: proved, not init or kthreadd, no client at work."""
    return one.confirmed and one.pid > 2 and not (isinstance(one, Server) and working(one))


def working(server: Server) -> list[Client]:
    """Return the clients that may have a context: they are lost if the server is ended."""
    return [one for one in server.clients if one.may_work]


def _known_pids(pids: Iterable[int]) -> list[str]:
    """Return the known PIDs, each once; none if they are too many for one command."""
    known = sorted({pid for pid in pids if pid})
    return list(map(str, known)) if len(known) <= policy.MAX_COMMAND_PIDS else []


def show_processes(pids: Iterable[int], effect: str) -> Iterable[Action]:
    if known := _known_pids(pids):
        command = f"ps -o pid,user,stat,etime,args -p {','.join(known)}"
        yield Action(command, ANY_USER, effect, heals=False)


def end_processes(pids: Iterable[int], effect: str, condition: str = "") -> Iterable[Action]:
    if known := _known_pids(pids):
        yield Action(f"kill {' '.join(known)}", PROCESS_OWNER, effect, condition=condition)


def end_clients(clients: Iterable[Client], effect: str, condition: str = "") -> Iterable[Action]:
    """Yield the command that ends those clients that may be ended."""
    return end_processes((one.pid for one in clients if may_be_ended(one)), effect, condition)


KERNEL_LOG = (Action("dmesg -T | grep -i xid", "root", "the driver's account of it", heals=False),)


@dataclass(frozen=True)
class HostFacts:
    """The input of all conditions."""

    snapshot: Snapshot
    user: UserNameLookup
    conditions: Mapping[str, DaemonConditions] = field(default_factory=dict)
    """Pipe directory -> /proc facts about a daemon whose servers cannot start."""
    leftovers: Leftovers = field(default_factory=Leftovers)
    config_error: str | None = None  # Error of the web configuration.

    @property
    def daemons(self) -> tuple[ControlDaemon, ...]:
        return self.snapshot.daemons

    def age(self, since: float) -> float:
        return self.snapshot.taken_at - since

    def server(self, server: Server) -> str:
        """Return a server's user and PID for use within a sentence."""
        return f"{self.user(server.uid)}'s server {server.pid}"

    def processes(self, pids: Sequence[int]) -> str:
        return humanize.processes(pids, self.snapshot.pods)

    def client(self, client: Client) -> str:
        pod = self.snapshot.pods.get(client.pid)
        user = f"{self.user(client.uid)}, pod {pod}" if pod else self.user(client.uid)
        return humanize.process(client.pid, client.command, user)

    def incident(self, one: Incident) -> str:
        text = describe_incident(one, self.user).removesuffix(".")
        return f"{text}, {humanize.ago(self.age(one.at))}."

    def last_incident(self, daemon: ControlDaemon, kind: str) -> Incident | None:
        """Return a daemon's last incident of a kind; None if not recent."""
        last = next((one for one in reversed(daemon.incidents) if one.kind == kind), None)
        recent = last is not None and self.age(last.at) <= policy.RECENT_INCIDENT_SECONDS
        return last if recent else None


class Case(NamedTuple):
    """One occurrence of a finding."""

    evidence: str
    remedy: str = ""  # Remedy of this case; "" for the declaration's.
    actions: Iterable[Action] = ()
    since: float | None = None
    pipe_directory: str = ""  # The daemon, if a finding of the host is about one daemon.


Cases = Iterator[Case]
Condition = Callable[..., Cases]


def _no_case(*_: object) -> Cases:
    """Yield nothing, until the decorator sets the condition of the declaration."""
    yield from ()


@dataclass(frozen=True, slots=True)
class FindingType:
    """One type of finding: its meaning on any host, its condition, and its alert.

    An instance is the decorator of its condition.
    """

    scope: Scope
    severity: Severity
    title: str
    why: str
    remedy: str = ""  # Remedy of the cases without a remedy.
    _: KW_ONLY
    kind: Kind = "state"
    alert: str = ""
    """Alert on the same condition, generated from this declaration's texts; "" if none."""
    summary: str = ""  # Summary of the alert; "" for the title.
    runbook: str = ""
    """Page of prometheus/runbooks without its suffix; "" for the page of the alert, if any."""
    page: str = "troubleshooting.md"  # See page_url().
    condition: Condition = _no_case

    def __call__(self, condition: Condition) -> FindingType:
        return replace(self, condition=condition)

    @property
    def name(self) -> str:
        return self.condition.__name__

    @property
    def runbook_url(self) -> str | None:
        page = self.runbook or self.alert
        return f"{DOCS}prometheus/runbooks/{page}.md" if page else None

    @property
    def docs_url(self) -> str:
        return page_url(self.page)

    def found(self, host: HostFacts) -> Iterator[Finding]:
        """Yield the findings of this type on a host, with the permitted commands only."""
        for subject in self._subjects(host):
            first = subject[0] if subject else None
            daemon = first if isinstance(first, ControlDaemon) else None
            gpu = first if isinstance(first, Gpu) else None
            for evidence, remedy, actions, since, pipe_directory in self.condition(host, *subject):
                yield Finding(
                    self,
                    evidence,
                    remedy or self.remedy,
                    daemon.pipe_directory if daemon else pipe_directory,
                    gpu.index if gpu else "",
                    gpu.uuid if gpu else "",
                    since,
                    permitted(actions, daemon.facts if daemon else None),
                    limited=daemon is not None and daemon.facts.limited,
                )

    def _subjects(self, host: HostFacts) -> Iterable[tuple[Any, ...]]:
        """Return the arguments of each call of the condition."""
        daemons = host.daemons
        if self.kind == "news":
            last = ((daemon, host.last_incident(daemon, self.name)) for daemon in daemons)
            return ((daemon, one) for daemon, one in last if one is not None)
        if self.scope == "server":
            return ((daemon, one) for daemon in daemons for one in daemon.servers)
        subjects = {"host": [()], "daemon": zip(daemons), "gpu": zip(host.snapshot.gpus)}
        return subjects[self.scope]


of_host, of_daemon = partial(FindingType, "host"), partial(FindingType, "daemon")
of_server, of_gpu = partial(FindingType, "server"), partial(FindingType, "gpu")
of_leftovers = partial(FindingType, "host", kind="trace")
of_host_blindness = partial(FindingType, "host", kind="blindness")
of_daemon_blindness = partial(FindingType, "daemon", kind="blindness")
of_incident = partial(FindingType, "daemon", kind="news")
"""Declares a finding about a daemon's last incident of the kind with the finding's name."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding on this host: the evidence and the remedy, each in sentences.

    Names from users (programs, paths) in these are printable.
    """

    advice: FindingType
    evidence: str
    remedy: str
    daemon: str = ""
    gpu: str = ""
    uuid: str = ""
    since: float | None = None
    actions: tuple[Action, ...] = ()
    limited: bool = False
    """Whether it is about daemons or processes of ordinary users, and not the node's."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Name, daemon and GPU."""
        return self.advice.name, self.daemon, self.uuid

    @property
    def severity(self) -> Severity:
        """The severity on the page, in the doctor, in the metric and of the alert."""
        return effective_severity(self.advice.severity, limited=self.limited)
