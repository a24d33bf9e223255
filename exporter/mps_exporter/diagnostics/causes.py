"""Why servers of a daemon cannot start: what proves a cause, and what only hints at one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mps_exporter import humanize
from mps_exporter.mps.client_limits import DaemonGpus, visible_gpus
from mps_exporter.mps.control_protocol import SOCKET_PATH_BYTES, control_socket_bytes
from mps_exporter.observations import DaemonConditions
from mps_exporter.snapshot import ControlDaemon, Gpu, Incident, Snapshot

VOLTA = (7, 0)
"""The first compute capability of today's MPS."""

_NOT_SEEN = "Its cause could not be seen. The last lines of server.log show what it did."


def start_failure(
    incident: Incident, daemon: ControlDaemon, snapshot: Snapshot, view: DaemonConditions | None
) -> tuple[str, str]:
    """Return why a server could not start, and what to do, each in sentences.

    Args:
        incident: The failure.
        daemon: Whose server it was.
        snapshot: The host.
        view: What was read of the daemon for this purpose; None: nothing.
    """
    proved = list(_proved(incident, daemon, snapshot, view))
    if proved:
        causes, remedies = zip(*proved, strict=True)
        return f"Cause: {'; '.join(causes)}.", " ".join(remedies)
    hints = list(_hints(daemon, snapshot, view))
    if hints:
        causes, remedies = zip(*hints, strict=True)
        return f"{_NOT_SEEN} Possible: {'; '.join(causes)}.", " ".join(remedies)
    return _NOT_SEEN, ""


def too_long(directories: Iterable[str]) -> str:
    """Say which pipe directories have paths so long that no daemon can run there; "": none has."""
    longest = max((control_socket_bytes(one) for one in directories), default=0)
    if longest <= SOCKET_PATH_BYTES:
        return ""
    return (
        f" No daemon can run there: the path of its control socket has {longest} bytes; a socket's "
        f"path has at most {SOCKET_PATH_BYTES}."
    )


def _proved(
    incident: Incident, daemon: ControlDaemon, snapshot: Snapshot, view: DaemonConditions | None
) -> Iterator[tuple[str, str]]:
    if "Operation not permitted" in incident.detail and daemon.uid != 0:
        runs = "does not run as root" if daemon.uid is None else f"runs as user {daemon.uid}"
        yield (
            f"the daemon {runs} and may not start servers for other users",
            "Run the daemon as root, or one for each user.",
        )
    if "SHM segment" in incident.detail:
        yield (
            "no room in /dev/shm, or no file descriptors",
            "See df -h /dev/shm and the limit of open files of the daemon.",
        )
    if view is not None and (closed := view.closed.get(incident.uid or 0)) is not None:
        yield (
            f"in the daemon's root, {humanize.printable(closed.why, 400)}, and the server runs as "
            "that user, with the daemon's group",
            "Let its user and the daemon's group pass that folder.",
        )
    yield from _visible_gpu_causes(daemon, snapshot)


def _visible_gpu_causes(daemon: ControlDaemon, snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    order = tuple(gpu.uuid for gpu in snapshot.gpus)
    sliced = any(gpu.observation.parent_uuid is not None for gpu in snapshot.gpus)
    gpus = DaemonGpus(frozenset(order), complete=bool(order), order=order or None)
    visible = None if sliced else visible_gpus(daemon.visible_devices, gpus)
    if daemon.visible_devices is not None and visible == ():
        shown = humanize.printable(repr(daemon.visible_devices))
        yield (
            f"its CUDA_VISIBLE_DEVICES is {shown}, which names no GPU of this host",
            "Start the daemon with UUIDs of nvidia-smi -L.",
        )
    for gpu in snapshot.gpus:
        if visible is None or gpu.uuid in visible:
            yield from _gpu_causes(gpu)


def _gpu_causes(gpu: Gpu) -> Iterator[tuple[str, str]]:
    mode, pids = gpu.observation.compute_mode, gpu.direct_pids
    if mode == "prohibited":
        yield (
            f"the compute mode of GPU {gpu.index} is prohibited",
            f"nvidia-smi -i {gpu.index} -c EXCLUSIVE_PROCESS.",
        )
    elif mode == "exclusive_process" and pids:
        yield (
            f"{humanize.processes(pids) or 'another process'} has GPU {gpu.index}, whose compute "
            "mode is exclusive_process, for itself",
            "Ask its user to start it again under MPS.",
        )


def _hints(
    daemon: ControlDaemon, snapshot: Snapshot, view: DaemonConditions | None
) -> Iterator[tuple[str, str]]:
    if view is not None and view.oom_kills:
        limit = view.memory_limit_bytes
        of = f" of {humanize.memory(limit)}" if limit is not None else ""
        yield (
            f"the kernel has ended {humanize.count(view.oom_kills, 'process', 'processes')} of the "
            f"daemon's control group, since its host memory{of} ran out",
            "Raise the memory limit of its pod or unit.",
        )
    if daemon.has_own_pid_namespace:
        yield (
            "the daemon has a PID namespace of its own (reported to fail on some drivers)",
            "Give its pod hostPID: true.",
        )
    old = [
        gpu.index
        for gpu in snapshot.gpus
        if gpu.observation.compute_capability is not None
        and gpu.observation.compute_capability < VOLTA
    ]
    if old:
        yield f"GPU {', '.join(old)} is older than Volta", "Use a Volta or later GPU for MPS."
