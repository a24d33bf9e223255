"""Log lines as Prometheus programs write them, and text on standard output and error.

    time=2026-11-21T08:55:42.578Z level=warn source=collect msg="..." daemon=/tmp/nvidia-mps

The lines are logfmt or JSON. ``extra={"fields": {...}}`` adds fields to the message. Standard
output and error may be closed, full, not a terminal, or without a reader.
"""

import contextlib
import json
import logging
import logging.handlers
import os
import queue
import select
import shutil
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

STDERR = 2

MAX_FIELD_CHARACTERS = 1000  # Maximum length of a value: paths chosen by users may have 128 kB.
MAX_QUEUED_LINES = 1000  # Maximum number of queued lines; further lines are dropped.

WRITE_TIMEOUT_SECONDS = 0.5  # Timeout of a message to the user, and of queued lines at shutdown.


# ------------------------------------------------------------------------------ log lines


def _fields(record: logging.LogRecord) -> dict[str, object]:
    stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    level = record.levelname
    fields: dict[str, object] = {
        "time": stamp.replace("+00:00", "Z"),
        "level": {"WARNING": "warn", "CRITICAL": "error"}.get(level, level.lower()),
        "source": record.name.removeprefix("mps_exporter."),
        "msg": record.getMessage(),
    }
    extra = getattr(record, "fields", None)
    if isinstance(extra, dict):
        fields |= {str(key): value for key, value in extra.items() if value is not None}
    if record.exc_info and record.exc_info[1] is not None:
        fields["err"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
    return {key: _shortened(value) for key, value in fields.items()}


def _shortened(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    if len(text) <= MAX_FIELD_CHARACTERS:
        return text
    return f"{text[:MAX_FIELD_CHARACTERS]}... ({len(text)} characters)"


def _quoted(value: object) -> str:
    # Lower case as in the logs of Go programs: tls=false.
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if text and text.isascii() and text.isprintable() and not set(text) & set(' "=\\'):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


class LogfmtFormatter(logging.Formatter):
    """key=value pairs on one line, values quoted if necessary; a traceback adds lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end; at level debug with the traceback."""
        line = " ".join(f"{key}={_quoted(value)}" for key, value in _fields(record).items())
        if record.exc_info and logging.getLogger("mps_exporter").isEnabledFor(logging.DEBUG):
            return f"{line}\n{self.formatException(record.exc_info)}"
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), default=str)


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Send the program's log and libraries' warnings to standard error, or to a stream."""
    handler: logging.Handler = _StderrHandler() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else LogfmtFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("mps_exporter").setLevel(level.upper())


def write_stderr(text: str) -> None:
    """Write to standard error. Ignore failures; a write to a pipe without a reader blocks."""
    data = text.encode("utf-8", "backslashreplace")
    # Do not write through sys.stderr: at exit the interpreter waits for its lock, which a blocked
    # writer holds.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(STDERR, data) :]


class _StderrHandler(logging.handlers.QueueHandler):
    """Writes to standard error on a separate thread: a blocked write stops nothing else."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str] = queue.Queue(MAX_QUEUED_LINES)
        super().__init__(self.lines)
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def enqueue(self, record: Any) -> None:
        with contextlib.suppress(queue.Full):  # standard error is not read
            super().enqueue(record)

    def _write(self) -> None:
        while True:
            write_stderr(f"{self.lines.get()}\n")
            self.lines.task_done()

    def flush(self) -> None:
        """Wait a short time until the queued lines are written."""
        with self.lines.all_tasks_done:
            self.lines.all_tasks_done.wait_for(
                lambda: not self.lines.unfinished_tasks, WRITE_TIMEOUT_SECONDS
            )


class TransitionLogger:
    """Logs a line when an operation fails for a new reason or works again."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._failing: dict[tuple[str, ...], str] = {}

    def failed(self, *key: str, message: str, reason: str = "", **fields: object) -> None:
        """Log a failure, unless it was logged already with this reason."""
        if self._failing.get(key) != reason:
            self._failing[key] = reason
            self._log.warning("%s", message, extra={"fields": fields})

    def recovered(self, *key: str, message: str, **fields: object) -> None:
        """Log that the operation works again, if a failure was logged."""
        if self._failing.pop(key, None) is not None:
            self._log.info("%s", message, extra={"fields": fields})

    def forget(self, *key: str) -> None:
        """Forget a failure whose subject no longer exists."""
        self._failing.pop(key, None)


# ---------------------------------------------------------- standard output and error


def open_closed_streams() -> None:
    """Connect streams that the caller closed (``2>&-``) to /dev/null.

    Otherwise files opened later would get their numbers, and the text written to the streams.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123


def print_status(text: str) -> None:
    """Print on standard error, after the queued log lines. Ignore failures."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    writer = threading.Thread(target=write_stderr, args=(text,), daemon=True)
    writer.start()
    writer.join(WRITE_TIMEOUT_SECONDS)


def show_progress(text: str) -> None:
    """Replace the last line of the terminal, if standard error is a terminal."""
    # A stopped terminal (Ctrl-S) is not ready for writing.
    if sys.stderr.isatty() and select.select([], [STDERR], [], 0)[1]:
        width = shutil.get_terminal_size().columns
        print_status(f"\r\033[K{text[: width - 1]}")


class OutputError(Exception):
    """Standard output cannot be written; the message is the reason."""


def print_output(text: str) -> None:
    """Print on standard output. Ignore a pipe whose reader has exited (``| head``)."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # The rest of the buffer would fail once more at the end of the program.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"write error: {error.strerror}") from error


def supports_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether a stream is a terminal with colours (NO_COLOR: https://no-color.org)."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return stream.isatty()
