"""Why one process hangs, fails or runs without MPS: the checks, in the order of a CUDA start.

Pure: from a snapshot of the host and, on a live host, from what /proc shows of the process. The
first check that finds a problem is the answer; those before it were passed, or could not be made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mps_exporter import humanize
from mps_exporter.diagnostics.daemons import CREATING_LONG_SECONDS
from mps_exporter.diagnostics.finding import Finding
from mps_exporter.diagnostics.finding_commands import actions, docs_page, use_daemon
from mps_exporter.diagnostics.halted import halt_texts, resuming
from mps_exporter.diagnostics.safe_commands import Action, open_folder, permitted, quoted_path
from mps_exporter.diagnostics.shares import Excess, looser
from mps_exporter.mps.client_limits import (
    DaemonGpus,
    effective_ratio,
    parse_active_thread_percentage,
    parse_pinned_memory_limit,
    visible_gpus,
)
from mps_exporter.mps.control_protocol import SOCKET_PATH_BYTES, control_socket_bytes
from mps_exporter.observations import ProcessView
from mps_exporter.snapshot import (
    Client,
    ControlDaemon,
    Gpu,
    Handover,
    Incident,
    Server,
    Snapshot,
    Wait,
)

Outcome = Literal["ok", "problem", "warning", "unknown"]

NEAR_LIMIT_RATIO = 0.95

CONTEXT_BYTES = 290 << 20
"""Measured on an H200: with this limit cuDevicePrimaryCtxRetain failed with error 2; with 1 GiB a
client without memory of its own had 753 MiB left."""

FEWEST_SMS = 2
"""SMs come in pairs; on Hopper the least share is 8 whatever the percentage (measured)."""

HOPPER = (9, 0)

_BLOCKING = ("ghost_server", "daemon_unresponsive", "daemon_draining", "server_starting_long")
_REFUSING = ("server_in_fault", "server_start_failed", "server_out_of_descriptors")
_WITHOUT_MPS = "cannot-find-mps-control-daemon-process"
_REFUSALS = {
    "context_limit": "cuda-error-808-809-mps-max-clients-reached",
    "server_not_ready": "cuda-error-807-mps-server-not-ready",
    "invalid_device": "invalid-cuda-visible-devices",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, and what was found."""

    name: str
    outcome: Outcome
    text: str
    remedy: str = ""
    page: str = ""
    """Of docs/symptoms, without its folder and suffix."""
    command: str = ""
    """The remedy as one line of a shell. One that sets or unsets a variable is for the shell from
    which the process is started again; "": there is none that is right on any host."""


_FOREIGN_PROC = Check(
    "process",
    "problem",
    "It has a PID namespace of its own, and sees the /proc of another: CUDA fails with error 304 "
    "(cudaErrorOperatingSystem).",
    "Mount its own /proc (unshare --mount-proc; every container engine does), or share the PID "
    "namespace.",
    "cuda-error-304-operating-system",
)


def conclusion(checks: list[Check]) -> Check:
    """The check that answers the question: the first problem, else the first warning."""
    for outcome in ("problem", "warning"):
        for check in checks:
            if check.outcome == outcome:
                return check
    for check in checks:
        if check.outcome == "unknown" and check.name == "connection":
            return replace(check, text=humanize.sentence(check.text))
    unknown = [check.text for check in checks if check.outcome == "unknown"]
    if unknown:
        return Check("conclusion", "unknown", f"Nothing wrong was seen, but {unknown[0]}")
    return Check("conclusion", "ok", "Nothing is wrong with this process as far as MPS goes.")


def check_process(
    pid: int, snapshot: Snapshot, found: tuple[Finding, ...], view: ProcessView | None
) -> list[Check]:
    """Make all checks of a process.

    Args:
        pid: As the host numbers processes.
        snapshot: The host.
        found: The findings of that snapshot, and its recent incidents.
        view: What /proc shows of the process; None: this is a recording.
    """
    place = _find(pid, snapshot)
    checks = list(_process_checks(pid, view, place))
    if view is not None and (not view.present or view.state == "Z"):
        return [*checks, *_history(pid, snapshot)]
    daemon = place.daemon or _daemon_named(snapshot, view)
    working = bool(place.direct_on or (place.client is not None and place.client.contexts))
    if view is not None:
        checks += _directory_checks(view, daemon, snapshot)
        if view.own_proc is False and not working:
            checks.append(_FOREIGN_PROC)
        if not working:  # else it has set the variable for itself
            checks += _device_checks(view, daemon, snapshot)
        checks += _variables(view)
    if not place.stranded_on:  # else no daemon helps it
        checks += _daemon_checks(daemon, snapshot, view)
        checks += _blocked(daemon, found, place, snapshot)
    checks += _connection(pid, daemon, snapshot, place, view)
    if place.client is not None:
        checks += _limit_checks(place.client, snapshot)
        if daemon is not None and (excess := looser(place.client, daemon)) is not None:
            checks.append(_looser(excess))
    if view is not None:
        if not working:
            checks += _room(view, daemon, snapshot)
        checks += _memory_checks(view)
    return [*checks, *_history(pid, snapshot)]


def pids_of(snapshot: Snapshot, *, uid: int | None = None, job: str | None = None) -> list[int]:
    """The clients, waiting processes and processes without MPS of a user, or of a job.

    A job is a Slurm job's number, or the UID of a pod; a process that waits is of no known job.
    """
    found: set[int] = set()
    for daemon in snapshot.daemons:
        for server in daemon.servers:
            for client in server.clients:
                if (uid is not None and client.uid == uid) or (
                    job is not None and job in (client.slurm_job_id, client.pod_uid)
                ):
                    found.add(client.pid)
        found |= {wait.pid for wait in daemon.waits if uid is not None and wait.uid == uid}
    for gpu in snapshot.gpus:
        found |= {one.pid for one in gpu.direct_processes if uid is not None and one.uid == uid}
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a process stands in MPS."""

    daemon: ControlDaemon | None = None
    server: Server | None = None
    client: Client | None = None
    wait: Wait | None = None
    handover: Handover | None = None
    """The daemon does not answer, and it was the last that it served."""
    direct_on: tuple[Gpu, ...] = ()
    stranded_on: tuple[Gpu, ...] = ()
    """Its server has gone, and it is there with memory."""


def _find(pid: int, snapshot: Snapshot) -> _Place:
    direct = tuple(gpu for gpu in snapshot.gpus if pid in gpu.direct_pids)
    for daemon in snapshot.daemons:
        if daemon.handover is not None and daemon.handover.pid == pid:
            return _Place(daemon, handover=daemon.handover, direct_on=direct)
        for server in daemon.servers:
            for client in server.clients:
                if client.pid == pid:
                    return _Place(daemon, server, client, direct_on=direct)
        for wait in daemon.waits:
            if wait.pid == pid:
                return _Place(daemon, wait=wait, direct_on=direct)
    stranded = tuple(gpu for gpu in snapshot.gpus if pid in (gpu.stranded_pids or ()))
    return _Place(direct_on=direct, stranded_on=stranded)


def _daemon_named(snapshot: Snapshot, view: ProcessView | None) -> ControlDaemon | None:
    if view is None or view.daemon_directory is None:
        return None
    return next(
        (one for one in snapshot.daemons if one.pipe_directory == view.daemon_directory), None
    )


def _process_checks(pid: int, view: ProcessView | None, place: _Place) -> Iterator[Check]:
    if view is None:
        yield Check("process", "unknown", "a recording has no files of the process itself.")
        return
    name = humanize.printable(view.command or "?")
    if not view.present or view.state == "Z":
        parent = f"its parent (process {view.parent_pid}) has not reaped it (state Z)"
        ended = f"It ({name}) has ended; {parent}"
        text = ended if view.present else f"No process {pid} is there"
        waits = place.wait is not None
        if waits:
            text += "; it died while it waited in the daemon's queue"
        yield Check(
            "process",
            "problem" if waits else "warning",
            f"{text}.",
            "See the finding queued_client_dead of mps-exporter doctor." if waits else "",
            "every-cuda-program-hangs-and-the-control-tool-too" if waits else "",
        )
        return
    if (halted := halt_texts(view)) is not None:
        text, remedy = halted
        command = next((one.command for one in resuming(view)), "")
        yield Check("process", "problem", f"It ({name}) is {text}.", remedy, command=command)
    elif view.state == "D":
        yield Check(
            "process",
            "warning",
            f"It ({name}) is inside the kernel and cannot be "
            "interrupted (state D): in the driver, or on a file system that does not answer.",
            f"cat /proc/{pid}/stack, as root, twice: the same function says where.",
        )
    else:
        yield Check("process", "ok", f"It ({name}) runs as user {view.uid}.")


def _running(snapshot: Snapshot) -> list[ControlDaemon]:
    return [one for one in snapshot.daemons if one.state != "absent"]


def _command_to_use_daemon(snapshot: Snapshot) -> str:
    """The command that sends a process to the host's only daemon; "": there is none, or several."""
    running = [one for one in _running(snapshot) if one.facts is None or not one.facts.root]
    return next((one.command for one in use_daemon(running)), "")


def _directory_checks(
    view: ProcessView, daemon: ControlDaemon | None, snapshot: Snapshot
) -> Iterator[Check]:
    if view.pipe_directory is None:
        yield Check(
            "directory",
            "unknown",
            "the environment of the process cannot be read (only its user and root may), so which "
            "pipe directory it uses is not known.",
        )
        return
    shown = humanize.printable(view.pipe_directory, 400)
    length = control_socket_bytes(view.pipe_directory)
    if length > SOCKET_PATH_BYTES:
        yield Check(
            "directory",
            "problem",
            f"The path of its control socket has {length} bytes; a socket's path has at most "
            f"{SOCKET_PATH_BYTES}.",
            "A shorter CUDA_MPS_PIPE_DIRECTORY, for the daemon and its clients.",
            "cannot-find-mps-control-daemon-process",
            _command_to_use_daemon(snapshot),
        )
    elif view.closed_folder is not None:
        # Only on the way to a directory that a daemon of the host has chosen, not the process.
        facts = (one.facts for one in snapshot.daemons if one.pipe_directory == view.pipe_directory)
        named = next((one for one in facts if one is not None), None)
        opening = open_folder(view.closed_folder, named) if named is not None else ()
        yield Check(
            "directory",
            "problem",
            f"It cannot use {shown}: {view.path_error}.",
            "Let its user and the daemon's group pass the folder, and start it again.",
            "cuda-error-805-mps-connection-failed" if daemon else _WITHOUT_MPS,
            # Its server runs as the same user, but with the daemon's group (see view_daemon).
            next((one.command for one in opening), ""),
        )
    elif view.path_error is not None:
        yield Check(
            "directory",
            "problem",
            f"It cannot use {shown}: {view.path_error}.",
            "Set the directory of a daemon, or mount it into the process's container; then start "
            "it again.",
            "cuda-error-805-mps-connection-failed" if daemon else _WITHOUT_MPS,
            _command_to_use_daemon(snapshot),
        )
    elif view.closed_socket:
        yield Check(
            "directory",
            "problem",
            f"Its user {view.uid} may not connect to {shown}/control (mode {view.closed_socket}): "
            "CUDA runs without MPS.",
            "The daemon's user has to allow all users to write to that socket (chmod a+w), or "
            "start the daemon again with a umask that does; then start the process again.",
            _WITHOUT_MPS,
            _open_socket(snapshot, view.daemon_directory),
        )
    else:
        source = "CUDA_MPS_PIPE_DIRECTORY" if view.names_directory else "the default"
        yield Check("directory", "ok", f"It uses {shown} ({source}).")


def _daemon_checks(
    daemon: ControlDaemon | None, snapshot: Snapshot, view: ProcessView | None
) -> Iterator[Check]:
    if daemon is None:
        if view is None or view.pipe_directory is None:
            yield Check("daemon", "unknown", "which daemon it would use is not known.")
            return
        if view.path_error is not None or view.closed_socket:
            return
        yield _nobody(view, view.pipe_directory, snapshot)
        return
    shown = humanize.printable(daemon.pipe_directory, 400)
    if daemon.state == "absent":
        yield Check(
            "daemon",
            "problem",
            f"The daemon at {shown} is gone.",
            "Start it, then the process again.",
            "cannot-find-mps-control-daemon-process",
        )
        return
    uid = view.uid if view is not None else None
    if uid is not None and daemon.uid not in (None, 0, uid):
        yield Check(
            "daemon",
            "problem",
            f"The daemon at {shown} was started by user {daemon.uid}, and cannot start a server "
            f"for user {uid}: the process gets error 805.",
            "Run the daemon as root, or give the process a directory without a daemon.",
            "cuda-error-805-mps-connection-failed",
        )
        return
    yield Check("daemon", "ok", f"The daemon at {shown} is {daemon.state or 'there'}.")


def _nobody(view: ProcessView, directory: str, snapshot: Snapshot) -> Check:
    """No daemon serves the directory of a process."""
    others = _running(snapshot)
    there = (
        "Daemons run at "
        f"{humanize.join_some([humanize.printable(one.pipe_directory) for one in others])}."
        if others
        else "No control daemon runs on this host."
    )
    start = "nvidia-cuda-mps-control -d"
    if view.names_directory:
        # Not in a directory of an ordinary user's choice: whoever copies this may be root.
        path = quoted_path(directory) if view.uid == 0 else None
        start = f"CUDA_MPS_PIPE_DIRECTORY={path} {start}" if path else ""
    if view.leftover:
        text, remedy = "A daemon has run at its pipe directory, and is gone", "Start it again"
    else:
        text, remedy = "No control daemon serves its pipe directory", "Start one"
    if any(one.pipe_directory == directory for one in others):
        remedy, start = "Mount the host's directory into its container", ""
    elif others and not view.leftover:
        remedy, start = "Set the directory of one that runs", _command_to_use_daemon(snapshot)
    return Check(
        "daemon",
        "problem" if view.names_directory or others else "warning",
        f"{text}: it runs without MPS, without sharing and without limits. {there}",
        f"{remedy}, then start the process again.",
        _WITHOUT_MPS,
        start,
    )


def _open_socket(snapshot: Snapshot, directory: str | None) -> str:
    daemons = (one for one in snapshot.daemons if one.pipe_directory == directory)
    facts = next((one.facts for one in daemons), None)
    path = quoted_path(f"{facts.pipe_path}/control") if facts is not None else None
    opening = Action(f"chmod a+w {path}", "root, or the daemon's user", "opens the socket")
    return next((one.command for one in permitted([opening] if path else (), facts)), "")


def _blocked(
    daemon: ControlDaemon | None, found: tuple[Finding, ...], place: _Place, snapshot: Snapshot
) -> Iterator[Check]:
    if daemon is None:
        return
    served = place.client is not None and place.client.state in ("active", "torn_down")
    names = _BLOCKING if served else (*_BLOCKING, *_REFUSING)
    # Without descriptors the daemon hangs as well: the cause comes before what follows from it.
    for finding in sorted(found, key=lambda one: one.advice.name != "server_out_of_descriptors"):
        name = finding.advice.name
        if finding.daemon == daemon.pipe_directory and name in names:
            yield Check(
                "service",
                "warning" if served else "problem",
                finding.evidence,
                finding.remedy,
                docs_page(name).removeprefix("symptoms/").removesuffix(".md"),
                next((one.command for one in actions(finding, snapshot) if one.heals), ""),
            )


def _connection(
    pid: int,
    daemon: ControlDaemon | None,
    snapshot: Snapshot,
    place: _Place,
    view: ProcessView | None,
) -> Iterator[Check]:
    now = snapshot.taken_at
    if place.handover is not None:
        yield _last_served(place.handover)
    elif place.wait is not None:
        yield _waiting(place.wait, now, "It has waited in the daemon's queue")
    elif (client := place.client) is not None:
        yield _client_check(client, now)
    elif place.stranded_on:
        indexes = ", ".join(gpu.index for gpu in place.stranded_on)
        yield Check(
            "connection",
            "problem",
            f"It has lost its MPS server (error 806): it cannot use GPU {indexes} any more, and "
            "keeps its memory there until it ends.",
            "End it, and start it again.",
            "cuda-error-806-mps-rpc-failure",
            f"kill {pid}",
        )
    elif place.direct_on:
        indexes = ", ".join(gpu.index for gpu in place.direct_on)
        yield Check(
            "connection",
            "problem",
            f"It has a context on GPU {indexes} and is no client of a running MPS server: it "
            "started without MPS, or its server has gone.",
            "Start it again with the daemon's CUDA_MPS_PIPE_DIRECTORY.",
            "a-limit-has-no-effect",
            _command_to_use_daemon(snapshot),
        )
    elif daemon is not None and (full := _full(daemon, snapshot)) is not None:
        yield full
    elif (unseen := _wait_not_seen(daemon, snapshot, view)) is not None:
        yield unseen
    else:
        yield Check(
            "connection",
            "warning",
            "It is no client of MPS, does not wait for it, and has no context on a GPU: it has "
            "made no CUDA call yet, has got an error from it, or hangs elsewhere.",
            f"See what it printed; py-spy dump --pid {pid}, or cat /proc/{pid}/stack as root.",
        )


def _waiting(wait: Wait, now: float, text: str, because: str = "") -> Check:
    behind = f" behind user {wait.behind_uid}" if wait.behind_uid is not None else ""
    return Check(
        "connection",
        "problem",
        f"{text}{behind} for {humanize.age(now - wait.since)}{because}.",
        "Wait: killing it makes everything hang when its turn comes. It is served when the last "
        "client of the other user has left, and up to 51 s after.",
        "a-program-hangs-in-cuinit",
    )


def _wait_not_seen(
    daemon: ControlDaemon | None, snapshot: Snapshot, view: ProcessView | None
) -> Check | None:
    """Say why it is not known whether a process waits; None: it would be seen."""
    anywhere = view is None or view.pipe_directory is None
    for one in (daemon,) if daemon is not None else snapshot.daemons if anywhere else ():
        inner = one.has_own_pid_namespace
        if one.state == "absent" or (one.shows_waits and not inner):
            continue
        uid = view.uid if view is not None else None
        own = [wait for wait in one.waits if wait.uid == uid and not wait.dead and not wait.pid]
        if inner and own:
            because = "; its daemon has a PID namespace of its own, so that one may be another's"
            text = f"It waits, as a process of user {uid} does in the daemon's queue"
            return _waiting(own[0], snapshot.taken_at, text, because)
        return _unknown_wait(one, view)
    return None


def _unknown_wait(one: ControlDaemon, view: ProcessView | None) -> Check:
    remedy, text = "", "whether it waits is not known: "
    if not one.follows("control"):
        text += "control.log is not readable, or not known."
        logs = (view.mps_environment or {}).get("CUDA_MPS_LOG_DIRECTORY") if view else None
        named = quoted_path(logs) if logs else None
        remedy = f"Name the log directory: mps-exporter doctor --mps.log-directory={named or 'DIR'}"
        remedy += f" --mps.pipe-directory={quoted_path(one.pipe_directory) or 'DIR'}; or ask root."
    elif one.has_own_pid_namespace:
        text += "its daemon has a PID namespace of its own, and logs no PID of this host."
    else:
        text += "an MPS v3 daemon does not tell."
    uid = view.uid if view is not None else None
    holders = {server.uid for server in one.servers if server.uid is not None}
    if uid is not None and holders and uid not in holders and not one.multiuser:
        text += (
            f" The daemon serves user {min(holders)} now: a process of user {uid} waits until all "
            "clients of that user have left. Do not kill it."
        )
    return Check("connection", "unknown", text, remedy, "a-program-hangs-in-cuinit")


def _last_served(last: Handover) -> Check:
    lost = last.server_pid is not None
    return Check(
        "connection",
        "problem",
        f"The daemon sent it to server {last.server_pid}, which has ended, and waits for it."
        if lost
        else "It is the last that the daemon sent to its server, which has done nothing since.",
        "End it, and start it again." if lost else "See what the daemon hangs on; it may be sound.",
        "every-cuda-program-hangs-and-the-control-tool-too",
        f"kill {last.pid}" if lost else "",
    )


def _full(daemon: ControlDaemon, snapshot: Snapshot) -> Check | None:
    for server in daemon.servers:
        for uuid, limit in server.contexts_limit.items():
            if server.contexts.get(uuid, 0) >= limit:
                return Check(
                    "connection",
                    "problem",
                    f"Server {server.pid} has {limit} of at most {limit} contexts on GPU "
                    f"{snapshot.gpu_indexes.get(uuid, uuid)}: a process that starts now is refused "
                    "(error 46 or 808).",
                    "Let some of its clients end, or start a second daemon with a directory of "
                    "its own; then start the process again.",
                    "cuda-error-808-809-mps-max-clients-reached",
                )
    return None


def _client_check(client: Client, now: float) -> Check:
    since = now - client.state_since if client.state_since is not None else None
    age = f" for {humanize.age(since)}" if since is not None else ""
    if client.state in ("connecting", "creating_context"):
        stuck = since is not None and since >= CREATING_LONG_SECONDS
        return Check(
            "connection",
            "problem" if stuck else "ok",
            f"It is connected to server {client.server_pid}, and has had no context{age}.",
            "See the last lines of server.log, and whether the server is in state T or D."
            if stuck
            else "",
            "a-client-is-connected-and-hangs" if stuck else "",
        )
    if client.state == "torn_down":
        return Check(
            "connection",
            "problem",
            "A fatal GPU error destroyed its context: it cannot use the GPU any more.",
            f"End process {client.pid} and restart it; until it ends, new clients get error 807.",
            "cuda-error-700-illegal-address-under-mps",
        )
    return Check("connection", "ok", f"It has been a client of server {client.server_pid}{age}.")


def _limit_checks(client: Client, snapshot: Snapshot) -> Iterator[Check]:
    if client.percentage_ignored is not None:
        yield Check(
            "limits",
            "problem",
            f"Its CUDA_MPS_ACTIVE_THREAD_PERCENTAGE "
            f"({humanize.printable(client.percentage_ignored)}) is ignored.",
            "A number above 0 and at most 100.",
            "a-limit-has-no-effect",
        )
    if client.memory_limit_ignored is not None:
        yield Check(
            "limits",
            "problem",
            "Its CUDA_MPS_PINNED_DEVICE_MEM_LIMIT "
            f"({humanize.printable(client.memory_limit_ignored)}) is ignored: an entry names no "
            "GPU that the process sees.",
            "UUIDs, or ordinals within its own CUDA_VISIBLE_DEVICES.",
            "a-limit-has-no-effect",
        )
    for uuid, limit in client.memory_limit_bytes.items():
        used = client.memory_used_bytes.get(uuid)
        if used is not None and limit and used >= NEAR_LIMIT_RATIO * limit:
            yield Check(
                "limits",
                "warning",
                f"It uses {humanize.memory(used)} of at most {humanize.memory(limit)} on GPU "
                f"{snapshot.gpu_indexes.get(uuid, uuid)}: the next allocation can fail.",
                "A higher limit, before it starts.",
                "cuda-error-2-out-of-memory-under-mps",
            )
    if client.environment_readable is False:
        yield Check("limits", "unknown", "limits that it sets for itself cannot be seen.")
    if client.sm_limit:
        sms = ", ".join(f"{count} SMs" for count in client.sm_limit.values())
        yield Check("limits", "ok", f"It may use at most {sms}.")
    else:
        yield Check("limits", "unknown", "how many SMs it may use is not known.")


def _looser(excess: Excess) -> Check:
    return Check(
        "limits",
        "warning",
        f"It may use {excess.text}: it connected before the daemon was configured, or to a server "
        "that was started before.",
        "Restart it when all clients of its server have exited.",
        "a-limit-has-no-effect",
    )


def _device_checks(
    view: ProcessView, daemon: ControlDaemon | None, snapshot: Snapshot
) -> Iterator[Check]:
    visible = (view.mps_environment or {}).get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible_gpus(visible, _nameable_gpus(daemon, snapshot)) == ():
        shown = humanize.printable(repr(visible))
        yield Check(
            "variables",
            "problem",
            f"Its CUDA_VISIBLE_DEVICES is {shown}, which names no GPU: it sees none.",
            "A UUID of nvidia-smi -L, or an ordinal among the GPUs of its daemon; or unset it for "
            "all GPUs. Then start it again.",
            "invalid-cuda-visible-devices",
            "unset CUDA_VISIBLE_DEVICES",
        )


def _variables(view: ProcessView) -> Iterator[Check]:
    if view.missing_libraries:
        yield Check(
            "variables",
            "warning",
            f"Its environment has {', '.join(view.missing_libraries)}, which names a file that is "
            "not there.",
            "Unset it, and start the process again.",
            command=f"unset {' '.join(view.missing_libraries)}",
        )
    elif view.debug_variables:
        yield Check(
            "variables",
            "warning",
            f"Its environment has {', '.join(view.debug_variables)}: debugging or profiling slows "
            "it down or makes its kernels run one after the other.",
            "Unset them, unless that is meant, and start the process again.",
            "no-speed-up-with-mps",
            command=f"unset {' '.join(view.debug_variables)}",
        )


def _nameable_gpus(daemon: ControlDaemon | None, snapshot: Snapshot) -> DaemonGpus:
    """The GPUs that a process can name: its daemon's, else the host's."""
    whole = [gpu for gpu in snapshot.gpus if gpu.observation.parent_uuid is None]
    if any(gpu.observation.parent_uuid is not None for gpu in snapshot.gpus):
        whole = []  # how CUDA counts MIG instances was not measured
    served = set(daemon.gpu_uuids) if daemon is not None else set()
    order = tuple(gpu.uuid for gpu in whole if not served or gpu.uuid in served)
    return DaemonGpus(frozenset(order), complete=bool(order), order=order or None)


def _room(view: ProcessView, daemon: ControlDaemon | None, snapshot: Snapshot) -> Iterator[Check]:
    """Whether the limits that a process set for itself leave enough for a context."""
    text = (view.mps_environment or {}).get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
    limits = parse_pinned_memory_limit(text)
    if daemon is not None and limits and min(limits.values()) <= CONTEXT_BYTES:
        yield Check(
            "limits",
            "problem",
            f"Its CUDA_MPS_PINNED_DEVICE_MEM_LIMIT allows {humanize.memory(min(limits.values()))}; "
            f"on an H200 no context could be made with {humanize.memory(CONTEXT_BYTES)} (error 2).",
            "A higher limit, and start the process again.",
            "cuda-error-2-out-of-memory-under-mps",
        )
    if daemon is not None:
        yield from _few_sms(view, daemon, snapshot)


def _few_sms(view: ProcessView, daemon: ControlDaemon, snapshot: Snapshot) -> Iterator[Check]:
    text = (view.mps_environment or {}).get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    own = parse_active_thread_percentage(text).ratio
    ratio = effective_ratio(own, daemon.default_active_thread_ratio)
    for gpu in snapshot.gpus:
        sms = gpu.observation.sm_count
        old = (gpu.observation.compute_capability or HOPPER) < HOPPER
        if ratio and sms and old and gpu.uuid in daemon.gpu_uuids and ratio * sms < FEWEST_SMS:
            yield Check(
                "limits",
                "warning",
                f"Its percentage is {humanize.percent(ratio, exact=True)} of {sms} SMs, less than "
                f"{FEWEST_SMS}: reported to fail with error 46.",
                "A higher percentage, or fewer replicas.",
                "cuda-error-46-devices-unavailable",
            )


def _memory_checks(view: ProcessView) -> Iterator[Check]:
    if view.oom_kills:
        yield Check(
            "memory",
            "warning",
            f"The kernel has ended {humanize.count(view.oom_kills, 'process', 'processes')} of its "
            "control group because host memory ran out.",
            "Raise the memory limit of the job or pod. If a client is ended like this while it "
            "computes, other clients on its GPU are lost.",
            "all-programs-died-at-once",
        )


def _history(pid: int, snapshot: Snapshot) -> Iterator[Check]:
    for daemon in snapshot.daemons:
        for incident in daemon.incidents:
            if (text := _part_in(pid, incident)) is not None:
                yield Check(
                    "history",
                    "problem" if text[1] else "warning",
                    f"{humanize.ago(snapshot.taken_at - incident.at)}: {text[0]}",
                    page=text[1],
                )


def _part_in(pid: int, incident: Incident) -> tuple[str, str] | None:
    """What an incident has to do with a process, and the page; None: nothing."""
    if pid in incident.caused_by_pids:
        left = incident.kind == "unfinished_work"
        did = "left GPU work unfinished" if left else "used a bad pointer"
        lost = humanize.count(len({*incident.pids} - {pid}), "other client")
        return (
            f"it {did}, which caused a fatal GPU error and took {lost} down (proved by the kernel "
            "log).",
            "all-programs-died-at-once" if left else "cuda-error-700-illegal-address-under-mps",
        )
    if pid in incident.pids:
        if incident.kind in ("fault", "unfinished_work"):
            who = humanize.processes(incident.caused_by_pids)
            by = f", which {who} caused" if who else "; which client caused it is not known"
            return (
                f"it was lost to a fatal GPU error{by} (error 700 or 719).",
                "all-programs-died-at-once" if who else "cuda-error-700-illegal-address-under-mps",
            )
        if incident.kind in ("server_crashed", "daemon_died"):
            return "it lost its server (error 806).", "cuda-error-806-mps-rpc-failure"
        if incident.kind == "client_terminated":
            return (
                "it was terminated through the daemon (error 810).",
                "cuda-error-810-mps-client-terminated",
            )
        if incident.kind == "client_rejected":
            return f"it was refused: {humanize.printable(incident.detail)}.", _REFUSALS.get(
                incident.detail, "cuda-error-46-devices-unavailable"
            )
    return None
