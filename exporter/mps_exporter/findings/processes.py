"""Processes that use a GPU without MPS, or have lost it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mps_exporter import humanize
from mps_exporter.findings.finding import Case, HostFacts, of_gpu, shown_path
from mps_exporter.findings.limits import NO_EFFECT
from mps_exporter.findings.safe_commands import Action, end_processes, permitted, quoted_path
from mps_exporter.observations import ProcessFacts
from mps_exporter.snapshot import ControlDaemon, Gpu


@of_gpu(
    "warning",
    "A process runs without MPS",
    "It shares the GPU by time slices with the MPS server, and no MPS limit applies to it.",
    alert="MpsProcessBypassesMps",
    page=NO_EFFECT,
)
def process_bypasses_mps(host: HostFacts, gpu: Gpu) -> Iterator[Case]:
    for text in _past_mps(host, gpu, "no directory"):
        remedy = (
            f"Restart it with CUDA_MPS_PIPE_DIRECTORY set to {_directories(gpu)}, or set the GPU's "
            "compute mode to EXCLUSIVE_PROCESS so that it is refused."
        )
        yield Case(text, remedy, use_daemon(_serving(host, gpu)))


@of_gpu(
    "warning",
    "A process looks for MPS in the wrong directory",
    "Its CUDA_MPS_PIPE_DIRECTORY is not the directory of a running daemon, so CUDA silently "
    "continued without MPS.",
    alert="MpsProcessBypassesMps",
)
def pipe_directory_mismatch(host: HostFacts, gpu: Gpu) -> Iterator[Case]:
    for text in _past_mps(host, gpu, "no daemon runs"):
        remedy = (
            f"Set CUDA_MPS_PIPE_DIRECTORY to the daemon's directory, {_directories(gpu)}, and "
            "restart the process."
        )
        yield Case(text, remedy, use_daemon(_serving(host, gpu)))


@of_gpu(
    "warning",
    "A process did not reach its daemon",
    "Its CUDA_MPS_PIPE_DIRECTORY is a running daemon's directory, but it is not its client: "
    "it runs in a container that does not see the directory, or started before the daemon. "
    "CUDA silently continued without MPS.",
    alert="MpsProcessBypassesMps",
)
def daemon_not_reached(host: HostFacts, gpu: Gpu) -> Iterator[Case]:
    for text in _past_mps(host, gpu, "a daemon runs"):
        yield Case(
            text,
            "In a container: mount the daemon's pipe directory at the same path, and share the "
            "host's PIDs and IPC (--pid=host --ipc=host). Then restart the process.",
        )


@of_gpu(
    "warning",
    "A process asks for MPS, and no daemon runs",
    "Its CUDA_MPS_PIPE_DIRECTORY is set, and no daemon serves its GPU: CUDA silently continued "
    "without MPS, without sharing and without limits.",
    page=NO_EFFECT,
)
def daemon_missing(host: HostFacts, gpu: Gpu) -> Iterator[Case]:
    asking = [one for one in gpu.direct_processes if _wanted(one) is not None]
    if asking and not gpu.served_by:
        those = humanize.join_some([_process(host, one, "no daemon runs") for one in asking])
        yield Case(
            f"No MPS daemon serves GPU {gpu.index}, which is used by {those}.",
            "Its user can start a daemon with that directory (CUDA_MPS_PIPE_DIRECTORY=DIRECTORY "
            "nvidia-cuda-mps-control -d), then restart the process; or unset the variable.",
        )


@of_gpu(
    "warning",
    "A process has lost its MPS server",
    "It cannot use the GPU any more and keeps its memory until it exits.",
    alert="MpsStrandedClient",
    page="the-next-job-fails-after-one-was-killed",
)
def stranded_client(_: HostFacts, gpu: Gpu) -> Iterator[Case]:
    if count := gpu.stranded_clients:
        pids = humanize.processes(gpu.stranded_pids or ())
        holds, it = ("holds", "it") if count == 1 else ("hold", "they")
        yield Case(
            f"{humanize.count(count, 'process', 'processes')} on GPU {gpu.index} lost the MPS "
            f"server and still {holds} GPU memory.",
            f"End {pids or 'them: nvidia-smi lists them as M+C'}: without a server {it} cannot "
            "use the GPU any more.",
            end_processes(gpu.stranded_pids or (), "ends them, and frees their GPU memory"),
        )


def _past_mps(host: HostFacts, gpu: Gpu, way: str) -> Iterator[str]:
    """Give the sentence on the processes that use a GPU without MPS in one way."""
    directories = {
        directory
        for daemon in host.daemons
        if daemon.pid is not None or daemon.state not in (None, "absent")
        for directory in _client_directories(daemon)
    }
    serving = _serving(host, gpu)
    own = {one.facts.user if one.facts and one.limited else None for one in serving}
    those = [
        _process(host, one, way)
        for one in (gpu.direct_processes if gpu.served_by else ())
        # An ordinary user's daemon serves that user only.
        if (not serving or None in own or one.uid in own) and _way(one, directories) == way
    ]
    if those:
        yield f"GPU {gpu.index} is used without MPS by {humanize.join_some(those)}."


def _client_directories(daemon: ControlDaemon) -> Iterator[str]:
    """Give where its clients look for it: those of MPS v3 name a server or a namespace."""
    yield daemon.pipe_directory
    found = daemon.partitioning
    for server in (found.servers or ()) if found is not None else ():
        yield f"{daemon.pipe_directory}/{server.name}"
    for one in (found.namespaces or ()) if found is not None else ():
        yield f"{daemon.pipe_directory}/{one.server_name}/{one.name}"


def _way(process: ProcessFacts, directories: set[str]) -> str:
    if (wanted := _wanted(process)) is None:
        return "no directory"
    return "a daemon runs" if wanted.rstrip("/") in directories else "no daemon runs"


def _wanted(process: ProcessFacts) -> str | None:
    return (process.mps_environment or {}).get("CUDA_MPS_PIPE_DIRECTORY")


def _process(host: HostFacts, process: ProcessFacts, way: str) -> str:
    user = humanize.printable(process.user) if process.user else host.user(process.uid)
    text = humanize.process(process.pid, process.name, user)
    if (wanted := _wanted(process)) is None:
        return text
    return f"{text}; its CUDA_MPS_PIPE_DIRECTORY is {humanize.printable(wanted, 200)}, where {way}"


def _directories(gpu: Gpu) -> str:
    return shown_path(" or ".join(sorted(gpu.served_by)))


def _serving(host: HostFacts, gpu: Gpu) -> list[ControlDaemon]:
    return [one for one in host.daemons if one.pipe_directory in gpu.served_by]


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
