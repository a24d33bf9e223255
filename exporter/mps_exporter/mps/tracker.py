"""Follows one daemon: log lines in; waits, crashes and losses out.

    log lines --add_logs--> state <--observe-- /proc: processes that have exited
                              ^---reconcile--- the control tool: servers and clients

Every time comes from a line's timestamp, never from a clock, so a log that is replayed gives the
same numbers as a log that is followed.

No line of a log shows that a process was killed. Its exit may be visible in /proc before the log
has been read up to then. So an exit is recorded first, and applied when the log is read up to a
second after it: the lines of an orderly end would be there.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from mps_exporter import limits_without_a_flag as policy
from mps_exporter.limits_without_a_flag import FULL, Quota
from mps_exporter.mps.incidents_and_counters import BoundedDict, Moment
from mps_exporter.mps.log_parser import LogMerger
from mps_exporter.mps.log_wordings import (
    CONTINUATION,
    KNOWN,
    LINES_LOST,
    UNRECOGNIZED,
    ControlLogReader,
    LogEntry,
    ServerLogReader,
)
from mps_exporter.mps.server_queries import reconcile
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonLifetime, DaemonState
from mps_exporter.mps.tool_commands import ServerReply
from mps_exporter.observations import DaemonFacts, LogsObservation, ProcessFacts

IsAlive = Callable[[int, float], bool | None]
"""(PID as the log prints it, a time at which it was alive) -> whether that process exists.
False also when its PID was reused; None if unknown, as in another PID namespace."""

_TIMELESS = frozenset(
    {KNOWN, CONTINUATION.name, UNRECOGNIZED}
    | {"ui_opened", "ui_command", "ui_closed", "ui_refused"}
)
"""Events that leave servers and queue unchanged: most lines of a control.log."""


class DaemonTracker:
    """Updates the state of one daemon."""

    def __init__(self, pipe_directory: str, quota: Quota = FULL) -> None:
        self.pipe_directory = pipe_directory
        self.state = DaemonState(quota)
        self._control = ControlLogReader(self.state)
        self._server = ServerLogReader(self.state)
        self._merger = LogMerger(self.state.readable)
        self._process: tuple[int, float, int] | None = None
        """The last known process of the daemon: PID, start time, PID in its own namespace."""
        self._pending_reply: (
            tuple[float, Collection[int] | None, tuple[ServerReply, ...]] | None
        ) = None
        self.foreign_pids: frozenset[int] = frozenset()
        """Own PIDs of the other daemons that write to the same logs, and of their servers."""
        self._foreign_servers: BoundedDict[int, None] = BoundedDict(policy.MAX_RECENT)

    def add_logs(self, observation: LogsObservation) -> None:
        """Add the new data of this daemon's logs; the rest of the observation is skipped.

        A readable log without a chunk had no new data when it was read.
        """
        merger, own_directory = self._merger, self.pipe_directory
        chunks = [chunk for chunk in observation.chunks if chunk.pipe_directory == own_directory]
        busy = {(chunk.log, chunk.server_name) for chunk in chunks}
        for log_state in observation.states:
            if log_state.pipe_directory == own_directory:
                self.state.readable[log_state.log] = log_state.readable
                if log_state.readable:
                    merger.mark_idle(log_state.log, observation.at, busy)
        for chunk in chunks:
            lost = 0 if chunk.history else chunk.lost_bytes
            self.state.counters.increment("mps_control_log_lost_bytes_total", lost, log=chunk.log)
            if chunk.history:
                self.state.count_from(chunk.at)
            merger.add_chunk(chunk)
        self.advance(observation.at)

    def advance(self, now: float) -> None:
        """Apply the lines that are released by now, and a due reply."""
        for entry in self._merger.pop_ready(now):
            if entry.event.name == LINES_LOST:  # dated by the read, so older lines follow
                self.state.lines_lost(entry.log, entry.at, certain=entry.event.values != (0,))
                continue
            if self._pending_reply is not None and entry.at > self._pending_reply[0]:
                self._apply_reply()  # in its place among the lines
            if not self._is_foreign(entry):
                self._apply(entry)
        complete_until = self._merger.complete_until
        if complete_until is not None:
            self.advance_to(complete_until)
        self._apply_reply_if_due(now)

    def _apply(self, entry: LogEntry) -> None:
        """Apply a line; if it is not counted, it only rebuilds the state."""
        state, log = self.state, entry.log
        when = Moment(entry.at, entry.counted, state.counters, state.incidents)
        when.increment("mps_control_log_lines_total", log=log)
        state.timeline.line_read(entry.at)
        if entry.event.name not in _TIMELESS:
            self.advance_to(entry.at)  # first the exits that are certain by then
        # Some daemons write both logs into one file: the component shows the log of a line.
        if entry.component == "Control" or (not entry.component and log == "control"):
            self._control.apply(entry, when)
        else:
            self._server.apply(entry, when)

    def advance_to(self, until: float) -> None:
        self._confirm_exits(until)
        self.state.advance_to(until)

    @property
    def silent_since(self) -> float | None:
        """Time since which the logs suggest a stuck daemon; None if they do not, or not yet.

        Only a query of the daemon proves that it is stuck.
        """
        since, complete = self.state.stuck_since, self._merger.complete_until
        if since is None or complete is None or complete < since + policy.SILENCE_SECONDS:
            return None
        return since

    def _is_foreign(self, entry: LogEntry) -> bool:
        """Return whether another daemon with this log directory, or its server, wrote the entry."""
        name, values = entry.event
        started = int(values[0]) if name == "state.servers.start" else None
        if entry.pid in self.foreign_pids:
            if started is not None:
                self._foreign_servers[started] = None
                self.state.servers.drop_foreign(started)
            return True
        if started is not None:
            self._foreign_servers.pop(started, None)
        return entry.pid in self._foreign_servers

    def observe(
        self,
        now: float,
        facts: DaemonFacts,
        processes: Mapping[int, ProcessFacts],
        requested: Collection[int],
    ) -> None:
        """Apply a scan of /proc: `processes` are those of the `requested` that exist, by PID."""
        alive, daemon = _liveness(now, facts, processes, frozenset(requested), self.state.daemon)
        if facts.process is not None:
            before, start = self._process, facts.process.start_time_seconds
            self._process = facts.process.pid, start, facts.process.own_pid
            if self._process != before and not self.state.readable["control"]:
                self.state.gpus.clear_ordinals(start)
        elif self._process is not None:
            # No process was found as this daemon: only the last PID shows whether it has exited.
            # The log may show a later daemon, for which no search was made yet.
            pid, start, own_pid = self._process
            found = processes.get(pid)
            exists = found is not None and found.start_time_seconds == start and not found.ended
            daemon = exists if self.state.daemon.pid in {None, own_pid} else None
        self.update_liveness(now, alive, daemon=daemon)

    def update_liveness(self, now: float, alive: IsAlive, *, daemon: bool | None = None) -> None:
        """Record which processes have exited and which exist; None means unknown."""
        state, lifetime = self.state, self.state.daemon
        if daemon and lifetime.ended_at is not None and not state.readable["control"]:
            lifetime = state.daemon = DaemonLifetime()  # another daemon started, unlogged
        lifetime.counted |= bool(daemon)
        if lifetime.ended_at is None:
            _update_missing_since(lifetime, now, daemon)
        for entry in state.queue:
            if entry.pid and not entry.dead:
                _update_missing_since(entry, now, alive(entry.pid, entry.since))
        for server in state.servers:
            _update_missing_since(server, now, alive(server.pid, server.started_at))
            server.note_missing_queued(alive)
            for client in server.clients:
                if client.pid:
                    _update_missing_since(client, now, alive(client.pid, client.connected_at))
        if not any(state.readable.values()):
            self.advance_to(now)

    def _confirm_exits(self, complete_until: float) -> None:
        """Apply the exits that are certain, given that the logs are read up to this time."""
        state, now = self.state, self.state.moment(complete_until)
        lifetime = state.daemon
        died_at = _confirmed_at(lifetime, complete_until)
        if lifetime.ended_at is None and died_at is not None:
            state.daemon_died(now._replace(at=died_at, counted=now.counted and lifetime.counted))
        for entry in state.queue:
            at = _confirmed_at(entry, complete_until)
            if at is not None and not entry.dead:
                entry.abandon(now._replace(at=at))
                entry.dead = True
        for server in state.servers:
            at = _confirmed_at(server, complete_until)
            if at is not None:
                self._confirm_server_exit(server, now._replace(at=at))
            else:
                _confirm_client_exits(server, now)
                server.detect_ghost(now)

    def _confirm_server_exit(self, server: TrackedServer, when: Moment) -> None:
        state = self.state
        if state.daemon.missing_since is not None and state.daemon.ended_at is None:
            return  # the daemon has exited, too, which explains it
        if state.readable["control"]:
            state.servers.mark_vanished(server)  # a line was lost, not recognized, or is late
        elif state.readable["server"]:
            state.judge_server_exit(server, when)
        else:
            state.servers.remove(server)

    def reconcile(
        self, now: float, at: float, listed: Collection[int] | None, replies: Iterable[ServerReply]
    ) -> None:
        """Apply the control tool's replies, as soon as the logs have been read up to the query.

        Without this delay, a server that the tool lists before the log line of its start is applied
        would count as older. The first reply of a recording may be later than `now`.
        """
        self._pending_reply = at, listed, tuple(replies)
        self._apply_reply_if_due(now)

    def _apply_reply_if_due(self, now: float) -> None:
        if self._pending_reply is None:
            return
        at, complete_until = self._pending_reply[0], self._merger.complete_until
        known = complete_until is not None and complete_until >= at
        no_readable_log = now >= at and not any(self.state.readable.values())
        if known or no_readable_log or now - at > policy.MAX_HOLD_SECONDS:
            self._apply_reply()

    def _apply_reply(self) -> None:
        pending, self._pending_reply = self._pending_reply, None
        if pending is not None:
            reconcile(self.state, *pending)


class _Process(Protocol):
    missing_since: float | None


def _update_missing_since(process: _Process, now: float, alive: bool | None) -> None:
    if alive is False:
        process.missing_since = min(process.missing_since or now, now)
    elif alive:
        process.missing_since = None


def _confirmed_at(
    process: _Process, complete_until: float, seconds: float = policy.EXIT_CONFIRM_SECONDS
) -> float | None:
    """Return the time at which a process exited, if that is certain by now."""
    at = process.missing_since
    return at if at is not None and complete_until >= at + seconds else None


def _confirm_client_exits(server: TrackedServer, now: Moment) -> None:
    logged = server.names_clients
    seconds = policy.LOST_LINE_SECONDS if logged else policy.EXIT_CONFIRM_SECONDS
    for client in server.clients:
        at = _confirmed_at(client, now.at, seconds)
        if at is not None:
            server.clients.confirm_exit(client, now._replace(at=at))


def _liveness(
    now: float,
    facts: DaemonFacts,
    processes: Mapping[int, ProcessFacts],
    requested: frozenset[int],
    known: DaemonLifetime,
) -> tuple[IsAlive, bool | None]:
    """Return a test whether a process exists, and whether the daemon in the log exists.

    Nothing is known of PIDs that are not the host's. If /proc shows a later start of the daemon
    than the log, the clock was set forward: processes look too young.
    """
    daemon = facts.process
    if daemon is None:
        # Without a process, only the lock shows whether a daemon runs.
        held = facts.lock_holder_pid is not None
        return (lambda _pid, _at: None), held if facts.lock_tested else None
    if len(daemon.namespace_pids) > 1:
        return (lambda _pid, _at: None), True

    children = {server.pid for server in facts.servers}
    slack = policy.CLOCK_TOLERANCE_SECONDS
    if known.started_at is not None:
        slack += max(0.0, daemon.start_time_seconds - known.started_at)

    def alive(pid: int, at: float) -> bool | None:
        # A scan from before this time may show an earlier process with this PID.
        if pid not in requested or now < at <= now + policy.CLOCK_JUMP_SECONDS:
            return None
        process = processes.get(pid)
        if process is None or process.ended:
            return False
        return pid in children or process.start_time_seconds <= at + slack

    if known.pid in {None, daemon.pid} or known.ended_at is not None:
        return alive, not daemon.ended
    # Possibly a restart whose log line is not applied yet.
    gone = known.missing_since or alive(known.pid, known.started_at or 0.0) is False
    return alive, not daemon.ended and not gone
