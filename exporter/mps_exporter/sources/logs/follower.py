"""Follows the logs of every daemon although the file system of one may hang.

A daemon appends to its logs over all its restarts, so the first read begins at its last start.
After that the logs are followed through truncation (copytruncate, the only rotation that works with
MPS: a renamed log is still written to under its new name), replacement, absence and errors.

The logs of each daemon are read by a call of their own; see mps_exporter.sources.blocking. What a
read that hangs brings comes with a later poll, and the other daemons do not wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import LogChunk, LogName, LogsObservation, LogState
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.host import SourceTimeoutError
from mps_exporter.sources.logs.tail import MISSING, LogTail, ReadLimits
from mps_exporter.sources.resolve_in_root import opened_directory

BACKLOG_BYTES = 16 * 1024 * 1024
"""Maximum part of a log that its first read covers, from the end."""

POLL_BYTES = 1024 * 1024
"""Maximum part of a log that one poll reads."""

USER_POLL_BYTES = 64 * 1024
LIMITED_POLL_BYTES = 128 * 1024
"""Maximum bytes that one poll reads of all logs of an ordinary user, and of all such users. Five
polls a second make 0.33 and 0.66 MB/s; a daemon writes some kB/s."""

MIN_POLL_BYTES = 4096
"""Minimum share of each log in these."""

POLL_SECONDS = 2.0
USERS_POLL_SECONDS = 0.1
"""Timeout of a poll, and the part of it in which ordinary users' logs are waited for."""

UNREADABLE_AFTER_SECONDS = 5.0
"""Logs whose read hangs longer than this are reported as unreadable."""

SETTLING_SECONDS = 1.0
"""Time after new lines in which a poll also says that there were no more."""

SEARCH_SECONDS = 5.0
"""Interval between searches of a v3 daemon's log directory for logs of new servers."""

MAX_SERVERS = 64
"""Maximum number of server logs that are followed for a v3 daemon."""
MAX_ENTRIES = 4096
"""Maximum number of directory entries that are searched for them."""

LOGS: tuple[LogName, LogName] = ("control", "server")

_HANGS = "reading it does not return: the file system does not answer"
_NO_THREAD = "the logs of other daemons hang, and no thread is left to read it"

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
        """Return them, with the name of the server."""
        return [*(("", tail) for tail in self.tails.values()), *self.servers.items()]


class LogReader:
    """The logs of many daemons.

    read_daemon() may be called from several threads, but for one daemon only from one at a time.

    Args:
        clock: Unix time in seconds.
        backlog_bytes: Maximum part of a log that its first read covers.
        poll_bytes: Maximum part of a log that one poll reads.
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
            tail.path, tail.owners = _log_path(root, directory, tail.log), owners
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
            states = _joined(states, pipe_directory, _log_path(root, log_directory, "server"))
        if any(chunk.data for chunk in read):
            daemon.last_data_at = at
        if at - daemon.last_data_at > SETTLING_SECONDS:
            # (One of which more is waiting is not idle.)
            read = [one for one in read if one.restarted or one.complete_until is None]
        return LogsObservation(at=at, chunks=tuple(read), states=tuple(states))

    def daemons(self) -> set[str]:
        """Return the daemons that are remembered (pipe directories)."""
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


class LogFollower:
    """The logs of many daemons, read by a blocking call for each daemon and poll.

    Args:
        reader: Reads them.
        clock: Monotonic time.
    """

    def __init__(
        self, reader: LogReader | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = LogReader() if reader is None else reader
        self._clock = clock
        self._calls = BlockingCalls[LogsObservation | None]()
        self._read_at: dict[str, float] = {}
        """Pipe directory -> when its logs were read last, or wanted for the first time."""
        self._transitions = TransitionLogger(_log)

    async def poll(
        self, targets: Sequence[LogTarget], deadline_seconds: float, *, kept: Collection[str] = ()
    ) -> LogsObservation:
        """Return what the logs of these daemons gained; the files of all others are closed.

        Nothing is said of daemons whose logs are not read at the deadline; what they gained comes
        with a later call.

        Args:
            targets: The daemons.
            deadline_seconds: Timeout.
            kept: Pipe directories of other daemons whose places in their logs are remembered.

        Raises:
            SourceTimeoutError: None of the logs was read.
        """
        at, began = self._reader.clock(), self._clock()
        names = {target.pipe_directory for target in targets}
        self._read_at = {name: self._read_at.get(name, began) for name in names}
        shares, seconds = _shares(targets), min(deadline_seconds, POLL_SECONDS)
        read = self._reader.read_daemon
        calls: dict[Hashable, tuple[int | None, Callable[[], LogsObservation | None]]] = {
            one.pipe_directory: (one.limited, partial(read, one, at, shares.get(one.limited)))
            for one in targets
        }
        for gone in self._reader.daemons() - {*names, *kept}:
            calls[gone] = None, partial(self._reader.forget, [gone])
        self._calls.start(calls)
        await self._calls.wait_async(seconds, USERS_POLL_SECONDS)
        parts = {
            name: part
            for name, part in self._calls.results(calls).items()
            if part is not None and name in names
        }
        if any(part.at != at for part in parts.values()):
            at = self._reader.clock()
            parts = {name: _with_idle_chunks(part) for name, part in parts.items()}
        states = [state for part in parts.values() for state in part.states]
        for target in targets:
            states += self._check(target, read=target.pipe_directory in parts)
        if targets and not states:
            raise SourceTimeoutError(f"the logs were not read within {seconds:.3g} s")
        chunks = tuple(chunk for part in parts.values() for chunk in part.chunks)
        return LogsObservation(at=at, chunks=chunks, states=tuple(states))

    async def close(self) -> None:
        """Close all files that are not being read."""
        await self.poll((), 1.0)

    def _check(self, target: LogTarget, *, read: bool) -> tuple[LogState, ...]:
        """Return the states of logs whose reading has taken too long; log it once."""
        pipe, now = target.pipe_directory, self._clock()
        if read:
            self._read_at[pipe] = now
            self._transitions.recovered(pipe, message="a daemon's logs are read again", daemon=pipe)
        elif now - self._read_at[pipe] >= UNREADABLE_AFTER_SECONDS:
            message = "reading a daemon's logs does not return"
            self._transitions.failed(pipe, message=message, daemon=pipe, path=target.log_directory)
            return unread_states(target, _HANGS if self._calls.is_under_way(pipe) else _NO_THREAD)
        return ()


def _shares(targets: Sequence[LogTarget]) -> dict[int | None, int]:
    """Return how many bytes of each log of an ordinary user are read."""
    daemons = Counter(target.limited for target in targets if target.limited is not None)
    share = min(USER_POLL_BYTES, LIMITED_POLL_BYTES // max(1, len(daemons)))
    return {user: max(MIN_POLL_BYTES, share // (2 * count)) for user, count in daemons.items()}


def _with_idle_chunks(part: LogsObservation) -> LogsObservation:
    """Add when the logs without news were read: the observation is of a later moment."""
    busy = {(chunk.pipe_directory, chunk.log) for chunk in part.chunks}
    quiet = [
        LogChunk(part.at, state.pipe_directory, state.log, complete_until=part.at)
        for state in part.states
        if state.readable and (state.pipe_directory, state.log) not in busy
    ]
    return LogsObservation(at=part.at, chunks=(*part.chunks, *quiet), states=part.states)


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
    """Return the states of logs that are not looked at."""
    pipe_directory, log_directory, root, *_ = target
    return tuple(
        LogState(
            pipe_directory, log, _log_path(root, log_directory, log), readable=False, error=why
        )
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


def _log_path(root: str, log_directory: str, log: LogName) -> str:
    if not log_directory:
        return ""
    directory = f"{root}/{log_directory.lstrip('/')}" if root else log_directory
    return f"{directory}/{log}.log"
