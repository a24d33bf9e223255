"""Follows the logs of every daemon, also if the file system of one hangs.

A daemon appends to its logs over all its restarts, so the first read begins at its last start.
After that the logs are followed through truncation (copytruncate, the only rotation that works with
MPS: the daemon continues to write to a renamed log), replacement, absence and errors.

Each poll reads the logs of each daemon in a call of its own; see mps_exporter.sources.blocking. A
later poll returns the result of a read that hung, and the other daemons do not wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import LogChunk, LogName, LogsObservation, LogState
from mps_exporter.sources import policy
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.host import SourceTimeoutError
from mps_exporter.sources.log_tail import LogTail, ReadLimits
from mps_exporter.sources.resolve_in_root import opened_directory

LOGS: tuple[LogName, LogName] = ("control", "server")

_HANGS = "reading it does not return: the file system does not answer"
_NO_THREAD = "the logs of other daemons hang, and no thread is left to read it"

_SERVER_NAME = re.compile(r"[a-z0-9_]{1,64}")

_log = logging.getLogger(__name__)


class LogTarget(NamedTuple):
    """A daemon and the location of its logs."""

    pipe_directory: str
    log_directory: str
    """Empty: unknown."""
    root: str = ""
    """Root directory of the daemon, as this process sees it."""
    owners: frozenset[int] = frozenset({0})
    """The users whose files are accepted as logs of this daemon."""
    limited_user: int | None = None
    """The ordinary user whose byte limit applies; None: no limit."""
    named_servers: bool = False
    """Each server has its log in a directory of its own, as with an MPS v3 daemon."""

    def directory(self, server_name: str = "") -> str:
        """Return the path of the directory with the daemon's or a server's logs; "": unknown."""
        path = f"{self.log_directory}/{server_name}" if server_name else self.log_directory
        return f"{self.root}/{path.lstrip('/')}" if self.root and path else path

    def path(self, log: LogName, server_name: str = "") -> str:
        """Return the path of a log; "": unknown."""
        return f"{directory}/{log}.log" if (directory := self.directory(server_name)) else ""


@dataclass(slots=True)
class _DaemonLogs:
    """The logs of one daemon."""

    control: LogTail
    server: LogTail
    named_servers: dict[str, LogTail] = field(default_factory=dict)
    """Logs of an MPS v3 daemon's servers, by name."""
    searched_at: float = float("-inf")
    last_data_at: float = float("-inf")

    def directories(self) -> list[tuple[str, tuple[LogTail, ...]]]:
        named = [(name, (tail,)) for name, tail in self.named_servers.items()]
        return [("", (self.control, self.server)), *named]

    def tails(self) -> Iterator[LogTail]:
        return (tail for _, tails in self.directories() for tail in tails)


class LogReader:
    """The logs of many daemons.

    Several threads may call read_daemon() at the same time, for different daemons.
    """

    def __init__(
        self,
        *,
        procfs: str = "/proc",
        clock: Callable[[], float] = time.time,
        backlog_bytes: int = policy.MAX_LOG_BACKLOG_BYTES,
        poll_bytes: int = policy.MAX_LOG_POLL_BYTES,
    ) -> None:
        self.clock = clock
        self._procfs = procfs
        self._limits = ReadLimits(clock(), backlog_bytes, poll_bytes, clock)
        self._daemons: dict[str, _DaemonLogs] = {}

    def read_daemon(
        self, target: LogTarget, at: float, max_bytes: int | None = None
    ) -> LogsObservation:
        """Read the new data of one daemon's logs, of each up to a maximum.

        A readable log without a chunk is idle. After a chunk without complete_until, the next call
        reads more.
        """
        # After the clock was set back, lines that are written now are still new.
        self._limits.started_at = min(self._limits.started_at, self.clock())
        daemon = self._daemons.get(target.pipe_directory)
        if daemon is None:
            control, server = (LogTail(target.pipe_directory, log, self._limits) for log in LOGS)
            daemon = self._daemons[target.pipe_directory] = _DaemonLogs(control, server)
        if target.named_servers and target.log_directory:
            self._find_servers(daemon, target, at)
        chunks = [
            chunk
            for server_name, tails in daemon.directories()
            for chunk in self._read_directory(daemon, target, server_name, tails, max_bytes)
        ]
        states = [daemon.control.state()]
        if target.named_servers:
            servers = [tail.state() for tail in daemon.named_servers.values()]
            states.append(_joined_state(servers, target, control_readable=states[0].readable))
        else:
            states.append(daemon.server.state())
        if any(chunk.data for chunk in chunks):
            daemon.last_data_at = at
        if at - daemon.last_data_at > policy.LOG_IDLE_REPORT_SECONDS:
            # A log with more data to be read is not idle.
            chunks = [one for one in chunks if one.restarted or one.complete_until is None]
        return LogsObservation(at=at, chunks=tuple(chunks), states=tuple(states))

    def daemons(self) -> set[str]:
        return set(self._daemons)

    def forget(self, pipe_directories: Iterable[str]) -> None:
        for pipe_directory in pipe_directories:
            for tail in self._daemons.pop(pipe_directory).tails():
                tail.close()

    def close(self) -> None:
        self.forget(self.daemons())

    def _find_servers(self, daemon: _DaemonLogs, target: LogTarget, at: float) -> None:
        """Follow the logs of the servers that have a directory, and close all others."""
        if at - daemon.searched_at < policy.SERVER_LOG_SEARCH_INTERVAL_SECONDS:
            return
        daemon.searched_at = at
        names: set[str] = set()
        with (
            contextlib.suppress(OSError),
            opened_directory(target.directory(), self._procfs) as path,
        ):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            directory = os.open(".", flags, dir_fd=path)
            try:
                with os.scandir(directory) as entries:
                    some = islice(entries, policy.MAX_LOG_DIRECTORY_ENTRIES)
                    found = (entry.name for entry in some if _is_server(entry))
                    names = set(islice(found, policy.MAX_SERVER_LOGS))
            finally:
                os.close(directory)
        for gone in daemon.named_servers.keys() - names:
            daemon.named_servers.pop(gone).close()
        for name in names - daemon.named_servers.keys():
            tail = LogTail(target.pipe_directory, "server", self._limits, name)
            daemon.named_servers[name] = tail

    def _read_directory(
        self,
        daemon: _DaemonLogs,
        target: LogTarget,
        server_name: str,
        tails: Iterable[LogTail],
        max_bytes: int | None,
    ) -> Iterator[LogChunk]:
        """Read the logs in one directory, which is opened once for all of them."""
        with contextlib.ExitStack() as stack:
            directory: int | OSError | None = None
            if path := target.directory(server_name):
                try:
                    directory = stack.enter_context(opened_directory(path, self._procfs))
                except OSError as error:
                    directory = error
            for tail in tails:
                tail.path, tail.owners = target.path(tail.log, server_name), target.owners
                other = daemon.server if tail.log == "control" else daemon.control
                try:
                    tail.check_file(directory, daemon.control)
                    if tail.descriptor is not None:
                        yield tail.read(tail.descriptor, other.zone, max_bytes)
                except OSError as error:
                    tail.fail(error)


class LogFollower:
    """The logs of many daemons, read by a blocking call for each daemon and poll."""

    def __init__(
        self, reader: LogReader | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = LogReader() if reader is None else reader
        self._clock = clock
        self._calls = BlockingCalls[LogsObservation | None]()
        self._read_at: dict[str, float] = {}
        """Pipe directory -> when its logs were last read, or first requested."""
        self._transitions = TransitionLogger(_log)

    async def poll(
        self, targets: Sequence[LogTarget], deadline_seconds: float, *, kept: Collection[str] = ()
    ) -> LogsObservation:
        """Return the new data of these daemons' logs, and close the files of all others.

        Nothing is reported of daemons whose logs are not read at the deadline; a later call returns
        their data. The positions in the logs of the `kept` pipe directories are retained.

        Raises:
            SourceTimeoutError: None of the logs was read.
        """
        at, began = self._reader.clock(), self._clock()
        names = {target.pipe_directory for target in targets}
        self._read_at = {name: self._read_at.get(name, began) for name in names}
        seconds = min(deadline_seconds, policy.LOG_POLL_TIMEOUT_SECONDS)
        calls = self._read_calls(targets, at)
        for gone in self._reader.daemons() - {*names, *kept}:
            calls[gone] = None, partial(self._reader.forget, [gone])
        self._calls.start(calls)
        await self._calls.wait_async(seconds, policy.USERS_LOG_POLL_TIMEOUT_SECONDS)
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
            states += self._overdue_states(target, read=target.pipe_directory in parts)
        if targets and not states:
            raise SourceTimeoutError(f"the logs were not read within {seconds:.3g} s")
        chunks = tuple(chunk for part in parts.values() for chunk in part.chunks)
        return LogsObservation(at=at, chunks=chunks, states=tuple(states))

    def _read_calls(
        self, targets: Sequence[LogTarget], at: float
    ) -> dict[Hashable, tuple[int | None, Callable[[], LogsObservation | None]]]:
        limits, read = _byte_limits(targets), self._reader.read_daemon
        return {
            one.pipe_directory: (
                one.limited_user,
                partial(read, one, at, limits.get(one.limited_user)),
            )
            for one in targets
        }

    async def close(self) -> None:
        """Close all files that are not being read."""
        await self.poll((), policy.CLOSE_TIMEOUT_SECONDS)

    def _overdue_states(self, target: LogTarget, *, read: bool) -> tuple[LogState, ...]:
        """Return the states of logs whose reading takes too long; log the change once."""
        pipe, now = target.pipe_directory, self._clock()
        if read:
            self._read_at[pipe] = now
            self._transitions.recovered(pipe, message="a daemon's logs are read again", daemon=pipe)
        elif now - self._read_at[pipe] >= policy.LOG_UNREADABLE_AFTER_SECONDS:
            message = "reading a daemon's logs does not return"
            self._transitions.failed(pipe, message=message, daemon=pipe, path=target.log_directory)
            hangs = self._calls.is_under_way(pipe)
            return skipped_log_states(target, _HANGS if hangs else _NO_THREAD)
        return ()


def _byte_limits(targets: Sequence[LogTarget]) -> dict[int | None, int]:
    """Return the maximum size that is read of each log of an ordinary user."""
    users = Counter(one.limited_user for one in targets if one.limited_user is not None)
    share = policy.MAX_USERS_LOG_POLL_BYTES // max(1, len(users))
    share = min(policy.MAX_USER_LOG_POLL_BYTES, share)
    least = policy.MIN_USER_LOG_POLL_BYTES
    return {user: max(least, share // (2 * count)) for user, count in users.items()}


def _with_idle_chunks(part: LogsObservation) -> LogsObservation:
    """Add when the logs without new data were read: the observation has a later time."""
    busy = {(chunk.pipe_directory, chunk.log) for chunk in part.chunks}
    idle = [
        LogChunk(part.at, state.pipe_directory, state.log, complete_until=part.at)
        for state in part.states
        if state.readable and (state.pipe_directory, state.log) not in busy
    ]
    return LogsObservation(at=part.at, chunks=(*part.chunks, *idle), states=part.states)


def _is_server(entry: os.DirEntry[str]) -> bool:
    return bool(_SERVER_NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)


def _joined_state(
    servers: Sequence[LogState], target: LogTarget, *, control_readable: bool
) -> LogState:
    """Join the states of the named servers' logs: an unreadable log makes the result unreadable.

    Without a server there is no log, and so none that is missing.
    """
    unreadable = [state for state in servers if not state.readable]
    if unreadable:
        return unreadable[0]
    size = sum(state.size_bytes or 0 for state in servers) if servers else None
    readable = bool(servers) or control_readable
    return LogState(target.pipe_directory, "server", target.path("server"), readable, size)


def skipped_log_states(target: LogTarget, why: str) -> tuple[LogState, ...]:
    """Return the states of logs that are not read."""
    name = target.pipe_directory
    return tuple(LogState(name, log, target.path(log), readable=False, error=why) for log in LOGS)
