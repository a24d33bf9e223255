"""Recent incidents, and why servers of a daemon cannot start: proofs and hints."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter import humanize
from mps_exporter.findings.daemons import WITHOUT_MPS, start_daemon
from mps_exporter.findings.finding import Case, HostFacts, of_daemon, shown_path
from mps_exporter.findings.gpus import VOLTA
from mps_exporter.findings.safe_commands import kernel_log, open_folder
from mps_exporter.mps.client_limits import DaemonGpus, visible_gpus
from mps_exporter.observations import DaemonConditions
from mps_exporter.snapshot import ControlDaemon, Gpu, Incident, Snapshot

RECENT_SECONDS = 300.0
"""How long an incident counts as recent."""

_DIED_AT_ONCE = "all-programs-died-at-once"


def _recent(host: HostFacts, daemon: ControlDaemon, kind: str) -> Iterator[tuple[Incident, str]]:
    """Give a daemon's last incident of a kind while it is recent, and the sentence on it."""
    last = next((one for one in reversed(daemon.incidents) if one.kind == kind), None)
    if last is not None and (age := host.age(last.at)) <= RECENT_SECONDS:
        text = humanize.describe_incident(last, host.user).removesuffix(".")
        yield last, f"{text}, {humanize.ago(age)}."


@of_daemon(
    "critical",
    "A control daemon died",
    "Its server and all clients are lost with it.",
    kind="news",
    alert="MpsControlDaemonDied",
    page=WITHOUT_MPS,
)
def daemon_died(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    for last, text in _recent(host, daemon, "daemon_died"):
        remedy = "Restart it; programs that start meanwhile use the GPU without MPS."
        if daemon.state == "answering":
            remedy = "The daemon was restarted; programs that were connected must be restarted too."
        yield Case(text, remedy, start_daemon(daemon), last.at)


@of_daemon(
    "critical",
    "A server crashed",
    "All its clients are lost at once; the log reports an exit with status 0.",
    kind="news",
    alert="MpsServerCrashed",
    page=_DIED_AT_ONCE,
)
def server_crashed(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    for last, text in _recent(host, daemon, "server_crashed"):
        remedy = (
            "Programs that were connected must be restarted; the kernel log may show the cause "
            "(Xid)."
        )
        yield Case(text, remedy, kernel_log(), last.at)


@of_daemon(
    "critical",
    "A server could not start",
    "The daemon retries twenty times a second for as long as a client waits.",
    kind="news",
    alert="MpsServerCrashLooping",
    page="server-encountered-a-fatal-exception",
)
def server_start_failed(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    for last, text in _recent(host, daemon, "server_start_failed"):
        seen = host.conditions.get(daemon.pipe_directory)
        cause, remedy = _start_failure(last, daemon, host.snapshot, seen)
        closed = seen.closed.get(last.uid or 0) if seen is not None else None
        # Only where this host has the folder under the daemon's path.
        facts = daemon.facts if daemon.facts is not None and not daemon.facts.root else None
        opening = open_folder(closed, facts) if facts is not None else ()
        yield Case(f"{text} {cause}", remedy, opening, last.at)


@of_daemon(
    "warning",
    "A client left GPU work unfinished; others were lost",
    "Its kernels were still queued when it ended, for whatever reason. That causes a fatal GPU "
    "error: all busy clients on that GPU fail, and MPS names one of them.",
    kind="news",
    alert="MpsUnfinishedWork",
    page=_DIED_AT_ONCE,
)
def unfinished_work(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    for last, text in _recent(host, daemon, "unfinished_work"):
        remedy = (
            "The lost programs must be restarted; they did nothing wrong. Before a client is "
            "killed, terminate it through its daemon: "
            "echo terminate_client SERVER PID | nvidia-cuda-mps-control."
        )
        yield Case(text, remedy, kernel_log(), last.at)


@of_daemon(
    "warning",
    "A fatal GPU error hit clients",
    "All busy clients on that GPU are lost. A client's own bad pointer causes it, or GPU work "
    "that a client left unfinished when it ended.",
    kind="news",
    alert="MpsServerFault",
    page=_DIED_AT_ONCE,
)
def fault(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    for last, text in _recent(host, daemon, "fault"):
        remedy = "The lost programs must be restarted. Do not end the process that MPS names."
        if last.caused_by_pids:
            who = humanize.processes(last.caused_by_pids)
            remedy = f"The lost programs must be restarted, and the program of {who} has a bug."
        yield Case(text, remedy, kernel_log(), last.at)


@of_daemon(
    "warning",
    "A client was refused",
    "The program got a CUDA error where it expected a GPU.",
    kind="news",
    alert="MpsClientsRejected",
    page="cuda-error-808-809-mps-max-clients-reached",
)
def client_rejected(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    for last, text in _recent(host, daemon, "client_rejected"):
        remedy = (
            "Start the program again when other clients have exited, or run fewer processes on "
            "this server."
        )
        yield Case(text, remedy, since=last.at)


def _start_failure(
    incident: Incident, daemon: ControlDaemon, snapshot: Snapshot, seen: DaemonConditions | None
) -> tuple[str, str]:
    """Return why a server could not start, and what to do, each in sentences."""
    if proved := list(_proved(incident, daemon, snapshot, seen)):
        causes, remedies = zip(*proved, strict=True)
        return f"Cause: {'; '.join(causes)}.", " ".join(remedies)
    not_seen = "Its cause could not be seen. The last lines of server.log show what it did."
    if hints := list(_hints(daemon, snapshot, seen)):
        causes, remedies = zip(*hints, strict=True)
        return f"{not_seen} Possible: {'; '.join(causes)}.", " ".join(remedies)
    remedy = "The daemon retries for as long as a client waits. server.log shows the cause."
    return not_seen, remedy


def _proved(
    incident: Incident, daemon: ControlDaemon, snapshot: Snapshot, seen: DaemonConditions | None
) -> Iterator[tuple[str, str]]:
    if "Operation not permitted" in incident.detail and daemon.uid != 0:
        runs = "does not run as root" if daemon.uid is None else f"runs as user {daemon.uid}"
        yield (
            f"the daemon {runs} and may not start servers for other users",
            "Run the daemon as root, or one for each user.",
        )
    if "SHM segment" in incident.detail:
        yield (
            "no room in /dev/shm, or no file descriptors",
            "See df -h /dev/shm and the limit of open files of the daemon.",
        )
    if seen is not None and (closed := seen.closed.get(incident.uid or 0)) is not None:
        yield (
            f"in the daemon's root, {shown_path(closed.why)}, and the server runs as that user, "
            "with the daemon's group",
            "Let its user and the daemon's group pass that folder.",
        )
    visible = visible_gpus(daemon.visible_devices, nameable_gpus(snapshot))
    if daemon.visible_devices is not None and visible == ():
        shown = humanize.printable(repr(daemon.visible_devices))
        yield (
            f"its CUDA_VISIBLE_DEVICES is {shown}, which names no GPU of this host",
            "Start the daemon with UUIDs of nvidia-smi -L.",
        )
    for gpu in snapshot.gpus:
        if visible is None or gpu.uuid in visible:
            yield from _gpu_causes(gpu)


def nameable_gpus(snapshot: Snapshot, daemon: ControlDaemon | None = None) -> DaemonGpus:
    """The GPUs that CUDA_VISIBLE_DEVICES can name: its daemon's, else the host's."""
    served = set(daemon.gpu_uuids) if daemon is not None else set()
    order = tuple(gpu.uuid for gpu in snapshot.gpus if not served or gpu.uuid in served)
    if any(gpu.observation.parent_uuid is not None for gpu in snapshot.gpus):
        order = ()  # how CUDA counts MIG instances was not measured
    return DaemonGpus(frozenset(order), complete=bool(order), order=order or None)


def _gpu_causes(gpu: Gpu) -> Iterator[tuple[str, str]]:
    mode, pids = gpu.observation.compute_mode, gpu.direct_pids
    if mode == "prohibited":
        yield (
            f"the compute mode of GPU {gpu.index} is prohibited",
            f"nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS.",
        )
    elif mode == "exclusive_process" and pids:
        yield (
            f"{humanize.processes(pids) or 'another process'} has GPU {gpu.index}, whose compute "
            "mode is exclusive_process, for itself",
            "Ask its user to start it again under MPS.",
        )


def _hints(
    daemon: ControlDaemon, snapshot: Snapshot, seen: DaemonConditions | None
) -> Iterator[tuple[str, str]]:
    if seen is not None and seen.oom_kills:
        limit = seen.memory_limit_bytes
        of = f" of {humanize.memory(limit)}" if limit is not None else ""
        yield (
            f"the kernel has ended {humanize.count(seen.oom_kills, 'process', 'processes')} of the "
            f"daemon's control group, since its host memory{of} ran out",
            "Raise the memory limit of its pod or unit.",
        )
    if daemon.has_own_pid_namespace:
        yield (
            "the daemon has a PID namespace of its own (reported to fail on some drivers)",
            "Give its pod hostPID: true.",
        )
    gpus = snapshot.gpus
    old = [one.index for one in gpus if (one.observation.compute_capability or VOLTA) < VOLTA]
    if old:
        yield f"GPU {', '.join(old)} is older than Volta", "Use a Volta or later GPU for MPS."
