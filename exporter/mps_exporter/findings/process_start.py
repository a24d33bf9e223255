"""Checks of one process: what it needs to reach a daemon, in the order of a CUDA start."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter import humanize
from mps_exporter.findings.daemons import WITHOUT_MPS
from mps_exporter.findings.finding import shown_path
from mps_exporter.findings.hangs import HANGS, halt_texts, resuming
from mps_exporter.findings.incidents import nameable_gpus
from mps_exporter.findings.process_subject import Check, Subject, ok, problem, unknown, warning
from mps_exporter.findings.safe_commands import Action, open_folder, permitted, quoted_path
from mps_exporter.findings.traces import long_socket_path
from mps_exporter.mps.client_limits import visible_gpus
from mps_exporter.snapshot import Snapshot

_REFUSED = "cuda-error-805-mps-connection-failed"


def process_itself(one: Subject) -> Iterator[Check]:
    view, name = one.view, humanize.printable(one.view.command or "?")
    if one.recorded:
        yield unknown("a recording has no files of the process itself.")
    elif one.ended:
        text = f"No process {one.pid} is there"
        if view.present:
            parent = f"its parent (process {view.parent_pid}) has not reaped it (state Z)"
            text = f"It ({name}) has ended; {parent}"
        if one.wait is None:
            yield warning(f"{text}.")
            return
        yield problem(
            f"{text}; it died while it waited in the daemon's queue.",
            "See the finding queued_client_dead of mps-exporter doctor.",
            HANGS,
        )
    elif (halted := halt_texts(view)) is not None:
        text, remedy = halted
        command = next((action.command for action in resuming(view)), "")
        yield problem(f"It ({name}) is {text}.", remedy, command=command)
    elif view.state == "D":
        yield warning(
            f"It ({name}) is inside the kernel and cannot be interrupted (state D): in the driver, "
            "or on a file system that does not answer.",
            f"cat /proc/{one.pid}/stack, as root, twice: the same function says where.",
        )
    else:
        yield ok(f"It ({name}) runs as user {view.uid}.")


def directory(one: Subject) -> Iterator[Check]:
    view = one.view
    if one.recorded:
        return
    if view.pipe_directory is None:
        yield unknown(
            "the environment of the process cannot be read (only its user and root may), so which "
            "pipe directory it uses is not known."
        )
        return
    shown = shown_path(view.pipe_directory)
    page = _REFUSED if one.daemon else WITHOUT_MPS
    if long := long_socket_path([view.pipe_directory]):
        yield problem(
            humanize.capitalize(long),
            "A shorter CUDA_MPS_PIPE_DIRECTORY, for the daemon and its clients.",
            WITHOUT_MPS,
            one.command_to_use_daemon,
        )
    elif view.closed_folder is not None:
        # Only on the way to a directory that a daemon of the host has chosen, not the process.
        daemons = one.snapshot.daemons
        facts = (each.facts for each in daemons if each.pipe_directory == view.pipe_directory)
        named = next((each for each in facts if each is not None), None)
        opening = open_folder(view.closed_folder, named) if named is not None else ()
        yield problem(
            f"It cannot use {shown}: {view.path_error}.",
            "Let its user and the daemon's group pass the folder, and start it again.",
            page,
            # Its server runs as the same user, but with the daemon's group (see view_daemon).
            next((action.command for action in opening), ""),
        )
    elif view.path_error is not None:
        yield problem(
            f"It cannot use {shown}: {view.path_error}.",
            "Set the directory of a daemon, or mount it into the process's container; then start "
            "it again.",
            page,
            one.command_to_use_daemon,
        )
    elif view.closed_socket:
        yield problem(
            f"Its user {view.uid} may not connect to {shown}/control (mode {view.closed_socket}): "
            "CUDA runs without MPS.",
            "The daemon's user has to allow all users to write to that socket (chmod a+w), or "
            "start the daemon again with a umask that does; then start the process again.",
            WITHOUT_MPS,
            _open_socket(one.snapshot, view.daemon_directory),
        )
    else:
        source = "CUDA_MPS_PIPE_DIRECTORY" if view.names_directory else "the default"
        yield ok(f"It uses {shown} ({source}).")


def _open_socket(snapshot: Snapshot, directory: str | None) -> str:
    daemons = (one for one in snapshot.daemons if one.pipe_directory == directory)
    facts = next((one.facts for one in daemons), None)
    path = quoted_path(f"{facts.pipe_path}/control") if facts is not None else None
    opening = Action(f"chmod a+w {path}", "root, or the daemon's user", "opens the socket")
    return next((one.command for one in permitted([opening] if path else (), facts)), "")


def foreign_proc(one: Subject) -> Iterator[Check]:
    if one.view.own_proc is False and not one.working:
        yield problem(
            "It has a PID namespace of its own, and sees the /proc of another: CUDA fails with "
            "error 304 (cudaErrorOperatingSystem).",
            "Mount its own /proc (unshare --mount-proc; every container engine does), or share the "
            "PID namespace.",
            "cuda-error-304-operating-system",
        )


def variables(one: Subject) -> Iterator[Check]:
    visible = one.environment.get("CUDA_VISIBLE_DEVICES")
    gpus = nameable_gpus(one.snapshot, one.daemon)
    # A process that works has set the variable for itself.
    if visible is not None and not one.working and visible_gpus(visible, gpus) == ():
        shown = humanize.printable(repr(visible))
        yield problem(
            f"Its CUDA_VISIBLE_DEVICES is {shown}, which names no GPU: it sees none.",
            "A UUID of nvidia-smi -L, or an ordinal among the GPUs of its daemon; or unset it for "
            "all GPUs. Then start it again.",
            "invalid-cuda-visible-devices",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if missing := one.view.missing_libraries:
        yield warning(
            f"Its environment has {', '.join(missing)}, which names a file that is not there.",
            "Unset it, and start the process again.",
            command=f"unset {' '.join(missing)}",
        )
    elif slow := one.view.debug_variables:
        yield warning(
            f"Its environment has {', '.join(slow)}: debugging or profiling slows it down or makes "
            "its kernels run one after the other.",
            "Unset them, unless that is meant, and start the process again.",
            "no-speed-up-with-mps",
            f"unset {' '.join(slow)}",
        )


def daemon(one: Subject) -> Iterator[Check]:
    view, own = one.view, one.daemon
    if one.stranded_on:
        return  # no daemon helps it
    if own is None:
        if view.pipe_directory is None:
            yield unknown("which daemon it would use is not known.")
        elif view.path_error is None and not view.closed_socket:
            yield _nobody(one, view.pipe_directory)
        return
    shown = shown_path(own.pipe_directory)
    if own.state == "absent":
        remedy = "Start it, then the process again."
        yield problem(f"The daemon at {shown} is gone.", remedy, WITHOUT_MPS)
    elif view.uid is not None and own.uid not in (None, 0, view.uid):
        yield problem(
            f"The daemon at {shown} was started by user {own.uid}, and cannot start a server for "
            f"user {view.uid}: the process gets error 805.",
            "Run the daemon as root, or give the process a directory without a daemon.",
            _REFUSED,
        )
    else:
        yield ok(f"The daemon at {shown} is {own.state or 'there'}.")


def _nobody(one: Subject, directory: str) -> Check:
    """No daemon serves the directory of a process."""
    view, others = one.view, one.running
    there = "No control daemon runs on this host."
    if others:
        paths = humanize.join_some([humanize.printable(each.pipe_directory) for each in others])
        there = f"Daemons run at {paths}."
    start = "nvidia-cuda-mps-control -d"
    if view.names_directory:
        # Not in a directory of an ordinary user's choice: whoever copies this may be root.
        path = quoted_path(directory) if view.uid == 0 else None
        start = f"CUDA_MPS_PIPE_DIRECTORY={path} {start}" if path else ""
    text, remedy = "No control daemon serves its pipe directory", "Start one"
    if view.leftover:
        text, remedy = "A daemon has run at its pipe directory, and is gone", "Start it again"
    if any(each.pipe_directory == directory for each in others):
        remedy, start = "Mount the host's directory into its container", ""
    elif others and not view.leftover:
        remedy, start = "Set the directory of one that runs", one.command_to_use_daemon
    check = problem if view.names_directory or others else warning
    return check(
        f"{text}: it runs without MPS, without sharing and without limits. {there}",
        f"{remedy}, then start the process again.",
        WITHOUT_MPS,
        start,
    )
