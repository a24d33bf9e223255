"""The table: every kind of finding, and what it means on any host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One kind of finding: what it means on any host."""

    name: str
    severity: Severity
    title: str
    why: str
    kind: Literal["state", "blindness", "news"] = "state"
    """A state of the host, something that this exporter cannot see, or something that happened."""


Texts = Callable[[], tuple[str, str]]
"""Composes the evidence and the remedy of a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An advice that applies here, with what was seen and what to do, each in sentences.

    The sentences are composed when they are read: a scrape needs none of them. Names that others
    chose (programs, users, paths) are made fit to be shown.
    """

    advice: Advice
    texts: Texts
    daemon: str = ""
    gpu: str = ""
    uuid: str = ""
    since: float | None = None

    @property
    def evidence(self) -> str:
        """What was seen."""
        return self.texts()[0]

    @property
    def remedy(self) -> str:
        """What to do."""
        return self.texts()[1]


_STATES = (
    Advice(
        "ghost_server", "critical", "A ghost server blocks its daemon",
        "It was started for a user whose queued process had died, and serves nobody, not even a "
        "new process of that user. As soon as another process comes, the daemon waits for it for "
        "ever, and every new CUDA process hangs.",
    ),
    Advice(
        "daemon_unresponsive", "critical", "A control daemon does not answer",
        "Every process that starts to use CUDA now hangs in cuInit.",
    ),
    Advice(
        "server_in_fault", "critical", "A server is in FAULT",
        "A fatal GPU error was contained, but a victim has not ended: until it does, every "
        "newcomer is refused with error 807.",
    ),
    Advice(
        "gpu_lost", "critical", "A GPU has fallen off the bus",
        "Nothing can use it, and what ran there is lost.",
    ),
    Advice(
        "queued_client_dead", "warning", "A queued process has died",
        "Its place in the queue is still there. When its turn comes the daemon starts a server for "
        "it that serves nobody, and hangs on that as soon as another process comes, also one that "
        "the same user started instead.",
    ),
    Advice(
        "client_stuck", "warning", "A client is stuck",
        "Its CUDA context is not made, or a fatal GPU error has taken it away: it cannot use the "
        "GPU, and keeps its place on the server until it ends.",
    ),
    Advice(
        "possible_unfinished_work", "warning", "A client may have left GPU work behind",
        "A client that ends with GPU work in flight leaves it to the server. Where no other client "
        "is on the GPU, the next CUDA process fails with error 46 (cudaErrorDevicesUnavailable), "
        "and the one after it runs.",
    ),
    Advice(
        "several_users_one_daemon", "warning", "Users wait for each other",
        "A control daemon runs one user's server at a time. Processes of others wait inside "
        "cuInit, without a message and without a limit.",
    ),
    Advice(
        "server_starting_long", "warning", "A server does not come up",
        "Until it is ready its clients hang in cuInit; most are within a moment.",
    ),
    Advice(
        "daemon_absent", "warning", "A control daemon is gone",
        "CUDA silently goes on without MPS where it finds no daemon: without sharing, and without "
        "limits.",
    ),
    Advice(
        "daemon_refuses", "warning", "A control daemon refuses to answer",
        "It turns questions away, also the second time. The logs are followed all the same, and a "
        "daemon that answers nobody looks like this, too.",
    ),
    Advice(
        "daemon_draining", "warning", "A control daemon is about to end",
        "It was asked to quit and waits for its clients to leave: who comes now is not served.",
    ),
)  # fmt: skip

_MISCONFIGURATIONS = (
    Advice(
        "process_bypasses_mps", "warning", "A process runs beside MPS",
        "It shares the GPU by time slices with the MPS server, and no limit of MPS binds it.",
    ),
    Advice(
        "pipe_directory_mismatch", "warning", "A process looks for MPS where nobody is",
        "Its CUDA_MPS_PIPE_DIRECTORY names no running daemon's directory, so CUDA silently went on "
        "without MPS.",
    ),
    Advice(
        "daemon_not_reached", "warning", "A process did not reach its daemon",
        "It names a running daemon's directory and is not its client: it runs in a container that "
        "does not see the directory, or was there before the daemon. CUDA silently went on without "
        "MPS.",
    ),
    Advice(
        "percentage_ignored", "warning", "An active thread percentage is ignored",
        "CUDA silently ignores a CUDA_MPS_ACTIVE_THREAD_PERCENTAGE that is 0, negative, above 100 "
        "or no number: the process may use all SMs.",
    ),
    Advice(
        "memory_limit_ignored", "warning", "A memory limit is ignored",
        "One entry of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT names no GPU that the process sees; CUDA "
        "then silently ignores all of them. An ordinal counts in the process's own "
        "CUDA_VISIBLE_DEVICES, not among the GPUs of the host.",
    ),
    Advice(
        "stranded_client", "warning", "A process outlived its MPS server",
        "It can do nothing on the GPU any more and keeps its memory until it ends.",
    ),
    Advice(
        "log_large", "warning", "A log has grown large",
        "Neither MPS nor the driver rotates it. Renaming does not help, since the daemon keeps the "
        "file open; only copying and truncating does.",
    ),
    Advice(
        "daemon_quit", "info", "A control daemon has quit",
        "It was asked to. CUDA goes on without MPS where it finds no daemon.",
    ),
    Advice(
        "not_exclusive_mode", "info", "A GPU with MPS lets others in",
        "In exclusive-process mode only the MPS server may use the GPU, so nothing can bypass MPS "
        "by accident.",
    ),
    Advice(
        "mps_would_help", "info", "MPS would help here",
        "Several processes take turns on a GPU whose SMs are mostly idle: under MPS they would run "
        "at the same time.",
    ),
    Advice(
        "unfit_gpu", "info", "A GPU is too old for MPS as it is today",
        "Before Volta clients share one address space, have no limits, and a fault of one ends "
        "all.",
    ),
)  # fmt: skip

_VISIBILITY = (
    Advice(
        "source_unreadable", "warning", "A source cannot be read",
        "What it would have shown is not known: its metrics are absent.", "blindness",
    ),
    Advice(
        "tool_missing", "warning", "The control tool cannot be run",
        "Without nvidia-cuda-mps-control nobody can be asked whether a daemon answers.",
        "blindness",
    ),
    Advice(
        "daemon_state_unknown", "warning", "Whether a control daemon serves is not known",
        "It takes no questions. A daemon does so while it drains (it was asked to quit and has "
        "clients), or when others ask it all the time; control.log would tell which.", "blindness",
    ),
    Advice(
        "logs_unreadable", "warning", "The logs of a daemon cannot be followed",
        "Crashes, faults and waits can be seen nowhere else.", "blindness",
    ),
    Advice(
        "directories_assumed", "info", "Where a daemon lives is a guess",
        "Its environment cannot be read, and nothing else tells its directories: if it has others, "
        "what is asked and read here is not its own.", "blindness",
    ),
    Advice(
        "environment_unreadable", "info", "Limits of some processes are not known",
        "A client may lower its own limits in its environment, which only its user, or a process "
        "with the rights for it, may read.", "blindness",
    ),
    Advice(
        "daemon_outside_host_pid_namespace", "info", "A daemon numbers processes otherwise",
        "It runs in a PID namespace of its own and calls processes outside of it PID 0: its "
        "clients can be counted, but not always told apart.", "blindness",
    ),
    Advice(
        "processes_ignored", "info", "A user has too many control daemons",
        "Anybody may start any number of programs of that name. What is beyond the limit is not "
        "looked at, so that the others are; daemons that were configured always are.", "blindness",
    ),
    Advice(
        "clients_not_shown", "info", "Not all clients are shown one by one",
        "Each client costs series in Prometheus; so many more than expected are most often a "
        "mistake. The counts include them.", "blindness",
    ),
    Advice(
        "web_configuration_unusable", "warning", "The web configuration cannot be used",
        "The one before stays in force, certificates and passwords with it.", "blindness",
    ),
)  # fmt: skip

_RECENT_INCIDENTS = (
    Advice(
        "daemon_died", "warning", "A control daemon died",
        "Its server and all clients die with it.", "news",
    ),
    Advice(
        "server_crashed", "warning", "A server crashed",
        "All its clients are lost at once; the log calls it an exit with status 0.", "news",
    ),
    Advice(
        "server_start_failed", "warning", "A server could not start",
        "The daemon tries again, twenty times a second, for as long as a client waits.", "news",
    ),
    Advice(
        "unfinished_work", "warning", "A client ended with GPU work in flight and took others down",
        "Its kernels were still queued when it ended, in whatever way: MPS meets a fatal error "
        "then, all busy clients on that GPU die of it, and MPS blames one of them.", "news",
    ),
    Advice(
        "fault", "warning", "A fatal GPU error hit clients",
        "Who caused it and everybody who shares the GPU with it die together.", "news",
    ),
    Advice(
        "client_rejected", "warning", "A client was refused",
        "The program got a CUDA error where it expected a GPU.", "news",
    ),
)  # fmt: skip

ADVICE: dict[str, Advice] = {
    advice.name: advice
    for severity in ("critical", "warning", "info")
    for advice in (*_STATES, *_RECENT_INCIDENTS, *_MISCONFIGURATIONS, *_VISIBILITY)
    if advice.severity == severity
}
"""Every advice by its name, the most urgent first."""
