"""A GPU that is gone, and a control daemon that is gone, refuses queries or is about to leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mps_exporter.findings.finding import Case, HostFacts, of_daemon, of_gpu, shown_path
from mps_exporter.findings.safe_commands import Action, kernel_log, quoted_path, show_processes
from mps_exporter.humanize import ago
from mps_exporter.snapshot import ControlDaemon, Gpu

WITHOUT_MPS = "cannot-find-mps-control-daemon-process"
_START = "Its user can start it again (nvidia-cuda-mps-control -d)."


@of_gpu(
    "critical",
    "A GPU has fallen off the bus",
    "No program can use it, and programs that ran there are lost.",
    alert="MpsGpuMissing",
)
def gpu_lost(_: HostFacts, gpu: Gpu) -> Iterator[Case]:
    if gpu.observation.lost:
        yield Case(
            f"GPU {gpu.index} ({gpu.uuid}) has fallen off the bus.",
            "Drain the host. Only a reset or a reboot may bring the GPU back.",
            kernel_log(),
        )


@of_daemon(
    "critical",
    "A control daemon is gone",
    "CUDA silently continues without MPS if it finds no daemon: without sharing, and without "
    "limits.",
    alert="MpsControlDaemonDown",
    page=WITHOUT_MPS,
)
def daemon_absent(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    if daemon.state == "absent" and _quit_time(daemon) is None:
        died = [one.at for one in daemon.incidents if one.kind == "daemon_died"]
        yield Case(
            f"No MPS daemon runs at {shown_path(daemon.pipe_directory)}: programs started for "
            "it use the GPU without MPS, and without its limits.",
            _START,
            start_daemon(daemon),
            died[-1] if died else None,
        )


@of_daemon(
    "warning",
    "A control daemon refuses queries",
    "It refuses queries, also on retry. The logs are still followed. A daemon that answers no "
    "queries at all looks the same.",
    alert="MpsControlDaemonRefusing",
)
def daemon_refuses(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    if daemon.state == "refused":
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} refuses queries.",
            "Run the exporter as root or as the daemon's user.",
        )


@of_daemon(
    "warning",
    "A control daemon is draining",
    "It was asked to quit and waits for its clients to exit: new clients are not served.",
    alert="MpsControlDaemonDraining",
    page="quit-does-not-return",
)
def daemon_draining(_: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    if daemon.state == "draining":
        pids = [client.pid for server in daemon.servers for client in server.clients]
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} was asked to quit and waits "
            "for its clients to exit; it accepts no new ones.",
            "It exits when the last client does.",
            show_processes(pids, "shows the clients that it waits for"),
        )


@of_daemon(
    "info",
    "A control daemon has quit",
    "The daemon received quit. CUDA continues without MPS if it finds no daemon.",
    page=WITHOUT_MPS,
)
def daemon_quit(host: HostFacts, daemon: ControlDaemon) -> Iterator[Case]:
    if daemon.state == "absent" and (quit_at := _quit_time(daemon)) is not None:
        yield Case(
            f"The MPS daemon {shown_path(daemon.pipe_directory)} received quit and exited "
            f"{ago(host.age(quit_at))}: programs started for it use the GPU without MPS.",
            _START,
            start_daemon(daemon),
            quit_at,
        )


def _quit_time(daemon: ControlDaemon) -> float | None:
    """When it quit, if that is the last that is known of it."""
    last = daemon.incidents[-1] if daemon.incidents else None
    return last.at if last is not None and last.kind == "daemon_quit" else None


def start_daemon(daemon: ControlDaemon) -> Iterable[Action]:
    """Give the command that starts a daemon that is gone."""
    pipe, log = quoted_path(daemon.pipe_directory), quoted_path(daemon.log_directory)
    if daemon.state == "absent" and pipe and log:
        yield Action(
            f"CUDA_MPS_PIPE_DIRECTORY={pipe} CUDA_MPS_LOG_DIRECTORY={log} "
            "nvidia-cuda-mps-control -d",
            "root, or the user who ran it before",
            "starts the daemon",
        )
