"""What the doctor finds beside the daemons: leftovers, and daemons that should be there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from mps_exporter import humanize
from mps_exporter.diagnostics.causes import too_long
from mps_exporter.diagnostics.finding import Finding
from mps_exporter.diagnostics.finding_titles import ADVICE
from mps_exporter.diagnostics.safe_commands import Action, quoted_path
from mps_exporter.observations import HostTraces, MpsDirectory, OpenFiles, ProcessFacts

FILES_OF_A_CLIENT = 10
"""A server with 48 clients on one GPU had 522 files open (H200, driver 580); one that could have 72
served two clients and refused the third."""


def trace_findings(traces: HostTraces) -> Iterator[Finding]:
    if traces.zombies:
        yield Finding(ADVICE["process_not_reaped"], partial(_zombie_texts, traces.zombies))
    for one in traces.open_files:
        if one.count is not None and one.count > one.limit - FILES_OF_A_CLIENT:
            yield Finding(
                ADVICE["server_out_of_descriptors"],
                partial(_open_texts, one),
                daemon=one.pipe_directory,
            )
    if traces.orphans:
        yield Finding(ADVICE["server_without_daemon"], partial(_orphan_texts, traces.orphans))
    promised = [one for one in traces.directories if one.promised_by]
    # A path that is too long is a cause of its own.
    long = [one for one in promised if too_long([one.path])]
    for those in ([one for one in promised if one not in long], long):
        if those:
            yield Finding(ADVICE["daemon_promised"], partial(_promise_texts, those))
    left = [one for one in traces.directories if not one.promised_by]
    if left:
        yield Finding(
            ADVICE["directory_left"], partial(_left_texts, left), offered=tuple(_removing(left))
        )


def _open_texts(one: OpenFiles) -> tuple[str, str]:
    return (
        f"Server {one.server_pid} has {one.count} of at most {one.limit} files open: a program "
        "that starts now gets error 46, or hangs.",
        "Raise the limit of the daemon (LimitNOFILE= of its unit, or ulimit -n) before it is "
        "started the next time. Nothing needs to be ended: each client that leaves makes room.",
    )


def _zombie_texts(zombies: Sequence[ProcessFacts]) -> tuple[str, str]:
    parents = sorted({one.parent_pid for one in zombies if one.parent_pid})
    those = humanize.capitalize(humanize.processes([one.pid for one in zombies]) or "Processes")
    they = "they stay" if len(zombies) > 1 else "it stays"
    return (
        f"{those} of MPS ended, and {'have' if len(zombies) > 1 else 'has'} not been reaped (state "
        "Z).",
        f"Look at the parent ({humanize.processes(parents) or 'not known'}), and do not end it: "
        f"{they} while it lives and does not take notice. In a container, run an init process "
        "(docker run --init).",
    )


def _orphan_texts(orphans: Sequence[ProcessFacts]) -> tuple[str, str]:
    those = [f"server {one.pid} of user {one.uid}" for one in orphans]
    have = "has no control daemon as its parent" if len(orphans) == 1 else "have no control daemon"
    return (
        f"{humanize.capitalize(humanize.join_some(those))} {have}: no program can connect.",
        "Wait until the programs that use it have ended: they are lost with it. nvidia-smi lists "
        "them as M+C. Ask its user about it.",
    )


def _promise_texts(promised: Sequence[MpsDirectory]) -> tuple[str, str]:
    those = [f"{humanize.printable(one.path, 400)} ({one.promised_by})" for one in promised]
    text = f"No control daemon runs where one was set up: {humanize.join_some(those)}."
    if cause := too_long(one.path for one in promised):
        return f"{text}{cause}", "Set a shorter CUDA_MPS_PIPE_DIRECTORY, also for its clients."
    return (
        text,
        "See why it does not run: systemctl status UNIT, or the daemon's pod on this node (kubectl "
        "get pods -A -o wide).",
    )


def _left_texts(left: Sequence[MpsDirectory]) -> tuple[str, str]:
    those = [f"{humanize.printable(one.path, 400)} (of user {one.owner_uid})" for one in left]
    remedy = "A new daemon of the same user, or of root, takes it over."
    if any(one.owner_uid for one in left):
        remedy += " Another user's daemon cannot use it: its user has to remove it first."
    return f"A daemon that is gone has left {humanize.join_some(those)}.", remedy


def _removing(left: Sequence[MpsDirectory]) -> Iterator[Action]:
    for one in left:
        if one.owner_uid and (path := quoted_path(one.path)):
            yield Action(
                f"sudo -u '#{one.owner_uid}' rm -r {path}",
                "root",
                "removes what that user's daemon has left",
            )
