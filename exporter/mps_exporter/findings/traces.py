"""What the doctor finds beside the daemons: leftovers, and daemons that should be there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mps_exporter import humanize
from mps_exporter.findings.finding import Case, HostFacts, of_host, shown_path
from mps_exporter.findings.safe_commands import Action, quoted_path
from mps_exporter.mps.control_protocol import SOCKET_PATH_BYTES, control_socket_bytes

FILES_OF_A_CLIENT = 10
"""A server with 48 clients on one GPU had 522 files open (H200, driver 580); one that could have 72
served two clients and refused the third."""

_AFTER_A_KILL = "the-next-job-fails-after-one-was-killed"


def long_socket_path(directories: Iterable[str]) -> str:
    """Say that no daemon can run in one of these pipe directories; "": none is too long."""
    longest = max((control_socket_bytes(one) for one in directories), default=0)
    if longest <= SOCKET_PATH_BYTES:
        return ""
    return (
        f"the path of its control socket has {longest} bytes; a socket's path has at most "
        f"{SOCKET_PATH_BYTES}."
    )


@of_host(
    "warning",
    "A control daemon was set up and does not run",
    "A systemd unit is enabled, or Kubernetes has made a directory for it: programs that are "
    "started for it wait, or run without MPS.",
    kind="trace",
    page="mps-daemon-never-starts-in-kubernetes",
)
def daemon_promised(host: HostFacts) -> Iterator[Case]:
    promised = [one for one in host.traces.directories if one.promised_by]
    # A path that is too long is a cause of its own.
    long = [one for one in promised if long_socket_path([one.path])]
    for group in ([one for one in promised if one not in long], long):
        if not group:
            continue
        those = [f"{shown_path(one.path)} ({one.promised_by})" for one in group]
        text = f"No control daemon runs where one was set up: {humanize.join_some(those)}."
        remedy = (
            "See why it does not run: systemctl status UNIT, or the daemon's pod on this node "
            "(kubectl get pods -A -o wide)."
        )
        if cause := long_socket_path(one.path for one in group):
            text += f" No daemon can run there: {cause}"
            remedy = "Set a shorter CUDA_MPS_PIPE_DIRECTORY, also for its clients."
        yield Case(text, remedy)


@of_host(
    "warning",
    "A server has no file descriptor left",
    "It needs about ten for each client and GPU. Its clients work; a new client gets error 46, "
    "or hangs.",
    kind="trace",
    page="mps-server-failed-to-create-shm-segment",
)
def server_out_of_descriptors(host: HostFacts) -> Iterator[Case]:
    for one in host.traces.open_files:
        if one.count is not None and one.count > one.limit - FILES_OF_A_CLIENT:
            yield Case(
                f"Server {one.server_pid} has {one.count} of at most {one.limit} files open: a "
                "program that starts now gets error 46, or hangs.",
                "Raise the limit of the daemon (LimitNOFILE= of its unit, or ulimit -n) before it "
                "is started the next time. Nothing needs to be ended: each client that leaves "
                "makes room.",
                of=one.pipe_directory,
            )


@of_host(
    "warning",
    "A server has lost its control daemon",
    "It accepts no clients, and keeps GPU memory and the driver.",
    kind="trace",
    page=_AFTER_A_KILL,
)
def server_without_daemon(host: HostFacts) -> Iterator[Case]:
    if orphans := host.traces.orphans:
        those = humanize.join_some([f"server {one.pid} of user {one.uid}" for one in orphans])
        have = "have no control daemon"
        if len(orphans) == 1:
            have = "has no control daemon as its parent"
        yield Case(
            f"{humanize.capitalize(those)} {have}: no program can connect.",
            "Wait until the programs that use it have ended: they are lost with it. nvidia-smi "
            "lists them as M+C. Ask its user about it.",
        )


@of_host(
    "warning",
    "A process of MPS has ended and was not reaped",
    "It was reported to keep a new server from working until its parent ended.",
    kind="trace",
    page=_AFTER_A_KILL,
)
def process_not_reaped(host: HostFacts) -> Iterator[Case]:
    if zombies := host.traces.zombies:
        parents = sorted({one.parent_pid for one in zombies if one.parent_pid})
        pids = humanize.processes([one.pid for one in zombies]) or "Processes"
        have, they = ("have", "they stay") if len(zombies) > 1 else ("has", "it stays")
        yield Case(
            f"{humanize.capitalize(pids)} of MPS ended, and {have} not been reaped (state Z).",
            f"Look at the parent ({humanize.processes(parents) or 'not known'}), and do not end "
            f"it: {they} while it lives and does not take notice. In a container, run an init "
            "process (docker run --init).",
        )


@of_host(
    "info",
    "A daemon that is gone has left its pipe directory",
    "Programs that are started for it run without MPS. Its files do no harm to a new daemon of "
    "the same user.",
    kind="trace",
    page=_AFTER_A_KILL,
)
def directory_left(host: HostFacts) -> Iterator[Case]:
    left = [one for one in host.traces.directories if not one.promised_by]
    if left:
        those = [f"{shown_path(one.path)} (of user {one.owner_uid})" for one in left]
        remedy = "A new daemon of the same user, or of root, takes it over."
        if any(one.owner_uid for one in left):
            remedy += " Another user's daemon cannot use it: its user has to remove it first."
        removing = [
            Action(
                f"sudo -u '#{one.owner_uid}' rm -r {path}",
                "root",
                "removes what that user's daemon has left",
            )
            for one in left
            if one.owner_uid and (path := quoted_path(one.path))
        ]
        yield Case(f"A daemon that is gone has left {humanize.join_some(those)}.", remedy, removing)
