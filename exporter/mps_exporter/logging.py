"""Log lines as Prometheus programs write them: logfmt or JSON, quiet when healthy.

    time=2026-11-21T08:55:42.578Z level=warn source=collect msg="..." daemon=/tmp/nvidia-mps

Fields beyond the message come in ``extra={"fields": {...}}``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import deque
from datetime import UTC, datetime
from typing import TextIO

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
_NAMES = {logging.WARNING: "warn", logging.CRITICAL: "error"}

STDERR = 2

MAX_FIELD_CHARACTERS = 1000
"""Maximum length of a value: paths chosen by users may have 128 kB."""

MAX_QUEUED_LINES = 1000
"""Maximum number of queued lines; further lines are dropped and counted."""

CLOSE_SECONDS = 0.5
"""Time allowed at shutdown to write queued lines."""


def _fields(record: logging.LogRecord) -> dict[str, object]:
    stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    fields: dict[str, object] = {
        "time": stamp.replace("+00:00", "Z"),
        "level": _NAMES.get(record.levelno, record.levelname.lower()),
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
    # Go's programs write tls=false, and whoever searches their logs searches ours.
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if text and text.isascii() and text.isprintable() and not set(text) & set(' "=\\'):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


class LogfmtFormatter(logging.Formatter):
    """key=value pairs, values quoted where they need it: one record is always one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line without its end."""
        line = " ".join(f"{key}={_quoted(value)}" for key, value in _fields(record).items())
        return _with_traceback(self, record, line)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line without its end."""
        return json.dumps(_fields(record), default=str)


def _with_traceback(formatter: logging.Formatter, record: logging.LogRecord, line: str) -> str:
    # A traceback is for whoever debugs; a healthy installation never prints one.
    if record.exc_info and logging.getLogger("mps_exporter").isEnabledFor(logging.DEBUG):
        return f"{line}\n{formatter.formatException(record.exc_info)}"
    return line


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Send the log of this program, and warnings of libraries, to standard error."""
    handler: logging.Handler = _StderrHandler() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else LogfmtFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("mps_exporter").setLevel(_LEVELS[level])


def write_stderr(text: str) -> None:
    """Write to standard error, which may be closed or full; a write to an unread pipe blocks."""
    data = text.encode("utf-8", "backslashreplace")
    # Not through sys.stderr: at exit the interpreter waits for its lock.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(STDERR, data) :]


class _StderrHandler(logging.Handler):
    """Writes to standard error on a thread of its own: a blocked write stops nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or count it."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a log line that cannot be formatted ends nothing
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) >= MAX_QUEUED_LINES:
                self._dropped += 1
                return
            if self._dropped:
                line = f"{self._format_dropped()}\n{line}"
                self._dropped = 0
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _format_dropped(self) -> str:
        record = logging.LogRecord(
            __name__,
            logging.WARNING,
            "",
            0,
            "log lines were dropped: standard error was not read",
            None,
            None,
        )
        record.fields = {"lines": self._dropped}
        return self.format(record)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines[0]
            write_stderr(f"{line}\n")
            with self._changed:
                self._lines.popleft()
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait for what is queued to be written, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, CLOSE_SECONDS)


class TransitionLogger:
    """One line when something starts failing, one when it works again."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._failing: dict[tuple[str, ...], str] = {}

    def failed(self, *key: str, message: str, **fields: object) -> None:
        """Say that something fails, unless that was said."""
        if key not in self._failing:
            self._failing[key] = message
            self._log.warning("%s", message, extra={"fields": fields})

    def recovered(self, *key: str, message: str, **fields: object) -> None:
        """Say that it works again, if it had failed."""
        if self._failing.pop(key, None) is not None:
            self._log.info("%s", message, extra={"fields": fields})

    def forget(self, *key: str) -> None:
        """The thing itself is gone: nothing more to say of it."""
        self._failing.pop(key, None)
