"""The command line: parses it with argparse and runs the command."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import mps_exporter
from mps_exporter.config import (
    COMMANDS,
    DESCRIPTION,
    FLAGS,
    OPTIONS,
    PROGRAM,
    Flag,
    InvalidSettingError,
    Settings,
    grouped,
    load,
    nearest,
    options_of,
)
from mps_exporter.logging import configure
from mps_exporter.own_memory import configure_malloc
from mps_exporter.terminal import open_closed_streams, print_output, print_status

if TYPE_CHECKING:
    from mps_exporter.commands.process_report import ProcessSelection

WRONG_USAGE = 2
DIAGNOSIS_FAILED = 3
"""Exit status of doctor for every failure of the program: 1 and 2 are about the host."""

HELP = ("-h", "--help", "--help-all")
VERSION = ("-V", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    open_closed_streams()
    words = _with_command(sys.argv[1:] if arguments is None else arguments)
    if words[0] == "version" or not {*VERSION}.isdisjoint(words):
        print_output(f"{PROGRAM} {mps_exporter.__version__} (Python {platform.python_version()})")
        return 0
    command = words[0]
    doctor = command == "doctor"
    try:
        given = parse_words(words)
        if given is None:
            return 0
        settings, options = load(given, os.environ, command)
        return _run(command, settings, options)
    except InvalidSettingError as error:
        known = f"{command} " if command in COMMANDS else ""
        print_status(f"{PROGRAM}: {error}\nTry '{PROGRAM} {known}--help'.\n")
        return DIAGNOSIS_FAILED if doctor else WRONG_USAGE
    except Exception:
        if not doctor:
            raise
        # Python's own status for an internal error, 1, would be taken for warnings.
        print_status(traceback.format_exc())
        return DIAGNOSIS_FAILED


# ------------------------------------------------------------------------------- parsing


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: object = None) -> None:
        del file
        print_output(self.format_help())

    def error(self, message: str) -> NoReturn:
        raise InvalidSettingError(message.removeprefix("argument "))


def _with_command(words: Sequence[str]) -> list[str]:
    """Return the words with the command first: serve is the default."""
    first, *rest = words or ("serve",)
    if first == "help":
        return [*rest[:1], "--help"]
    if first.startswith("-") and first not in HELP:
        return ["serve", *words]
    return [first, *rest]


def parse_words(words: Sequence[str]) -> dict[str, Any] | None:
    """Return what was given for the command; None: help was asked for and is printed.

    Raises:
        InvalidSettingError: The command line is wrong.
    """
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
        file = " FILE" if any(flag.name == "FILE" for flag in options_of(name)) else ""
        parsers[name] = sub = commands.add_parser(
            name,
            usage=f"{PROGRAM} {name}{file} [FLAG]...",
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
    how: dict[str, Any] = {"help": flag.meaning, "default": argparse.SUPPRESS}
    if default := flag.default_text(command):
        how["help"] += f" Default: {default}."
    if flag.setting:
        how["help"] += f" ${flag.variable}"
    if flag.name == "FILE":
        parser.add_argument(
            "file", metavar="FILE", nargs=None if command == "record" else "?", **how
        )
        return
    if flag.is_switch:
        how["action"] = argparse.BooleanOptionalAction if flag.setting else "store_true"
    else:
        how |= {"metavar": flag.kind.metavar, "action": "append" if flag.repeatable else "store"}
    parser.add_argument(f"--{flag.name}", dest=flag.field, **how)


def _why_unknown(word: str, command: str) -> str:
    if not word.startswith("-"):
        first = f": the command comes first: {PROGRAM} {word} ..." if word in COMMANDS else ""
        return f"unexpected argument {word!r}{first}"
    name = word.partition("=")[0]
    flags = {f"--{flag.name}": flag for flag in (*FLAGS, *OPTIONS)}
    if known := flags.get(name.replace("--no-", "--")):
        return f"{name} is a flag of {' and '.join(known.commands)}, not of {command}"
    own = [one for one, flag in flags.items() if command in flag.commands]
    return f"unknown flag {name}{nearest(name, own)}"


# ------------------------------------------------------------------------------- running


def _run(command: str, settings: Settings, options: dict[str, Any]) -> int:
    # What a single collection could not read is in what it prints.
    brief = command == "doctor" or options.get("once") or options.get("textfile")
    configure("error" if brief else settings.log_level, settings.log_format)
    configure_malloc()
    if brief:
        # The process ends before there is garbage; collecting took a tenth of the imports.
        gc.set_threshold(100_000)
    # Late imports: --help answers at once, and a command loads only what it needs.
    from mps_exporter.commands.common import StartError

    try:
        started = RUNNERS[command](settings, options)
        return started if isinstance(started, int) else asyncio.run(started)
    except StartError as error:
        print_status(f"{PROGRAM}: {error}\n")
        return DIAGNOSIS_FAILED if command == "doctor" else 1
    except KeyboardInterrupt:
        return 130


Start = Callable[[Settings, Mapping[str, Any]], Coroutine[None, None, int] | int]


def _serve(settings: Settings, options: Mapping[str, Any]) -> Coroutine[None, None, int]:
    if options["textfile"]:
        from mps_exporter.commands.once import write_metrics

        return write_metrics(settings, Path(options["textfile"]))
    if options["once"]:
        from mps_exporter.commands.once import print_metrics

        return print_metrics(settings)
    from mps_exporter.commands.serve import serve

    return serve(settings)


def _demo(settings: Settings, options: Mapping[str, Any]) -> Coroutine[None, None, int] | int:
    from mps_exporter.commands.demo import demo, list_chapters

    if options["list_chapters"]:
        return list_chapters()
    return demo(
        settings,
        recording=options["file"] or None,
        chapter=options["chapter"] or None,
        speed=options["speed"],
    )


def _doctor(settings: Settings, options: Mapping[str, Any]) -> Coroutine[None, None, int]:
    from mps_exporter.commands.doctor import diagnose

    given = [name for name in ("check", "pid", "user", "job") if options[name] is not None]
    if "check" in given and options["json"]:
        given.append("json")
    if len(given) > 1:
        raise InvalidSettingError(f"--{given[0]} and --{given[1]}: give one of them")
    if (check := options["check"]) is not None:
        from mps_exporter.commands.doctor_report import CHECKS

        if check not in CHECKS:
            raise InvalidSettingError(
                f"--check: no finding {check!r}; docs/troubleshooting.md lists them"
            )
    if options["at"] is not None and options["recording"] is None:
        raise InvalidSettingError("--at: is a moment of a recording: give --recording too")
    return diagnose(
        settings,
        as_json=options["json"],
        recording=options["recording"] and Path(options["recording"]),
        at_seconds=options["at"],
        check=check,
        selection=_selection(options),
    )


def _selection(options: Mapping[str, Any]) -> ProcessSelection | None:
    """The processes to diagnose; None: the host."""
    pid, uid, job = options["pid"], options["user"], options["job"]
    if pid is uid is job is None:
        return None
    from mps_exporter.commands.process_report import ProcessSelection

    return ProcessSelection(pid=pid, uid=uid, job=job)


def _record(settings: Settings, options: Mapping[str, Any]) -> Coroutine[None, None, int]:
    from mps_exporter.commands.record import record

    return record(
        settings,
        path=Path(options["file"]),
        duration_seconds=options["duration"],
        interval_seconds=options["interval"],
        anonymise=options["anonymise"],
        scenario=options["scenario"],
    )


RUNNERS: dict[str, Start] = {"serve": _serve, "demo": _demo, "doctor": _doctor, "record": _record}
