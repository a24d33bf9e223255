"""What ``mps-exporter doctor --pid`` prints: the answer, then what was checked, in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from mps_exporter.commands.doctor_report import Painter, plain
from mps_exporter.diagnostics.finding import symptom_url
from mps_exporter.diagnostics.one_process import Check, Outcome, conclusion

EXIT_STATUS: Mapping[Outcome, int] = {"ok": 0, "unknown": 0, "warning": 1, "problem": 1}
NOT_KNOWN = 3
"""Whether the process waits cannot be seen."""
_MARKS: Mapping[Outcome, tuple[str, str]] = {
    "ok": ("ok", "good"),
    "problem": ("PROBLEM", "critical"),
    "warning": ("warning", "warning"),
    "unknown": ("not seen", "dim"),
}


def checks_as_text(checks: Mapping[int, Sequence[Check]], paint: Painter = plain) -> str:
    return "\n\n".join("\n".join(check_lines(pid, found, paint)) for pid, found in checks.items())


def checks_as_json(checks: Mapping[int, Sequence[Check]]) -> str:
    objects = [as_objects(pid, found) for pid, found in checks.items()]
    return json.dumps({"version": 1, "processes": objects}, indent=2)


def check_lines(pid: int, checks: Sequence[Check], paint: Painter = plain) -> Iterator[str]:
    answer = conclusion(list(checks))
    _, style = _MARKS[answer.outcome]
    yield f"{paint(f'Process {pid}', style)}: {answer.text}"
    if answer.remedy:
        yield f"    do:    {answer.remedy}"
    if answer.command:
        yield f"    run:   {answer.command}"
    if answer.page:
        yield f"    see:   {symptom_url(answer.page)}"
    yield ""
    yield "Checked, in this order:"
    for check in checks:
        mark, style = _MARKS[check.outcome]
        yield f"  {paint(f'{mark:8}', style)}  {check.name}: {check.text}"
        if check is not answer and check.remedy and check.outcome != "ok":
            yield f"            do: {check.remedy}"
            if check.command:
                yield f"            run: {check.command}"


def as_objects(pid: int, checks: Sequence[Check]) -> dict[str, object]:
    answer = conclusion(list(checks))
    return {
        "pid": pid,
        "outcome": answer.outcome,
        "conclusion": answer.text,
        "remedy": answer.remedy or None,
        "command": answer.command or None,
        "page": symptom_url(answer.page) if answer.page else None,
        "checks": [
            {
                "name": check.name,
                "outcome": check.outcome,
                "text": check.text,
                "remedy": check.remedy or None,
                "command": check.command or None,
                "page": symptom_url(check.page) if check.page else None,
            }
            for check in checks
        ],
    }


def checks_exit_status(checks: Mapping[int, Sequence[Check]]) -> int:
    """1 where something is wrong with one of the processes; 3 where that is not known; else 0."""
    answers = [conclusion(list(found)) for found in checks.values()]
    if status := max(EXIT_STATUS[one.outcome] for one in answers):
        return status
    unknown = any((one.name, one.outcome) == ("connection", "unknown") for one in answers)
    return NOT_KNOWN if unknown else 0
