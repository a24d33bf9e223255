"""A finding: its declaration, its condition, and one case of it on a host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from mps_exporter import humanize
from mps_exporter.diagnostics.safe_commands import Action, permitted
from mps_exporter.humanize import UserNameLookup
from mps_exporter.observations import DaemonConditions, Leftovers
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Server, Snapshot

DOCS = "https://github.com/mps-exporter/mps-exporter/blob/main/"

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")

Kind = Literal["state", "blindness", "news", "trace"]
"""A state of the host, something that this exporter cannot see, a recent incident, or something
that only the doctor looks for."""


def effective_severity(severity: Severity, *, limited: bool) -> Severity:
    """At most a warning for an ordinary user's daemon: any user can break that of his own."""
    return "warning" if limited and severity == "critical" else severity


def shown_path(path: str) -> str:
    """Return a path in a form that is safe to show."""
    return humanize.printable(path, 400)


@dataclass(frozen=True)
class HostFacts:
    """What the conditions look at."""

    snapshot: Snapshot
    user: UserNameLookup
    conditions: Mapping[str, DaemonConditions] = field(default_factory=dict)
    """Pipe directory -> what was read of a daemon whose servers cannot start."""
    traces: Leftovers = field(default_factory=Leftovers)
    config_error: str | None = None
    """What is wrong with the web configuration."""

    @property
    def daemons(self) -> tuple[ControlDaemon, ...]:
        return self.snapshot.daemons

    @property
    def servers(self) -> Iterator[tuple[ControlDaemon, Server]]:
        return ((daemon, server) for daemon in self.daemons for server in daemon.servers)

    def age(self, since: float) -> float:
        return self.snapshot.taken_at - since

    def server(self, server: Server) -> str:
        """Name a server by its user and PID, within a sentence."""
        return f"{self.user(server.uid)}'s server {server.pid}"

    def client(self, client: Client) -> str:
        return humanize.process(client.pid, client.command, self.user(client.uid))


class Case(NamedTuple):
    """One occurrence of a finding."""

    evidence: str
    remedy: str
    actions: Iterable[Action] = ()
    since: float | None = None
    of: ControlDaemon | str | None = None
    """Daemon or pipe directory, where a condition looks at the whole host."""


Scope = Literal["host", "daemon", "server", "gpu"]
Condition = Callable[..., Iterator[Case]]
"""Gives the cases on a host, and of one daemon, of one server (with its daemon) or of one GPU."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One kind of finding: what it means on any host, and when it applies."""

    name: str
    severity: Severity
    title: str
    why: str
    kind: Kind
    alert: str
    """The alert on the same condition; "": none."""
    page: str
    """A page of docs/symptoms without its folder and suffix, else a page of docs."""
    scope: Scope
    condition: Condition

    @property
    def runbook_url(self) -> str | None:
        return f"{DOCS}prometheus/runbooks/{self.alert}.md" if self.alert else None

    @property
    def docs_url(self) -> str:
        return f"{DOCS}docs/{self.page}" if ".md" in self.page else symptom_url(self.page)

    def found(self, host: HostFacts) -> Iterator[Finding]:
        """Return the cases on a host. Only commands that may be given to a person remain."""
        places: Iterable[tuple[ControlDaemon | Server | Gpu, ...]] = [()]
        if self.scope == "server":
            places = host.servers
        elif self.scope != "host":
            ones = host.daemons if self.scope == "daemon" else host.snapshot.gpus
            places = ((one,) for one in ones)
        for place in places:
            for evidence, remedy, actions, since, of in self.condition(host, *place):
                where = place[0] if place else of
                daemon = where if isinstance(where, ControlDaemon) else None
                gpu = where if isinstance(where, Gpu) else None
                yield Finding(
                    self,
                    evidence,
                    remedy,
                    daemon.pipe_directory if daemon else of if isinstance(of, str) else "",
                    gpu.index if gpu else "",
                    gpu.uuid if gpu else "",
                    since,
                    permitted(actions, daemon.facts if daemon else None),
                    limited=daemon is not None and daemon.limited,
                )


def symptom_url(page: str) -> str:
    """The page of docs/symptoms with this name."""
    return f"{DOCS}docs/symptoms/{page}.md"


def _declare(
    scope: Scope,
    severity: Severity,
    title: str,
    why: str,
    *,
    kind: Kind = "state",
    alert: str = "",
    page: str = "troubleshooting.md",
) -> Callable[[Condition], Advice]:
    """Declare a finding; its name is that of its condition."""

    def declare(condition: Condition) -> Advice:
        name = condition.__name__
        return Advice(name, severity, title, why, kind, alert, page, scope, condition)

    return declare


of_host, of_daemon = partial(_declare, "host"), partial(_declare, "daemon")
of_server, of_gpu = partial(_declare, "server"), partial(_declare, "gpu")


@dataclass(frozen=True, slots=True)
class Finding:
    """An advice that applies here, with what was seen and what to do, each in sentences.

    Names that others chose (programs, users, paths) are made fit to be shown.
    """

    advice: Advice
    evidence: str
    remedy: str
    daemon: str = ""
    gpu: str = ""
    uuid: str = ""
    since: float | None = None
    actions: tuple[Action, ...] = ()
    """Commands; none where none is known to be right."""
    limited: bool = False
    """It is about an ordinary user's daemon (DaemonFacts.limited)."""

    @property
    def severity(self) -> Severity:
        """The severity that page, doctor, metric and alert agree on."""
        return effective_severity(self.advice.severity, limited=self.limited)
