"""Follows one daemon: log lines in; waits, crashes and losses out.

    log lines --add_logs--> state <--observe-- /proc: which processes are gone
                              ^---reconcile--- the control tool: servers and clients

It reads no file and no clock: every moment comes from a line's stamp, so a log that is replayed
gives the same numbers as one that is followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from mps_exporter.mps import process_exits
from mps_exporter.mps.control_log import ControlLogReader
from mps_exporter.mps.control_protocol import ServerReply
from mps_exporter.mps.fault_evidence import KernelFault
from mps_exporter.mps.log_lines import KNOWN
from mps_exporter.mps.log_merger import LogEntry, LogMerger
from mps_exporter.mps.record import FULL, Moment, Quota
from mps_exporter.mps.server_log import ServerLogReader
from mps_exporter.mps.server_queries import reconcile
from mps_exporter.mps.state import DaemonState
from mps_exporter.observations import AddressRanges, DaemonFacts, LogsObservation, ProcessFacts

RECONCILE_WAIT_SECONDS = 5.0
"""How long a reply of the control tool waits until the logs are read up to its time."""

SILENCE_SECONDS = 0.25
"""A daemon continues what it began within 0.1 s (driver 580), or it is stuck."""

MAX_FOREIGN_SERVERS = 64

_TIMELESS = frozenset(
    {KNOWN, "continuation", "unrecognized", "ui_opened", "ui_command", "ui_closed", "ui_refused"}
)
"""Events that change neither servers nor the queue: most lines of a control.log."""

_new = tuple.__new__  # a NamedTuple's own constructor takes twice as long


class DaemonTracker:
    """Keeps the state of one daemon up to date."""

    def __init__(self, pipe_directory: str, quota: Quota = FULL) -> None:
        self.pipe_directory = pipe_directory
        self.state = DaemonState(quota)
        self._control = ControlLogReader(self.state)
        self._server = ServerLogReader(self.state)
        self._merger = LogMerger(pipe_directory)
        self._process: tuple[int, float] | None = None
        """The daemon's process as it was found last: PID, start time."""
        self._pending_reconcile: (
            tuple[float, Collection[int] | None, tuple[ServerReply, ...]] | None
        ) = None
        self.foreign_pids: frozenset[int] = frozenset()
        """Other daemons that write to the same logs, and their servers, as these number them."""
        self._foreign_servers: dict[int, None] = {}

    # ------------------------------------------------------------------ logs

    def add_logs(self, observation: LogsObservation) -> None:
        """Add what this daemon's logs gained; the rest of the observation is skipped.

        A readable log without new bytes had gained nothing when it was read.
        """
        merger, daemon_state = self._merger, self.state
        own_directory = self.pipe_directory
        chunks = [chunk for chunk in observation.chunks if chunk.pipe_directory == own_directory]
        busy = {chunk.log for chunk in chunks if chunk.log == "control"}
        busy_servers = {chunk.server_name for chunk in chunks if chunk.log == "server"}
        for state in observation.states:
            if state.pipe_directory == own_directory:
                merger.set_readable(state.log, state.readable)
                daemon_state.readable[state.log] = state.readable
                if state.readable and state.log not in busy:
                    merger.mark_idle(state.log, observation.at, busy_servers)
        for chunk in chunks:
            if chunk.history:
                daemon_state.count_from(chunk.at)
            elif chunk.log == "server" and (chunk.restarted or chunk.lost_bytes):
                daemon_state.server_log_lost_at = chunk.at
            merger.add_chunk(chunk)
        self.advance(observation.at)

    def advance(self, now: float) -> None:
        """Apply the lines whose place in the order is certain by now."""
        for entry in self._merger.pop_ready(now):
            if self._pending_reconcile is not None and entry.at > self._pending_reconcile[0]:
                self._apply_reconcile_now()  # in its place among the lines
            if not self._is_foreign(entry):
                self.apply(entry)
        complete_until = self._merger.complete_until
        if complete_until is not None:
            self.advance_to(complete_until)
        self._apply_pending_reconcile(now)

    def apply(self, entry: LogEntry) -> None:
        """Apply a line. One that is not counted only rebuilds the state."""
        state, log = self.state, entry.log
        state.counters.increment("mps_control_log_lines_total", counted=entry.counted, log=log)
        when = _new(Moment, (entry.at, entry.counted, state.counters, state.incidents))
        state.readable[log] = True
        state.timeline.line_read(entry.at)
        if entry.event.name not in _TIMELESS:
            state.advance_to(entry.at)
        # Some daemons write both logs into one file: the component shows which one a line is of.
        if entry.component == "Control" or (not entry.component and log == "control"):
            self._control.apply(entry, when)
        else:
            self._server.apply(entry, when)

    def advance_to(self, until: float) -> None:
        """Everything that happened before this moment has been applied."""
        self.state.advance_to(until)
        process_exits.confirm_exits(self.state, until)

    @property
    def silent_since(self) -> float | None:
        """Since when the daemon seems stuck, by its logs; None: it does not, or it is too early.

        It is no proof: only a query of the daemon is.
        """
        since, complete_until = self.state.daemon.stuck_since, self._merger.complete_until
        if since is None or complete_until is None or complete_until < since + SILENCE_SECONDS:
            return None
        return since

    def _is_foreign(self, entry: LogEntry) -> bool:
        """Whether another daemon that shares the log directory wrote this line, or its server."""
        name, values = entry.event
        started = int(values[0]) if name == "server_starting" else None
        if entry.pid in self.foreign_pids:
            if started is not None:
                self._foreign_servers[started] = None
                self.state.servers.drop_foreign(started)
                while len(self._foreign_servers) > MAX_FOREIGN_SERVERS:
                    del self._foreign_servers[next(iter(self._foreign_servers))]
            return True
        if started is not None:
            self._foreign_servers.pop(started, None)
        return entry.pid in self._foreign_servers

    # ------------------------------------------------------------------ /proc and the kernel

    def observe(
        self,
        now: float,
        facts: DaemonFacts,
        processes: Mapping[int, ProcessFacts],
        requested: Collection[int],
    ) -> None:
        """Apply what /proc shows.

        Args:
            now: When it was read.
            facts: The daemon.
            processes: Those of the requested processes that are there, by the host's PID.
            requested: Which were looked for; see DaemonState.pids_to_look_up().
        """
        started_at = self.state.daemon.started_at
        alive, daemon = process_exits.liveness_from_proc(
            facts, processes, frozenset(requested), started_at
        )
        if facts.process is not None:
            self._process = facts.process.pid, facts.process.start_time_seconds
        elif self._process is not None:
            # It was not found as a daemon. Whether it has exited, its PID tells alone.
            pid, start = self._process
            found = processes.get(pid)
            daemon = found is not None and found.start_time_seconds == start and not found.ended
        self.update_liveness(now, alive, daemon=daemon)

    def update_liveness(
        self, now: float, alive: process_exits.IsAlive, *, daemon: bool | None = None
    ) -> None:
        """Apply which processes are alive.

        Args:
            now: When they were looked for.
            alive: (PID as the log prints it, a moment at which it was alive) -> still there?
                None where that is not known, as for a daemon in another PID namespace.
            daemon: Whether the control daemon's process is there; None: unknown.
        """
        process_exits.note_missing(self.state, now, alive, daemon)
        if not any(self.state.readable.values()):
            self.advance_to(now)

    def mark_absent(self, at: float) -> None:
        """No process of the daemon was found, and nothing holds its lock."""
        self.update_liveness(at, lambda _pid, _at: None, daemon=False)

    def observe_kernel(
        self, *, readable: bool, faults: Sequence[KernelFault], ranges: Iterable[AddressRanges]
    ) -> None:
        """Apply what shows who caused a fault.

        Args:
            readable: Whether the kernel log is being read.
            faults: The last faults in the kernel log.
            ranges: Memory of this daemon's clients that was read since the last call.
        """
        evidence = self.state.evidence
        evidence.readable, evidence.faults = readable, faults
        for found in ranges:
            evidence.add_ranges(found)

    # ------------------------------------------------------------------ the control tool

    def reconcile(
        self, now: float, at: float, listed: Collection[int] | None, replies: Iterable[ServerReply]
    ) -> None:
        """Apply the control tool's replies, as soon as the logs have been read up to then.

        A server that the tool lists before the log line of its start is applied would be taken for
        an older one; so the reply waits. See server_queries.reconcile.

        Args:
            now: Unix time. A recording may contain its first reply before its time.
            at: When the daemon was queried.
            listed: The servers that the daemon named; None: it did not say.
            replies: What it replied about each of its servers.
        """
        self._pending_reconcile = at, listed, tuple(replies)
        self._apply_pending_reconcile(now)

    def _apply_pending_reconcile(self, now: float) -> None:
        if self._pending_reconcile is None:
            return
        at = self._pending_reconcile[0]
        complete_until = self._merger.complete_until
        known = complete_until is not None and complete_until >= at
        no_readable_log = now >= at and not self._merger.any_readable
        if known or no_readable_log or now - at > RECONCILE_WAIT_SECONDS:
            self._apply_reconcile_now()

    def _apply_reconcile_now(self) -> None:
        if self._pending_reconcile is not None:
            at, listed, replies = self._pending_reconcile
            self._pending_reconcile = None
            reconcile(self.state, at, listed, replies)
