"""What goes with a finding: a command to copy, who may run it, and the runbook."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mps_exporter.diagnostics.finding import Finding
from mps_exporter.diagnostics.ghost_server import ghost_commands
from mps_exporter.diagnostics.safe_commands import (
    ANY_USER,
    MAX_PIDS,
    PROCESS_OWNER,
    Action,
    end_clients,
    end_processes,
    pids_in_command,
    quoted_path,
    show_processes,
)
from mps_exporter.snapshot import ControlDaemon, Gpu, Snapshot

DOCS = "https://github.com/mps-exporter/mps-exporter/blob/main/"

_RUNBOOKS = {
    "ghost_server": "MpsGhostServer",
    "daemon_unresponsive": "MpsControlDaemonUnresponsive",
    "server_in_fault": "MpsServerStuckInFault",
    "gpu_lost": "MpsGpuRecoveryNeeded",
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
    "daemon_quit": "MpsControlDaemonDown",
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
_GIVE_SYSLOG = (
    f"mkdir -p {_DROP_IN} && printf '[Service]\\nAmbientCapabilities=CAP_SYSLOG\\n"
    "CapabilityBoundingSet=CAP_SYSLOG\\nProtectKernelLogs=no\\nDeviceAllow=/dev/kmsg r\\n' "
    f">{_DROP_IN}/kernel-log.conf && systemctl daemon-reload && systemctl restart mps-exporter"
)


def runbook_url(name: str) -> str | None:
    """The runbook of the alert on the same condition."""
    alert = _RUNBOOKS.get(name)
    return None if alert is None else f"{DOCS}prometheus/runbooks/{alert}.md"


def docs_page(name: str) -> str:
    """The page on this kind of finding, below docs/."""
    return _PAGES.get(name, "troubleshooting.md")


def docs_url(name: str) -> str:
    return f"{DOCS}docs/{docs_page(name)}"


def actions(finding: Finding, snapshot: Snapshot) -> tuple[Action, ...]:
    """The commands for a finding; empty where none is known to be right."""
    name = finding.advice.name
    if path := quoted_path(finding.folder):
        effect = "lets the server pass; then start the process again"
        return (Action(f"chmod a+x {path}", "root, or the owner of the folder", effect),)
    for daemon in snapshot.daemons:
        if daemon.pipe_directory == finding.daemon and (of_daemon := _OF_DAEMONS.get(name)):
            return tuple(of_daemon(daemon))
    for gpu in snapshot.gpus:
        if gpu.uuid == finding.uuid and (of_gpu := _OF_GPUS.get(name)):
            return tuple(of_gpu(gpu))
    if name == "kernel_log_unreadable":
        return (Action(_GIVE_SYSLOG, "root, for the package's service", "gives it CAP_SYSLOG"),)
    if name == "source_unreadable" and not snapshot.gpus:
        return (
            Action("nvidia-smi -L", ANY_USER, "shows whether the driver is loaded", heals=False),
        )
    return ()


def _unresponsive(daemon: ControlDaemon) -> Iterable[Action]:
    if any(server.ghost for server in daemon.servers):
        return ghost_commands(daemon)
    facts = daemon.facts
    processes = () if facts is None else facts.processes
    stopped = [process.pid for process in processes if process.stopped]
    if numbers := pids_in_command(stopped):
        return [Action(f"kill -CONT {numbers}", PROCESS_OWNER, "lets the stopped process go on")]
    if daemon.handover is not None:
        effect = "ends the process that it served last; the daemon stays"
        return [Action(f"kill {daemon.handover.pid}", PROCESS_OWNER, effect)]
    return show_processes((process.pid for process in processes), "shows what they are stuck in")


def _end_stuck(daemon: ControlDaemon) -> Iterable[Action]:
    clients = [client for server in daemon.servers for client in server.clients]
    creating = (client.pid for client in clients if client.state == "creating_context")
    yield from show_processes(creating, "state D: it hangs in the driver")
    yield from end_clients(
        (client for client in clients if client.state == "torn_down"),
        "ends clients that cannot use the GPU any more",
    )


def _in_fault(daemon: ControlDaemon) -> Iterable[Action]:
    failed = [server for server in daemon.servers if server.state == "FAULT"]
    torn = [one for s in failed for one in s.clients if one.state == "torn_down"]
    left = torn or [client for server in failed for client in server.clients]
    return end_clients(left, "ends the clients that are left; then the server recovers")


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
        yield Action(
            f"truncate -s 0 {path}",
            "root, or the user who runs the daemon",
            "empties the log; its lines are lost",
        )


def _kernel_log(_of: ControlDaemon | Gpu) -> Iterable[Action]:
    yield Action("dmesg -T | grep -i xid", "root", "the driver's account of it", heals=False)


def _exclusive(gpu: Gpu) -> Iterable[Action]:
    if gpu.index.isdecimal():
        yield Action(
            f"nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS",
            "root, while the GPU is idle",
            "only MPS may use the GPU then",
        )


def _end_stranded(gpu: Gpu) -> Iterable[Action]:
    return end_processes(gpu.stranded_pids or (), "ends them, and frees their GPU memory")


def _use_mps(gpu: Gpu) -> Iterable[Action]:
    directories = [quoted_path(one) for one in gpu.served_by]
    if len(directories) == 1 and directories[0]:
        yield Action(
            f"export CUDA_MPS_PIPE_DIRECTORY={directories[0]}",
            "the user of the process, before it is started again",
            "sends it to the daemon",
        )


_OF_DAEMONS: dict[str, Callable[[ControlDaemon], Iterable[Action]]] = {
    "ghost_server": ghost_commands,
    "daemon_unresponsive": _unresponsive,
    "server_in_fault": _in_fault,
    "client_stuck": _end_stuck,
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
_OF_GPUS: dict[str, Callable[[Gpu], Iterable[Action]]] = {
    "gpu_lost": _kernel_log,
    "not_exclusive_mode": _exclusive,
    "stranded_client": _end_stranded,
    "process_bypasses_mps": _use_mps,
    "pipe_directory_mismatch": _use_mps,
}
