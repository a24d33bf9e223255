"""What several commands need."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mps_exporter import humanize

if TYPE_CHECKING:
    from mps_exporter.sources.recording import Recording

MAX_MESSAGE_CHARACTERS = 500


class StartError(Exception):
    """The program cannot do what it was asked to; the message says why and what to do."""


def load_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        StartError: It cannot be read.
    """
    from mps_exporter.sources.recording import RecordingError, read_recording

    try:
        return read_recording(path)
    except RecordingError as error:
        # What it quotes is from the file, and goes to a terminal.
        raise StartError(humanize.printable(str(error), MAX_MESSAGE_CHARACTERS)) from error


def on_signals(action: Callable[[], object], *signals: signal.Signals) -> None:
    """Call this in the running event loop when one of the signals is received."""
    for received in signals:
        # nohup(1) has SIGHUP ignored, and means it. A shell that has SIGINT ignored, for what it
        # runs in the background, only keeps Ctrl-C for itself.
        if received is signal.SIGHUP and signal.getsignal(received) is signal.SIG_IGN:
            continue
        asyncio.get_running_loop().add_signal_handler(received, action)
