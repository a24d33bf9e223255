"""What is wrong with a GPU and with the processes on it."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter import humanize
from mps_exporter.diagnostics.catalogue import ADVICE, Finding
from mps_exporter.humanize import UserNameLookup
from mps_exporter.observations import ProcessFacts
from mps_exporter.snapshot import Gpu, Snapshot

IDLE_SM_ACTIVITY = 0.3
BUSY_UTILIZATION = 0.9
VOLTA = (7, 0)


def of_gpu(gpu: Gpu, snapshot: Snapshot, name_of: UserNameLookup) -> Iterator[Finding]:
    """All findings of one GPU."""
    seen = gpu.observation
    name = f"GPU {gpu.index}"

    def found(name: str, evidence: str, remedy: str) -> Finding:
        return Finding(ADVICE[name], evidence, remedy, gpu=gpu.index, uuid=gpu.uuid)

    if seen.lost:
        yield found(
            "gpu_lost", f"{name} ({gpu.uuid}) has fallen off the bus.",
            "Drain the host; the GPU comes back with a reset or a reboot, if at all.",
        )  # fmt: skip
    if gpu.served_by:
        yield from _direct(gpu, snapshot, name_of)
        if seen.compute_mode == "default":
            yield found(
                "not_exclusive_mode", f"The compute mode of {name} is default.",
                f"When nobody uses it: nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS. Not where "
                "two daemons share it.",
            )  # fmt: skip
        if seen.compute_capability is not None and seen.compute_capability < VOLTA:
            model = humanize.printable(seen.name or "its model")
            yield found(
                "unfit_gpu", f"{name} ({model}) is older than Volta.", "Use a GPU from Volta on."
            )
    if gpu.stranded_clients:
        pids = humanize.processes(gpu.stranded_pids or ())
        processes = humanize.count(gpu.stranded_clients, "process", "processes")
        yield found(
            "stranded_client",
            f"{processes} on {name} outlived the MPS server and "
            f"{'keeps' if gpu.stranded_clients == 1 else 'keep'} GPU memory.",
            f"End {pids or 'them: nvidia-smi lists them as M+C'}.",
        )
    yield from _would_help(gpu, name)


def _would_help(gpu: Gpu, name: str) -> Iterator[Finding]:
    utilization = gpu.reading("gpu_utilization")
    activity = gpu.reading("sm_activity")
    if gpu.served_by or len(gpu.direct_pids) < 2 or utilization is None or activity is None:
        return
    if utilization > BUSY_UTILIZATION and activity < IDLE_SM_ACTIVITY:
        yield Finding(
            ADVICE["mps_would_help"],
            f"{len(gpu.direct_pids)} processes take turns on {name}: it looks "
            f"{humanize.percent(utilization)} busy, and {humanize.percent(activity)} of its SMs "
            f"work.",
            "Start a control daemon (nvidia-cuda-mps-control -d) and the processes under it.",
            gpu=gpu.index,
            uuid=gpu.uuid,
        )


def _direct(gpu: Gpu, snapshot: Snapshot, name_of: UserNameLookup) -> Iterator[Finding]:
    """Give one finding for each way past MPS, however many processes took it."""
    directories = {
        daemon.pipe_directory
        for daemon in snapshot.daemons
        if daemon.pid is not None or daemon.state not in (None, "absent")
    }
    ways: dict[str, list[str]] = {}
    for process in gpu.direct_processes:
        name, words_of_it = _bypass(process, name_of, directories)
        ways.setdefault(name, []).append(words_of_it)
    for name, those in ways.items():
        yield Finding(
            ADVICE[name],
            f"On GPU {gpu.index} without MPS: {humanize.join_some(those)}.",
            _REMEDIES[name].format(
                directories=humanize.printable(" or ".join(sorted(gpu.served_by)), 400)
            ),
            gpu=gpu.index,
            uuid=gpu.uuid,
        )


_REMEDIES = {
    "pipe_directory_mismatch": "Set CUDA_MPS_PIPE_DIRECTORY to the daemon's directory, "
    "{directories}, and start the process again.",
    "daemon_not_reached": "In a container: mount the daemon's pipe directory under the same path, "
    "and share the host's PIDs and IPC (--pid=host --ipc=host). Then start the process again.",
    "process_bypasses_mps": "Start it again with CUDA_MPS_PIPE_DIRECTORY set to {directories}, or "
    "set the GPU's compute mode to EXCLUSIVE_PROCESS so that it is refused.",
}


def _bypass(
    process: ProcessFacts, name_of: UserNameLookup, directories: set[str]
) -> tuple[str, str]:
    user = humanize.printable(process.user) if process.user else name_of(process.uid)
    text = humanize.process(process.pid, process.name, user)
    wanted = (process.mps_environment or {}).get("CUDA_MPS_PIPE_DIRECTORY")
    if wanted is None:
        return "process_bypasses_mps", text
    place = humanize.printable(wanted, 200)
    if wanted.rstrip("/") not in directories:
        return "pipe_directory_mismatch", f"{text}, sent to {place}, where no daemon is"
    return "daemon_not_reached", f"{text}, sent to {place}, where a daemon is"
