"""What this exporter cannot read, what to do about it, and logs that have grown large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mps_exporter import humanize
from mps_exporter.findings.finding import Case, HostFacts, of_daemon, of_host, shown_path
from mps_exporter.findings.safe_commands import ANY_USER, Action, quoted_path
from mps_exporter.observations import LogName, LogState
from mps_exporter.snapshot import ControlDaemon, Snapshot

LOG_LARGE_BYTES = 1 << 30
"""The logs are not rotated automatically; a GiB is weeks of a busy host."""

_PRIVILEGES = "deployment.md#required-privileges"
_RIGHTS = "Give the exporter CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, or run it as root."

_SOURCES = {
    "nvml": "the GPUs",
    "control": "the control daemons",
    "logs": "the logs",
    "process": "the processes",
}
_SOURCE_REMEDIES = {
    "nvml": "GPUs are read through the driver's library libnvidia-ml.so.1. In a container, start "
    "it with the NVIDIA runtime and the utility capability.",
    "control": "Daemons are queried with nvidia-cuda-mps-control; set its path with "
    "--mps.control-binary if it is not on PATH.",
    "process": "In a container, share the host's PID namespace (hostPID), and mount its /proc.",
}

_DROP_IN = "/etc/systemd/system/mps-exporter.service.d"
_PROOF = "CAP_SYSLOG CAP_SYS_PTRACE"
_GIVE_SYSLOG = (
    f"mkdir -p {_DROP_IN} && printf '[Service]\\nAmbientCapabilities={_PROOF}\\n"
    f"CapabilityBoundingSet={_PROOF}\\nProtectKernelLogs=no\\nDeviceAllow=/dev/kmsg r\\n' "
    f">{_DROP_IN}/proof.conf && systemctl daemon-reload && systemctl restart mps-exporter"
)
"""For a unit without them; systemd reads the file after least.conf, which takes all away."""


@of_daemon(
    "warning",
    "A log has grown large",
    "Neither MPS nor the driver rotates it. Renaming does not help, since the daemon keeps the "
    "file open; only copying and truncating does.",
    alert="MpsControlLogLarge",
)
def log_large(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    for log in daemon.logs:
        if log.size_bytes is not None and log.size_bytes > LOG_LARGE_BYTES:
            yield Case(
                f"{shown_path(log.path)} has {humanize.memory(log.size_bytes)}.",
                "Empty it in place, as its user (truncate). Then set up logrotate with "
                "copytruncate.",
                _truncate(daemon),
            )


def _truncate(daemon: ControlDaemon) -> Iterable[Action]:
    largest = max(daemon.logs, key=lambda log: log.size_bytes or 0)
    if path := quoted_path(largest.path):
        # As its user: root would truncate whatever a link leads to by then.
        user = f"sudo -u '#{daemon.facts.user}' " if daemon.facts and daemon.facts.user else ""
        yield Action(
            f"{user}truncate -s 0 {path}",
            "root, or the user who runs the daemon",
            "empties the log; its lines are lost",
        )


@of_host(
    "warning",
    "A source cannot be read",
    "Its metrics are absent.",
    kind="blindness",
    alert="MpsExporterCollectorFailing",
)
def source_unreadable(host: HostFacts) -> Iterator[Case]:
    explained = any(
        daemon.state in ("unresponsive", "draining", "refused")
        or _tool_missing(daemon)
        or _takes_no_queries(daemon)
        for daemon in host.daemons
    )
    for result in host.snapshot.collectors:
        if not result.success and not (result.name == "control" and explained):
            error = humanize.printable(result.error or "no answer before the deadline", 400)
            show = Action(
                "nvidia-smi -L", ANY_USER, "shows whether the driver is loaded", heals=False
            )
            yield Case(
                f"{humanize.capitalize(_SOURCES[result.name])} could not be read: {error}.",
                _SOURCE_REMEDIES.get(result.name, "See the findings of each daemon."),
                () if host.snapshot.gpus else [show],
            )


@of_daemon(
    "warning",
    "The control tool cannot be run",
    "Without nvidia-cuda-mps-control no daemon can be queried.",
    kind="blindness",
    alert="MpsExporterCollectorFailing",
)
def tool_missing(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    if _tool_missing(daemon):
        # Without the commands that it was wanted for.
        _before, tool, reply = (daemon.error or "").partition("the control tool")
        yield Case(
            humanize.sentence(shown_path(tool + reply)),
            "Install the driver's nvidia-cuda-mps-control, or set its path with "
            "--mps.control-binary.",
        )


def _tool_missing(daemon: ControlDaemon) -> bool:
    return daemon.state is None and "the control tool" in (daemon.error or "")


@of_daemon(
    "warning",
    "Whether a control daemon serves clients is not known",
    "It accepts no queries. That happens while it drains (it was asked to quit and has clients), "
    "or when other programs query it all the time; control.log would show which.",
    kind="blindness",
)
def daemon_state_unknown(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    if _takes_no_queries(daemon):
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} accepts no queries, and its "
            "control.log cannot be read: it may be draining, or busy with other callers.",
            "Let the exporter read control.log (see the finding about it). Do not kill the daemon "
            "before you have checked there for Cmd:quit.",
        )


def _takes_no_queries(daemon: ControlDaemon) -> bool:
    unknown = daemon.state is None and daemon.pid is not None and daemon.error is not None
    return unknown and not _tool_missing(daemon) and not daemon.follows("control")


@of_daemon(
    "warning",
    "The logs of a daemon cannot be followed",
    "Crashes, faults and waits cannot be detected from any other source.",
    kind="blindness",
    alert="MpsExporterLogsUnreadable",
)
def logs_unreadable(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    shut = [log for log in daemon.logs if not log.readable]
    if daemon.pid is None or not shut:
        return
    facts, name = daemon.facts, shown_path(daemon.pipe_directory)
    hidden = "Faults and clients of this daemon are not detected as they happen."
    if any(log.log == "control" for log in shut):
        hidden = "Waits, crashes and faults of this daemon are not detected."
    text = f"{'; '.join(map(_unreadable, shut))}. {hidden}"
    remedy = (
        "Let the exporter's user read the log directory, or set the right one with "
        "--mps.log-directory."
    )
    if facts is not None and facts.foreground:
        text = (
            f"The daemon {name} runs in the foreground (-f) and writes no log files: waits, "
            "crashes and faults are not detected."
        )
        remedy = "Start it with -d, so that it writes its logs."
    elif facts is not None and facts.log_directory_assumed and not facts.log_directory:
        text = (
            f"The log directory of the daemon {name} cannot be determined, because its environment "
            "cannot be read. Waits, crashes and faults of this daemon are not detected."
        )
        remedy = f"Set it with --mps.log-directory. Or: {_RIGHTS}"
    paths = [path for log in shut if (path := quoted_path(log.path))]
    effect = "shows which directory keeps it out"
    shown = [Action(f"namei -l {path}", ANY_USER, effect, heals=False) for path in paths]
    yield Case(text, remedy, shown)


def _unreadable(log: LogState) -> str:
    reason = f": {humanize.printable(log.error, 200)}" if log.error else ""
    return f"{shown_path(log.path)} cannot be read{reason}"


@of_host(
    "warning",
    "The web configuration cannot be used",
    "The previous one stays in force, including its certificates and passwords.",
    kind="blindness",
    page="web-config.md",
)
def web_configuration_unusable(host: HostFacts) -> Iterator[Case]:
    if host.config_error is not None:
        yield Case(
            "The web configuration cannot be used; the previous one stays in force: "
            f"{humanize.printable(host.config_error, 400)}.",
            "Correct the file; it is reloaded automatically.",
        )


@of_daemon(
    "info",
    "Replies of a control daemon are not fully understood",
    "This driver's lists are not as documented: what is not understood is left out.",
    kind="blindness",
    page="mps-versions.md#how-to-help",
)
def replies_not_understood(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    plurals = {"reply": "replies"}
    counts: Mapping[tuple[str, str], int] = (
        daemon.partitioning.not_understood if daemon.partitioning is not None else {}
    )
    parts = [
        f"{humanize.count(number, part, plurals.get(part, ''))} of {reply}"
        for (reply, part), number in sorted(counts.items())
    ]
    if parts:
        yield Case(
            f"Of the last replies of {shown_path(daemon.pipe_directory)} "
            f"{humanize.join_some(parts)} {'was' if sum(counts.values()) == 1 else 'were'} "
            "left out.",
            "Update the exporter. If it is the newest: make a recording (mps-exporter record "
            "FILE --anonymise) and attach it to an issue.",
        )


@of_daemon(
    "info",
    "The directories of a daemon are assumed",
    "Its environment cannot be read, and no other source shows its directories: if it has "
    "others, the replies and logs read here are not its own.",
    kind="blindness",
    page=_PRIVILEGES,
)
def directories_assumed(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    if daemon.pid is not None and daemon.facts and daemon.facts.directories_assumed:
        yield Case(
            f"It is assumed that process {daemon.pid} is the daemon of "
            f"{shown_path(daemon.pipe_directory)}: its environment cannot be read, and nothing "
            "in the directory identifies it.",
            f"{_RIGHTS} Or set the directory with --mps.pipe-directory.",
        )


@of_host(
    "info",
    "Limits of some processes are not known",
    "A client may lower its own limits in its environment, which only its user, or a process "
    "with the required capabilities, may read.",
    kind="blindness",
    page=_PRIVILEGES,
)
def environment_unreadable(host: HostFacts) -> Iterator[Case]:
    found: list[tuple[ControlDaemon | None, str]] = []
    for daemon in host.daemons:
        clients = (client for server in daemon.servers for client in server.clients)
        pids = [client.pid for client in clients if client.environment_readable is False]
        if pids:
            found.append((daemon, humanize.processes(pids) or "some clients"))
    if (number := host.snapshot.unreadable_environments) and not found:
        found.append((None, humanize.count(number, "process", "processes")))
    for of, those in found:
        yield Case(
            f"The environment of {those} cannot be read: limits that they set for themselves are "
            "not known and are omitted.",
            _RIGHTS,
            of=of,
        )


@of_host(
    "info",
    "The kernel log cannot be read",
    "After a fatal GPU error only the address in the kernel log proves which client caused it. "
    "What MPS reports proves nothing.",
    kind="blindness",
    page=_PRIVILEGES,
)
def kernel_log_unreadable(host: HostFacts) -> Iterator[Case]:
    kernel = host.snapshot.kernel_log
    if kernel is not None and not kernel.readable and host.daemons:
        yield Case(
            f"The kernel log is not being read: {humanize.printable(kernel.error, 400)}.",
            "Give the exporter CAP_SYSLOG and CAP_SYS_PTRACE, or run it as root; a container needs "
            "the device /dev/kmsg, too.",
            [Action(_GIVE_SYSLOG, "root, for the package's service", "gives it both capabilities")],
        )


@of_daemon(
    "info",
    "A daemon runs in a different PID namespace",
    "It logs processes outside of its PID namespace as PID 0: its clients can be counted, but "
    "not always told apart.",
    kind="blindness",
)
def daemon_outside_host_pid_namespace(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    name = shown_path(daemon.pipe_directory)
    nameless = sum(not client.pid for server in daemon.servers for client in server.clients)
    process = daemon.facts.process if daemon.facts is not None else None
    if nameless:
        text = (
            f"{humanize.count(nameless, 'client')} of {name} cannot be told apart: the daemon "
            "runs in a different PID namespace."
        )
    elif process is not None and len(process.namespace_pids) > 1:
        text = (
            f"The daemon {name} runs in a different PID namespace: process {process.pid} is "
            f"{process.namespace_pids[-1]} there."
        )
    else:
        return
    yield Case(
        text,
        "Start the daemon with the host's PID namespace (hostPID: true, or docker run --pid host).",
    )


@of_host(
    "info",
    "A user has too many control daemons",
    "Any user may start any number of programs with that name. Those above the limit are not "
    "read; configured daemons always are.",
    kind="blindness",
)
def processes_ignored(host: HostFacts) -> Iterator[Case]:
    if ignored := host.snapshot.ignored_processes:
        users = [f"{uid} ({count})" for uid, count in ignored.items()]
        yield Case(
            "More daemons, MPS processes and clients than are shown run for "
            f"{humanize.count(len(users), 'user')}, by UID: {humanize.join_some(users)}.",
            "Name the daemons that are wanted with --mps.pipe-directory, and ask these users about "
            "the others.",
        )


@of_daemon(
    "info",
    "Not all clients are shown individually",
    "Each client costs series in Prometheus; so many clients are most often a mistake. The "
    "counts include them.",
    kind="blindness",
)
def clients_not_shown(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    if daemon.dropped_clients:
        yield Case(
            f"{humanize.count(daemon.dropped_clients, 'client')} of "
            f"{shown_path(daemon.pipe_directory)} more than --collector.clients.max are not shown.",
            "Raise --collector.clients.max.",
        )


_SUBJECTS = {
    "nvml": "GPU activity is not known",
    "process": "whether other daemons run is not known",
}


def unseen(snapshot: Snapshot) -> tuple[str, ...]:
    """What must not be said of this host, since it cannot be seen; empty: everything is seen."""
    found = [
        f"{_SUBJECTS[result.name]}: {_SOURCES[result.name]} could not be read"
        for result in snapshot.collectors
        if not result.success and result.name in _SUBJECTS
    ]
    several = len(snapshot.daemons) > 1
    for daemon in snapshot.daemons:
        if daemon.state == "absent":
            continue
        at = f" at {shown_path(daemon.pipe_directory)}" if several else ""
        if daemon.state is None:
            found.append(f"whether the daemon{at} answers is not known")
        if not daemon.shows_waits:
            why = (
                "an MPS v3 daemon does not tell"
                if daemon.follows("control")
                else _why_not(daemon, "control")
            )
            found.append(f"whether clients wait{at} is not known: {why}")
        if not daemon.follows("server"):
            found.append(
                f"faults and hung clients{at} cannot be detected: {_why_not(daemon, 'server')}"
            )
        if daemon.servers_count is None:
            found.append(f"whether a server runs{at} is not known")
        elif any(server.clients_connected is None for server in daemon.servers):
            found.append(f"how many clients are connected{at} is not known")
    return tuple(dict.fromkeys(found))


def _why_not(daemon: ControlDaemon, log: LogName) -> str:
    if daemon.facts is not None and daemon.facts.foreground:
        return "the daemon runs in the foreground and writes no logs"
    return f"{log}.log is not readable"
