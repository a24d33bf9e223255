"""Processes that are stopped by a signal, frozen with their control group, or traced."""

from collections.abc import Iterator

from mps_exporter.findings.finding import PROCESS_OWNER, Action, quoted_path, shown_path
from mps_exporter.humanize import printable
from mps_exporter.mps.cgroups import parse_cgroup
from mps_exporter.observations import ProcessFacts, ProcessView


def halt_texts(one: ProcessFacts | ProcessView) -> tuple[str, str] | None:
    """Return what keeps a process from running and the remedy; None if nothing does."""
    if one.frozen_group:
        return f"frozen, with its control group {shown_path(one.frozen_group)}", "Thaw that group."
    if one.state == "t":
        debugger = f"process {printable(one.tracer)}" if one.tracer else "a debugger"
        return (
            f"stopped by {debugger}, which traces it (state t)",
            f"Let {debugger} continue it, or detach from it; SIGCONT has no effect.",
        )
    if one.state == "T":
        return "stopped (state T)", f"Continue process {one.pid} (SIGCONT)."
    return None


def resuming(one: ProcessFacts | ProcessView) -> Iterator[Action]:
    if one.frozen_group:
        container = parse_cgroup(f"0::{one.frozen_group}").container_id or ""
        runtime, _, number = container.partition("://")
        if runtime in ("docker", "podman") and number in one.frozen_group[-70:]:
            yield Action(f"{runtime} unpause {number[:12]}", "root", "thaws the container")
        elif path := quoted_path(f"{one.frozen_group}/cgroup.freeze"):
            yield Action(f"echo 0 > {path}", "root", "thaws the control group")
    elif one.state == "T":
        yield Action(f"kill -CONT {one.pid}", PROCESS_OWNER, "lets the stopped process go on")
