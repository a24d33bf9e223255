"""Recent incidents, why servers cannot start, and leftovers that only the doctor searches for."""

from collections.abc import Iterator

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings.daemons_and_servers import WITHOUT_MPS, start_daemon
from mps_exporter.findings.finding import (
    KERNEL_LOG,
    Action,
    Case,
    Cases,
    HostFacts,
    Severity,
    of_incident,
    of_leftovers,
    open_folder,
    quoted_path,
    shown_path,
)
from mps_exporter.findings.gpus import predates_volta
from mps_exporter.humanize import capitalize, count, join_some, memory, printable, processes
from mps_exporter.mps.client_limits import DaemonGpus, visible_gpus
from mps_exporter.mps.tool_commands import PIPE_DIRECTORY_BYTES, path_bytes
from mps_exporter.observations import ClosedFolder, DaemonConditions
from mps_exporter.snapshot import ControlDaemon, Gpu, Incident, Snapshot

_DIED_AT_ONCE = "all-programs-died-at-once"
_AFTER_A_KILL = "the-next-job-fails-after-one-was-killed"

SEVERITIES: dict[str, Severity] = {
    "ghost": "critical",
    "client_terminated": "warning",
    "wait_abandoned": "warning",
}
"""Severities of incidents without a finding; the default is info."""

Cause = tuple[str, str]  # Cause of a failed start and its remedy, each in words.


@of_incident(
    "critical",
    "A control daemon died",
    "Its server and all clients are lost with it.",
    alert="MpsControlDaemonDied",
    summary="An MPS control daemon died; all its clients are lost.",
    page=WITHOUT_MPS,
)
def daemon_died(host: HostFacts, daemon: ControlDaemon, last: Incident) -> Cases:
    remedy = "Restart it; programs that start meanwhile use the GPU without MPS."
    if daemon.state == "answering":
        remedy = "The daemon was restarted; programs that were connected must be restarted too."
    yield Case(host.incident(last), remedy, start_daemon(daemon), last.at)


@of_incident(
    "critical",
    "A server crashed",
    "All its clients are lost at once; the log reports an exit with status 0.",
    "Programs that were connected must be restarted; the kernel log may show the cause (Xid).",
    alert="MpsServerCrashed",
    summary="An MPS server crashed; its clients are lost.",
    page=_DIED_AT_ONCE,
)
def server_crashed(host: HostFacts, _: ControlDaemon, last: Incident) -> Cases:
    yield Case(host.incident(last), actions=KERNEL_LOG, since=last.at)


@of_incident(
    "critical",
    "A server could not start",
    "The daemon retries at once: six times, or for as long as a client waits.",
    alert="MpsServerCrashLooping",
    summary="MPS servers fail to start repeatedly; clients that wait for them are not served.",
    page="server-encountered-a-fatal-exception",
)
def server_start_failed(host: HostFacts, daemon: ControlDaemon, last: Incident) -> Cases:
    seen = host.conditions.get(daemon.pipe_directory, DaemonConditions())
    closed = None if last.uid is None else seen.closed.get(last.uid)
    text, causes = "Cause:", list(_proved_causes(last, daemon, host.snapshot, closed))
    if not causes:
        text = "Its cause could not be seen. The last lines of server.log show what it did."
        causes = list(_possible_causes(daemon, host.snapshot, seen))
        text += " Possible:" if causes else ""
    if causes:
        text += f" {'; '.join(cause for cause, _ in causes)}."
    remedy = " ".join(do for _, do in causes) or "See the last lines of server.log."
    # A command only if this host has the folder at that path.
    opening = () if daemon.facts.root else open_folder(closed, daemon.facts)
    yield Case(f"{host.incident(last)} {text}", remedy, opening, last.at)


@of_incident(
    "warning",
    "A client left GPU work unfinished; others were lost",
    "Its kernels were still queued when it ended, for whatever reason. That causes a fatal GPU "
    "error: other clients of the server on that GPU are lost, and MPS names one of them.",
    "The lost programs must be restarted; they did nothing wrong. Before a client is killed, "
    "terminate it through its daemon: echo terminate_client SERVER PID | nvidia-cuda-mps-control.",
    alert="MpsUnfinishedWork",
    summary="A client exited with GPU work in flight; other clients were lost because of it.",
    page=_DIED_AT_ONCE,
)
def unfinished_work(host: HostFacts, _: ControlDaemon, last: Incident) -> Cases:
    yield Case(host.incident(last), actions=KERNEL_LOG, since=last.at)


@of_incident(
    "warning",
    "A fatal GPU error hit clients",
    "The server's clients on that GPU, and on other GPUs of these, are lost: busy ones die, idle "
    "ones cannot use it any more. A client's own bad pointer causes it, or GPU work left over.",
    alert="MpsServerFault",
    summary="A fatal GPU error; MPS tore down the clients on that GPU.",
    page=_DIED_AT_ONCE,
)
def fault(host: HostFacts, _: ControlDaemon, last: Incident) -> Cases:
    remedy = "The lost programs must be restarted. End only what the error hit and does not exit."
    if last.caused_by_pids:
        those = processes(last.caused_by_pids)
        remedy = f"The lost programs must be restarted, and the program of {those} has a bug."
    yield Case(host.incident(last), remedy, KERNEL_LOG, last.at)


@of_incident(
    "warning",
    "A client was refused",
    "The program got a CUDA error where it expected a GPU.",
    "What the program printed shows the reason.",
    alert="MpsClientsRejected",
    summary="MPS refused clients; their programs cannot use the GPU through MPS.",
    page="cuda-error-808-809-mps-max-clients-reached",
)
def client_rejected(host: HostFacts, _: ControlDaemon, last: Incident) -> Cases:
    yield Case(host.incident(last), _AFTER_REFUSAL.get(last.detail, ""), since=last.at)


_AFTER_REFUSAL = {
    "context_limit": "Start it again when other clients have exited, or run fewer processes here.",
    "server_not_ready": "Start it again. If that is refused, too, end only what the error hit and "
    "does not exit.",
    "invalid_device": "Let its CUDA_VISIBLE_DEVICES be a UUID of a GPU of the daemon, or unset it.",
    "credentials": "Run both as the same user of the host, or the daemon as root.",
}


def _proved_causes(
    incident: Incident, daemon: ControlDaemon, snapshot: Snapshot, closed: ClosedFolder | None
) -> Iterator[Cause]:
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
    if closed is not None:
        yield (
            f"in the daemon's root, {shown_path(closed.why)}, and the server runs as that user, "
            "with the daemon's group",
            "Let its user and the daemon's group pass that folder.",
        )
    visible = visible_gpus(daemon.visible_devices, nameable_gpus(snapshot))
    if daemon.visible_devices is not None and visible == ():
        shown = printable(repr(daemon.visible_devices))
        yield (
            f"its CUDA_VISIBLE_DEVICES is {shown}, which names no GPU of this host",
            "Start the daemon with UUIDs of nvidia-smi -L.",
        )
    for gpu in snapshot.gpus:
        if visible is None or gpu.uuid in visible:
            yield from _gpu_causes(gpu)


def nameable_gpus(snapshot: Snapshot, daemon: ControlDaemon | None = None) -> DaemonGpus:
    """Return the GPUs (daemon's, else host's) for CUDA_VISIBLE_DEVICES; none with MIG."""
    served = set(daemon.gpu_uuids) if daemon is not None else set()
    order = tuple(gpu.uuid for gpu in snapshot.gpus if not served or gpu.uuid in served)
    if any(gpu.observation.parent_uuid is not None for gpu in snapshot.gpus):
        order = ()  # how CUDA counts MIG instances was not measured
    return DaemonGpus(frozenset(order), complete=bool(order), order=order or None)


def _gpu_causes(gpu: Gpu) -> Iterator[Cause]:
    mode, pids = gpu.observation.compute_mode, gpu.direct_pids
    if mode == "prohibited":
        yield (
            f"the compute mode of GPU {gpu.index} is prohibited",
            f"nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS.",
        )
    elif mode == "exclusive_process" and pids:
        yield (
            f"{processes(pids) or 'another process'} has GPU {gpu.index}, whose compute "
            "mode is exclusive_process, for itself",
            "Ask its user to start it again under MPS.",
        )


def _possible_causes(
    daemon: ControlDaemon, snapshot: Snapshot, seen: DaemonConditions
) -> Iterator[Cause]:
    if seen.oom_kills:
        limit = seen.memory_limit_bytes
        of = f" of {memory(limit)}" if limit is not None else ""
        yield (
            f"the kernel has ended {count(seen.oom_kills, 'process', 'processes')} of the "
            f"daemon's control group, since its host memory{of} ran out",
            "Raise the memory limit of its pod or unit.",
        )
    if daemon.facts.has_own_pid_namespace:
        yield (
            "the daemon has a PID namespace of its own (reported to fail on some drivers)",
            "Give its pod hostPID: true.",
        )
    if old := [gpu.index for gpu in snapshot.gpus if predates_volta(gpu)]:
        yield f"GPU {', '.join(old)} is older than Volta", "Use a Volta or later GPU for MPS."


@of_leftovers(
    "warning",
    "A control daemon was set up and does not run",
    "A systemd unit is enabled, or Kubernetes has made a directory for it: programs that are "
    "started for it wait, or run without MPS.",
    page="mps-daemon-never-starts-in-kubernetes",
)
def daemon_promised(host: HostFacts) -> Cases:
    for too_long in (False, True):  # a path that is too long is a separate cause
        promised = [
            one
            for one in host.leftovers.directories
            if one.promised_by and (path_bytes(one.path) > PIPE_DIRECTORY_BYTES) == too_long
        ]
        if not promised:
            continue
        those = [f"{shown_path(one.path)} ({one.promised_by})" for one in promised]
        text = f"No control daemon runs where one was set up: {join_some(those)}."
        remedy = (
            "See why it does not run: systemctl status UNIT, or the daemon's pod on this node "
            "(kubectl get pods -A -o wide)."
        )
        if too_long:
            longest = max(path_bytes(one.path) for one in promised)
            text += f" No daemon can run there: the path has {longest} bytes, of at most "
            text += f"{PIPE_DIRECTORY_BYTES}."
            remedy = "Set a shorter CUDA_MPS_PIPE_DIRECTORY, also for its clients."
        yield Case(text, remedy)


@of_leftovers(
    "warning",
    "A server has no file descriptor left",
    "It needs about ten for each client and GPU. Its clients work; a new client gets error 46, "
    "or hangs.",
    "Raise the limit of the daemon (LimitNOFILE= of its unit, or ulimit -n) before it is started "
    "the next time. Once a program has failed, the server accepts no other.",
    page="mps-server-failed-to-create-shm-segment",
)
def server_out_of_descriptors(host: HostFacts) -> Cases:
    for one in host.leftovers.open_files:
        if one.count is not None and one.count > one.limit - policy.FILES_PER_CLIENT:
            yield Case(
                f"Server {one.server_pid} has {one.count} of at most {one.limit} files open: a "
                "program that starts now gets error 46, or hangs.",
                pipe_directory=one.pipe_directory,
            )


@of_leftovers(
    "warning",
    "A server has lost its control daemon",
    "It accepts no clients, and keeps GPU memory and the driver.",
    "Wait until the programs that use it have ended: they are lost with it. nvidia-smi "
    "lists them as M+C. Ask its user about it.",
    page=_AFTER_A_KILL,
)
def server_without_daemon(host: HostFacts) -> Cases:
    if orphans := host.leftovers.orphans:
        those = join_some([f"server {one.pid} of user {one.uid}" for one in orphans])
        have = "have" if len(orphans) > 1 else "has"
        yield Case(f"{capitalize(those)} {have} no control daemon: no program can connect.")


@of_leftovers(
    "warning",
    "A process of MPS has ended and was not reaped",
    "Reported: new servers may not work until the parent of the dead process ends.",
    page=_AFTER_A_KILL,
)
def process_not_reaped(host: HostFacts) -> Cases:
    if zombies := host.leftovers.zombies:
        parents = sorted({one.parent_pid for one in zombies if one.parent_pid})
        pids = capitalize(processes([one.pid for one in zombies]) or "Processes")
        have, they = ("have", "they stay") if len(zombies) > 1 else ("has", "it stays")
        yield Case(
            f"{pids} of MPS ended, and {have} not been reaped (state Z).",
            f"Look at the parent ({processes(parents) or 'not known'}), and do not end "
            f"it: {they} while it lives and does not take notice. In a container, run an init "
            "process (docker run --init).",
        )


@of_leftovers(
    "info",
    "A daemon that is gone has left its pipe directory",
    "Programs that are started for it run without MPS. Its files do no harm to a new daemon of "
    "the same user.",
    page=_AFTER_A_KILL,
)
def directory_left(host: HostFacts) -> Cases:
    if left := [one for one in host.leftovers.directories if not one.promised_by]:
        those = [f"{shown_path(one.path)} (of user {one.owner_uid})" for one in left]
        remedy = "A new daemon takes it over, if its user may write there."
        if any(one.owner_uid for one in left):
            remedy += " Else the owner has to remove it first."
        commands = [
            f"sudo -u '#{one.owner_uid}' rm -r {path}"
            for one in left
            if one.owner_uid and (path := quoted_path(one.path))
        ]
        effect = "removes what that user's daemon has left"
        actions = [Action(command, "root", effect) for command in commands]
        yield Case(f"A daemon that is gone has left {join_some(those)}.", remedy, actions)
