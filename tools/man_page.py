"""The man page, from the tables of commands and flags, in roff (man(7))."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter.command_table import COMMANDS, Command, default_text, grouped
from mps_exporter.config import FLAGS
from mps_exporter.parser import DESCRIPTION


def man_page() -> Iterator[str]:
    """mps-exporter(1)."""
    yield '.\\" Made by tools/generate_docs.py: change the code, not this page.'
    yield '.TH MPS-EXPORTER 1 "" "mps-exporter" "User Commands"'
    yield ".SH NAME"
    yield "mps-exporter \\- Prometheus exporter for NVIDIA MPS"
    yield ".SH SYNOPSIS"
    yield ".B mps-exporter"
    yield "[\\fICOMMAND\\fR] [\\fIFLAG\\fR]..."
    yield ".SH DESCRIPTION"
    yield _text(DESCRIPTION)
    yield ".SH COMMANDS"
    for command in COMMANDS.values():
        yield from _command(command)
    yield ".SH SETTINGS"
    yield _text(
        "Each setting is a flag and an environment variable; the flag wins. A switch is turned "
        "off with --no- before its name. A repeatable setting is separated by commas in its "
        "variable. Durations are 500ms, 5s, 1m, 1h or plain seconds."
    )
    for title, flags in grouped(FLAGS).items():
        yield f'.SS "{title}"'
        for flag in flags:
            value = f"=\\fI{flag.metavar}\\fR" if flag.metavar else ""
            no = "[no-]" if flag.is_switch else ""
            yield ".TP"
            yield f"\\fB{_text(f'--{no}{flag.name}')}\\fR{value}"
            repeatable = " Repeatable." if flag.repeatable else ""
            yield _text(f"{flag.help}{repeatable} Default: {default_text(flag)}.")
            yield ".br"
            yield _text(f"Variable: {flag.variable}. Commands: {', '.join(flag.commands)}.")
    yield ".SH EXIT STATUS"
    for command in COMMANDS.values():
        yield ".TP"
        yield f".B {command.name}"
        yield _text(command.exit_statuses)


def _command(command: Command) -> Iterator[str]:
    yield f'.SS "{command.name}"'
    yield _text(command.help)
    for option in command.options:
        yield ".TP"
        if option.name.startswith("--"):
            value = f"=\\fI{option.metavar}\\fR" if option.metavar else ""
            yield f"\\fB{_text(option.name)}\\fR{value}"
        else:
            yield f"\\fI{option.metavar}\\fR"
        values = f" One of {', '.join(option.values)}." if option.values else ""
        default = "" if option.default is None else f" Default: {option.default}."
        yield _text(f"{option.help}{values}{default}")


def _text(words: str) -> str:
    """Escape what roff would interpret."""
    escaped = words.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
