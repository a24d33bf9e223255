"""The command line: parses it with argparse and runs the command."""

import argparse
import asyncio
import ctypes
import os
import platform
import sys
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import mps_exporter
from mps_exporter.flags import (
    COMMANDS,
    DESCRIPTION,
    FLAGS,
    OPTIONS,
    PROGRAM,
    Flag,
    InvalidSettingError,
    Settings,
    StartError,
    grouped,
    load,
    nearest,
    options_of,
)
from mps_exporter.humanize import printable
from mps_exporter.logging import (
    OutputError,
    configure,
    open_closed_streams,
    print_output,
    print_status,
)

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
DIAGNOSIS_FAILED = 3  # Exit status of doctor after a failure: 1 and 2 describe the host.

MAX_MESSAGE_CHARACTERS = 500  # Maximum length of an error message, which may quote a file.

# <malloc.h>
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

HELP = ("-h", "--help", "--help-all")
VERSION = ("-V", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    open_closed_streams()
    words = _with_command(sys.argv[1:] if arguments is None else arguments)
    command, doctor = words[0], words[0] == "doctor"
    try:
        given = parse_words(words)
        return 0 if given is None else _run(command, load(given, os.environ, command))
    except InvalidSettingError as error:
        known = f"{command} " if command in COMMANDS else ""
        text, status = f"{error}\nTry '{PROGRAM} {known}--help'.", WRONG_USAGE
    except (StartError, OutputError) as error:
        text, status = printable(str(error), MAX_MESSAGE_CHARACTERS), FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as bug:
        if not doctor:
            raise
        # Python's exit status for an internal error is 1, which here means warnings.
        text, status = "".join(traceback.format_exception(bug)), DIAGNOSIS_FAILED
    print_status(f"{PROGRAM}: {text}\n")
    return DIAGNOSIS_FAILED if doctor else status


# ------------------------------------------------------------------------------- parsing


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: object = None) -> None:
        del file
        print_output(self.format_help())

    def error(self, message: str) -> NoReturn:
        raise InvalidSettingError(message.removeprefix("argument "))


def _with_command(words: Sequence[str]) -> list[str]:
    """Return the words with the command in front: serve is the default."""
    first, *rest = words or ("serve",)
    if first == "help":
        return [*rest[:1], "--help"]
    if first.startswith("-") and first not in HELP:
        return ["serve", *words]
    return [first, *rest]


def parse_words(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values given for the command; None if help or version was printed instead."""
    if words[0] == "version" or not {*VERSION}.isdisjoint(words):
        print_output(f"{PROGRAM} {mps_exporter.__version__} (Python {platform.python_version()})")
        return None
    parser, parsers = _parsers()
    try:
        if words[0] == "--help-all":
            print_output("\n".join(one.format_help() for one in (parser, *parsers.values())))
            return None
        given, unknown = parser.parse_known_args(list(words))
    except SystemExit:  # after help: errors are InvalidSettingError
        return None
    if unknown:
        raise InvalidSettingError(_why_unknown(unknown[0], words[0]))
    return vars(given)


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    epilog = (
        f"'{PROGRAM} COMMAND --help' shows the flags of a command, '{PROGRAM} --help-all' all of "
        f"them. Each setting is a flag and an environment variable; the flag wins. A switch is "
        f"turned off with --no- before its name. A repeatable setting is separated by commas in "
        f"its variable. Durations are 500ms, 5s, 1m, 1h or plain seconds."
    )
    parser = _Parser(PROGRAM, "%(prog)s [COMMAND] [FLAG]...", DESCRIPTION, epilog, add_help=False)
    parser.add_argument(*HELP[:2], action="help", help="Show this help.")
    parser.add_argument("--help-all", action="help", help="Show the flags of all commands.")
    parser.add_argument(*VERSION, action="store_true", help="Show the version.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parsers = {}
    for name, command in COMMANDS.items():
        arguments = "".join(f" {one.name}" for one in options_of(name) if one.name.isupper())
        parsers[name] = sub = commands.add_parser(
            name,
            usage=f"{PROGRAM} {name}{arguments} [FLAG]...",
            help=command.help,
            description=command.help,
            epilog=f"Exit status: {command.exit_statuses}",
            allow_abbrev=False,
            add_help=False,
        )
        sub.add_argument(*HELP, action="help", help=argparse.SUPPRESS)
        for flag in options_of(name):
            _add(sub, flag, name)
        for title, flags in grouped(name).items():
            group = sub.add_argument_group(title)
            for flag in flags:
                _add(group, flag, name)
    return parser, parsers


def _add(parser: argparse._ActionsContainer, flag: Flag, command: str) -> None:
    variable = f" ${flag.variable}" if flag.setting else ""
    how: dict[str, Any] = {"help": flag.explained(command) + variable, "default": argparse.SUPPRESS}
    if flag.name.isupper():
        nargs = "+" if flag.repeatable else None if command == "record" else "?"
        parser.add_argument(flag.field, metavar=flag.name, nargs=nargs, **how)
        return
    if flag.is_switch:
        how["action"] = argparse.BooleanOptionalAction if flag.setting else "store_true"
    else:
        how |= {"metavar": flag.kind.metavar, "action": "append" if flag.repeatable else "store"}
    parser.add_argument(f"--{flag.name}", dest=flag.field, **how)


def _why_unknown(word: str, command: str) -> str:
    if not word.startswith("-"):
        first = f": the command comes first: {PROGRAM} {word} ..." if word in COMMANDS else ""
        if command == "doctor" and word.isdecimal():
            first = f": did you mean --pid {word}?"
        return f"unexpected argument {word!r}{first}"
    name = word.partition("=")[0]
    flags = {f"--{flag.name}": flag for flag in (*FLAGS, *OPTIONS)}
    if known := flags.get(name.replace("--no-", "--")):
        return f"{name} is a flag of {' and '.join(known.commands)}, not of {command}"
    own = [one for one, flag in flags.items() if command in flag.commands]
    return f"unknown flag {name}{nearest(name, own)}"


# ------------------------------------------------------------------------------- running


def _run(command: str, settings: Settings) -> int:
    # The output names what a single collection could not read.
    brief = command in ("doctor", "top") or settings.serve_once or settings.serve_textfile
    configure("error" if brief else settings.log_level, settings.log_format)
    configure_malloc()
    started = _start_command(command, settings)
    return started if isinstance(started, int) else asyncio.run(started)


def configure_malloc() -> None:
    """Make malloc return freed memory. Call this before threads are started.

    By default the minimum size of returned blocks rises with the first larger block that is freed:
    after 40 minutes the heap of a full host had gaps of 3.0 MB instead of 0.9 MB.
    """
    with suppress(OSError, AttributeError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def _start_command(command: str, settings: Settings) -> Coroutine[None, None, int] | int:
    """Run the command or return its coroutine. Import only what this command needs."""
    if command == "doctor":
        from mps_exporter.commands.doctor import diagnose

        return diagnose(settings)
    if command == "top":
        from mps_exporter.commands.top import top

        return top(settings)
    if command == "explain":
        from mps_exporter.manual_search import explain

        return explain(" ".join(settings.explain_text))
    if command == "record":
        from mps_exporter.commands.record import record

        return record(settings)
    if settings.serve_once or settings.serve_textfile:
        from mps_exporter.commands.doctor import expose_once

        return expose_once(settings)
    from mps_exporter.commands import serve

    if settings.demo_list_chapters:
        return serve.list_chapters()
    return serve.serve(settings) if command == "serve" else serve.demo(settings)
