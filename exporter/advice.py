"""What an expert would say about this host: findings, each with evidence, reason and remedy.

One table feeds ``mps-exporter doctor``, the metric mps_advice and the notes of the status page.
Pure: a snapshot in, findings out. The remedies are for a person to run: the exporter changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from exporter.model import Client, ControlDaemon, Gpu, Snapshot
from exporter.observations import ProcessFacts

Severity = Literal["critical", "warning", "info"]

LOG_LARGE_BYTES = 1 << 30
"""Nothing rotates the logs by itself; a GiB is weeks of a busy host."""

IDLE_SM_ACTIVITY = 0.3
BUSY_UTILIZATION = 0.9


@dataclass(frozen=True, slots=True)
class Advice:
    """One kind of finding: what it means on any host."""

    name: str
    severity: Severity
    title: str
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """An advice that applies here, with what was seen and what to do."""

    advice: Advice
    evidence: str
    remedy: str
    daemon: str = ""
    gpu: str = ""
    uuid: str = ""


ADVICE: dict[str, Advice] = {
    advice.name: advice
    for advice in (
        Advice(
            "ghost_server", "critical", "A ghost server blocks its daemon",
            "It was started for a user whose queued processes had all died. The daemon waits for "
            "it for ever, and every new CUDA process hangs.",
        ),
        Advice(
            "daemon_unresponsive", "critical", "A control daemon does not answer",
            "Every process that starts to use CUDA now hangs in cuInit.",
        ),
        Advice(
            "queued_client_dead", "warning", "A queued process has died",
            "Its place in the queue is still there. When its turn comes the daemon starts a server "
            "for it that nobody uses, and hangs.",
        ),
        Advice(
            "server_in_fault", "warning", "A server is in FAULT",
            "A fatal GPU error was contained, but a victim has not ended: until it does, every "
            "newcomer is refused with error 807.",
        ),
        Advice(
            "several_users_one_daemon", "warning", "Users wait for each other",
            "A control daemon runs one user's server at a time. Processes of others wait inside "
            "cuInit, without a message and without a limit.",
        ),
        Advice(
            "process_bypasses_mps", "warning", "A process runs beside MPS",
            "It shares the GPU by time slices with the MPS server, and no limit of MPS binds it.",
        ),
        Advice(
            "pipe_directory_mismatch", "warning", "A process looks for MPS where nobody is",
            "Its CUDA_MPS_PIPE_DIRECTORY names no running daemon's directory, so CUDA silently "
            "went on without MPS.",
        ),
        Advice(
            "container_without_ipc", "warning", "A container bypasses MPS",
            "A container needs the daemon's pipe directory and its /dev/shm (the host's IPC "
            "namespace); without both, CUDA silently goes on without MPS.",
        ),
        Advice(
            "percentage_ignored", "warning", "An active thread percentage is ignored",
            "CUDA silently ignores a CUDA_MPS_ACTIVE_THREAD_PERCENTAGE that is 0, negative, above "
            "100 or no number: the process may use all SMs.",
        ),
        Advice(
            "memory_limit_ignored", "warning", "A memory limit is ignored",
            "One entry of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT names no GPU of this daemon; CUDA then "
            "silently ignores all of them.",
        ),
        Advice(
            "stranded_client", "warning", "A process outlived its MPS server",
            "It can do nothing on the GPU any more and keeps its memory until it ends.",
        ),
        Advice(
            "logs_unreadable", "warning", "The logs of a daemon cannot be followed",
            "Crashes, faults and waits can be seen nowhere else.",
        ),
        Advice(
            "log_large", "warning", "A log has grown large",
            "Neither MPS nor the driver rotates it. Renaming does not help, since the daemon keeps "
            "the file open; only copying and truncating does.",
        ),
        Advice(
            "tool_missing", "warning", "The control tool cannot be run",
            "Without nvidia-cuda-mps-control nobody can be asked whether a daemon answers.",
        ),
        Advice(
            "environment_unreadable", "info", "Limits of some clients are not known",
            "A client may lower its own limits in its environment, which only its user, or a "
            "process with the rights for it, may read.",
        ),
        Advice(
            "daemon_outside_host_pid_namespace", "info", "A daemon numbers processes otherwise",
            "It runs in a PID namespace of its own and calls processes outside of it PID 0: its "
            "clients can be counted, but not always told apart.",
        ),
        Advice(
            "not_exclusive_mode", "info", "A GPU with MPS lets others in",
            "In exclusive-process mode only the MPS server may use the GPU, so nothing can bypass "
            "MPS by accident.",
        ),
        Advice(
            "mps_would_help", "info", "MPS would help here",
            "Several processes take turns on a GPU whose SMs are mostly idle: under MPS they would "
            "run at the same time.",
        ),
        Advice(
            "unfit_gpu", "info", "A GPU is too old for MPS as it is today",
            "Before Volta clients share one address space, have no limits, and a fault of one ends "
            "all.",
        ),
    )
}  # fmt: skip


def findings(snapshot: Snapshot) -> tuple[Finding, ...]:
    """All that applies, the most urgent first."""
    found = [
        *(finding for daemon in snapshot.daemons for finding in _of_daemon(daemon)),
        *(finding for gpu in snapshot.gpus for finding in _of_gpu(gpu, snapshot)),
    ]
    order = list(ADVICE)
    return tuple(sorted(found, key=lambda finding: order.index(finding.advice.name)))


def worst(found: tuple[Finding, ...]) -> Severity | None:
    """The most severe of them; None where there are none."""
    severities: tuple[Severity, ...] = ("critical", "warning", "info")
    there = {finding.advice.severity for finding in found}
    return next((severity for severity in severities if severity in there), None)


# ---------------------------------------------------------------------------------- daemons


def _of_daemon(daemon: ControlDaemon) -> Iterator[Finding]:
    def found(name: str, evidence: str, remedy: str) -> Finding:
        return Finding(ADVICE[name], evidence, remedy, daemon=daemon.pipe_directory)

    if daemon.state == "unresponsive":
        who = f"process {daemon.pid}" if daemon.pid is not None else daemon.pipe_directory
        yield found(
            "daemon_unresponsive",
            f"{who}: {daemon.error or 'no answer before the deadline'}",
            "find a stopped server (ps -C nvidia-cuda-mps-server -o pid,stat,user) and let it go "
            "on (kill -CONT PID), or a ghost and kill it; else restart the daemon, which ends its "
            "clients",
        )
    for server in daemon.servers:
        if server.ghost:
            yield found(
                "ghost_server",
                f"server {server.pid} of {_user(server.uid, server.user)} is ready, and nobody "
                "ever connected",
                f"kill -9 {server.pid}   # heals at once; the daemon need not be restarted",
            )
        if server.state == "FAULT":
            pids = " ".join(str(client.pid) for client in server.clients)
            yield found(
                "server_in_fault",
                f"server {server.pid}, clients still connected: {pids or 'unknown'}",
                f"end the faulted processes: kill {pids}" if pids else "end the faulted processes",
            )
        for client in server.clients:
            yield from _of_client(found, client)
    yield from _of_queue(daemon, found)
    yield from _of_logs(daemon, found)
    if daemon.state is None and daemon.error is not None and "cannot" in daemon.error.lower():
        yield found(
            "tool_missing", daemon.error,
            "install the driver's nvidia-cuda-mps-control, or name it with --mps.control-binary",
        )  # fmt: skip
    unreadable = [
        client.pid for server in daemon.servers for client in server.clients
        if client.environment_readable is False
    ]  # fmt: skip
    if unreadable:
        yield found(
            "environment_unreadable", f"clients {_some(unreadable)}",
            "run the exporter as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
        )  # fmt: skip
    process = daemon.facts.process if daemon.facts is not None else None
    if process is not None and len(process.namespace_pids) > 1:
        numbers = ", ".join(str(pid) for pid in process.namespace_pids)
        yield found(
            "daemon_outside_host_pid_namespace",
            f"process {process.pid} has the numbers {numbers}",
            "start the daemon's container with the host's PIDs (hostPID: true, --pid host)",
        )


Found = Callable[[str, str, str], Finding]


def _of_client(found: Found, client: Client) -> Iterator[Finding]:
    who = f"process {client.pid} ({client.command or '?'}, {_user(client.uid, client.user)})"
    if client.percentage_ignored is not None:
        yield found(
            "percentage_ignored",
            f"{who}: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={client.percentage_ignored!r}",
            "set a number above 0 and up to 100, and start the process again",
        )
    if client.memory_limit_ignored is not None:
        yield found(
            "memory_limit_ignored",
            f"{who}: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={client.memory_limit_ignored!r}",
            "name only GPUs that the daemon shows, by its ordinals or full UUIDs "
            "(echo device_query | nvidia-cuda-mps-control), and start the process again",
        )


def _of_queue(daemon: ControlDaemon, found: Found) -> Iterator[Finding]:
    dead = [wait for wait in daemon.waits if wait.dead]
    if dead:
        holder = dead[0].behind_uid
        yield found(
            "queued_client_dead",
            f"{_some([wait.pid for wait in dead])} of user {dead[0].uid}, behind user {holder}",
            "when the server for this user appears and stays without clients, kill -9 it; until "
            "then nothing is lost",
        )
    waiting = [wait for wait in daemon.waits if not wait.dead]
    if waiting and not daemon.multiuser:
        users = sorted({wait.uid for wait in waiting})
        yield found(
            "several_users_one_daemon",
            f"{len(waiting)} process(es) of user(s) {', '.join(map(str, users))} wait behind user "
            f"{waiting[0].behind_uid}",
            "one daemon for each user (own CUDA_MPS_PIPE_DIRECTORY), or a daemon of root with "
            "-multiuser-server",
        )


def _of_logs(daemon: ControlDaemon, found: Found) -> Iterator[Finding]:
    process_there = daemon.pid is not None
    shut = [log for log in daemon.logs if not log.readable]
    if process_there and shut:
        foreground = daemon.facts is not None and daemon.facts.foreground
        remedy = (
            "start the daemon with -d: in the foreground it writes no log files"
            if foreground
            else "give the exporter the right to read it, or name the directory with "
            "--mps.log-directory"
        )
        evidence = "; ".join(f"{log.path}: {log.error or 'not readable'}" for log in shut)
        yield found("logs_unreadable", evidence, remedy)
    for log in daemon.logs:
        if log.size_bytes is not None and log.size_bytes > LOG_LARGE_BYTES:
            yield found(
                "log_large", f"{log.path}: {log.size_bytes / (1 << 30):.1f} GiB",
                f"truncate -s 0 {log.path}   # and logrotate with copytruncate from now on",
            )  # fmt: skip


# ---------------------------------------------------------------------------------- GPUs


def _of_gpu(gpu: Gpu, snapshot: Snapshot) -> Iterator[Finding]:
    seen = gpu.observation

    def found(name: str, evidence: str, remedy: str) -> Finding:
        return Finding(ADVICE[name], evidence, remedy, gpu=gpu.index, uuid=gpu.uuid)

    served = bool(gpu.served_by)
    directories = {daemon.pipe_directory for daemon in snapshot.daemons if daemon.pid is not None}
    for process in gpu.direct_processes if served else ():
        yield _of_direct(process, found, directories)
    if served and seen.compute_mode == "default":
        yield found(
            "not_exclusive_mode", f"GPU {gpu.index}: compute mode is default",
            f"nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS",
        )  # fmt: skip
    if gpu.stranded_clients:
        yield found(
            "stranded_client", f"GPU {gpu.index}: {gpu.stranded_clients} process(es)",
            "end them: nvidia-smi lists them as M+C",
        )  # fmt: skip
    readings = {reading.metric: reading.value for reading in seen.readings if not reading.labels}
    utilization = readings.get("mps_gpu_utilization_ratio")
    activity = readings.get("mps_gpu_sm_active_ratio")
    if (
        not served
        and len(gpu.direct_pids) > 1
        and utilization is not None
        and activity is not None
        and utilization > BUSY_UTILIZATION
        and activity < IDLE_SM_ACTIVITY
    ):
        yield found(
            "mps_would_help",
            f"GPU {gpu.index}: {len(gpu.direct_pids)} processes, utilization {utilization:.0%}, "
            f"SM activity {activity:.0%}",
            "start a control daemon (nvidia-cuda-mps-control -d) and the processes under it",
        )
    if served and seen.compute_capability is not None and seen.compute_capability < (7, 0):
        yield found("unfit_gpu", f"GPU {gpu.index}: {seen.name}", "use a GPU from Volta on")


def _of_direct(process: ProcessFacts, found: Found, directories: set[str]) -> Finding:
    who = f"process {process.pid} ({process.name or '?'}, {_user(process.uid, process.user)})"
    wanted = (process.mps_environment or {}).get("CUDA_MPS_PIPE_DIRECTORY")
    if wanted is not None and wanted.rstrip("/") not in directories:
        return found(
            "pipe_directory_mismatch",
            f"{who}: CUDA_MPS_PIPE_DIRECTORY={wanted}; daemons are at "
            f"{', '.join(sorted(directories)) or 'no directory'}",
            "set CUDA_MPS_PIPE_DIRECTORY to the daemon's, and start the process again",
        )
    if len(process.namespace_pids) > 1 and wanted is not None:
        return found(
            "container_without_ipc", f"{who} runs in a container and names {wanted}",
            "start the container with the daemon's pipe directory mounted and --ipc=host "
            "(hostIPC: true)",
        )  # fmt: skip
    return found(
        "process_bypasses_mps", who,
        "start it again with CUDA_MPS_PIPE_DIRECTORY set to the daemon's, or set the GPU's compute "
        "mode to EXCLUSIVE_PROCESS so that it is refused",
    )  # fmt: skip


def _user(uid: int | None, name: str | None) -> str:
    if name is not None:
        return name
    return "an unknown user" if uid is None else f"user {uid}"


def _some(pids: list[int], most: int = 5) -> str:
    """Name the first few of many."""
    shown = ", ".join(str(pid) for pid in pids[:most])
    return shown if len(pids) <= most else f"{shown} and {len(pids) - most} more"
