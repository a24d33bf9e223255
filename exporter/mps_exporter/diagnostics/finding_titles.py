"""The table: every kind of finding, its title, and why it matters on any host."""

from __future__ import annotations

from mps_exporter.diagnostics.finding import Advice
from mps_exporter.diagnostics.ghost_server import GHOST_SERVER

_STATES = (
    GHOST_SERVER,
    Advice(
        "daemon_unresponsive",
        "critical",
        "A control daemon does not answer",
        "Every process that starts to use CUDA now hangs in cuInit.",
    ),
    Advice(
        "server_in_fault",
        "critical",
        "A server is in FAULT",
        "A fatal GPU error was contained, but a victim has not exited: until it does, every new "
        "client is refused with error 807.",
    ),
    Advice(
        "gpu_lost",
        "critical",
        "A GPU has fallen off the bus",
        "No program can use it, and programs that ran there are lost.",
    ),
    Advice(
        "queued_client_dead",
        "warning",
        "A queued process has died",
        "It still occupies its slot in the queue. When its turn comes the daemon starts a server "
        "for it that serves no process, and hangs on that server as soon as another process "
        "connects, including one that the same user started instead.",
    ),
    Advice(
        "client_stuck",
        "warning",
        "A client is stuck",
        "Its CUDA context was not created, or was destroyed by a fatal GPU error: it cannot use "
        "the GPU, and occupies its slot on the server until it exits.",
    ),
    Advice(
        "possible_unfinished_work",
        "warning",
        "A client may have left GPU work behind",
        "A client that ends with GPU work in flight leaves it to the server. Where no other client "
        "is on the GPU, the next CUDA process fails with error 46 (cudaErrorDevicesUnavailable), "
        "and the one after it runs.",
    ),
    Advice(
        "several_users_one_daemon",
        "warning",
        "Users wait for each other",
        "A control daemon runs one user's server at a time. Processes of other users wait inside "
        "cuInit, without a message and without a time limit.",
    ),
    Advice(
        "server_starting_long",
        "warning",
        "A server does not become ready",
        "Until it is ready its clients hang in cuInit; most servers are ready within a second.",
    ),
    Advice(
        "daemon_absent",
        "critical",
        "A control daemon is gone",
        "CUDA silently continues without MPS if it finds no daemon: without sharing, and without "
        "limits.",
    ),
    Advice(
        "daemon_refuses",
        "warning",
        "A control daemon refuses queries",
        "It refuses queries, also on retry. The logs are still followed. A daemon that answers no "
        "queries at all looks the same.",
    ),
    Advice(
        "daemon_draining",
        "warning",
        "A control daemon is draining",
        "It was asked to quit and waits for its clients to exit: new clients are not served.",
    ),
)

_MISCONFIGURATIONS = (
    Advice(
        "process_bypasses_mps",
        "warning",
        "A process runs without MPS",
        "It shares the GPU by time slices with the MPS server, and no MPS limit applies to it.",
    ),
    Advice(
        "pipe_directory_mismatch",
        "warning",
        "A process looks for MPS in the wrong directory",
        "Its CUDA_MPS_PIPE_DIRECTORY is not the directory of a running daemon, so CUDA silently "
        "continued without MPS.",
    ),
    Advice(
        "daemon_not_reached",
        "warning",
        "A process did not reach its daemon",
        "Its CUDA_MPS_PIPE_DIRECTORY is a running daemon's directory, but it is not its client: "
        "it runs in a container that does not see the directory, or started before the daemon. "
        "CUDA silently continued without MPS.",
    ),
    Advice(
        "daemon_missing",
        "warning",
        "A process asks for MPS, and no daemon runs",
        "Its CUDA_MPS_PIPE_DIRECTORY is set, and no daemon serves its GPU: CUDA silently continued "
        "without MPS, without sharing and without limits.",
    ),
    Advice(
        "limit_looser_than_default",
        "warning",
        "A client has more than its daemon allows by default",
        "A running client keeps the limits that its server had when it connected. One that started "
        "before its daemon was configured has none, without a message.",
    ),
    Advice(
        "percentage_ignored",
        "warning",
        "An active thread percentage is ignored",
        "CUDA silently ignores a CUDA_MPS_ACTIVE_THREAD_PERCENTAGE that is 0, negative, above 100 "
        "or not a number: the process may use all SMs.",
    ),
    Advice(
        "memory_limit_ignored",
        "warning",
        "A memory limit is ignored",
        "One entry of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT names no GPU that the process sees; CUDA "
        "then silently ignores all of them. An ordinal counts in the process's own "
        "CUDA_VISIBLE_DEVICES, not among the GPUs of the host.",
    ),
    Advice(
        "sm_partition_mismatch",
        "warning",
        "A client is in an SM partition that was not meant for it",
        "A process chooses its SM partition itself (CUDA_MPS_SM_PARTITION), and MPS does not check "
        "the choice: it takes SMs from the clients of that partition, or fails as it starts.",
    ),
    Advice(
        "stranded_client",
        "warning",
        "A process has lost its MPS server",
        "It cannot use the GPU any more and keeps its memory until it exits.",
    ),
    Advice(
        "log_large",
        "warning",
        "A log has grown large",
        "Neither MPS nor the driver rotates it. Renaming does not help, since the daemon keeps the "
        "file open; only copying and truncating does.",
    ),
    Advice(
        "daemon_quit",
        "info",
        "A control daemon has quit",
        "The daemon received quit. CUDA continues without MPS if it finds no daemon.",
    ),
    Advice(
        "not_exclusive_mode",
        "info",
        "A GPU with MPS admits other processes",
        "In exclusive-process mode only the MPS server may use the GPU, so nothing can bypass MPS "
        "by accident.",
    ),
    Advice(
        "mps_would_help",
        "info",
        "MPS would help here",
        "Several processes take turns on a GPU whose SMs are mostly idle: with MPS they would run "
        "at the same time.",
    ),
    Advice(
        "limit_idles_gpu",
        "info",
        "Limits leave a GPU partly idle",
        "An active thread percentage is a cap, also while no other program needs the SMs. Here the "
        "clients use all that their limits allow, and the rest of the GPU is idle.",
    ),
    Advice(
        "share_exceeded",
        "info",
        "A job or pod may use more than one share",
        "MPS limits each process. Several processes of one job or pod have that much each.",
    ),
    Advice(
        "memory_overcommitted",
        "info",
        "Memory limits add up to more than the GPU has",
        "A memory limit reserves nothing: an allocation below its limit fails when the others have "
        "taken the memory.",
    ),
    Advice(
        "unfit_gpu",
        "info",
        "A GPU is too old for current MPS",
        "Before Volta clients share one address space, have no limits, and a fault of one ends "
        "all of them.",
    ),
)

_VISIBILITY = (
    Advice(
        "source_unreadable",
        "warning",
        "A source cannot be read",
        "Its metrics are absent.",
        "blindness",
    ),
    Advice(
        "tool_missing",
        "warning",
        "The control tool cannot be run",
        "Without nvidia-cuda-mps-control no daemon can be queried.",
        "blindness",
    ),
    Advice(
        "daemon_state_unknown",
        "warning",
        "Whether a control daemon serves clients is not known",
        "It accepts no queries. That happens while it drains (it was asked to quit and has "
        "clients), or when other programs query it all the time; control.log would show "
        "which.",
        "blindness",
    ),
    Advice(
        "logs_unreadable",
        "warning",
        "The logs of a daemon cannot be followed",
        "Crashes, faults and waits cannot be detected from any other source.",
        "blindness",
    ),
    Advice(
        "replies_not_understood",
        "info",
        "Replies of a control daemon are not fully understood",
        "This driver's lists are not as documented: what is not understood is left out.",
        "blindness",
    ),
    Advice(
        "directories_assumed",
        "info",
        "The directories of a daemon are assumed",
        "Its environment cannot be read, and no other source shows its directories: if it has "
        "others, the replies and logs read here are not its own.",
        "blindness",
    ),
    Advice(
        "environment_unreadable",
        "info",
        "Limits of some processes are not known",
        "A client may lower its own limits in its environment, which only its user, or a process "
        "with the required capabilities, may read.",
        "blindness",
    ),
    Advice(
        "kernel_log_unreadable",
        "info",
        "The kernel log cannot be read",
        "After a fatal GPU error only the address in the kernel log proves which client caused it. "
        "What MPS reports proves nothing.",
        "blindness",
    ),
    Advice(
        "daemon_outside_host_pid_namespace",
        "info",
        "A daemon runs in a different PID namespace",
        "It logs processes outside of its PID namespace as PID 0: its clients can be counted, but "
        "not always told apart.",
        "blindness",
    ),
    Advice(
        "processes_ignored",
        "info",
        "A user has too many control daemons",
        "Any user may start any number of programs with that name. Those above the limit are not "
        "read; configured daemons always are.",
        "blindness",
    ),
    Advice(
        "clients_not_shown",
        "info",
        "Not all clients are shown individually",
        "Each client costs series in Prometheus; so many clients are most often a mistake. The "
        "counts include them.",
        "blindness",
    ),
    Advice(
        "web_configuration_unusable",
        "warning",
        "The web configuration cannot be used",
        "The previous one stays in force, including its certificates and passwords.",
        "blindness",
    ),
)

_RECENT_INCIDENTS = (
    Advice(
        "daemon_died",
        "critical",
        "A control daemon died",
        "Its server and all clients are lost with it.",
        "news",
    ),
    Advice(
        "server_crashed",
        "critical",
        "A server crashed",
        "All its clients are lost at once; the log reports an exit with status 0.",
        "news",
    ),
    Advice(
        "server_start_failed",
        "critical",
        "A server could not start",
        "The daemon retries twenty times a second for as long as a client waits.",
        "news",
    ),
    Advice(
        "unfinished_work",
        "warning",
        "A client left GPU work unfinished; others were lost",
        "Its kernels were still queued when it ended, for whatever reason. That causes a fatal GPU "
        "error: all busy clients on that GPU fail, and MPS names one of them.",
        "news",
    ),
    Advice(
        "fault",
        "warning",
        "A fatal GPU error hit clients",
        "All busy clients on that GPU are lost. A client's own bad pointer causes it, or GPU work "
        "that a client left unfinished when it ended.",
        "news",
    ),
    Advice(
        "client_rejected",
        "warning",
        "A client was refused",
        "The program got a CUDA error where it expected a GPU.",
        "news",
    ),
)

_TRACES = (
    Advice(
        "daemon_promised",
        "warning",
        "A control daemon was set up and does not run",
        "A systemd unit is enabled, or Kubernetes has made a directory for it: programs that are "
        "started for it wait, or run without MPS.",
        "trace",
    ),
    Advice(
        "server_out_of_descriptors",
        "warning",
        "A server has no file descriptor left",
        "It needs about ten for each client and GPU. Its clients work; a new client gets error 46, "
        "or hangs.",
        "trace",
    ),
    Advice(
        "server_without_daemon",
        "warning",
        "A server has lost its control daemon",
        "It accepts no clients, and keeps GPU memory and the driver.",
        "trace",
    ),
    Advice(
        "process_not_reaped",
        "warning",
        "A process of MPS has ended and was not reaped",
        "It was reported to keep a new server from working until its parent ended.",
        "trace",
    ),
    Advice(
        "directory_left",
        "info",
        "A daemon that is gone has left its pipe directory",
        "Programs that are started for it run without MPS. Its files do no harm to a new daemon of "
        "the same user.",
        "trace",
    ),
)

ADVICE: dict[str, Advice] = {
    advice.name: advice
    for severity in ("critical", "warning", "info")
    for advice in (*_STATES, *_RECENT_INCIDENTS, *_MISCONFIGURATIONS, *_VISIBILITY, *_TRACES)
    if advice.severity == severity
}
"""Every advice by its name, the most urgent first."""
