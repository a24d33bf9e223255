"""Follows control.log and server.log of every daemon. Reads only; waits for nobody.

A daemon appends to its logs over all its restarts, so a first look begins at its last start. After
that the logs are followed through everything that happens to log files: truncated in place
(copytruncate, the only rotation that works with MPS: a renamed log is still written to under its
new name), replaced, missing for a while, forbidden, half written, failing. What is history and what
is news their stamps tell, whenever a file is seen first.

Call poll() a few times a second: it costs two stat calls for each log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mps_exporter.observations import LogChunk, LogName, LogsObservation, LogState
from mps_exporter.sources.log_tail import MISSING, LogTail, ReadLimits

BACKLOG_BYTES = 16 * 1024 * 1024
"""How far back a first look goes in each log."""

POLL_BYTES = 1024 * 1024
"""How much of each log one poll brings, at most; the rest waits for the next."""

SETTLING_SECONDS = 1.0
"""So long after new lines, poll() also says that there were no more."""

LOGS: tuple[LogName, LogName] = ("control", "server")

_log = logging.getLogger(__name__)


class LogTarget(NamedTuple):
    """Whose logs are read, and where they are."""

    pipe_directory: str
    log_directory: str
    root: str = ""
    """Under which both are reached from here."""
    owners: frozenset[int] = frozenset({0})
    """The users whose files are believed to be this daemon's logs."""
    limited: int | None = None
    """The user within whose share of a poll they are read; None: there is no limit."""


@dataclass(slots=True)
class _DaemonLogs:
    """The logs of one daemon."""

    tails: dict[LogName, LogTail]
    last_data_at: float = float("-inf")


class LogReader:
    """The logs of many daemons.

    read_daemon() may be called from several threads, but for one daemon only from one at a time.

    Args:
        clock: Unix time in seconds.
        backlog_bytes: How far back a first look goes in each log.
        poll_bytes: How much of each log one poll brings, at most.
        procfs: Where procfs is mounted.
    """

    def __init__(
        self,
        *,
        procfs: str = "/proc",
        clock: Callable[[], float] = time.time,
        backlog_bytes: int = BACKLOG_BYTES,
        poll_bytes: int = POLL_BYTES,
    ) -> None:
        self.clock = clock
        self._procfs = procfs
        self._bounds = ReadLimits(clock(), backlog_bytes, poll_bytes)
        self._daemons: dict[str, _DaemonLogs] = {}

    def poll(self, targets: Sequence[LogTarget]) -> LogsObservation:
        """Read what the logs of these daemons gained; those of all others are let go of."""
        at = self.clock()
        self.forget(self.daemons() - {target.pipe_directory for target in targets})
        parts = [self.read_daemon(target, at) for target in targets]
        return LogsObservation(
            at=at,
            chunks=tuple(chunk for part in parts for chunk in part.chunks),
            states=tuple(state for part in parts for state in part.states),
        )

    def read_daemon(
        self, target: LogTarget, at: float, most_bytes: int | None = None
    ) -> LogsObservation:
        """Read what the logs of one daemon gained: of each this much at most.

        A log that is readable and has no chunk has gained nothing. A chunk without complete_until
        says that more is waiting: ask again soon.
        """
        pipe_directory, log_directory, root, owners, _ = target
        # After the clock was set back, what is written now is news all the same.
        self._bounds.started_at = min(self._bounds.started_at, self.clock())
        daemon = self._daemons.get(pipe_directory)
        if daemon is None:
            tails = {log: LogTail(log, self._bounds, procfs=self._procfs) for log in LOGS}
            daemon = _DaemonLogs(tails)
            self._daemons[pipe_directory] = daemon
        read: list[LogChunk] = []
        states: list[LogState] = []
        for tail in daemon.tails.values():
            tail.path, tail.owners = _path(root, log_directory, tail.log), owners
            try:
                tail.check_file(daemon.tails["control"])
                chunk = self._read(daemon, tail, pipe_directory, most_bytes)
            except OSError as error:
                tail.fail(error)
            else:
                read += [] if chunk is None else [chunk]
            states.append(_log_state(tail, pipe_directory))
        if any(chunk.data for chunk in read):
            daemon.last_data_at = at
        if at - daemon.last_data_at > SETTLING_SECONDS:
            # (One of which more is waiting is not idle.)
            read = [one for one in read if one.restarted or one.complete_until is None]
        return LogsObservation(at=at, chunks=tuple(read), states=tuple(states))

    def daemons(self) -> set[str]:
        """Give the daemons that are remembered (pipe directories)."""
        return set(self._daemons)

    def forget(self, gone: Collection[str]) -> None:
        """Let go of the files of these daemons."""
        for pipe_directory in gone:
            for tail in self._daemons.pop(pipe_directory).tails.values():
                tail.close()

    def close(self) -> None:
        """Let go of all files."""
        self.forget(self.daemons())

    def _read(
        self, daemon: _DaemonLogs, tail: LogTail, pipe_directory: str, most_bytes: int | None
    ) -> LogChunk | None:
        if tail.descriptor is None:
            return None
        looked_at = self.clock()
        other = daemon.tails["server" if tail.log == "control" else "control"]
        data, history, complete = tail.read(other.zone, most_bytes)
        chunk = LogChunk(
            at=self.clock(),
            pipe_directory=pipe_directory,
            log=tail.log,
            data=data,
            history=history,
            restarted=tail.restarted,
            lost_bytes=tail.lost_bytes,
            complete_until=looked_at if complete else None,
            utc_offset_seconds=None if tail.last_line is None else tail.last_line.offset_seconds,
        )
        tail.restarted, tail.lost_bytes = False, 0
        return chunk


def unread_states(target: LogTarget, why: str) -> tuple[LogState, ...]:
    """Give the states of logs that are not looked at."""
    pipe_directory, log_directory, root, *_ = target
    return tuple(
        LogState(pipe_directory, log, _path(root, log_directory, log), readable=False, error=why)
        for log in LOGS
    )


def _log_state(tail: LogTail, pipe_directory: str) -> LogState:
    size = None
    if tail.descriptor is not None:
        with contextlib.suppress(OSError):
            size = os.fstat(tail.descriptor).st_size
    if tail.error != tail.logged_error:
        _log_transition(tail, pipe_directory)
    return LogState(
        pipe_directory=pipe_directory,
        log=tail.log,
        path=tail.path,
        readable=tail.descriptor is not None,
        size_bytes=size,
        error=tail.error,
    )


def _log_transition(tail: LogTail, pipe_directory: str) -> None:
    fields = {"daemon": pipe_directory, "path": tail.path, "err": tail.error}
    if not tail.path and tail.error is not None:
        if tail.log == "control":  # both logs are missed for one reason: one line
            del fields["path"]
            _log.warning("cannot determine the daemon's log directory", extra={"fields": fields})
    elif tail.error is None:
        _log.info("following a log", extra={"fields": fields})
    elif tail.error == MISSING:
        _log.info("a log is not there yet", extra={"fields": fields})
    else:
        _log.warning("cannot read a log", extra={"fields": fields})
    tail.logged_error = tail.error


def _path(root: str, log_directory: str, log: LogName) -> str:
    if not log_directory:
        return ""
    directory = f"{root}/{log_directory.lstrip('/')}" if root else log_directory
    return f"{directory}/{log}.log"
