"""GPU modes, limits and age; processes that use a GPU without MPS or have lost their server."""

from collections.abc import Iterable, Iterator, Sequence

from mps_exporter import humanize
from mps_exporter import limits_without_a_flag as policy
from mps_exporter.findings.finding import (
    Action,
    Case,
    Cases,
    HostFacts,
    clients_of,
    end_processes,
    of_daemon,
    of_gpu,
    permitted,
    quoted_path,
    shown_path,
)
from mps_exporter.findings.limits import NO_EFFECT
from mps_exporter.humanize import join_some, percent, printable
from mps_exporter.observations import ProcessFacts
from mps_exporter.snapshot import ControlDaemon, Gpu, NamedServer, Namespace

VOLTA = (7, 0)  # Lowest compute capability of current MPS.


def predates_volta(gpu: Gpu) -> bool:
    return (gpu.observation.compute_capability or VOLTA) < VOLTA


def _serving(host: HostFacts, gpu: Gpu, uid: int | None) -> list[ControlDaemon]:
    """Return the daemons that serve a GPU to a user; with uid None, those that serve all users."""
    return [one for one in _open_to(host.daemons, uid) if one.pipe_directory in gpu.served_by]


def _may_serve(host: HostFacts, gpu: Gpu, uid: int | None) -> list[ControlDaemon]:
    """Return the daemons that serve a user a GPU; if none, those whose GPUs are unknown."""
    unsure = [one for one in _open_to(host.daemons, uid) if not one.gpu_uuids]
    return _serving(host, gpu, uid) or [one for one in unsure if one.state != "absent"]


def _open_to(daemons: Iterable[ControlDaemon], uid: int | None) -> list[ControlDaemon]:
    return [one for one in daemons if not one.facts.limited or one.facts.user == uid]


@of_gpu(
    "info",
    "A GPU with MPS admits other processes",
    "In exclusive-process mode, a program that misses the daemon fails while an MPS server has the "
    "GPU. Here it runs without MPS, and without its limits.",
    alert="MpsNotExclusiveMode",
    summary="A GPU that MPS serves is not in EXCLUSIVE_PROCESS mode; programs can bypass MPS.",
)
def not_exclusive_mode(host: HostFacts, gpu: Gpu) -> Cases:
    # Not for an ordinary user's daemon: the mode would keep out all other users.
    if _serving(host, gpu, None) and gpu.observation.compute_mode == "default":
        command = f"nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS"
        idle, effect = "while the GPU is idle", "refuses programs without MPS while a server runs"
        yield Case(
            f"The compute mode of GPU {gpu.index} is default.",
            f"{humanize.capitalize(idle)}, run {command} (not if two daemons share it).",
            [Action(command, "root", effect, condition=idle)] if gpu.index.isdecimal() else (),
        )


@of_gpu(
    "info",
    "A GPU is in exclusive mode without a daemon",
    "One process has it at a time: the next one fails with error 46 (cudaErrorDevicesUnavailable).",
    "Start a control daemon, or set the mode back to default.",
    page="cuda-error-46-devices-unavailable",
)
def exclusive_without_daemon(host: HostFacts, gpu: Gpu) -> Cases:
    seen = gpu.observation
    # An ordinary user's daemon serves no other user.
    users = {one.pipe_directory for one in host.daemons if one.facts.limited}
    runs = {one.pipe_directory for one in host.daemons if one.state != "absent"} | {*gpu.served_by}
    if seen.compute_mode == "exclusive_process" and not (
        seen.lost or _unsure(host) or runs - users
    ):
        command = f"nvidia-smi -i {gpu.index} -c DEFAULT"
        action = Action(command, "root", "lets several processes use the GPU")
        yield Case(
            f"GPU {gpu.index} is in exclusive-process mode, and no daemon serves all users.",
            actions=[action] if gpu.index.isdecimal() else (),
        )


@of_gpu(
    "info",
    "Several daemons serve a GPU",
    "Programs of different daemons take turns on it; only those of one daemon run at the same "
    "time. In exclusive-process mode only one of the daemons can use it.",
    "Let all programs of a GPU use one daemon, unless their users must not share one. A daemon "
    "sees only the GPUs of its CUDA_VISIBLE_DEVICES.",
    page="no-speed-up-with-mps",
)
def gpu_shared_by_daemons(host: HostFacts, gpu: Gpu) -> Cases:
    if len(daemons := _serving(host, gpu, None)) > 1:
        those = join_some([shown_path(one.pipe_directory) for one in daemons])
        yield Case(f"GPU {gpu.index} is served by {those}.")


@of_gpu(
    "info",
    "MPS would help here",
    "Several processes take turns on a GPU whose SMs are mostly idle: with MPS they would run "
    "at the same time.",
    "Start a control daemon (nvidia-cuda-mps-control -d), then the users' next programs with "
    "its environment, and compare: what it gains depends on the programs.",
    alert="MpsWouldHelp",
    summary="Processes take turns on a GPU whose SMs are mostly idle; with MPS they could run at "
    "the same time.",
    page="no-speed-up-with-mps",
)
def mps_would_help(host: HostFacts, gpu: Gpu) -> Cases:
    utilization, activity = gpu.reading("gpu_utilization"), gpu.reading("sm_activity")
    users = {one.pid: one.uid for one in gpu.direct_processes}
    number = sum(not _serving(host, gpu, users.get(pid)) for pid in gpu.direct_pids)
    if number < 2 or utilization is None or activity is None:
        return
    if utilization > policy.MIN_BUSY_UTILIZATION and activity < policy.MAX_IDLE_SM_ACTIVITY:
        yield Case(
            f"{number} processes take turns on GPU {gpu.index}: its utilization "
            f"is {percent(utilization)}, but only {percent(activity)} of its SMs are active."
        )


@of_gpu(
    "info",
    "Limits leave a GPU partly idle",
    "An active thread percentage is a cap, also while no other program needs the SMs. Here the "
    "clients use all that their limits allow, and the rest of the GPU is idle.",
    "Raise the percentages: they reserve nothing, and clients share what is there. "
    "Measure the programs with and without.",
    page="no-speed-up-with-mps",
)
def limit_idles_gpu(_: HostFacts, gpu: Gpu) -> Cases:
    allowed, activity = gpu.sm_committed_ratio, gpu.reading("sm_activity")
    if not gpu.served_by or gpu.direct_pids or not allowed or activity is None:
        return
    if allowed <= policy.MAX_COMMITTED_RATIO and activity >= policy.MIN_USED_RATIO * allowed:
        yield Case(
            f"{percent(activity)} of the SMs of GPU {gpu.index} are active: as many as the limits "
            f"of its clients allow together ({percent(allowed)})."
        )


@of_gpu(
    "info",
    "Memory limits add up to more than the GPU has",
    "A memory limit reserves nothing: an allocation below its limit fails when the others have "
    "taken the memory.",
    "Lower the limits, unless it is known that the programs do not need all of it at once.",
    page="one-pod-or-job-gets-more-than-its-share",
)
def memory_overcommitted(_: HostFacts, gpu: Gpu) -> Cases:
    committed, total = gpu.client_memory_committed_bytes, gpu.reading("memory_total")
    if committed is not None and total is not None and committed > total:
        yield Case(
            f"The memory limits of the clients on GPU {gpu.index} add up to "
            f"{humanize.memory(committed)}; it has {humanize.memory(total)}."
        )


@of_gpu(
    "info",
    "A GPU is too old for current MPS",
    "Before Volta clients share one address space, have no limits, and a fault of one ends "
    "all of them.",
    "Use a Volta or later GPU.",
)
def unfit_gpu(_: HostFacts, gpu: Gpu) -> Cases:
    if gpu.served_by and predates_volta(gpu):
        model = printable(gpu.observation.name or "its model")
        yield Case(f"GPU {gpu.index} ({model}) is older than Volta.")


@of_gpu(
    "warning",
    "A process runs without MPS",
    "It shares the GPU by time slices with the MPS server, and no MPS limit applies to it.",
    "Its owner can start it again with CUDA_MPS_PIPE_DIRECTORY set to {directories}. Compute mode "
    "EXCLUSIVE_PROCESS, set while the GPU is idle, refuses such programs.",
    alert="MpsProcessBypassesMps",
    summary="A program uses a GPU without the MPS daemon that serves it; the MPS limits do not "
    "apply to it.",
    page=NO_EFFECT,
)
def process_bypasses_mps(host: HostFacts, gpu: Gpu) -> Cases:
    return _past_mps(host, gpu, "no directory", process_bypasses_mps.remedy)


@of_daemon(
    "info",
    "A client joined by a mounted default directory",
    "NVIDIA's container runtime mounts /tmp/nvidia-mps into each GPU container of a host that has "
    "it, and CUDA looks there: programs that do not ask for MPS wait, or get error 805.",
    "Nothing, if MPS is meant for it. Else start it with a directory that does not exist.",
    page="mps-with-docker-containers",
)
def joined_by_default_directory(host: HostFacts, daemon: ControlDaemon) -> Cases:
    if those := [host.client(one) for one in clients_of(daemon) if one.joined_by == "mount"]:
        text = f"Without a CUDA_MPS_PIPE_DIRECTORY of its own, by a mount: {join_some(those)}."
        yield Case(text, actions=[_restart_with("/nonexistent", "keeps it out of MPS")])


@of_gpu(
    "warning",
    "A process looks for MPS in the wrong directory",
    "Its CUDA_MPS_PIPE_DIRECTORY is not the directory of a running daemon, so CUDA silently "
    "continued without MPS.",
    "Its owner can set CUDA_MPS_PIPE_DIRECTORY to the daemon's directory, {directories}, and start "
    "it again.",
    runbook="MpsProcessBypassesMps",
)
def pipe_directory_mismatch(host: HostFacts, gpu: Gpu) -> Cases:
    return _past_mps(host, gpu, "no daemon runs", pipe_directory_mismatch.remedy)


@of_gpu(
    "warning",
    "A process did not reach its daemon",
    "Its CUDA_MPS_PIPE_DIRECTORY is a running daemon's directory, but it is not its client: "
    "it runs in a container that does not see the directory, or started before the daemon. "
    "CUDA silently continued without MPS.",
    "In a container: mount the daemon's pipe directory at the same path; old drivers also need "
    "the host's IPC namespace (--ipc=host). Then its owner can start it again.",
    runbook="MpsProcessBypassesMps",
)
def daemon_not_reached(host: HostFacts, gpu: Gpu) -> Cases:
    return _past_mps(host, gpu, "a daemon runs", daemon_not_reached.remedy)


@of_gpu(
    "warning",
    "A process asks for MPS, and no daemon runs",
    "Its CUDA_MPS_PIPE_DIRECTORY is set, and no daemon serves its GPU: CUDA silently continued "
    "without MPS, without sharing and without limits.",
    "Its user can start a daemon with that directory (CUDA_MPS_PIPE_DIRECTORY=DIRECTORY "
    "nvidia-cuda-mps-control -d), then start the process again; or unset the variable.",
    page=NO_EFFECT,
)
def daemon_missing(host: HostFacts, gpu: Gpu) -> Cases:
    asking = [
        _process_text(host, one, _reached(host, one))
        for one in gpu.direct_processes
        if _wanted(one) is not None and not _may_serve(host, gpu, one.uid)
    ]
    if asking and not _unsure(host):
        yield Case(f"No MPS daemon serves GPU {gpu.index}, which is used by {join_some(asking)}.")


@of_gpu(
    "warning",
    "A process has lost its MPS server",
    "It cannot use the GPU any more and keeps its memory until it exits.",
    alert="MpsStrandedClient",
    summary="An MPS client has lost its server; it still holds GPU memory and can no longer use "
    "the GPU.",
    page="the-next-job-fails-after-one-was-killed",
)
def stranded_client(_: HostFacts, gpu: Gpu) -> Cases:
    if number := gpu.stranded_clients:
        pids = humanize.processes(gpu.stranded_pids or ())
        holds, it = ("holds", "it") if number == 1 else ("hold", "they")
        yield Case(
            f"{humanize.count(number, 'process', 'processes')} on GPU {gpu.index} lost the MPS "
            f"server and still {holds} GPU memory.",
            f"End {pids}: without a server {it} cannot use the GPU any more."
            if pids
            else "Their PIDs are not known: end no process before they are.",
            end_processes(gpu.stranded_pids or (), "ends them, and frees their GPU memory"),
        )


def _past_mps(host: HostFacts, gpu: Gpu, reached: str, remedy: str) -> Cases:
    """Yield a case about a served GPU's direct processes with this result of _reached()."""
    those, serving = list[str](), dict[str, ControlDaemon]()
    for one in gpu.direct_processes:
        # Such a directory is wrong also if the GPUs of a daemon are unknown.
        found = (_may_serve if reached == "no daemon runs" else _serving)(host, gpu, one.uid)
        if found and _reached(host, one) == reached:
            those.append(_process_text(host, one, reached))
            serving |= {daemon.pipe_directory: daemon for daemon in found}
    if those:
        yield Case(
            f"GPU {gpu.index} is used without MPS by {join_some(those)}.",
            remedy.format(directories=shown_path(" or ".join(sorted(serving)))),
            use_daemon(list(serving.values())) if reached != "a daemon runs" else (),
        )


def _client_directories(daemon: ControlDaemon) -> Iterator[str]:
    """Yield the directories of a daemon, and of the servers and namespaces of an MPS v3 daemon."""
    yield daemon.pipe_directory
    for server in daemon.partitioning.rows(NamedServer):
        yield f"{daemon.pipe_directory}/{server.name}"
    for one in daemon.partitioning.rows(Namespace):
        yield f"{daemon.pipe_directory}/{one.server_name}/{one.name}"


def _unsure(host: HostFacts) -> bool:
    """Return whether there may be a daemon that is not known."""
    return any(one.name == "process" and not one.success for one in host.snapshot.collectors)


def _reached(host: HostFacts, process: ProcessFacts) -> str:
    if (wanted := _wanted(process)) is None:
        return "no directory"
    runs = any(
        wanted.rstrip("/") in _client_directories(one)
        for one in _open_to(host.daemons, process.uid)
        if one.pid is not None or one.state not in (None, "absent")
    )
    return "a daemon runs" if runs else "unknown" if _unsure(host) else "no daemon runs"


def _wanted(process: ProcessFacts) -> str | None:
    return (process.mps_environment or {}).get("CUDA_MPS_PIPE_DIRECTORY")


def _process_text(host: HostFacts, process: ProcessFacts, reached: str) -> str:
    user = printable(process.user) if process.user else host.user(process.uid)
    text = humanize.process(process.pid, process.name, user)
    if (wanted := _wanted(process)) is not None:
        text += f"; its CUDA_MPS_PIPE_DIRECTORY is {printable(wanted, 200)}, where {reached}"
    return text


def use_daemon(daemons: Sequence[ControlDaemon]) -> tuple[Action, ...]:
    """Return the command that sets the only daemon's directory; none if several, or forbidden."""
    path = quoted_path(daemons[0].pipe_directory) if len(daemons) == 1 else None
    if path is None:
        return ()
    return permitted([_restart_with(path, "sends it to the daemon")], daemons[0].facts)


def _restart_with(path: str, effect: str) -> Action:
    run_as = "the user of the process, before it is started again"
    return Action(f"export CUDA_MPS_PIPE_DIRECTORY={path}", run_as, effect)
