"""The ledger of one daemon: log lines in; waits, crashes and losses out.

    log lines --apply--> state <--observe-- /proc: which processes are gone
                           ^----reconcile-- the control tool: which servers and clients there are
                         view --> LedgerView

It reads no file and no clock: every moment comes from a line's stamp, so a log that is replayed
gives the same numbers as one that is followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from mps_exporter.mps import process_exits, watched_processes
from mps_exporter.mps.clients import TrackedClient
from mps_exporter.mps.control_log import ControlLogReader
from mps_exporter.mps.control_protocol import ServerReply
from mps_exporter.mps.fault_evidence import KernelFault
from mps_exporter.mps.log_lines import KNOWN
from mps_exporter.mps.log_merger import LogEntry
from mps_exporter.mps.moment import Moment
from mps_exporter.mps.reconcile import reconcile
from mps_exporter.mps.server_log import ServerLogReader
from mps_exporter.mps.servers import TrackedServer
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.tracking_quota import FULL, Quota
from mps_exporter.observations import AddressRanges, DaemonFacts, LogName, ProcessFacts
from mps_exporter.snapshot import (
    ClientSession,
    ClientState,
    Handover,
    Incident,
    LedgerView,
    ServerSession,
    Wait,
)

_new = tuple.__new__  # a NamedTuple's own constructor takes twice as long


_TIMELESS = frozenset(
    {KNOWN, "continuation", "unrecognized", "ui_opened", "ui_command", "ui_closed", "ui_refused"}
)
"""Events that change neither servers nor the queue: most lines of a control.log."""


class Ledger:
    """The state of one daemon, rebuilt from its logs."""

    def __init__(self, pipe_directory: str, quota: Quota = FULL) -> None:
        self.pipe_directory = pipe_directory
        self._state = DaemonState(quota)
        self._control = ControlLogReader(self._state)
        self._server = ServerLogReader(self._state)
        self._process: tuple[int, float] | None = None
        """The daemon's process as it was found last: PID, start time."""

    def set_readable(self, log: LogName, readable: bool) -> None:
        """Note whether a log can be read; without it, other sources replace its lines."""
        self._state.readable[log] = readable

    def note_lost_lines(self, at: float) -> None:
        """Lines of server.log may have been lost at this moment."""
        self._state.server_log_lost_at = at

    def count_from(self, at: float) -> None:
        """The exporter started at this moment: what happened before is not counted."""
        self._state.count_from(at)

    def apply(self, entry: LogEntry) -> None:
        """Apply a line. One that is not counted only rebuilds the state."""
        state, log = self._state, entry.log
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
        state = self._state
        state.advance_to(until)
        process_exits.confirm_exits(state, until)

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
            requested: Which were looked for; see pids_to_look_up().
        """
        started_at = self._state.daemon.started_at
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
        process_exits.note_missing(self._state, now, alive, daemon)
        if not any(self._state.readable.values()):
            self.advance_to(now)

    def observe_kernel(
        self, *, readable: bool, faults: Sequence[KernelFault], ranges: Iterable[AddressRanges]
    ) -> None:
        """Apply what shows who caused a fault.

        Args:
            readable: Whether the kernel log is being read.
            faults: The last faults in the kernel log.
            ranges: Memory of this daemon's clients that was read since the last call.
        """
        evidence = self._state.evidence
        evidence.readable, evidence.faults = readable, faults
        for found in ranges:
            evidence.add_ranges(found)

    def clients_to_map(self) -> list[int]:
        """Return the clients whose address ranges are to be read now, each once.

        A context reserves its range when it is made. The memory of a running client that caused a
        fault may have grown since.
        """
        found = []
        for server in self._state.servers:
            again = server.faults.request_memory()
            for client in server.clients:
                if again or client.activations > client.ranges_requested:
                    client.ranges_requested = client.activations
                    found.append(client.pid)
        return [pid for pid in found if pid]

    def drop_foreign_server(self, server_pid: int) -> None:
        """A server that only its own lines show belongs to another daemon."""
        self._state.servers.drop_foreign(server_pid)

    def mark_absent(self, at: float) -> None:
        """No process of the daemon was found, and nothing holds its lock."""
        self.update_liveness(at, lambda _pid, _at: None, daemon=False)

    def reconcile(
        self, at: float, listed: Collection[int] | None, replies: Iterable[ServerReply]
    ) -> None:
        """Apply the control tool's replies: see reconcile.reconcile."""
        reconcile(self._state, at, listed, replies)

    @property
    def silent_since(self) -> float | None:
        """When the daemon wrote a line that another one follows at once, and none has followed."""
        daemon = self._state.daemon
        if daemon.quit_requested_at is not None or daemon.ended_at is not None:
            return None
        return daemon.sent_at if daemon.silent_since is None else daemon.silent_since

    def incidents_since(self, seen: int) -> tuple[tuple[Incident, ...], int]:
        """Return the incidents after the first `seen` ones, and how many there have been by now."""
        return self._state.incidents.since(seen)

    def pids_to_look_up(self) -> frozenset[int]:
        """Return the processes that /proc is searched for."""
        return watched_processes.pids_to_look_up(self._state)

    def pids_to_watch(self) -> list[int]:
        """Return the processes whose exit must be seen when it happens."""
        return watched_processes.logged_pids_to_watch(self._state)

    def view(self, now: float, *, brief: bool = False) -> LedgerView:
        """Return what is known, or in brief: without clients, counters and history.

        Changes nothing.

        Running totals are as of the last advance_to(): every line up to then has been read, so
        they never decrease.
        """
        state = self._state
        daemon = state.daemon
        waits = [
            Wait(entry.pid, entry.uid, entry.since, entry.behind_uid, entry.dead)
            for entry in state.queue
            if entry.blocked
        ]
        for server in state.servers:
            waits += server.ghost_waits()
        show_backoff = bool(waits) or daemon.quit_requested_at is not None
        timeline_since, timeline = (None, ()) if brief else state.timeline.snapshot(now)
        return LedgerView(
            at=now,
            daemon_ended_at=daemon.ended_at,
            daemon_died=daemon.died,
            binary_version=daemon.binary_version,
            quit_requested_at=daemon.quit_requested_at,
            servers=tuple(_server_session(server, clients=not brief) for server in state.servers),
            waits=tuple(waits),
            configured_at=daemon.configured_at,
            server_log_lost_at=self._state.server_log_lost_at,
            daemon_served_at=daemon.served_at,
            handover=_handover(state),
            handover_backoff_seconds=daemon.backoff_seconds if show_backoff else None,
            devices=state.gpus.by_ordinal({d for one in state.servers for d in one.devices}),
            counters={} if brief else state.counters.snapshot(),
            incidents=() if brief else state.incidents.snapshot(),
            timeline=timeline,
            timeline_since=timeline_since,
        )


def _server_session(server: TrackedServer, *, clients: bool) -> ServerSession:
    state = "FAULT" if server.faults else "ACTIVE"
    if server.ready_at is None and not server.clients.ever_connected:
        state = "INITIALIZING"
    return ServerSession(
        pid=server.pid,
        uid=server.uid,
        started_at=server.started_at,
        ready_at=server.ready_at,
        state=server.reported_state or state,
        active_thread_ratio=server.thread_ratio,
        pinned_memory_limit_bytes=dict(server.memory_limits),
        devices=dict(server.devices),
        client_limit=server.client_limit,
        ghost=_ghost(server),
        clients=tuple(_client_session(server, client) for client in server.clients if clients),
        clients_count=server.clients.count,
        start_unknown=server.start_unknown,
        has_log=server.has_log,
        unfollowed_clients=server.clients.unfollowed,
        possible_unfinished_work=server.faults.endings.possible_unfinished_work,
    )


def _handover(state: DaemonState) -> Handover | None:
    last, log_at = state.daemon.handover, state.server_log_at
    if last is None or log_at is None:
        return last
    return replace(last, answered=log_at >= last.at)


def _ghost(server: TrackedServer) -> bool | None:
    """Whether it is a ghost; None: without server.log that shows only while no client connects."""
    if server.ghost:
        return server.missing_since is None
    return False if server.readable["server"] else None


def _client_session(server: TrackedServer, client: TrackedClient) -> ClientSession:
    contexts: dict[str, int] = {}
    for uuid in client.contexts.values():
        contexts[uuid] = contexts.get(uuid, 0) + 1
    state, since = _state_of_client(client)
    return ClientSession(
        pid=client.pid,
        server_pid=server.pid,
        uid=client.uid,
        connected_at=client.connected_at,
        state=state,
        state_since=since,
        contexts=contexts,
        active_thread_ratio=client.thread_ratio,
        pinned_memory_limit_bytes=client.memory_limits,
    )


def _state_of_client(client: TrackedClient) -> tuple[ClientState | None, float | None]:
    """Return what a client is doing, and since when; None where server.log does not say."""
    if client.torn_down_at is not None:
        return "torn_down", client.torn_down_at
    if client.creating:
        return "creating_context", min(client.creating.values())
    if client.inferred and not client.contexts:
        return None, None
    if client.had_context:
        return "active", client.active_since
    return (None, None) if client.from_control_tool else ("connecting", client.connected_at)
