"""The man page, from the tables of commands and flags, in roff (man(7))."""

from __future__ import annotations

from collections.abc import Iterator

from mps_exporter.flags import COMMANDS, DESCRIPTION, Flag, grouped, options_of


def man_page() -> Iterator[str]:
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
    for name, command in COMMANDS.items():
        yield f'.SS "{name}"'
        yield _text(command.help)
        for option in options_of(name):
            yield from _flag(option)
    yield ".SH SETTINGS"
    yield _text(
        "Each setting is a flag and an environment variable; the flag wins. A switch is turned "
        "off with --no- before its name. A repeatable setting is separated by commas in its "
        "variable. Durations are 500ms, 5s, 1m, 1h or plain seconds."
    )
    for title, flags in grouped().items():
        yield f'.SS "{title}"'
        for flag in flags:
            yield from _flag(flag)
            yield ".br"
            yield _text(f"Variable: {flag.variable}. Commands: {', '.join(flag.commands)}.")
    yield ".SH EXIT STATUS"
    for name, command in COMMANDS.items():
        yield ".TP"
        yield f".B {name}"
        yield _text(command.exit_statuses)


def _flag(flag: Flag) -> Iterator[str]:
    name, _, value = flag.usage.partition("=")
    if flag.setting and flag.is_switch:
        name = name.replace("--", "--[no-]")
    yield ".TP"
    yield f"\\fB{_text(name)}\\fR" + (f"=\\fI{value}\\fR" if value else "")
    yield _text(flag.explained())


def _text(words: str) -> str:
    """Escape what roff would interpret."""
    escaped = words.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
