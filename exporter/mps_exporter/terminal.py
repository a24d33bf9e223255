"""Standard output and error: they may be closed, full, no terminal, or lead to who has left."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import sys
import threading
from collections.abc import Mapping
from typing import TextIO


def open_closed_streams() -> None:
    """Let streams that the caller closed (``2>&-``) lead nowhere: nobody fails who writes to one.

    Their numbers are taken, too: the next file to be opened would get what is meant for them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    # They live as long as the program.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123


STDERR = 2
STATUS_SECONDS = 0.5
"""So long print_status waits for a reader."""


def print_status(text: str) -> None:
    """Print on standard error, after the log lines before it.

    A standard error that is closed, full or not read is no failure, and holds up nothing.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()
    # A write to a pipe that nobody reads does not return.
    data = text.encode("utf-8", "backslashreplace")
    writer = threading.Thread(target=_write_error, args=(data,), daemon=True)
    writer.start()
    writer.join(STATUS_SECONDS)


def _write_error(data: bytes) -> None:
    # Not through sys.stderr: at its exit the interpreter waits for who is inside.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(STDERR, data) :]


def show_progress(text: str) -> None:
    """Replace the last line of the terminal; nothing where standard error is no terminal."""
    # Not on one that was stopped (Ctrl-S).
    if sys.stderr.isatty() and select.select([], [STDERR], [], 0)[1]:
        width = shutil.get_terminal_size().columns
        print_status(f"\r\033[K{text[: width - 1]}")


def print_output(text: str) -> None:
    """Print what was asked for; a reader who has seen enough (``| head``) is no failure.

    Raises:
        OSError: It cannot be written.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more at the end of the program.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise


def supports_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether it is a terminal with colours, and nobody asked for none (https://no-color.org)."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return stream.isatty()
