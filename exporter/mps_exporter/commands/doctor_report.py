"""What ``mps-exporter doctor`` prints: the host in brief, then what is wrong with it.

Pure text from a snapshot; exit status 0 when nothing is wrong, 1 with warnings, 2 when critical
(and 3, of the command line, when it could not look).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from mps_exporter import humanize
from mps_exporter.diagnostics import (
    ADVICE,
    Finding,
    Severity,
    findings,
    in_order,
    most_severe,
    trace_findings,
    unseen,
)
from mps_exporter.diagnostics.partitions import gpu_name, partitioning_lines
from mps_exporter.observations import Leftovers
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Snapshot

Painter = Callable[[str, str], str]
EXIT_STATUS: dict[Severity | None, int] = {None: 0, "info": 0, "warning": 1, "critical": 2}
_COLOURS = {"critical": "1;31", "warning": "1;33", "info": "1;34", "good": "1;32", "dim": "2"}
_GIB = 1 << 30


def plain(text: str, style: str) -> str:
    del style
    return text


def coloured(text: str, style: str) -> str:
    return f"\033[{_COLOURS[style]}m{text}\033[0m"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor knows of a host."""

    snapshot: Snapshot
    recent: tuple[Finding, ...] = ()
    """What happened lately."""
    traces: Leftovers = field(default_factory=Leftovers)

    @property
    def found(self) -> tuple[Finding, ...]:
        """All that applies now, the most urgent first."""
        return in_order((*findings(self.snapshot), *trace_findings(self.traces)))


def diagnosis_exit_status(seen: Diagnosis) -> int:
    """0, 1 (warnings) or 2 (critical); what is only information is no fault.

    Of what happened lately only a server that could not start counts, where none has started since.
    """
    daemons = seen.snapshot.daemons
    without = {one.pipe_directory for one in daemons if one.pid and not one.servers}
    failing = (
        one
        for one in seen.recent
        if one.advice.name == "server_start_failed" and one.daemon in without
    )
    return EXIT_STATUS[most_severe((*seen.found, *failing))]


HEALTHY, UNHEALTHY, UNKNOWN = 0, 1, 2
"""Statuses of a check, as node-problem-detector defines them."""

CHECK_CHARACTERS = 120
"""Longest line of a check."""

CHECKS = ("critical", *(name for name, advice in ADVICE.items() if advice.kind == "state"))
"""Names of checks: any critical finding, or one finding."""

_NVML_CHECKS = frozenset({"gpu_lost", "unfit_gpu"})
"""Checks for which the GPUs need to be read, and nothing else."""


def status_of_check(snapshot: Snapshot, name: str) -> tuple[int, str]:
    """Return the status of one check, and a line that says why.

    What could not be read neither sets nor clears it: the status is then UNKNOWN.
    """
    # Any user can break a daemon of his own: that says nothing of this host.
    of_host = tuple(one for one in snapshot.daemons if not one.limited)
    snapshot = replace(snapshot, daemons=of_host)
    for finding in findings(snapshot):
        if name in (finding.advice.name, finding.severity):
            return UNHEALTHY, _brief(f"{finding.advice.name}: {finding.evidence}")
    failed = {result.name: result.error for result in snapshot.collectors if not result.success}
    if name in _NVML_CHECKS:
        unknown = [failed["nvml"] or "no answer"] if "nvml" in failed else []
    else:
        unknown = [*unseen(snapshot), *(f"{name} could not be read" for name in failed)]
    if unknown:
        return UNKNOWN, _brief(f"{name}: not known: {'; '.join(unknown)}")
    return HEALTHY, f"{name}: no"


def _brief(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= CHECK_CHARACTERS else f"{text[: CHECK_CHARACTERS - 3]}..."


def diagnosis_lines(seen: Diagnosis, paint: Painter = plain) -> Iterator[str]:
    snapshot = seen.snapshot
    yield from _gpu_lines(snapshot, paint)
    if holders := [f"{humanize.printable(one.name)} ({one.pid})" for one in seen.traces.holders]:
        yield f"  the driver is held open by {', '.join(holders)}"
    yield ""
    yield from _daemons(snapshot, paint)
    yield ""
    yield from _found(seen, paint)
    if seen.recent:
        yield ""
        yield "In the last five minutes:"
        for finding in seen.recent:
            yield ""
            yield from _finding(finding, paint)


def _found(seen: Diagnosis, paint: Painter) -> Iterator[str]:
    found = seen.found
    if not found:
        unknown = unseen(seen.snapshot)
        if unknown:
            yield humanize.sentence(f"nothing wrong was seen, but {'; '.join(unknown)}")
        else:
            yield paint("Nothing is wrong here.", "good")
        return
    counts = {
        severity: sum(finding.severity == severity for finding in found)
        for severity in ("critical", "warning", "info")
    }
    yield "Findings: " + ", ".join(
        paint(f"{count} {severity}", severity) for severity, count in counts.items() if count
    )
    for finding in found:
        yield ""
        yield from _finding(finding, paint)


def _finding(finding: Finding, paint: Painter) -> Iterator[str]:
    advice = finding.advice
    place = humanize.printable(finding.daemon, 400) or (f"GPU {finding.gpu}" if finding.gpu else "")
    yield f"{paint(finding.severity, finding.severity)}  {advice.title}" + (
        f"  {paint(place, 'dim')}" if place else ""
    )
    yield f"    seen:  {finding.evidence}"
    yield f"    why:   {advice.why}"
    yield f"    do:    {finding.remedy}"
    for action in finding.actions:
        yield f"    run:   {action.command}"
        yield f"           ({action.run_as}: {action.effect})"


def _gpu_lines(snapshot: Snapshot, paint: Painter) -> Iterator[str]:
    if not snapshot.gpus:
        errors = [one.error for one in snapshot.collectors if one.name == "nvml" and one.error]
        yield f"GPUs: {humanize.printable(errors[0], 400)}" if errors else "GPUs: none seen"
        return
    versions = f"driver {snapshot.driver_version}" if snapshot.driver_version else ""
    yield f"GPUs  {paint(versions, 'dim')}"
    for gpu in snapshot.gpus:
        yield f"  {gpu.index}  {humanize.printable(gpu.observation.name or '?')}  {_gpu_use(gpu)}"


_KINDS = {
    "mps_client": ("MPS client", "MPS clients"),
    "mps_server": ("MPS server", "MPS servers"),
    "direct": ("process without MPS", "processes without MPS"),
    "graphics": ("graphics process", "graphics processes"),
}


def _gpu_use(gpu: Gpu) -> str:
    parts = []
    for quantity, title in (("gpu_utilization", "utilization"), ("sm_activity", "SM activity")):
        ratio = gpu.reading(quantity)
        if ratio is not None:
            parts.append(f"{title} {ratio:.0%}")
    used, total = gpu.reading("memory_used"), gpu.reading("memory_total")
    if used is not None and total is not None:
        parts.append(f"memory {used / _GIB:.1f} of {total / _GIB:.0f} GiB")
    kinds = gpu.processes_by_kind or {}
    parts += [f"{count} {_KINDS[kind][count > 1]}" for kind, count in kinds.items() if count]
    return ", ".join(parts)


def _daemons(snapshot: Snapshot, paint: Painter) -> Iterator[str]:
    if not snapshot.daemons:
        yield "Control daemons: none found"
        return
    yield "Control daemons"
    for daemon in snapshot.daemons:
        yield from _daemon_lines(daemon, snapshot, paint)


def _daemon_lines(daemon: ControlDaemon, snapshot: Snapshot, paint: Painter) -> Iterator[str]:
    state = daemon.state or "state not known"
    style = "good" if daemon.state == "answering" else "warning"
    owner = humanize.user_name(daemon.uid, daemon.user)
    name_of = f"process {daemon.pid} of {owner}" if daemon.pid else "no process"
    directory = humanize.printable(daemon.pipe_directory, 400)
    yield f"  {directory}  {paint(state, style)}  {paint(name_of, 'dim')}"
    for line in partitioning_lines(daemon, snapshot):
        yield f"    {line}"
    for server in daemon.servers:
        whose = humanize.user_name(server.uid, server.user)
        what = "ghost" if server.ghost else server.state or "?"
        named = f" ({server.name})" if server.name else ""
        yield f"    server {server.pid}{named}  {what}  for {whose}"
        for client in server.clients:
            yield f"      client {client.pid}  {_client_line(client, snapshot)}"
    for wait in daemon.waits:
        gone = ", and is dead" if wait.dead else ""
        age = snapshot.taken_at - wait.since
        yield (
            f"    waiting: process {wait.pid} of user {wait.uid}, for {age:.0f} s, behind user "
            f"{wait.behind_uid}{gone}"
        )


def _client_line(client: Client, snapshot: Snapshot) -> str:
    owner = humanize.user_name(client.uid, client.user)
    parts = [f"{owner}  {humanize.printable(client.command or '?')}"]
    if client.active_thread_ratio is not None:
        sms = "/".join(str(count) for count in client.sm_limit.values())
        share = humanize.percent(client.active_thread_ratio, exact=True)
        parts.append(f"up to {share}" + (f" ({sms} SMs)" if sms else ""))
    elif client.sm_partition is None:
        parts.append("limits not known")
    if client.gpu_uuids:
        parts.append(f"on {humanize.join_some([gpu_name(u, snapshot) for u in client.gpu_uuids])}")
    if client.namespace is not None:
        parts.append(f"namespace {client.namespace}")
    if client.sm_partition is not None:
        sms = "/".join(str(count) for count in client.sm_limit.values())
        partition = humanize.printable(client.sm_partition_name or client.sm_partition, 60)
        what = f"{sms} SMs" if client.sm_partition_fault is None and sms else ""
        what = f"fault: {client.sm_partition_fault}" if client.sm_partition_fault else what
        parts.append(f"SM partition {partition}" + (f" ({what})" if what else ""))
    for uuid, used in client.memory_used_bytes.items():
        limit = client.memory_limit_bytes.get(uuid)
        of = f" of at most {limit / _GIB:.1f}" if limit is not None else ""
        parts.append(f"{used / _GIB:.1f}{of} GiB")
    if client.state not in (None, "active"):
        parts.append(str(client.state).replace("_", " "))
    return ", ".join(parts)


def _object(finding: Finding) -> dict[str, object]:
    advice = finding.advice
    return {
        "name": advice.name,
        "severity": finding.severity,
        "title": advice.title,
        "why": advice.why,
        "kind": advice.kind,
        "evidence": finding.evidence,
        "remedy": finding.remedy,
        "actions": [asdict(one) for one in finding.actions],
        "daemon": finding.daemon or None,
        "gpu": finding.gpu or None,
        "uuid": finding.uuid or None,
    }


def diagnosis_as_json(seen: Diagnosis) -> str:
    snapshot = seen.snapshot
    return json.dumps(
        {
            "version": 1,
            "taken_at": datetime.fromtimestamp(snapshot.taken_at, UTC).isoformat(),
            "exit_status": diagnosis_exit_status(seen),
            "findings": [_object(finding) for finding in seen.found],
            "recent": [_object(finding) for finding in seen.recent],
            "driver_held_by": [one.pid for one in seen.traces.holders],
            "not_seen": {
                result.name: result.error for result in snapshot.collectors if not result.success
            },
        },
        indent=2,
    )
