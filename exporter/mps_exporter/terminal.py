"""Standard output and error, which may be closed, full, no terminal, or without a reader."""

from __future__ import annotations

import logging
import os
import select
import shutil
import sys
import threading
from collections.abc import Mapping
from typing import TextIO

from mps_exporter.logging import STDERR, write_stderr


def open_closed_streams() -> None:
    """Connect streams that the caller closed (``2>&-``) to /dev/null.

    Otherwise the next opened file would get their numbers, and what is written to them.
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


STATUS_SECONDS = 0.5
"""Time allowed for a write of print_status."""


def print_status(text: str) -> None:
    """Print on standard error, after the log lines before it.

    A standard error that is closed, full or not read is no failure.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()
    writer = threading.Thread(target=write_stderr, args=(text,), daemon=True)
    writer.start()
    writer.join(STATUS_SECONDS)


def show_progress(text: str) -> None:
    """Replace the last line of the terminal, if standard error is a terminal."""
    # Not on one that was stopped (Ctrl-S).
    if sys.stderr.isatty() and select.select([], [STDERR], [], 0)[1]:
        width = shutil.get_terminal_size().columns
        print_status(f"\r\033[K{text[: width - 1]}")


def print_output(text: str) -> None:
    """Print on standard output; a reader that has gone (``| head``) is no failure.

    Raises:
        OSError: The text cannot be written.
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
    """Whether a stream is a terminal with colours, unless NO_COLOR is set (https://no-color.org)."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return stream.isatty()
