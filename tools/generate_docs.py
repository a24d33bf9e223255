"""Writes the reference pages and tables that follow from the code and from the rules.

Pages: docs/metrics.md, docs/configuration.md. Tables, each between a mark and ``<!-- end -->``:
``<!-- advice -->`` in docs/troubleshooting.md, ``<!-- alerts -->`` in docs/alerts.md,
``<!-- symptoms -->`` in docs/symptoms/README.md, ``<!-- series -->`` in docs/fleet.md. And the
chart's copies of rules and dashboards, with its table of values (tools/chart.py).

With --check it writes nothing, and exits with 1 when a page is not up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import yaml

from bench.rules import series_table
from mps_exporter.config import FLAGS, Settings
from mps_exporter.diagnostics import ADVICE
from mps_exporter.metrics.catalogue import CATALOGUE
from tools import chart
from tools.symptoms import KINDS, symptoms, thread_link

DOCS = Path(__file__).parents[1] / "docs"
MADE = "<!-- Made by tools/generate_docs.py: change the code, not this page. -->"


def metrics_page() -> Iterator[str]:
    """docs/metrics.md: every metric of the catalogue."""
    yield "# Metrics"
    yield ""
    yield MADE
    yield ""
    yield (
        "Names are API: before 1.0 each change is in the changelog, from 1.0 on they change only "
        "with a major version. Units are base units and stand in "
        "the names. A value that is not available is absent, never 0 and never stale. Moments are "
        "Unix timestamps. `daemon` is the pipe directory of a control daemon, `server` the PID of "
        "an MPS server, `pid` that of a client as the host sees it, `gpu` NVML's index and `uuid` "
        "the full UUID. Counters start at 0 when the exporter starts: what a log tells of before "
        "rebuilds the state and is not counted."
    )
    yield ""
    yield (
        "A state set has one sample for each state, with the state in a label named as the metric "
        'and the value 1 for the one in force: `mps_control_state{mps_control_state="answering"}`. '
        "Where a label can have only certain values, all of them are named; in an info metric it "
        "is empty where its value is not known."
    )
    for section, specs in groupby(CATALOGUE.values(), key=lambda spec: spec.section):
        yield ""
        yield f"## {section}"
        yield ""
        yield "| metric | type | labels | meaning | source |"
        yield "| --- | --- | --- | --- | --- |"
        for spec in specs:
            labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
            words = spec.help
            if spec.states:
                words += f" States: {', '.join(spec.states)}."
            for label, values in spec.values.items():
                words += f" `{label}` is one of: {', '.join(values)}."
            if spec.note:
                words += f" {spec.note}"
            words = words.replace("|", "\\|")
            yield f"| `{spec.name}` | {spec.kind} | {labels} | {words} | {spec.source} |"


def configuration_page() -> Iterator[str]:
    """docs/configuration.md: every flag and its environment twin."""
    defaults = Settings()
    yield "# Configuration"
    yield ""
    yield MADE
    yield ""
    yield (
        "Every setting is a flag with an environment twin; the flag wins. A repeatable setting is "
        "given several times as a flag, and separated by commas in the environment. Switches are "
        "turned off with `--no-` before the name. Durations are `500ms`, `5s`, `1m`, `1h` or plain "
        "seconds. A wrong value is refused at start, with the reason."
    )
    yield ""
    yield "| flag | environment | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for flag in FLAGS:
        default = getattr(defaults, flag.field)
        if isinstance(default, bool):
            shown = "on" if default else "off"
        elif isinstance(default, tuple):
            shown = ", ".join(f"`{value}`" for value in default) or "none"
        elif isinstance(default, float):
            is_time = "DURATION" in flag.metavar
            shown = f"`{default:g}{'s' if is_time else ''}`"
        else:
            shown = "none" if default is None else f"`{default}`"
        value = f"={flag.metavar}" if flag.metavar else ""
        repeat = " Repeatable." if flag.repeatable else ""
        yield f"| `--{flag.name}{value}` | `{flag.variable}` | {shown} | {flag.help}{repeat} |"
    yield ""
    yield (
        "Sub-commands have some more: see `mps-exporter demo --help` and "
        "`mps-exporter record --help`."
    )


def advice_table() -> Iterator[str]:
    """Every finding, for docs/troubleshooting.md."""
    yield "| name | severity | finding | why it matters | see |"
    yield "| --- | --- | --- | --- | --- |"
    for advice in ADVICE.values():
        if advice.kind != "news":
            see = "; ".join(
                f"[{symptom.title}](symptoms/{symptom.path.name})"
                for symptom in symptoms()
                if advice.name in symptom.findings
            )
            yield f"| `{advice.name}` | {advice.severity} | {advice.title} | {advice.why} | {see} |"


def alerts_table() -> Iterator[str]:
    """Every alert with its runbook, for docs/alerts.md."""
    yield "| alert and runbook | severity | summary |"
    yield "| --- | --- | --- |"
    for file in sorted((DOCS.parent / "prometheus" / "rules").glob("*.yml")):
        for group in yaml.safe_load(file.read_text("utf-8"))["groups"]:
            for rule in group["rules"]:
                if name := rule.get("alert"):
                    severity, summary = rule["labels"]["severity"], rule["annotations"]["summary"]
                    link = f"[{name}](../prometheus/runbooks/{name}.md)"
                    yield f"| {link} | {severity} | {summary} |"


def symptoms_table() -> Iterator[str]:
    """Every page of docs/symptoms, and every reported thread with the page that answers it."""
    pages = symptoms()
    for kind, heading in KINDS.items():
        yield ""
        yield f"## {heading}"
        yield ""
        for symptom in pages:
            if symptom.kind == kind:
                yield f"- [{symptom.title}]({symptom.path.name})"
    yield ""
    yield "## Where it was reported"
    yield ""
    yield "| thread | answered in |"
    yield "| --- | --- |"
    threads = sorted({thread for symptom in pages for thread in symptom.reported}, key=str.lower)
    for thread in threads:
        answers = "; ".join(
            f"[{symptom.title}]({symptom.path.name})"
            for symptom in pages
            if thread in symptom.reported
        )
        yield f"| {thread_link(thread)} | {answers} |"
    yield ""


TABLES = {
    "symptoms/README.md": ("symptoms", symptoms_table),
    "troubleshooting.md": ("advice", advice_table),
    "alerts.md": ("alerts", alerts_table),
    "fleet.md": ("series", series_table),
}


def filled(name: str) -> Iterator[str]:
    """A page with its table made anew."""
    mark, table = TABLES[name]
    begin, end = f"<!-- {mark} -->", "<!-- end -->"
    before, _, rest = (DOCS / name).read_text("utf-8").partition(begin)
    yield f"{before}{begin}"
    yield from table()
    yield end + rest.partition(end)[2].removesuffix("\n")


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "metrics.md": metrics_page,
    "configuration.md": configuration_page,
    **{name: partial(filled, name) for name in TABLES},
}


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path = DOCS / name
        text = "\n".join(page()) + "\n"
        if check:
            if not path.exists() or path.read_text("utf-8") != text:
                stale.append(name)
        else:
            path.write_text(text, "utf-8")
    if check:
        stale += chart.stale()
    else:
        chart.write()
    if stale:
        sys.stderr.write(f"not up to date: {', '.join(stale)}; run python -m tools.generate_docs\n")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
