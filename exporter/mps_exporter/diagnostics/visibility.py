"""What this exporter cannot read, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mps_exporter import humanize
from mps_exporter.diagnostics.finding import Finding, Texts
from mps_exporter.diagnostics.finding_titles import ADVICE
from mps_exporter.observations import LogName, LogState
from mps_exporter.snapshot import CollectorResult, ControlDaemon, Snapshot

_RIGHTS = "Give the exporter CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, or run it as root."

_HIDDEN_BY_SOURCE = "Waits, crashes and faults of this daemon are not detected."

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


def host_visibility_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Return the failed sources and the missing permissions of the host as a whole."""
    for result in snapshot.collectors:
        if not result.success and not (result.name == "control" and _is_explained(snapshot)):
            yield _source_finding(result)
    of_clients = any(
        client.environment_readable is False
        for daemon in snapshot.daemons
        for server in daemon.servers
        for client in server.clients
    )
    if snapshot.unreadable_environments and not of_clients:
        count = snapshot.unreadable_environments
        yield Finding(
            ADVICE["environment_unreadable"],
            lambda: _environment_texts(humanize.count(count, "process", "processes")),
        )
    kernel = snapshot.kernel_log
    if kernel is not None and not kernel.readable and snapshot.daemons:
        yield Finding(
            ADVICE["kernel_log_unreadable"],
            lambda: (
                f"The kernel log is not being read: {humanize.printable(kernel.error, 400)}.",
                "Give the exporter CAP_SYSLOG and CAP_SYS_PTRACE, or run it as root; a container "
                "needs the device /dev/kmsg, too.",
            ),
        )
    if snapshot.ignored_processes:
        yield Finding(
            ADVICE["processes_ignored"], lambda: _ignored_texts(snapshot.ignored_processes)
        )


def _ignored_texts(ignored: Mapping[int, int]) -> tuple[str, str]:
    users = [f"{uid} ({count})" for uid, count in ignored.items()]
    return (
        "More daemons, MPS processes and clients than are shown run for "
        f"{humanize.count(len(users), 'user')}, by UID: {humanize.join_some(users)}.",
        "Name the daemons that are wanted with --mps.pipe-directory, and ask these users about the "
        "others.",
    )


def _environment_texts(processes: str) -> tuple[str, str]:
    return (
        f"The environment of {processes} cannot be read: limits that they set for themselves are "
        "not known and are omitted.",
        _RIGHTS,
    )


def of_web_configuration(error: str) -> Finding:
    """The file of --web.config.file was changed, and is invalid."""
    return Finding(
        ADVICE["web_configuration_unusable"],
        lambda: (
            "The web configuration cannot be used; the previous one stays in force: "
            f"{humanize.printable(error, 400)}.",
            "Correct the file; it is reloaded automatically.",
        ),
    )


def _source_finding(result: CollectorResult) -> Finding:
    return Finding(
        ADVICE["source_unreadable"],
        lambda: (
            f"{humanize.capitalize(_SOURCES[result.name])} could not be read: "
            f"{humanize.printable(result.error or 'no answer before the deadline', 400)}.",
            _SOURCE_REMEDIES.get(result.name, "See the findings of each daemon."),
        ),
    )


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
        at = f" at {humanize.printable(daemon.pipe_directory, 400)}" if several else ""
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


_SUBJECTS = {
    "nvml": "GPU activity is not known",
    "process": "whether other daemons run is not known",
}


def _why_not(daemon: ControlDaemon, log: LogName) -> str:
    if daemon.facts is not None and daemon.facts.foreground:
        return "the daemon runs in the foreground and writes no logs"
    return f"{log}.log is not readable"


_EXPLAINING = ("unresponsive", "draining", "refused")


def _is_explained(snapshot: Snapshot) -> bool:
    """Whether a finding of a daemon tells already why it could not be asked."""
    return any(
        daemon.state in _EXPLAINING or _tool_missing(daemon) or _takes_no_questions(daemon)
        for daemon in snapshot.daemons
    )


def _tool_missing(daemon: ControlDaemon) -> bool:
    return daemon.state is None and "the control tool" in (daemon.error or "")


def _takes_no_questions(daemon: ControlDaemon) -> bool:
    return (
        daemon.state is None
        and daemon.pid is not None
        and daemon.error is not None
        and not _tool_missing(daemon)
        and not daemon.follows("control")
    )


def _tool_error(error: str) -> str:
    """What is the matter with it, without the commands that it was wanted for."""
    _, tool, reply = error.partition("the control tool")
    return humanize.sentence(humanize.printable(tool + reply, 400))


def daemon_visibility_findings(
    daemon: ControlDaemon, name: str, found: Callable[[str, Texts], Finding]
) -> Iterator[Finding]:
    """What cannot be read of one daemon."""
    if _tool_missing(daemon):
        yield found(
            "tool_missing",
            lambda: (
                _tool_error(daemon.error or ""),
                "Install the driver's nvidia-cuda-mps-control, or set its path with "
                "--mps.control-binary.",
            ),
        )
    if _takes_no_questions(daemon):
        yield found(
            "daemon_state_unknown",
            lambda: (
                f"The MPS daemon {name} accepts no queries, and its control.log cannot be read: it "
                "may be draining, or busy with other callers.",
                "Let the exporter read control.log (see the finding about it). Do not kill the "
                "daemon before you have checked there for Cmd:quit.",
            ),
        )
    if daemon.pid is not None:
        yield from _log_findings(daemon, name, found)
    yield from _rights_findings(daemon, name, found)
    yield from _pid_namespace_findings(daemon, name, found)
    if daemon.dropped_clients:
        yield found(
            "clients_not_shown",
            lambda: (
                f"{humanize.count(daemon.dropped_clients, 'client')} of {name} more than "
                "--collector.clients.max are not shown.",
                "Raise --collector.clients.max.",
            ),
        )


def _log_findings(
    daemon: ControlDaemon, name: str, found: Callable[[str, Texts], Finding]
) -> Iterator[Finding]:
    shut = [log for log in daemon.logs if not log.readable]
    if not shut:
        return
    facts = daemon.facts
    if facts is not None and facts.foreground:
        yield found(
            "logs_unreadable",
            lambda: (
                f"The daemon {name} runs in the foreground (-f) and writes no log files: waits, "
                "crashes and faults are not detected.",
                "Start it with -d, so that it writes its logs.",
            ),
        )
    elif facts is not None and facts.log_directory_assumed and not facts.log_directory:
        yield found(
            "logs_unreadable",
            lambda: (
                f"The log directory of the daemon {name} cannot be determined, because its "
                f"environment cannot be read. {_HIDDEN_BY_SOURCE}",
                f"Set it with --mps.log-directory. Or: {_RIGHTS}",
            ),
        )
    else:
        yield found(
            "logs_unreadable",
            lambda: (
                f"{'; '.join(_unreadable(log) for log in shut)}. "
                + (
                    _HIDDEN_BY_SOURCE
                    if any(log.log == "control" for log in shut)
                    else "Faults and clients of this daemon are not detected as they happen."
                ),
                "Let the exporter's user read the log directory, or set the right one with "
                "--mps.log-directory.",
            ),
        )


def _unreadable(log: LogState) -> str:
    reason = f": {humanize.printable(log.error, 200)}" if log.error else ""
    return f"{humanize.printable(log.path, 400)} cannot be read{reason}"


def _rights_findings(
    daemon: ControlDaemon, name: str, found: Callable[[str, Texts], Finding]
) -> Iterator[Finding]:
    facts = daemon.facts
    if daemon.pid is not None and facts is not None and facts.directories_assumed:
        yield found(
            "directories_assumed",
            lambda: (
                f"It is assumed that process {daemon.pid} is the daemon of {name}: its environment "
                "cannot be read, and nothing in the directory identifies it.",
                f"{_RIGHTS} Or set the directory with --mps.pipe-directory.",
            ),
        )
    unreadable = [
        client.pid
        for server in daemon.servers
        for client in server.clients
        if client.environment_readable is False
    ]
    if unreadable:
        yield found(
            "environment_unreadable",
            lambda: _environment_texts(humanize.processes(unreadable) or "some clients"),
        )


def _pid_namespace_findings(
    daemon: ControlDaemon, name: str, found: Callable[[str, Texts], Finding]
) -> Iterator[Finding]:
    nameless = sum(1 for server in daemon.servers for client in server.clients if not client.pid)
    process = daemon.facts.process if daemon.facts is not None else None
    remedy = (
        "Start the daemon with the host's PID namespace (hostPID: true, or docker run --pid host)."
    )
    if nameless:
        yield found(
            "daemon_outside_host_pid_namespace",
            lambda: (
                f"{humanize.count(nameless, 'client')} of {name} cannot be told apart: the daemon "
                "runs in a different PID namespace.",
                remedy,
            ),
        )
    elif process is not None and len(process.namespace_pids) > 1:
        yield found(
            "daemon_outside_host_pid_namespace",
            lambda: (
                f"The daemon {name} runs in a different PID namespace: process {process.pid} is "
                f"{process.namespace_pids[-1]} there.",
                remedy,
            ),
        )
