"""Follows the logs of every daemon, also if the file system of one hangs.

A daemon appends to its logs over all its restarts, so the first read begins at its last start.
After that the logs are followed through truncation (copytruncate, the only rotation that works with
MPS: the daemon continues to write to a renamed log), replacement, absence and errors.

Each poll reads the logs of each daemon in a call of its own; see mps_exporter.sources.blocking. A
later poll returns the result of a read that hung, and the other daemons do not wait for it.
"""

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

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import DaemonFacts, LogChunk, LogName, LogsObservation, LogState
from mps_exporter.sources import SourceTimeoutError
from mps_exporter.sources.blocking import BlockingCalls
from mps_exporter.sources.log_tail import LogTail, Times
from mps_exporter.sources.resolve_in_root import opened_directory

LOGS: tuple[LogName, LogName] = ("control", "server")

_HANGS = "its file system does not answer, or no thread is left to read it"

_SERVER_NAME = re.compile(r"[a-z0-9_]{1,64}")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _DaemonLogs:
    """The logs of one daemon."""

    control: LogTail
    server: LogTail
    named_servers: dict[str, LogTail] = field(default_factory=dict)
    """Logs of an MPS v3 daemon's servers, by name."""
    searched_at: float = float("-inf")

    def directories(self) -> list[tuple[str, tuple[LogTail, ...]]]:
        """Return the names of servers with a directory ("": the daemon's), and the logs there."""
        named = [(name, (tail,)) for name, tail in self.named_servers.copy().items()]
        return [("", (self.control, self.server)), *named]

    def tails(self) -> Iterator[LogTail]:
        return (tail for _, tails in self.directories() for tail in tails)


class LogFollower:
    """The logs of many daemons, read by a blocking call for each daemon and poll."""

    def __init__(
        self,
        *,
        procfs: str = "/proc",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._monotonic = monotonic
        self._procfs = procfs
        self._times = Times(clock(), clock)
        self._daemons: dict[str, _DaemonLogs] = {}
        self._calls = BlockingCalls[LogsObservation | None]()
        self._read_at: dict[str, float] = {}  # Pipe directory -> last read of its logs.
        self._seen: list[tuple[int, int]] = []  # Sizes and times of the logs at the last check.
        self._transitions = TransitionLogger(_log)

    async def poll(
        self, daemons: Sequence[DaemonFacts], deadline_seconds: float, *, kept: Collection[str] = ()
    ) -> LogsObservation:
        """Return the new data of these daemons' logs, and close the files of all others.

        Logs that are not read by the deadline are missing, and after a time unreadable; a later
        call returns their data. The positions in the logs of the `kept` pipe directories are
        retained. Logs of ordinary users are read at most once in the interval of polls.

        Raises:
            SourceTimeoutError: If no log was read or is overdue.
        """
        began, names = self._monotonic(), {one.pipe_directory for one in daemons}
        interval = policy.LOG_POLL_INTERVAL_SECONDS
        self._read_at = {name: self._read_at.get(name, began - interval) for name in names}
        due = {name for name, at in self._read_at.items() if at <= began - interval}
        daemons = [one for one in daemons if not one.limited or one.pipe_directory in due]
        seconds = min(deadline_seconds, policy.LOG_POLL_TIMEOUT_SECONDS)
        limits = _byte_limits(daemons)
        calls: dict[Hashable, tuple[Hashable | None, Callable[[], LogsObservation | None]]] = {
            one.pipe_directory: (
                one.account if one.limited else None,
                partial(self.read_daemon, one, limits.get(one.account) if one.limited else None),
            )
            for one in daemons
        }
        for gone in self._daemons.keys() - {*names, *kept}:
            calls[gone] = None, partial(self.forget, gone)
        self._calls.start(calls)
        await self._calls.wait_async(seconds, policy.USERS_LOG_POLL_TIMEOUT_SECONDS)
        results = self._calls.results(calls)
        parts = {name: part for name, part in results.items() if part and name in names}
        states = [state for part in parts.values() for state in part.states]
        for daemon in daemons:
            states += self._overdue_states(daemon, read=daemon.pipe_directory in parts)
        if daemons and not states:
            raise SourceTimeoutError(f"the logs were not read within {seconds:.3g} s")
        chunks = tuple(chunk for part in parts.values() for chunk in part.chunks)
        return LogsObservation(self.clock(), chunks, tuple(states))

    def wait_for_change(self, is_due: Callable[[], object], until: float) -> None:
        """Return when a log has changed or `is_due`, else at `until` (monotonic time)."""
        while True:
            time.sleep(policy.LOG_POLL_INTERVAL_SECONDS)
            tails = [tail for logs in self._daemons.copy().values() for tail in logs.tails()]
            files = [os.fstat(tail.descriptor) for tail in tails if tail.descriptor is not None]
            # A rename changes st_ctime, too; the exporter's own reads change st_atime.
            before, self._seen = self._seen, [(one.st_size, one.st_ctime_ns) for one in files]
            if before != self._seen or is_due() or time.monotonic() >= until:
                return

    async def close(self) -> None:
        """Close all files that are not being read."""
        await self.poll((), policy.CLOSE_TIMEOUT_SECONDS)

    def _overdue_states(self, daemon: DaemonFacts, *, read: bool) -> tuple[LogState, ...]:
        """Return the states of logs whose reading takes too long; log the change once."""
        pipe, now = daemon.pipe_directory, self._monotonic()
        if read:
            self._read_at[pipe] = now
            self._transitions.recovered(pipe, message="a daemon's logs are read again", daemon=pipe)
        elif now - self._read_at[pipe] >= policy.LOG_UNREADABLE_AFTER_SECONDS:
            message = "reading a daemon's logs does not return"
            self._transitions.failed(pipe, message=message, daemon=pipe, path=daemon.log_directory)
            return skipped_log_states(daemon, _HANGS)
        return ()

    # ------------------------------------------------------------------ one daemon, on a thread

    def read_daemon(self, daemon: DaemonFacts, max_bytes: int | None = None) -> LogsObservation:
        """Read new data of one daemon's logs, of each up to a maximum."""
        at = self.clock()
        # After the clock was set back, lines that are written now are still new.
        self._times.started_at = min(self._times.started_at, at)
        logs = self._daemons.get(daemon.pipe_directory)
        if logs is None:
            control, server = (LogTail(daemon.pipe_directory, log, self._times) for log in LOGS)
            logs = self._daemons[daemon.pipe_directory] = _DaemonLogs(control, server)
        if daemon.protocol == "3" and daemon.log_directory:
            self._find_servers(logs, daemon, at)
        chunks = [
            chunk
            for server_name, tails in logs.directories()
            for chunk in self._read_directory(logs, daemon, server_name, tails, max_bytes)
        ]
        control_state, server_state = logs.control.state(), None
        if daemon.protocol == "3":
            servers = [tail.state() for tail in logs.named_servers.values()]
            server_state = _joined_state(servers, daemon, control_readable=control_state.readable)
        return LogsObservation(
            at, tuple(chunks), (control_state, server_state or logs.server.state())
        )

    def forget(self, pipe_directory: str) -> None:
        for tail in self._daemons.pop(pipe_directory).tails():
            tail.close()

    def _find_servers(self, logs: _DaemonLogs, daemon: DaemonFacts, at: float) -> None:
        """Follow the logs of the servers that have a directory, and close all others."""
        if 0.0 <= at - logs.searched_at < policy.SERVER_LOG_SEARCH_INTERVAL_SECONDS:
            return
        logs.searched_at = at
        names: set[str] = set()
        with (
            contextlib.suppress(OSError),
            opened_directory(daemon.log_path, self._procfs) as directory,
            os.scandir(f"/proc/self/fd/{directory}") as entries,
        ):
            some = islice(entries, policy.MAX_LOG_DIRECTORY_ENTRIES)
            folders = (one.name for one in some if one.is_dir(follow_symlinks=False))
            names = set(islice(filter(_SERVER_NAME.fullmatch, folders), policy.MAX_SERVER_LOGS))
        for gone in logs.named_servers.keys() - names:
            logs.named_servers.pop(gone).close()
        for name in names - logs.named_servers.keys():
            tail = LogTail(daemon.pipe_directory, "server", self._times, name)
            logs.named_servers[name] = tail

    def _read_directory(
        self,
        logs: _DaemonLogs,
        daemon: DaemonFacts,
        server_name: str,
        tails: Iterable[LogTail],
        max_bytes: int | None,
    ) -> Iterator[LogChunk]:
        """Yield new data of the logs in one directory, opened once for all."""
        with contextlib.ExitStack() as stack:
            directory: int | OSError | None = None
            if daemon.log_directory:
                path = os.path.join(daemon.log_path, server_name)  # noqa: PTH118
                try:
                    directory = stack.enter_context(opened_directory(path, self._procfs))
                except OSError as error:
                    directory = error
            for tail in tails:
                tail.path = _log_path(daemon, tail.log, server_name)
                tail.owners = frozenset(daemon.log_owners)
                other = logs.server if tail.log == "control" else logs.control
                try:
                    tail.check_file(directory, logs.control)
                    if tail.descriptor is not None:
                        yield tail.read(tail.descriptor, other.zone, max_bytes)
                except OSError as error:
                    tail.fail(error)


def _byte_limits(daemons: Sequence[DaemonFacts]) -> dict[Hashable, int]:
    """Return ordinary user -> maximum size that one poll reads of each log of that user."""
    users = Counter(one.account for one in daemons if one.limited)
    share = policy.MAX_USERS_LOG_POLL_BYTES // max(1, len(users))
    share = min(policy.MAX_USER_LOG_POLL_BYTES, share)
    least = policy.MIN_USER_LOG_POLL_BYTES
    return {user: max(least, share // (2 * count)) for user, count in users.items()}


def _joined_state(
    servers: Sequence[LogState], daemon: DaemonFacts, *, control_readable: bool
) -> LogState:
    """Return the first unreadable state, else the sum; without servers control.log decides."""
    unreadable = [state for state in servers if not state.readable]
    if unreadable:
        return unreadable[0]
    size = sum(state.size_bytes or 0 for state in servers) if servers else None
    readable = bool(servers) or control_readable
    path = _log_path(daemon, "server")
    return LogState(daemon.pipe_directory, "server", path, readable, size)


def _log_path(daemon: DaemonFacts, log: LogName, server_name: str = "") -> str:
    """Return a log's path; "" if unknown."""
    folder = f"{daemon.log_path}/{server_name}" if server_name else daemon.log_path
    return f"{folder}/{log}.log" if daemon.log_directory else ""


def skipped_log_states(daemon: DaemonFacts, why: str) -> tuple[LogState, ...]:
    """Return the states of logs that are not read."""
    name = daemon.pipe_directory
    return tuple(
        LogState(name, log, _log_path(daemon, log), readable=False, error=why) for log in LOGS
    )
