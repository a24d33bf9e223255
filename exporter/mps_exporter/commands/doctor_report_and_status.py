"""Report of ``mps-exporter doctor``: the host in brief, then its findings; or checks of processes.

Pure text from a snapshot. Exit status for a host: 0 without problems, 1 with warnings, 2 with
critical findings.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten

from mps_exporter import humanize
from mps_exporter.findings import ADVICE, findings, in_order, most_severe, of_node, trace_findings
from mps_exporter.findings.before_kill import EndAdvice
from mps_exporter.findings.doctor_pid import Check, Outcome, conclusion
from mps_exporter.findings.finding import Finding, Severity, page_url
from mps_exporter.findings.limits import gpu_name, partitioning_lines
from mps_exporter.findings.visibility import unknowns
from mps_exporter.flags import PROGRAM
from mps_exporter.manual_search import name_of
from mps_exporter.observations import Leftovers
from mps_exporter.snapshot import Client, ControlDaemon, Gpu, Snapshot

Painter = Callable[[str, str], str]
EXIT_STATUS: dict[Severity | None, int] = {None: 0, "info": 0, "warning": 1, "critical": 2}
_COLOURS = {"critical": "1;31", "warning": "1;33", "info": "1;34", "good": "1;32", "dim": "2"}


def plain(text: str, style: str) -> str:
    del style
    return text


def coloured(text: str, style: str) -> str:
    return f"\033[{_COLOURS[style]}m{text}\033[0m"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts about a host for the report."""

    snapshot: Snapshot
    recent: tuple[Finding, ...] = ()
    traces: Leftovers = field(default_factory=Leftovers)
    unread: tuple[str, ...] = ()  # What could not be read in time.
    recording: Path | None = None  # The latest recording of an incident.

    @property
    def found(self) -> tuple[Finding, ...]:
        """All current findings, the most urgent first."""
        traces = trace_findings(self.traces, self.snapshot.daemons)
        return in_order((*findings(self.snapshot), *traces))


def diagnosis_exit_status(seen: Diagnosis) -> int:
    """Return 0, 1 (warnings) or 2 (critical). Findings of severity info count as 0.

    Findings about ordinary users' daemons do not count: these users can cause them. The only recent
    incident that counts is a failed server start, if its daemon has no server now.
    """
    daemons = seen.snapshot.daemons
    without = {one.pipe_directory for one in daemons if one.pid and not one.servers}
    failing = (
        one
        for one in seen.recent
        if one.advice.name == "server_start_failed" and one.daemon in without
    )
    return EXIT_STATUS[most_severe(one for one in (*seen.found, *failing) if not one.limited)]


HEALTHY, UNHEALTHY, UNKNOWN = 0, 1, 2
"""Statuses of a check, as node-problem-detector defines them."""

MAX_CHECK_CHARACTERS = 120  # Maximum length of the line of a check.

CHECKS = ("critical", *(name for name, advice in ADVICE.items() if advice.kind == "state"))
"""Names of checks: any critical finding, or one finding."""


def status_of_check(snapshot: Snapshot, name: str) -> tuple[int, str]:
    """Return the status and text of a check; UNKNOWN if a fact that it needs is unknown."""
    for finding in findings(snapshot):
        if not finding.limited and name in (finding.advice.name, finding.severity):
            return UNHEALTHY, _brief(f"{finding.advice.name}: {finding.evidence}")
    failed = {result.name: result.error for result in snapshot.collectors if not result.success}
    if name == "gpu_lost":  # NVML alone decides it.
        unknown = [failed["nvml"] or "no answer"] if "nvml" in failed else []
    else:
        unknown = [*unknowns(of_node(snapshot)), *(f"{name} could not be read" for name in failed)]
    if unknown:
        return UNKNOWN, _brief(f"{name}: not known: {'; '.join(unknown)}")
    return HEALTHY, f"{name}: no"


def status_of_ends(ends: Sequence[EndAdvice], *, as_json: bool, many: bool) -> tuple[int, str]:
    """Return 1 if the end of one of these processes may do harm, else 0; and the text."""
    status, lines = UNHEALTHY if any(one.in_danger for one in ends) else HEALTHY, list[str]()
    if as_json:
        found = [asdict(one) for one in ends]
        return status, json.dumps(found if many else found[0], indent=2)
    for end in ends:
        lines += end.text
        lines += (f"  {one.command}\n    ({one.run_as}: {one.effect})" for one in end.actions)
    return status, "\n".join(lines)


def _brief(text: str) -> str:
    return shorten(text, MAX_CHECK_CHARACTERS, placeholder="...")


def diagnosis_lines(seen: Diagnosis, paint: Painter = plain) -> Iterator[str]:
    snapshot = seen.snapshot
    yield from _gpu_lines(snapshot, paint)
    if holders := [f"{humanize.printable(one.name)} ({one.pid})" for one in seen.traces.holders]:
        yield f"  the driver is held open by {', '.join(holders)}"
    yield ""
    hidden = f"; {seen.traces.hidden} cannot be seen" if seen.traces.hidden else ""
    yield f"Control daemons{'' if snapshot.daemons else ': none found'}{hidden}"
    for daemon in sorted(snapshot.daemons, key=lambda one: one.state == "absent"):
        yield from _daemon_lines(daemon, snapshot, paint)
    yield ""
    yield from _found(seen, paint)
    if seen.recent:
        yield "\nIn the last five minutes:"
        for finding in seen.recent:
            yield from _finding(finding, paint, {})
    if seen.recording is not None:
        yield f"\nLatest recording of an incident: {humanize.printable(str(seen.recording), 400)}"
        yield f"    run:   {PROGRAM} record FILE --incident=latest  (makes a bug report of it)"


def _found(seen: Diagnosis, paint: Painter) -> Iterator[str]:
    found = seen.found
    if not found:
        unknown = [*unknowns(seen.snapshot), *map(_not_read, seen.unread)]
        text = humanize.sentence(f"nothing wrong was seen, but {'; '.join(unknown)}")
        yield text if unknown else paint("Nothing is wrong here.", "good")
        return
    told = dict[object, Finding]()
    counts = Counter(finding.severity for finding in found)  # the most severe first
    yield "Findings: " + ", ".join(
        paint(f"{count} {severity}", severity) for severity, count in counts.items()
    )
    for finding in found:
        if not finding.limited:
            yield from _finding(finding, paint, told)
    for one in seen.unread:
        yield humanize.sentence(_not_read(one))
    if users := [finding for finding in found if finding.limited]:
        yield "\nDaemons of ordinary users (not counted in the exit status):"
        for finding in users:
            yield from _finding(finding, paint, told)


def _not_read(what: str) -> str:
    return f"{humanize.printable(what, 400)}: could not be read in time"


def _finding(finding: Finding, paint: Painter, told: dict[object, Finding]) -> Iterator[str]:
    advice, steps = finding.advice, (finding.remedy, *finding.actions)
    place = humanize.printable(finding.daemon, 400) or (f"GPU {finding.gpu}" if finding.gpu else "")
    where = f"  {paint(place, 'dim')}" if place else ""
    yield f"\n{paint(finding.severity, finding.severity)}  {advice.title}{where}"
    yield f"    seen:  {finding.evidence}"
    yield f"    why:   {advice.why}"
    if (first := told.setdefault(steps, finding)) is not finding and finding.actions:
        yield f"    do:    as above: {first.advice.title}"
        return
    yield f"    do:    {finding.remedy}"
    for action in finding.actions:
        condition = f", {action.condition}" if action.condition else ""
        yield f"    run{condition}:   {action.command}"
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
    "mps_client": ("MPS client", ""),
    "mps_server": ("MPS server", ""),
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
        parts.append(f"memory {humanize.memory(used)} of {humanize.memory(total)}")
    kinds = gpu.processes_by_kind or {}
    parts += [humanize.count(number, *_KINDS[kind]) for kind, number in kinds.items() if number]
    return ", ".join(parts)


def _daemon_lines(daemon: ControlDaemon, snapshot: Snapshot, paint: Painter) -> Iterator[str]:
    state = daemon.state or "state not known"
    style = "good" if daemon.state == "answering" else "warning"
    owner = humanize.user_name(daemon.uid, daemon.user)
    name_of = f"process {daemon.pid} of {owner}" if daemon.pid else "no process"
    directory = humanize.printable(daemon.pipe_directory, 400)
    log = f"  log {humanize.printable(daemon.log_directory, 400)}" if daemon.log_directory else ""
    yield f"  {directory}  {paint(state, style)}  {paint(name_of + log, 'dim')}"
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
    sms = "/".join(str(count) for count in client.sm_limit.values())
    limit = f" ({sms} SMs)" if sms else ""
    if client.active_thread_ratio is not None:
        parts.append(f"up to {humanize.percent(client.active_thread_ratio, exact=True)}{limit}")
    elif client.sm_partition is None:
        parts.append("limits not known")
    if client.gpu_uuids:
        parts.append(f"on {humanize.join_some([gpu_name(u, snapshot) for u in client.gpu_uuids])}")
    if client.namespace is not None:
        parts.append(f"namespace {client.namespace}")
    if client.sm_partition is not None:
        partition = humanize.printable(client.sm_partition_name or client.sm_partition, 60)
        fault = client.sm_partition_fault
        parts.append(f"SM partition {partition}" + (f" (fault: {fault})" if fault else limit))
    for uuid, used in client.memory_used_bytes.items():
        most = client.memory_limit_bytes.get(uuid)
        of = f" of at most {humanize.memory(most)}" if most is not None else ""
        parts.append(f"{humanize.memory(used)}{of}")
    if client.state not in (None, "active"):
        parts.append(str(client.state).replace("_", " "))
    return ", ".join(parts)


def _object(finding: Finding) -> dict[str, object]:
    advice = finding.advice
    return {
        "name": advice.name,
        "severity": finding.severity,
        "ordinary_user": finding.limited,
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
            }
            | dict.fromkeys(seen.unread, "no answer in time"),
        }
        | ({} if seen.recording is None else {"recording": str(seen.recording)}),
        indent=2,
    )


# ---------------------------------------------------------------------- checks of processes


Checks = Mapping[int, list[Check]]  # Process -> its checks.
NOT_KNOWN = 3  # Exit status if it is unknown whether a process waits.
_OUTCOMES: Mapping[Outcome, tuple[str, str, int]] = {
    "ok": ("ok", "good", 0),
    "problem": ("PROBLEM", "critical", 1),
    "warning": ("warning", "warning", 1),
    "unknown": ("not seen", "dim", 0),
}
"""Mark in the text, its style, and exit status."""


def checks_as_text(checks: Checks, paint: Painter = plain) -> str:
    return "\n\n".join("\n".join(_check_lines(pid, found, paint)) for pid, found in checks.items())


def checks_as_json(checks: Checks) -> str:
    processes = []
    for pid, found in checks.items():
        answer = _check_object(conclusion(found))
        del answer["name"]
        head = {"pid": pid, "conclusion": answer.pop("text")}
        processes.append(head | answer | {"checks": [_check_object(check) for check in found]})
    return json.dumps({"version": 1, "processes": processes}, indent=2)


def _check_lines(pid: int, checks: list[Check], paint: Painter) -> Iterator[str]:
    answer = conclusion(checks)
    _, style, _ = _OUTCOMES[answer.outcome]
    yield f"{paint(f'Process {pid}', style)}: {answer.text}"
    if answer.remedy:
        yield f"    do:    {answer.remedy}"
    if answer.command:
        yield f"    run:   {answer.command}{_who_may(answer)}"
    if answer.page:
        url = page_url(answer.page)
        name = name_of(url)
        yield f"    see:   {url}" if name is None else f"    see:   mps-exporter explain {name}"
    yield ""
    yield "Checked, in this order:"
    told = {answer.remedy}
    for check in checks:
        mark, style, _ = _OUTCOMES[check.outcome]
        yield f"  {paint(f'{mark:8}', style)}  {check.name}: {check.text}"
        if check.remedy not in told | {""} and check.outcome != "ok":
            told.add(check.remedy)
            yield f"            do: {check.remedy}"
            if check.command:
                yield f"            run: {check.command}{_who_may(check)}"


def _who_may(check: Check) -> str:
    """Return the end of a line with a command, unless every user may run it."""
    who = f"{check.run_as}{'; else ask your administrator' * check.run_as.startswith('root')}"
    return f"  ({who})" if who else ""


def _check_object(check: Check) -> dict[str, object]:
    shown = replace(check, page=page_url(check.page) if check.page else "")
    return {key: value or None for key, value in asdict(shown).items()}


def checks_exit_status(checks: Checks) -> int:
    """Return 1 for a problem or a warning, 3 for an unknown connection, else 0."""
    answers = [conclusion(found) for found in checks.values()]
    if status := max(_OUTCOMES[one.outcome][2] for one in answers):
        return status
    unknown = any((one.name, one.outcome) == ("connection", "unknown") for one in answers)
    return NOT_KNOWN if unknown else 0
