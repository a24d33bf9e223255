"""Writes the reference pages and tables that follow from the code and from the rules.

Pages: docs/metrics.md, docs/configuration.md, docs/mps-exporter.1. Tables, each between a mark and
``<!-- end -->``:
``<!-- advice -->`` in docs/troubleshooting.md, ``<!-- alerts -->`` in docs/alerts.md,
``<!-- symptoms -->`` in docs/symptoms/README.md.

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

from mps_exporter.command_table import COMMANDS, default_text, grouped
from mps_exporter.config import FLAGS
from mps_exporter.diagnostics import ADVICE
from mps_exporter.metrics.catalogue import CATALOGUE
from tools.man_page import man_page
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
    """docs/configuration.md: every command, and every flag with its environment variable."""
    yield "# Configuration"
    yield ""
    yield MADE
    yield ""
    yield (
        "`mps-exporter --help` lists the commands and the flags that are used most, "
        "`mps-exporter COMMAND --help` all flags of a command, `mps-exporter --help-all` all of "
        "them. The man page `mps-exporter(1)` has the same text. For completion in a shell: "
        "`source <(mps-exporter completion bash)`, or `zsh`; "
        "`mps-exporter completion fish | source`."
    )
    yield ""
    yield "## Commands"
    for command in COMMANDS.values():
        yield ""
        yield f"**`{command.name}`**: {command.help}"
        if command.options:
            yield ""
            yield "| argument | meaning |"
            yield "| --- | --- |"
        for option in command.options:
            value = f"={option.metavar}" if option.metavar else ""
            name = f"{option.name}{value}" if option.name.startswith("--") else option.metavar
            values = f" One of {', '.join(option.values)}." if option.values else ""
            default = "" if option.default is None else f" Default: `{option.default}`."
            yield f"| `{name}` | {option.help}{values}{default} |"
        yield ""
        yield f"Exit status: {command.exit_statuses}"
    yield ""
    yield "## Settings"
    yield ""
    yield (
        "Each setting is a flag and an environment variable; the flag wins. A repeatable setting "
        "is given several times as a flag, and separated by commas in the variable. Switches are "
        "turned off with `--no-` before the name. Durations are `500ms`, `5s`, `1m`, `1h` or plain "
        "seconds. A wrong value is refused at start, with the reason. A variable that starts with "
        "`MPS_EXPORTER_` and is not in this table is refused."
    )
    for title, flags in grouped(FLAGS).items():
        yield ""
        yield f"### {title}"
        yield ""
        yield "| flag | environment | default | meaning | commands |"
        yield "| --- | --- | --- | --- | --- |"
        for flag in flags:
            shown = default_text(flag)
            if shown not in {"on", "off", "none"}:
                shown = f"`{shown}`"
            value = f"={flag.metavar}" if flag.metavar else ""
            repeat = " Repeatable." if flag.repeatable else ""
            commands = ", ".join(flag.commands)
            yield (
                f"| `--{flag.name}{value}` | `{flag.variable}` | {shown} | {flag.help}{repeat} "
                f"| {commands} |"
            )
    yield ""
    yield "`demo` listens on `127.0.0.1:9400` unless it is told otherwise."


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
    "mps-exporter.1": man_page,
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
    if stale:
        sys.stderr.write(f"not up to date: {', '.join(stale)}; run python -m tools.generate_docs\n")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
