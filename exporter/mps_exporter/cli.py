"""The command line: reads it, and runs the command."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import mps_exporter
from mps_exporter.config import InvalidSettingError, Settings, load_settings, parse_duration
from mps_exporter.logging import configure
from mps_exporter.own_memory import configure_malloc, without_host_certificates
from mps_exporter.parser import (
    DIAGNOSIS_FAILED,
    WRONG_USAGE,
    UsageError,
    did_you_mean,
    parse_command_line,
)
from mps_exporter.terminal import open_closed_streams, print_output, print_status

if TYPE_CHECKING:
    from mps_exporter.commands.doctor_processes import ProcessSelection


def version_text() -> str:
    """What --version prints."""
    return f"mps-exporter {mps_exporter.__version__} (Python {platform.python_version()})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; gives its exit status."""
    open_closed_streams()
    try:
        parsed = parse_command_line(sys.argv[1:] if arguments is None else arguments)
    except UsageError as error:
        print_status(error.message)
        return error.status
    if isinstance(parsed, str):
        print_output(parsed)
        return 0
    command, given = parsed
    if given["version"]:
        print_output(version_text())
        return 0
    doctor = command == "doctor"
    try:
        settings = load_settings(given, os.environ, command)
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
    # What a single look could not see is in what it prints.
    brief = command == "doctor" or given.get("once") or given.get("textfile")
    level = "error" if brief else settings.log_level
    configure(level, settings.log_format)
    configure_malloc()
    if brief:
        # It ends before there is much to collect; looking for it took a tenth of the imports.
        gc.set_threshold(100_000)
    # Late imports: --help and --version answer at once, and the parts that a command does not
    # need cost it neither time nor memory.
    from mps_exporter.commands.common import StartError

    try:
        started = COMMANDS[command](settings, given)
        return started if isinstance(started, int) else asyncio.run(started)
    except StartError as error:
        print_status(f"mps-exporter: {error}\n")
        return DIAGNOSIS_FAILED if command == "doctor" else 1
    except KeyboardInterrupt:
        return 130


Start = Callable[[Settings, Mapping[str, object]], Coroutine[None, None, int] | int]


def _serve_command(settings: Settings, given: Mapping[str, object]) -> Coroutine[None, None, int]:
    if given["textfile"] is not None:
        from mps_exporter.commands.once import write_metrics

        path = Path(str(given["textfile"]))
        if path.suffix != ".prom":
            raise InvalidSettingError(
                f"--textfile: {path}: node_exporter reads only files whose names end in .prom"
            )
        return write_metrics(settings, path)
    if given["once"]:
        from mps_exporter.commands.once import print_metrics

        return print_metrics(settings)
    with without_host_certificates():
        from mps_exporter.commands.serve import serve

    return serve(settings)


def _demo(settings: Settings, given: Mapping[str, object]) -> Coroutine[None, None, int] | int:
    with without_host_certificates():
        from mps_exporter.commands.demo import demo, list_chapters

    if given["list_chapters"]:
        return list_chapters()
    return demo(
        settings,
        recording=str(given["recording"] or "") or None,
        chapter=str(given["chapter"] or "") or None,
        speed=_speed(str(given["speed"])),
    )


def _doctor(settings: Settings, given: Mapping[str, object]) -> Coroutine[None, None, int]:
    from mps_exporter.commands.doctor import diagnose

    recording, moment, check = given["recording"], given["at"], given["check"]
    if check is not None:
        from mps_exporter.commands.doctor_report import CHECKS

        if check not in CHECKS:
            raise InvalidSettingError(
                f"--check: no finding {check!r}{did_you_mean(str(check), CHECKS)}; "
                "docs/troubleshooting.md lists them"
            )
    others = [flag for flag in ("json", "pid", "user", "job") if given[flag]]
    if check is not None and others:
        raise InvalidSettingError(f"--check and --{others[0]}: give one of them")
    if recording is None and moment is not None:
        raise InvalidSettingError("--at: is a moment of a recording: give --recording too")
    return diagnose(
        settings,
        as_json=bool(given["json"]),
        recording=None if recording is None else Path(str(recording)),
        at_seconds=None if moment is None else _duration_flag("--at", str(moment)),
        check=None if check is None else str(check),
        selection=_selection(given),
    )


def _selection(given: Mapping[str, object]) -> ProcessSelection | None:
    """Of which processes doctor is asked; None: of the host."""
    named = [name for name in ("pid", "user", "job") if given[name] is not None]
    if not named:
        return None
    from mps_exporter.commands.doctor_processes import ProcessSelection

    if len(named) > 1:
        raise InvalidSettingError(f"--{named[0]} and --{named[1]}: give one of them")
    value = str(given[named[0]])
    if named == ["job"]:
        return ProcessSelection(job=value)
    if named == ["user"]:
        return ProcessSelection(uid=user_number(value))
    if not (value.isascii() and value.isdecimal() and int(value)):
        raise InvalidSettingError(f"--pid: {value!r} must be the number of a process")
    return ProcessSelection(pid=int(value))


def user_number(name: str) -> int:
    """Return the UID of a user, given by name or number.

    Raises:
        InvalidSettingError: Nobody has this name.
    """
    import pwd

    if name.isascii() and name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise InvalidSettingError(f"--user: no user is named {name!r}") from None


def _record(settings: Settings, given: Mapping[str, object]) -> Coroutine[None, None, int]:
    from mps_exporter.commands.record import record

    return record(
        settings,
        path=Path(str(given["recording"])),
        duration_seconds=_duration_flag("--duration", str(given["duration"])),
        interval_seconds=_duration_flag("--interval", str(given["interval"])),
        anonymise=bool(given["anonymise"]),
        scenario=str(given["scenario"] or ""),
    )


def _completion(settings: Settings, given: Mapping[str, object]) -> int:
    del settings
    from mps_exporter.commands.completion import script

    print_output(script(str(given["shell"])))
    return 0


COMMANDS: dict[str, Start] = {
    "serve": _serve_command,
    "demo": _demo,
    "doctor": _doctor,
    "record": _record,
    "completion": _completion,
}


def _duration_flag(flag: str, text: str) -> float:
    try:
        seconds = parse_duration(text)
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
