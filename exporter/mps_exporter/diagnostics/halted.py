"""What keeps a process from running: a signal, a debugger, or a frozen control group."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter import humanize
from mps_exporter.diagnostics.safe_commands import PROCESS_OWNER, Action, quoted_path
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.observations import ProcessFacts, ProcessView


def halt_texts(one: ProcessFacts | ProcessView) -> tuple[str, str] | None:
    """Say what keeps a process from running, and what lets it run; None: nothing is seen."""
    if one.frozen_group:
        return (
            f"frozen, with its control group {humanize.printable(one.frozen_group, 400)}",
            "Thaw that group.",
        )
    if one.state == "t":
        debugger = f"process {humanize.printable(one.tracer)}" if one.tracer else "a debugger"
        return (
            f"stopped by {debugger}, which traces it (state t)",
            f"Let {debugger} continue it, or detach from it; SIGCONT has no effect.",
        )
    if one.state == "T":
        return "stopped (state T)", f"Continue process {one.pid} (SIGCONT)."
    return None


def resuming(one: ProcessFacts | ProcessView) -> Iterator[Action]:
    """Give the command that lets a process run."""
    if one.frozen_group:
        runtime, _, container = (
            parse_cgroup(f"0::{one.frozen_group}").container_id or ""
        ).partition("://")
        paused = runtime in ("docker", "podman") and container in one.frozen_group[-70:]
        if paused:
            yield Action(f"{runtime} unpause {container[:12]}", "root", "thaws the container")
        elif path := quoted_path(f"{one.frozen_group}/cgroup.freeze"):
            yield Action(f"echo 0 > {path}", "root", "thaws the control group")
    elif one.state == "T":
        effect = "lets the stopped process go on"
        yield Action(f"kill -CONT {one.pid}", PROCESS_OWNER, effect)
