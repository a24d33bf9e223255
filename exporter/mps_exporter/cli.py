"""The command line: serve (the default), demo, record and doctor."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import sys
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import mps_exporter
from mps_exporter.config import InvalidSettingError, Settings, add_flags, duration, load
from mps_exporter.logging import configure
from mps_exporter.memory import limit_malloc_arenas
from mps_exporter.terminal import open_closed_streams, print_status

_log = logging.getLogger(__name__)

COMMANDS = {
    "serve": "export this host's MPS and GPUs (the default)",
    "demo": "export a built-in recording of a real host: no GPU needed",
    "doctor": "diagnose this host and print problems with fixes",
    "record": "write what the sources read to a file, to replay it elsewhere",
}

EPILOGUES = {
    "doctor": "Exit status: 0 nothing is wrong, 1 warnings, 2 something critical, 3 could not look "
    "(a wrong flag, a recording that cannot be read, nowhere to print to).",
}


WRONG_USAGE = 2
DIAGNOSIS_FAILED = 3
"""The doctor's status for every failure of his own: 1 and 2 are about the host."""


class _Parser(argparse.ArgumentParser):
    """Wrong usage is said in one line, with what to do."""

    wrong_usage = WRONG_USAGE

    def error(self, message: str) -> NoReturn:
        self.exit(self.wrong_usage, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")


class _DoctorParser(_Parser):
    wrong_usage = DIAGNOSIS_FAILED


def _parser(kind: type[_Parser]) -> argparse.ArgumentParser:
    parser = kind(
        prog="mps-exporter",
        description="Prometheus exporter for NVIDIA MPS: control daemons, servers and clients, "
        "which users wait for which, crashes and the clients lost with them, and true GPU "
        "utilization. Without a command it serves this host's metrics.",
        epilog="Every flag is also an environment variable: --web.listen-address is "
        "MPS_EXPORTER_WEB_LISTEN_ADDRESS.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version_text())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, words in COMMANDS.items():
        command = commands.add_parser(
            name, help=words, description=words, epilog=EPILOGUES.get(name), allow_abbrev=False
        )
        add_flags(command, name)
        if name == "demo":
            command.add_argument(
                "recording", nargs="?", metavar="FILE",
                help="a recording of your own instead of the built-in one",
            )  # fmt: skip
            command.add_argument(
                "--speed", default="1", metavar="FACTOR", help="replay faster (default: 1)"
            )
        if name == "doctor":
            command.add_argument("--json", action="store_true", help="print for a program")
            command.add_argument(
                "--recording", metavar="FILE", help="look at a recording instead, at its end"
            )
            command.add_argument(
                "--at", metavar="DURATION", help="not at its end, but so long after its start"
            )
        if name == "record":
            command.add_argument("recording", metavar="FILE", help="the file to write")
            command.add_argument(
                "--duration", default="60s", metavar="DURATION",
                help="how long (default: 60s); Ctrl-C ends it sooner and keeps what there is",
            )  # fmt: skip
            command.add_argument(
                "--interval", default="1s", metavar="DURATION",
                help="time between collections (default: 1s)",
            )  # fmt: skip
            command.add_argument(
                "--anonymise", action="store_true",
                help="replace UUIDs, serials, user and program names",
            )  # fmt: skip
            command.add_argument(
                "--scenario",
                default="",
                metavar="TEXT",
                help="what the recording shows, for the reader",
            )
    return parser


def version_text() -> str:
    """What --version prints."""
    return f"mps-exporter {mps_exporter.__version__} (Python {platform.python_version()})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; gives its exit status."""
    open_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in (*COMMANDS, "-h", "--help", "--version"):
        words.insert(0, "serve")
    doctor = words[0] == "doctor"
    parser = _parser(_DoctorParser if doctor else _Parser)
    given = vars(parser.parse_args(words))
    command = given.pop("command")
    try:
        settings = load(given, os.environ, command)
        return _run(command, settings, given)
    except InvalidSettingError as error:
        print_status(f"mps-exporter: {error}\nTry 'mps-exporter {command} --help'.\n")
        return DIAGNOSIS_FAILED if doctor else WRONG_USAGE
    except Exception:
        if not doctor:
            raise
        # A fault of ours: Python's own status for it, 1, would be taken for warnings.
        print_status(traceback.format_exc())
        return DIAGNOSIS_FAILED


def _run(command: str, settings: Settings, given: dict[str, object]) -> int:
    # The doctor says himself what he could not see.
    level = "error" if command == "doctor" else settings.log_level
    configure(level, settings.log_format)
    limit_malloc_arenas()
    # Late imports: --help and --version answer at once, and the parts that a command does not
    # need cost it neither time nor memory.
    from mps_exporter.commands.common import StartError

    try:
        return asyncio.run(_coroutine(command, settings, given))
    except StartError as error:
        print_status(f"mps-exporter: {error}\n")
        return DIAGNOSIS_FAILED if command == "doctor" else 1
    except KeyboardInterrupt:
        return 130


def _coroutine(
    command: str, settings: Settings, given: Mapping[str, object]
) -> Coroutine[None, None, int]:
    """The command, ready to run."""
    if command == "record":
        from mps_exporter.commands.record import record

        return record(
            settings,
            path=Path(str(given["recording"])),
            duration_seconds=_duration("--duration", str(given["duration"])),
            interval_seconds=_duration("--interval", str(given["interval"])),
            anonymise=bool(given["anonymise"]),
            scenario=str(given["scenario"]),
        )
    if command == "doctor":
        from mps_exporter.commands.doctor import diagnose

        recording, moment = given["recording"], given["at"]
        if recording is None and moment is not None:
            raise InvalidSettingError("--at: is a moment of a recording: give --recording too")
        return diagnose(
            settings,
            as_json=bool(given["json"]),
            recording=None if recording is None else Path(str(recording)),
            at_seconds=None if moment is None else _duration("--at", str(moment)),
        )
    if command == "demo":
        from mps_exporter.commands.demo import demo

        return demo(
            settings,
            recording=str(given["recording"] or "") or None,
            speed=_speed(str(given["speed"])),
        )
    from mps_exporter.commands.serve import serve

    return serve(settings)


def _duration(flag: str, text: str) -> float:
    try:
        seconds = duration(text)
    except ValueError as error:
        raise InvalidSettingError(f"{flag}: {text!r} {error}") from None
    if seconds <= 0:
        raise InvalidSettingError(f"{flag}: must be more than 0")
    return seconds


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        raise InvalidSettingError(f"--speed: {text!r} must be a number") from None
    if not 0.1 <= speed <= 1000:
        raise InvalidSettingError("--speed: must be from 0.1 to 1000")
    return speed
