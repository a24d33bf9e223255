"""The ledger of one daemon: events in, who waits, who crashed and who was lost out.

    lines --apply--> books <--observe-- /proc: who is gone
                       ^---reconcile--- the control tool: who is there
                     view --> LedgerView

It reads no file and knows no clock: every moment comes from a line's stamp, so a log that is
replayed gives the same numbers as one that is followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from mps_exporter.mps import liveness
from mps_exporter.mps.control_log import ControlLogReader
from mps_exporter.mps.control_protocol import ServerReply
from mps_exporter.mps.log_merger import LogEntry
from mps_exporter.mps.reconcile import reconcile
from mps_exporter.mps.server_log import ServerLogReader
from mps_exporter.mps.servers import TrackedClient, TrackedServer
from mps_exporter.mps.state import DaemonState
from mps_exporter.mps.unfinished_work import Last
from mps_exporter.observations import DaemonFacts, LogName, ProcessFacts
from mps_exporter.snapshot import (
    ClientSession,
    ClientState,
    Incident,
    LedgerView,
    PossibleUnfinishedWork,
    ServerSession,
    Wait,
)


class Ledger:
    """What the logs of one daemon say."""

    def __init__(self, pipe_directory: str) -> None:
        self.pipe_directory = pipe_directory
        self._state = DaemonState()
        self._control = ControlLogReader(self._state)
        self._server = ServerLogReader(self._state)
        self._process_seen = False
        """The daemon's process has been seen."""

    def set_readable(self, log: LogName, readable: bool) -> None:
        """Say whether a log can be followed: what it would tell must then be told by others."""
        self._state.readable[log] = readable

    def count_from(self, at: float) -> None:
        """Say when the exporter began to look: running totals begin there. Only once."""
        state = self._state
        if state.counting_from_ms is None:
            state.counting_from_ms = round(at * 1000.0)

    def apply(self, entry: LogEntry) -> None:
        """Take in a line. Those that are not counted rebuild the state only."""
        state = self._state
        log = entry.log
        state.counters.counting = entry.counted
        state.counters.increment("mps_control_log_lines_total", log=log)
        state.readable[log] = True
        # Daemons that write both streams into one file are told apart by the component.
        if entry.component == "Control" or (not entry.component and log == "control"):
            self._control.apply(entry)
        else:
            self._server.apply(entry)

    def advance_to(self, until: float) -> None:
        """Say that everything that happened before this moment has been applied."""
        state = self._state
        state.advance_to(until)
        liveness.confirm_exits(state, until)

    def observe(
        self,
        now: float,
        facts: DaemonFacts,
        processes: Mapping[int, ProcessFacts],
        requested: Collection[int],
    ) -> None:
        """Take in what /proc shows.

        Args:
            now: When it was looked at.
            facts: The daemon.
            processes: Those of the processes asked for that are there, by the host's PID.
            requested: Which were asked for; pids() says which are of interest.
        """
        started_at = self._state.daemon.started_at
        alive, daemon = liveness.liveness_from_proc(
            facts, processes, frozenset(requested), started_at
        )
        if facts.process is not None:
            self._process_seen = True
        elif self._process_seen:
            daemon = False  # a process that was there is not any more
        self.update_liveness(now, alive, daemon=daemon)

    def update_liveness(
        self, now: float, alive: liveness.IsAlive, *, daemon: bool | None = None
    ) -> None:
        """Take in who is alive.

        Args:
            now: When it was looked at.
            alive: (PID as the log prints it, a moment at which it was alive) -> still there?
                None where that cannot be told, as for a daemon in another PID namespace.
            daemon: Whether the control daemon's process is there; None: unknown.
        """
        liveness.note_missing(self._state, now, alive, daemon)
        if not any(self._state.readable.values()):
            self.advance_to(now)

    def drop_foreign_server(self, server_pid: int) -> None:
        """A server that was known from its own words only is another daemon's."""
        server = self._state.servers.get(server_pid)
        if server is not None and server.start_unknown:
            del self._state.servers[server_pid]

    def mark_absent(self, at: float) -> None:
        """Take in that no process of the daemon is seen, and its socket answers nobody."""
        self.update_liveness(at, lambda _pid, _at: None, daemon=False)

    def reconcile(
        self, at: float, listed: Collection[int] | None, replies: Iterable[ServerReply]
    ) -> None:
        """Take in what the control tool said just now: fill in what the log does not explain.

        Args:
            at: When it was asked.
            listed: The servers that the daemon named; None: it did not say.
            replies: What each of its servers said.
        """
        reconcile(self._state, at, listed, replies)

    @property
    def silent_since(self) -> float | None:
        """When the daemon began something that it normally goes on with at once, and did not."""
        daemon = self._state.daemon
        if daemon.quit_requested_at is not None or daemon.ended_at is not None:
            return None
        return daemon.sent_at if daemon.silent_since is None else daemon.silent_since

    def incidents_since(self, seen: int) -> tuple[tuple[Incident, ...], int]:
        """Give the incidents after the first `seen` ones, and how many there have been by now."""
        return self._state.incidents.since(seen)

    def watched_pids(self) -> frozenset[int]:
        """Processes whose life or death matters: queued, serving, and connected ones."""
        state = self._state
        pids = {entry.pid for entry in state.queue}
        for server in state.servers.values():
            pids.add(server.pid)
            pids.update(client.pid for client in server.clients.values())
            if not server.ever_connected:
                pids.update(server.queued_pids)
        return frozenset(pid for pid in pids if pid)

    def watched(self) -> list[int]:
        """Processes whose end must be seen when it happens: no line of a log tells of it.

        Servers, those for whom one was made and who have not come yet, and the queue.
        """
        state = self._state
        pids = list(state.servers)
        for server in state.servers.values():
            if not server.ever_connected:
                pids += [pid for pid, dead in server.queued_pids.items() if not dead]
        pids += [entry.pid for entry in state.queue if not entry.dead]
        return pids

    def view(self, now: float, *, clients: bool = True) -> LedgerView:
        """Give all that is known, or all but the clients by name. Changes nothing.

        Running totals are as of the last settle(): up to then every line has been read, so they
        never have to go back.
        """
        state = self._state
        daemon = state.daemon
        waits = tuple(
            Wait(entry.pid, entry.uid, entry.since, entry.behind_uid, entry.dead)
            for entry in state.queue
            if entry.blocked
        )
        waits += tuple(
            Wait(client.pid, client.wait.uid, client.wait.since, server.uid)
            for server in state.servers.values()
            if server.ghost
            for client in server.clients.values()
            if client.wait is not None
        )
        show_backoff = bool(waits) or daemon.quit_requested_at is not None
        quit_in_order = daemon.ended_at is not None and not daemon.died
        return LedgerView(
            at=now,
            daemon_started_at=None if quit_in_order else daemon.started_at,
            daemon_ended_at=daemon.ended_at,
            daemon_died=daemon.died,
            binary_version=daemon.binary_version,
            quit_requested_at=daemon.quit_requested_at,
            servers=tuple(
                _server_session(server, clients=clients) for server in state.servers.values()
            ),
            waits=waits,
            configured_at=daemon.configured_at,
            daemon_served_at=daemon.served_at,
            handover_backoff_seconds=daemon.backoff_seconds if show_backoff else None,
            devices=dict(state.ordinals) or _only_device(state),
            counters=state.counters.snapshot(),
            incidents=state.incidents.snapshot(),
        )


def _only_device(state: DaemonState) -> dict[int, str]:
    """Where one GPU is named and servers use device 0 only, they are the same."""
    ordinals = {device for server in state.servers.values() for device in server.devices}
    return {0: next(iter(state.gpu_names))} if len(state.gpu_names) == 1 and ordinals == {0} else {}


def _server_session(server: TrackedServer, *, clients: bool) -> ServerSession:
    faults = [fault.at for fault in server.faults]
    state = "FAULT" if faults else "ACTIVE"
    if server.ready_at is None and not server.ever_connected:
        state = "INITIALIZING"
    return ServerSession(
        pid=server.pid,
        uid=server.uid,
        started_at=server.started_at,
        ready_at=server.ready_at,
        state=server.reported_state or state,
        fault_since=min(faults, default=None),
        active_thread_ratio=server.thread_ratio,
        pinned_memory_limit_bytes=dict(server.memory_limits),
        devices=dict(server.devices),
        client_limit=server.client_limit,
        ghost=server.ghost and server.missing_since is None,
        clients=tuple(
            _client_session(server, client) for client in server.clients.values() if clients
        ),
        clients_count=server.client_count,
        start_unknown=server.start_unknown,
        possible_unfinished_work=_possible_unfinished_work(server.last),
    )


def _possible_unfinished_work(lasts: Iterable[Last]) -> PossibleUnfinishedWork | None:
    left = next((last.endings[0] for last in lasts if last.suspicious), None)
    if left is None or left.ended_at is None:
        return None
    return PossibleUnfinishedWork(
        pid=left.pid,
        uid=left.uid,
        ended_at=left.ended_at,
        seconds=round(left.seconds(left.ended_at), 3),
        gpu_uuids=tuple(sorted({gpu for _, gpu in left.contexts if gpu})),
    )


def _client_session(server: TrackedServer, client: TrackedClient) -> ClientSession:
    contexts: dict[str, int] = {}
    for uuid in client.contexts.values():
        contexts[uuid] = contexts.get(uuid, 0) + 1
    state, since = _client_state(client)
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


def _client_state(client: TrackedClient) -> tuple[ClientState | None, float | None]:
    """What a client is doing, and since when; None where no line of server.log tells."""
    if client.torn_down_at is not None:
        return "torn_down", client.torn_down_at
    if client.creating:
        return "creating_context", min(client.creating.values())
    if client.inferred and not client.contexts:
        return None, None
    if client.had_context:
        return "active", client.active_since
    return (None, None) if client.from_control_tool else ("connecting", client.connected_at)
