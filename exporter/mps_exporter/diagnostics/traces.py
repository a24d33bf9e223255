"""What the doctor finds beside the daemons: leftovers, and daemons that should be there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import partial

from mps_exporter import humanize
from mps_exporter.diagnostics.causes import too_long
from mps_exporter.diagnostics.finding import Finding
from mps_exporter.diagnostics.finding_titles import ADVICE
from mps_exporter.observations import HostTraces, MpsDirectory, ProcessFacts


def trace_findings(traces: HostTraces) -> Iterator[Finding]:
    """Everything that the traces prove."""
    if traces.zombies:
        yield Finding(ADVICE["process_not_reaped"], partial(_zombie_texts, traces.zombies))
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
        yield Finding(ADVICE["directory_left"], partial(_left_texts, left))


def _zombie_texts(zombies: Sequence[ProcessFacts]) -> tuple[str, str]:
    parents = sorted({one.parent_pid for one in zombies if one.parent_pid})
    those = humanize.capitalize(humanize.processes([one.pid for one in zombies]) or "Processes")
    return (
        f"{those} of MPS ended, and {'have' if len(zombies) > 1 else 'has'} not been reaped (state "
        "Z).",
        f"Look at the parent ({humanize.processes(parents) or 'not known'}): they stay while it "
        "lives and does not take notice. In a container, run an init process (docker run --init).",
    )


def _orphan_texts(orphans: Sequence[ProcessFacts]) -> tuple[str, str]:
    pids = " ".join(str(one.pid) for one in orphans)
    those = [f"server {one.pid} of user {one.uid}" for one in orphans]
    return (
        f"{humanize.capitalize(humanize.join_some(those))} has no control daemon as its parent: no "
        "program can connect to it.",
        f"End it (kill {pids}, then kill -9), once the programs that still use it have ended.",
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
    others = [one for one in left if one.owner_uid]
    remedy = "A new daemon of the same user, or of root, takes it over."
    if others:
        paths = [
            shlex.quote(one.path)
            for one in others
            if humanize.printable(one.path, len(one.path)) == one.path
        ]
        command = f"rm -r {' '.join(paths)}" if paths else "rm -r"
        remedy += f" Another user's daemon cannot use it: remove it first ({command})."
    return f"A daemon that is gone has left {humanize.join_some(those)}.", remedy
