"""What is wrong with a GPU and with the processes on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from mps_exporter import humanize
from mps_exporter.diagnostics.causes import VOLTA
from mps_exporter.diagnostics.finding import Finding, Texts
from mps_exporter.diagnostics.finding_titles import ADVICE
from mps_exporter.humanize import UserNameLookup
from mps_exporter.observations import ProcessFacts
from mps_exporter.snapshot import ControlDaemon, Gpu, Snapshot

IDLE_SM_ACTIVITY = 0.3
BUSY_UTILIZATION = 0.9
MOST_ALLOWED = 0.75
"""Limits that add up to more leave little idle."""
USED_UP = 0.9
"""Of what the limits allow, so much active counts as all of it: the limits are what holds."""


def gpu_findings(gpu: Gpu, snapshot: Snapshot, name_of: UserNameLookup) -> Iterator[Finding]:
    seen = gpu.observation
    name = f"GPU {gpu.index}"

    def found(name: str, texts: Texts) -> Finding:
        return Finding(ADVICE[name], texts, gpu=gpu.index, uuid=gpu.uuid)

    if seen.lost:
        yield found(
            "gpu_lost",
            lambda: (
                f"{name} ({gpu.uuid}) has fallen off the bus.",
                "Drain the host. Only a reset or a reboot may bring the GPU back.",
            ),
        )
    if gpu.served_by:
        yield from _direct(gpu, snapshot, name_of)
        if seen.compute_mode == "default":
            yield found(
                "not_exclusive_mode",
                lambda: (
                    f"The compute mode of {name} is default.",
                    f"While the GPU is idle, run nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS "
                    "(not if two daemons share it).",
                ),
            )
        if seen.compute_capability is not None and seen.compute_capability < VOLTA:
            yield found(
                "unfit_gpu",
                lambda: (
                    f"{name} ({humanize.printable(seen.name or 'its model')}) is older than Volta.",
                    "Use a Volta or later GPU.",
                ),
            )
        yield from _idle(gpu, name, found)
    elif asking := [one for one in gpu.direct_processes if _wanted(one) is not None]:
        yield found("daemon_missing", partial(_missing_texts, gpu, asking, name_of))
    committed, total = gpu.client_memory_committed_bytes, gpu.reading("memory_total")
    if committed is not None and total is not None and committed > total:
        yield found(
            "memory_overcommitted",
            lambda: (
                f"The memory limits of the clients on {name} add up to "
                f"{humanize.memory(committed)}; it has {humanize.memory(total)}.",
                "Lower the limits, unless it is known that the programs do not need all of it at "
                "once.",
            ),
        )
    if gpu.stranded_clients:
        yield found("stranded_client", partial(_stranded_texts, gpu, gpu.stranded_clients, name))
    yield from _would_help(gpu, name)


def _stranded_texts(gpu: Gpu, count: int, name: str) -> tuple[str, str]:
    pids = humanize.processes(gpu.stranded_pids or ())
    return (
        f"{humanize.count(count, 'process', 'processes')} on {name} lost the MPS server and still "
        f"{'holds' if count == 1 else 'hold'} GPU memory.",
        f"End {pids or 'them: nvidia-smi lists them as M+C'}: without a server "
        f"{'it' if count == 1 else 'they'} cannot use the GPU any more.",
    )


def _idle(gpu: Gpu, name: str, found: Callable[[str, Texts], Finding]) -> Iterator[Finding]:
    allowed, activity = gpu.sm_committed_ratio, gpu.reading("sm_activity")
    if gpu.direct_pids or not allowed or activity is None or allowed > MOST_ALLOWED:
        return
    if activity >= USED_UP * allowed:
        yield found(
            "limit_idles_gpu",
            lambda: (
                f"{humanize.percent(activity)} of the SMs of {name} are active: as many as the "
                f"limits of its clients allow together ({humanize.percent(allowed)}).",
                "Raise the percentages: they reserve nothing, and clients share what is there. "
                "Measure the programs with and without.",
            ),
        )


def _missing_texts(
    gpu: Gpu, asking: Sequence[ProcessFacts], name_of: UserNameLookup
) -> tuple[str, str]:
    those = humanize.join_some([_bypass(one, "daemon_missing", name_of) for one in asking])
    return (
        f"No MPS daemon serves GPU {gpu.index}, which is used by {those}.",
        "Its user can start a daemon with that directory (CUDA_MPS_PIPE_DIRECTORY=DIRECTORY "
        "nvidia-cuda-mps-control -d), then restart the process; or unset the variable.",
    )


def _would_help(gpu: Gpu, name: str) -> Iterator[Finding]:
    utilization = gpu.reading("gpu_utilization")
    activity = gpu.reading("sm_activity")
    if gpu.served_by or len(gpu.direct_pids) < 2 or utilization is None or activity is None:
        return
    if utilization > BUSY_UTILIZATION and activity < IDLE_SM_ACTIVITY:
        yield Finding(
            ADVICE["mps_would_help"],
            lambda: (
                f"{len(gpu.direct_pids)} processes take turns on {name}: its utilization is "
                f"{humanize.percent(utilization)}, but only {humanize.percent(activity)} of its "
                "SMs are active.",
                "Start a control daemon (nvidia-cuda-mps-control -d), restart the processes with "
                "its environment, and compare: what it gains depends on the programs.",
            ),
            gpu=gpu.index,
            uuid=gpu.uuid,
        )


def _direct(gpu: Gpu, snapshot: Snapshot, name_of: UserNameLookup) -> Iterator[Finding]:
    """Give one finding for each way past MPS, however many processes took it."""
    directories = {
        directory
        for daemon in snapshot.daemons
        if daemon.pid is not None or daemon.state not in (None, "absent")
        for directory in _client_directories(daemon)
    }
    ways: dict[str, list[ProcessFacts]] = {}
    serving = [one for one in snapshot.daemons if one.pipe_directory in gpu.served_by]
    own = {one.facts.user if one.facts and one.limited else None for one in serving}
    for process in gpu.direct_processes:
        if serving and None not in own and process.uid not in own:
            continue  # an ordinary user's daemon serves that user only
        ways.setdefault(_way_past_mps(process, directories), []).append(process)
    for name, processes in ways.items():
        yield Finding(
            ADVICE[name],
            partial(_direct_texts, gpu, name, processes, name_of),
            gpu=gpu.index,
            uuid=gpu.uuid,
        )


def _client_directories(daemon: ControlDaemon) -> Iterator[str]:
    """Give where its clients look for it: those of MPS v3 name a server or a namespace."""
    yield daemon.pipe_directory
    found = daemon.partitioning
    for server in (found.servers or ()) if found is not None else ():
        yield f"{daemon.pipe_directory}/{server.name}"
    for one in (found.namespaces or ()) if found is not None else ():
        yield f"{daemon.pipe_directory}/{one.server_name}/{one.name}"


def _direct_texts(
    gpu: Gpu, name: str, processes: Sequence[ProcessFacts], name_of: UserNameLookup
) -> tuple[str, str]:
    those = humanize.join_some([_bypass(process, name, name_of) for process in processes])
    directories = humanize.printable(" or ".join(sorted(gpu.served_by)), 400)
    return (
        f"GPU {gpu.index} is used without MPS by {those}.",
        _REMEDIES[name].format(directories=directories),
    )


_REMEDIES = {
    "pipe_directory_mismatch": "Set CUDA_MPS_PIPE_DIRECTORY to the daemon's directory, "
    "{directories}, and restart the process.",
    "daemon_not_reached": "In a container: mount the daemon's pipe directory at the same path, "
    "and share the host's PIDs and IPC (--pid=host --ipc=host). Then restart the process.",
    "process_bypasses_mps": "Restart it with CUDA_MPS_PIPE_DIRECTORY set to {directories}, or "
    "set the GPU's compute mode to EXCLUSIVE_PROCESS so that it is refused.",
}


def _wanted(process: ProcessFacts) -> str | None:
    return (process.mps_environment or {}).get("CUDA_MPS_PIPE_DIRECTORY")


def _way_past_mps(process: ProcessFacts, directories: set[str]) -> str:
    wanted = _wanted(process)
    if wanted is None:
        return "process_bypasses_mps"
    reachable = wanted.rstrip("/") in directories
    return "daemon_not_reached" if reachable else "pipe_directory_mismatch"


def _bypass(process: ProcessFacts, name: str, name_of: UserNameLookup) -> str:
    user = humanize.printable(process.user) if process.user else name_of(process.uid)
    text = humanize.process(process.pid, process.name, user)
    wanted = _wanted(process)
    if wanted is None:
        return text
    runs = "a daemon runs" if name == "daemon_not_reached" else "no daemon runs"
    return f"{text}; its CUDA_MPS_PIPE_DIRECTORY is {humanize.printable(wanted, 200)}, where {runs}"
