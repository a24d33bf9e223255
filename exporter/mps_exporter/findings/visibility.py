"""Facts that this exporter cannot read, with the remedy, and logs that have grown large."""

from collections.abc import Iterator

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings.finding import (
    ANY_USER,
    Action,
    Case,
    Cases,
    HostFacts,
    clients_of,
    of_daemon,
    of_daemon_blindness,
    of_host_blindness,
    quoted_path,
    shown_path,
)
from mps_exporter.humanize import (
    capitalize,
    count,
    join_some,
    memory,
    printable,
    processes,
    sentence,
)
from mps_exporter.observations import LogName, LogState
from mps_exporter.snapshot import ControlDaemon, Snapshot

_PRIVILEGES = "deployment.md#required-privileges"
_RIGHTS = "Give the exporter CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, or run it as root."

SOURCES = {
    "nvml": (
        "the GPUs",
        "GPUs are read through the driver's library libnvidia-ml.so.1. In a container, start it "
        "with the NVIDIA runtime and the utility capability.",
        "GPU activity is not known",
    ),
    "control": (
        "the control daemons",
        "Daemons are queried with nvidia-cuda-mps-control; set its path with "
        "--mps.control-binary if it is not on PATH.",
        "",
    ),
    "logs": ("the logs", "See the findings of each daemon.", ""),
    "process": (
        "the processes",
        "In a container, share the host's PID namespace (hostPID), and mount its /proc.",
        "whether other daemons run is not known",
    ),
}
"""What is read from each source, the remedy if that fails, and what is unknown then."""

_DROP_IN = "/etc/systemd/system/mps-exporter.service.d"
_PROOF = "CAP_SYSLOG CAP_SYS_PTRACE"
_GIVE_SYSLOG = Action(
    f"mkdir -p {_DROP_IN} && printf '[Service]\\nAmbientCapabilities={_PROOF}\\n"
    f"CapabilityBoundingSet={_PROOF}\\nProtectKernelLogs=no\\nDeviceAllow=/dev/kmsg r\\n' "
    f">{_DROP_IN}/proof.conf && systemctl daemon-reload && systemctl restart mps-exporter",
    "root, for the package's service",
    "gives it both capabilities",
)
"""For a unit without these capabilities; systemd reads the file after least.conf, which removes all
of them."""


@of_daemon(
    "warning",
    "A log has grown large",
    "Neither MPS nor the driver rotates it. Renaming does not help, since the daemon keeps the "
    "file open; only copying and truncating does.",
    "Empty it in place, as its user (truncate). Then set up logrotate with copytruncate.",
    alert="MpsControlLogLarge",
    summary="An MPS log file is larger than 1 GiB; MPS does not rotate it.",
)
def log_large(_: HostFacts, daemon: ControlDaemon) -> Cases:
    for log in daemon.logs:
        if log.size_bytes is not None and log.size_bytes > policy.LARGE_LOG_BYTES:
            text = f"{shown_path(log.path)} has {memory(log.size_bytes)}."
            yield Case(text, actions=_truncate(daemon, log.path))


def _truncate(daemon: ControlDaemon, log: str) -> Iterator[Action]:
    if path := quoted_path(log):
        # Run as the daemon's user: root would truncate the target of a link placed there since.
        user = f"sudo -u '#{daemon.facts.user}' " if daemon.facts.user else ""
        run_as = "root, or the user who runs the daemon"
        effect = "empties the log; its lines are lost"
        yield Action(f"{user}truncate -s 0 {path}", run_as, effect)


@of_host_blindness(
    "warning",
    "A source cannot be read",
    "What it would show is not known here, and its metrics are absent.",
    alert="MpsExporterCollectorFailing",
    summary="The MPS exporter cannot read one of its sources; the metrics of that source are "
    "missing.",
)
def source_unreadable(host: HostFacts) -> Cases:
    explained = any(
        daemon.state in ("unresponsive", "draining", "refused")
        or _tool_missing(daemon)
        or _takes_no_queries(daemon)
        for daemon in host.daemons
    )
    effect = "shows whether the driver is loaded"
    show = [Action("nvidia-smi -L", ANY_USER, effect, heals=False)]
    for result in host.snapshot.collectors:
        if not result.success and not (result.name == "control" and explained):
            error = printable(result.error or "no answer before the deadline", 400)
            what, remedy, _unknown = SOURCES[result.name]
            text = f"{capitalize(what)} could not be read: {error}."
            yield Case(text, remedy, () if host.snapshot.gpus else show)


@of_daemon_blindness(
    "warning",
    "The control tool cannot be run",
    "Without nvidia-cuda-mps-control no daemon can be queried.",
    "Install the driver's nvidia-cuda-mps-control, or set its path with --mps.control-binary.",
    runbook="MpsExporterCollectorFailing",
)
def tool_missing(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if _tool_missing(daemon):
        # Omit the queries for which the tool was needed.
        _before, tool, reply = (daemon.error or "").partition("the control tool")
        yield Case(sentence(shown_path(tool + reply)))


def _tool_missing(daemon: ControlDaemon) -> bool:
    return daemon.state is None and "the control tool" in (daemon.error or "")


@of_daemon_blindness(
    "warning",
    "Whether a control daemon serves clients is not known",
    "It accepts no queries. That happens while it drains (it was asked to quit and has clients), "
    "or when other programs query it all the time; control.log would show which.",
    "Let the exporter read control.log (see the finding about it). Do not kill the daemon "
    "before you have checked there for Cmd:quit.",
)
def daemon_state_unknown(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if _takes_no_queries(daemon):
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} accepts no queries, and its "
            "control.log cannot be read: it may be draining, or busy with other callers."
        )


def _takes_no_queries(daemon: ControlDaemon) -> bool:
    unknown = daemon.state is None and daemon.pid is not None and daemon.error is not None
    return unknown and not _tool_missing(daemon) and not daemon.follows("control")


@of_daemon_blindness(
    "warning",
    "The logs of a daemon cannot be followed",
    "Crashes, faults and waits cannot be detected from any other source.",
    alert="MpsExporterLogsUnreadable",
    summary="The log of an MPS daemon cannot be read; crashes, faults and waits there may go "
    "undetected.",
)
def logs_unreadable(_: HostFacts, daemon: ControlDaemon) -> Cases:
    shut = [log for log in daemon.logs if not log.readable]
    if daemon.pid is None or not shut:
        return
    facts, name = daemon.facts, shown_path(daemon.pipe_directory)
    hidden = "Faults and clients of this daemon are not detected as they happen."
    if any(log.log == "control" for log in shut):
        hidden = "Waits, crashes and faults of this daemon are not detected."
    text = f"{'; '.join(map(_unreadable, shut))}. {hidden}"
    remedy = "Let the exporter's user read the log directory, or set --mps.log-directory."
    if facts.foreground:
        text = (
            f"The daemon {name} runs in the foreground (-f) and writes no log files: waits, "
            "crashes and faults are not detected."
        )
        remedy = "Start it with -d, so that it writes its logs."
    elif facts.log_directory_assumed and not facts.log_directory:
        text = (
            f"The log directory of the daemon {name} cannot be determined, because its environment "
            "cannot be read. Waits, crashes and faults of this daemon are not detected."
        )
        remedy = f"Set it with --mps.log-directory. Or: {_RIGHTS}"
    effect = "shows which directory keeps it out"
    commands = [f"namei -l {path}" for log in shut if (path := quoted_path(log.path))]
    shown = [Action(command, ANY_USER, effect, heals=False) for command in commands]
    yield Case(text, remedy, shown)


def _unreadable(log: LogState) -> str:
    reason = f": {printable(log.error, 200)}" if log.error else ""
    return f"{shown_path(log.path)} cannot be read{reason}"


@of_host_blindness(
    "warning",
    "The web configuration cannot be used",
    "The previous one stays in force, including its certificates and passwords.",
    "Correct the file; it is reloaded automatically.",
    page="web-config.md",
)
def web_configuration_unusable(host: HostFacts) -> Cases:
    if host.config_error is not None:
        yield Case(
            "The web configuration cannot be used; the previous one stays in force: "
            f"{printable(host.config_error, 400)}."
        )


@of_daemon_blindness(
    "info",
    "Replies of a control daemon are not fully understood",
    "This driver's lists are not as documented. A column that is not known is shown as text; what "
    "else is not understood is left out.",
    "Update the exporter. If it is the newest: make a recording (mps-exporter record "
    "FILE --anonymise) and attach it to an issue.",
    page="mps-versions.md#how-to-help",
)
def replies_not_understood(_: HostFacts, daemon: ControlDaemon) -> Cases:
    found = daemon.partitioning.not_understood
    plurals = {"reply": "replies"}
    parts = [
        f"{count(number, part, plurals.get(part, ''))} of {reply}"
        for (reply, part), number in sorted(found.items())
    ]
    if parts:
        was = "was" if sum(found.values()) == 1 else "were"
        name = shown_path(daemon.pipe_directory)
        yield Case(f"Of the last replies of {name} {join_some(parts)} {was} not understood.")


@of_daemon_blindness(
    "info",
    "The directories of a daemon are assumed",
    "Its environment cannot be read, and no other source shows its directories: if it has "
    "others, the replies and logs read here are not its own.",
    f"{_RIGHTS} Or set the directory with --mps.pipe-directory.",
    page=_PRIVILEGES,
)
def directories_assumed(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.pid is not None and daemon.facts.directories_assumed:
        yield Case(
            f"It is assumed that process {daemon.pid} is the daemon of "
            f"{shown_path(daemon.pipe_directory)}: its environment cannot be read, and nothing "
            "in the directory identifies it."
        )


@of_host_blindness(
    "info",
    "Limits of some processes are not known",
    "A client may lower its own limits in its environment, which only its user, or a process "
    "with the required capabilities, may read.",
    _RIGHTS,
    page=_PRIVILEGES,
)
def environment_unreadable(host: HostFacts) -> Cases:
    found = {}
    for daemon in host.daemons:
        pids = [one.pid for one in clients_of(daemon) if one.environment_readable is False]
        if pids:
            found[daemon.pipe_directory] = processes(pids) or "some clients"
    if (number := host.snapshot.unreadable_environments) and not found:
        found[""] = count(number, "process", "processes")
    for pipe_directory, those in found.items():
        yield Case(
            f"The environment of {those} cannot be read: limits that they set for themselves are "
            "not known and are omitted.",
            pipe_directory=pipe_directory,
        )


@of_host_blindness(
    "info",
    "A GPU reports no memory",
    "Where GPU and host share their memory (GB10, Thor), NVML has no numbers: the metrics of GPU "
    "memory, and what needs them, are not reported.",
    "See the memory of the host: free -h.",
    page="compatibility.md#why-a-metric-is-absent",
)
def gpu_memory_not_reported(host: HostFacts) -> Cases:
    gpus = [one for one in host.snapshot.gpus if one.reading("memory_total") is None]
    seen = [(one.index, one.observation) for one in gpus if one.observation.readings]
    known = [(index, one.name) for index, one in seen if not (one.lost or one.parent_uuid)]
    if those := [f"GPU {index} ({printable(name)})" for index, name in known if name]:
        yield Case(f"NVML reports no memory for {join_some(those)}.")


@of_host_blindness(
    "info",
    "The kernel log cannot be read",
    "After a fatal GPU error only the address in the kernel log proves which client caused it. "
    "What MPS reports proves nothing.",
    "Give the exporter CAP_SYSLOG and CAP_SYS_PTRACE, or run it as root; a container needs "
    "the device /dev/kmsg, too.",
    page=_PRIVILEGES,
)
def kernel_log_unreadable(host: HostFacts) -> Cases:
    kernel = host.snapshot.kernel_log
    if kernel is not None and not kernel.readable and host.daemons:
        yield Case(
            f"The kernel log is not being read: {printable(kernel.error, 400)}.",
            actions=[_GIVE_SYSLOG],
        )


@of_daemon_blindness(
    "info",
    "A daemon runs in a different PID namespace",
    "It logs processes outside of its PID namespace as PID 0: its clients can be counted, but "
    "not always told apart.",
    "Start the daemon with the host's PID namespace (hostPID: true, or docker run --pid host).",
)
def daemon_outside_host_pid_namespace(_: HostFacts, daemon: ControlDaemon) -> Cases:
    name, process = shown_path(daemon.pipe_directory), daemon.facts.process
    if nameless := sum(not client.pid for client in clients_of(daemon)):
        yield Case(
            f"{count(nameless, 'client')} of {name} cannot be told apart: the daemon "
            "runs in a different PID namespace."
        )
    elif process is not None and daemon.facts.has_own_pid_namespace:
        yield Case(
            f"The daemon {name} runs in a different PID namespace: process {process.pid} is "
            f"{process.namespace_pids[-1]} there."
        )


@of_host_blindness(
    "info",
    "A user has control daemons that are not read",
    "Any user may start any number of programs with that name. Those above the limit are not "
    "read, nor those whose environment or directories cannot be read; configured daemons always "
    "are.",
    "Name the daemons that are wanted with --mps.pipe-directory, and ask these users about "
    "the others.",
)
def processes_ignored(host: HostFacts) -> Cases:
    if ignored := host.snapshot.ignored_processes:
        users = [f"{uid} ({number})" for uid, number in ignored.items()]
        yield Case(
            "More daemons, MPS processes and clients than are shown run for "
            f"{count(len(users), 'user')}, by UID: {join_some(users)}."
        )


@of_daemon_blindness(
    "info",
    "Not all clients are shown individually",
    "Each client costs series in Prometheus; so many clients are most often a mistake. The "
    "counts include them.",
    "Raise --collector.clients.max.",
)
def clients_not_shown(_: HostFacts, daemon: ControlDaemon) -> Cases:
    if daemon.dropped_clients:
        yield Case(
            f"{count(daemon.dropped_clients, 'client')} of {shown_path(daemon.pipe_directory)} "
            "more than --collector.clients.max are not shown."
        )


def unknowns(snapshot: Snapshot) -> tuple[str, ...]:
    """Return texts on unknown facts because of which problems may be missed; empty if none."""
    failed = [SOURCES[result.name] for result in snapshot.collectors if not result.success]
    found = [f"{unknown}: {what} could not be read" for what, _, unknown in failed if unknown]
    several = len(snapshot.daemons) > 1
    for daemon in snapshot.daemons:
        if daemon.state != "absent":
            at = f" at {shown_path(daemon.pipe_directory)}" if several else ""
            found.extend(_unknowns_of(daemon, at))
    return tuple(dict.fromkeys(found))


def _unknowns_of(daemon: ControlDaemon, at: str) -> Iterator[str]:
    if daemon.state is None:
        yield f"whether the daemon{at} answers is not known"
    if not daemon.shows_waits:
        yield f"whether clients wait{at} is not known: {why_waits_are_unknown(daemon)}"
    if not daemon.follows("server"):
        yield f"faults and hung clients{at} cannot be detected: {_why_not(daemon, 'server')}"
    if daemon.servers_count is None:
        yield f"whether a server runs{at} is not known"
    elif any(server.clients_connected is None for server in daemon.servers):
        yield f"how many clients are connected{at} is not known"


def why_waits_are_unknown(daemon: ControlDaemon) -> str:
    """Return why it cannot be seen whether a process of this host waits."""
    if not daemon.follows("control"):
        return _why_not(daemon, "control")
    if daemon.facts.has_own_pid_namespace:
        return "the daemon has a PID namespace of its own, and logs no PID of this host"
    return "an MPS v3 daemon does not tell"


def _why_not(daemon: ControlDaemon, log: LogName) -> str:
    if daemon.facts.foreground:
        return "the daemon runs in the foreground and writes no logs"
    if daemon.facts.log_directory_assumed and not daemon.facts.log_directory:
        return f"the directory of {log}.log is not known"
    return f"{log}.log is not readable"
