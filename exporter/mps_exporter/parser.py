"""Reads the command line and prints its help, from the tables of commands and flags."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from mps_exporter.command_table import (
    COMMANDS,
    MOST_USED,
    Command,
    Option,
    default_text,
    grouped,
)
from mps_exporter.config import FLAGS, Flag, add_flags

PROGRAM = "mps-exporter"
WRONG_USAGE = 2
DIAGNOSIS_FAILED = 3
"""The status of doctor for every failure of the program: 1 and 2 are about the host."""

WIDEST = 100
"""Longer lines are hard to read, however wide the terminal is."""

DESCRIPTION = (
    "Prometheus exporter for NVIDIA MPS: who is blocked by whom, which server crashed and which "
    "clients were lost with it, the limits of each client, and how much of the GPU is working. "
    "Without a command it serves the metrics of this host."
)


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in two lines: what is wrong, and what to do."""

    def __init__(self, command: Command) -> None:
        super().__init__(prog=PROGRAM, allow_abbrev=False, add_help=False)
        self.command = command
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("--help-all", action="store_true")
        self.add_argument("--version", action="store_true")
        for option in command.options:
            self._add_option(option)
        add_flags(self, command.name)

    def _add_option(self, option: Option) -> None:
        if not option.name.startswith("--"):
            self.add_argument(option.name, nargs="?", metavar=option.metavar)
        elif option.metavar:
            self.add_argument(option.name, default=option.default, metavar=option.metavar)
        else:
            self.add_argument(option.name, action="store_true")

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ").replace("expected one argument", "needs a value")
        fail(text, self.command.name)

    def names(self) -> list[str]:
        """Every flag that can be given."""
        return [name for name in self._option_string_actions if name.startswith("--")]


def fail(message: str, command: str | None) -> NoReturn:
    """End with the status for wrong usage."""
    help_command = f"{PROGRAM} {command} --help" if command else f"{PROGRAM} --help"
    status = DIAGNOSIS_FAILED if command == "doctor" else WRONG_USAGE
    raise UsageError(status, f"{PROGRAM}: {message}\nTry '{help_command}'.\n")


class UsageError(Exception):
    """The command line is wrong; the message says what, and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def parse_command_line(words: Sequence[str]) -> tuple[str, dict[str, Any]] | str:
    """Return the command and what was given for it, or the text that was asked for (help).

    Raises:
        UsageError: The command line is wrong.
    """
    first = words[0] if words else ""
    if first in COMMANDS:
        name, words = first, words[1:]
    elif not first or first.startswith("-"):
        name = "serve"
    else:
        fail(f"unknown command {first!r}{did_you_mean(first, COMMANDS)}", None)
    parser = _Parser(COMMANDS[name])
    # Help is for those who do not know yet what else must be given.
    if "--help-all" in words:
        return help_of_all(COMMANDS[name] if first in COMMANDS else None)
    if {"-h", "--help"}.intersection(words):
        return help_of(COMMANDS[name]) if first in COMMANDS else overview()
    given, unknown = parser.parse_known_args(list(words))
    if unknown:
        fail(_why_unknown(unknown[0], parser), name)
    found = vars(given)
    for option in COMMANDS[name].options:
        value = found[option.field]
        if option.required and value is None:
            fail(f"{option.metavar} is missing: {option.help.rstrip('.').lower()}", name)
        if option.values and value not in option.values:
            near = did_you_mean(value, option.values)
            fail(
                f"{option.metavar}: {value!r} must be one of {', '.join(option.values)}{near}", name
            )
    return name, found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message: the known word that is nearest, if one is near."""
    near = difflib.get_close_matches(word, list(known), 1, 0.7)
    return f": did you mean {near[0]}?" if near else ""


def _why_unknown(word: str, parser: _Parser) -> str:
    command = parser.command.name
    if not word.startswith("-"):
        if word in COMMANDS:
            return f"the command comes first: {PROGRAM} {word} ..."
        return f"unexpected argument {word!r}"
    flag = word.partition("=")[0]
    takers = [other.name for other in COMMANDS.values() if flag in _Parser(other).names()]
    if takers:
        return f"{flag} is a flag of {' and '.join(takers)}, not of {command}"
    return f"unknown flag {flag}{did_you_mean(flag, parser.names())}"


# ------------------------------------------------------------------------------------- help


def terminal_width() -> int:
    """Columns of the terminal, or of $COLUMNS, as far as they are used."""
    return max(40, min(shutil.get_terminal_size().columns, WIDEST))


def _wrapped(text: str, indent: int = 0) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        terminal_width(),
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _usage(words: str) -> Iterator[str]:
    yield from _wrapped(f"Usage: {PROGRAM} {words}")
    yield ""


def _option(option: Option) -> Iterator[str]:
    value = f"={option.metavar}" if option.metavar and option.name.startswith("--") else ""
    yield f"  {option.name}{value}" if option.name.startswith("--") else f"  {option.metavar}"
    text = option.help
    if option.values:
        text += f" One of {', '.join(option.values)}."
    if option.default is not None:
        text += f" Default: {option.default}."
    yield from _wrapped(text, 6)


def _flag(flag: Flag, command: str) -> Iterator[str]:
    value = f"={flag.metavar}" if flag.metavar else ""
    yield f"  --{'[no-]' if flag.is_switch else ''}{flag.name}{value}"
    repeatable = " Repeatable." if flag.repeatable else ""
    yield from _wrapped(f"{flag.help}{repeatable} Default: {default_text(flag, command)}.", 6)
    yield from _wrapped(f"${flag.variable}", 6)


def _flag_groups(flags: tuple[Flag, ...], command: str) -> Iterator[str]:
    for title, members in grouped(flags).items():
        yield ""
        yield f"{title}:"
        for flag in members:
            yield from _flag(flag, command)


def _two_columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    left = max(len(name) for name, _ in rows) + 4
    for name, text in rows:
        first, *rest = _wrapped(text, left)
        yield f"  {name}".ljust(left) + first[left:]
        yield from rest


def overview() -> str:
    """Return what --help prints: the commands, and the flags that are used most."""
    lines = [*_usage("[COMMAND] [FLAG]..."), *_wrapped(DESCRIPTION), "", "Commands:"]
    lines += _two_columns([(command.name, command.help) for command in COMMANDS.values()])
    lines += ["", "Flags used most:"]
    for flag in FLAGS:
        if flag.name in MOST_USED:
            lines += _flag(flag, "serve")
    lines += ["", "Help:"]
    lines += _two_columns(
        [
            (f"{PROGRAM} COMMAND --help", "Flags of a command."),
            (f"{PROGRAM} --help-all", "All flags, in groups."),
            (f"{PROGRAM} --version", "The version."),
        ]
    )
    lines += ["", *_wrapped(EXIT_STATUSES)]
    return "\n".join(lines)


EXIT_STATUSES = "Exit status: " + COMMANDS["serve"].exit_statuses


def help_of(command: Command) -> str:
    """Return the help of a command: what it takes, and nothing else."""
    positional = " ".join(
        option.metavar if option.required else f"[{option.metavar}]"
        for option in command.options
        if not option.name.startswith("--")
    )
    has_flags = bool(command.flags) or any(one.name.startswith("--") for one in command.options)
    words = " ".join(filter(None, (command.name, positional, "[FLAG]..." if has_flags else "")))
    lines = [*_usage(words), *_wrapped(command.help)]
    if command.options:
        lines += ["", f"For {command.name} only:"]
        for option in command.options:
            lines += _option(option)
    lines += _flag_groups(command.flags, command.name)
    lines += ["", *_wrapped(f"Exit status: {command.exit_statuses}")]
    return "\n".join(lines)


def help_of_all(command: Command | None) -> str:
    """Return the help with every flag: of a command, or of all of them."""
    if command is not None:
        return help_of(command)
    lines = [*_usage("[COMMAND] [FLAG]..."), *_wrapped(DESCRIPTION)]
    for one in COMMANDS.values():
        lines += ["", f"{one.name}:", *_wrapped(one.help, 2)]
        for option in one.options:
            lines += _option(option)
    lines += [
        "",
        *_wrapped(
            "Settings. Each is a flag and an environment variable; the flag wins. A switch is "
            "turned off with --no-. A repeatable setting is separated by commas in its variable. "
            "Durations are 500ms, 5s, 1m, 1h or plain seconds."
        ),
    ]
    lines += _flag_groups(FLAGS, "serve")
    return "\n".join(lines)
