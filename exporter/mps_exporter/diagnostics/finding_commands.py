"""What goes with a finding: a command to copy, who may run it, and the runbook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mps_exporter.diagnostics.finding import Finding
from mps_exporter.diagnostics.ghost_server import ghost_commands
from mps_exporter.diagnostics.safe_commands import (
    ANY_USER,
    MAX_PIDS,
    Action,
    end_clients,
    end_processes,
    permitted,
    quoted_path,
    show_processes,
)
from mps_exporter.diagnostics.unresponsive import unresponsive_commands
from mps_exporter.snapshot import ControlDaemon, Gpu, Snapshot

DOCS = "https://github.com/mps-exporter/mps-exporter/blob/main/"

_RUNBOOKS = {
    "ghost_server": "MpsGhostServer",
    "daemon_unresponsive": "MpsControlDaemonUnresponsive",
    "server_in_fault": "MpsServerStuckInFault",
    "gpu_lost": "MpsGpuMissing",
    "daemon_died": "MpsControlDaemonDied",
    "server_crashed": "MpsServerCrashed",
    "server_start_failed": "MpsServerCrashLooping",
    "queued_client_dead": "MpsQueuedClientDead",
    "client_stuck": "MpsClientStuck",
    "possible_unfinished_work": "MpsUnfinishedWork",
    "several_users_one_daemon": "MpsUidWaitLong",
    "server_starting_long": "MpsServerStuckStarting",
    "daemon_absent": "MpsControlDaemonDown",
    "daemon_refuses": "MpsControlDaemonRefusing",
    "daemon_draining": "MpsControlDaemonDraining",
    "unfinished_work": "MpsUnfinishedWork",
    "fault": "MpsServerFault",
    "client_rejected": "MpsClientsRejected",
    "process_bypasses_mps": "MpsProcessBypassesMps",
    "pipe_directory_mismatch": "MpsProcessBypassesMps",
    "daemon_not_reached": "MpsProcessBypassesMps",
    "stranded_client": "MpsStrandedClient",
    "log_large": "MpsControlLogLarge",
    "source_unreadable": "MpsExporterCollectorFailing",
    "tool_missing": "MpsExporterCollectorFailing",
    "logs_unreadable": "MpsExporterLogsUnreadable",
    "not_exclusive_mode": "MpsNotExclusiveMode",
    "mps_would_help": "MpsWouldHelp",
}
_HANGS = "symptoms/every-cuda-program-hangs-and-the-control-tool-too.md"
_WITHOUT_MPS = "symptoms/cannot-find-mps-control-daemon-process.md"
_PAGES = {
    "ghost_server": _HANGS,
    "daemon_unresponsive": _HANGS,
    "queued_client_dead": _HANGS,
    "server_out_of_descriptors": "symptoms/mps-server-failed-to-create-shm-segment.md",
    "server_in_fault": "symptoms/cuda-error-807-mps-server-not-ready.md",
    "client_stuck": "symptoms/a-client-is-connected-and-hangs.md",
    "several_users_one_daemon": "symptoms/a-program-hangs-in-cuinit.md",
    "server_starting_long": "symptoms/a-program-hangs-in-cuinit.md",
    "daemon_absent": _WITHOUT_MPS,
    "daemon_died": _WITHOUT_MPS,
    "daemon_quit": _WITHOUT_MPS,
    "daemon_draining": "symptoms/quit-does-not-return.md",
    "server_start_failed": "symptoms/server-encountered-a-fatal-exception.md",
    "server_crashed": "symptoms/all-programs-died-at-once.md",
    "fault": "symptoms/all-programs-died-at-once.md",
    "unfinished_work": "symptoms/all-programs-died-at-once.md",
    "possible_unfinished_work": "symptoms/cuda-error-46-devices-unavailable.md",
    "client_rejected": "symptoms/cuda-error-808-809-mps-max-clients-reached.md",
    "stranded_client": "symptoms/the-next-job-fails-after-one-was-killed.md",
    "percentage_ignored": "symptoms/a-limit-has-no-effect.md",
    "memory_limit_ignored": "symptoms/a-limit-has-no-effect.md",
    "limit_looser_than_default": "symptoms/a-limit-has-no-effect.md",
    "daemon_missing": "symptoms/a-limit-has-no-effect.md",
    "daemon_promised": "symptoms/mps-daemon-never-starts-in-kubernetes.md",
    "server_without_daemon": "symptoms/the-next-job-fails-after-one-was-killed.md",
    "process_not_reaped": "symptoms/the-next-job-fails-after-one-was-killed.md",
    "directory_left": "symptoms/the-next-job-fails-after-one-was-killed.md",
    "share_exceeded": "symptoms/one-pod-or-job-gets-more-than-its-share.md",
    "memory_overcommitted": "symptoms/one-pod-or-job-gets-more-than-its-share.md",
    "limit_idles_gpu": "symptoms/a-percentage-slows-programs-down-while-the-gpu-is-idle.md",
    "mps_would_help": "symptoms/no-speed-up-with-mps.md",
    "process_bypasses_mps": "symptoms/a-limit-has-no-effect.md",
    "sm_partition_mismatch": "symptoms/cuda-error-invalid-resource-configuration.md",
    "replies_not_understood": "mps-versions.md#how-to-help",
    "environment_unreadable": "deployment.md#required-privileges",
    "kernel_log_unreadable": "deployment.md#required-privileges",
    "directories_assumed": "deployment.md#required-privileges",
    "web_configuration_unusable": "web-config.md",
}
"""The page on each finding; the others are in troubleshooting.md."""


_DROP_IN = "/etc/systemd/system/mps-exporter.service.d"
_PROOF = "CAP_SYSLOG CAP_SYS_PTRACE"
_GIVE_SYSLOG = (
    f"mkdir -p {_DROP_IN} && printf '[Service]\\nAmbientCapabilities={_PROOF}\\n"
    f"CapabilityBoundingSet={_PROOF}\\nProtectKernelLogs=no\\nDeviceAllow=/dev/kmsg r\\n' "
    f">{_DROP_IN}/proof.conf && systemctl daemon-reload && systemctl restart mps-exporter"
)
"""For a unit without them; systemd reads the file after least.conf, which takes all away."""


def runbook_url(name: str) -> str | None:
    """The runbook of the alert on the same condition."""
    alert = _RUNBOOKS.get(name)
    return None if alert is None else f"{DOCS}prometheus/runbooks/{alert}.md"


def docs_page(name: str) -> str:
    """The page on this kind of finding, below docs/."""
    return _PAGES.get(name, "troubleshooting.md")


def docs_url(name: str) -> str:
    return f"{DOCS}docs/{docs_page(name)}"


def symptom_url(page: str) -> str:
    """The page of docs/symptoms with this name."""
    return f"{DOCS}docs/symptoms/{page}.md"


def actions(finding: Finding, snapshot: Snapshot) -> tuple[Action, ...]:
    """The commands for a finding; empty where none is known to be right."""
    name = finding.advice.name
    for daemon in snapshot.daemons:
        if daemon.pipe_directory == finding.daemon:
            of_daemon = _OF_DAEMONS.get(name)
            offered = finding.offered or (of_daemon(daemon) if of_daemon is not None else ())
            return permitted(offered, daemon.facts)
    for gpu in snapshot.gpus:
        if gpu.uuid == finding.uuid and (of_gpu := _OF_GPUS.get(name)):
            return tuple(of_gpu(gpu, snapshot))
    if name == "kernel_log_unreadable":
        return (
            Action(_GIVE_SYSLOG, "root, for the package's service", "gives it both capabilities"),
        )
    if name == "source_unreadable" and not snapshot.gpus:
        return (
            Action("nvidia-smi -L", ANY_USER, "shows whether the driver is loaded", heals=False),
        )
    return finding.offered


def _in_fault(daemon: ControlDaemon) -> Iterable[Action]:
    failed = [server for server in daemon.servers if server.state == "FAULT"]
    hit = [one for s in failed for one in s.clients if one.state == "torn_down"]
    return end_clients(hit, "ends the clients that the error hit; then the server recovers")


def _show_gpu_holders(daemon: ControlDaemon) -> Iterable[Action]:
    if any(server.ghost for server in daemon.servers):
        return ghost_commands(daemon)
    behind = {wait.behind_uid for wait in daemon.waits}
    pids = [c.pid for s in daemon.servers if s.uid in behind for c in s.clients]
    effect = "shows the programs that hold the GPU"
    if len(pids) > MAX_PIDS and (uid := next(iter(behind))) is not None:
        return [Action(f"ps -o pid,stat,etime,args -u {uid}", ANY_USER, effect, heals=False)]
    return show_processes(pids, effect)


def _starting(daemon: ControlDaemon) -> Iterable[Action]:
    pids = (server.pid for server in daemon.servers if server.state == "INITIALIZING")
    return show_processes(pids, "state D: it hangs in the driver")


def _leaving(daemon: ControlDaemon) -> Iterable[Action]:
    pids = [client.pid for server in daemon.servers for client in server.clients]
    return show_processes(pids, "shows the clients that it waits for")


def _start_daemon(daemon: ControlDaemon) -> Iterable[Action]:
    pipe, log = quoted_path(daemon.pipe_directory), quoted_path(daemon.log_directory)
    if daemon.state == "absent" and pipe and log:
        yield Action(
            f"CUDA_MPS_PIPE_DIRECTORY={pipe} CUDA_MPS_LOG_DIRECTORY={log} "
            "nvidia-cuda-mps-control -d",
            "root, or the user who ran it before",
            "starts the daemon",
        )


def _show_log_directories(daemon: ControlDaemon) -> Iterable[Action]:
    for log in daemon.logs:
        if not log.readable and (path := quoted_path(log.path)):
            effect = "shows which directory keeps it out"
            yield Action(f"namei -l {path}", ANY_USER, effect, heals=False)


def _large(daemon: ControlDaemon) -> Iterable[Action]:
    largest = max(daemon.logs, key=lambda log: log.size_bytes or 0)
    if path := quoted_path(largest.path):
        # As its user: root would truncate whatever a link leads to by then.
        user = f"sudo -u '#{daemon.facts.user}' " if daemon.facts and daemon.facts.user else ""
        yield Action(
            f"{user}truncate -s 0 {path}",
            "root, or the user who runs the daemon",
            "empties the log; its lines are lost",
        )


def _kernel_log(*_of: object) -> Iterable[Action]:
    yield Action("dmesg -T | grep -i xid", "root", "the driver's account of it", heals=False)


def _exclusive(gpu: Gpu, _snapshot: Snapshot) -> Iterable[Action]:
    if gpu.index.isdecimal():
        yield Action(
            f"nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS",
            "root, while the GPU is idle",
            "only MPS may use the GPU then",
        )


def _end_stranded(gpu: Gpu, _snapshot: Snapshot) -> Iterable[Action]:
    return end_processes(gpu.stranded_pids or (), "ends them, and frees their GPU memory")


def _use_mps(gpu: Gpu, snapshot: Snapshot) -> Iterable[Action]:
    return use_daemon([one for one in snapshot.daemons if one.pipe_directory in gpu.served_by])


def use_daemon(daemons: Sequence[ControlDaemon]) -> tuple[Action, ...]:
    """The command that sends a process to the only one of these daemons; none: there are more."""
    path = quoted_path(daemons[0].pipe_directory) if len(daemons) == 1 else None
    if path is None:
        return ()
    action = Action(
        f"export CUDA_MPS_PIPE_DIRECTORY={path}",
        "the user of the process, before it is started again",
        "sends it to the daemon",
    )
    return permitted([action], daemons[0].facts)


_OF_DAEMONS: dict[str, Callable[[ControlDaemon], Iterable[Action]]] = {
    "ghost_server": ghost_commands,
    "daemon_unresponsive": unresponsive_commands,
    "server_in_fault": _in_fault,
    "several_users_one_daemon": _show_gpu_holders,
    "server_starting_long": _starting,
    "daemon_absent": _start_daemon,
    "daemon_quit": _start_daemon,
    "daemon_died": _start_daemon,
    "daemon_draining": _leaving,
    "log_large": _large,
    "logs_unreadable": _show_log_directories,
    "server_crashed": _kernel_log,
    "fault": _kernel_log,
    "unfinished_work": _kernel_log,
}
_OF_GPUS: dict[str, Callable[[Gpu, Snapshot], Iterable[Action]]] = {
    "gpu_lost": _kernel_log,
    "not_exclusive_mode": _exclusive,
    "stranded_client": _end_stranded,
    "process_bypasses_mps": _use_mps,
    "pipe_directory_mismatch": _use_mps,
}
