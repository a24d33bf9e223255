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
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from mps_exporter.observations import LogChunk, LogName, LogsObservation, LogState
from mps_exporter.sources.log_tail import MISSING, LogTail, ReadLimits
from mps_exporter.sources.resolve_in_root import opened_directory

BACKLOG_BYTES = 16 * 1024 * 1024
"""How far back a first look goes in each log."""

POLL_BYTES = 1024 * 1024
"""How much of each log one poll brings, at most; the rest waits for the next."""

SETTLING_SECONDS = 1.0
"""So long after new lines, poll() also says that there were no more."""

LOGS: tuple[LogName, LogName] = ("control", "server")

SEARCH_SECONDS = 5.0
"""How often the log directory of an MPS v3 daemon is searched for logs of new servers."""

MAX_SERVERS = 64
MAX_ENTRIES = 4096
"""Of the log directory: so many are looked at for those of servers, and so many of these are
followed."""

_SERVER_NAME = re.compile(r"[a-z0-9_]{1,64}")

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
    named_servers: bool = False
    """Each server has its log in a directory of its own, as with an MPS v3 daemon."""


@dataclass(slots=True)
class _DaemonLogs:
    """The logs of one daemon."""

    tails: dict[LogName, LogTail]
    servers: dict[str, LogTail] = field(default_factory=dict)
    """By name of the server; only of a daemon with named servers."""
    searched_at: float = float("-inf")
    last_data_at: float = float("-inf")

    def all(self) -> list[tuple[str, LogTail]]:
        """Give them, with the name of the server."""
        return [*(("", tail) for tail in self.tails.values()), *self.servers.items()]


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
        pipe_directory, log_directory, root, owners, _, named_servers = target
        # After the clock was set back, what is written now is news all the same.
        self._bounds.started_at = min(self._bounds.started_at, self.clock())
        daemon = self._daemons.get(pipe_directory)
        if daemon is None:
            daemon = _DaemonLogs({log: self._tail(log) for log in LOGS})
            self._daemons[pipe_directory] = daemon
        if named_servers and log_directory and at - daemon.searched_at >= SEARCH_SECONDS:
            daemon.searched_at = at
            self._find_servers(daemon, f"{root}{log_directory}")
        read: list[LogChunk] = []
        states: list[LogState] = []
        for server_name, tail in daemon.all():
            directory = f"{log_directory}/{server_name}" if server_name else log_directory
            tail.path, tail.owners = _path(root, directory, tail.log), owners
            try:
                tail.check_file(daemon.tails["control"])
                chunk = self._read(daemon, tail, pipe_directory, most_bytes)
            except OSError as error:
                tail.fail(error)
            else:
                read += [] if chunk is None else [replace(chunk, server_name=server_name)]
            if not (named_servers and tail.log == "server" and not server_name):
                states.append(_log_state(tail, pipe_directory))
        if named_servers:
            states = _joined(states, pipe_directory, _path(root, log_directory, "server"))
        if any(chunk.data for chunk in read):
            daemon.last_data_at = at
        if at - daemon.last_data_at > SETTLING_SECONDS:
            # (One of which more is waiting is not idle.)
            read = [one for one in read if one.restarted or one.complete_until is None]
        return LogsObservation(at=at, chunks=tuple(read), states=tuple(states))

    def may_have_gained(self, pipe_directory: str) -> bool:
        """Whether one of a daemon's logs was written to since it was read, or is not open.

        That the name of a log stands for another file by now only read_daemon() sees.
        """
        daemon = self._daemons.get(pipe_directory)
        return daemon is None or any(tail.may_have_gained() for _, tail in daemon.all())

    def open_files(self, pipe_directory: str) -> list[int] | None:
        """Give the descriptors of a daemon's logs; None: one of them is not open."""
        daemon = self._daemons.get(pipe_directory)
        tails = [] if daemon is None else [tail for _, tail in daemon.all()]
        files = [tail.descriptor for tail in tails if tail.descriptor is not None]
        return files if tails and len(files) == len(tails) else None

    def daemons(self) -> set[str]:
        """Give the daemons that are remembered (pipe directories)."""
        return set(self._daemons)

    def forget(self, gone: Collection[str]) -> None:
        """Let go of the files of these daemons."""
        for pipe_directory in gone:
            for _, tail in self._daemons.pop(pipe_directory).all():
                tail.close()

    def close(self) -> None:
        self.forget(self.daemons())

    def _tail(self, log: LogName) -> LogTail:
        return LogTail(log, self._bounds, procfs=self._procfs)

    def _find_servers(self, daemon: _DaemonLogs, log_directory: str) -> None:
        """Follow the logs of the servers that have a directory; let go of those that have none."""
        names: set[str] = set()
        with contextlib.suppress(OSError), opened_directory(log_directory, self._procfs) as path:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            directory = os.open(".", flags, dir_fd=path)
            try:
                with os.scandir(directory) as entries:
                    found = (one.name for one in islice(entries, MAX_ENTRIES) if _is_server(one))
                    names = set(islice(found, MAX_SERVERS))
            finally:
                os.close(directory)
        for gone in daemon.servers.keys() - names:
            daemon.servers.pop(gone).close()
        for name in names - daemon.servers.keys():
            daemon.servers[name] = self._tail("server")

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


def _is_server(entry: os.DirEntry[str]) -> bool:
    return bool(_SERVER_NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)


def _joined(states: Sequence[LogState], pipe_directory: str, path: str) -> list[LogState]:
    """Put the states of the servers' logs together: one that cannot be read stands for all.

    Without a server there is no such log, and nothing in it that could be missed.
    """
    control = [state for state in states if state.log == "control"]
    servers = [state for state in states if state.log == "server"]
    shut = [state for state in servers if not state.readable]
    if shut:
        return [*control, shut[0]]
    size = sum(state.size_bytes or 0 for state in servers)
    readable = bool(servers) or all(state.readable for state in control)
    server = LogState(pipe_directory, "server", path, readable, size if servers else None)
    return [*control, server]


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
